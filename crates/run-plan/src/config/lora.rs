//! `lora.*`: an adapter that is trained beside frozen weights.

use std::path::PathBuf;

use t5::{Lora, LoraInit, Targets};

use super::paths;
use super::values::Values;
use crate::failure::{Failure, Outcome};

/// The word for every linear layer of the blocks.
const ALL_LINEAR: &str = "all-linear";

/// `lora.*`, if an adapter is trained.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// The adapter's settings. With `init_from`, the settings of that adapter apply.
    pub lora: Lora,
    /// A directory that PEFT or an earlier run wrote.
    pub init_from: Option<PathBuf>,
}

impl Adapter {
    /// The adapter that the values ask for, if `lora.rank` or `lora.init_from` is set.
    pub fn from_values(values: &Values) -> Outcome<Option<Self>> {
        let init_from = values.text("lora.init_from").as_deref().map(paths::from_text);
        let rank = values.integer("lora.rank");
        if rank.is_none() && init_from.is_none() {
            return match typed_key(values, |_| true) {
                None => Ok(None),
                Some(key) => Err(Failure::usage(format!(
                    "`{key}` ({}) has no effect without an adapter: `lora.rank` is \"none\"",
                    values.origin(&key)
                ))
                .hint("`--lora` trains an adapter of rank 16, `--set lora.rank=8` one of rank 8")),
            };
        }
        if values.text("model.init_from").is_none() && values.text("model.config").is_none() {
            return Err(without_base());
        }
        if values.switch("run.finetune") {
            return Err(Failure::usage(format!(
                "`run.finetune` ({}) trains a part of the weights, an adapter none of them",
                values.origin("run.finetune")
            ))
            .hint("leave out `--finetune`"));
        }
        if let (Some(directory), Some(key)) = (&init_from, typed_key(values, |key| key != "lora.dropout")) {
            return Err(Failure::usage(format!(
                "`{key}` ({}) cannot be changed: the adapter in {} was made with settings of its own",
                values.origin(&key),
                directory.display()
            ))
            .hint("leave it out, or leave out `lora.init_from`"));
        }
        let rank = rank.map_or(16, |rank| usize::try_from(rank).unwrap_or(usize::MAX));
        #[expect(clippy::cast_precision_loss, reason = "a rank is small")]
        let alpha = values.number("lora.alpha").unwrap_or(2.0 * rank as f64);
        let targets = values.list("lora.targets").unwrap_or_default();
        let lora = Lora {
            rank,
            alpha,
            dropout: values.number("lora.dropout").unwrap_or(0.0),
            rslora: values.switch("lora.rslora"),
            dora: values.switch("lora.dora"),
            targets: if targets == [ALL_LINEAR] { Targets::AllLinear } else { Targets::Names(targets) },
            modules_to_save: values.list("lora.modules_to_save").unwrap_or_default(),
            init: match values.text("lora.init").as_deref() {
                Some("gaussian") => LoraInit::Gaussian,
                _ => LoraInit::KaimingUniform,
            },
            ..Lora::default()
        };
        Ok(Some(Self { lora, init_from }))
    }
}

/// The error for an adapter without weights to train it beside. A plan needs only their shape.
pub(super) fn without_base() -> Failure {
    Failure::usage("an adapter needs a base model, and `model.init_from` is not set")
        .hint("use `--model DIR` with a Hugging Face directory")
}

/// The first adapter setting with a given value, except the two settings that ask for an adapter.
fn typed_key(values: &Values, counts: impl Fn(&str) -> bool) -> Option<String> {
    let keys = super::keys::KEYS.iter().map(|key| key.name).filter(|key| key.starts_with("lora."));
    let others = keys.filter(|key| !["lora.rank", "lora.init_from"].contains(key) && counts(key));
    let is_other = |key: &&str| values.setting(key).value != super::keys::default(key);
    others.filter(|key| values.is_given(key)).find(is_other).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn resolved(assignments: &[&str]) -> Outcome<Config> {
        let mut values = Values::defaults();
        for assignment in ["model.init_from=m", "data.train=a.parquet"].iter().chain(assignments) {
            values.apply_assignment(assignment)?;
        }
        Config::resolve(values)
    }

    #[test]
    fn a_rank_asks_for_an_adapter_on_every_linear_layer_trained_by_adamw() {
        let config = resolved(&["lora.rank=8"]).unwrap();
        let lora = config.lora.as_ref().unwrap().lora.clone();
        assert_eq!(lora, Lora { rank: 8, alpha: 16.0, ..Lora::default() });
        assert_eq!(config.optimizer.row.name, "adamw");
        assert_eq!(resolved(&["lora.rank=8", "optimizer.name=adafactor"]).unwrap().optimizer.row.name, "adafactor");
        assert_eq!(resolved(&["lora.rank=8", "optimizer.relative_step=true"]).unwrap().optimizer.row.name, "adafactor");
        let full = resolved(&[]).unwrap();
        assert!(full.lora.is_none() && full.optimizer.row.name == "adafactor");
    }

    #[test]
    fn every_setting_arrives() {
        let typed = ["lora.rank=4", "lora.alpha=6", "lora.dropout=0.1", "lora.rslora=true", "lora.dora=true"];
        let more = ["lora.targets=q,v", "lora.modules_to_save=lm_head", "lora.init=gaussian"];
        let lora = resolved(&[&typed[..], &more].concat()).unwrap().lora.unwrap().lora;
        let targets = Targets::Names(vec!["q".into(), "v".into()]);
        let expected = Lora { rank: 4, alpha: 6.0, dropout: 0.1, rslora: true, dora: true, targets, ..Lora::default() };
        assert_eq!(lora, Lora { modules_to_save: vec!["lm_head".into()], init: LoraInit::Gaussian, ..expected });
    }

    #[test]
    fn settings_that_contradict_each_other_are_named() {
        for (typed, expected) in [
            (&["lora.alpha=6"][..], "`lora.alpha`"),
            (&["lora.rank=8", "model.init_from=none", "model.config=tiny"], "`model.init_from`"),
            (&["lora.rank=8", "run.finetune=true"], "`run.finetune`"),
            (&["lora.init_from=a", "lora.dora=true"], "`lora.dora`"),
        ] {
            let failure = resolved(typed).expect_err("a contradiction");
            assert!(failure.message.contains(expected) && !failure.hints.is_empty(), "{failure}");
        }
    }
}
