//! `preference.*`: a loss of pairs of answers in place of the cross-entropy.

use trainer::Sharding;
use trainer::preference::{Preference, PreferenceLoss};

use super::{Config, Objective, Values};
use crate::failure::{Failure, Outcome};

/// The loss in these values.
pub fn from_values(values: &Values) -> Option<Preference> {
    let usual = Preference::usual(PreferenceLoss::named(&values.text("preference.loss")?)?);
    Some(Preference {
        beta: values.number("preference.beta").unwrap_or(usual.beta),
        gamma: values.number("preference.gamma").unwrap_or(usual.gamma),
        weights: ["desirable", "undesirable"].map(|side| values.required_number(&format!("preference.{side}_weight"))),
        ..usual
    })
}

/// Refuses settings beside which the loss would be another one.
pub fn check(config: &Config) -> Outcome<()> {
    let Some(preference) = config.preference else { return Ok(()) };
    let (values, name) = (&config.values, preference.loss.name());
    let origin = values.origin("preference.loss");
    if preference.loss.has_reference() && config.lora.is_none() {
        return Err(Failure::usage(format!(
            "`preference.loss = \"{name}\"` ({origin}) compares the model with itself without an adapter, and there is no adapter"
        ))
        .hint("`--lora` trains one beside the weights of `--model`")
        .hint("`--set preference.loss=orpo` and `simpo` need no reference"));
    }
    if let Some(adapter) =
        config.lora.as_ref().filter(|of| preference.loss.has_reference() && !of.lora.modules_to_save.is_empty())
    {
        return Err(Failure::usage(format!(
            "`lora.modules_to_save` trains {} itself, and `preference.loss = \"{name}\"` ({origin}) needs it as it was",
            adapter.lora.modules_to_save.join(", ")
        ))
        .hint("leave out `lora.modules_to_save`, or use `--set preference.loss=orpo`"));
    }
    if preference.loss.has_labels() && config.train.batch_size < 2 {
        return Err(Failure::usage(format!(
            "`preference.loss = \"{name}\"` ({origin}) compares each answer with another one of its step, and `train.batch_size` is 1"
        ))
        .hint("`--batch-size 8`"));
    }
    if config.data.objective == Some(Objective::Denoising) {
        return Err(Failure::usage(format!(
            "`preference.loss` ({origin}) is for answers to prompts, and `data.objective` or `data.denoisers` asks for pretraining"
        ))
        .hint("leave out one of them"));
    }
    let beside = [
        ("train.dropout", config.train.dropout.unwrap_or(0.0)),
        ("lora.dropout", config.lora.as_ref().map_or(0.0, |adapter| adapter.lora.dropout)),
        ("train.z_loss", config.train.z_loss),
        ("train.label_smoothing", config.train.label_smoothing),
    ];
    if let Some((key, value)) = beside.into_iter().find(|(_, value)| *value != 0.0) {
        return Err(Failure::usage(format!(
            "`{key}` ({}) is {value}, and `preference.loss` ({origin}) is computed without it",
            values.origin(key)
        ))
        .hint(format!("`--set {key}=0`")));
    }
    if config.parallel.sharding == Sharding::Weights {
        return Err(Failure::usage(format!(
            "`parallel.shard = \"weights\"` ({}) cannot be combined with `preference.loss` ({origin}) yet",
            values.origin("parallel.shard")
        ))
        .hint("`--set parallel.shard=gradients` divides all other state"));
    }
    Ok(())
}
