//! [`CompanionFiles`]: the files of a model directory that describe its tokenizer.

use std::path::Path;

use serde_json::{Map, Value};

use crate::Error;

pub(super) const CONFIG: &str = "tokenizer_config.json";
const NAMES: &str = "special_tokens_map.json";
pub(super) const ADDED: &str = "added_tokens.json";
const MODEL: &str = "config.json";

/// No published model has a longer file of these kinds.
const LARGEST_FILE_BYTES: u64 = 16 << 20;

/// The contents of these files, as far as they exist.
#[derive(Clone, Debug, Default)]
pub(super) struct CompanionFiles {
    /// The text of `tokenizer_config.json`.
    pub config_text: Option<String>,
    /// `tokenizer_config.json` as an object.
    pub config: Option<Map<String, Value>>,
    /// `special_tokens_map.json`.
    pub names: Option<Map<String, Value>>,
    /// `added_tokens.json`: names to ids.
    pub added: Option<Map<String, Value>>,
    /// From `config.json`: rows of the model's embedding table, and the class of the tokenizer.
    pub rows: Option<u64>,
    pub model_class: Option<String>,
}

impl CompanionFiles {
    /// Parses the text of a `tokenizer_config.json`.
    ///
    /// # Errors
    /// The reason why the text is not valid.
    pub fn of_config(text: Option<&str>) -> Result<Self, String> {
        let config = text.map(serde_json::from_str).transpose();
        let config = config.map_err(|error| format!("{CONFIG}: {error}"))?;
        Ok(Self { config_text: text.map(str::to_owned), config, ..Self::default() })
    }

    /// Reads the files of a directory.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if a file exists and cannot be read.
    pub fn read(directory: &Path) -> Result<Self, Error> {
        let config_text = text(&directory.join(CONFIG))?;
        let config = config_text.as_deref().map(|text| object(&directory.join(CONFIG), text)).transpose()?;
        let of = |name: &str| {
            let path = directory.join(name);
            text(&path)?.map(|text| object(&path, &text)).transpose()
        };
        // Errors in the model's config are reported when the model is loaded.
        let model = of(MODEL).unwrap_or_default().unwrap_or_default();
        Ok(Self {
            config_text,
            config,
            names: of(NAMES)?,
            added: of(ADDED)?,
            rows: model.get("vocab_size").and_then(Value::as_u64),
            model_class: model.get("tokenizer_class").and_then(Value::as_str).map(str::to_owned),
        })
    }

    /// The transformers class that the files name.
    pub fn class(&self) -> Option<&str> {
        let of_config = self.config.as_ref().and_then(|config| config.get("tokenizer_class")).and_then(Value::as_str);
        of_config.or(self.model_class.as_deref())
    }

    /// The list of all added tokens by their ids: the newest form, which takes precedence.
    pub fn list(&self) -> Option<&Map<String, Value>> {
        self.config.as_ref()?.get("added_tokens_decoder")?.as_object()
    }

    /// The token that the files give for a role such as `eos_token`: its name, or an object with its settings.
    pub fn role(&self, role: &str) -> Option<&Value> {
        let in_config = || self.config.as_ref()?.get(role).filter(|token| !token.is_null());
        let in_names = || self.names.as_ref()?.get(role).filter(|token| !token.is_null());
        if self.list().is_some() { in_config() } else { in_names().or_else(in_config) }
    }

    /// A setting of `tokenizer_config.json`.
    pub fn setting(&self, key: &str) -> Option<&Value> {
        self.config.as_ref()?.get(key).filter(|value| !value.is_null())
    }

    /// The special tokens beside those with a role, if the files list them. The list of `tokenizer_config.json` takes
    /// precedence even if it is null.
    pub fn further(&self) -> Option<Vec<Value>> {
        let of_config = |key: &str| self.config.as_ref().and_then(|config| config.get(key));
        let (new, old) = (of_config("extra_special_tokens"), of_config("additional_special_tokens"));
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let new = new.filter(|value| !value.is_object()).map(list);
        let said = new.clone().filter(|list| !list.is_empty()).or(old.map(list)).or(new);
        let Some(names) = self.of_names("extra_special_tokens") else { return said };
        let mut all = said.unwrap_or_default();
        all.extend(names.iter().filter(|token| !all.contains(token)).cloned().collect::<Vec<_>>());
        Some(all)
    }

    /// The list of `special_tokens_map.json` under its old name.
    pub fn further_by_names(&self) -> Option<&[Value]> {
        self.of_names("additional_special_tokens")
    }

    fn of_names(&self, key: &str) -> Option<&[Value]> {
        let names = self.names.as_ref().filter(|_| self.list().is_none())?;
        names.get(key)?.as_array().map(Vec::as_slice)
    }
}

fn text(path: &Path) -> Result<Option<String>, Error> {
    match regular_file::read_to_string(path, LARGEST_FILE_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unusable(path, error)),
    }
}

fn object(path: &Path, text: &str) -> Result<Map<String, Value>, Error> {
    serde_json::from_str(text).map_err(|error| unusable(path, error))
}

fn unusable(path: &Path, reason: impl ToString) -> Error {
    Error::Tokenizer { path: path.to_owned(), reason: reason.to_string() }
}
