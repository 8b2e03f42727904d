//! The served models: a base, and adapters beside it that are loaded on demand.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use candle_core::{DType, Device};
use dataloader::Tokenizer;
use row_files::Template;
use t5::peft::AdapterDirectory;
use t5::{ContinuousBatch, Head, Lora, T5};

use crate::answers::inference::Asked;
use crate::answers::ranker::{self, OfRun, Ranker};
use crate::answers::vectors::Vectors;
use crate::cli::answer_flags::ModelsFlags;
use crate::commands::generate::MAX_NEW_TOKENS;
use crate::config::{PricesFrom, Values};
use crate::failure::{Failure, Outcome};
use crate::files::sentence_transformers::{Dense, Modules};
use crate::machine::stages::{self, Stages};
use crate::model::model_directory::{self, Adapted};

/// The models that the flags name. Their weights are not loaded.
#[derive(Debug)]
pub struct Named {
    /// The directory of the base.
    pub directory: PathBuf,
    /// The config of the base.
    pub base: t5::Config,
    pub tokenizer: Tokenizer,
    /// The settings of answers: the model's own, overridden by the flags.
    pub values: Values,
    /// The model's own longest answer in tokens.
    most_new_tokens: Option<usize>,
    pub activations: DType,
    /// The model that was named first, followed by the adapters.
    pub served: Vec<Served>,
    /// How vectors are made, if the base is an encoder.
    pub vectors: Option<Vectors>,
    /// The memory of opening them.
    stages: Stages,
}

impl Named {
    /// Finds the models. The first is called `name`, or by the name of its directory.
    pub fn find(flags: &ModelsFlags, name: Option<String>) -> Outcome<Self> {
        let mut stages = Stages::begin()?;
        let named = flags.named.as_ref().or(flags.model.as_ref());
        let named = named.ok_or_else(|| Failure::usage("no model is named"))?;
        let Adapted { directory, adapter } = model_directory::find_as_trained(named, None)?;
        let base = t5::Config::from_file(&directory.join("config.json"))?;
        let base = match &base.head {
            Head::Encoder => base,
            Head::Sequence(labels) if labels.is_number() => base,
            _ => base.with_head(Head::Language)?,
        };
        let (values, most_new_tokens) = flags.decoding.over(&base)?;
        let tokenizer = flags.decoding.tokenizer(&directory, &base, &values)?;
        stages.ends(stages::TOKENIZER)?;
        let activations = trainer::Precision::from(flags.precision).activations();
        let name = name.unwrap_or_else(|| name_of(adapter.as_deref().unwrap_or(&directory)));
        let ranking = |trained: &[&Path]| ranking(&base, &tokenizer, trained);
        let of_base = adapter.as_deref().into_iter().chain([named.as_path(), &directory]).collect::<Vec<_>>();
        let first = Served::open(name, &base, adapter.as_deref(), activations)?;
        let mut served = vec![Served { ranking: ranking(&of_base), ..first }];
        let vectors = match base.head {
            Head::Encoder => Some(vectors(&directory, &of_base, (&base, activations))?),
            _ => None,
        };
        for text in &flags.adapter {
            let (name, directory) = named_adapter(text)?;
            if served.iter().any(|other| other.name == name) {
                return Err(Failure::usage(format!("--adapter {text}: there is a model `{name}` already"))
                    .hint("give it another name: `--adapter NAME=DIR`"));
            }
            let other = Served::open(name, &base, Some(&directory), activations)?;
            served.push(Served { ranking: ranking(&[&directory]), ..other });
        }
        Ok(Self { directory, base, tokenizer, values, most_new_tokens, activations, served, vectors, stages })
    }

    /// The longest answer in tokens: that of a flag, of the model, or the usual one.
    pub fn max_new_tokens(&self, of_flag: Option<usize>) -> usize {
        of_flag.or(self.most_new_tokens).unwrap_or(MAX_NEW_TOKENS).max(1)
    }

    /// The job to plan: the base with the largest adapter, because an adapter's products take memory, too.
    pub fn asked<'a>(&'a self, flags: &'a ModelsFlags, device: Option<&'a Device>) -> Asked<'a> {
        let largest = self.served.iter().max_by_key(|served| served.bytes);
        Asked {
            directory: &self.directory,
            adapter: None,
            config: largest.map_or(&self.base, |served| &served.config),
            device,
            prices: PricesFrom::of_environment(),
            activations: self.activations,
            parameters: None,
            flags: &flags.weights,
            stages: &self.stages,
        }
    }
}

/// A model with its name.
#[derive(Debug)]
pub struct Served {
    /// The name for clients.
    pub name: String,
    /// The directory of its adapter; `None`: the base.
    pub adapter: Option<PathBuf>,
    /// The config of the model.
    pub config: t5::Config,
    /// Bytes of the adapter's weights.
    pub bytes: u64,
    /// How it ranks texts, or why it does not.
    pub ranking: Result<(Ranker, Template), String>,
}

impl Served {
    /// The base alone, or with the adapter in a directory. No weights are loaded.
    pub fn open(name: String, base: &t5::Config, adapter: Option<&Path>, dtype: DType) -> Outcome<Self> {
        let config = match adapter {
            Some(directory) => AdapterDirectory::open(directory, base)?.beside(base)?,
            None => base.clone(),
        };
        let bytes = t5::costs::parameters(&config, dtype).saturating_sub(t5::costs::parameters(base, dtype));
        Ok(Self { name, adapter: adapter.map(Path::to_owned), config, bytes, ranking: Err(String::new()) })
    }

    fn lora(&self) -> Option<&Lora> {
        self.config.lora.as_ref()
    }
}

/// How a model ranks texts: as the run that made it, or else as monoT5.
fn ranking(base: &t5::Config, tokenizer: &Tokenizer, trained: &[&Path]) -> Result<(Ranker, Template), String> {
    let of_run = OfRun::find(trained.iter().copied());
    let template = Template::parse(of_run.template.as_deref().unwrap_or(ranker::USUAL_TEMPLATE))?;
    let ranker =
        Ranker::open(base, tokenizer, &of_run.answers(), "ranking.answers").map_err(|failure| failure.message)?;
    Ok((ranker, template))
}

/// How an encoder makes vectors.
fn vectors(directory: &Path, trained: &[&Path], (base, activations): (&t5::Config, DType)) -> Outcome<Vectors> {
    let modules = Modules::resolve(directory, trained.iter().copied())?;
    let dense = modules.dense.as_ref().map(|dense| Dense::load(dense, base.vector_width())).transpose()?;
    Ok(Vectors { modules, dense, activations })
}

/// `NAME=DIR`, or a directory, which gives the name.
fn named_adapter(text: &str) -> Outcome<(String, PathBuf)> {
    let (name, directory) = match text.split_once('=') {
        Some((name, directory)) => (name.to_owned(), directory),
        None => (name_of(Path::new(text)), text),
    };
    let is_plain = |letter: char| !letter.is_control() && !letter.is_whitespace();
    if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
        return Err(Failure::usage(format!("--adapter {text}: expected a name of 1 to 64 characters without spaces"))
            .hint("for example `--adapter formal=runs/formal`"));
    }
    Ok((name, AdapterDirectory::find(Path::new(directory))?))
}

/// The name of a directory; for `model` and `adapter` of a run, the run's name.
fn name_of(directory: &Path) -> String {
    let directory = regular_file::real_path(directory).unwrap_or_else(|_| directory.to_owned());
    let is_part = directory.file_name().is_some_and(|name| name == "model" || name == "adapter");
    let named = if is_part { directory.parent().unwrap_or(&directory) } else { &directory };
    let name = named.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name: String = name.chars().filter(|letter| !letter.is_whitespace() && !letter.is_control()).take(64).collect();
    if name.is_empty() { "model".to_owned() } else { name }
}

/// The models in memory, each with the sources that it is answering.
#[derive(Debug)]
pub struct Loaded {
    base: Rc<T5>,
    activations: DType,
    all: Vec<Model>,
    /// The most adapters in memory.
    most: usize,
    /// A counter of uses.
    uses: u64,
    /// The model of a pass that stands still, which stays in memory.
    pinned: Option<usize>,
}

#[derive(Debug)]
struct Model {
    /// The model's index among the served models.
    number: usize,
    together: ContinuousBatch,
    last_use: u64,
    is_adapter: bool,
}

/// The most tokens of texts that are computed together. Beyond it, a processor computes them no sooner, and others wait for longer.
const BATCH_TOKENS: usize = 256;

/// The same where a pass takes about as long for more of them: on a card, and where each pass reads the weights from files.
const LARGE_BATCH_TOKENS: usize = 4 * BATCH_TOKENS;

impl Loaded {
    /// The base, with space for `most` adapters.
    pub fn new(base: T5, activations: DType, most: usize) -> Self {
        Self { base: Rc::new(base), activations, all: Vec::new(), most, uses: 0, pinned: None }
    }

    /// Whether a model is in memory, or can be loaded now.
    pub fn has_space(&self, number: usize, served: &Served) -> bool {
        let adapters = || self.all.iter().filter(|model| model.is_adapter);
        served.adapter.is_none()
            || self.all.iter().any(|model| model.number == number)
            || adapters().count() < self.most
            || adapters().any(|model| self.is_idle(model))
    }

    /// The sources of a model. Loads the model if necessary, in place of the adapter that was least recently used.
    ///
    /// # Errors
    /// An adapter that cannot be read.
    pub fn get(&mut self, number: usize, served: &Served) -> Outcome<&mut ContinuousBatch> {
        self.uses += 1;
        if let Some(place) = self.all.iter().position(|model| model.number == number) {
            self.all[place].last_use = self.uses;
            return Ok(&mut self.all[place].together);
        }
        if served.adapter.is_some() && self.all.iter().filter(|model| model.is_adapter).count() >= self.most {
            let idle = |model: &&Model| model.is_adapter && self.is_idle(model);
            let oldest = self.all.iter().filter(idle).min_by_key(|model| model.last_use).map(|model| model.number);
            let oldest = oldest.ok_or_else(|| Failure::internal("every adapter in memory is in use"))?;
            self.all.retain(|model| model.number != oldest);
            heap::release_unused();
        }
        let model = match (&served.adapter, served.lora()) {
            (Some(directory), Some(lora)) => {
                let model = self.base.beside_adapter(lora.clone())?;
                AdapterDirectory::open(directory, self.base.config())?.fill(model.parameters())?;
                Rc::new(model)
            }
            _ => Rc::clone(&self.base),
        };
        let together = ContinuousBatch::new(model, self.activations);
        self.all.push(Model { number, together, last_use: self.uses, is_adapter: served.adapter.is_some() });
        Ok(&mut self.all.last_mut().expect("just pushed").together)
    }

    fn is_idle(&self, model: &Model) -> bool {
        model.together.is_empty() && self.pinned != Some(model.number)
    }

    /// Keeps a model in memory, whether or not it has sources.
    pub fn pin(&mut self, number: Option<usize>) {
        self.pinned = number;
    }

    /// Whether passes can stand still: weights that each pass fetches have memory for one pass, and a card has its own order.
    pub fn can_pause(&self) -> bool {
        self.base.device().is_cpu() && !self.base.is_in_file() && !self.base.has_remote_weights()
    }

    /// The most tokens of texts that are computed together.
    pub fn batch_tokens(&self) -> usize {
        if self.base.device().is_cpu() && !self.base.is_in_file() { BATCH_TOKENS } else { LARGE_BATCH_TOKENS }
    }

    /// The numbers of the models that are answering.
    pub fn busy(&self) -> Vec<usize> {
        self.all.iter().filter(|model| !model.together.is_empty()).map(|model| model.number).collect()
    }

    /// The sources of a model in memory.
    pub fn together(&mut self, number: usize) -> Option<&mut ContinuousBatch> {
        self.all.iter_mut().find(|model| model.number == number).map(|model| &mut model.together)
    }
}
