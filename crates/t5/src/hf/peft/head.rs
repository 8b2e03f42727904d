//! The head above an adapter: which class of transformers an adapter was trained in.
//!
//! PEFT's settings have a task, and its files the layers of a classifier. The names of labels are in no file of PEFT. Here the header of the
//! tensors' file has them, with the keys of `config.json`.

use serde_json::{Map, Value};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::head::{Head, Labels, Problem};
use crate::hf::safetensors::Reader;

/// PEFT's tasks, each with the head that its class has over a T5. The labels stand for any.
const TASKS: [(&str, Head); 4] = [
    ("SEQ_2_SEQ_LM", Head::Language),
    ("FEATURE_EXTRACTION", Head::Encoder),
    ("SEQ_CLS", Head::Sequence(ANY_LABELS)),
    ("TOKEN_CLS", Head::Tokens(ANY_LABELS)),
];
const ANY_LABELS: Labels = Labels { names: Vec::new(), problem: Problem::OneLabel, reads_decoder: None };
/// The keys of the labels.
const LABELS: [&str; 2] = ["id2label", "problem_type"];

/// Whether a task is one of those that are read.
pub(super) fn is_task(task: &str) -> bool {
    TASKS.iter().any(|(known, _)| *known == task)
}

/// The task in the settings of a model with this head. Text to text has none: PEFT 0.21's class for it calls a method that transformers 5.24
/// has renamed, and so does not load there.
pub(super) fn task(head: &Head) -> Option<&'static str> {
    let mut tasks = TASKS.into_iter().filter(|_| !head.is_language());
    tasks.find(|(_, of)| of.is_like(head)).map(|(task, _)| task)
}

/// The task that settings name, or else the class of the model in them.
pub(super) fn named_task(settings: &Map<String, Value>) -> Option<String> {
    let class = || settings.get("auto_mapping")?.get("base_model_class")?.as_str();
    let of_class = || class()?.ends_with("ForConditionalGeneration").then_some(TASKS[0].0);
    settings.get("task_type").and_then(Value::as_str).or_else(of_class).map(str::to_owned)
}

/// The modules that PEFT itself adds to `modules_to_save` for classifiers of any model, whether or not there are such.
pub(super) fn is_added_by_peft(module: &str, head: &Head) -> bool {
    head.labels().is_some() && ["classifier", "score"].contains(&module)
}

/// The labels of a head, for the header of the tensors' file.
pub(super) fn metadata(head: &Head) -> Vec<(&'static str, String)> {
    let entries = head.entries().into_iter().filter(|(key, _)| LABELS.contains(key));
    entries.map(|(key, value)| (key, value.as_str().map_or_else(|| value.to_string(), str::to_owned))).collect()
}

/// The head of an adapter of this task. `None`: its files do not say.
pub(super) fn head(task: Option<&str>, reader: &Reader, of_model: &Head) -> Option<Head> {
    let rows =
        |tensor: &str| reader.shape(&format!("{}{tensor}", super::PREFIX)).and_then(|shape| shape.first().copied());
    let labels = |count: usize| {
        let mut raw = Map::new();
        raw.insert("num_labels".into(), count.into());
        for key in LABELS {
            if let Some(text) = reader.metadata(key) {
                raw.insert(key.into(), serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)));
            }
        }
        let own = of_model.labels().filter(|own| own.names.len() == count && !raw.contains_key(LABELS[0]));
        own.cloned().unwrap_or_else(|| Labels::from_json(&raw))
    };
    let is_of_tokens = task == Some("TOKEN_CLS");
    if let Some(count) = rows("score.out_proj.weight") {
        return Some(if is_of_tokens { Head::Tokens(labels(count)) } else { Head::Sequence(labels(count)) });
    }
    if let Some(count) = rows("classification_head.out_proj.weight") {
        return Some(Head::Sequence(labels(count)));
    }
    if let Some(count) = rows("classifier.weight") {
        return Some(Head::Tokens(labels(count)));
    }
    let task = task?;
    let (_, head) = TASKS.into_iter().find(|(known, _)| *known == task)?;
    // An adapter beside a classifier that has been trained already leaves that as it is.
    let has_own = head.labels().is_some() && head.is_like(of_model);
    Some(if has_own { of_model.clone() } else { head })
}

/// Refuses an adapter of a model with another head. An encoder takes what the adapter has for encoders.
pub(super) fn check(task: Option<&str>, reader: &Reader, model: &Config) -> Result<()> {
    let Some(head) = head(task, reader, &model.head) else { return Ok(()) };
    let is_same = head.is_like(&model.head)
        && head.labels().map(|of| of.names.len()) == model.head.labels().map(|of| of.names.len());
    if is_same || model.head == Head::Encoder {
        return Ok(());
    }
    let shown = |head: &Head| {
        let outputs = head.labels().map(|labels| format!(" with {} outputs", labels.names.len())).unwrap_or_default();
        format!("{}{outputs}", head.architecture(model.family))
    };
    Err(Error::Directory {
        path: reader.path().into(),
        problem: format!("an adapter of a {}, and the model is a {}", shown(&head), shown(&model.head)),
        hint: "the adapter and the model must belong together".into(),
    })
}
