//! `distill.*`: a student's loss beside its teacher's logits.

use trainer::distillation::Distillation;

use super::loss::Loss;
use super::task::Task;
use super::{Config, Values};
use crate::failure::{Failure, Outcome};

/// The loss in these values.
pub fn from_values(values: &Values) -> Option<Distillation> {
    values.text("distill.teacher")?;
    let [alpha, temperature] = ["alpha", "temperature"].map(|name| values.required_number(&format!("distill.{name}")));
    let top_k = values.integer("distill.top_k").and_then(|count| usize::try_from(count).ok());
    Some(Distillation { alpha, temperature, top_k })
}

/// The share of a teacher.
pub static LOSS: Loss = Loss {
    key: "distill.teacher",
    setting: "`distill.teacher`",
    has_no_terms: ["`distill.teacher`", "is for the cross-entropy alone"],
    has_dropout: true,
    keys: (&["distill.alpha", "distill.temperature", "distill.top_k"], "it is for `distill.teacher`"),
    is_chosen: |config| config.distillation.is_some(),
    check,
};

fn check(config: &Config) -> Outcome<()> {
    let values = &config.values;
    let preference = config.preference.map(|of| ("preference.loss", of.loss.name().to_owned()));
    let task = config.task.filter(|task| *task != Task::TextToText).and(values.text("task.name"));
    let Some((key, name)) = preference.or(task.map(|name| ("task.name", name))) else { return Ok(()) };
    let ([called, why], origin) = (LOSS.has_no_terms, values.origin(LOSS.key));
    let given = values.origin(key);
    Err(Failure::usage(format!("`{key}` ({given}) is \"{name}\", and {called} ({origin}) {why}"))
        .hint("leave out one of them"))
}
