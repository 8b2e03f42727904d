//! The pass that weighs the samples of a batch of pairs, before the step that trains on them ([`crate::preference`]).
//!
//! Sample `2 i` is a chosen answer, sample `2 i + 1` the rejected one. The pass computes the log-probability of each, under the model and
//! without its adapter, and keeps no activations. Micro-batch-major it goes through the step's micro-batches one by one. Layer-major it
//! takes all of them through each block together, so that weights in files are read once.

use t5::{EvalContext, MicroBatch, T5};

use crate::error::{Error, Result};
use crate::parallel::Parallel;
use crate::preference::{Pair, Preference, PreferenceStats};
use crate::trainer::{Batch, StepPlan, Trainer, gather};

impl Trainer {
    /// The log-probabilities of this process's pairs, in a batch that `cut` divides into micro-batches; `None` if `interrupted` returned
    /// true.
    pub(crate) fn compare(
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
        // Layer-major, all go through a block while its weights are there.
        let together = plan.levers.layer_major.is_some();
        for cut in cut.chunks(if together { cut.len().max(1) } else { 1 }) {
            let micro_batches = cut.iter().map(|samples| gather(batch, samples, first_sample, &self.model));
            let of_model = (micro_batches.collect::<Result<_>>()?, together);
            let Some(streams) = losses(&self.model, of_model, preference, &cx, interrupted)? else { return Ok(None) };
            for (stream, losses) in streams.into_iter().enumerate() {
                for (&sample, loss) in cut.iter().flatten().zip(losses) {
                    pairs[sample / 2].stream(stream)[sample % 2] = -loss;
                }
            }
        }
        Ok(Some(pairs))
    }

    /// The weight of each of this process's samples, and the numbers of the whole batch, from the pairs of this process.
    ///
    /// # Errors
    /// The pairs of a process are an error. Then all processes fail.
    pub(crate) fn weigh(
        &self,
        preference: &Preference,
        mine: Result<Vec<Pair>>,
        first_sample: usize,
    ) -> Result<(Vec<f64>, PreferenceStats)> {
        let (pairs, all) = match self.parallel() {
            None => mine.map(|mine| (mine.len(), mine))?,
            Some(parallel) => of_all(parallel, mine)?,
        };
        if all.is_empty() {
            return Ok((Vec::new(), PreferenceStats::default()));
        }
        let (weights, stats) = preference.of_batch(&all);
        let own = weights.into_iter().skip(first_sample / 2).take(pairs);
        Ok((own.flatten().collect(), stats))
    }
}

/// The cross-entropy of each sample of some micro-batches, in their order: under the model and, if the loss compares with it, under the
/// reference. `together`: both in one pass. `None` if `interrupted` returned true.
pub(crate) fn losses(
    model: &T5,
    (of_model, together): (Vec<MicroBatch>, bool),
    preference: &Preference,
    cx: &EvalContext,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<Vec<Vec<f64>>>> {
    let mut streams = vec![of_model];
    if preference.loss.has_reference() {
        streams.push(streams[0].iter().cloned().map(MicroBatch::without_adapter).collect());
    }
    let count = streams[0].len();
    let passes = if together { vec![streams.concat()] } else { streams };
    let mut losses = Vec::new();
    for pass in &passes {
        let Some(of_pass) = model.losses_of_samples(pass, cx, interrupted)? else { return Ok(None) };
        losses.extend(of_pass);
    }
    Ok(Some(losses.chunks(count.max(1)).map(<[Vec<f64>]>::concat).collect()))
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
