//! The ids of tokens that a model's files name, and the same configuration for a vocabulary with other ids.

use serde_json::{Map, Value};

use super::{Config, GENERATION_CONFIG};
use crate::error::{Error, Result};

/// Keys of answers whose values are ids, beside those that end with `token_id` or, for images, `token_index`.
const OF_IDS: [&str; 4] = ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"];

impl Config {
    /// The ids that `config.json` and `generation_config.json` name.
    pub fn named_ids(&self) -> Vec<u32> {
        let mut ids = vec![self.pad_token_id, self.decoder_start_token_id, self.answer_start()];
        ids.extend(self.eos_token_ids.iter().chain(self.answer_ends()));
        let mut rest = self.rest.clone();
        for object in [Some(&mut rest.raw), rest.generation.as_mut()].into_iter().flatten() {
            each_id(object, &mut |_, value| ids.extend(id_of(value)));
        }
        ids
    }

    /// This configuration for a table of other rows: `rows[new]` is the row before, `None` a new one.
    ///
    /// # Errors
    /// [`Error::Config`] for an id that has no row any more.
    pub fn with_rows(&self, rows: &[Option<u32>]) -> Result<Config> {
        let new_ids: std::collections::HashMap<u32, u32> =
            rows.iter().zip(0..).filter_map(|(old, new)| Some(((*old)?, new))).collect();
        let mut rest = self.rest.clone();
        // Ids that the file leaves out have defaults, which are ids as well.
        match &self.gemma {
            Some(gemma) => {
                self.name_ids(gemma, &mut rest.raw);
                super::gemma::put_vocab_size(&mut rest.raw, rows.len());
            }
            None => {
                let defaults = [
                    ("pad_token_id", self.pad_token_id.into()),
                    ("eos_token_id", super::eos_value(&self.eos_token_ids)),
                    ("decoder_start_token_id", self.decoder_start_token_id.into()),
                ];
                for (key, value) in defaults {
                    if rest.raw.get(key).is_none_or(Value::is_null) {
                        rest.raw.insert(key.into(), value);
                    }
                }
                rest.raw.insert("vocab_size".into(), rows.len().into());
            }
        }
        let renumber = |object: &mut Map<String, Value>, origin: &str| {
            let mut gone = None;
            each_id(object, &mut |key, value| {
                let Some(old) = id_of(value) else { return };
                match new_ids.get(&old) {
                    Some(new) => *value = (*new).into(),
                    None => gone = gone.take().or(Some((key.to_owned(), old))),
                }
            });
            gone.map_or(Ok(()), |(key, id)| {
                let (origin, got) = (origin.to_owned(), format!("{id}, which has no entry in the vocabulary"));
                Err(Error::Config { origin, key, got, expected: "the id of an entry that stays".into() })
            })
        };
        renumber(&mut rest.raw, &rest.origin)?;
        rest.generation.as_mut().map_or(Ok(()), |generation| renumber(generation, GENERATION_CONFIG))?;
        let read = Config::from_objects(rest.raw, rest.generation, rest.origin)?;
        let (tie_word_embeddings, scale_decoder_outputs) = (self.tie_word_embeddings, self.scale_decoder_outputs);
        let (stored, head) = (self.stored.clone(), self.head.clone());
        Ok(Config { tie_word_embeddings, scale_decoder_outputs, stored, head, ..read })
    }
}

fn id_of(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Hands each id in an object to `each`, with its key.
fn each_id(object: &mut Map<String, Value>, each: &mut dyn FnMut(&str, &mut Value)) {
    for (key, value) in object {
        let is_of_ids = ["token_id", "token_ids", "token_index"].iter().any(|end| key.ends_with(end));
        let is_of_ids = is_of_ids || OF_IDS.contains(&key.as_str());
        match value {
            // A vision tower's own settings are about no text.
            _ if key == "vision_config" => {}
            value if is_of_ids => each_number(key, value, each),
            // Pairs of a position and an id, and of some ids and their bias.
            Value::Array(pairs) if key == "forced_decoder_ids" => {
                pairs.iter_mut().filter_map(|pair| pair.get_mut(1)).for_each(|id| each_number(key, id, each));
            }
            Value::Array(pairs) if key == "sequence_bias" => {
                pairs.iter_mut().filter_map(|pair| pair.get_mut(0)).for_each(|ids| each_number(key, ids, each));
            }
            Value::Object(inner) => each_id(inner, each),
            _ => {}
        }
    }
}

fn each_number(key: &str, value: &mut Value, each: &mut dyn FnMut(&str, &mut Value)) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| each_number(key, value, each)),
        value => each(key, value),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_id_of_the_files_gets_its_new_number_and_one_that_goes_is_an_error() {
        let text = json!({"model_type": "t5", "vocab_size": 10, "decoder_start_token_id": 4, "bos_token_id": null,
            "task_specific_params": {"translation": {"forced_bos_token_id": 6, "max_length": 6}}, "n_positions": 6});
        let mut config = Config::from_json(&text.to_string(), "config.json").unwrap();
        let answers = json!({"eos_token_id": [1, 6], "suppress_tokens": [4], "bad_words_ids": [[4, 6]], "top_k": 6,
            "forced_decoder_ids": [[1, 6]], "sequence_bias": [[[4, 6], -6.0]]});
        config.rest.generation = answers.as_object().cloned();
        let mut named = config.named_ids();
        named.sort_unstable();
        named.dedup();
        assert_eq!(named, [0, 1, 4, 6]);
        // 2, 3 and 5 go, and two new rows come.
        let rows = [Some(0), Some(1), Some(4), Some(6), Some(9), None, None];
        let renumbered = config.with_rows(&rows).unwrap();
        assert_eq!((renumbered.vocab_size, renumbered.pad_token_id, renumbered.decoder_start_token_id), (7, 0, 2));
        assert_eq!(renumbered.eos_token_ids, [1]);
        let json = renumbered.to_json();
        assert_eq!(json["task_specific_params"]["translation"], json!({"forced_bos_token_id": 3, "max_length": 6}));
        assert_eq!(json["n_positions"], 6);
        let answers = renumbered.generation_json();
        assert_eq!((&answers["eos_token_id"], &answers["suppress_tokens"]), (&json!([1, 3]), &json!([2])));
        assert_eq!((&answers["bad_words_ids"], &answers["top_k"]), (&json!([[2, 3]]), &json!(6)));
        assert_eq!(answers["forced_decoder_ids"], json!([[1, 3]]));
        assert_eq!(answers["sequence_bias"], json!([[[2, 3], -6.0]]));
        let error = config.with_rows(&[Some(0), Some(1), Some(4)]).unwrap_err().to_string();
        assert!(error.contains("`forced_bos_token_id` is 6, which has no entry"), "{error}");
    }
}
