//! `generation.*`: the settings of answers, in evaluations and in the commands that answer.

use serde_json::{Map, Value as Json};
use t5::{Beams, EarlyStopping, GenerateOptions, Processors, Sampling, Search};
use toml::Value;

use super::values::{Origin, Values};
use super::{required, size};
use crate::failure::{Failure, Outcome};

/// `generation.*`
#[derive(Clone, Debug)]
pub struct Generation {
    /// The number of beams; 1: no beam search.
    pub num_beams: usize,
    /// The exponent of an answer's length by which its score is divided.
    pub length_penalty: f64,
    /// The condition that ends a search.
    pub early_stopping: EarlyStopping,
    /// Settings of sampling; `None`: tokens are not sampled.
    pub sampling: Option<Sampling>,
    /// Settings that forbid tokens, or make them less likely.
    pub processors: Processors,
    /// Whether answers keep special tokens.
    pub keeps_special_tokens: bool,
}

/// The settings that a model's own files give.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelDefaults {
    /// The model's longest answer in tokens.
    pub max_new_tokens: Option<u64>,
    /// Settings that change answers in transformers, and that this program does not have.
    pub ignored: Vec<&'static str>,
}

/// Keys that switch sampling on if the user sets one of them.
const OF_SAMPLING: [&str; 3] = ["generation.temperature", "generation.top_k", "generation.top_p"];

/// The settings in a model's own files that apply to answers, and their keys. transformers uses them as defaults, too.
const OF_A_MODEL: [(&str, &str); 10] = [
    ("num_beams", "generation.num_beams"),
    ("length_penalty", "generation.length_penalty"),
    ("early_stopping", "generation.early_stopping"),
    ("do_sample", "generation.sample"),
    ("temperature", "generation.temperature"),
    ("top_k", "generation.top_k"),
    ("top_p", "generation.top_p"),
    ("repetition_penalty", "generation.repetition_penalty"),
    ("no_repeat_ngram_size", "generation.no_repeat_ngram"),
    ("min_new_tokens", "generation.min_new_tokens"),
];

/// Settings of transformers' `GenerationConfig` (5.24) that change answers and that this program does not have, with the values that
/// change nothing beside null, empty lists and false.
const IGNORED: [(&str, &[f64]); 20] = [
    ("suppress_tokens", &[]),
    ("begin_suppress_tokens", &[]),
    ("bad_words_ids", &[]),
    ("force_words_ids", &[]),
    ("constraints", &[]),
    ("forced_bos_token_id", &[]),
    ("forced_eos_token_id", &[]),
    ("exponential_decay_length_penalty", &[]),
    ("sequence_bias", &[]),
    ("stop_strings", &[]),
    ("watermarking_config", &[]),
    ("encoder_repetition_penalty", &[1.0]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("num_beam_groups", &[1.0]),
    ("diversity_penalty", &[0.0]),
    ("penalty_alpha", &[0.0]),
    ("guidance_scale", &[1.0]),
    ("typical_p", &[1.0]),
    ("min_p", &[0.0]),
    ("epsilon_cutoff", &[0.0]),
];

impl Generation {
    /// The settings in these values.
    pub fn from_values(values: &Values) -> Self {
        // A model's own sampling settings apply if sampling is on, but do not switch it on.
        let is_set = |key: &&str| !matches!(values.origin(key), Origin::Default | Origin::Run(_));
        let temperature = values.required_number("generation.temperature");
        let wanted = values.setting("generation.sample").value.as_bool();
        let samples = wanted.unwrap_or_else(|| OF_SAMPLING.iter().any(is_set)) && temperature > 0.0;
        #[expect(clippy::cast_possible_truncation, reason = "settings, not counts")]
        let sampling = Sampling {
            temperature: temperature as f32,
            top_k: size(values, "generation.top_k"),
            top_p: values.required_number("generation.top_p") as f32,
            seed: values.integer("generation.seed").unwrap_or_else(|| required(values, "run.seed")),
        };
        Self {
            num_beams: size(values, "generation.num_beams"),
            length_penalty: values.required_number("generation.length_penalty"),
            early_stopping: match values.text("generation.early_stopping").as_deref() {
                Some("true") => EarlyStopping::Yes,
                Some("never") => EarlyStopping::Never,
                _ => EarlyStopping::No,
            },
            sampling: samples.then_some(sampling),
            processors: Processors {
                #[expect(clippy::cast_possible_truncation, reason = "a setting, not a count")]
                repetition_penalty: values.required_number("generation.repetition_penalty") as f32,
                no_repeat_ngram: size(values, "generation.no_repeat_ngram"),
                min_new_tokens: size(values, "generation.min_new_tokens"),
            },
            keeps_special_tokens: values.setting("generation.keep_special_tokens").value.as_bool().unwrap_or(false),
        }
    }

    /// The names of a model's own settings, which `file` beside its weights contains, that these settings do not follow.
    ///
    /// # Errors
    /// As for [`apply_model_defaults`].
    pub fn departs_from(&self, settings: &Map<String, Json>, file: &'static str) -> Outcome<Vec<&'static str>> {
        let mut values = Values::defaults();
        let defaults = apply_model_defaults(&mut values, settings, file)?;
        let own = Self::from_values(&values);
        let has_beams = own.num_beams > 1 && self.num_beams > 1;
        let differs = [
            ("num_beams", own.num_beams != self.num_beams),
            ("length_penalty", has_beams && own.length_penalty != self.length_penalty),
            ("early_stopping", has_beams && own.early_stopping != self.early_stopping),
            ("do_sample", own.sampling.is_some() != self.sampling.is_some()),
            ("repetition_penalty", own.processors.repetition_penalty != self.processors.repetition_penalty),
            ("no_repeat_ngram_size", own.processors.no_repeat_ngram != self.processors.no_repeat_ngram),
            ("min_new_tokens", own.processors.min_new_tokens != self.processors.min_new_tokens),
        ];
        // What the file does not set, the user did.
        let is_set = |(name, differs): &(&str, bool)| {
            *differs
                && (settings.contains_key(*name) || *name == "min_new_tokens" && settings.contains_key("min_length"))
        };
        Ok(differs.into_iter().filter(is_set).map(|(name, _)| name).chain(defaults.ignored).collect())
    }

    /// The model's options for one answer to each prompt.
    pub fn options(&self) -> GenerateOptions {
        let &Self { num_beams, length_penalty, early_stopping, sampling, processors, .. } = self;
        let search = match sampling {
            _ if num_beams > 1 => Search::Beams(Beams { count: num_beams, length_penalty, early_stopping, sampling }),
            Some(sampling) => Search::Sample(sampling),
            None => Search::Greedy,
        };
        GenerateOptions { processors, search, ..GenerateOptions::default() }
    }
}

/// Sets the model's own defaults, which `file` beside its weights contains.
///
/// # Errors
/// A value that the setting does not accept.
pub fn apply_model_defaults(
    values: &mut Values,
    settings: &Map<String, Json>,
    file: &'static str,
) -> Outcome<ModelDefaults> {
    for (name, key) in OF_A_MODEL {
        let value = match settings.get(name) {
            Some(Json::Bool(value)) => Value::Boolean(*value),
            Some(Json::String(value)) => Value::String(value.clone()),
            Some(Json::Number(value)) => {
                value.as_i64().map_or_else(|| Value::Float(value.as_f64().unwrap_or(0.0)), Value::Integer)
            }
            _ => continue,
        };
        values.set(key, value, Origin::Run(file)).map_err(|failure| {
            Failure::unusable(format!("{file} of the model: {}", failure.message))
                .hint(format!("correct `{name}` in the file, or remove it"))
        })?;
    }
    for name in ["max_new_tokens", "max_length", "min_length"] {
        if let Some(value) = settings.get(name).filter(|value| !value.is_null() && value.as_u64().is_none()) {
            return Err(Failure::unusable(format!(
                "{file} of the model: `{name}` is {value}, expected a whole number"
            ))
            .hint(format!("correct `{name}` in the file, or remove it")));
        }
    }
    let length = |name: &str| settings.get(name).and_then(Json::as_u64);
    // transformers' lengths count the decoder's start token.
    let least = length("min_length").map(|all| all.saturating_sub(1)).filter(|_| length("min_new_tokens").is_none());
    if let Some(least) = least.and_then(|least| i64::try_from(least).ok()) {
        values.set("generation.min_new_tokens", Value::Integer(least), Origin::Run(file))?;
    }
    let longest = length("max_new_tokens").or_else(|| length("max_length").map(|all| all.saturating_sub(1)));
    let changes = |(name, neutral): &(&str, &[f64])| match settings.get(*name) {
        None | Some(Json::Null | Json::Bool(false)) => false,
        Some(Json::Array(list)) => !list.is_empty(),
        Some(Json::Object(map)) => !map.is_empty(),
        Some(value) => value.as_f64().is_none_or(|value| !neutral.contains(&value)),
    };
    Ok(ModelDefaults {
        max_new_tokens: longest.filter(|&most| most > 0),
        ignored: IGNORED.iter().filter(|setting| changes(setting)).map(|(name, _)| *name).collect(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn generation(assignments: &[&str]) -> GenerateOptions {
        let mut values = Values::defaults();
        for assignment in assignments {
            values.apply_assignment(assignment).unwrap_or_else(|failure| panic!("{assignment}: {failure}"));
        }
        Generation::from_values(&values).options()
    }

    #[test]
    fn answers_are_greedy_until_a_setting_says_otherwise() {
        assert_eq!(generation(&[]), GenerateOptions::default());
        let sampled = generation(&["generation.temperature=0.7"]);
        let Search::Sample(sampling) = sampled.search else { panic!("{sampled:?}") };
        assert_eq!((sampling.temperature, sampling.top_k, sampling.seed), (0.7, 50, 42));
        assert_eq!(generation(&["generation.temperature=0"]).search, Search::Greedy);
        assert_eq!(generation(&["generation.top_k=5", "generation.sample=false"]).search, Search::Greedy);
        assert!(matches!(generation(&["generation.sample=true"]).search, Search::Sample(_)));
        let searched = generation(&["generation.num_beams=4", "generation.early_stopping=true"]);
        let Search::Beams(beams) = searched.search else { panic!("{searched:?}") };
        assert_eq!((beams.count, beams.early_stopping, beams.sampling), (4, EarlyStopping::Yes, None));
    }

    #[test]
    fn a_model_s_own_defaults_count_below_what_is_set_and_do_not_switch_sampling_on() {
        let mut values = Values::defaults();
        let apply = |values: &mut Values, settings: Json| {
            apply_model_defaults(values, settings.as_object().expect("an object"), "g.json")
        };
        let settings =
            json!({"num_beams": 3, "temperature": 0.5, "max_length": 21, "early_stopping": "never", "eos_token_id": 1});
        assert_eq!(apply(&mut values, settings).unwrap().max_new_tokens, Some(20));
        values.apply_assignment("generation.num_beams=2").unwrap();
        let Search::Beams(beams) = Generation::from_values(&values).options().search else { panic!("beams") };
        assert_eq!((beams.count, beams.early_stopping, beams.sampling), (2, EarlyStopping::Never, None));
        values.apply_assignment("generation.sample=true").unwrap();
        assert_eq!(Generation::from_values(&values).sampling.unwrap().temperature, 0.5);
        let shortest = |settings: Json| {
            let mut values = Values::defaults();
            let ignored = apply(&mut values, settings).unwrap().ignored;
            (Generation::from_values(&values).processors.min_new_tokens, ignored)
        };
        assert_eq!(shortest(json!({"min_length": 12})), (11, vec![]));
        assert_eq!(shortest(json!({"min_length": 12, "min_new_tokens": 9})), (9, vec![]));
        assert_eq!(shortest(json!({"min_length": 0, "typical_p": 1.0, "bad_words_ids": null})), (0, vec![]));
        let others = json!({"suppress_tokens": [35], "forced_bos_token_id": 50, "min_p": 0.1, "guidance_scale": 1});
        assert_eq!(shortest(others), (0, vec!["suppress_tokens", "forced_bos_token_id", "min_p"]));
        let own =
            json!({"num_beams": 3, "no_repeat_ngram_size": 2, "do_sample": true, "top_k": 7, "bad_words_ids": [[3]]});
        let departs = |generation: Generation| generation.departs_from(own.as_object().unwrap(), "g.json").unwrap();
        let greedy = Generation::from_values(&Values::defaults());
        assert_eq!(departs(greedy.clone()), ["num_beams", "do_sample", "no_repeat_ngram_size", "bad_words_ids"]);
        let mut followed = Values::defaults();
        apply(&mut followed, own.clone()).unwrap();
        assert_eq!(departs(Generation::from_values(&followed)), ["bad_words_ids"]);
        assert!(greedy.departs_from(&Map::new(), "g.json").unwrap().is_empty());
        let mut chosen = Values::defaults();
        chosen.apply_assignment("generation.num_beams=2").unwrap();
        let departs = Generation::from_values(&chosen).departs_from(&Map::new(), "g.json").unwrap();
        assert!(departs.is_empty(), "the file does not set it: {departs:?}");
        let refused = apply(&mut values, json!({"num_beams": 0})).unwrap_err();
        assert!(refused.message.contains("g.json") && refused.message.contains("num_beams"), "{refused}");
        for settings in [json!({"max_new_tokens": "20"}), json!({"max_length": -1}), json!({"min_length": [2]})] {
            let refused = apply(&mut values, settings.clone()).unwrap_err();
            assert!(refused.message.ends_with("expected a whole number"), "{settings}: {refused}");
        }
    }
}
