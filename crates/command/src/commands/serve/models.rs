//! The models that are served: a base, and adapters beside it that are loaded when they are asked for.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use candle_core::DType;
use t5::peft::AdapterDirectory;
use t5::{AnswersTogether, Lora, T5};

use crate::failure::{Failure, Outcome};

/// A model by its name.
#[derive(Debug)]
pub struct Served {
    /// For clients.
    pub name: String,
    /// The directory of its adapter; none: the base.
    pub adapter: Option<PathBuf>,
    /// Its shape.
    pub config: t5::Config,
    /// Bytes of the adapter's weights.
    pub bytes: u64,
}

impl Served {
    /// The base alone, or with the adapter of a directory. Nothing is loaded.
    pub fn open(name: String, base: &t5::Config, adapter: Option<&Path>, dtype: DType) -> Outcome<Self> {
        let mut config = base.clone();
        if let Some(directory) = adapter {
            config = config.with_adapter(AdapterDirectory::open(directory, base)?.lora(base))?;
        }
        let bytes = t5::costs::parameters(&config, dtype).saturating_sub(t5::costs::parameters(base, dtype));
        Ok(Self { name, adapter: adapter.map(Path::to_owned), config, bytes })
    }

    fn lora(&self) -> Option<&Lora> {
        self.config.lora.as_ref()
    }
}

/// `NAME=DIR`, or a directory whose name it has.
pub fn named(text: &str) -> Outcome<(String, PathBuf)> {
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

/// What a directory is called: for `model` and `adapter` of a run, the run.
pub fn name_of(directory: &Path) -> String {
    let directory = std::fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
    let is_part = directory.file_name().is_some_and(|name| name == "model" || name == "adapter");
    let named = if is_part { directory.parent().unwrap_or(&directory) } else { &directory };
    let name = named.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name: String = name.chars().filter(|letter| !letter.is_whitespace() && !letter.is_control()).take(64).collect();
    if name.is_empty() { "model".to_owned() } else { name }
}

/// The models in memory, each with the sources that it answers.
#[derive(Debug)]
pub struct Loaded {
    base: Rc<T5>,
    activations: DType,
    all: Vec<Model>,
    /// Adapters in memory, at most.
    most: usize,
    /// Counts uses.
    uses: u64,
}

#[derive(Debug)]
struct Model {
    /// Among those that are served.
    number: usize,
    together: AnswersTogether,
    last_use: u64,
    is_adapter: bool,
}

impl Loaded {
    /// The base, with space for so many adapters.
    pub fn new(base: T5, activations: DType, most: usize) -> Self {
        Self { base: Rc::new(base), activations, all: Vec::new(), most, uses: 0 }
    }

    /// Whether a model is in memory, or could be now.
    pub fn has_space(&self, number: usize, served: &Served) -> bool {
        let adapters = || self.all.iter().filter(|model| model.is_adapter);
        served.adapter.is_none()
            || self.all.iter().any(|model| model.number == number)
            || adapters().count() < self.most
            || adapters().any(|model| model.together.is_empty())
    }

    /// The sources of a model, which is loaded where it is not there. The adapter that was not used for longest makes way.
    ///
    /// # Errors
    /// An adapter that cannot be read.
    pub fn get(&mut self, number: usize, served: &Served) -> Outcome<&mut AnswersTogether> {
        self.uses += 1;
        if let Some(place) = self.all.iter().position(|model| model.number == number) {
            self.all[place].last_use = self.uses;
            return Ok(&mut self.all[place].together);
        }
        if served.adapter.is_some() && self.all.iter().filter(|model| model.is_adapter).count() >= self.most {
            let idle = |model: &&Model| model.is_adapter && model.together.is_empty();
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
        let together = AnswersTogether::new(model, self.activations);
        self.all.push(Model { number, together, last_use: self.uses, is_adapter: served.adapter.is_some() });
        Ok(&mut self.all.last_mut().expect("just pushed").together)
    }

    /// The numbers of the models that answer somebody.
    pub fn busy(&self) -> Vec<usize> {
        self.all.iter().filter(|model| !model.together.is_empty()).map(|model| model.number).collect()
    }

    /// The sources of a model in memory.
    pub fn together(&mut self, number: usize) -> Option<&mut AnswersTogether> {
        self.all.iter_mut().find(|model| model.number == number).map(|model| &mut model.together)
    }
}
