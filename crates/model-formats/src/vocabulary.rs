//! The tokens of a tokenizer for other programs: names, scores and kinds by their ids, and the way of cutting text.

use std::collections::{BTreeMap, HashMap};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;

/// The role of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A piece of text.
    Text,
    /// The token for text that has no other token.
    Unknown,
    /// A token found by its name, and not shown.
    Control,
    /// A token found by its name, and shown.
    Named,
}

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The token's text or name.
    pub text: String,
    /// The logarithm of its probability; 0 if the tokenizer has none.
    pub score: f32,
    /// The token's role.
    pub role: Role,
}

/// The tokens of a tokenizer by their ids.
#[derive(Clone, Debug, PartialEq)]
pub struct Vocabulary {
    /// The tokens. Ids may have gaps.
    pub tokens: BTreeMap<u32, Token>,
    /// The ids before every text.
    pub starts: Vec<u32>,
    /// The id after every text.
    pub end: u32,
    /// The token for text that has no other token.
    pub unknown: Option<u32>,
    pub(crate) pieces: Pieces,
}

/// The way in which a text is cut into tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Pieces {
    /// SentencePiece's unigrams, with `▁` for spaces and one `▁` before the text.
    Unigram(Unigram),
    /// Byte pairs, merged inside the words that GPT-2's expression finds.
    BytePairs {
        /// Both tokens of each merge, with a space between them.
        merges: Vec<String>,
    },
    /// Another kind: its name, and the supported kinds.
    Other(String),
}

/// The preparation of text for unigrams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unigram {
    /// The compiled table that normalizes characters.
    pub(crate) characters: Option<Vec<u8>>,
    /// Whether consecutive spaces count as one.
    pub(crate) merges_spaces: bool,
    /// Whether tabs and line feeds are spaces, too.
    pub(crate) cuts_at_white_space: bool,
}

impl Vocabulary {
    /// Parses the text of a `tokenizer.json`. `starts` and `end` go around every text.
    ///
    /// # Errors
    /// The part of the text that is not valid in a tokenizer.
    pub fn of_json(text: &str, starts: &[u32], end: u32) -> Result<Vocabulary, String> {
        let file: File = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let pieces = file.pieces();
        let File { added_tokens, model, .. } = file;
        let mut tokens = BTreeMap::new();
        let text = |text: String, score: f64| Token { text, score: score as f32, role: Role::Text };
        match model.vocab {
            Entries::Scored(entries) => {
                tokens.extend((0..).zip(entries).map(|(id, (name, score))| (id, text(name, score))))
            }
            Entries::Numbered(entries) => tokens.extend(entries.into_iter().map(|(name, id)| (id, text(name, 0.0)))),
        }
        for Added { id, content, special } in added_tokens {
            let score = tokens.get(&id).map_or(0.0, |token| token.score);
            tokens.insert(id, Token { text: content, score, role: if special { Role::Control } else { Role::Named } });
        }
        let by_name = |name: &str| tokens.iter().find(|(_, token)| token.text == name).map(|(id, _)| *id);
        let unknown =
            model.unk_id.or_else(|| model.unk_token.as_deref().and_then(by_name)).or_else(|| by_name("<unk>"));
        if let Some(token) = unknown.and_then(|id| tokens.get_mut(&id)) {
            token.role = Role::Unknown;
        }
        Ok(Vocabulary { tokens, starts: starts.to_vec(), end, unknown, pieces })
    }

    /// ByT5's vocabulary: three named tokens, the 256 bytes as the characters with these numbers, and the sentinels.
    pub fn of_bytes(sentinels: &[u32]) -> Vocabulary {
        let token = |text: String, role: Role| Token { text, score: 0.0, role };
        let named = [("<pad>", Role::Control), ("</s>", Role::Control), ("<unk>", Role::Unknown)];
        let named = named.map(|(name, role)| token(name.into(), role));
        let bytes = (0..=u8::MAX).map(|byte| token(char::from(byte).into(), Role::Text));
        let mut tokens: BTreeMap<u32, Token> = (0..).zip(named.into_iter().chain(bytes)).collect();
        let sentinel = |(number, id): (usize, &u32)| (*id, token(format!("<extra_id_{number}>"), Role::Control));
        tokens.extend(sentinels.iter().enumerate().map(sentinel));
        let pieces = Pieces::Other("the bytes of ByT5".into());
        Vocabulary { tokens, starts: Vec::new(), end: 1, unknown: Some(2), pieces }
    }

    /// Describes the texts that llama.cpp cuts differently, if there are any.
    pub fn differences(&self) -> Option<&'static str> {
        match &self.pieces {
            Pieces::Unigram(Unigram { characters: None, cuts_at_white_space: true, .. }) => {
                Some("keeps tabs and line feeds, which this tokenizer takes as spaces")
            }
            _ => None,
        }
    }

    /// One token for each row of a model's table. Rows without a token get names that occur in no text.
    pub(crate) fn rows(&self, rows: usize) -> impl Iterator<Item = Result<&Token, String>> {
        (0..rows).map(|id| {
            let token = u32::try_from(id).ok().and_then(|id| self.tokens.get(&id));
            token.ok_or_else(|| format!("[PAD{id}]"))
        })
    }

    /// The first id for which a model with `rows` rows has no row.
    pub(crate) fn beyond(&self, rows: usize) -> Option<u32> {
        self.tokens.keys().copied().find(|&id| id as usize >= rows)
    }
}

/// The parts of a `tokenizer.json` that are exported.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    vocab: Entries,
    #[serde(default)]
    unk_id: Option<u32>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Entries {
    Scored(Vec<(String, f64)>),
    Numbered(HashMap<String, u32>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Text(String),
    Pair([String; 2]),
}

impl File {
    fn pieces(&self) -> Pieces {
        let known = match (&self.model.vocab, self.model.kind.as_deref()) {
            (Entries::Scored(_), None | Some("Unigram")) => self.unigram().map(Pieces::Unigram),
            (Entries::Numbered(_), None | Some("BPE")) => self.byte_pairs(),
            (_, kind) => Err(format!("of type {}", kind.unwrap_or("unknown"))),
        };
        known.unwrap_or_else(Pieces::Other)
    }

    fn unigram(&self) -> Result<Unigram, String> {
        if self.model.byte_fallback {
            return Err("a unigram model with tokens for bytes (`byte_fallback`)".into());
        }
        let mut unigram = Unigram { characters: None, merges_spaces: false, cuts_at_white_space: false };
        for step in steps(&self.normalizer, "normalizers") {
            match step["type"].as_str() {
                Some("Precompiled") => {
                    let text = step["precompiled_charsmap"].as_str().unwrap_or_default();
                    let table = BASE64_STANDARD
                        .decode(text)
                        .map_err(|error| format!("a broken table of characters ({error})"))?;
                    unigram.characters = Some(table).filter(|table| !table.is_empty());
                }
                // The table composes, as SentencePiece's does in llama.cpp. The tokenizers library needs it done before.
                Some("NFC") => {}
                // Blanks at the end give no tokens if spaces are merged.
                Some("Strip") => {}
                Some("Replace") if step["pattern"]["Regex"] == " {2,}" => unigram.merges_spaces = true,
                kind => return Err(format!("one with a normalizer of type {}", kind.unwrap_or("unknown"))),
            }
        }
        let mut has_prefix = false;
        for step in steps(&self.pre_tokenizer, "pretokenizers") {
            match step["type"].as_str() {
                Some("WhitespaceSplit") => {
                    (unigram.merges_spaces, unigram.cuts_at_white_space) = (true, true);
                }
                Some("Metaspace") => {
                    let scheme = step["prepend_scheme"].as_str();
                    has_prefix = step["replacement"] == "\u{2581}"
                        && scheme.map_or(step["add_prefix_space"] != false, |scheme| scheme != "never");
                }
                kind => return Err(format!("one with a pre-tokenizer of type {}", kind.unwrap_or("unknown"))),
            }
        }
        if has_prefix { Ok(unigram) } else { Err("a unigram model whose words do not begin with `▁`".into()) }
    }

    fn byte_pairs(&self) -> Result<Pieces, String> {
        let model = &self.model;
        let is_empty = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
        if !is_empty(&model.continuing_subword_prefix) || !is_empty(&model.end_of_word_suffix) {
            return Err("byte pairs with marks inside of words".into());
        }
        if model.byte_fallback || model.ignore_merges || !self.normalizer.is_null() {
            return Err("byte pairs with a normalizer, `byte_fallback` or `ignore_merges`".into());
        }
        let steps = steps(&self.pre_tokenizer, "pretokenizers");
        let [step] = steps[..] else {
            return Err("byte pairs inside words of its own expression".into());
        };
        if step["type"] != "ByteLevel" || step["use_regex"] == false {
            return Err("byte pairs inside words of its own expression".into());
        }
        if step["add_prefix_space"] == true {
            return Err("byte pairs with a space before the text (`add_prefix_space`)".into());
        }
        let merge = |merge: &Merge| match merge {
            Merge::Text(text) => text.clone(),
            Merge::Pair([first, second]) => format!("{first} {second}"),
        };
        Ok(Pieces::BytePairs { merges: model.merges.iter().map(merge).collect() })
    }
}

/// A part as a list: the members of a sequence, or the part alone.
fn steps<'a>(part: &'a Value, sequence: &str) -> Vec<&'a Value> {
    match part[sequence].as_array() {
        Some(parts) => parts.iter().flat_map(|part| steps(part, sequence)).collect(),
        None if part.is_null() => Vec::new(),
        None => vec![part],
    }
}
