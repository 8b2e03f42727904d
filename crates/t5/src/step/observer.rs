//! Whoever trains, as a step sees it.

use std::ops::Range;

use crate::error::Error;

/// The shards that a process has of an optimizer batch, by number, each with its micro-batches.
pub type OwnShards = Vec<(usize, Range<usize>)>;

/// Whoever trains, as a step sees it. `E` is the caller's error. What an observer does not say it leaves as it is: no
/// interruption, and the update is made.
pub trait Observer<T, E> {
    /// Asked before every block of every micro-batch; where micro-batches are recorded, only before each pass and the loss. `true` ends the
    /// step.
    fn interrupted(&mut self) -> bool {
        false
    }

    /// The shards that this process has of an optimizer batch, each with its micro-batches, where gradients are sums over several:
    /// then every gradient is handed to [`Observer::begin_sum`] before it is anything else. Empty: a gradient is the sum of what was added.
    fn shards(&self) -> OwnShards {
        Vec::new()
    }

    /// Whether the sum of each shard is complete before it is added to others. Wherever a batch has more shards than one process computes,
    /// also by a process that has one: so the order of sums is the same for any number of processes.
    fn closes_shards(&self) -> bool {
        self.shards().len() > 1
    }

    /// The most micro-batches that any process has of this optimizer batch, where all of them have to ask for weights together.
    fn most_micro_batches(&self) -> usize {
        0
    }

    /// A shard is complete, with this sum of token losses. Called where there are several.
    fn close(&mut self, loss_sum: f64) {
        let _ = loss_sum;
    }

    /// Whether sums take a while that is worth computing in: then they begin as soon as they can, and the list of events leaves them time.
    fn overlaps(&self) -> bool {
        false
    }

    /// The sums of this process that the gradient of parameter `index` consists of, in the order of the shards, which nobody looks at until
    /// [`Observer::end_sum`]. Called for every trained parameter, in the same order by every process; once more where a gradient is
    /// computed once more.
    ///
    /// # Errors
    /// The caller's; the step ends with them.
    fn begin_sum(&mut self, index: usize, parts: &[T]) -> Result<(), E> {
        let _ = (index, parts);
        Ok(())
    }

    /// From here on the first of these sums is the gradient.
    ///
    /// # Errors
    /// The caller's; the step ends with them.
    fn end_sum(&mut self, index: usize) -> Result<(), E> {
        let _ = index;
        Ok(())
    }

    /// Whether this process measures and applies the gradient of a parameter. One that it does not hold is dropped when it is
    /// summed, and its parameter is received.
    fn holds(&self, index: usize) -> bool {
        let _ = index;
        true
    }

    /// The complete gradient of parameter `index`, which has not begun to change. Called once for every gradient that is held.
    ///
    /// # Errors
    /// The caller's; the step ends with them.
    fn measure(&mut self, index: usize, gradient: &T) -> Result<(), E> {
        let _ = (index, gradient);
        Ok(())
    }

    /// Whether the update is made. Called once, when every gradient was measured; `loss_sum` is the sum of all token losses.
    ///
    /// # Errors
    /// The caller's.
    fn decide(&mut self, loss_sum: f64) -> Result<bool, E> {
        let _ = loss_sum;
        Ok(true)
    }

    /// The gradient of parameter `index` once more: now the parameter may change. Called once for every gradient that is held.
    ///
    /// # Errors
    /// The caller's. Some parameters are changed then, and others not.
    fn apply(&mut self, index: usize, gradient: &T) -> Result<(), E> {
        let _ = (index, gradient);
        Ok(())
    }

    /// All gradients of an event have been handed over to be measured, or to be applied. Until then they stay as they are, so that an
    /// observer may keep them and work on all of them together.
    ///
    /// # Errors
    /// The caller's. Some parameters may be changed then, and others not.
    fn handed_over(&mut self) -> Result<(), E> {
        Ok(())
    }

    /// In the place of [`Observer::apply`], where another process holds the gradient: all of them are here with this parameter.
    ///
    /// # Errors
    /// The caller's. Some parameters are changed then, and others not.
    fn receive(&mut self, index: usize) -> Result<(), E> {
        let _ = index;
        Ok(())
    }
}

/// An observer of passes that have no update: it only interrupts.
pub(crate) struct Interrupts<'a>(pub &'a dyn Fn() -> bool);

impl<T> Observer<T, Error> for Interrupts<'_> {
    fn interrupted(&mut self) -> bool {
        (self.0)()
    }
}
