//! Converts a request's settings to those of generation. The flags of `serve` override the model's own settings, and the request overrides
//! both.

use openai_server::{ApiError, Options, Prompt};
use row_files::{Template, Turn};
use t5::{GenerateOptions, Search};
use toml::Value;

use crate::config::generation::Generation;
use crate::config::{Origin, Values};
use crate::failure::Failure;

/// Settings that requests cannot change.
pub struct Defaults {
    /// The model's settings and the flags.
    pub values: Values,
    /// The longest answer.
    pub max_new_tokens: usize,
    /// Dtype of activations.
    pub activations: candle_core::DType,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
}

impl Defaults {
    /// The options of generation for a request. `number` seeds sampling unless the request has a seed.
    ///
    /// # Errors
    /// A setting is wrong, or contradicts another.
    pub fn with(&self, options: &Options, number: u64) -> Result<GenerateOptions, ApiError> {
        let mut values = self.values.clone();
        let count = |count: usize| Value::Integer(i64::try_from(count).unwrap_or(i64::MAX));
        let float = |number: f32| Value::Float(f64::from(number));
        let wanted = [
            ("temperature", options.temperature.map(float)),
            ("top_p", options.top_p.map(float)),
            ("top_k", options.top_k.map(count)),
            ("num_beams", options.num_beams.map(count)),
            ("length_penalty", options.length_penalty.map(Value::Float)),
            ("repetition_penalty", options.repetition_penalty.map(float)),
            ("no_repeat_ngram", options.no_repeat_ngram.map(count)),
            ("min_new_tokens", options.min_tokens.map(count)),
        ];
        let wrong = |name: &str, failure: &Failure| ApiError::parameter(name, &failure.message);
        for (name, value) in wanted.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            let key = format!("generation.{name}");
            values.set(&key, value, Origin::Flag(name.to_owned())).map_err(|failure| wrong(name, &failure))?;
        }
        let max_new_tokens = options.max_tokens.map_or(self.max_new_tokens, |most| most.min(self.max_new_tokens));
        let mut all = GenerateOptions {
            max_new_tokens,
            activations: self.activations,
            sequences: options.n,
            logprobs: options.logprobs,
            ..Generation::from_values(&values).options()
        };
        if let Search::Sample(sampling) = &mut all.search {
            sampling.seed = options.seed.unwrap_or_else(|| sampling.seed.wrapping_add(number));
        } else if let Search::Beams(beams) = &mut all.search
            && let Some(sampling) = &mut beams.sampling
        {
            sampling.seed = options.seed.unwrap_or_else(|| sampling.seed.wrapping_add(number));
        }
        if all.logprobs.is_some() && matches!(all.search, Search::Beams(_)) {
            return Err(ApiError::parameter("logprobs", "not supported beside a beam search"));
        }
        all.check(self.vocab_size).map_err(|error| ApiError::new(400, "invalid_value", error.to_string()))?;
        Ok(all)
    }
}

/// The text of a prompt; that of a query and a document in a template, whose first column is the query.
///
/// # Errors
/// A chat without a message to answer.
pub fn text(prompt: &Prompt, of_pair: Option<&Template>) -> Result<String, ApiError> {
    match prompt {
        Prompt::Text(text) => Ok(text.clone()),
        Prompt::Tokens(_) => Ok(String::new()),
        Prompt::Pair(query, document) => {
            let template = of_pair.ok_or_else(|| ApiError::internal("a ranking without a template"))?;
            let first = template.columns().next().unwrap_or_default();
            Ok(template.fill(|name| if name == first { query.as_ref() } else { document.as_str() }))
        }
        Prompt::Chat(messages) => {
            let turn = |message: &openai_server::Message| Turn::new(&message.role, &message.content);
            let turns: Vec<Turn> = messages.iter().map(turn).collect();
            row_files::chat_prompt(&turns).map_err(|error| ApiError::parameter("messages", error))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults() -> Defaults {
        let activations = candle_core::DType::F32;
        Defaults { values: Values::defaults(), max_new_tokens: 20, activations, vocab_size: 100 }
    }

    #[test]
    fn a_request_that_says_nothing_is_answered_as_the_model_s_settings_say() {
        let one = Options { n: 1, ..Options::default() };
        let all = defaults().with(&one, 3).unwrap();
        assert_eq!((all.search, all.max_new_tokens, all.sequences), (Search::Greedy, 20, 1));
        let long = defaults().with(&Options { max_tokens: Some(1000), ..one }, 3).unwrap();
        assert_eq!(long.max_new_tokens, 20);
    }

    #[test]
    fn draws_differ_between_requests_unless_a_seed_is_given() {
        let drawn = Options { n: 1, temperature: Some(0.5), ..Options::default() };
        let seed = |options: &Options, number| match defaults().with(options, number).unwrap().search {
            Search::Sample(sampling) => sampling.seed,
            other => panic!("{other:?}"),
        };
        assert_ne!(seed(&drawn, 1), seed(&drawn, 2));
        let seeded = Options { seed: Some(9), ..drawn };
        assert_eq!((seed(&seeded, 1), seed(&seeded, 2)), (9, 9));
    }

    #[test]
    fn settings_that_contradict_each_other_are_the_request_s_fault() {
        for options in [
            Options { n: 2, ..Options::default() },
            Options { n: 1, num_beams: Some(101), ..Options::default() },
            Options { n: 1, repetition_penalty: Some(0.0), ..Options::default() },
        ] {
            assert_eq!(defaults().with(&options, 0).unwrap_err().status, 400, "{options:?}");
        }
    }
}
