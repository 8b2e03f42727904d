//! The whole model: its parameters, and the passes over a micro-batch.

use std::io::Write;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use t5_ops::CrossEntropy;

use crate::config::Config;
use crate::context::{EvalContext, LayerContext, StepContext};
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::hf;
use crate::init::initial_tensor;
use crate::layers::attention::SourceGradient;
use crate::layers::stack::{Stack, StackSaved};
use crate::layers::{Weights, bytes};
use crate::micro_batch::MicroBatch;
use crate::parameters::{Parameter, ParameterSpec, Weight};
use crate::reach::Reach;
use crate::store::Files;
use crate::weight_file::WeightFile;

/// A T5 with its parameters in memory.
///
/// Passes borrow it; an optimizer changes the parameters' storage in place between them.
pub struct T5 {
    config: Config,
    parameters: Vec<Parameter>,
    pub(crate) shared: Weight,
    pub(crate) encoder: Stack,
    pub(crate) decoder: Stack,
    pub(crate) head: Weight,
    /// Where the large parameters lie, if not in memory.
    file: Option<WeightFile>,
}

impl std::fmt::Debug for T5 {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let values: usize = self.parameters.iter().map(|p| p.tensor.elem_count()).sum();
        f.debug_struct("T5").field("config", &self.config).field("values", &values).finish_non_exhaustive()
    }
}

impl T5 {
    /// A model from scratch, initialised as transformers does it. The same seed gives the same bits. Each
    /// parameter is kept in [`ParameterSpec::dtype`] of `dtype`.
    pub fn init(config: &Config, seed: u64, dtype: DType, device: &Device) -> Result<T5> {
        T5::init_in(config, seed, dtype, device, None)
    }

    /// [`T5::init`] whose large weights lie in a file there, if one is asked for, each as soon as it is made: memory then
    /// holds those that are worked on. Without [`heap::Allocator`] in the program they lie in memory nevertheless.
    ///
    /// # Errors
    /// [`Error::Io`], for example where the disk has no room for them.
    pub fn init_in(config: &Config, seed: u64, dtype: DType, device: &Device, files: Option<&Files>) -> Result<T5> {
        config.validate()?;
        let file = files.map(|files| WeightFile::create(files, config, dtype)).transpose()?;
        let parameter = |spec: ParameterSpec| {
            let tensor = initial_tensor(&spec, seed, spec.dtype(dtype), device)?;
            Ok(Parameter { name: spec.name, tensor: WeightFile::place(file.as_ref(), tensor)?, part: spec.part })
        };
        let parameters = ParameterSpec::all(config).into_iter().map(parameter).collect::<Result<_>>()?;
        T5::assemble(config.clone(), parameters, file)
    }

    /// Loads a Hugging Face directory, values converted to [`ParameterSpec::dtype`] of `dtype`. Needs no second
    /// copy of any tensor.
    ///
    /// # Errors
    /// Typed, naming file and tensor: see [`Error`].
    pub fn load(directory: &Path, dtype: DType, device: &Device) -> Result<T5> {
        T5::load_in(directory, dtype, device, None)
    }

    /// [`T5::load`] whose large weights lie in a file, as for [`T5::init_in`], each as soon as it is read.
    ///
    /// # Errors
    /// Those of both.
    pub fn load_in(directory: &Path, dtype: DType, device: &Device, files: Option<&Files>) -> Result<T5> {
        let (config, parameters, file) = hf::load(directory, dtype, device, files)?;
        let model = T5::assemble(config, parameters, file)?;
        // Duplicates in the files were compared with it.
        t5_ops::page_out(&model.shared.tensor);
        Ok(model)
    }

    /// Moves the weights into a file, or into memory, one by one. Nothing is done where they lie there already.
    ///
    /// # Errors
    /// Where there is no room on the disk, and the model is as it was. A failed copy, or a file that cannot be written: then it
    /// is of no use.
    pub fn move_weights(&mut self, files: Option<&Files>) -> Result<()> {
        if files.is_some() == self.file.is_some() {
            return Ok(());
        }
        let dtype = self.shared.tensor.dtype();
        let file = files.map(|files| WeightFile::create(files, &self.config, dtype)).transpose()?;
        // Whoever else holds a weight would keep it where it was.
        for stack in [&mut self.encoder, &mut self.decoder] {
            stack.blocks.clear();
        }
        let nothing = Tensor::zeros(1, DType::F32, self.device())?;
        for table in [&mut self.shared, &mut self.head] {
            table.tensor = nothing.clone();
        }
        let mut parameters = std::mem::take(&mut self.parameters);
        for parameter in &mut parameters {
            let tensor = std::mem::replace(&mut parameter.tensor, nothing.clone());
            parameter.tensor = match &file {
                Some(file) => WeightFile::place(Some(file), tensor)?,
                None => tensor.copy()?,
            };
        }
        *self = T5::assemble(self.config.clone(), parameters, file)?;
        // Where they lay is no longer needed.
        heap::release_unused();
        Ok(())
    }

    /// Whether the weights lie in a file.
    pub fn is_in_file(&self) -> bool {
        self.file.is_some()
    }

    /// Writes `config.json`, `generation_config.json` and `model.safetensors` into `directory`, tensor by
    /// tensor, and syncs each file. The bytes are a function of configuration and parameters. Atomicity is
    /// the caller's: write into a new directory and rename it.
    pub fn save(&self, directory: &Path) -> Result<()> {
        std::fs::create_dir_all(directory).map_err(Error::io(directory))?;
        hf::save(directory, &self.config, &self.parameters)
    }

    /// What [`T5::save`] writes, through sinks of the caller's, who may take checksums on the way: `file` is
    /// handed each file's name and what writes it. `directory` is for messages.
    pub fn save_with<E: From<Error>>(
        &self,
        directory: &Path,
        file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
    ) -> Result<(), E> {
        hf::save_with(directory, &self.config, &self.parameters, file)
    }

    fn assemble(config: Config, parameters: Vec<Parameter>, file: Option<WeightFile>) -> Result<T5> {
        let weights = Weights { parameters: &parameters };
        let shared = weights.get("shared.weight".into());
        let head = if config.tie_word_embeddings { shared.clone() } else { weights.get("lm_head.weight".into()) };
        let (encoder, decoder) = (Stack::new(&weights, &config, false)?, Stack::new(&weights, &config, true)?);
        Ok(T5 { config, parameters, shared, encoder, decoder, head, file })
    }

    /// Has `f` change the values of parameter `index`, wherever they lie.
    ///
    /// # Errors
    /// What `f` returns; a file that cannot be read or written.
    pub fn change<E: From<Error>>(&self, index: usize, f: impl FnOnce(&Tensor) -> Result<(), E>) -> Result<(), E> {
        let tensor = &self.parameters[index].tensor;
        let Some(file) = &self.file else { return f(tensor) };
        file.change(tensor, f)
    }

    /// The architecture.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Every parameter, in the order of [`ParameterSpec::all`].
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Where the parameters are.
    pub fn device(&self) -> &Device {
        self.shared.tensor.device()
    }

    /// One micro-batch: the sum of its token losses, and the gradient of that sum divided by
    /// `cx.target_tokens` added to `grads`. Over the micro-batches of an optimizer batch this adds up to
    /// the gradient of the mean token loss, however the batch is cut.
    pub fn forward_backward(&self, batch: &MicroBatch, cx: &StepContext, grads: &mut Gradients) -> Result<f64> {
        Ok(self.forward_backward_unless(batch, cx, grads, &|| false)?.expect("nobody interrupts"))
    }

    /// [`T5::forward_backward`] that ends early, with `None`, when `interrupted` says so. It is asked before every block,
    /// forward and backward. `grads` then hold a part of a gradient, which is to be discarded.
    ///
    /// # Errors
    /// As [`T5::forward_backward`].
    pub fn forward_backward_unless(
        &self,
        batch: &MicroBatch,
        cx: &StepContext,
        grads: &mut Gradients,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<f64>> {
        let reach = self.reach(grads);
        let Some(kept) = self.forward(batch, cx, reach, interrupted)? else { return Ok(None) };
        tracing::trace!(kept_bytes = kept.bytes(), "activations between forward and backward");
        let Kept { source_bias, target_bias, encoded, encoder, decoder, z } = kept;
        let pass = Pass::of(cx);
        let (loss, dz) = self.head_backward(z, batch, cx, grads)?;

        let mut source = match reach.encoder.enters_norm() {
            true => SourceGradient::Wanted(None),
            false => SourceGradient::NotWanted,
        };
        let (ids, layer_cx) = (&batch.decoder_inputs, pass.decoder(batch, &target_bias, &encoded));
        let (shared, into_source) = (&self.shared, &mut source);
        if !self.decoder.backward(
            ids,
            shared,
            decoder,
            dz,
            &layer_cx,
            reach.decoder,
            into_source,
            grads,
            interrupted,
        )? {
            return Ok(None);
        }
        drop(encoded);
        if let SourceGradient::Wanted(Some(dz)) = source {
            let (ids, layer_cx) = (&batch.sources, pass.encoder(batch, &source_bias));
            let none = &mut SourceGradient::NotWanted;
            if !self.encoder.backward(ids, shared, encoder, dz, &layer_cx, reach.encoder, none, grads, interrupted)? {
                return Ok(None);
            }
        }
        Ok(Some(loss))
    }

    /// How far backward reaches for the parameters that `grads` trains.
    pub(crate) fn reach(&self, grads: &Gradients) -> Reach {
        let trained = self.parameters.iter().enumerate().filter(|&(i, _)| grads.is_trainable(i));
        Reach::to(&self.config, trained.map(|(_, parameter)| parameter.part))
    }

    /// What [`T5::forward_backward`] with these accumulators holds at its peak beside them and the parameters, as a
    /// function of the micro-batch: the sum of [`crate::costs::training`] without what each thread has for itself, which
    /// is the same for all micro-batches of a run.
    pub fn training_bytes(&self, grads: &Gradients) -> impl Fn(&crate::costs::Pass) -> u64 {
        let reach = self.reach(grads);
        move |pass| crate::costs::training_bytes_within(&self.config, pass, reach)
    }

    /// Forward of a micro-batch that keeps what backward within `reach` needs. `None` when `interrupted` said so before a block.
    pub(crate) fn forward(
        &self,
        batch: &MicroBatch,
        cx: &StepContext,
        reach: Reach,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Kept>> {
        let (pass, k) = (Pass::of(cx), cx.recompute_blocks);
        let source_bias = self.bias_of(batch, false)?;
        let (ids, layer_cx) = (&batch.sources, pass.encoder(batch, &source_bias));
        let keep = |block| reach.keep_encoder_block(block, k);
        let shared = &self.shared;
        let Some((encoded, encoder)) =
            self.encoder.forward_one(ids, shared, pass.dtype, &layer_cx, reach.encoder, &keep, interrupted)?
        else {
            return Ok(None);
        };

        let target_bias = self.bias_of(batch, true)?;
        let (ids, layer_cx) = (&batch.decoder_inputs, pass.decoder(batch, &target_bias, &encoded));
        let keep = |block| reach.keep_decoder_block(block, k);
        let decoded =
            self.decoder.forward_one(ids, shared, pass.dtype, &layer_cx, reach.decoder, &keep, interrupted)?;
        Ok(decoded.map(|(z, decoder)| Kept { source_bias, target_bias, encoded, encoder, decoder, z }))
    }

    /// One of the two stacks.
    pub(crate) fn stack(&self, decoder: bool) -> &Stack {
        if decoder { &self.decoder } else { &self.encoder }
    }

    /// The position bias of a stack for a micro-batch.
    pub(crate) fn bias_of(&self, batch: &MicroBatch, decoder: bool) -> Result<Tensor> {
        let length = batch.ids(decoder).dim(1)?;
        self.stack(decoder).position_bias(length, length, 0)
    }

    /// Loss sum and gradient of the decoder's output (B, T, D); logits exist a chunk of rows at a time.
    pub(crate) fn head_backward(
        &self,
        z: Tensor,
        batch: &MicroBatch,
        cx: &StepContext,
        grads: &mut Gradients,
    ) -> Result<(f64, Tensor)> {
        let settings = CrossEntropy {
            logit_scale: self.config.logit_scale(),
            gradient_scale: 1.0 / cx.target_tokens.max(1) as f64,
            chunk_rows: cx.loss_chunk_rows.max(1),
        };
        let dw = grads.accumulator_or_empty(&self.head)?;
        let dw = dw.as_ref().map(|(dw, accumulate)| (dw, *accumulate));
        let rows = z.flatten_to(1)?; // (B T, D)
        let (loss, drows) =
            t5_ops::linear_cross_entropy_backward(&rows, &self.head.tensor, &batch.labels, &settings, dw)?;
        Ok((loss, drows.reshape(z.shape())?))
    }

    /// The sum of a micro-batch's token losses, without dropout and without keeping anything.
    pub fn loss(&self, batch: &MicroBatch, cx: &EvalContext) -> Result<f64> {
        Ok(self.loss_unless(batch, cx, &|| false)?.expect("nobody interrupts"))
    }

    /// [`T5::loss`] that ends early, with `None`, when `interrupted`, asked before every block, says so.
    ///
    /// # Errors
    /// As [`T5::loss`].
    pub fn loss_unless(
        &self,
        batch: &MicroBatch,
        cx: &EvalContext,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<f64>> {
        let Some(z) = self.decoder_output(batch, cx.activations, interrupted)? else { return Ok(None) };
        let settings = CrossEntropy {
            logit_scale: self.config.logit_scale(),
            gradient_scale: 1.0,
            chunk_rows: cx.loss_chunk_rows.max(1),
        };
        let loss = t5_ops::linear_cross_entropy(&z.flatten_to(1)?, &self.head.tensor, &batch.labels, &settings)?;
        t5_ops::page_out(&self.head.tensor);
        Ok(Some(loss))
    }

    /// All logits (B, T, V), without dropout, in the parameters' dtype. Large: for tests and small batches.
    pub fn logits(&self, batch: &MicroBatch) -> Result<Tensor> {
        let z = self.decoder_output(batch, self.shared.tensor.dtype(), &|| false)?;
        self.head_logits(&z.expect("nobody interrupts"))
    }

    /// The encoder's output (B, S, D), without dropout.
    pub fn encode(&self, batch: &MicroBatch, activations: DType) -> Result<Tensor> {
        Ok(self.encode_unless(batch, activations, &|| false)?.expect("nobody interrupts"))
    }

    fn encode_unless(
        &self,
        batch: &MicroBatch,
        activations: DType,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Tensor>> {
        let pass = Pass::without_dropout(activations);
        let bias = self.bias_of(batch, false)?;
        self.encoder.output(&batch.sources, &self.shared, pass.dtype, &pass.encoder(batch, &bias), interrupted)
    }

    fn decoder_output(
        &self,
        batch: &MicroBatch,
        activations: DType,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Tensor>> {
        let Some(encoded) = self.encode_unless(batch, activations, interrupted)? else { return Ok(None) };
        let pass = Pass::without_dropout(activations);
        let bias = self.bias_of(batch, true)?;
        let cx = pass.decoder(batch, &bias, &encoded);
        self.decoder.output(&batch.decoder_inputs, &self.shared, pass.dtype, &cx, interrupted)
    }

    /// Logits of decoder outputs (.., D).
    pub(crate) fn head_logits(&self, z: &Tensor) -> Result<Tensor> {
        let scale = self.config.logit_scale();
        let scaled = if scale == 1.0 { z.clone() } else { z.affine(scale, 0.0)? };
        Ok(t5_ops::linear(&scaled, &self.head.tensor)?)
    }
}

/// Everything between forward and backward of one micro-batch.
#[derive(Debug)]
pub(crate) struct Kept {
    pub source_bias: Tensor,
    pub target_bias: Tensor,
    /// The encoder's output (B, S, D).
    pub encoded: Tensor,
    pub encoder: StackSaved,
    pub decoder: StackSaved,
    /// The decoder's output (B, T, D).
    pub z: Tensor,
}

impl Kept {
    pub fn bytes(&self) -> u64 {
        let tensors = bytes(&[&self.source_bias, &self.target_bias, &self.encoded, &self.z]);
        tensors + self.encoder.bytes() + self.decoder.bytes()
    }
}

/// What the layers of both stacks are told alike.
pub(crate) struct Pass {
    seed: u64,
    step: u64,
    dropout: f64,
    dtype: DType,
}

impl Pass {
    pub fn of(cx: &StepContext) -> Pass {
        Pass { seed: cx.seed, step: cx.step, dropout: cx.dropout, dtype: cx.activations }
    }

    fn without_dropout(dtype: DType) -> Pass {
        Pass { seed: 0, step: 0, dropout: 0.0, dtype }
    }

    pub fn encoder<'a>(&self, batch: &'a MicroBatch, bias: &'a Tensor) -> LayerContext<'a> {
        let &Pass { seed, step, dropout, .. } = self;
        LayerContext {
            seed,
            step,
            dropout,
            samples: &batch.samples,
            lengths: &batch.source_lengths,
            bias,
            source: None,
        }
    }

    pub fn decoder<'a>(&self, batch: &'a MicroBatch, bias: &'a Tensor, encoded: &'a Tensor) -> LayerContext<'a> {
        let &Pass { seed, step, dropout, .. } = self;
        let source = Some((encoded, batch.source_lengths.as_slice()));
        LayerContext { seed, step, dropout, samples: &batch.samples, lengths: &batch.target_lengths, bias, source }
    }
}
