//! The pass that computes the vectors of a batch of texts, before the step that trains on their loss ([`crate::contrastive`]).
//!
//! The texts of a row follow each other: anchor, positive, negative. Rows with a negative come as two samples with the same source.

use std::ops::Range;

use t5::{Pooling, StepContext, T5};

use crate::contrastive::Contrastive;
use crate::error::{Error, Result};
use crate::stats::ContrastiveStats;
use crate::trainer::{Batch, Trainer, gather};

/// The texts of a batch, each as a source.
pub(crate) struct Texts {
    sources: Vec<Vec<u32>>,
    /// One for each text, without a meaning.
    targets: Vec<Vec<u32>>,
}

impl Texts {
    /// The texts of a batch of rows.
    fn from_batch(contrastive: &Contrastive, rows: &Batch) -> Texts {
        let samples_of_a_row = contrastive.texts_of_a_row() - 1;
        let rows = rows.sources.chunks(samples_of_a_row).zip(rows.targets.chunks(samples_of_a_row));
        let sources: Vec<_> =
            rows.flat_map(|(sources, targets)| sources.iter().take(1).chain(targets)).cloned().collect();
        Texts::new(sources)
    }

    fn new(sources: Vec<Vec<u32>>) -> Texts {
        let targets = vec![vec![0]; sources.len()];
        Texts { sources, targets }
    }

    /// The texts of rows; `negatives` has none, or one for each.
    pub fn of_rows(anchors: &[Vec<u32>], positives: &[Vec<u32>], negatives: &[Vec<u32>]) -> Texts {
        let rows = anchors.iter().zip(positives).enumerate();
        let of_row =
            |(row, (anchor, positive))| [Some(anchor), Some(positive), negatives.get(row)].into_iter().flatten();
        Texts::new(rows.flat_map(of_row).cloned().collect())
    }

    /// The tokens of each text, for both stacks.
    pub fn lengths(&self) -> Vec<(usize, usize)> {
        self.sources.iter().map(|source| (source.len(), 1)).collect()
    }

    /// The batch of these texts.
    pub fn batch(&self) -> Batch<'_> {
        Batch { sources: &self.sources, targets: &self.targets }
    }

    /// The numbers of texts that so many samples of rows have.
    fn shards(contrastive: &Contrastive, shards: &[usize]) -> Vec<usize> {
        let of_a_row = contrastive.texts_of_a_row();
        shards.iter().map(|samples| samples / (of_a_row - 1) * of_a_row).collect()
    }
}

/// The vectors of some texts, which `cut` divides into micro-batches, in their order, with the dropout of `cx`; `None` if `interrupted` returned
/// true. `first` is the number of the first text in the whole batch.
pub(crate) fn vectors(
    model: &T5,
    pooling: Pooling,
    texts: &Batch,
    (cut, first): (&[Vec<usize>], usize),
    cx: &StepContext,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<Vec<f64>>> {
    let width = model.config().vector_width();
    let mut vectors = vec![0.0; texts.sources.len() * width];
    for samples in cut {
        let micro_batch = gather(texts, samples, first, model)?;
        let Some(made) = model.vectors_of_step(&micro_batch, pooling, cx, interrupted)? else { return Ok(None) };
        for (&text, vector) in samples.iter().zip(made.chunks(width)) {
            vectors[text * width..][..width].copy_from_slice(vector);
        }
    }
    Ok(Some(vectors))
}

impl Trainer {
    /// The texts of a batch of rows, and how many of them each of these shards has.
    pub(crate) fn texts(&self, contrastive: &Contrastive, rows: &Batch, shards: &[usize]) -> (Texts, Vec<usize>) {
        (Texts::from_batch(contrastive, rows), Texts::shards(contrastive, shards))
    }

    /// [`vectors`] of this process's texts.
    pub(crate) fn vectors(
        &self,
        contrastive: &Contrastive,
        texts: &Batch,
        cut: (&[Vec<usize>], usize),
        cx: &StepContext,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<f64>>> {
        vectors(self.model(), contrastive.pooling, texts, cut, cx, interrupted)
    }

    /// The loss of the whole batch, and its gradient by each vector of this process. If the vectors of a process are an error, all processes
    /// fail.
    pub(crate) fn pull(
        &self,
        contrastive: &Contrastive,
        mine: Result<Vec<f64>>,
        scores: &[f64],
    ) -> Result<(ContrastiveStats, Vec<f64>)> {
        let (all, mine) = self.numbers_of_all(mine)?;
        let scores =
            if contrastive.loss.has_scores() { self.numbers_of_all(Ok(scores.to_vec()))?.0 } else { Vec::new() };
        contrastive.check_scores(&scores)?;
        let (stats, gradients) = contrastive.of_batch((&all, self.model().config().vector_width()), &scores);
        Ok((stats, gradients[mine].to_vec()))
    }

    /// Some numbers of all processes in their order, and the range of those of this process. If a process failed, all do.
    pub(crate) fn numbers_of_all(&self, mine: Result<Vec<f64>>) -> Result<(Vec<f64>, Range<usize>)> {
        let Some(parallel) = self.parallel() else {
            return mine.map(|mine| (0..mine.len(), mine)).map(|(range, mine)| (mine, range));
        };
        let said = mine.map(|mine| mine.iter().flat_map(|value| value.to_le_bytes()).collect());
        let all = self.bytes_of_all(said)?;
        let rank = parallel.group().rank();
        let [before, count] = [&all[..rank], &all[rank..=rank]]
            .map(|of| of.iter().map(|said| said.len() / size_of::<f64>()).sum::<usize>());
        let values = all.iter().flat_map(|said| said.as_chunks().0).map(|value| f64::from_le_bytes(*value));
        Ok((values.collect(), before..before + count))
    }

    /// Some bytes of all processes in their order. If a process failed, all do.
    pub(crate) fn bytes_of_all(&self, mine: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let Some(parallel) = self.parallel() else { return mine.map(|mine| vec![mine]) };
        let said = [&[u8::from(mine.is_err())], mine.as_deref().unwrap_or_default()].concat();
        let all = parallel.group().gather(&said).map_err(Error::from)?;
        mine?;
        if all.iter().any(|said| said[0] != 0) {
            return Err(Error::DeviceMemoryElsewhere);
        }
        Ok(all.into_iter().map(|said| said[1..].to_vec()).collect())
    }
}
