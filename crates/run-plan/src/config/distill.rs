//! `distill.*`: a student's loss beside its teacher's logits.

use trainer::Sharding;
use trainer::distillation::Distillation;

use super::task::Task;
use super::{Config, Values};
use crate::failure::{Failure, Outcome};

/// The loss in these values.
pub fn from_values(values: &Values) -> Option<Distillation> {
    values.text("distill.teacher")?;
    let [alpha, temperature] = ["alpha", "temperature"].map(|name| values.required_number(&format!("distill.{name}")));
    Some(Distillation { alpha, temperature })
}

/// Refuses settings beside which the loss would be another one.
pub fn check(config: &Config) -> Outcome<()> {
    if config.distillation.is_none() {
        return Ok(());
    }
    let values = &config.values;
    let origin = values.origin("distill.teacher");
    let beside = |key: &str, got: String| {
        let is_there = format!("`{key}` ({}) is {got}, and `distill.teacher` ({origin})", values.origin(key));
        Err(Failure::usage(format!("{is_there} is for the cross-entropy alone")).hint("leave out one of them"))
    };
    if let Some(preference) = &config.preference {
        return beside("preference.loss", format!("\"{}\"", preference.loss.name()));
    }
    if config.task.is_some_and(|task| task != Task::TextToText) {
        return beside("task.name", format!("\"{}\"", values.text("task.name").unwrap_or_default()));
    }
    for (key, value) in [("train.z_loss", config.train.z_loss), ("train.label_smoothing", config.train.label_smoothing)]
    {
        if value != 0.0 {
            return beside(key, value.to_string());
        }
    }
    if config.parallel.sharding == Sharding::Weights {
        return Err(Failure::usage(format!(
            "`parallel.shard = \"weights\"` ({}) cannot be combined with `distill.teacher` ({origin}) yet",
            values.origin("parallel.shard")
        ))
        .hint("`--set parallel.shard=gradients` divides all other state"));
    }
    Ok(())
}
