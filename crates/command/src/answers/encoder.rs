//! [`Encoder`]: a model that makes vectors, before it is planned and loaded.

use std::path::{Path, PathBuf};

use candle_core::Device;
use t5::Head;
use t5::peft::AdapterDirectory;

use crate::answers::batches::{self, Room, Sources};
use crate::answers::inference::{Asked, Planned};
use crate::answers::prompts::{Inputs, Limits};
use crate::answers::vectors::Vectors;
use crate::cli::answer_flags::WeightFlags;
use crate::config::PricesFrom;
use crate::failure::Outcome;
use crate::files::sentence_transformers::{Dense, Modules};
use crate::machine::device;
use crate::machine::stages::{self, Stages};
use crate::model::model_directory::{self, Adapted};

/// The tokens of a text, unless a flag or the model says another number.
const MAX_SOURCE_TOKENS: usize = 512;

/// What flags say of an encoder.
pub struct EncoderFlags<'a> {
    /// The model, and the adapter beside it.
    pub model: &'a Path,
    pub adapter: Option<&'a Path>,
    /// A pooling in place of the model's own modules.
    pub pooling: Option<t5::Pooling>,
    /// Whether vectors have length 1, whatever the modules say.
    pub normalize: bool,
    /// The limit of tokens of a text; `None` takes that of the model's modules, or 512.
    pub max_source_tokens: Option<usize>,
    /// Texts of full length in a batch.
    pub batch_samples: usize,
    pub precision: trainer::Precision,
    pub weights: &'a WeightFlags,
    pub device: Option<&'a str>,
}

/// A model that makes vectors.
pub struct Encoder<'a> {
    flags: EncoderFlags<'a>,
    directory: PathBuf,
    adapter: Option<PathBuf>,
    config: t5::Config,
    vectors: Vectors,
    max_tokens: usize,
    tokenizer: dataloader::Tokenizer,
    device: Option<Device>,
    stages: Stages,
}

impl<'a> Encoder<'a> {
    /// Reads all but the weights.
    ///
    /// # Errors
    /// The model is no encoder, or its files cannot be used.
    pub fn open(flags: EncoderFlags<'a>) -> Outcome<Self> {
        flags.max_source_tokens.map_or(Ok(()), batches::check_length)?;
        let mut stages = Stages::begin()?;
        let device = device::named(flags.device)?;
        let Adapted { directory, adapter } = model_directory::find_as_trained(flags.model, flags.adapter)?;
        let mut config = t5::Config::from_file(&directory.join("config.json"))?.with_head(Head::Encoder)?;
        if let Some(adapter) = &adapter {
            config = AdapterDirectory::open(adapter, &config)?.beside(&config)?;
        }
        let given = flags.pooling.map(|pooling| Modules { pooling, ..Modules::default() });
        let modules = match given {
            Some(modules) => modules,
            None => Modules::resolve(&directory, flags.adapter.into_iter().chain([flags.model]))?,
        };
        let max_tokens = flags.max_source_tokens.or(modules.max_tokens).unwrap_or(MAX_SOURCE_TOKENS);
        let modules = Modules { normalizes: modules.normalizes || flags.normalize, ..modules };
        let dense = modules.dense.as_ref().map(|dense| Dense::load(dense, config.vector_width())).transpose()?;
        let tokenizer = model_directory::tokenizer(&directory)?;
        model_directory::check_size(&config, &tokenizer)?;
        stages.ends(stages::TOKENIZER)?;
        let vectors = Vectors { modules, dense, activations: flags.precision.activations() };
        Ok(Self { flags, directory, adapter, config, vectors, max_tokens, tokenizer, device, stages })
    }

    /// The numbers of a vector.
    pub fn width(&self) -> usize {
        self.vectors.width(&self.config)
    }

    /// The texts of a window.
    pub fn window(&self) -> usize {
        batches::window(self.flags.batch_samples)
    }

    /// The files that vectors depend on, and as text all else that they follow from.
    pub fn depends_on(&self) -> Outcome<(Vec<PathBuf>, String)> {
        let of = (self.directory.as_path(), self.adapter.as_deref());
        let (mut files, model) = model_directory::depends_on(of, &self.config, &self.tokenizer)?;
        files.extend(self.vectors.modules.dense.iter().map(|dense| dense.join("model.safetensors")));
        let own = (&self.vectors.modules, self.max_tokens, self.vectors.activations, self.device.is_some());
        // The debug form is compared with an earlier one, and never shown.
        Ok((files, format!("{model} {own:?}")))
    }

    /// The plan for reading an input, with `held` bytes beside a window of texts and its vectors.
    pub fn plan(&self, inputs: Inputs<'_>, held: u64) -> Outcome<(Planned<'_>, Limits)> {
        let asked = Asked {
            directory: &self.directory,
            adapter: self.adapter.as_deref(),
            config: &self.config,
            device: self.device.as_ref(),
            prices: PricesFrom::of_environment(),
            activations: self.vectors.activations,
            parameters: None,
            flags: self.flags.weights,
            stages: &self.stages,
        };
        let (rows, tokens) = (self.window(), self.max_tokens);
        // A vector is computed, and copied to its place.
        let window = (rows * (4 * tokens + 8 * self.config.vector_width().max(self.width()) + 64)) as u64;
        let held = held + window + self.vectors.bytes();
        asked.plan_to_read(inputs, self.flags.weights.budgets()?, |within| {
            batches::shape(self.flags.batch_samples, tokens, held, within)
        })
    }

    /// Makes tokens of texts, each behind this prefix.
    pub fn sources<'b>(&'b self, prefix: &'b str) -> Sources<'b> {
        Sources::new(&self.tokenizer, prefix, &self.config, self.max_tokens)
    }

    /// The room for a batch.
    pub fn room(&self, planned: &Planned<'_>) -> Outcome<Room> {
        Room::left_by(planned, self.max_tokens)
    }

    /// The vectors of a window of sources, one after the other.
    pub fn compute(&self, model: &t5::T5, room: &Room, sources: &[Vec<u32>]) -> Outcome<Vec<f32>> {
        let sources: Vec<&[u32]> = sources.iter().map(Vec::as_slice).collect();
        room.compute(&sources, self.width(), &mut |batch| self.vectors.compute(model, batch, &|| ()))
    }
}
