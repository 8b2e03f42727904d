//! `preference.*`: a loss of pairs of answers in place of the cross-entropy.

use trainer::preference::{Preference, PreferenceLoss};

use super::loss::Loss;
use super::{Config, Objective, Values};
use crate::failure::{Failure, Outcome};

/// The loss in these values.
pub fn from_values(values: &Values) -> Option<Preference> {
    let usual = Preference::usual(PreferenceLoss::named(&values.text("preference.loss")?)?);
    Some(Preference {
        beta: values.number("preference.beta").unwrap_or(usual.beta),
        gamma: values.number("preference.gamma").unwrap_or(usual.gamma),
        weights: ["desirable", "undesirable"].map(|side| values.required_number(&format!("preference.{side}_weight"))),
        has_reference_model: usual.loss.has_reference() && values.text("preference.reference").is_some(),
        ..usual
    })
}

/// The losses of pairs.
pub static LOSS: Loss = Loss {
    key: "preference.loss",
    setting: "`preference.loss`",
    has_no_terms: ["`preference.loss`", "is computed without it"],
    // The pass that weighs the answers has none, and theirs would be another loss.
    has_dropout: false,
    keys: (
        &[
            "data.chosen_column",
            "data.rejected_column",
            "preference.reference",
            "preference.beta",
            "preference.gamma",
            "preference.desirable_weight",
            "preference.undesirable_weight",
        ],
        "it is for rows with a chosen and a rejected answer, and `preference.loss` is \"none\"",
    ),
    is_chosen: |config| config.preference.is_some(),
    check,
};

fn check(config: &Config) -> Outcome<()> {
    let Some(preference) = config.preference else { return Ok(()) };
    let (values, name) = (&config.values, preference.loss.name());
    let origin = values.origin("preference.loss");
    let needs_base = preference.loss.has_reference() && !preference.has_reference_model;
    if needs_base && config.lora.is_none() {
        let first =
            config.model.init_from.as_deref().map_or_else(|| "DIR".to_owned(), |path| path.display().to_string());
        return Err(Failure::usage(format!(
            "`preference.loss = \"{name}\"` ({origin}) compares the model with a reference, and there is neither an adapter nor `preference.reference`"
        ))
        .hint(format!("`--set preference.reference={first}` compares with the weights of that model, read from its files"))
        .hint("`--lora` trains an adapter, and the reference is the model without it")
        .hint("`--set preference.loss=orpo` and `simpo` need no reference"));
    }
    if let Some(adapter) = config.lora.as_ref().filter(|of| needs_base && !of.lora.modules_to_save.is_empty()) {
        return Err(Failure::usage(format!(
            "`lora.modules_to_save` trains {} itself, and `preference.loss = \"{name}\"` ({origin}) needs it as it was",
            adapter.lora.modules_to_save.join(", ")
        ))
        .hint("leave out `lora.modules_to_save`, or name the model as it was: `--set preference.reference=DIR`"));
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
    Ok(())
}
