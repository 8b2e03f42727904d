//! Passes that train nothing.

use super::observer::Interrupts;
use super::run::Step;
use super::schedule::Event;
use crate::context::StepContext;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::micro_batch::MicroBatch;
use crate::network::Network;
use crate::ops::Ops;

/// A pass over micro-batches without backward. `interrupted` is asked before every block; `None` when it returned true.
///
/// # Errors
/// An operation fails.
pub(crate) fn infer<'a, T: Ops>(
    network: &'a Network<T>,
    events: &[Event],
    cx: &StepContext,
    batches: &'a [MicroBatch<T>],
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<Step<'a, T>>> {
    let mut step = Step::new(network, &[], cx, batches, None)?;
    let is_done = step.run(events, &mut Gradients::none(), &mut Interrupts(interrupted))?;
    Ok(is_done.then_some(step))
}
