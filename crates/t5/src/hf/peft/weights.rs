//! An adapter's directory, opened: its settings, their changes to a model, and tensors that agree with both.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};

use super::config::{AdaptedLinear, AdapterConfig, CONFIG_FILE, Layout, SOURCE_PREFIX};
use super::modules::LM_HEAD;
use super::{PREFIX, head};
use crate::adapter::Lora;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::head::{Head, WRAPPED, is_of_classifier};
use crate::hf::pytorch;
use crate::hf::safetensors::{Reader, StoredIn};
use crate::parameters::Parameter;

/// The files of tensors, in the order in which PEFT looks for them.
pub(super) const SAFETENSORS_FILE: &str = "adapter_model.safetensors";
const PYTORCH_FILE: &str = "adapter_model.bin";
/// Tables of the vocabulary, which PEFT saves with an adapter if tokens were added to the model, or if it cannot tell.
const TABLES: [&str; 4] =
    ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"];
/// PEFT stores the weight below an adapter of the head, too.
const HEAD_BELOW: &str = "lm_head.base_layer.weight";

/// An adapter's directory in which every tensor has a place in a model.
#[derive(Debug)]
pub struct AdapterDirectory {
    config: AdapterConfig,
    layout: Layout,
    reader: Reader,
    /// What the names of the model's tensors begin with in the file.
    prefix: String,
    /// The text before every source, if the file has it.
    source_prefix: Option<String>,
}

/// The file of tensors in an adapter's directory.
fn open_tensors(directory: &Path) -> Result<Reader> {
    let (safetensors, pytorch) = (directory.join(SAFETENSORS_FILE), directory.join(PYTORCH_FILE));
    match (safetensors.exists(), pytorch.exists()) {
        (true, _) => Reader::open(&safetensors),
        (false, true) => pytorch::open(&pytorch),
        (false, false) => {
            let problem = format!("has {CONFIG_FILE} and no {SAFETENSORS_FILE}");
            let hint = "an adapter's directory has both, as PEFT's `save_pretrained` writes them".into();
            Err(Error::Directory { path: directory.into(), problem, hint })
        }
    }
}

impl AdapterDirectory {
    /// Opens the directory of an adapter for a model: the directory itself, or a run's, whose adapter is in `adapter`.
    ///
    /// # Errors
    /// As [`AdapterConfig::read`] and [`AdapterConfig::layout`]; [`Error::AdapterTensor`] for a tensor that is missing, left
    /// over or of another shape; [`Error::Safetensors`] or [`Error::Pytorch`] for a damaged file.
    pub fn open(directory: &Path, model: &Config) -> Result<AdapterDirectory> {
        let directory = Self::find(directory)?;
        let config = AdapterConfig::read(&directory)?;
        let reader = open_tensors(&directory)?;
        head::check(config.task.as_deref(), &reader, model)?;
        let layout = config.layout(model)?;
        let wrapped = format!("{PREFIX}{WRAPPED}");
        let prefix = if reader.names().iter().any(|name| name.starts_with(&wrapped)) { wrapped } else { PREFIX.into() };
        let source_prefix = reader.metadata(SOURCE_PREFIX).map(str::to_owned);
        let own_name = |name: &str| match name.strip_prefix(PREFIX) {
            Some(name) => format!("{PREFIX}{}", model.own_name(name)),
            None => name.to_owned(),
        };
        let reader = if model.gemma.is_some() { reader.renamed(&own_name)? } else { reader };
        let adapter = AdapterDirectory { config, layout, reader, prefix, source_prefix };
        adapter.check(model)?;
        Ok(adapter)
    }

    /// The model that the adapter in a directory was trained beside: `model` with the adapter's own head.
    ///
    /// # Errors
    /// As [`AdapterConfig::read`] and [`Config::with_head`]; a damaged file.
    pub fn model_below(directory: &Path, model: &Config) -> Result<Config> {
        let directory = Self::find(directory)?;
        let (config, reader) = (AdapterConfig::read(&directory)?, open_tensors(&directory)?);
        match head::head(config.task.as_deref(), &reader, &model.head) {
            Some(head) if head.labels().is_some_and(|labels| labels.names.is_empty()) => Err(Error::Directory {
                path: reader.path().into(),
                problem: format!("an adapter of a {}, without its classifier", head.architecture(model.family)),
                hint: "name the classifier that it was trained beside as the model".into(),
            }),
            Some(head) => model.clone().with_head(head),
            None => Ok(model.clone()),
        }
    }

    /// The name of a tensor in the file, by the model's own name for it.
    fn name_in_file(&self, name: &str) -> String {
        let prefix = if is_of_classifier(name) { PREFIX } else { &self.prefix };
        format!("{prefix}{name}")
    }

    /// The directory with an adapter's files. `named` is that directory, or the directory of the run that made the adapter.
    ///
    /// # Errors
    /// [`Error::Directory`].
    pub fn find(named: &Path) -> Result<PathBuf> {
        let has_config = |directory: &Path| directory.join(CONFIG_FILE).exists();
        let of_run = named.join("adapter");
        if !has_config(named) && has_config(&of_run) {
            return Ok(of_run);
        }
        if has_config(named) {
            return Ok(named.into());
        }
        let problem = format!("expected an adapter's directory, found no {CONFIG_FILE} in it");
        let hint = if named.join("config.json").exists() {
            "this is a model, not an adapter".into()
        } else {
            "name the directory that PEFT's `save_pretrained` wrote, or a run with an adapter".into()
        };
        Err(Error::Directory { path: named.into(), problem, hint })
    }

    /// The settings.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// The changes of the adapter to the model.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The dtypes that the adapter's tensors are stored in.
    pub(in crate::hf) fn stored_in(&self) -> StoredIn {
        StoredIn::from_dtypes(self.reader.dtypes())
    }

    /// The file of tensors.
    pub fn path(&self) -> &Path {
        self.reader.path()
    }

    /// Reads a tensor by the model's own name for it: `LINEAR.lora_A.weight`, `LINEAR.lora_B.weight`,
    /// `LINEAR.lora_magnitude_vector`, or a parameter that the adapter replaces.
    ///
    /// # Errors
    /// [`Error::AdapterTensor`], [`Error::TensorMismatch`] for values that are not floats, [`Error::Io`].
    pub fn read(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.reader.read(&self.name_in_file(name), dtype, device)
    }

    /// The adapter, for further training.
    pub fn lora(&self, model: &Config) -> Lora {
        self.config.lora(model, &self.layout)
    }

    /// The text before every source that the adapter was trained with; `None`: the file does not say, as files of PEFT.
    pub fn source_prefix(&self) -> Option<&str> {
        self.source_prefix.as_deref()
    }

    /// The model with this adapter, and with the text before every source that it was trained with.
    ///
    /// # Errors
    /// As [`Config::with_adapter`].
    pub fn beside(&self, model: &Config) -> Result<Config> {
        let mut adapted = model.with_adapter(self.lora(model))?;
        self.source_prefix().into_iter().for_each(|prefix| adapted.set_prefix(prefix));
        Ok(adapted)
    }

    /// Puts values into the parameters of a model with [`Self::lora`]: the adapter's own, and those of the parameters that it replaces.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn fill(&self, parameters: &[Parameter]) -> Result<()> {
        for Parameter { name, tensor, .. } in parameters {
            if self.has(name) {
                // Without a tensor in between: a saved head is as large as the table.
                self.reader.read_over(&self.name_in_file(name), tensor)?;
            }
        }
        Ok(())
    }

    /// Whether the adapter has a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.reader.shape(&self.name_in_file(name)).is_some()
    }

    /// Some rows of a parameter that the adapter replaces.
    pub(in crate::hf) fn rows(&self, name: &str, first: usize, count: usize) -> Result<Tensor> {
        self.reader.read_rows(&self.name_in_file(name), first, count, DType::F32)
    }

    /// The name of the head's weight below its adapter, if the file has it.
    pub(in crate::hf) fn head_below(&self) -> Option<&'static str> {
        self.has(HEAD_BELOW).then_some(HEAD_BELOW)
    }

    /// Refuses a head's weight below its adapter that differs from the model's.
    ///
    /// # Errors
    /// [`Error::AdapterTensor`].
    pub fn check_head(&self, head: &Tensor) -> Result<()> {
        match self.head_below() {
            Some(name) if !self.reader.equals(&self.name_in_file(name), head)? => Err(self.other_head()),
            _ => Ok(()),
        }
    }

    pub(in crate::hf) fn other_head(&self) -> Error {
        self.error(
            HEAD_BELOW,
            "the values of the model's head".into(),
            "others: the adapter is of another model".into(),
        )
    }

    pub(in crate::hf) fn error(&self, name: &str, expected: String, got: String) -> Error {
        let (path, tensor) = (self.reader.path().into(), self.name_in_file(name));
        Error::AdapterTensor { path, tensor, expected, got }
    }

    /// The error for an adapter that has a table of the vocabulary with it.
    fn with_table(&self, stored: &str, model: &Config) -> Error {
        let rows = self.reader.shape(stored).and_then(|shape| shape.first().copied()).unwrap_or(model.vocab_size);
        let why = match rows == model.vocab_size {
            true => "PEFT saved it with the adapter".to_owned(),
            false => {
                format!("it has {rows} rows and the model {}: tokens were added before training", model.vocab_size)
            }
        };
        let script = format!(
            "import sys; from transformers import AutoModelForSeq2SeqLM as M; from peft import PeftModel as P; b, a, o = sys.argv[1:]; \
             m = M.from_pretrained(b); m.resize_token_embeddings({rows}); P.from_pretrained(m, a).merge_and_unload().save_pretrained(o)"
        );
        Error::Directory {
            path: self.reader.path().into(),
            problem: format!("`{stored}` is a table of the model, not of an adapter; {why}"),
            hint: format!(
                "resize the model and merge the adapter with its tables: python3 -c \"{script}\" MODEL ADAPTER MERGED"
            ),
        }
    }

    /// Checks names, shapes and dtypes of the file against the settings.
    fn check(&self, model: &Config) -> Result<()> {
        let mut expected: BTreeMap<String, Vec<usize>> = self.layout.saved.iter().cloned().collect();
        for linear in &self.layout.linears {
            expected.extend(linear.tensors(self.layout.dora));
        }
        let shape_of = |name: &str| self.reader.shape(&self.name_in_file(name));
        for (name, shape) in &expected {
            match shape_of(name) {
                Some(found) if found == shape => {}
                found => {
                    let got = found.map_or("no such tensor".into(), |found| format!("shape {found:?}"));
                    return Err(self.error(name, format!("shape {shape:?}"), got));
                }
            }
        }
        for stored in self.reader.names() {
            let name = stored.strip_prefix(&self.prefix).or_else(|| stored.strip_prefix(PREFIX));
            // An encoder leaves what an adapter has for the rest of a model.
            let is_of_encoder = |name: &str| name.trim_start_matches("model.").starts_with("encoder.");
            if model.head == Head::Encoder && name.is_some_and(|name| !is_of_encoder(name)) {
                continue;
            }
            let is_head_below = name == Some(HEAD_BELOW)
                && expected.contains_key(&format!("{LM_HEAD}.lora_A.weight"))
                && shape_of(HEAD_BELOW) == Some(&[model.vocab_size, model.d_model]);
            if !is_head_below && !name.is_some_and(|name| expected.contains_key(name)) {
                if name.is_some_and(|name| TABLES.contains(&name)) {
                    return Err(self.with_table(&stored, model));
                }
                let got = format!("shape {:?}", self.reader.shape(&stored).unwrap_or_default());
                let (path, expected) = (self.reader.path().into(), format!("no such tensor by {CONFIG_FILE}"));
                return Err(Error::AdapterTensor { path, tensor: stored, expected, got });
            }
            if self.reader.stored_as(&stored).is_none_or(|dtype| !dtype.is_float()) {
                let (path, expected) = (self.reader.path().into(), "values in F32, F16, BF16 or F64".into());
                return Err(Error::AdapterTensor { path, tensor: stored, expected, got: "others".into() });
            }
        }
        Ok(())
    }
}

impl AdaptedLinear {
    /// The adapter's tensors by the model's own names, with their shapes.
    pub fn tensors(&self, dora: bool) -> Vec<(String, Vec<usize>)> {
        let Self { name, inputs, outputs, rank, .. } = self;
        let mut tensors = vec![
            (format!("{name}.lora_A.weight"), vec![*rank, *inputs]),
            (format!("{name}.lora_B.weight"), vec![*outputs, *rank]),
        ];
        if dora {
            tensors.push((format!("{name}.lora_magnitude_vector"), vec![*outputs]));
        }
        tensors
    }
}
