//! `generation.*`: the settings of answers, in evaluations and in the commands that answer.

use serde_json::{Map, Value as Json};
use t5::{Beams, EarlyStopping, GenerateOptions, Processors, Sampling, Search};
use toml::Value;

use super::values::{Origin, Values};
use super::{number, required, size};
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
}

/// Keys that switch sampling on if the user sets one of them.
const OF_SAMPLING: [&str; 3] = ["generation.temperature", "generation.top_k", "generation.top_p"];

/// The settings in a model's own files that apply to answers, and their keys. transformers uses them as defaults, too.
const OF_A_MODEL: [(&str, &str); 9] = [
    ("num_beams", "generation.num_beams"),
    ("length_penalty", "generation.length_penalty"),
    ("early_stopping", "generation.early_stopping"),
    ("do_sample", "generation.sample"),
    ("temperature", "generation.temperature"),
    ("top_k", "generation.top_k"),
    ("top_p", "generation.top_p"),
    ("repetition_penalty", "generation.repetition_penalty"),
    ("no_repeat_ngram_size", "generation.no_repeat_ngram"),
];

impl Generation {
    /// The settings in these values.
    pub fn of(values: &Values) -> Self {
        // A model's own sampling settings apply if sampling is on, but do not switch it on.
        let is_set = |key: &&str| !matches!(values.origin(key), Origin::Default | Origin::Run(_));
        let temperature = number(values, "generation.temperature");
        let wanted = values.setting("generation.sample").value.as_bool();
        let samples = wanted.unwrap_or_else(|| OF_SAMPLING.iter().any(is_set)) && temperature > 0.0;
        #[expect(clippy::cast_possible_truncation, reason = "settings, not counts")]
        let sampling = Sampling {
            temperature: temperature as f32,
            top_k: size(values, "generation.top_k"),
            top_p: number(values, "generation.top_p") as f32,
            seed: values.integer("generation.seed").unwrap_or_else(|| required(values, "run.seed")),
        };
        Self {
            num_beams: size(values, "generation.num_beams"),
            length_penalty: number(values, "generation.length_penalty"),
            early_stopping: match values.text("generation.early_stopping").as_deref() {
                Some("true") => EarlyStopping::Yes,
                Some("never") => EarlyStopping::Never,
                _ => EarlyStopping::No,
            },
            sampling: samples.then_some(sampling),
            processors: Processors {
                #[expect(clippy::cast_possible_truncation, reason = "a setting, not a count")]
                repetition_penalty: number(values, "generation.repetition_penalty") as f32,
                no_repeat_ngram: size(values, "generation.no_repeat_ngram"),
                min_new_tokens: size(values, "generation.min_new_tokens"),
            },
        }
    }

    /// The model's options for one answer to each prompt.
    pub fn options(&self) -> GenerateOptions {
        let &Self { num_beams, length_penalty, early_stopping, sampling, processors } = self;
        let search = match sampling {
            _ if num_beams > 1 => Search::Beams(Beams { count: num_beams, length_penalty, early_stopping, sampling }),
            Some(sampling) => Search::Sample(sampling),
            None => Search::Greedy,
        };
        GenerateOptions { processors, search, ..GenerateOptions::default() }
    }
}

/// Sets the model's own defaults, which `file` beside its weights contains. Returns the model's longest answer in tokens, if it has such a
/// setting.
///
/// # Errors
/// A value that the setting does not accept.
pub fn apply_model_defaults(
    values: &mut Values,
    settings: &Map<String, Json>,
    file: &'static str,
) -> Outcome<Option<u64>> {
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
    let length = |name: &str| settings.get(name).and_then(Json::as_u64);
    // transformers' length counts the decoder's start token.
    Ok(length("max_new_tokens")
        .or_else(|| length("max_length").map(|all| all.saturating_sub(1)))
        .filter(|&most| most > 0))
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
        Generation::of(&values).options()
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
        assert_eq!(apply(&mut values, settings).unwrap(), Some(20));
        values.apply_assignment("generation.num_beams=2").unwrap();
        let Search::Beams(beams) = Generation::of(&values).options().search else { panic!("beams") };
        assert_eq!((beams.count, beams.early_stopping, beams.sampling), (2, EarlyStopping::Never, None));
        values.apply_assignment("generation.sample=true").unwrap();
        assert_eq!(Generation::of(&values).sampling.unwrap().temperature, 0.5);
        let refused = apply(&mut values, json!({"num_beams": 0})).unwrap_err();
        assert!(refused.message.contains("g.json") && refused.message.contains("num_beams"), "{refused}");
    }
}
