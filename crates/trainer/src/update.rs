//! The update of a step: gradients are measured, a decision is made, gradients are applied.

use std::collections::HashMap;

use candle_core::{Tensor, TensorId};
use t5::{CollectiveRequest, Gradients, Observer, OwnShards, T5};
use t5_ops::{LossSums, ReadyUpdates, SquareSums};

use crate::error::{Error, Result};
use crate::optimizer::{Change, Optimizer};
use crate::parallel::{Parallel, StepVote};
use crate::transport::PendingTransfer;

/// How the events of a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// No decision was reached, or the caller asked to stop before anything changed.
    Interrupted,
    /// Loss, gradient or the square of the clipped gradient was not finite.
    NotFinite,
    /// The device of another process had no memory for the step.
    LacksMemory,
    /// The update is made.
    Made,
}

/// One update of a model's parameters.
pub(crate) struct Update<'a> {
    model: &'a T5,
    optimizer: &'a Optimizer,
    learning_rate: f64,
    /// The largest gradient norm; 0: any.
    max_norm: f64,
    target_tokens: f64,
    interrupted: &'a dyn Fn() -> bool,
    /// Other processes, and the micro-batches of each shard of this one.
    parallel: Option<(&'a Parallel, OwnShards)>,
    max_micro_batches: usize,
    /// Gradients that are being summed, and parameters that their owners send.
    sums_in_flight: HashMap<usize, PendingTransfer>,
    parameters_in_flight: Vec<PendingTransfer>,
    /// The loss sums of shards that are complete.
    losses: Vec<LossSums>,
    sums: Vec<Option<SquareSums>>,
    /// Gradients on a card, with their parameters' indices. Held until every gradient of the event has arrived. `None`: another process has
    /// the gradient, and sends the parameter.
    waiting: Vec<(usize, Option<Tensor>)>,
    /// Whether gradients stay unchanged after they were measured, until they are applied.
    keeps_gradients: bool,
    /// Their updates without the scale. They are made ready before the host waits for the square sums, so that only launches remain.
    ready: Option<Ready>,
    scale: f64,
    /// Whether this process has sent the others, if there are any, all that they need to decide.
    pub has_decided: bool,
    /// Whether a parameter has changed, or may have.
    pub is_changed: bool,
    /// The mean cross-entropy of a target token.
    pub loss: f64,
    /// The mean of what is minimised.
    pub objective: f64,
    /// The norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    pub verdict: Verdict,
}

impl<'a> Update<'a> {
    /// An update at `learning_rate` from the mean loss over `target_tokens`.
    pub fn new(
        model: &'a T5,
        optimizer: &'a Optimizer,
        (learning_rate, max_norm): (f64, f64),
        target_tokens: u64,
        interrupted: &'a dyn Fn() -> bool,
    ) -> Self {
        Update {
            model,
            optimizer,
            learning_rate,
            max_norm,
            target_tokens: target_tokens as f64,
            interrupted,
            parallel: None,
            max_micro_batches: 0,
            sums_in_flight: HashMap::new(),
            parameters_in_flight: Vec::new(),
            losses: Vec::new(),
            sums: vec![None; model.parameters().len()],
            waiting: Vec::new(),
            keeps_gradients: false,
            ready: None,
            scale: 1.0,
            has_decided: false,
            is_changed: false,
            loss: 0.0,
            objective: 0.0,
            grad_norm: 0.0,
            verdict: Verdict::Interrupted,
        }
    }
}

/// Updates that a card is ready to make, of these parameters from these gradients.
struct Ready {
    of: Vec<(usize, TensorId)>,
    updates: ReadyUpdates,
}

impl<'a> Update<'a> {
    /// Sets whether each gradient stays until it is applied, in the same memory.
    pub fn keeping_gradients(self, keeps_gradients: bool) -> Self {
        Update { keeps_gradients, ..self }
    }

    /// An update of several processes together. This process has some shards, each with its micro-batches.
    /// `max_micro_batches` is the largest number of micro-batches of any process.
    pub fn among(self, parallel: &'a Parallel, shards: OwnShards, max_micro_batches: usize) -> Self {
        Update { parallel: Some((parallel, shards)), max_micro_batches, ..self }
    }

    /// Whether the gradients of an event are collected, to be measured and applied together: on a card.
    fn waits(&self) -> bool {
        !self.model.device().is_cpu()
    }

    /// Whether this process updates a parameter.
    fn updates(&self, index: usize) -> bool {
        self.parallel.as_ref().is_none_or(|(parallel, _)| parallel.updates(index))
    }

    /// The processes and the owner of a parameter, if the owner sends it to the others after it changed.
    fn sender(&self, index: usize) -> Option<(&'a Parallel, usize)> {
        let all = self.parallel.as_ref().map(|(parallel, _)| *parallel).filter(|all| all.sends(index));
        all.and_then(|all| Some((all, all.owner(index)?)))
    }

    /// Waits for the parameters that other processes update.
    pub fn complete(&mut self) -> Result<()> {
        self.parameters_in_flight.drain(..).try_for_each(PendingTransfer::complete)
    }

    /// Votes to abort the step, for which this process has no memory, and answers collectives until all have voted. `asked` are all of them.
    ///
    /// # Errors
    /// A request fails.
    pub fn give_up(&mut self, asked: &[CollectiveRequest], gradients: &mut Gradients) -> Result<()> {
        let Some((parallel, _)) = &self.parallel else { return Ok(()) };
        // Other processes may still write into tensors that are being sent.
        self.sums_in_flight.drain().try_for_each(|(_, sum)| sum.complete())?;
        self.waiting.clear();
        self.ready = None;
        self.sums.fill(None);
        gradients.release();
        parallel.take_part(asked, self.model.parameters(), |index| gradients.dtype(index))?;
        self.has_decided = true;
        let mut sums = vec![0.0; self.sums.len()];
        let vote = StepVote { stop: false, lacks_memory: true };
        parallel.agree(&[], vote, &mut sums).map(drop)
    }

    /// Changes a parameter by `change`. If its owner sends it to the others, begins that. The transfer of a parameter in a file is complete
    /// at once, others when the step has ended.
    fn change(&mut self, index: usize, change: &dyn Fn(&Tensor) -> Result<()>) -> Result<()> {
        self.is_changed = true;
        let sender = self.sender(index);
        let is_in_file = self.model.is_in_file();
        let sent = self.model.change(index, |values| {
            change(values)?;
            match sender.map(|(all, owner)| all.begin_broadcast(owner, values)).transpose()? {
                Some(sent) if is_in_file => sent.complete().map(|()| None),
                sent => Ok(sent),
            }
        })?;
        self.parameters_in_flight.extend(sent);
        Ok(())
    }

    /// The optimizer's changes for these parameters and gradients.
    fn changes<'b>(&'b self, gradients: impl Iterator<Item = (usize, &'b Tensor)>) -> Vec<Change<'b>> {
        let parameters = self.model.parameters();
        let change = |(index, gradient): (usize, &'b Tensor)| {
            let sums = self.sums[index].as_ref()?;
            Some(Change { index, values: &parameters[index].tensor, gradient, sums })
        };
        gradients.filter_map(change).collect()
    }

    /// Makes the card ready to update these parameters, while it still computes their gradients.
    fn make_ready(&mut self, gradients: &[(usize, &Tensor)]) -> Result<()> {
        let changes = self.changes(gradients.iter().copied());
        let updates = self.optimizer.ready_each(&changes, self.learning_rate)?;
        self.ready = updates.map(|updates| Ready { of: gradients.iter().copied().map(identity).collect(), updates });
        Ok(())
    }

    /// The square sums of every parameter's gradient, and the votes of all processes. Sets the losses.
    fn agree(&mut self, losses: LossSums) -> Result<(Vec<f64>, StepVote)> {
        let mut totals = SquareSums::totals(self.sums.iter().flatten())?.into_iter();
        let total = |sums: &Option<SquareSums>| sums.as_ref().and_then(|_| totals.next()).unwrap_or(0.0);
        let mut sums: Vec<f64> = self.sums.iter().map(total).collect();
        let vote = StepVote { stop: (self.interrupted)(), lacks_memory: false };
        let Some((parallel, _)) = &self.parallel else {
            self.set_losses(losses);
            return Ok((sums, vote));
        };
        if self.losses.is_empty() {
            self.losses.push(losses);
        }
        self.has_decided = true;
        let (losses, vote) = parallel.agree(&self.losses, vote, &mut sums)?;
        self.set_losses(losses);
        Ok((sums, vote))
    }

    fn set_losses(&mut self, losses: LossSums) {
        self.loss = losses.cross_entropy / self.target_tokens;
        self.objective = losses.objective / self.target_tokens;
    }
}

impl Observer<Tensor, Error> for Update<'_> {
    /// Never true once a parameter has changed: a step is made as a whole or not at all. Several processes stop together, when they decide.
    fn interrupted(&mut self) -> bool {
        self.parallel.is_none() && !self.is_changed && (self.interrupted)()
    }

    fn shards(&self) -> OwnShards {
        self.parallel.as_ref().map(|(_, shards)| shards.clone()).unwrap_or_default()
    }

    fn closes_shards(&self) -> bool {
        self.parallel.as_ref().is_some_and(|(parallel, _)| parallel.closes_shards())
    }

    fn max_micro_batches(&self) -> usize {
        if self.model.has_remote_weights() { self.max_micro_batches } else { 0 }
    }

    fn close(&mut self, losses: LossSums) {
        self.losses.push(losses);
    }

    fn overlaps(&self) -> bool {
        self.parallel.as_ref().is_some_and(|(parallel, _)| parallel.group().size() > 1)
    }

    fn begin_sum(&mut self, index: usize, parts: &[Tensor]) -> Result<()> {
        if let Some((parallel, _)) = &self.parallel {
            self.sums_in_flight.insert(index, parallel.begin_sum(index, parts)?);
        }
        Ok(())
    }

    fn end_sum(&mut self, index: usize) -> Result<()> {
        self.sums_in_flight.remove(&index).map_or(Ok(()), PendingTransfer::complete)
    }

    fn measure(&mut self, index: usize, gradient: &Tensor) -> Result<()> {
        match self.updates(index) {
            true if self.waits() => self.waiting.push((index, Some(gradient.clone()))),
            true => self.sums[index] = Some(SquareSums::compute(gradient)?),
            false => {}
        }
        Ok(())
    }

    fn holds(&self, index: usize) -> bool {
        self.parallel.as_ref().is_none_or(|(parallel, _)| parallel.holds(index))
    }

    fn decide(&mut self, losses: LossSums) -> Result<bool> {
        let (sums, vote) = self.agree(losses)?;
        self.grad_norm = norm(&sums);
        self.scale = clip_scale(self.grad_norm, self.max_norm);
        // The optimizer squares in f32: an infinite square would reach the optimizer's state.
        let largest_square = (self.grad_norm * self.scale).powi(2) as f32;
        let is_finite = self.loss.is_finite()
            && self.objective.is_finite()
            && self.grad_norm.is_finite()
            && largest_square.is_finite();
        self.verdict = match is_finite {
            // If a process lacks memory, the numbers have no meaning.
            _ if vote.lacks_memory => Verdict::LacksMemory,
            false => Verdict::NotFinite,
            true if vote.stop => Verdict::Interrupted,
            true => Verdict::Made,
        };
        Ok(self.verdict == Verdict::Made)
    }

    fn apply(&mut self, index: usize, gradient: &Tensor) -> Result<()> {
        // A weight with a host copy is on the card for its own update alone.
        if self.waits() && !self.model.has_host_copy(index) {
            self.waiting.push((index, self.updates(index).then(|| gradient.clone())));
            return Ok(());
        }
        let owner = self.parallel.as_ref().and_then(|(parallel, _)| Some((*parallel, parallel.owner(index)?)));
        if self.sums[index].is_none() && owner.is_none() {
            return Ok(());
        }
        let (optimizer, rate, scale, sums) = (self.optimizer, self.learning_rate, self.scale, self.sums[index].take());
        self.change(index, &|values| match &sums {
            Some(sums) => optimizer.update_one(index, values, gradient, sums, rate, scale),
            None => Ok(()),
        })
    }

    fn handed_over(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        if waiting.is_empty() {
            return Ok(());
        }
        let own = || waiting.iter().filter_map(|(index, gradient)| Some((*index, gradient.as_ref()?)));
        if self.verdict != Verdict::Made {
            let sums = SquareSums::of_each(&own().map(|(_, gradient)| gradient).collect::<Vec<_>>())?;
            own().zip(sums).for_each(|((index, _), sums)| self.sums[index] = Some(sums));
            if self.keeps_gradients {
                self.make_ready(&own().filter(|(index, _)| !self.model.has_host_copy(*index)).collect::<Vec<_>>())?;
            }
            return Ok(());
        }
        self.is_changed = true;
        let parameters = self.model.parameters();
        match self.ready.take() {
            Some(ready) if own().map(identity).eq(ready.of.iter().copied()) => ready.updates.make(self.scale)?,
            _ => {
                let changes = self.changes(own());
                self.optimizer.update_each(&changes, self.learning_rate, self.scale)?;
            }
        }
        for (index, _) in waiting {
            if let Some((all, owner)) = self.sender(index) {
                self.parameters_in_flight.push(all.begin_broadcast(owner, &parameters[index].tensor)?);
            }
        }
        Ok(())
    }

    fn receive(&mut self, index: usize) -> Result<()> {
        if self.waits() && !self.model.has_host_copy(index) {
            self.waiting.push((index, None));
            return Ok(());
        }
        self.change(index, &|_| Ok(()))
    }
}

/// Identifies a parameter's gradient by its index and its memory.
fn identity((index, gradient): (usize, &Tensor)) -> (usize, TensorId) {
    (index, gradient.id())
}

/// The global L2 norm, summed in the parameters' order.
fn norm(sums: &[f64]) -> f64 {
    sums.iter().sum::<f64>().sqrt()
}

/// The factor of the gradients: `torch.nn.utils.clip_grad_norm_`.
fn clip_scale(norm: f64, max_norm: f64) -> f64 {
    if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_is_that_of_torch() {
        assert_eq!(clip_scale(0.5, 1.0), 1.0);
        assert_eq!(clip_scale(4.0, 1.0), 1.0 / (4.0 + 1e-6));
        assert_eq!(clip_scale(4.0, 0.0), 1.0);
        assert_eq!(clip_scale(0.0, 1.0), 1.0);
    }
}
