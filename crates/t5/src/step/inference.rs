//! Passes that train nothing.

use candle_core::DType;
use t5_ops::TokenLoss;

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

/// Settings of a pass without dropout.
pub(crate) fn without_dropout(activations: DType, loss_chunk_rows: usize) -> StepContext {
    StepContext {
        seed: 0,
        step: 0,
        dropout: 0.0,
        adapter_dropout: 0.0,
        activations,
        recompute_blocks: 0,
        loss_chunk_rows,
        target_tokens: 1,
        token_loss: TokenLoss::default(),
    }
}
