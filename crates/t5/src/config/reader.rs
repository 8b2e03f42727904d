//! Typed access to the object of a `config.json`, with errors that name the key.

use serde_json::{Map, Value};
use t5_ops::Precision;

use super::{QUANT_METHOD, QUANTIZATION};
use crate::error::{Error, Result};
use crate::family::Family;

/// Typed access to the raw object; `null` counts as absent, as in transformers.
pub(super) struct Reader<'a> {
    pub raw: &'a Map<String, Value>,
    pub origin: &'a str,
    /// Where the object is in the file, as it stands before a key: `decoder.`; empty for the file's own.
    pub inside: &'a str,
}

impl Reader<'_> {
    /// The codes of the weights. Codes of other programs are refused.
    pub fn base_precision(&self) -> Result<Option<Precision>> {
        let Some(quantization) = self.get(QUANTIZATION) else { return Ok(None) };
        let text = |key: &str| quantization.get(key).and_then(Value::as_str);
        let precision = text("base_precision").and_then(Precision::of_name);
        match precision.filter(|_| text("quant_method") == Some(QUANT_METHOD)) {
            Some(precision) => Ok(Some(precision)),
            None => Err(self.error(QUANTIZATION, "one that `train_low_mem convert-base` wrote", Some(quantization))),
        }
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.raw.get(key).filter(|value| !value.is_null())
    }

    /// The family that `model_type` names or, without it, the first of the `architectures`.
    pub fn family(&self) -> Result<Family> {
        let refused = |got: &str| Error::Family { origin: self.origin.into(), got: got.into() };
        if let Some(model_type) = self.get("model_type") {
            let model_type = model_type.as_str();
            let model_type = model_type.ok_or_else(|| self.error("model_type", "a string", self.get("model_type")))?;
            return Family::of_model_type(model_type).ok_or_else(|| refused(model_type));
        }
        let architecture = self.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str);
        architecture.map_or(Ok(Family::T5), |name| Family::of_architecture(name).ok_or_else(|| refused(name)))
    }

    pub fn size(&self, keys: &[&str], default: usize) -> Result<usize> {
        let Some((key, value)) = keys.iter().find_map(|key| Some((key, self.get(key)?))) else { return Ok(default) };
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        size.ok_or_else(|| self.error(key, "a whole number", Some(value)))
    }

    pub fn number(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.error(key, "a number", Some(value)))
    }

    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.error(key, "true or false", Some(value)))
    }

    pub fn text(&self, key: &str, default: &str) -> Result<String> {
        let Some(value) = self.get(key) else { return Ok(default.into()) };
        value.as_str().map(String::from).ok_or_else(|| self.error(key, "a string", Some(value)))
    }

    pub fn token(&self, key: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let id = value.as_u64().and_then(|n| u32::try_from(n).ok());
        id.map(Some).ok_or_else(|| self.error(key, "a token id", Some(value)))
    }

    pub fn tokens(&self, key: &str, default: &[u32]) -> Result<Vec<u32>> {
        match self.raw.get(key) {
            None => Ok(default.to_vec()),
            Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(values)) => {
                let id = |value: &Value| {
                    let id = value.as_u64().and_then(|n| u32::try_from(n).ok());
                    id.ok_or_else(|| self.error(key, "token ids", Some(value)))
                };
                values.iter().map(id).collect()
            }
            Some(_) => Ok(self.token(key)?.into_iter().collect()),
        }
    }

    /// The error of a key whose value is another than expected.
    pub fn unexpected(&self, key: &str, expected: &str) -> Error {
        self.error(key, expected, self.get(key))
    }

    pub fn error(&self, key: &str, expected: &str, got: Option<&Value>) -> Error {
        let got = got.map_or("absent".into(), |value| format!("`{value}`"));
        let key = format!("{}{key}", self.inside);
        Error::Config { origin: self.origin.into(), key, got, expected: expected.into() }
    }
}
