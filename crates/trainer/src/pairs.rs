//! The pass that weighs the samples of a batch of pairs, before the step that trains on them ([`crate::preference`]).
//!
//! Sample `2 i` is a chosen answer, sample `2 i + 1` the rejected one. The pass computes the log-probability of each, under the model and
//! without its adapter, and keeps no activations. Micro-batch-major it goes through the step's micro-batches one by one. Layer-major it
//! takes all of them through each block together, so that weights in files are read once.

use t5::{EvalContext, MicroBatch};

use crate::error::{Error, Result};
use crate::parallel::Parallel;
use crate::preference::{Pair, Preference, PreferenceStats};
use crate::trainer::{Batch, StepPlan, Trainer, gather};

/// The weight of each of this process's samples, and the numbers of the whole batch.
pub(crate) type Weighed = (Vec<f64>, PreferenceStats);

impl Trainer {
    /// Weighs the samples of a batch that `cut` divides into micro-batches; `None` if `interrupted` returned true.
    ///
    /// # Errors
    /// An operation fails. Where one process fails, all of them do.
    pub(crate) fn weigh(
        &self,
        preference: &Preference,
        batch: &Batch,
        (cut, first_sample): (&[Vec<usize>], usize),
        plan: &StepPlan,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Weighed>> {
        let mine = self.compare(preference, batch, (cut, first_sample), plan, interrupted).transpose();
        let Some(mine) = mine else { return Ok(None) };
        let (pairs, all) = match self.parallel() {
            None => mine.map(|mine| (mine.len(), mine))?,
            Some(parallel) => of_all(parallel, mine)?,
        };
        if all.is_empty() {
            return Ok(Some((Vec::new(), PreferenceStats::default())));
        }
        let (weights, stats) = preference.of_batch(&all);
        let own = weights.into_iter().skip(first_sample / 2).take(pairs);
        Ok(Some((own.flatten().collect(), stats)))
    }

    /// The log-probabilities of this process's pairs; `None` if `interrupted` returned true.
    fn compare(
        &self,
        preference: &Preference,
        batch: &Batch,
        (cut, first_sample): (&[Vec<usize>], usize),
        plan: &StepPlan,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Pair>>> {
        let cx = EvalContext {
            activations: self.options.precision.activations(),
            loss_chunk_rows: plan.levers.loss_chunk_rows,
        };
        let tokens = |pair: usize| [0, 1].map(|answer| batch.targets[2 * pair + answer].len() as f64);
        let pair = |pair: usize| Pair { tokens: tokens(pair), ..Pair::default() };
        let mut pairs: Vec<Pair> = (0..batch.targets.len() / 2).map(pair).collect();
        let together = if plan.levers.layer_major.is_some() { cut.len().max(1) } else { 1 };
        for cut in cut.chunks(together) {
            let of_model = cut.iter().map(|samples| gather(batch, samples, first_sample, &self.model));
            let of_model = of_model.collect::<Result<Vec<MicroBatch>>>()?;
            let of_reference: Vec<MicroBatch> = match preference.loss.has_reference() {
                true => of_model.iter().cloned().map(MicroBatch::without_adapter).collect(),
                false => Vec::new(),
            };
            // Layer-major, both go through a block while its weights are there.
            let passes = match plan.levers.layer_major {
                Some(_) => vec![[of_model, of_reference].concat()],
                None => vec![of_model, of_reference],
            };
            let mut losses = Vec::new();
            for pass in passes.iter().filter(|pass| !pass.is_empty()) {
                let Some(of_pass) = self.model.losses_of_samples(pass, &cx, interrupted)? else { return Ok(None) };
                losses.extend(of_pass);
            }
            for (number, of_micro_batch) in losses.into_iter().enumerate() {
                for (&sample, loss) in cut[number % cut.len()].iter().zip(of_micro_batch) {
                    let pair = &mut pairs[sample / 2];
                    let to = if number < cut.len() { &mut pair.policy } else { &mut pair.reference };
                    to[sample % 2] = -loss;
                }
            }
        }
        Ok(Some(pairs))
    }
}

/// The number of this process's pairs, and the pairs of all processes in the order of the batch. If a process failed, all do.
fn of_all(parallel: &Parallel, mine: Result<Vec<Pair>>) -> Result<(usize, Vec<Pair>)> {
    let pairs = mine.as_ref().map_or(&[][..], Vec::as_slice);
    let mut said = vec![u8::from(mine.is_err())];
    said.extend(pairs.iter().flat_map(Pair::numbers).flat_map(f64::to_le_bytes));
    let all = parallel.group().gather(&said).map_err(Error::from)?;
    let mine = mine?.len();
    if all.iter().any(|said| said[0] != 0) {
        return Err(Error::DeviceMemoryElsewhere);
    }
    let numbers = all.iter().flat_map(|said| said[1..].as_chunks().0).map(|number| f64::from_le_bytes(*number));
    let numbers: Vec<f64> = numbers.collect();
    Ok((mine, numbers.as_chunks().0.iter().copied().map(Pair::of).collect()))
}
