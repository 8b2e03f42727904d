//! A tokenizer in llama.cpp's form: `t5` for unigrams, or `gpt2` for byte pairs.

use super::FORMAT;
use super::header::Value;
use crate::error::Unsupported;
use crate::t5::T5;
use crate::vocabulary::{Pieces, Role, Token, Unigram, Vocabulary};

/// The score of rows without a token, as in llama.cpp's converter.
const UNUSED_SCORE: f32 = -10_000.0;

/// Kinds of tokens, as llama.cpp numbers them.
mod kind {
    pub(super) const NORMAL: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
    pub(super) const UNUSED: i32 = 5;
}

/// The keys of a tokenizer, one token for each row of the model's table.
pub(super) fn keys(model: &T5, vocabulary: &Vocabulary) -> Result<Vec<(String, Value)>, Unsupported> {
    let refused = |what: &str, expected: &str, got: String, hint: &str| {
        let (what, expected, hint) = (what.to_owned(), expected.to_owned(), hint.to_owned());
        Unsupported { format: FORMAT, what, expected, got, hint }
    };
    if let Some(id) = vocabulary.beyond(model.vocab_size) {
        let got = format!("{id} for `{}`", vocabulary.tokens[&id].text);
        let expected = format!("ids below {}, the rows of the model's table", model.vocab_size);
        return Err(refused("an id of the tokenizer", &expected, got, "give the model its own tokenizer"));
    }
    let (name, pre) = match &vocabulary.pieces {
        Pieces::Unigram(_) => ("t5", "default"),
        Pieces::BytePairs { .. } => ("gpt2", "gpt-2"),
        Pieces::Other(got) => {
            let expected = "unigrams (spiece.model), or byte pairs inside GPT-2's words";
            let hint =
                "CTranslate2 leaves the tokenizer to its caller: `--format ctranslate2`; so does `--gguf-names hf`";
            return Err(refused("the tokenizer", expected, got.clone(), hint));
        }
    };
    if vocabulary.starts.len() > 1 {
        let got = format!("{} of them", vocabulary.starts.len());
        return Err(refused("the tokens before a text", "one at most", got, "export with `--format ctranslate2`"));
    }
    let (mut texts, mut scores, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
    for row in vocabulary.rows(model.vocab_size) {
        let (text, score, kind) = match row {
            Ok(Token { text, score, role }) => (text.clone(), *score, kind_of(*role)),
            Err(name) => (name, UNUSED_SCORE, kind::UNUSED),
        };
        texts.push(text);
        scores.push(score);
        kinds.push(kind);
    }
    let mut keys = Keys(Vec::new());
    keys.add("model", Value::Text(name.into()));
    keys.add("pre", Value::Text(pre.into()));
    keys.add("tokens", Value::Texts(texts));
    match &vocabulary.pieces {
        Pieces::Unigram(Unigram { characters, merges_spaces, .. }) => {
            keys.add("scores", Value::F32s(scores));
            keys.add("token_type", Value::I32s(kinds));
            keys.add("add_space_prefix", Value::Bool(true));
            keys.add("remove_extra_whitespaces", Value::Bool(*merges_spaces));
            if let Some(characters) = characters {
                keys.add("precompiled_charsmap", Value::Bytes(characters.clone()));
            }
        }
        Pieces::BytePairs { merges } => {
            keys.add("token_type", Value::I32s(kinds));
            keys.add("merges", Value::Texts(merges.clone()));
        }
        Pieces::Other(_) => unreachable!("refused before"),
    }
    if let Some(start) = vocabulary.starts.first() {
        keys.add("bos_token_id", Value::U32(*start));
    }
    keys.add("eos_token_id", Value::U32(vocabulary.end));
    // llama.cpp ends an answer at any of these tokens.
    let others = model.ends.iter().filter(|end| **end != vocabulary.end);
    for (name, end) in ["eot_token_id", "eom_token_id"].into_iter().zip(others) {
        keys.add(name, Value::U32(*end));
    }
    if let Some(unknown) = vocabulary.unknown {
        keys.add("unknown_token_id", Value::U32(unknown));
    }
    keys.add("padding_token_id", Value::U32(model.pad));
    keys.add("add_bos_token", Value::Bool(!vocabulary.starts.is_empty()));
    keys.add("add_eos_token", Value::Bool(true));
    Ok(keys.0)
}

/// Keys with the prefix `tokenizer.ggml.`.
struct Keys(Vec<(String, Value)>);

impl Keys {
    fn add(&mut self, name: &str, value: Value) {
        self.0.push((format!("tokenizer.ggml.{name}"), value));
    }
}

fn kind_of(role: Role) -> i32 {
    match role {
        Role::Text => kind::NORMAL,
        Role::Unknown => kind::UNKNOWN,
        Role::Control => kind::CONTROL,
        Role::Named => kind::USER_DEFINED,
    }
}
