//! The layers of a T5 put together: both stacks, the shared table and the head.

use std::rc::Rc;
use std::sync::Arc;

use t5_ops::{CrossEntropy, LossSums};

use crate::config::Config;
use crate::context::{Noise, StepContext, adapter_site};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::head::Head;
use crate::layers::Weights;
use crate::layers::block::Block;
use crate::layers::classifier::Classifier;
use crate::layers::linear::Linear;
use crate::layers::logit_head::LogitHead;
use crate::layers::stack::Stack;
use crate::micro_batch::{MicroBatch, Taught, Teacher};
use crate::ops::Ops;
use crate::pager::Pager;
use crate::parameters::{PagingGranularity, Parameter, Part, Weight};
use crate::pooling::VectorGradients;
use crate::weight_file::WeightFile;

/// Every layer of a model, over tensors or counted tensors.
#[derive(Debug)]
pub(crate) struct Network<T> {
    /// The table of the encoder's embedding, and of the decoder's unless it has its own.
    pub shared: Weight<T>,
    /// The table of the decoder's embedding.
    pub decoder_table: Weight<T>,
    pub encoder: Stack<T>,
    pub decoder: Stack<T>,
    /// The head of a language model. Other models never use it.
    pub head: Linear<T>,
    /// The layers in its place, if the model is a classifier.
    classifier: Option<Classifier<T>>,
    /// Whether a source has one label, rather than each of its tokens.
    is_of_sequences: bool,
    logit_scale: f64,
    /// The soft cap of the logits.
    logit_cap: Option<f64>,
    /// Bytes of weights in files that may be read before they are used.
    pub read_ahead_bytes: u64,
    /// Fetches weights that lie elsewhere.
    pub pager: Option<Rc<dyn Pager<T>>>,
    /// The files in which weights lie.
    pub file: Option<Arc<WeightFile>>,
}

impl<T: Ops> Network<T> {
    /// The network of these parameters, in the order of [`crate::ParameterSpec::all`]. Products use `copies` of parameters where there are
    /// any. `by_matrix`: [`crate::LayerMajor::weights_by_matrix`].
    ///
    /// # Errors
    /// The activation is not known.
    pub fn new(config: &Config, parameters: &[Parameter<T>], copies: &[Option<T>], by_matrix: bool) -> Result<Self> {
        let weights = Weights { parameters, copies, config, by_matrix };
        let shared = weights.get(config.shared_table().into());
        let of_decoder = config.decoder_table();
        let decoder_table = of_decoder.map_or_else(|| shared.clone(), |name| weights.get(name.into()));
        let has_table = config.head.is_language() && !config.tie_word_embeddings;
        let name = config.head_name();
        let table = if has_table { weights.get(format!("{name}.weight")) } else { decoder_table.clone() };
        let head = weights.linear_with(table, name, adapter_site(true, None, 0));
        let (encoder, decoder) = (Stack::new(&weights, false)?, Stack::new(&weights, true)?);
        Ok(Network {
            shared,
            decoder_table,
            encoder,
            decoder,
            head,
            classifier: Classifier::new(&weights, config),
            is_of_sequences: matches!(config.head, Head::Sequence(_)),
            logit_scale: config.logit_scale(),
            logit_cap: config.logit_cap(),
            read_ahead_bytes: u64::MAX,
            pager: None,
            file: None,
        })
    }

    /// The weights of a part that may lie in a file.
    pub fn weights_of(&self, part: Part) -> impl Iterator<Item = &Weight<T>> {
        let (block, tables): (Option<&Block<T>>, [Option<&Weight<T>>; 2]) = match part {
            Part::Encoder { block } => (Some(&self.encoder.blocks[block]), [None; 2]),
            Part::Decoder { block } => (Some(&self.decoder.blocks[block]), [None; 2]),
            Part::Shared => (None, [Some(&self.shared), self.own_decoder_table()]),
            Part::LmHead => {
                (None, [Some(&self.head.weight).filter(|_| self.classifier.is_none() && self.has_decoder()), None])
            }
            Part::EncoderNorm | Part::DecoderNorm => (None, [None; 2]),
        };
        let linears = block.into_iter().flat_map(Block::linears).map(|linear| &linear.weight);
        linears.chain(tables.into_iter().flatten())
    }

    /// Begins to read the first weights of a part that fit in `read_ahead_bytes`. Operations read ahead a table that is paged by rows.
    pub fn read_ahead(&self, part: Part) {
        let mut room = self.read_ahead_bytes;
        for weight in self.weights_of(part).filter(|weight| weight.paging != PagingGranularity::ByRows) {
            let Some(rest) = room.checked_sub(weight.tensor.bytes()) else { break };
            self.read_ahead_of(weight);
            room = rest;
        }
    }

    /// Begins to read a weight that lies in a file.
    pub fn read_ahead_of(&self, weight: &Weight<T>) {
        weight.tensor.read_ahead();
        if let Some(pager) = &self.pager {
            pager.read_ahead(weight.index, &weight.tensor);
        }
    }

    /// Prefetches the weights of a part that lie elsewhere.
    ///
    /// # Errors
    /// As [`Pager::prefetch`].
    pub fn prefetch(&self, part: Part) -> Result<()> {
        self.ask_pager(part, |pager, weight| pager.prefetch(weight.index, &weight.tensor))
    }

    /// Continues to fetch the weights of a part while something is computed. Waits where a copy needs it.
    ///
    /// # Errors
    /// As [`Pager::copy`].
    pub fn copy(&self, part: Part) -> Result<()> {
        self.ask_pager(part, |pager, weight| pager.copy(weight.index, &weight.tensor))
    }

    /// Continues to fetch the weights of a part as far as possible without waiting.
    ///
    /// # Errors
    /// As [`Pager::copy_nonblocking`].
    pub fn copy_nonblocking(&self, part: Part) -> Result<()> {
        self.ask_pager(part, |pager, weight| pager.copy_nonblocking(weight.index, &weight.tensor))
    }

    /// Calls the pager, if there is one, for each weight of a part.
    fn ask_pager(&self, part: Part, ask: impl Fn(&dyn Pager<T>, &Weight<T>) -> Result<()>) -> Result<()> {
        let Some(pager) = &self.pager else { return Ok(()) };
        self.weights_of(part).try_for_each(|weight| ask(pager.as_ref(), weight))
    }

    /// Prefetches a parameter that will be changed soon.
    ///
    /// # Errors
    /// As [`Pager::prefetch_for_update`].
    pub fn prefetch_for_update(&self, index: usize, weight: &T) -> Result<()> {
        self.pager.as_ref().map_or(Ok(()), |pager| pager.prefetch_for_update(index, weight))
    }

    /// Makes a weight in a file resident, unless its operations do that themselves. Fetches a weight that lies elsewhere.
    ///
    /// # Errors
    /// As [`Pager::page_in`]; [`crate::Error::Changed`].
    pub fn page_in(&self, weight: &Weight<T>) -> Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.check_unchanged())?;
        if weight.paging == PagingGranularity::Together {
            weight.tensor.page_in();
        }
        self.fetch_remote(weight)
    }

    /// Fetches a weight that lies elsewhere. A weight in a file stays there, for an operation that needs few of its rows.
    ///
    /// # Errors
    /// As [`Pager::page_in`].
    pub fn fetch_remote(&self, weight: &Weight<T>) -> Result<()> {
        self.pager.as_ref().map_or(Ok(()), |pager| pager.page_in(weight.index, &weight.tensor))
    }

    /// Releases a weight until it is used again.
    ///
    /// # Errors
    /// As [`Pager::page_out`].
    pub fn page_out(&self, weight: &Weight<T>) -> Result<()> {
        weight.tensor.page_out();
        self.pager.as_ref().map_or(Ok(()), |pager| pager.page_out(weight.index, &weight.tensor))
    }

    /// Drops every handle of a weight whose memory is to be freed; tables get `nothing` instead. The network is not usable any more.
    pub fn let_go(&mut self, nothing: &T) {
        for stack in [&mut self.encoder, &mut self.decoder] {
            stack.blocks.clear();
        }
        for table in [&mut self.shared, &mut self.decoder_table, &mut self.head.weight] {
            table.tensor = nothing.clone();
        }
        self.head.adapter = None;
    }

    /// After an aborted pass: releases every weight that it paged in.
    pub fn release(&self) {
        let Some(pager) = &self.pager else { return };
        let encoder = (0..self.encoder.blocks.len()).map(|block| Part::Encoder { block });
        let decoder = (0..self.decoder.blocks.len()).map(|block| Part::Decoder { block });
        let parts = encoder.chain(decoder).chain([Part::Shared, Part::LmHead]);
        for weight in parts.flat_map(|part| self.weights_of(part)) {
            // The abort is already reported. The next pass releases what remains.
            let _ = pager.release(weight.index, &weight.tensor);
        }
    }

    /// Whether there is a decoder.
    pub fn has_decoder(&self) -> bool {
        !self.decoder.blocks.is_empty()
    }

    /// The table of a stack's embedding.
    pub fn table(&self, decoder: bool) -> &Weight<T> {
        if decoder { &self.decoder_table } else { &self.shared }
    }

    /// The decoder's table, if it is not the encoder's.
    pub fn own_decoder_table(&self) -> Option<&Weight<T>> {
        Some(&self.decoder_table).filter(|table| table.index != self.shared.index)
    }

    /// Whether the head's table is that of the decoder's embedding.
    pub fn has_tied_head(&self) -> bool {
        self.head.weight.index == self.decoder_table.index
    }

    /// One of the two stacks.
    pub fn stack(&self, decoder: bool) -> &Stack<T> {
        if decoder { &self.decoder } else { &self.encoder }
    }

    /// The position bias of a stack's block for a micro-batch, if it has one.
    pub fn bias_of(&self, batch: &MicroBatch<T>, decoder: bool, block: usize) -> Result<Option<T>> {
        let length = batch.ids(decoder).dims()[1];
        self.stack(decoder).position_bias(block, length, length, 0)
    }

    /// Loss sum, without gradients, of the last stack's output (B, T, D).
    pub fn loss(&self, z: &T, batch: &MicroBatch<T>, cx: &StepContext) -> Result<f64> {
        let labels = &batch.labels;
        if let Some(classifier) = &self.classifier {
            return classifier.loss(&self.classified(z, batch)?, labels);
        }
        if !self.has_decoder() {
            // The vectors of an encoder have no loss of their own.
            return Ok(0.0);
        }
        if self.head.adapter.is_some() {
            return Ok(self.losses(z, batch, cx, &Noise::NONE)?.into_iter().sum());
        }
        let settings = self.cross_entropy(1.0, cx.loss_chunk_rows);
        T::linear_cross_entropy(&z.as_rows()?, &self.head.weight, labels, &settings)
    }

    /// The loss of each sample of the decoder's output (B, T, D), without gradients; of a batch with answers, that of each answer.
    pub fn losses(&self, z: &T, batch: &MicroBatch<T>, cx: &StepContext, noise: &Noise) -> Result<Vec<f64>> {
        let token_loss = cx.token_loss.alone();
        let settings = CrossEntropy { token_loss, ..self.cross_entropy(1.0, cx.loss_chunk_rows) };
        let of_labels = |x: &T, labels: &[u32]| match self.head.adapter {
            None => T::linear_cross_entropy(&x.as_rows()?, &self.head.weight, labels, &settings),
            Some(_) => {
                let logits = self.head.forward(&x.scaled(self.logit_scale)?, noise)?;
                if token_loss.is_logit {
                    let (loss, _) = T::logit_cross_entropy_backward(logits, labels, 1.0, token_loss, self.logit_cap)?;
                    return Ok(loss.cross_entropy);
                }
                T::logit_cross_entropy(&logits, labels, self.logit_cap)
            }
        };
        if self.reads_head_once(batch) {
            return Ok(self.losses_together(&[(z, batch)], cx)?.swap_remove(0));
        }
        let mut losses = Vec::new();
        for sample in 0..z.dims()[0] {
            let x = z.select(&[sample as u32])?;
            match batch.answers.as_slice() {
                [] => losses.push(of_labels(&x, labels_of(&batch.labels, z, sample))?),
                answers => {
                    answers.iter().try_for_each(|answer| of_labels(&x, &[*answer]).map(|loss| losses.push(loss)))?
                }
            }
        }
        Ok(losses)
    }

    /// Whether one reading of the head gives the losses of all samples of a micro-batch.
    pub fn reads_head_once(&self, batch: &MicroBatch<T>) -> bool {
        self.head.adapter.is_none() && batch.answers.is_empty()
    }

    /// As [`Network::losses`], of several micro-batches together.
    pub fn losses_together(&self, of: &[(&T, &MicroBatch<T>)], cx: &StepContext) -> Result<Vec<Vec<f64>>> {
        let token_loss = cx.token_loss.alone();
        let settings = CrossEntropy { token_loss, ..self.cross_entropy(1.0, cx.loss_chunk_rows) };
        let rows = of.iter().map(|(z, _)| z.as_rows()).collect::<Result<Vec<T>>>()?; // (B T, D)
        let sizes: Vec<usize> = of.iter().flat_map(|(z, _)| vec![z.dims()[1]; z.dims()[0]]).collect();
        let labels: Vec<u32> = of.iter().flat_map(|(_, batch)| batch.labels.iter().copied()).collect();
        let rows = T::joined(rows)?;
        let losses = T::linear_cross_entropies(&rows, &self.head.weight, &labels, &sizes, &settings)?;
        let mut losses = losses.into_iter();
        Ok(of.iter().map(|(z, _)| losses.by_ref().take(z.dims()[0]).collect()).collect())
    }

    /// The rows of the last stack's output (B, T, D) that a classifier reads: all, or that of each source's last token as (B, 1, D).
    fn classified(&self, z: &T, batch: &MicroBatch<T>) -> Result<T> {
        if !self.is_of_sequences {
            return Ok(z.clone());
        }
        let (samples, width) = (z.dims()[0], z.dims()[2]);
        z.as_rows()?.select(&last_rows(z, batch))?.shaped(&[samples, 1, width])
    }

    /// Logits (B, n, N) of a classifier's rows, from the last stack's output.
    pub fn class_logits(&self, z: &T, batch: &MicroBatch<T>) -> Result<T> {
        let classifier = self.classifier.as_ref().expect("a model that classifies");
        classifier.logits(&self.classified(z, batch)?)
    }

    fn classifier_backward(
        &self,
        classifier: &Classifier<T>,
        (z, batch): (&T, &MicroBatch<T>),
        cx: &StepContext,
        noise: &Noise,
        grads: &mut Gradients<T>,
    ) -> Result<(LossSums, T)> {
        let scale = 1.0 / cx.target_tokens.max(1) as f64;
        let rows = self.classified(z, batch)?;
        let labels = (batch.labels.as_slice(), batch.class_factors.as_deref());
        let (loss, drows) = classifier.backward(&rows, labels, (scale, cx.token_loss), noise, grads)?;
        if !self.is_of_sequences {
            return Ok((loss, drows));
        }
        let &[samples, length, width] = z.dims() else { unreachable!("an output has three dimensions") };
        let dz = z.zeros(&[1, samples * length, width], z.dtype())?;
        for (sample, row) in last_rows(z, batch).into_iter().enumerate() {
            dz.set_positions(&drows.part(sample, 1)?, row as usize)?;
        }
        Ok((loss, dz.shaped(z.dims())?))
    }

    /// Loss sums, and the objective's gradient of the last stack's output (B, T, D). Logits exist for a chunk of rows at a time. If the head has
    /// an adapter, or samples have weights, they exist for a sample at a time.
    pub fn head_backward(
        &self,
        z: T,
        batch: &MicroBatch<T>,
        cx: &StepContext,
        noise: &Noise,
        grads: &mut Gradients<T>,
    ) -> Result<(LossSums, T)> {
        if let Some(classifier) = &self.classifier {
            return self.classifier_backward(classifier, (&z, batch), cx, noise, grads);
        }
        if let Some(VectorGradients { pooling, values }) = &batch.vectors {
            return Ok((LossSums::default(), z.pool_backward(*pooling, batch.lengths(false), values)?));
        }
        let labels = &batch.labels;
        let gradient_scale = 1.0 / cx.target_tokens.max(1) as f64;
        if let Some(taught) = &batch.taught {
            return self.taught_head_backward(&z, (labels, taught), (gradient_scale, cx), noise, grads);
        }
        if self.head.adapter.is_some() || batch.weights.is_some() {
            let weights = batch.weights.as_deref();
            if self.head.adapter.is_none() && !grads.is_trained(&self.head.weight) {
                let factors: Vec<f64> = (0..z.dims()[0])
                    .map(|sample| weights.and_then(|all| all.get(sample)).copied().unwrap_or(1.0))
                    .collect();
                let settings = self.cross_entropy(1.0, cx.loss_chunk_rows);
                let settings = CrossEntropy { token_loss: cx.token_loss, ..settings };
                let head = &self.head.weight;
                let rows = z.as_rows()?; // (B T, D)
                let (loss, drows) =
                    T::weighted_linear_cross_entropy_backward(&rows, head, labels, &factors, &settings)?;
                return Ok((loss, drows.shaped(z.dims())?));
            }
            let scale = |sample: usize| weights.map_or(gradient_scale, |all| all.get(sample).copied().unwrap_or(1.0));
            return self.head_backward_by_sample(&z, labels, (&scale, cx), noise, grads);
        }
        self.plain_head_backward(&z, labels, (gradient_scale, cx), grads)
    }

    /// As [`Network::head_backward`], for a head without an adapter and one scale of all gradients.
    fn plain_head_backward(
        &self,
        z: &T,
        labels: &[u32],
        (gradient_scale, cx): (f64, &StepContext),
        grads: &mut Gradients<T>,
    ) -> Result<(LossSums, T)> {
        let settings =
            CrossEntropy { token_loss: cx.token_loss, ..self.cross_entropy(gradient_scale, cx.loss_chunk_rows) };
        let dw = grads.accumulator_or_empty(&self.head.weight)?;
        let dw = dw.as_ref().map(|(dw, accumulate)| (dw, *accumulate));
        let rows = z.as_rows()?; // (B T, D)
        let (loss, drows) = T::linear_cross_entropy_backward(&rows, &self.head.weight, labels, &settings, dw)?;
        Ok((loss, drows.shaped(z.dims())?))
    }

    /// As [`Network::head_backward`], where the gradients of a sample are multiplied by `scale(sample)`.
    fn head_backward_by_sample(
        &self,
        z: &T,
        labels: &[u32],
        (scale, cx): (&dyn Fn(usize) -> f64, &StepContext),
        noise: &Noise,
        grads: &mut Gradients<T>,
    ) -> Result<(LossSums, T)> {
        let &[samples, length, width] = z.dims() else { unreachable!("an output has three dimensions") };
        let dz = z.zeros(&[1, samples * length, width], z.dtype())?;
        let mut loss = LossSums::default();
        for sample in 0..samples {
            let (gradient_scale, labels) = (scale(sample), labels_of(labels, z, sample));
            if self.head.adapter.is_none() {
                let z = z.select(&[sample as u32])?;
                let (of_sample, dx) = self.plain_head_backward(&z, labels, (gradient_scale, cx), grads)?;
                loss += of_sample;
                dz.set_positions(&dx, sample * length)?;
                continue;
            }
            // Dropout masks depend on the sample.
            let noise = Noise { samples: noise.samples.get(sample..=sample).unwrap_or_default(), ..*noise };
            let x = z.select(&[sample as u32])?.scaled(self.logit_scale)?;
            let (logits, narrow) = self.head.forward_keeping(&x, &noise)?;
            let (of_sample, dlogits) =
                T::logit_cross_entropy_backward(logits, labels, gradient_scale, cx.token_loss, self.logit_cap)?;
            loss += of_sample;
            let dlogits = self.head.backward(dlogits)?;
            self.head.backward_weight(&dlogits, (&x, narrow), &noise, grads)?;
            drop(x);
            let dx = self.head.backward_input(&dlogits, None, &noise)?.scaled(self.logit_scale)?;
            drop(dlogits);
            dz.set_positions(&dx, sample * length)?;
        }
        Ok((loss, dz.shaped(z.dims())?))
    }

    /// As [`Network::head_backward`], where the objective compares with a teacher. Logits of both exist for a chunk of rows at a time, or for a
    /// sample at a time if the head has an adapter.
    fn taught_head_backward(
        &self,
        z: &T,
        (labels, taught): (&[u32], &Taught<T>),
        (gradient_scale, cx): (f64, &StepContext),
        noise: &Noise,
        grads: &mut Gradients<T>,
    ) -> Result<(LossSums, T)> {
        let &[samples, length, width] = z.dims() else { unreachable!("an output has three dimensions") };
        let rows = z.as_rows()?; // (B T, D)
        let dz = z.zeros(&[1, samples * length, width], z.dtype())?;
        let chunk = if self.head.adapter.is_some() { length } else { cx.loss_chunk_rows.max(1) };
        let mut loss = LossSums::default();
        for first in (0..samples * length).step_by(chunk) {
            let count = chunk.min(samples * length - first);
            // Dropout masks of an adapter depend on the sample.
            let sample = first / length.max(1);
            let noise = Noise { samples: noise.samples.get(sample..=sample).unwrap_or_default(), ..*noise };
            let labels = labels.get(first..first + count).unwrap_or_default();
            let teacher = match &taught.by {
                Teacher::States { states, head } => Some(head.logits(&states.as_rows()?.part(first, count)?)?),
                Teacher::Top(_) => None,
            };
            let x = rows.part(first, count)?.scaled(self.logit_scale)?;
            let (logits, narrow) = self.head.forward_keeping(&x, &noise)?;
            let (scale, of, cap) = (gradient_scale, taught.of, self.logit_cap);
            let (of_chunk, dlogits) = match (&taught.by, &teacher) {
                (Teacher::Top(top), _) => {
                    T::top_distillation_backward(logits, (top, first..first + count), labels, scale, of, cap)?
                }
                (_, Some(teacher)) => T::distillation_backward(logits, teacher, labels, scale, of, cap)?,
                (_, None) => unreachable!("states have logits"),
            };
            drop(teacher);
            loss += of_chunk;
            let dlogits = self.head.backward(dlogits)?;
            self.head.backward_weight(&dlogits, (&x, narrow), &noise, grads)?;
            drop(x);
            let dx = self.head.backward_input(&dlogits, None, &noise)?.scaled(self.logit_scale)?;
            drop(dlogits);
            dz.set_positions(&dx.shaped(&[1, count, width])?, first)?;
        }
        Ok((loss, dz.shaped(z.dims())?))
    }

    fn cross_entropy(&self, gradient_scale: f64, chunk_rows: usize) -> CrossEntropy {
        CrossEntropy {
            logit_scale: self.logit_scale,
            soft_cap: self.logit_cap,
            gradient_scale,
            chunk_rows: chunk_rows.max(1),
            ..CrossEntropy::default()
        }
    }

    /// The head of a language model, by itself.
    pub fn logit_head(&self) -> LogitHead<T> {
        LogitHead { linear: self.head.clone(), scale: self.logit_scale, cap: self.logit_cap }
    }

    /// Logits (.., V) of decoder outputs (.., D).
    pub fn logits(&self, z: &T) -> Result<T> {
        self.logit_head().logits(z)
    }
}

/// The row of each sample's last token among the rows of (B, T, D). Where operations are counted, lengths are not known.
fn last_rows<T: Ops>(z: &T, batch: &MicroBatch<T>) -> Vec<u32> {
    let (samples, longest) = (z.dims()[0], z.dims()[1]);
    let last = |sample| batch.source_lengths.get(sample).map_or(0, |length| length - 1);
    (0..samples).map(|sample| (sample * longest + last(sample)) as u32).collect()
}

/// The labels of a sample of (B, T, D). Empty where operations are counted.
fn labels_of<'a, T: Ops>(labels: &'a [u32], z: &T, sample: usize) -> &'a [u32] {
    let length = z.dims()[1];
    labels.get(sample * length..(sample + 1) * length).unwrap_or_default()
}
