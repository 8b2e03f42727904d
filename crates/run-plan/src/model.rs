//! The model of a run, as far as the config determines it: settings over a `config.json`, and an adapter beside it.

use std::path::Path;

use serde_json::{Map, Value};
use t5::Precision;

use crate::config::Config;
use crate::failure::{Failure, Outcome};

/// Applies the config's settings for a model that is trained from scratch: `model.vocab_size` and `model.overrides`.
///
/// # Errors
/// The settings are not those of a T5.
pub fn fitted(config: &Config, mut model: t5::Config) -> Outcome<t5::Config> {
    if let Some(vocab_size) = config.model.vocab_size {
        model.vocab_size = usize::try_from(vocab_size).unwrap_or(usize::MAX);
    }
    if !config.model.overrides.is_empty() {
        model = overridden(&model, &config.model.overrides)?;
    }
    model.validate()?;
    Ok(model)
}

/// `model` with some keys of its `config.json` replaced. Values that transformers derives from a replaced key are derived again.
fn overridden(model: &t5::Config, overrides: &toml::Table) -> Outcome<t5::Config> {
    let mut json = model.to_json();
    let Some(entries) = json.as_object_mut() else { return Err(Failure::internal("a config.json is an object")) };
    for (key, derived) in [
        ("feed_forward_proj", &["dense_act_fn", "is_gated_act"][..]),
        ("tie_word_embeddings", &["scale_decoder_outputs"]),
    ] {
        if overrides.contains_key(key) {
            derived.iter().for_each(|derived| drop(entries.remove(*derived)));
        }
    }
    for (key, value) in overrides {
        if model.family.is_gemma() && !entries.contains_key(key) {
            let family = model.family.model_type();
            return Err(Failure::usage(format!("`model.overrides.{key}`: the config of a {family} has no such key"))
                .hint("sizes are those of a stack: `model.overrides={decoder={intermediate_size=512}}`"));
        }
        let value =
            serde_json::to_value(value).map_err(|error| Failure::usage(format!("`model.overrides.{key}`: {error}")))?;
        put(entries, key.clone(), value);
    }
    Ok(t5::Config::from_json(&json.to_string(), "`model.overrides`")?)
}

/// Puts an entry into an object. The entries of a table join those of an object that is there.
fn put(entries: &mut Map<String, Value>, key: String, value: Value) {
    match (entries.get_mut(&key), value) {
        (Some(Value::Object(inside)), Value::Object(new)) => {
            new.into_iter().for_each(|(key, value)| put(inside, key, value));
        }
        (_, value) => drop(entries.insert(key, value)),
    }
}

/// The model with the prefix, the precision of the base and the adapter of the config. An adapter that continues from files has the
/// settings of those files, which `adapter_of_files` contains.
///
/// # Errors
/// The config's settings do not fit the model.
pub fn adapted(
    config: &Config,
    mut model: t5::Config,
    origin: Option<&Path>,
    adapter_of_files: impl FnOnce(&mut t5::Config) -> Outcome<Option<t5::Lora>>,
) -> Outcome<t5::Config> {
    if let Some(prefix) = &config.data.source_prefix {
        model.set_prefix(prefix);
    }
    set_precision(&mut model, config.model.base_precision, origin)?;
    let Some(adapter) = &config.lora else { return Ok(model) };
    let lora = adapter_of_files(&mut model)?.unwrap_or_else(|| adapter.lora.clone());
    Ok(model.with_adapter(lora)?)
}

/// Sets the precision of a model's base to the wanted one. A quantised model must already have that precision.
fn set_precision(model: &mut t5::Config, wanted: Option<Precision>, origin: Option<&Path>) -> Outcome<()> {
    match (model.base_precision, wanted) {
        (Some(has), Some(wanted)) if has != wanted => Err(Failure::usage(format!(
            "`model.base_precision` is {}, and the weights of {} are in {} already",
            wanted.name(),
            shown(origin),
            has.name()
        ))
        .hint("leave out `model.base_precision`, or name the model that they were made from")),
        (None, Some(wanted)) => {
            model.base_precision = Some(wanted);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Refuses a run that would train quantised weights.
///
/// # Errors
/// The run would train quantised weights.
pub fn check_trainable(model: &t5::Config, origin: Option<&Path>) -> Outcome<()> {
    let (Some(precision), None) = (model.base_precision, &model.lora) else { return Ok(()) };
    let shown = shown(origin);
    Err(Failure::usage(format!("the weights of {shown} are in {} and cannot be trained", precision.name()))
        .hint("train an adapter beside them: `--lora`")
        .hint("or name the model that they were made from"))
}

fn shown(origin: Option<&Path>) -> String {
    origin.map_or_else(|| "the model".to_owned(), |path| path.display().to_string())
}
