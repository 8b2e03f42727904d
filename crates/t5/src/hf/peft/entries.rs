//! The entries of an `adapter_config.json`: some are read, some ignored, some refused.

use std::path::Path;

use serde_json::{Map, Value};

use super::head::is_task;
use super::patterns::{Pattern, Selection};
use crate::error::{Error, Result};

/// A rank beyond the width of any layer.
const LARGEST_RANK: u64 = 1 << 16;
/// More patterns than the deepest model has layers.
const MAX_PATTERNS: usize = 4096;

/// Keys that do not change the computation of a loaded adapter.
const WITHOUT_EFFECT: [&str; 15] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "init_lora_weights", // read on its own
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];
/// Keys that are read.
const READ: [&str; 14] = [
    "alpha_pattern",
    "ensure_weight_tying",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "r",
    "rank_pattern",
    "target_modules",
    "use_dora",
    "use_rslora",
    "bias",
];
/// Known keys that are refused where they are set, with the reason.
const REFUSED: [(&str, &str); 8] = [
    ("alora_invocation_tokens", "aLoRA changes generation of decoder-only models"),
    ("fan_in_fan_out", "T5's linear layers store (out, in)"),
    ("layer_replication", "it changes the model's depth"),
    ("lora_bias", "T5's linear layers have no bias"),
    ("megatron_config", "it is for models of Megatron"),
    ("target_parameters", "T5's weights are modules: name them in `target_modules`"),
    ("trainable_token_indices", "train the head or nothing of the vocabulary: `modules_to_save`"),
    ("use_qalora", "its adapters work on a quantized base alone"),
];
/// Prefixes of `init_lora_weights` whose initialisation changes the base weights.
const CHANGES_BASE: [&str; 6] = ["pissa", "olora", "corda", "loftq", "lora_ga", "mica"];

/// `layers_to_transform` with `layers_pattern`.
#[derive(Clone, Debug)]
pub(super) struct Layers {
    pub indices: Vec<usize>,
    pub patterns: Vec<Pattern>,
}

/// Typed access to the file; null counts as absent.
pub(super) struct Entries<'a> {
    pub path: &'a Path,
    pub raw: &'a Map<String, Value>,
}

impl Entries<'_> {
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.raw.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn error(&self, key: &str, expected: &str) -> Error {
        self.error_with(key, expected, "have PEFT merge the adapter: `merge_and_unload`")
    }

    pub(super) fn error_with(&self, key: &str, expected: &str, hint: &'static str) -> Error {
        let (got, expected) = (shown(self.raw.get(key)), expected.into());
        Error::AdapterConfig { path: self.path.into(), key: key.into(), got, expected, hint }
    }

    pub(super) fn check_kind(&self) -> Result<()> {
        let kind = self.get("peft_type").and_then(Value::as_str);
        if kind != Some("LORA") {
            let expected = "\"LORA\": no other kind of adapter is read";
            // PEFT merges only what changes weights.
            let is_prompt = kind.is_some_and(|kind| kind.contains("PROMPT") || kind.contains("TUNING"));
            return Err(match is_prompt {
                true => self.error_with(
                    "peft_type",
                    expected,
                    "a learned prompt has no weights to merge: train a LoRA adapter instead",
                ),
                false => self.error("peft_type", expected),
            });
        }
        match self.get("task_type") {
            None => Ok(()),
            Some(Value::String(task)) if is_task(task) => Ok(()),
            Some(_) => Err(self.error_with(
                "task_type",
                "\"SEQ_2_SEQ_LM\", \"SEQ_CLS\", \"TOKEN_CLS\", \"FEATURE_EXTRACTION\" or null",
                "an adapter of another task has other modules; train it for one of these",
            )),
        }
    }

    pub(super) fn check_refused(&self) -> Result<()> {
        // All three mean the same, because no linear layer of T5 has a bias.
        if let Some(value) = self.get("bias")
            && !["none", "all", "lora_only"].iter().any(|known| value == known)
        {
            return Err(self.error("bias", "\"none\", \"all\" or \"lora_only\""));
        }
        for (key, value) in self.raw {
            let is_known = WITHOUT_EFFECT.contains(&key.as_str()) || READ.contains(&key.as_str());
            if is_known || is_empty(value) {
                continue;
            }
            return Err(match REFUSED.iter().find(|(refused, _)| refused == key) {
                Some((_, reason)) => self.error(key, &format!("null or false: {reason}")),
                None => self.error_with(
                    key,
                    "null, false or nothing: the key is not known here, and may change what the adapter computes",
                    "if it does not, remove it from the file; otherwise have PEFT merge the adapter: `merge_and_unload`",
                ),
            });
        }
        Ok(())
    }

    /// `init_lora_weights`, if it is a name.
    pub(super) fn init(&self) -> Result<Option<&str>> {
        const KEY: &str = "init_lora_weights";
        let name = match self.get(KEY) {
            None | Some(Value::Bool(_)) => return Ok(None),
            Some(Value::String(name)) => name,
            Some(_) => return Err(self.error(KEY, "true, false or a name")),
        };
        if CHANGES_BASE.iter().any(|start| name.to_lowercase().starts_with(start)) {
            return Err(self.error_with(
                KEY,
                "a start that leaves the base weights as they are",
                "make a plain adapter of it: `save_pretrained(.., path_initial_model_for_weight_conversion=..)` of PEFT",
            ));
        }
        match name.to_lowercase().as_str() {
            "gaussian" => Ok(Some("gaussian")),
            "eva" | "orthogonal" | "true" => Ok(None),
            _ => Err(self.error(KEY, "true, false, \"gaussian\", \"eva\" or \"orthogonal\"")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.error(key, "true or false")),
        }
    }

    pub(super) fn dropout(&self) -> Result<f64> {
        let dropout = self.get("lora_dropout").map_or(Ok(0.0), |value| self.number("lora_dropout", value))?;
        if (0.0..1.0).contains(&dropout) { Ok(dropout) } else { Err(self.error("lora_dropout", "a number in 0..1")) }
    }

    pub(super) fn number(&self, key: &str, value: &Value) -> Result<f64> {
        value.as_f64().filter(|number| number.is_finite()).ok_or_else(|| self.error(key, "a finite number"))
    }

    pub(super) fn rank(&self, key: &str, value: &Value) -> Result<usize> {
        let rank = value.as_u64().filter(|rank| (1..=LARGEST_RANK).contains(rank));
        rank.map(|rank| rank as usize).ok_or_else(|| self.error(key, &format!("a whole number in 1..={LARGEST_RANK}")))
    }

    pub(super) fn by_pattern<T>(
        &self,
        key: &str,
        read: impl Fn(&Self, &str, &Value) -> Result<T>,
    ) -> Result<Vec<(String, T)>> {
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Object(patterns)) if patterns.len() <= MAX_PATTERNS => {
                patterns.iter().map(|(pattern, value)| Ok((pattern.clone(), read(self, key, value)?))).collect()
            }
            Some(_) => Err(self.error(key, &format!("an object of at most {MAX_PATTERNS} patterns and numbers"))),
        }
    }

    pub(super) fn names(&self, key: &str) -> Result<Vec<String>> {
        let wrong = || self.error(key, "a list of names");
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(names)) => {
                names.iter().map(|name| name.as_str().map(String::from).ok_or_else(wrong)).collect()
            }
            Some(_) => Err(wrong()),
        }
    }

    pub(super) fn selection(&self, key: &str) -> Result<Selection> {
        match self.get(key) {
            Some(Value::String(text)) => {
                Pattern::whole(text).map(Selection::Pattern).map_err(|problem| Error::AdapterConfig {
                    path: self.path.into(),
                    key: key.into(),
                    got: problem,
                    expected: "a list of names, or a regular expression as Python has them".into(),
                    hint: "list the names of the layers instead",
                })
            }
            _ => self.names(key).map(Selection::Names),
        }
    }

    pub(super) fn layers(&self) -> Result<Option<Layers>> {
        const KEY: &str = "layers_to_transform";
        let wrong = || self.error(KEY, "an index or a list of indices");
        let index = |value: &Value| value.as_u64().map(|index| index as usize).ok_or_else(wrong);
        let indices: Vec<usize> = match self.get(KEY) {
            None => return Ok(None),
            Some(Value::Array(values)) if values.is_empty() => return Ok(None),
            Some(Value::Array(values)) => values.iter().map(index).collect::<Result<_>>()?,
            Some(value) => vec![index(value)?],
        };
        let names = match self.get("layers_pattern") {
            Some(Value::String(name)) => vec![name.clone()],
            _ => self.names("layers_pattern")?,
        };
        let names: Vec<&str> = names.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
        let patterns = match names.as_slice() {
            [] => vec![Pattern::index_below(None)],
            names => names.iter().map(|name| Pattern::index_below(Some(name))).collect(),
        };
        let patterns: Result<_, String> = patterns.into_iter().collect();
        let patterns =
            patterns.map_err(|_| self.error("layers_pattern", "the name of a list of layers, such as block"))?;
        Ok(Some(Layers { indices, patterns }))
    }
}

/// Whether a value is empty: null, false, or without contents.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        _ => false,
    }
}

/// The start of a value's text.
fn shown(value: Option<&Value>) -> String {
    const SHOWN: usize = 60;
    let text = value.unwrap_or(&Value::Null).to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
