//! Writing an adapter as PEFT 0.21 reads it: few keys, because every release of PEFT has others.

use std::io::Write;
use std::path::Path;

use candle_core::DType;
use serde_json::{Map, Value, json};

use super::config::{CONFIG_FILE, SOURCE_PREFIX};
use super::weights::SAFETENSORS_FILE;
use super::{PREFIX, head, modules};
use crate::adapter::{Lora, Targets, is_of_adapter};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::hf::safetensors::{TensorHeader, Writer};
use crate::hf::save::write_json;
use crate::parameters::Parameter;

/// The release of PEFT whose format is written.
const PEFT_VERSION: &str = "0.21.2";
const CARD_FILE: &str = "README.md";

/// The files that [`save_with`] writes.
pub const ADAPTER_FILES: [&str; 3] = [CONFIG_FILE, SAFETENSORS_FILE, CARD_FILE];

/// Hands each file of an adapter's directory to `file`: its name, and the function that writes it. `base` is the name of the model
/// without the adapter. The parameters of the adapter, and those that it replaces, are written in f32.
///
/// # Errors
/// `file` returns an error, or writing fails.
pub fn save_with<E: From<Error>>(
    directory: &Path,
    model: &Config,
    lora: &Lora,
    base: Option<&str>,
    parameters: &[Parameter],
    mut file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
) -> Result<(), E> {
    let settings = settings(model, lora, base);
    file(CONFIG_FILE, &|sink| write_json(&directory.join(CONFIG_FILE), sink, &settings))?;
    let saved = || parameters.iter().filter(|parameter| lora.trains(&parameter.name));
    let name_in_file = |parameter: &Parameter| format!("{PREFIX}{}", model.module_name(&parameter.name));
    let labels = head::metadata(&model.head);
    let header = |parameter: &Parameter| TensorHeader {
        name: name_in_file(parameter),
        dtype: DType::F32,
        shape: parameter.tensor.dims().to_vec(),
    };
    file(SAFETENSORS_FILE, &|sink| {
        let path = directory.join(SAFETENSORS_FILE);
        let labels = labels.iter().map(|(key, value)| (*key, value.as_str()));
        let metadata: Vec<_> = [("format", "pt"), (SOURCE_PREFIX, model.prefix())].into_iter().chain(labels).collect();
        let mut writer = Writer::new(&path, sink, saved().map(header).collect(), &metadata)?;
        for parameter in saved() {
            writer.write(&name_in_file(parameter), &parameter.tensor)?;
        }
        writer.into_sink();
        Ok(())
    })?;
    let card = card(base);
    file(CARD_FILE, &|sink| sink.write_all(card.as_bytes()).map_err(Error::io(&directory.join(CARD_FILE))))
}

/// What PEFT writes in place of a task: the class of the model and its module.
fn auto_mapping(model: &Config) -> Value {
    let family = model.family.model_type();
    json!({
        "base_model_class": model.head.architecture(model.family),
        "parent_library": format!("transformers.models.{family}.modeling_{family}"),
    })
}

/// The contents of `adapter_config.json`, keys sorted as PEFT sorts them.
fn settings(model: &Config, lora: &Lora, base: Option<&str>) -> Value {
    let mut entries = vec![
        ("base_model_name_or_path", json!(base)),
        ("bias", json!("none")),
        ("fan_in_fan_out", json!(false)),
        ("inference_mode", json!(true)),
        ("lora_alpha", number(lora.alpha)),
        ("lora_dropout", json!(lora.dropout)),
        ("peft_type", json!("LORA")),
        ("peft_version", json!(PEFT_VERSION)),
        ("r", json!(lora.rank)),
        ("target_modules", json!(targets(model, lora))),
        ("auto_mapping", head::task(&model.head).map_or_else(|| json!(auto_mapping(model)), |_| Value::Null)),
        ("task_type", json!(head::task(&model.head))),
        ("use_dora", json!(lora.dora)),
        ("use_rslora", json!(lora.rslora)),
    ];
    if !lora.rank_pattern.is_empty() {
        let ranks = lora.rank_pattern.iter().map(|(name, &rank)| (model.module_name(name).into(), rank.into()));
        entries.push(("rank_pattern", Value::Object(ranks.collect())));
    }
    if !lora.alpha_pattern.is_empty() {
        let alphas = lora.alpha_pattern.iter().map(|(name, &alpha)| (model.module_name(name).into(), number(alpha)));
        entries.push(("alpha_pattern", Value::Object(alphas.collect())));
    }
    if !lora.modules_to_save.is_empty() {
        entries.push(("modules_to_save", json!(modules_to_save(model, lora))));
    }
    entries.sort_by_key(|(key, _)| *key);
    let entries: Map<String, Value> = entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    entries.into()
}

/// PEFT writes alphas as whole numbers if they are whole.
fn number(value: f64) -> Value {
    let whole = value as i64;
    #[expect(clippy::cast_precision_loss, reason = "compared with the value that it came from")]
    if whole as f64 == value { json!(whole) } else { json!(value) }
}

/// The names of the layers with an adapter. `"all-linear"` is spelled out, as PEFT does when it saves.
fn targets(model: &Config, lora: &Lora) -> Vec<String> {
    if model.gemma.is_some() {
        // The ends of these names are those of layers of the vision tower, too.
        let linears = modules::linears(model).into_iter().filter(|linear| lora.linear(&linear.name).is_some());
        return linears.map(|linear| model.module_name(&linear.name).into_owned()).collect();
    }
    let mut names = match &lora.targets {
        Targets::Names(names) => names.clone(),
        Targets::AllLinear => {
            let linears = modules::linears(model).into_iter().filter(|linear| lora.linear(&linear.name).is_some());
            linears.filter_map(|linear| linear.name.rsplit('.').next().map(String::from)).collect()
        }
    };
    names.sort_unstable();
    names.dedup();
    names
}

/// The modules that are saved as a whole. PEFT compares the ends of names without regard to dots. Where that would match more modules,
/// each has its full name.
fn modules_to_save(model: &Config, lora: &Lora) -> Vec<String> {
    let parameters = modules::base_parameters(model);
    let means_more = |name: &str| modules::below(&parameters, name).iter().any(|spec| !lora.trains(&spec.name));
    if model.gemma.is_none() && !lora.modules_to_save.iter().any(|name| means_more(name)) {
        return lora.modules_to_save.clone();
    }
    let trained = parameters.iter().filter(|spec| lora.trains(&spec.name) && !is_of_adapter(&spec.name));
    trained.filter_map(|spec| Some(model.module_name(spec.name.strip_suffix(".weight")?).into_owned())).collect()
}

/// The model card that hubs show.
fn card(base: Option<&str>) -> String {
    let name = base.filter(|name| !name.is_empty()).map(|name| Value::from(name).to_string());
    let (key, tag) = match &name {
        Some(name) => (
            format!("base_model: {name}\n"),
            format!("- {}\n", Value::from(format!("base_model:adapter:{}", base.unwrap_or_default()))),
        ),
        None => Default::default(),
    };
    let of = base.map(|name| format!(" of `{name}`")).unwrap_or_default();
    format!(
        "---\n{key}library_name: peft\ntags:\n{tag}- lora\n- transformers\n---\n\n# A LoRA adapter\n\nAn adapter{of} in PEFT's format, trained by \
         train_low_mem.\n\n### Framework versions\n\n- PEFT {PEFT_VERSION}\n"
    )
}
