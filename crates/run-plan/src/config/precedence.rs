//! The command line takes precedence over a file, also if two different keys set the same thing.
//!
//! A file may set `batch_size_per_device = 16`, and the command line `train.batch_size=8`. Then both are set, and neither is wrong: the key
//! on the command line applies, and the other returns to its default. If both keys are in the same file, or both on the command line,
//! [`super::Config`] reports the contradiction.

use toml::Value;

use super::keys::{self, KEYS};
use super::optimizer::Row;
use super::values::{Origin, Values};
use crate::failure::Outcome;

/// A key, and the keys that set the same thing in another way.
const CONFLICTING_KEYS: [(&str, &[&str]); 7] = [
    ("train.batch_size", &["train.batch_size_per_device", "train.gradient_accumulation_steps"]),
    ("train.batch_size_per_device", &["train.batch_size"]),
    ("model.config", &["model.init_from", "run.finetune"]),
    ("model.init_from", &["model.config", "model.overrides", "model.vocab_size"]),
    ("optimizer.learning_rate", &["optimizer.relative_step", "optimizer.warmup_init"]),
    ("schedule.warmup_steps", &["schedule.warmup_ratio"]),
    ("schedule.warmup_ratio", &["schedule.warmup_steps"]),
];

/// Keys of an explicit learning rate, which `optimizer.relative_step = true` resets.
const RATES: [&str; 4] = ["optimizer.learning_rate", "schedule.name", "schedule.warmup_steps", "schedule.warmup_ratio"];

/// Resets values of a file that a value on the command line contradicts.
pub fn resolve_precedence(values: &mut Values) -> Outcome<()> {
    for (typed, rivals) in CONFLICTING_KEYS {
        let stands_for_nothing = values.setting(typed).value.as_str().is_some_and(|text| is_word(typed, text));
        if is_typed(values, typed) && !stands_for_nothing {
            reset_keys(values, rivals)?;
        }
    }
    if is_typed(values, "optimizer.relative_step") && values.switch("optimizer.relative_step") {
        reset_keys(values, &RATES)?;
    }
    if let Some(name) = values.text("optimizer.name").filter(|_| is_typed(values, "optimizer.name")) {
        let row = Row::named(&name);
        let of_others = KEYS.iter().map(|key| key.name).filter(|key| key.starts_with("optimizer.") && !row.reads(key));
        // A file scales the steps of its own optimizer.
        reset_keys(values, &of_others.chain(["optimizer.scale_parameter"]).collect::<Vec<_>>())?;
    }
    let has_typed_steps = is_typed(values, "train.max_steps") && values.integer("train.max_steps").is_some();
    if has_typed_steps && !is_typed(values, "train.epochs") {
        values.set("train.epochs", Value::from("none"), Origin::Run("max_steps was given on the command line"))?;
    }
    Ok(())
}

fn is_typed(values: &Values, key: &str) -> bool {
    matches!(values.origin(key), Origin::Flag(_))
}

fn is_word(key: &str, text: &str) -> bool {
    keys::find(key).is_some_and(|key| key.words.contains(&text))
}

fn reset_keys(values: &mut Values, keys: &[&str]) -> Outcome<()> {
    for key in keys {
        if matches!(values.origin(key), Origin::File(..)) {
            values.reset(key)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn resolved(file: &str, typed: &[&str]) -> Outcome<Config> {
        let mut values = Values::defaults();
        values.apply_file("my.toml", &format!("{file}\n[data]\ntrain = \"a\"\n")).unwrap();
        typed.iter().for_each(|assignment| values.apply_assignment(assignment).unwrap());
        resolve_precedence(&mut values)?;
        Config::resolve(values)
    }

    const TINY: &str = "[model]\nconfig = \"tiny\"\n";

    #[test]
    fn a_typed_batch_size_beats_the_pair_of_a_file() {
        let file = format!("{TINY}[train]\nbatch_size_per_device = 16\ngradient_accumulation_steps = 8");
        assert_eq!(resolved(&file, &[]).unwrap().train.batch_size, 128);
        assert_eq!(resolved(&file, &["train.batch_size=8"]).unwrap().train.batch_size, 8);
        assert_eq!(resolved(&file, &["train.batch_size_per_device=4"]).unwrap().train.batch_size, 32);
        let file = format!("{TINY}[train]\nbatch_size = 100");
        assert_eq!(resolved(&file, &["train.batch_size_per_device=4"]).unwrap().train.batch_size, 4);
    }

    #[test]
    fn two_values_of_one_place_still_contradict_each_other() {
        let both = ["train.batch_size=8", "train.batch_size_per_device=16", "train.gradient_accumulation_steps=8"];
        assert!(resolved(TINY, &both).unwrap_err().message.contains("train.batch_size"));
    }

    #[test]
    fn a_typed_learning_rate_beats_relative_step_and_the_other_way_round() {
        let relative = format!("{TINY}[optimizer]\nrelative_step = true\nwarmup_init = true");
        assert_eq!(resolved(&relative, &["optimizer.learning_rate=0.1"]).unwrap().optimizer.learning_rate, Some(0.1));
        let own = format!("{TINY}[optimizer]\nlearning_rate = 0.1\n[schedule]\nname = \"cosine\"\nwarmup_steps = 9");
        let config = resolved(&own, &["optimizer.relative_step=true"]).unwrap();
        assert_eq!((config.optimizer.learning_rate, config.schedule.name.as_str()), (None, "constant"));
        assert!(resolved(&relative, &["schedule.warmup_steps=0"]).unwrap().optimizer.learning_rate.is_none());
    }

    #[test]
    fn a_typed_model_beats_the_model_of_a_file() {
        let file = "[run]\nfinetune = true\n[model]\ninit_from = \"m\"";
        let config = resolved(file, &["model.config=tiny"]).unwrap();
        assert!(config.model.init_from.is_none() && !config.run.finetune);
        assert!(resolved(TINY, &["model.init_from=m"]).unwrap().model.config.is_none());
        assert!(resolved(TINY, &["model.init_from=none"]).unwrap().model.config.is_some());
    }

    #[test]
    fn typed_steps_are_the_only_limit_unless_epochs_were_typed_too() {
        let file = format!("{TINY}[train]\nepochs = 3");
        let limits = |typed: &[&str]| {
            let train = resolved(&file, typed).unwrap().train;
            (train.max_steps, train.epochs)
        };
        assert_eq!(limits(&[]), (None, Some(3)));
        assert_eq!(limits(&["train.max_steps=500"]), (Some(500), None));
        assert_eq!(limits(&["train.max_steps=500", "train.epochs=1"]), (Some(500), Some(1)));
        assert_eq!(limits(&["train.max_steps=none"]), (None, Some(3)));
    }
}
