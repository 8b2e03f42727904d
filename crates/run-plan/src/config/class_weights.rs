//! `task.class_weights`: the weight of each class in a loss of labels.

use t5::Head;

use super::{Config, Values};
use crate::failure::{Failure, Outcome};

/// The weight of a class in `task.class_weights`; `None`: it has no weight there.
///
/// # Errors
/// The weight is no number from 0 up.
pub(super) fn weight(values: &Values, class: &str) -> Outcome<Option<f64>> {
    let weights = values.table("task.class_weights");
    let Some(value) = weights.get(class) else { return Ok(None) };
    let number = value.as_float().or_else(|| value.as_integer().map(|number| number as f64));
    match number.filter(|weight| weight.is_finite() && *weight >= 0.0) {
        Some(weight) => Ok(Some(weight)),
        None => {
            Err(Failure::usage(format!("`task.class_weights`: `{class}`: expected a number from 0 up, got {value}")))
        }
    }
}

/// The weight of each class in the loss of a classifier; none: all are alike.
pub fn resolve(config: &Config, head: &Head) -> Vec<f64> {
    let labels = head.labels().filter(|labels| !labels.is_number());
    let Some(labels) = labels.filter(|_| !config.values.table("task.class_weights").is_empty()) else {
        return Vec::new();
    };
    labels.names.iter().map(|label| weight(&config.values, label).ok().flatten().unwrap_or(1.0)).collect()
}

/// Refuses weights that a model with this head does not have.
///
/// # Errors
/// A class is none of the model's; a weight is no number from 0 up.
pub fn check(config: &Config, head: &Head) -> Outcome<()> {
    const SHOWN: usize = 8;
    let (key, weights) = ("task.class_weights", config.values.table("task.class_weights"));
    if weights.is_empty() || config.ranking.is_some() {
        return Ok(());
    }
    let Some(labels) = head.labels().filter(|labels| !labels.is_number()) else {
        return Err(Failure::usage(format!("`{key}` ({}): the model has no classes", config.values.origin(key)))
            .hint("leave it out, or name the task: `--set task.name=classification`"));
    };
    for class in weights.keys() {
        if labels.index(class).is_none() {
            let names: Vec<String> = labels.names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
            let more = if labels.names.len() > SHOWN { ", ..." } else { "" };
            return Err(Failure::usage(format!("`{key}`: no row has the class `{class}`"))
                .hint(format!("the classes are {}{more}", names.join(", "))));
        }
        weight(&config.values, class)?;
    }
    Ok(())
}
