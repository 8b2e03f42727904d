//! The outputs of models that make no text: vectors of an encoder, and the outputs of a classifier.

use candle_core::{DType, Device};

use super::T5;
use crate::error::Result;
use crate::micro_batch::{MicroBatch, pad};

/// How the encoder's output becomes one vector of a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over its tokens.
    #[default]
    Mean,
    /// Its first token's.
    Cls,
    /// The largest value over its tokens.
    Max,
    /// Its last token's.
    Last,
}

impl Pooling {
    /// Writes the vector of these rows.
    fn pool(self, rows: &[f32], vector: &mut [f32]) {
        let width = vector.len();
        let count = rows.len() / width;
        match self {
            Pooling::Cls => vector.copy_from_slice(&rows[..width]),
            Pooling::Last => vector.copy_from_slice(&rows[rows.len() - width..]),
            Pooling::Max => {
                vector.fill(f32::NEG_INFINITY);
                let each = |row: &[f32]| vector.iter_mut().zip(row).for_each(|(most, value)| *most = most.max(*value));
                rows.chunks(width).for_each(each);
            }
            Pooling::Mean => {
                let mut sums = vec![0.0; width];
                let each = |row: &[f32]| sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
                rows.chunks(width).for_each(each);
                #[expect(
                    clippy::cast_precision_loss,
                    clippy::cast_possible_truncation,
                    reason = "a mean of few tokens, in f32"
                )]
                vector.iter_mut().zip(sums).for_each(|(mean, sum)| *mean = (sum / count as f64) as f32);
            }
        }
    }
}

impl T5 {
    /// A vector of each source, one after the other: the encoder's output (B, S, D) as `pooling` takes it, with length 1 if `is_normalized`.
    ///
    /// # Errors
    /// As [`MicroBatch::new`], for sources.
    pub fn vectors(
        &self,
        sources: &[&[u32]],
        pooling: Pooling,
        is_normalized: bool,
        activations: DType,
    ) -> Result<Vec<f32>> {
        let numbers: Vec<u32> = (0..sources.len() as u32).collect();
        let (ids, lengths) = pad(sources, "source", &numbers, &self.config, self.device())?;
        let batch = MicroBatch::of_sources(ids, lengths.clone());
        let output = self.output(&batch, activations, false)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
        let (_, longest, width) = output.dims3()?;
        let values = output.flatten_all()?.to_vec1::<f32>()?;
        let mut vectors = vec![0.0; sources.len() * width];
        let samples = values.chunks(longest * width).zip(&lengths).zip(vectors.chunks_mut(width));
        for ((rows, length), vector) in samples {
            pooling.pool(&rows[..length * width], vector);
            if is_normalized {
                let norm = vector.iter().map(|value| value * value).sum::<f32>().sqrt().max(1e-12);
                vector.iter_mut().for_each(|value| *value /= norm);
            }
        }
        Ok(vectors)
    }

    /// The outputs of a classifier, row after row: for each source, or for each position of the padded rectangle.
    ///
    /// # Errors
    /// An operation fails.
    ///
    /// # Panics
    /// The model has no classifier.
    pub fn class_logits(&self, batch: &MicroBatch, activations: DType) -> Result<Vec<f32>> {
        let z = self.output(batch, activations, true)?;
        let logits = self.network.class_logits(&z, batch)?;
        Ok(logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?)
    }
}
