//! Settings that have no effect beside the others: one table of keys, the condition of their effect, and its words. The keys of a loss are in its
//! row (`LOSSES`).
//!
//! A run with such a setting works, but does not what its user may expect. So the run names it.

use trainer::contrastive::ContrastiveLoss;
use trainer::preference::PreferenceLoss;

use text_metrics::Metric;

use super::{Config, LOSSES, Objective, Origin, keys};

/// What the conditions depend on besides the config.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances {
    /// Whether a card computes.
    pub is_on_card: bool,
    /// Processes that train together.
    pub processes: usize,
    /// The objective, if it is known: the config names it, or the files are open.
    pub objective: Option<Objective>,
    /// Whether evaluations have rows.
    pub has_validation: bool,
}

/// Keys, the condition of their effect, and the condition in words.
struct Rule {
    keys: &'static [&'static str],
    has_effect: fn(&Config, Circumstances) -> bool,
    why: &'static str,
}

const RULES: &[Rule] = &[
    Rule {
        keys: &["data.label_column"],
        has_effect: |config, _| {
            let has_scores = config.embedding.as_ref().is_some_and(|of| of.loss.has_scores());
            has_scores || config.ranking.is_some() || config.preference.is_some_and(|of| of.loss.has_labels())
        },
        why: "it is for `task.name = \"ranking\"`, for `embedding.loss = \"cosine\"` and `\"cosent\"`, and for `preference.loss = \"kto\"`",
    },
    Rule {
        keys: &["embedding.temperature"],
        has_effect: |config, _| config.embedding.as_ref().is_none_or(|of| of.loss.has_temperature()),
        why: "it is for `embedding.loss = \"mnr\"` and `\"cosent\"`",
    },
    Rule {
        keys: &["embedding.largest_score"],
        has_effect: |config, _| config.embedding.as_ref().is_none_or(|of| of.loss == ContrastiveLoss::Cosine),
        why: "it is for `embedding.loss = \"cosine\"`",
    },
    Rule {
        keys: &["embedding.margin"],
        has_effect: |config, _| config.embedding.as_ref().is_none_or(|of| of.loss == ContrastiveLoss::Triplet),
        why: "it is for `embedding.loss = \"triplet\"`",
    },
    Rule {
        keys: &["preference.desirable_weight", "preference.undesirable_weight"],
        has_effect: |config, _| config.preference.is_none_or(|of| of.loss.has_labels()),
        why: "it is for `preference.loss = \"kto\"`",
    },
    Rule {
        keys: &["data.chosen_column", "data.rejected_column"],
        has_effect: |config, _| config.preference.is_none_or(|of| !of.loss.has_labels()),
        why: "rows of `preference.loss = \"kto\"` have one answer and a label",
    },
    Rule {
        keys: &["data.response_column"],
        has_effect: |config, _| config.preference.is_none_or(|of| of.loss.has_labels()),
        why: "rows of preferences have `data.prompt_column`, `data.chosen_column` and `data.rejected_column`",
    },
    Rule {
        keys: &["preference.reference"],
        has_effect: |config, _| config.preference.is_none_or(|of| of.loss.has_reference()),
        why: "it is for `preference.loss = \"dpo\"` and `\"kto\"`",
    },
    Rule {
        keys: &["preference.gamma"],
        has_effect: |config, _| config.preference.is_none_or(|of| of.loss == PreferenceLoss::Simpo),
        why: "it is for `preference.loss = \"simpo\"`",
    },
    Rule {
        keys: &["data.source_template", "data.target_template", "data.source_lang", "data.target_lang"],
        has_effect: |config, _| config.preference.is_none(),
        why: "rows of preferences have columns of their own",
    },
    Rule {
        keys: &["data.noise_density", "data.mean_span_tokens"],
        has_effect: |config, now| now.objective != Some(Objective::TextToText) && config.data.denoisers.is_empty(),
        why: "it is for span corruption, and the run trains another task, or denoisers with numbers of their own",
    },
    Rule {
        // With a response, the text is its prompt.
        keys: &["data.text_column"],
        has_effect: |config, now| now.objective != Some(Objective::TextToText) || config.data.chosen.response.is_some(),
        why: "it is for pretraining, and the rows are pairs of prompt and response",
    },
    Rule {
        keys: &[
            "data.prompt_column",
            "data.response_column",
            "data.source_template",
            "data.target_template",
            "data.source_lang",
            "data.target_lang",
            "data.source_prefix",
            "data.truncation_side",
        ],
        has_effect: |_, now| now.objective != Some(Objective::Denoising),
        why: "it is for pairs of prompt and response, and the run pretrains on texts",
    },
    Rule {
        keys: &["data.mixing", "data.mixing_limit"],
        has_effect: |config, _| !config.data.tasks.tasks.is_empty(),
        why: "it is for `[[data.tasks]]`",
    },
    Rule {
        keys: &["data.mixing_temperature"],
        has_effect: |config, _| matches!(config.data.tasks.mixing, Some(super::Mixing::Temperature(_))),
        why: "it is for `data.mixing = \"temperature\"`",
    },
    Rule {
        keys: &["data.block_rows", "data.window_blocks"],
        has_effect: |config, _| config.data.shuffle,
        why: "`data.shuffle` is false",
    },
    Rule {
        keys: &["schedule.div_factor", "schedule.final_div_factor"],
        has_effect: |config, _| config.schedule.name == "one-cycle",
        why: "it is for `schedule.name = \"one-cycle\"`",
    },
    Rule {
        keys: &["optimizer.clip_threshold", "optimizer.decay_rate", "optimizer.eps1"],
        has_effect: |config, _| config.optimizer.row.name == "adafactor",
        why: "it is Adafactor's, and the optimizer is another",
    },
    Rule {
        keys: &["optimizer.eps2"],
        has_effect: |config, _| config.optimizer.scale_parameter,
        why: "it is the floor of `optimizer.scale_parameter`, which is false",
    },
    Rule {
        keys: &["train.eval_every_steps", "train.eval_samples", "train.eval_generate_samples", "checkpoint.keep_best"],
        has_effect: |_, now| now.has_validation,
        why: "there are no validation rows",
    },
    Rule {
        keys: &[
            "train.eval_max_new_tokens",
            "train.eval_metrics",
            "train.sample_generations",
            "generation.num_beams",
            "generation.sample",
            "generation.temperature",
            "generation.top_k",
            "generation.top_p",
            "generation.repetition_penalty",
            "generation.no_repeat_ngram",
            "generation.min_new_tokens",
        ],
        has_effect: generates,
        why: "it is for generated answers, and evaluations generate none",
    },
    Rule {
        keys: &["generation.length_penalty", "generation.early_stopping"],
        has_effect: |config, now| generates(config, now) && config.generation.num_beams > 1,
        why: "it is for beam search, and `generation.num_beams` is 1 or nothing is generated",
    },
    Rule {
        keys: &["generation.temperature", "generation.top_k", "generation.top_p", "generation.seed"],
        has_effect: |config, now| !generates(config, now) || config.generation.sampling.is_some(),
        why: "answers are not sampled",
    },
    Rule {
        keys: &["train.rouge_stemmer"],
        has_effect: |config, now| {
            generates(config, now) && config.train.eval_metrics.iter().any(|metric| metric.name().starts_with("rouge"))
        },
        why: "it is for ROUGE, which `train.eval_metrics` does not name",
    },
    Rule {
        keys: &["train.bleu_tokenizer"],
        has_effect: |config, now| generates(config, now) && config.train.eval_metrics.contains(&Metric::Bleu),
        why: "it is for BLEU, which no evaluation computes",
    },
    Rule {
        keys: &["train.early_stopping_min_delta"],
        has_effect: |config, _| config.train.early_stopping_patience.is_some(),
        why: "it is for `train.early_stopping_patience`, which is not set",
    },
    Rule {
        keys: &["memory.device_budget", "memory.offload_to"],
        has_effect: |_, now| now.is_on_card,
        why: "it is for GPUs, and the CPU computes",
    },
    Rule {
        keys: &["parallel.shard", "parallel.network_mbit"],
        has_effect: |_, now| now.processes > 1,
        why: "one process trains",
    },
];

fn generates(config: &Config, now: Circumstances) -> bool {
    now.has_validation && config.train.eval_generate_samples > 0
}

impl Config {
    /// The given settings that have no effect, each with the reason. Values that equal the default do not count, nor do those of `ignored`,
    /// a file by its name in errors.
    pub fn unused(&self, now: Circumstances, ignored: &str) -> Vec<String> {
        let is_given = |key: &str| match self.values.origin(key) {
            Origin::Flag(_) => true,
            Origin::File(file, _) => file != ignored,
            Origin::Default | Origin::Run(_) => false,
        };
        let mut found: Vec<(&str, &str)> = Vec::new();
        let of_losses = LOSSES.iter().filter(|loss| !(loss.is_chosen)(self)).map(|loss| loss.keys);
        let of_rules = RULES.iter().filter(|rule| !(rule.has_effect)(self, now)).map(|rule| (rule.keys, rule.why));
        for (keys_without_effect, why) in of_losses.chain(of_rules) {
            for key in keys_without_effect {
                let is_other = self.values.setting(key).value != keys::default(key);
                if is_given(key) && is_other && found.iter().all(|(known, _)| known != key) {
                    found.push((key, why));
                }
            }
        }
        let words = |(key, why): (&str, &str)| format!("`{key}` ({}) has no effect: {why}", self.values.origin(key));
        found.into_iter().map(words).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Values;

    fn unused(assignments: &[&str]) -> Vec<String> {
        let mut values = Values::defaults();
        for assignment in ["data.train=a", "model.config=tiny"].iter().chain(assignments) {
            values.apply_assignment(assignment).unwrap_or_else(|failure| panic!("{assignment}: {failure}"));
        }
        let config = Config::resolve(values).unwrap_or_else(|failure| panic!("{assignments:?}: {failure}"));
        let objective = config.data.objective.or(Some(Objective::TextToText));
        let has_validation = config.data.has_validation();
        config.unused(Circumstances { is_on_card: false, processes: 1, objective, has_validation }, "")
    }

    #[test]
    fn a_setting_without_an_effect_is_named_with_the_reason() {
        for (without, with) in [
            ("data.noise_density=0.5", "data.objective=span-corruption"),
            ("data.block_rows=7", "data.shuffle=true"),
            ("schedule.div_factor=2", "schedule.name=one-cycle"),
            ("optimizer.eps2=0.5", "optimizer.scale_parameter=true"),
            ("train.eval_samples=3", "data.validation=b"),
            ("generation.num_beams=3", "data.validation=b"),
            ("train.rouge_stemmer=true", "train.eval_metrics=rouge"),
        ] {
            let key = without.split('=').next().unwrap_or_default();
            let others = if key == "data.block_rows" { &["data.shuffle=false"][..] } else { &[] };
            let found = unused(&[others, &[without]].concat());
            assert!(found.len() == 1 && found[0].contains(&format!("`{key}` (--set) has no effect: ")), "{found:?}");
            let found = unused(&[&["data.validation=b", without], &[with][..]].concat());
            assert!(found.is_empty(), "{found:?}");
        }
        assert!(unused(&["schedule.div_factor=50"]).is_empty(), "the default");
        assert_eq!(unused(&["optimizer.name=adamw", "optimizer.eps1=0.1", "optimizer.decay_rate=-0.5"]).len(), 2);
    }

    #[test]
    fn every_rule_is_about_keys_of_the_table() {
        let of_losses = LOSSES.iter().flat_map(|loss| loss.keys.0);
        assert!(RULES.iter().flat_map(|rule| rule.keys).chain(of_losses).all(|key| keys::find(key).is_some()));
    }
}
