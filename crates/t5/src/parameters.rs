//! The parameters of a T5: names, shapes, order. Everything else is derived from this one list.
//!
//! Names and layouts are those of transformers' `T5ForConditionalGeneration` (a weight is (out, in)). The
//! order is the model's: shared embedding, encoder, decoder, head. Parameter `i` is the same parameter in
//! [`crate::T5::parameters`], in [`crate::Gradients`] and in an optimizer's state.

use candle_core::{DType, Tensor};
use heap::LARGE_BYTES;
use t5_ops::Quantisation;

use crate::adapter::{LoraInit, is_of_adapter};
use crate::config::Config;
use crate::description::{
    AttentionDescription, BlockDescription, LinearDescription, NormKind, Positions, StackDescription,
};
use crate::error::Result;
use crate::head::is_of_classifier;
use crate::ops::{Matrix, Ops};

/// Where in the model a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The embedding table that both stacks share (and the head, when tied).
    Shared,
    /// A block of the encoder. Block 0 owns the stack's relative-position table, or each block one of its own.
    Encoder {
        /// Index of the block.
        block: usize,
    },
    /// The norm after the encoder's last block.
    EncoderNorm,
    /// A block of the decoder. Block 0 owns the stack's relative-position table, or each block one of its own.
    Decoder {
        /// Index of the block.
        block: usize,
    },
    /// The norm after the decoder's last block.
    DecoderNorm,
    /// The head's own table, when it is not tied, or the layers of a classifier.
    LmHead,
}

impl Part {
    /// Whether the part belongs to the decoder stack.
    pub fn is_decoder(&self) -> bool {
        matches!(self, Part::Decoder { .. } | Part::DecoderNorm)
    }

    /// Whether the part is a block of a stack.
    pub fn is_block(self) -> bool {
        matches!(self, Part::Encoder { .. } | Part::Decoder { .. })
    }

    /// Whether the part is a table of the vocabulary.
    pub fn is_table(self) -> bool {
        matches!(self, Part::Shared | Part::LmHead)
    }
}

/// One parameter of a model. Optimizers update `tensor` in place, or through [`crate::T5::change`] where it may lie in a file.
#[derive(Clone, Debug)]
pub struct Parameter<T = Tensor> {
    /// The Hugging Face name.
    pub name: String,
    /// The parameter's values, or its codes and scales. Layers hold the same storage.
    pub tensor: T,
    /// The parameter's place in the model.
    pub part: Part,
    /// How the bytes of a quantised parameter are read: a frozen weight of a block's product.
    pub quantisation: Option<Quantisation>,
}

impl Parameter {
    /// As [`ParameterSpec::may_be_offloaded`], whatever its size.
    pub(crate) fn is_asked_for(&self) -> bool {
        self.quantisation.is_some() || is_matrix(&self.name, self.tensor.rank())
    }
}

impl Part {
    /// The part that the head's table belongs to: the embedding's part where they are one.
    pub(crate) fn of_head(config: &Config) -> Part {
        if config.tie_word_embeddings { Part::Shared } else { Part::LmHead }
    }

    /// A unique number, without gaps where both stacks have the same number of blocks.
    pub(crate) fn index(self) -> usize {
        match self {
            Part::Shared => 0,
            Part::LmHead => 1,
            Part::EncoderNorm => 2,
            Part::DecoderNorm => 3,
            Part::Encoder { block } => 4 + 2 * block,
            Part::Decoder { block } => 5 + 2 * block,
        }
    }
}

/// Whether a parameter of this name and rank is a table of the vocabulary or the weight of a product: neither a vector, nor a table of
/// positions, nor part of an adapter, nor a classifier's.
pub fn is_matrix(name: &str, rank: usize) -> bool {
    rank == 2 && !name.contains("relative_attention_bias") && !is_of_adapter(name) && !is_of_classifier(name)
}

/// The dtype of a parameter's gradient accumulator. It is `products` for the weights of a block's products, whose gradient a
/// micro-batch adds to once. Tables are added to in many small parts (a chunk of logits, a token). Vectors and adapters are tiny
/// compared with matrices. All these stay in f32, unless `products` is f64.
pub(crate) fn gradient_dtype(name: &str, part: Part, rank: usize, products: DType) -> DType {
    let is_in_block = matches!(part, Part::Encoder { .. } | Part::Decoder { .. });
    match products {
        DType::F64 => DType::F64,
        _ if is_in_block && is_matrix(name, rank) => products,
        _ => DType::F32,
    }
}

/// The initial values of a parameter when a model is trained from scratch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initial {
    /// The same value everywhere.
    Constant(f64),
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform between `-bound` and `bound`.
    Uniform {
        /// The largest absolute value.
        bound: f64,
    },
}

/// One parameter as the configuration implies it, without memory.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// The Hugging Face name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The parameter's place in the model.
    pub part: Part,
    /// transformers' `_init_weights` for it (Mesh TensorFlow's scales).
    pub initial: Initial,
    /// How it is quantised, if it is.
    pub quantisation: Option<Quantisation>,
    /// The dtype that a frozen matrix is stored in, and keeps in a model of f32.
    pub stored: Option<DType>,
}

impl ParameterSpec {
    /// Number of values.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    /// The dtype of its values in a model of `model`. It is `model`, except that vectors, adapters and classifiers of a bf16 model are f32:
    /// vectors scale whole channels, adapters are trained by small steps, and all are a hundredth of the values.
    ///
    /// A quantised parameter has the dtype of its bytes. A frozen one that stays as it is stored has its file's dtype.
    pub fn dtype(&self, model: DType) -> DType {
        if self.quantisation.is_some() {
            return DType::U8;
        }
        if let Some(stored) = self.stored.filter(|_| model == DType::F32) {
            return stored;
        }
        let is_small = self.shape.len() == 1 || self.is_of_adapter() || is_of_classifier(&self.name);
        if model == DType::BF16 && is_small { DType::F32 } else { model }
    }

    /// Whether products of bf16 would cast this parameter in a model of `model`: the f32 weight of a product. A bf16 copy avoids the cast.
    pub fn takes_copy(&self, model: DType, config: &Config) -> bool {
        // Only rows are taken of a table that is no head.
        let is_head = || config.tie_word_embeddings && config.decoder_table().is_none_or(|table| table == self.name);
        let is_of_product = self.part != Part::Shared || is_head();
        let is_wide = self.quantisation.is_none() && self.dtype(model) == DType::F32;
        let rank = self.shape.len();
        is_wide && is_of_product && (is_matrix(&self.name, rank) || (self.is_of_adapter() && rank == 2))
    }

    /// Whether the parameter may lie elsewhere than in the memory of the processor that uses it. Passes ask for matrices alone, so a large
    /// vector or a large table of positions stays there.
    pub(crate) fn may_be_offloaded(&self, model: DType) -> bool {
        is_matrix(&self.name, self.shape.len()) && self.bytes(model) >= LARGE_BYTES as u64
    }

    /// Whether the parameter belongs to an adapter.
    pub fn is_of_adapter(&self) -> bool {
        is_of_adapter(&self.name)
    }

    /// The parameter's bytes in a model of `model`.
    pub fn bytes(&self, model: DType) -> u64 {
        match self.quantisation {
            Some(quantisation) => quantisation.bytes() as u64,
            None => self.elements() * self.dtype(model).size_in_bytes() as u64,
        }
    }

    /// The shape of the tensor that holds the parameter.
    pub(crate) fn tensor_shape(&self) -> Vec<usize> {
        self.quantisation.map_or_else(|| self.shape.clone(), |quantisation| vec![quantisation.bytes()])
    }

    /// The bytes of the parameter's gradient accumulator; see [`crate::Gradients::new`].
    pub fn gradient_bytes(&self, products: DType) -> u64 {
        let dtype = gradient_dtype(&self.name, self.part, self.shape.len(), products);
        self.elements() * dtype.size_in_bytes() as u64
    }

    /// The number of elements of all parameters of the model, including an adapter's.
    pub fn elements_of_all(config: &Config) -> u64 {
        Self::all(config).iter().map(Self::elements).sum()
    }

    /// Every parameter of the model, in the model's order. Those of an adapter follow the weight that it belongs to.
    pub fn all(config: &Config) -> Vec<ParameterSpec> {
        let mut list = List { config, specs: Vec::new() };
        let [encoder, decoder] = [false, true].map(|decoder| config.stack(decoder));
        list.table(&encoder);
        if config.decoder_table().is_some() {
            list.table(&decoder);
        }
        for block in 0..encoder.blocks {
            list.block(&config.block(false, block), Part::Encoder { block });
        }
        list.norm(encoder.final_norm, encoder.width, encoder.norm, Part::EncoderNorm);
        for block in 0..decoder.blocks {
            list.block(&config.block(true, block), Part::Decoder { block });
        }
        if config.head.has_decoder() {
            list.norm(decoder.final_norm, decoder.width, decoder.norm, Part::DecoderNorm);
        }
        if config.head.is_language() {
            let (name, shape) = (config.head_name(), [config.vocab_size, decoder.width]);
            if !config.tie_word_embeddings {
                list.normal(format!("{name}.weight"), shape.to_vec(), Part::LmHead, decoder.table_std);
            }
            list.adapter(name, shape, Part::LmHead);
        }
        if let Some((hidden, outputs)) = config.classifier_layers() {
            hidden.into_iter().chain([outputs]).for_each(|layer| list.of_classifier(&layer));
        }
        list.specs
    }
}

struct List<'a> {
    config: &'a Config,
    specs: Vec<ParameterSpec>,
}

impl List<'_> {
    /// The table of a stack's embedding.
    fn table(&mut self, stack: &StackDescription) {
        let shape = vec![self.config.vocab_size, stack.width];
        self.normal(stack.table.into(), shape, Part::Shared, stack.table_std);
    }

    fn normal(&mut self, name: String, shape: Vec<usize>, part: Part, std: f64) {
        let initial = Initial::Normal { std };
        let is_trained = self.config.lora.as_ref().is_some_and(|lora| lora.trains(&name));
        // A position bias is small, and its kernel takes no f16.
        let stays = !is_trained && !name.ends_with("relative_attention_bias.weight");
        let stored = self.config.stored.as_ref().filter(|_| stays).and_then(|stored| stored.kept(&name, DType::F32));
        self.specs.push(ParameterSpec { name, shape, part, initial, quantisation: None, stored });
    }

    /// A linear layer: its weight, and its adapter if it has one.
    fn linear(&mut self, LinearDescription { name, shape, std }: &LinearDescription, part: Part) {
        let (shape, std) = (*shape, *std);
        self.normal(format!("{name}.weight"), shape.to_vec(), part, std);
        // A layer that is trained as a whole has plain values.
        let is_trained = self.config.lora.as_ref().is_some_and(|lora| lora.saves(name));
        let precision = self.config.base_precision.filter(|_| !is_trained);
        if let (Some(precision), Some(spec)) = (precision, self.specs.last_mut()) {
            spec.stored = None;
            spec.quantisation = Some(Quantisation::new(precision, shape.into()).expect("sizes of a checked config"));
        }
        self.adapter(name, shape, part);
    }

    /// A layer of a classifier, with its bias.
    fn of_classifier(&mut self, LinearDescription { name, shape, std }: &LinearDescription) {
        let weight = Initial::Normal { std: *std };
        let of = [("weight", shape.to_vec(), weight), ("bias", vec![shape[0]], Initial::Constant(0.0))];
        for (what, shape, initial) in of {
            let name = format!("{name}.{what}");
            self.specs.push(ParameterSpec {
                name,
                shape,
                part: Part::LmHead,
                initial,
                quantisation: None,
                stored: None,
            });
        }
    }

    fn adapter(&mut self, linear: &str, [outputs, inputs]: [usize; 2], part: Part) {
        let Some(lora) = &self.config.lora else { return };
        let Some(adapter) = lora.linear(linear) else { return };
        let first = match lora.init {
            LoraInit::KaimingUniform => Initial::Uniform { bound: (inputs as f64).powf(-0.5) },
            LoraInit::Gaussian => Initial::Normal { std: 1.0 / adapter.rank as f64 },
        };
        let mut push = |name: &str, shape: &[usize], initial| {
            let (name, shape) = (format!("{linear}.{name}"), shape.to_vec());
            self.specs.push(ParameterSpec { name, shape, part, initial, quantisation: None, stored: None });
        };
        push("lora_A.weight", &[adapter.rank, inputs], first);
        push("lora_B.weight", &[outputs, adapter.rank], Initial::Constant(0.0));
        if lora.dora {
            // The lengths of the weight's rows, which are known once the weight exists.
            push("lora_magnitude_vector", &[outputs], Initial::Constant(1.0));
        }
    }

    fn norm(&mut self, name: String, width: usize, kind: NormKind, part: Part) {
        let (initial, shape) = (Initial::Constant(kind.first), vec![width]);
        self.specs.push(ParameterSpec { name, shape, part, initial, quantisation: None, stored: None });
    }

    fn block(&mut self, block: &BlockDescription, part: Part) {
        self.attention(&block.own, part);
        block.cross.iter().for_each(|cross| self.attention(cross, part));
        let feed_forward = &block.feed_forward;
        let linears = [Some(&feed_forward.gate), feed_forward.up.as_ref(), Some(&feed_forward.down)];
        linears.into_iter().flatten().for_each(|linear| self.linear(linear, part));
        let width = feed_forward.down.shape[0];
        let norms = [Some(&feed_forward.norm), feed_forward.norm_after.as_ref()];
        norms.into_iter().flatten().for_each(|norm| self.norm(norm.clone(), width, feed_forward.kind, part));
    }

    fn attention(&mut self, of: &AttentionDescription, part: Part) {
        [&of.q, &of.k, &of.v, &of.o].into_iter().for_each(|linear| self.linear(linear, part));
        if let Positions::Bias { table: Some(name) } = &of.positions {
            let shape = vec![self.config.relative_attention_num_buckets, of.heads];
            self.normal(name.clone(), shape, part, of.k.std);
        }
        of.head_norms.iter().flatten().for_each(|norm| self.norm(norm.clone(), of.head_size, of.kind, part));
        let norms = [Some(&of.norm), of.norm_after.as_ref()];
        norms.into_iter().flatten().for_each(|norm| self.norm(norm.clone(), of.o.shape[0], of.kind, part));
    }
}

/// A parameter as a layer holds it: the storage that the optimizer updates, and its index in the model.
#[derive(Clone, Debug)]
pub(crate) struct Weight<T> {
    pub index: usize,
    pub tensor: T,
    /// The values in the dtype of products, if such a copy is held.
    pub copy: Option<T>,
    pub quantisation: Option<Quantisation>,
    /// How much of a weight in a file is paged in at a time. Not used for a weight in memory.
    pub paging: PagingGranularity,
}

/// How much of a weight in a file is paged in at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PagingGranularity {
    /// With the other weights of its part.
    Together,
    /// Alone, for one product ([`crate::LayerMajor::weights_by_matrix`]).
    Alone,
    /// A window of rows at a time, for a table of the vocabulary ([`t5_ops::window_bytes`]).
    ByRows,
}

impl PagingGranularity {
    /// How a frozen weight of this part is paged where weights are read apart. The table of a head with an adapter is paged as a whole,
    /// because one of the adapter's products sums over the vocabulary.
    pub fn apart(part: Part, config: &Config) -> PagingGranularity {
        let has_adapter = || config.lora.as_ref().is_some_and(|lora| lora.linear("lm_head").is_some());
        match part {
            _ if part.is_block() => PagingGranularity::Alone,
            _ if part.is_table() && !(part == Part::of_head(config) && has_adapter()) => PagingGranularity::ByRows,
            _ => PagingGranularity::Together,
        }
    }
}

impl<T> Weight<T> {
    /// The values that products use.
    pub fn of_products(&self) -> &T {
        self.copy.as_ref().unwrap_or(&self.tensor)
    }

    /// The weight itself, for operations in its own dtype.
    pub fn whole(&self) -> Matrix<'_, T> {
        Matrix {
            tensor: &self.tensor,
            quantisation: self.quantisation,
            is_paged_by_rows: self.paging == PagingGranularity::ByRows,
        }
    }
}

impl<T: Ops> Weight<T> {
    /// Calls `f`, which needs the values. Operations on a table that is paged by rows read its rows themselves.
    pub fn here<R>(&self, f: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        if self.paging != PagingGranularity::Alone {
            return f(self);
        }
        self.tensor.page_in();
        let result = f(self);
        self.tensor.page_out();
        result
    }
}

impl<'a, T> From<&'a Weight<T>> for Matrix<'a, T> {
    fn from(weight: &'a Weight<T>) -> Self {
        Matrix { tensor: weight.of_products(), ..weight.whole() }
    }
}
