//! Converts a SentencePiece model (`spiece.model`) to a `tokenizer.json`.
//!
//! Many T5 models are published with this file alone. It is a protocol buffer. A tokenizer needs the pieces with their scores and
//! kinds, the kind of model, the id of unknown text, and how blanks and characters are normalized. A field that this program
//! cannot follow is an error, never left out. For T5's own settings the result equals the tokenizer that transformers'
//! `T5Tokenizer` (5.23) makes, so the ids are equal. For others (byte fallback, no blank before the text, blanks that count) the
//! ids are those of the SentencePiece library.
//!
//! Source of the field numbers: `sentencepiece_model.proto` of github.com/google/sentencepiece.

use std::collections::HashMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use prost::Message;
use serde_json::{Value, json};

use super::added_tokens::{self, Role};
use super::companion_files::CompanionFiles;
use super::normal_form;

/// The file name in published models.
pub const FILE: &str = "spiece.model";
/// Its name in models of other families.
pub const OTHER_FILE: &str = "tokenizer.model";

/// The number of T5's sentinels, unless `extra_ids` gives another. The file does not list them.
const SENTINELS: usize = 100;

/// The character for a space in pieces.
const SPACE: &str = "\u{2581}";

/// Kinds of models and of pieces, as the file numbers them.
const UNIGRAM: i32 = 1;
pub(super) const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// The roles of tokens in the order in which transformers checks them, with the names that every T5 has.
const ROLES: [Role; 7] = [
    ("bos_token", None),
    ("eos_token", Some("</s>")),
    ("unk_token", Some("<unk>")),
    ("sep_token", None),
    ("pad_token", Some("<pad>")),
    ("cls_token", None),
    ("mask_token", None),
];

/// Converts a `spiece.model` to the text of a `tokenizer.json`. The files beside it may give the number of sentinels and the
/// added tokens. Otherwise T5's 100 sentinels follow the pieces if the model's table is large enough for them. mT5's table is
/// not, and mT5 has no sentinels.
///
/// # Errors
/// The bytes are not a SentencePiece model, or not of the kind that T5 has.
pub(super) fn tokenizer_json(bytes: &[u8], companion_files: &CompanionFiles) -> Result<String, String> {
    let model = Model::decode(bytes).map_err(|error| format!("expected a SentencePiece model: {error}"))?;
    let Trainer { kind, unknown, byte_fallback, blanks_are_suffixes } = model.trainer.unwrap_or_default();
    if kind.is_some_and(|kind| kind != UNIGRAM) {
        return Err("expected a SentencePiece model of kind unigram, as T5 has, got one of another kind".to_owned());
    }
    let normalizer = model.normalizer.unwrap_or_default();
    let denormalizes = model.denormalizer.is_some_and(|normalizer| !normalizer.characters.is_empty());
    for (field, is_set) in [
        ("treat_whitespace_as_suffix", blanks_are_suffixes),
        ("escape_whitespaces = false", normalizer.escape_whitespaces == Some(false)),
        ("denormalizer_spec", denormalizes),
    ] {
        if is_set {
            return Err(format!("the SentencePiece model sets `{field}`, which cannot be followed here"));
        }
    }
    let pieces = model.pieces;
    let unknown = usize::try_from(unknown).ok().filter(|unknown| *unknown < pieces.len());
    let unknown =
        unknown.ok_or_else(|| format!("expected the id of a piece for unknown text, of {} pieces", pieces.len()))?;
    if let Some(Piece { text, score, .. }) = pieces.iter().find(|piece| !piece.score.is_finite()) {
        // The debug form quotes the piece.
        return Err(format!("the score of piece {text:?} is {score}, expected a finite number"));
    }
    // Sentinels come last, in falling order.
    let sentinels: Vec<String> =
        (0..sentinels(companion_files, pieces.len())?).rev().map(|number| format!("<extra_id_{number}>")).collect();
    // Control tokens are found by name. User-defined pieces are found among the others, with a score above theirs: so the blank before
    // them is a piece of its own, as in SentencePiece. But a blank within a piece would cut it.
    let is_named = |piece: &&Piece| {
        piece.kind == CONTROL || (piece.kind == USER_DEFINED && piece.text.contains(char::is_whitespace))
    };
    let named = pieces.iter().filter(is_named).map(|piece| named(&piece.text, piece.kind == CONTROL));
    let implied = named.chain(sentinels.iter().map(|name| name.as_str().into()));
    let further = companion_files.further().unwrap_or_else(|| implied.collect());
    let ids: HashMap<&str, u64> =
        pieces.iter().map(|piece| piece.text.as_str()).chain(sentinels.iter().map(String::as_str)).zip(0..).collect();
    let tokens = added_tokens::in_order(companion_files, &ROLES, &further)?;
    let added = added_tokens::with_ids(tokens, (pieces.len() + sentinels.len()) as u64, |name| ids.get(name).copied());
    let end = pieces.iter().position(|piece| piece.text == "</s>");
    let characters = Some(&normalizer.characters).filter(|table| !table.is_empty());
    let composes = characters.is_some_and(|table| normal_form::replaces(table, "e\u{301}", "\u{e9}"));
    let table =
        characters.map(|table| json!({"type": "Precompiled", "precompiled_charsmap": BASE64_STANDARD.encode(table)}));
    let begins_with_blank = normalizer.add_dummy_prefix.unwrap_or(true);
    let merges_blanks = normalizer.remove_extra_whitespaces.unwrap_or(true);
    // A piece with a blank inside covers several words.
    let spans_words = pieces.iter().any(|piece| piece.text.chars().skip(1).any(|character| SPACE.contains(character)));
    let metaspace = json!({
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": if begins_with_blank { "always" } else { "never" },
        "split": !spans_words,
    });
    // T5's table turns every blank into a space. Without that, SentencePiece knows spaces alone.
    let knows_blanks = characters.is_some_and(|table| normal_form::replaces(table, "\n", " "));
    let is_usual = begins_with_blank && merges_blanks && knows_blanks && !spans_words;
    let blanks = (merges_blanks && !is_usual).then(|| {
        [("^ +| +$", ""), (" {2,}", " ")]
            .map(|(pattern, content)| json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": content}))
    });
    let composition = composes.then(|| json!({"type": "NFC"}));
    let normalizers: Vec<Value> = composition.into_iter().chain(table).chain(blanks.into_iter().flatten()).collect();
    let pre_tokenizer = if is_usual {
        json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]})
    } else {
        metaspace.clone()
    };
    let decoder = if byte_fallback {
        json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]})
    } else {
        metaspace
    };
    let pieces = pieces.into_iter().map(|piece| (piece.text, f64::from(piece.score)));
    let vocabulary: Vec<(String, f64)> = pieces.chain(sentinels.into_iter().map(|name| (name, 0.0))).collect();
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": match normalizers.as_slice() {
            [] => Value::Null,
            [one] => one.clone(),
            several => json!({"type": "Sequence", "normalizers": several}),
        },
        "pre_tokenizer": pre_tokenizer,
        "post_processor": end.map(ends_with),
        "decoder": decoder,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": byte_fallback},
    });
    Ok(json.to_string())
}

/// The kinds of a file's pieces.
pub(super) fn kinds(bytes: &[u8]) -> Result<Vec<i32>, String> {
    // A piece without a kind is a normal one.
    Ok(pieces(bytes)?.into_iter().map(|piece| if piece.kind == 0 { NORMAL } else { piece.kind }).collect())
}

/// The texts of a file's pieces.
pub(super) fn texts(bytes: &[u8]) -> Result<Vec<String>, String> {
    Ok(pieces(bytes)?.into_iter().map(|piece| piece.text).collect())
}

fn pieces(bytes: &[u8]) -> Result<Vec<Piece>, String> {
    Model::decode(bytes).map(|model| model.pieces).map_err(|error| format!("expected a SentencePiece model: {error}"))
}

/// The number of sentinels in `tokenizer_config.json`, or else the number that fits into the table after the pieces.
fn sentinels(companion_files: &CompanionFiles, pieces: usize) -> Result<usize, String> {
    let Some(said) = companion_files.setting("extra_ids") else {
        let has_room = companion_files.rows.is_none_or(|rows| rows >= (pieces + SENTINELS) as u64);
        return Ok(if has_room { SENTINELS } else { 0 });
    };
    let number = said.as_u64().filter(|number| *number <= 1 << 16).and_then(|number| usize::try_from(number).ok());
    number.ok_or_else(|| format!("tokenizer_config.json: `extra_ids`: expected a number up to 65536, got {said}"))
}

fn named(content: &str, special: bool) -> Value {
    json!({"content": content, "normalized": false, "special": special})
}

/// The template that ends every text with the token of this id.
fn ends_with(id: usize) -> Value {
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let end = json!({"SpecialToken": {"id": "</s>", "type_id": 0}});
    json!({
        "type": "TemplateProcessing",
        "single": [text("A"), end],
        "pair": [text("A"), end, text("B"), end],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [id], "tokens": ["</s>"]}},
    })
}

/// The fields of a model that a tokenizer needs. prost skips the others.
#[derive(Clone, PartialEq, Message)]
struct Model {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<Trainer>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<Normalizer>,
    #[prost(message, optional, tag = "5")]
    denormalizer: Option<Normalizer>,
}

#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(string, tag = "1")]
    text: String,
    /// Logarithm of the piece's probability.
    #[prost(float, tag = "2")]
    score: f32,
    #[prost(int32, tag = "3")]
    kind: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Trainer {
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
    /// Whether a blank belongs to the word before it.
    #[prost(bool, tag = "24")]
    blanks_are_suffixes: bool,
    /// Whether an unknown character is written in bytes, of which each has a piece.
    #[prost(bool, tag = "35")]
    byte_fallback: bool,
    #[prost(int32, tag = "40")]
    unknown: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Normalizer {
    /// The compiled table that normalizes characters; empty if there is none.
    #[prost(bytes = "vec", tag = "2")]
    characters: Vec<u8>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    escape_whitespaces: Option<bool>,
}
