//! A model as its directory stores it, with the changes of an adapter if there is one: values in f32, some rows at a time.
//!
//! Code that writes a model in another format, or merged, reads it here. Memory holds only the requested rows, and the
//! adapter of their linear layer.
//!
//! A merged weight is `W + s B A`, or with DoRA `m (W + s B A) / ||W + s B A||` by rows. All arithmetic is in f32.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{D, DType, Device, Tensor};

use super::load::StoredFiles;
use super::peft::{AdaptedLinear, AdapterDirectory};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::head::{Head, is_of_classifier};

const HEAD: &str = "lm_head.weight";

/// Bytes of a weight's rows in f32 that are read at a time. With an adapter up to four copies of them are in memory.
const ROWS_BYTES: usize = 4 << 20;

/// A model directory in which every tensor has a place in the model, and the adapter beside it.
///
/// Parameters have the names of [`crate::ParameterSpec::all`] for [`Self::config`].
#[derive(Debug)]
pub struct StoredModel {
    files: StoredFiles,
    config: Config,
    /// Whether the base's head is its shared table.
    is_tied: bool,
    adapter: Option<Adapter>,
}

#[derive(Debug)]
struct Adapter {
    directory: AdapterDirectory,
    /// The linear layers, by the name of the weight.
    linears: BTreeMap<String, AdaptedLinear>,
}

impl StoredModel {
    /// Opens a model directory, and with it the directory of an adapter, or of the run that made an adapter.
    ///
    /// # Errors
    /// As [`crate::T5::load`] and [`AdapterDirectory::open`]; [`Error::Config`] for weights that are quantised.
    pub fn open(directory: &Path, adapter: Option<&Path>) -> Result<StoredModel> {
        let config = Config::from_file(&directory.join("config.json"))?;
        StoredModel::with_config(directory, config.with_head(Head::Language)?, adapter)
    }

    /// As [`StoredModel::open`], with the head that the adapter was trained with.
    pub(super) fn below(directory: &Path, adapter: &Path) -> Result<StoredModel> {
        let config = Config::from_file(&directory.join("config.json"))?;
        let config = AdapterDirectory::model_below(adapter, &config)?;
        StoredModel::with_config(directory, config, Some(adapter))
    }

    fn with_config(directory: &Path, mut config: Config, adapter: Option<&Path>) -> Result<StoredModel> {
        config.refuse_quantised(match adapter {
            Some(_) => "the model that these weights were made from: an adapter is merged into that one",
            None => "the model that these weights were made from",
        })?;
        let files = StoredFiles::open(directory, &config)?;
        config.tie_word_embeddings = files.is_tied(&config)?;
        let is_tied = config.tie_word_embeddings;
        let adapter = adapter.map(|adapter| AdapterDirectory::open(adapter, &config)).transpose()?;
        let replaced = adapter.as_ref().map_or(&[][..], |adapter| &adapter.layout().saved);
        // The base of a classifier may have none.
        files.check_names(directory, &config, &|name| {
            is_of_classifier(name) && replaced.iter().any(|(saved, _)| saved == name)
        })?;
        let adapter = adapter.map(|directory| {
            let named = |linear: &AdaptedLinear| (format!("{}.weight", linear.name), linear.clone());
            let linears = directory.layout().linears.iter().map(named).collect();
            Adapter { directory, linears }
        });
        if let Some(prefix) = adapter.as_ref().and_then(|adapter| adapter.directory.source_prefix()) {
            config.set_prefix(prefix);
        }
        config.tie_word_embeddings &= !adapter.as_ref().is_some_and(|adapter| adapter.changes(HEAD));
        let model = StoredModel { files, config, is_tied, adapter };
        model.check_head()?;
        Ok(model)
    }

    /// The configuration of the model. Its head is tied if the weights are and the adapter does not change that.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether the head, tied to the embedding in the base, has weights of its own with the adapter.
    pub fn parts_head(&self) -> bool {
        self.is_tied && !self.config.tie_word_embeddings
    }

    /// The dtype that a parameter is stored in, without the adapter.
    ///
    /// # Errors
    /// [`Error::TensorMismatch`] for a parameter that is no float.
    pub fn stored_as(&self, name: &str) -> Result<DType> {
        match &self.adapter {
            Some(adapter) if is_of_classifier(name) && adapter.replaces(name) => Ok(DType::F32),
            _ => self.files.stored_as(self.base_name(name)),
        }
    }

    /// The best number of rows, of `columns` values each, to read at a time.
    pub fn rows_at_a_time(columns: usize) -> usize {
        (ROWS_BYTES / size_of::<f32>() / columns.max(1)).max(1)
    }

    /// The files of the weights.
    pub(super) fn files(&self) -> &StoredFiles {
        &self.files
    }

    /// Opens a parameter for reading some rows at a time, with the adapter of its layer.
    pub(super) fn parameter<'a>(&'a self, name: &'a str) -> Result<StoredParameter<'a>> {
        let Some(adapter) = &self.adapter else { return Ok(StoredParameter { model: self, name, factors: None }) };
        let factors = match adapter.linears.get(name) {
            Some(linear) if !adapter.replaces(name) => Some(Factors::read(&adapter.directory, linear)?),
            _ => None,
        };
        Ok(StoredParameter { model: self, name, factors })
    }

    /// Hands the values of a parameter to `each`, some rows at a time and in their order.
    ///
    /// # Errors
    /// [`Error::Io`], and the errors of `each`.
    pub fn each_rows<E: From<Error>>(
        &self,
        name: &str,
        shape: &[usize],
        mut each: impl FnMut(&[f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let parameter = self.parameter(name)?;
        let at_a_time = Self::rows_at_a_time(shape[1..].iter().product());
        for first in (0..shape[0]).step_by(at_a_time) {
            let rows = parameter.rows(first, at_a_time.min(shape[0] - first))?;
            let values = rows.flatten_all().and_then(|rows| rows.to_vec1::<f32>()).map_err(Error::from)?;
            each(&values)?;
        }
        Ok(())
    }

    /// The number of linear layers that have an adapter.
    pub(super) fn adapted_linears(&self) -> usize {
        self.adapter.as_ref().map_or(0, |adapter| adapter.linears.len())
    }

    /// The number of parameters that the adapter replaces.
    pub(super) fn replaced(&self) -> usize {
        self.adapter.as_ref().map_or(0, |adapter| adapter.directory.layout().saved.len())
    }

    /// The name of a parameter in the base: for a head that is tied there, the shared table.
    fn base_name<'a>(&self, name: &'a str) -> &'a str {
        let name = if name == HEAD && self.is_tied { "shared.weight" } else { name };
        self.files.name_of(name)
    }

    /// Checks that the head's weight that PEFT stores below an adapter of the head equals the base's.
    fn check_head(&self) -> Result<()> {
        let Some(Adapter { directory: adapter, .. }) = &self.adapter else { return Ok(()) };
        let Some(below) = adapter.head_below() else { return Ok(()) };
        let Config { vocab_size, d_model, .. } = self.config;
        let rows = Self::rows_at_a_time(d_model);
        for first in (0..vocab_size).step_by(rows) {
            let count = rows.min(vocab_size - first);
            let one = adapter.rows(below, first, count)?;
            let other = self.files.rows(self.base_name(HEAD), first, count)?;
            if one.ne(&other)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()? != 0.0 {
                return Err(adapter.other_head());
            }
        }
        Ok(())
    }
}

impl Adapter {
    /// Whether the adapter replaces this parameter as a whole.
    fn replaces(&self, name: &str) -> bool {
        self.directory.layout().saved.iter().any(|(saved, _)| saved == name)
    }

    fn changes(&self, name: &str) -> bool {
        self.linears.contains_key(name) || self.replaces(name)
    }
}

/// A parameter that is being read, with the adapter of its layer.
pub(super) struct StoredParameter<'a> {
    model: &'a StoredModel,
    name: &'a str,
    factors: Option<Factors>,
}

impl StoredParameter<'_> {
    /// Some rows in f32.
    pub(super) fn rows(&self, first: usize, count: usize) -> Result<Tensor> {
        let StoredParameter { model, name, factors } = self;
        if let Some(adapter) = model.adapter.as_ref().filter(|adapter| adapter.replaces(name)) {
            return adapter.directory.rows(name, first, count);
        }
        let base = model.files.rows(model.base_name(name), first, count)?;
        match factors {
            Some(factors) => factors.merged(&base, first, count),
            None => Ok(base),
        }
    }

    /// The error for merged weights that are not finite in the dtype in which they are written. `None` where no adapter is merged.
    pub(super) fn not_finite(&self, dtype: DType) -> Option<Error> {
        let adapter = self.model.adapter.as_ref().filter(|_| self.factors.is_some())?;
        let name = format!("{}.lora_B.weight", self.name.trim_end_matches(".weight"));
        Some(adapter.directory.error(&name, "finite merged weights".into(), format!("others, in {dtype:?}")))
    }
}

/// The adapter of one linear layer in f32.
struct Factors {
    a: Tensor,
    b: Tensor,
    magnitude: Option<Tensor>,
    scale: f64,
}

impl Factors {
    fn read(adapter: &AdapterDirectory, linear: &AdaptedLinear) -> Result<Factors> {
        let read = |what: &str| adapter.read(&format!("{}.{what}", linear.name), DType::F32, &Device::Cpu);
        let magnitude = adapter.layout().dora.then(|| read("lora_magnitude_vector")).transpose()?;
        Ok(Factors { a: read("lora_A.weight")?, b: read("lora_B.weight")?, magnitude, scale: linear.scale })
    }

    /// Some rows of the weight, merged with the adapter: (rows, in).
    fn merged(&self, base: &Tensor, first: usize, count: usize) -> Result<Tensor> {
        let delta = (self.b.narrow(0, first, count)?.matmul(&self.a)? * self.scale)?;
        let sum = (base + delta)?;
        let Some(magnitude) = &self.magnitude else { return Ok(sum) };
        let norm = sum.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?; // (rows, 1)
        let factor = (magnitude.narrow(0, first, count)?.unsqueeze(1)? / norm)?;
        Ok(sum.broadcast_mul(&factor)?)
    }
}
