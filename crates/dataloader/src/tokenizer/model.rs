//! [`TokenModel`]: a model of the tokenizers crate, set as this program needs it while it is read.
//!
//! The crate's own wrapper first reads all of a model as JSON values, and a model that is in a tokenizer can be changed only in a copy. For
//! a large vocabulary each of them takes as much memory as the model. Here the pieces go from the file into the model.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Error, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use tokenizers::models::TrainerWrapper;
use tokenizers::{
    DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Result, Token,
    TokenizerImpl,
};

use super::traits::MAX_WORD_PIECE_CHARS;

/// A tokenizer of the library with this model.
pub(super) type Library =
    TokenizerImpl<TokenModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A model without the library's word cache, which gives the same ids for the same text.
pub(super) struct TokenModel(pub ModelWrapper);

impl TokenModel {
    fn new(mut model: ModelWrapper) -> Self {
        match &mut model {
            ModelWrapper::BPE(bpe) => {
                bpe.resize_cache(0);
                bpe.dropout = None;
            }
            ModelWrapper::Unigram(unigram) => {
                unigram.resize_cache(0);
                (unigram.alpha, unigram.nbest_size) = (None, None);
            }
            ModelWrapper::WordPiece(words) => {
                words.max_input_chars_per_word = words.max_input_chars_per_word.min(MAX_WORD_PIECE_CHARS);
            }
            ModelWrapper::WordLevel(_) => {}
        }
        Self(model)
    }
}

impl<'de> Deserialize<'de> for TokenModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(Fields).map(Self::new)
    }
}

struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = ModelWrapper;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> std::result::Result<ModelWrapper, A::Error> {
        // The type decides how the pieces are read, and files have it before them.
        let mut early = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let value: Value = fields.next_value()?;
            let Some(kind) = value.as_str().filter(|_| name == "type") else {
                early.insert(name, value);
                continue;
            };
            let all = MapAccessDeserializer::new(Fieldwise { early: early.into_iter(), value: None, rest: fields });
            return match kind {
                "BPE" => Deserialize::deserialize(all).map(ModelWrapper::BPE),
                "WordPiece" => Deserialize::deserialize(all).map(ModelWrapper::WordPiece),
                "WordLevel" => Deserialize::deserialize(all).map(ModelWrapper::WordLevel),
                "Unigram" => Deserialize::deserialize(all).map(ModelWrapper::Unigram),
                other => Err(A::Error::custom(format!(
                    "unknown model `{other}`, expected BPE, WordPiece, WordLevel or Unigram"
                ))),
            };
        }
        // Files of old versions give no type.
        serde_json::from_value(Value::Object(early)).map_err(A::Error::custom)
    }
}

/// The fields that were read already, and the rest.
struct Fieldwise<A> {
    early: serde_json::map::IntoIter,
    value: Option<Value>,
    rest: A,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Fieldwise<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> std::result::Result<Option<K::Value>, A::Error> {
        let Some((name, value)) = self.early.next() else { return self.rest.next_key_seed(seed) };
        self.value = Some(value);
        seed.deserialize(name.into_deserializer()).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> std::result::Result<V::Value, A::Error> {
        match self.value.take() {
            Some(value) => seed.deserialize(value).map_err(A::Error::custom),
            None => self.rest.next_value_seed(seed),
        }
    }
}

impl Model for TokenModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        self.0.tokenize(text)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        self.0.save(folder, prefix)
    }

    fn get_trainer(&self) -> TrainerWrapper {
        self.0.get_trainer()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A model that is read from a file with its fields in this order.
    #[track_caller]
    fn check(fields: Value) {
        let text = fields.to_string();
        let TokenModel(read) = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let theirs: ModelWrapper = serde_json::from_str(&text).unwrap();
        assert_eq!(read.get_vocab(), theirs.get_vocab(), "{text}");
        for word in ["ab", "ba", "abab", "c"] {
            assert_eq!(read.tokenize(word).ok(), theirs.tokenize(word).ok(), "{text}");
        }
    }

    #[test]
    fn a_model_is_that_of_the_library_in_whatever_order_its_fields_are() {
        let pieces = json!([["<unk>", 0.0], ["a", -1.0], ["b", -1.5], ["ab", -1.2]]);
        let entries = json!({"<unk>": 0, "a": 1, "b": 2, "ab": 3});
        check(json!({"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false}));
        check(json!({"byte_fallback": false, "unk_id": 0, "type": "Unigram", "vocab": pieces}));
        check(json!({"vocab": pieces, "unk_id": 0, "type": "Unigram"}));
        check(json!({"type": "BPE", "unk_token": "<unk>", "vocab": entries, "merges": [["a", "b"]]}));
        check(json!({"merges": ["a b"], "vocab": entries, "type": "BPE", "unk_token": "<unk>", "dropout": null}));
        check(json!({"type": "WordLevel", "vocab": entries, "unk_token": "<unk>"}));
        check(json!({"type": "WordPiece", "vocab": entries, "unk_token": "<unk>", "max_input_chars_per_word": 100,
            "continuing_subword_prefix": "##"}));
        check(json!({"unk_token": "<unk>", "vocab": entries, "merges": ["a b"]}));
    }

    #[test]
    fn what_is_no_model_is_an_error_with_its_reason() {
        for (text, expected) in [
            ("null", "expected a model"),
            (r#"{"type": "Trigram", "vocab": []}"#, "unknown model `Trigram`"),
            (r#"{"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}"#, "UnkIdNotInVocabulary"),
            (r#"{"type": "BPE", "vocab": {"a": 0}}"#, "Missing vocab/merges"),
        ] {
            let error = serde_json::from_str::<TokenModel>(text).err().map(|error| error.to_string());
            assert!(error.as_ref().is_some_and(|error| error.contains(expected)), "{text}: {error:?}");
        }
    }
}
