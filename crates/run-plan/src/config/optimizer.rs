//! `optimizer.*`: a row for each optimizer, and the choice among them.
//!
//! A new optimizer is a row here, a [`trainer::OptimizerOptions`] with its rule, and its keys.

use trainer::OptimizerOptions;
use trainer::adafactor::AdafactorOptions;
use trainer::adamw::{AdamwOptions, StatePrecision};
use trainer::groups::Group;
use trainer::lion::LionOptions;

use super::groups;
use super::keys;
use super::values::Values;
use crate::failure::{Failure, Outcome};

/// An optimizer, as the config knows it.
#[derive(Debug)]
pub struct Row {
    /// The value of `optimizer.name`.
    pub name: &'static str,
    /// Its name for people.
    pub title: &'static str,
    /// Its keys beside those that every optimizer has: `learning_rate`, `weight_decay` and `beta1`.
    keys: &'static [&'static str],
    /// Its options.
    options: fn(&Values) -> OptimizerOptions,
}

/// The optimizers. The first is the default.
pub static ROWS: [Row; 3] = [
    Row {
        name: "adafactor",
        title: "Adafactor",
        keys: &[
            "optimizer.relative_step",
            "optimizer.scale_parameter",
            "optimizer.warmup_init",
            "optimizer.clip_threshold",
            "optimizer.decay_rate",
            "optimizer.eps1",
            "optimizer.eps2",
        ],
        options: |values| {
            let relative_step = values.switch("optimizer.relative_step");
            let options = AdafactorOptions {
                learning_rate: (!relative_step).then(|| given(values, "optimizer.learning_rate", 1e-3)),
                eps1: values.required_number("optimizer.eps1"),
                eps2: values.required_number("optimizer.eps2"),
                clip_threshold: values.required_number("optimizer.clip_threshold"),
                decay_rate: values.required_number("optimizer.decay_rate"),
                beta1: values.number("optimizer.beta1"),
                weight_decay: given(values, "optimizer.weight_decay", 0.0),
                scale_parameter: values.switch("optimizer.scale_parameter"),
                relative_step,
                warmup_init: values.switch("optimizer.warmup_init"),
            };
            options.into()
        },
    },
    Row {
        name: "adamw",
        title: "AdamW",
        keys: &[
            "optimizer.beta2",
            "optimizer.eps",
            "optimizer.scale_parameter",
            "optimizer.eps2",
            "optimizer.state_precision",
        ],
        options: |values| {
            let of_torch = AdamwOptions::default();
            let is_scaled = values.switch("optimizer.scale_parameter");
            let options = AdamwOptions {
                learning_rate: given(values, "optimizer.learning_rate", of_torch.learning_rate),
                beta1: given(values, "optimizer.beta1", of_torch.beta1),
                beta2: given(values, "optimizer.beta2", of_torch.beta2),
                eps: given(values, "optimizer.eps", of_torch.eps),
                weight_decay: given(values, "optimizer.weight_decay", of_torch.weight_decay),
                scale_parameter: is_scaled.then(|| values.required_number("optimizer.eps2")),
                state_precision: state_precision(values),
            };
            options.into()
        },
    },
    Row {
        name: "lion",
        title: "Lion",
        keys: &["optimizer.beta2"],
        options: |values| {
            let of_authors = LionOptions::default();
            let options = LionOptions {
                learning_rate: given(values, "optimizer.learning_rate", of_authors.learning_rate),
                beta1: given(values, "optimizer.beta1", of_authors.beta1),
                beta2: given(values, "optimizer.beta2", of_authors.beta2),
                weight_decay: given(values, "optimizer.weight_decay", of_authors.weight_decay),
            };
            options.into()
        },
    },
];

/// The number of a key, or the optimizer's own where the key holds a word.
fn given(values: &Values, key: &str, own: f64) -> f64 {
    values.number(key).unwrap_or(own)
}

fn state_precision(values: &Values) -> StatePrecision {
    match values.text("optimizer.state_precision").as_deref() {
        Some("int8") => StatePrecision::Int8,
        _ => StatePrecision::F32,
    }
}

impl Row {
    /// The optimizer of this name.
    pub fn named(name: &str) -> &'static Row {
        ROWS.iter().find(|row| row.name == name).unwrap_or(&ROWS[0])
    }

    /// Whether a key of `optimizer.*` means something to this optimizer.
    pub fn reads(&self, key: &str) -> bool {
        self.keys.contains(&key) || !ROWS.iter().any(|row| row.keys.contains(&key))
    }
}

/// `optimizer.*`
#[derive(Clone, Debug)]
pub struct Optimizer {
    /// The chosen optimizer.
    pub row: &'static Row,
    /// The learning rate; `None`: Adafactor's own (relative step).
    pub learning_rate: Option<f64>,
    /// The given decay of the first moment; `None`: the optimizer's own.
    pub beta1: Option<f64>,
    /// Whether steps are scaled by the size of their parameter.
    pub scale_parameter: bool,
    /// How moments are held.
    pub state_precision: StatePrecision,
    /// All options.
    pub options: OptimizerOptions,
    /// Parameters with numbers of their own.
    pub groups: Vec<Group>,
}

impl Optimizer {
    /// The choice of the given values. `trains_an_adapter` decides where no name is given.
    pub(super) fn from_values(values: &Values, trains_an_adapter: bool) -> Outcome<Self> {
        let relative_step = values.switch("optimizer.relative_step");
        let of_adafactor = ["optimizer.relative_step", "optimizer.scale_parameter", "optimizer.warmup_init"];
        let row = match values.text("optimizer.name").as_deref() {
            Some(name) => Row::named(name),
            None if trains_an_adapter && !of_adafactor.into_iter().any(|key| values.switch(key)) => Row::named("adamw"),
            None => &ROWS[0],
        };
        check_keys(values, row)?;
        if relative_step && values.number("optimizer.learning_rate").is_some() {
            return Err(Failure::usage(format!(
                "`optimizer.learning_rate` ({}) and `optimizer.relative_step = true` ({}) contradict each other",
                values.origin("optimizer.learning_rate"),
                values.origin("optimizer.relative_step")
            ))
            .hint("set `optimizer.relative_step = false` to use your own learning rate"));
        }
        if values.switch("optimizer.warmup_init") && !relative_step {
            return Err(Failure::usage("`optimizer.warmup_init = true` needs `optimizer.relative_step = true`")
                .hint("use `schedule.warmup_steps` to warm up your own learning rate"));
        }
        let options = (row.options)(values);
        Ok(Optimizer {
            row,
            learning_rate: options.configured_learning_rate(),
            beta1: values.number("optimizer.beta1"),
            scale_parameter: values.switch("optimizer.scale_parameter"),
            state_precision: state_precision(values),
            options,
            groups: groups::from_values(values)?,
        })
    }
}

/// Refuses keys of other optimizers that are switched on, or given where they have no default. Those with a default are reported by
/// [`super::unused`].
fn check_keys(values: &Values, row: &Row) -> Outcome<()> {
    let of_others = ROWS.iter().flat_map(|other| other.keys).filter(|key| !row.reads(key));
    let is_on = |key: &str| values.setting(key).value.as_bool() == Some(true);
    let is_given = |key: &str| match values.setting(key).value {
        toml::Value::Boolean(is_on) => is_on,
        toml::Value::String(_) => values.setting(key).value != keys::default(key),
        _ => keys::default(key).as_str() == Some("auto") && values.number(key).is_some(),
    };
    let Some(key) = of_others.copied().find(|key| is_given(key)) else { return Ok(()) };
    let owners: Vec<&Row> = ROWS.iter().filter(|row| row.keys.contains(&key)).collect();
    let titles: Vec<String> = owners.iter().map(|row| format!("{}'s", row.title)).collect();
    let failure = Failure::usage(format!(
        "`{key}` ({}) is {}, and the optimizer is {}",
        values.origin(key),
        titles.join(" and "),
        row.title
    ));
    let off = if is_on(key) { format!("use `--set {key}=false`") } else { format!("leave `{key}` out") };
    Err(failure.hint(format!("{off}, or use `--set optimizer.name={}`", owners[0].name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_optimizer_has_its_name_and_every_key_exists() {
        let Some(keys::Kind::OneOf(names)) = keys::find("optimizer.name").map(|key| key.kind) else { panic!("names") };
        assert!(ROWS.iter().map(|row| row.name).eq(names.iter().copied()));
        assert!(ROWS.iter().flat_map(|row| row.keys).all(|key| keys::find(key).is_some()));
        for row in &ROWS {
            (row.options)(&Values::defaults()).validate().unwrap();
        }
    }
}
