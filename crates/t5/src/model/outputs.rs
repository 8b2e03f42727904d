//! The outputs of models that make no text: vectors of an encoder, and the outputs of a classifier.

use candle_core::{DType, Device, Tensor};
use t5_ops::{Distillation, TopLogits};

use super::T5;
use crate::config::Config;
use crate::context::StepContext;
use crate::error::Result;
use crate::micro_batch::{MicroBatch, Taught, Teacher, pad};
use crate::ops::Ops;
use crate::pooling::Pooling;
use crate::step::inference::infer;
use crate::step::schedule::Outline;

impl Config {
    /// The numbers of a vector of the encoder.
    pub fn vector_width(&self) -> usize {
        self.gemma.as_ref().map_or(self.d_model, |gemma| gemma.encoder.width)
    }
}

impl T5 {
    /// A vector of each source, one after the other: the encoder's output (B, S, D) as `pooling` takes it, with length 1 if `is_normalized`.
    ///
    /// `between` is called before every block.
    ///
    /// # Errors
    /// As [`MicroBatch::new`], for sources.
    pub fn vectors(
        &self,
        sources: &[&[u32]],
        pooling: Pooling,
        is_normalized: bool,
        activations: DType,
        between: &dyn Fn(),
    ) -> Result<Vec<f32>> {
        let numbers: Vec<u32> = (0..sources.len() as u32).collect();
        let (ids, lengths) = pad(sources, "source", &numbers, &self.config, self.device())?;
        let batch = MicroBatch::of_sources(ids, lengths.clone());
        let output = self.output(&batch, activations, false, between)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
        let (_, longest, width) = output.dims3()?;
        let values = output.flatten_all()?.to_vec1::<f32>()?;
        let mut vectors = vec![0.0; sources.len() * width];
        let samples = values.chunks(longest * width).zip(&lengths).zip(vectors.chunks_mut(width));
        let mut pooled = vec![0.0; width];
        for ((rows, length), vector) in samples {
            pooling.pool(&rows[..length * width], &mut pooled);
            let norm = pooled.iter().map(|value| value * value).sum::<f64>().sqrt().max(1e-12);
            let scale = if is_normalized { norm } else { 1.0 };
            #[expect(clippy::cast_possible_truncation, reason = "vectors are f32")]
            vector.iter_mut().zip(&pooled).for_each(|(to, value)| *to = (value / scale) as f32);
        }
        Ok(vectors)
    }

    /// A vector of each source of a micro-batch, as a step with these settings computes it, dropout included. `interrupted` is asked before every
    /// block; `None` when it returned true.
    ///
    /// # Errors
    /// An operation fails, or a weight cannot be read.
    pub fn vectors_of_step(
        &self,
        batch: &MicroBatch,
        pooling: Pooling,
        cx: &StepContext,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<f64>>> {
        let events = Outline::inference(&self.config, self.has_paged_weights()).forward_only(false);
        let step = infer(&self.network, &events, cx, std::slice::from_ref(batch), interrupted)?;
        let Some(output) = step.and_then(|mut step| step.take_output()) else { return Ok(None) };
        let (samples, longest, width) = output.dims3()?;
        let wide = if output.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let values = output.to_dtype(wide)?.to_device(&Device::Cpu)?.flatten_all()?;
        let mut vectors = vec![0.0; samples * width];
        let ranges = (0..samples).map(|sample| {
            let first = sample * longest * width;
            first..first + batch.lengths(false)[sample] * width
        });
        for (range, vector) in ranges.zip(vectors.chunks_mut(width)) {
            let rows = values.narrow(0, range.start, range.len())?;
            match wide {
                DType::F64 => pooling.pool(&rows.to_vec1::<f64>()?, vector),
                _ => pooling.pool(&rows.to_vec1::<f32>()?, vector),
            }
        }
        Ok(Some(vectors))
    }

    /// The decoder's output (B, T, D) for a micro-batch, without dropout. `interrupted` is asked before every block; `None` when it returned
    /// true.
    ///
    /// # Errors
    /// An operation fails, or a weight cannot be read.
    pub fn states(
        &self,
        batch: &MicroBatch,
        activations: DType,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Tensor>> {
        let events = Outline::inference(&self.config, self.has_paged_weights()).forward_only(true);
        let cx = StepContext::without_dropout(activations, 1);
        let step = infer(&self.network, &events, &cx, std::slice::from_ref(batch), interrupted)?;
        Ok(step.and_then(|mut step| step.take_output()))
    }

    /// The micro-batch, where a step of another model minimises `of` beside the logits that this model's head makes of its `states`
    /// ([`T5::states`]).
    #[must_use]
    pub fn teach(&self, batch: MicroBatch, states: Tensor, of: Distillation) -> MicroBatch {
        let by = Teacher::States { states, head: self.network.logit_head() };
        MicroBatch { taught: Some(Taught { by, of }), ..batch }
    }

    /// The `count` largest logits of each row of `states` (B, T, D), which [`T5::states`] made. Logits exist for `chunk_rows` rows at a time.
    ///
    /// # Errors
    /// An operation fails, a weight cannot be read, or the vocabulary has fewer entries.
    pub fn top_logits(&self, states: &Tensor, count: usize, chunk_rows: usize) -> Result<TopLogits> {
        let (rows, head) = (Ops::as_rows(states)?, self.network.logit_head());
        let (all, chunk) = (rows.dims()[0], chunk_rows.max(1));
        let of_chunk = |first: usize| -> Result<TopLogits> {
            let logits = head.logits(&Ops::part(&rows, first, chunk.min(all - first))?)?;
            Ok(TopLogits::of_logits(&logits, count)?)
        };
        let parts: Vec<TopLogits> = (0..all).step_by(chunk).map(of_chunk).collect::<Result<_>>()?;
        Ok(TopLogits::concatenated(&parts)?)
    }

    /// The outputs of a classifier, row after row: for each source, or for each position of the padded rectangle. `between` is called before
    /// every block.
    ///
    /// # Errors
    /// An operation fails.
    ///
    /// # Panics
    /// The model has no classifier.
    pub fn class_logits(&self, batch: &MicroBatch, activations: DType, between: &dyn Fn()) -> Result<Vec<f32>> {
        let z = self.output(batch, activations, true, between)?;
        let logits = self.network.class_logits(&z, batch)?;
        Ok(logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?)
    }
}
