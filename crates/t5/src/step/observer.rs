//! The trainer, as a step sees it.

use std::ops::Range;

use t5_ops::LossSums;

use crate::error::Error;

/// The shards that a process has of an optimizer batch, by number, each with its micro-batches.
pub type OwnShards = Vec<(usize, Range<usize>)>;

/// The trainer, as a step sees it. `E` is the caller's error. By default nothing interrupts the step, and the update is made.
pub trait Observer<T, E> {
    /// Whether to end the step. Called before every block of every micro-batch; where micro-batches are recorded, only before each pass
    /// and the loss.
    fn interrupted(&mut self) -> bool {
        false
    }

    /// The shards that this process has of an optimizer batch, each with its micro-batches, where gradients are sums over several shards.
    /// Every gradient is then handed to [`Observer::begin_sum`] first. Empty: a gradient is the sum of all contributions.
    fn shards(&self) -> OwnShards {
        Vec::new()
    }

    /// Whether the sum of each shard is complete before it is added to others. True for every process wherever a batch has more shards than
    /// one process computes, even if this process has one shard. So the order of sums is the same for any number of processes.
    fn closes_shards(&self) -> bool {
        self.shards().len() > 1
    }

    /// The most micro-batches that any process has of this optimizer batch, where all of them have to ask for weights together.
    fn max_micro_batches(&self) -> usize {
        0
    }

    /// A shard is complete, with these sums of token losses. Called where there are several shards.
    fn close(&mut self, losses: LossSums) {
        let _ = losses;
    }

    /// Whether sums take so long that it pays to compute meanwhile. Then sums begin as early as possible, and the events leave them time.
    fn overlaps(&self) -> bool {
        false
    }

    /// Begins to sum the gradient of parameter `index`. `parts` are this process's sums, in the order of the shards. The step does not
    /// look at them until [`Observer::end_sum`]. Every process calls this for every trained parameter, in the same order, and again where
    /// a gradient is computed again.
    ///
    /// # Errors
    /// The caller's; the step ends with them.
    fn begin_sum(&mut self, index: usize, parts: &[T]) -> Result<(), E> {
        let _ = (index, parts);
        Ok(())
    }

    /// Ends a sum: from here on the first of its parts is the gradient.
    ///
    /// # Errors
    /// The caller's; the step ends with them.
    fn end_sum(&mut self, index: usize) -> Result<(), E> {
        let _ = index;
        Ok(())
    }

    /// Whether this process measures and applies the gradient of a parameter. A gradient that it does not hold is dropped when it was
    /// summed, and the parameter is received.
    fn holds(&self, index: usize) -> bool {
        let _ = index;
        true
    }

    /// Measures the complete gradient of parameter `index`, before the update changes anything. Called once for every held gradient.
    ///
    /// # Errors
    /// The caller's; the step ends with them.
    fn measure(&mut self, index: usize, gradient: &T) -> Result<(), E> {
        let _ = (index, gradient);
        Ok(())
    }

    /// Whether the update is made. Called once, when every gradient was measured; `losses` are the sums of all token losses.
    ///
    /// # Errors
    /// The caller's.
    fn decide(&mut self, losses: LossSums) -> Result<bool, E> {
        let _ = losses;
        Ok(true)
    }

    /// Applies the gradient of parameter `index`, which was measured: now the parameter may change. Called once for every held gradient.
    ///
    /// # Errors
    /// The caller's. Some parameters are changed then, and others not.
    fn apply(&mut self, index: usize, gradient: &T) -> Result<(), E> {
        let _ = (index, gradient);
        Ok(())
    }

    /// All gradients of an event have been handed over to be measured, or to be applied. Until then they do not change, so an observer may
    /// keep them and work on all of them together.
    ///
    /// # Errors
    /// The caller's. Some parameters may be changed then, and others not.
    fn handed_over(&mut self) -> Result<(), E> {
        Ok(())
    }

    /// Called in place of [`Observer::apply`] where another process holds the gradient. All processes are at this parameter then.
    ///
    /// # Errors
    /// The caller's. Some parameters are changed then, and others not.
    fn receive(&mut self, index: usize) -> Result<(), E> {
        let _ = index;
        Ok(())
    }
}

/// An observer of passes that have no update. It can only interrupt them.
pub(crate) struct Interrupts<'a>(pub &'a dyn Fn() -> bool);

impl<T> Observer<T, Error> for Interrupts<'_> {
    fn interrupted(&mut self) -> bool {
        (self.0)()
    }
}
