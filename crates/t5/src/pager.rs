//! Weights that are not in this process until they are asked for.

use std::fmt::Debug;

use crate::error::Result;

/// Brings weights that are somewhere else, such as in other processes, while they are worked on.
///
/// Passes ask for a block's weights before they use them, in an order that depends on the model and the shapes alone, and let go
/// of them after it.
pub trait Pager<T>: Debug {
    /// Begins to bring the values of parameter `index`, which will be asked for soon. Nobody looks at them before that.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn fetch(&self, index: usize, weight: &T) -> Result<()>;

    /// The values of parameter `index` that are fetched may be waited for a while, because something is computed meanwhile.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn copy(&self, _index: usize, _weight: &T) -> Result<()> {
        Ok(())
    }

    /// The same, if nobody waits for it: something else is going to be computed at once.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn copy_by_itself(&self, _index: usize, _weight: &T) -> Result<()> {
        Ok(())
    }

    /// Begins to bring the values of parameter `index`, which will be changed soon, from beside a device. The change of another one goes on
    /// meanwhile.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn fetch_to_change(&self, _index: usize, _weight: &T) -> Result<()> {
        Ok(())
    }

    /// Makes the values of parameter `index` be here. Nothing is done where they are, or always are.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn page_in(&self, index: usize, weight: &T) -> Result<()>;

    /// Parameter `index` is asked for soon: what takes time and no memory here may begin.
    fn read_ahead(&self, _index: usize, _weight: &T) {}

    /// The values of parameter `index` are not needed for a while.
    ///
    /// # Errors
    /// [`crate::Error::Elsewhere`].
    fn page_out(&self, index: usize, weight: &T) -> Result<()>;
}
