//! How a batch is cut into micro-batches, and what its processes tell each other about their shares.

use std::ops::Range;

use t5::step::count::Shape;
use t5::{Levers, MicroBatch};

use super::{Batch, StepPlan, Trainer, count_tokens, gather, lengths};
use crate::error::Result;
use crate::micro_batches;
use crate::parallel::Share;

impl Trainer {
    /// The samples of each micro-batch, and the micro-batches of each shard.
    pub(crate) fn cut_of_shards(
        &self,
        batch: &Batch,
        shards: &[usize],
        plan: &StepPlan,
    ) -> (Vec<Vec<usize>>, Vec<Range<usize>>) {
        let lengths = lengths(batch, &self.model.config().head);
        let (mut cut, mut of_shards, mut first): (Vec<Vec<usize>>, _, _) = (Vec::new(), Vec::new(), 0);
        for &samples in shards {
            let of_shard = self.cut(&lengths[first..first + samples], plan);
            of_shards.push(cut.len()..cut.len() + of_shard.len());
            cut.extend(of_shard.into_iter().map(|samples| samples.into_iter().map(|sample| first + sample).collect()));
            first += samples;
        }
        (cut, of_shards)
    }

    /// The numbers of the whole batch, and the place of this process' samples in it.
    pub(super) fn share(&self, batch: &Batch, cut: &[Vec<usize>], interrupted: &dyn Fn() -> bool) -> Result<Share> {
        let lengths = lengths(batch, &self.model.config().head);
        let mine = Share {
            first_sample: 0,
            samples: batch.sources.len() as u64,
            source_tokens: count_tokens(batch.sources),
            target_tokens: batch.targets.iter().map(|target| t5::counted_labels(target)).sum(),
            padded_tokens: cut.iter().map(|samples| micro_batches::padded_tokens(&lengths, samples)).sum(),
            micro_batches: cut.len() as u64,
            max_micro_batches: cut.len(),
            is_interrupted: self.parallel.is_some() && interrupted(),
        };
        self.parallel.as_ref().map_or_else(|| Ok(mine.clone()), |parallel| parallel.share(&mine))
    }

    /// The passes before a step, each with the numbers of its samples: one micro-batch. Layer-major, all of them go through a block while its
    /// weights are there.
    pub(crate) fn passes(
        &self,
        batch: &Batch,
        (cut, first_sample): (&[Vec<usize>], usize),
        plan: &StepPlan,
    ) -> impl Iterator<Item = Result<(Vec<usize>, Vec<MicroBatch>)>> {
        let micro_batches = if plan.levers.layer_major.is_some() { cut.len().max(1) } else { 1 };
        cut.chunks(micro_batches).map(move |cut| {
            let micro_batches = cut.iter().map(|samples| gather(batch, samples, first_sample, &self.model));
            Ok((cut.concat(), micro_batches.collect::<Result<_>>()?))
        })
    }

    /// Cuts a batch with these lengths into micro-batches: no larger than the plan's, and no larger than is useful.
    pub(crate) fn cut(&self, lengths: &[(usize, usize)], plan: &StepPlan) -> Vec<Vec<usize>> {
        let Some((source_tokens, target_tokens)) = plan.longest else {
            return micro_batches::cut(lengths, plan.levers.micro_batch_samples);
        };
        let bytes = |shape: Shape| {
            let Levers { recompute_blocks, loss_chunk_rows, .. } = plan.levers;
            self.counter.micro_batch(shape, recompute_blocks, loss_chunk_rows)
        };
        let samples = plan.levers.micro_batch_samples;
        let most = bytes(Shape { samples, source_tokens, target_tokens });
        micro_batches::cut_within(lengths, &|samples, (source_tokens, target_tokens)| {
            bytes(Shape { samples, source_tokens, target_tokens }) <= most
        })
    }
}
