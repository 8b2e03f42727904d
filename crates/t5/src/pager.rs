//! Weights that this process does not hold until it asks for them.

use std::fmt::Debug;

use crate::error::Result;

/// Fetches weights that lie elsewhere, such as in other processes, for as long as they are in use.
///
/// Passes ask for a block's weights before they use them, and release them afterwards. The order depends on the model and the shapes
/// alone.
pub trait Pager<T>: Debug {
    /// Prefetches the values of parameter `index`, which will be asked for soon. They are not read before that.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn prefetch(&self, index: usize, weight: &T) -> Result<()>;

    /// Continues to fetch parameter `index`. This may wait for a while, because something is computed meanwhile.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn copy(&self, _index: usize, _weight: &T) -> Result<()> {
        Ok(())
    }

    /// Continues to fetch parameter `index` as far as possible without waiting: something else is going to be computed at once.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn copy_nonblocking(&self, _index: usize, _weight: &T) -> Result<()> {
        Ok(())
    }

    /// Begins to copy the values of parameter `index`, which will be changed soon, to the device. Another parameter is changed
    /// meanwhile.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn prefetch_for_update(&self, _index: usize, _weight: &T) -> Result<()> {
        Ok(())
    }

    /// Makes the values of parameter `index` available. Does nothing if they are, or always are.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn page_in(&self, index: usize, weight: &T) -> Result<()>;

    /// Parameter `index` will be asked for soon: work that takes time but no memory here may begin.
    fn read_ahead(&self, _index: usize, _weight: &T) {}

    /// Releases the values of parameter `index`, which are not needed for a while.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn page_out(&self, index: usize, weight: &T) -> Result<()>;

    /// After an aborted pass: frees the values of parameter `index`, and the memory of a copy that is not complete. A pager that needs other
    /// processes to agree does nothing.
    ///
    /// # Errors
    /// Those of [`Pager::page_out`].
    fn release(&self, _index: usize, _weight: &T) -> Result<()> {
        Ok(())
    }
}
