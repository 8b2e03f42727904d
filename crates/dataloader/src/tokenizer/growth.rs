//! Bounds the growth of text before it is cut into tokens, from the tokenizer's file and before any of it runs.
//!
//! A normalizer may replace a short text by a long one, and a sequence of normalizers multiplies the growth. Four that turn `1`
//! into a thousand of them take more memory for one digit than any machine has. So the growth of each step is bounded from the
//! file, and a tokenizer that exceeds [`MAX_GROWTH`] is refused. A tokenizer with a piece that is too long for the stack is
//! refused, too.

use std::fmt;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// The most bytes that one byte of text may become. Tokenizers in use stay below a hundred.
pub(super) const MAX_GROWTH: u64 = 4096;

/// The most bytes of a piece of a Unigram model. The tokenizers crate keeps pieces in a tree as deep as the longest piece. It
/// copies and drops the tree by recursion, which takes some 400 bytes of stack for each byte. SentencePiece writes at most 16
/// characters by default.
const MAX_PIECE_BYTES: usize = 1024;

/// The parts of a `tokenizer.json` that are read twice: here and by the tokenizers crate.
#[derive(Deserialize)]
pub(super) struct Head {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    model: Model,
}

#[derive(Default, Deserialize)]
struct Model {
    #[serde(default)]
    unk_id: Option<u64>,
    #[serde(default)]
    vocab: Pieces,
}

/// The pieces of a Unigram model, given as a list, or the vocabulary of any other model, a map from names to ids.
#[derive(Default)]
pub(super) struct Pieces {
    /// Bytes of the longest piece.
    pub longest_bytes: usize,
    /// The largest id plus one.
    pub rows: usize,
    is_list: bool,
}

impl<'de> Deserialize<'de> for Pieces {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Counted)
    }
}

struct Counted;

impl<'de> Visitor<'de> for Counted {
    type Value = Pieces;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut pieces: A) -> Result<Pieces, A::Error> {
        let mut all = Pieces { is_list: true, ..Pieces::default() };
        while let Some((piece, _)) = pieces.next_element::<(String, IgnoredAny)>()? {
            all.longest_bytes = all.longest_bytes.max(piece.len());
            all.rows += 1;
        }
        Ok(all)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut tokens: A) -> Result<Pieces, A::Error> {
        let mut all = Pieces::default();
        while let Some((name, id)) = tokens.next_entry::<String, u32>()? {
            all.longest_bytes = all.longest_bytes.max(name.len());
            all.rows = all.rows.max(id as usize + 1);
        }
        Ok(all)
    }
}

impl Head {
    /// Reads these parts and skips the others.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }

    /// The unknown token's id in a Unigram model.
    pub fn unigram_unknown(&self) -> Option<u32> {
        self.model.unk_id.and_then(|id| id.try_into().ok())
    }

    /// The model's pieces.
    pub fn pieces(&self) -> &Pieces {
        &self.model.vocab
    }

    /// Refuses a Unigram model with a piece that is longer than [`MAX_PIECE_BYTES`].
    ///
    /// # Errors
    /// The length of the longest piece.
    pub fn check_pieces(&self) -> Result<(), String> {
        let Pieces { longest_bytes: longest, is_list, .. } = *self.pieces();
        if is_list && longest > MAX_PIECE_BYTES {
            return Err(format!("its longest token has {longest} bytes: expected at most {MAX_PIECE_BYTES}"));
        }
        Ok(())
    }

    /// The most bytes that one byte of text becomes before it is cut into tokens.
    ///
    /// # Errors
    /// The part that makes text grow beyond [`MAX_GROWTH`].
    pub fn growth(&self) -> Result<u64, String> {
        let encoding = growth(&self.pre_tokenizer, growth(&self.normalizer, 1));
        let decoding = growth(&self.decoder, 1);
        for (part, bytes) in [("normalizer", encoding), ("decoder", decoding)] {
            if bytes > MAX_GROWTH {
                return Err(format!(
                    "its {part} can turn one byte of text into {bytes} bytes: expected at most {MAX_GROWTH}"
                ));
            }
        }
        Ok(encoding)
    }
}

/// The most bytes that `before` bytes become in this part.
fn growth(part: &Value, before: u64) -> u64 {
    let length = |key: &str| part[key].as_str().map_or(0, |text| text.len() as u64);
    for key in ["normalizers", "pretokenizers", "decoders"] {
        if let Some(parts) = part[key].as_array() {
            let (before, parts) = after_replacements(before, parts);
            // Composing makes at most as many characters as there were bytes, and a table replaces each character once. So a composition
            // before a table adds nothing to the table's bound.
            let parts = match parts {
                [first, rest @ ..]
                    if first["type"] == "NFC" && rest.first().is_some_and(|one| one["type"] == "Precompiled") =>
                {
                    rest
                }
                all => all,
            };
            return parts.iter().fold(before, |bytes, part| growth(part, bytes));
        }
    }
    match part["type"].as_str() {
        // The limit for a single character, see Unicode's `MaxNormalizationExpansion`: 18 code points of U+FDFA, 33
        // bytes for 3.
        Some("NFKC" | "NFKD") => before.saturating_mul(11),
        Some("NFC" | "NFD" | "BertNormalizer" | "Bert" | "Nmt") => before.saturating_mul(3),
        Some("Lowercase" | "ByteLevel") => before.saturating_mul(2).saturating_add(1),
        Some("Precompiled") => before.saturating_mul(longest_replacement(part["precompiled_charsmap"].as_str())),
        // The text is put before every piece between two added tokens, so at most before every byte.
        Some("Prepend") => before.saturating_add(length("prepend")),
        Some("Metaspace") => before.saturating_mul(4),
        Some("Replace") => before.saturating_mul(replacement(&part["pattern"], length("content"))),
        // Files of old versions give no type.
        None if part["pattern"].is_object() => before.saturating_mul(replacement(&part["pattern"], length("content"))),
        None if part["prepend"].is_string() => before.saturating_add(length("prepend")),
        _ => before,
    }
}

/// The most bytes after the replacements that come first, and the parts behind them. Where no text that is put in has a part that a
/// later one takes out, each byte is replaced once.
fn after_replacements(before: u64, parts: &[Value]) -> (u64, &[Value]) {
    let text =
        |part: &Value| Some((part["pattern"]["String"].as_str()?.to_owned(), part["content"].as_str()?.to_owned()));
    let replaced: Vec<(String, String)> =
        parts.iter().take_while(|part| part["type"] == "Replace").map_while(text).collect();
    let is_put_in = |pattern: &String| replaced.iter().any(|(_, content)| content.chars().any(|c| pattern.contains(c)));
    if replaced.iter().any(|(pattern, _)| pattern.is_empty() || is_put_in(pattern)) {
        return (before, parts);
    }
    let most = parts[..replaced.len()].iter().map(|part| growth(part, 1)).max().unwrap_or(1);
    (before.saturating_mul(most), &parts[replaced.len()..])
}

/// Bytes that one byte becomes if matches of `pattern` are replaced by `content` bytes.
fn replacement(pattern: &Value, content: u64) -> u64 {
    match pattern["String"].as_str() {
        Some("") => 1 + content,
        Some(pattern) => content.div_ceil(pattern.len() as u64).max(1),
        // An expression may match the empty text between two characters, and then no bytes are removed.
        None if content > 0 && may_be_empty(pattern["Regex"].as_str().unwrap_or_default()) => 1 + content,
        None => content.max(1),
    }
}

/// Whether a match may be empty. Only an expression of plain characters, classes and `+` certainly has no empty match.
fn may_be_empty(pattern: &str) -> bool {
    pattern.is_empty()
        || pattern.contains(['*', '?', '|', '^', '$', '('])
        || pattern.contains("{0")
        || pattern.contains("{,")
        || pattern.contains("\\b")
        || pattern.contains("\\B")
}

/// The longest replacement in a precompiled map. The map holds the length of its index, the index, and then the
/// replacements, each ended by a zero.
fn longest_replacement(map: Option<&str>) -> u64 {
    let bytes = from_base64(map.unwrap_or_default());
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return 1 };
    let texts = rest.get(u32::from_le_bytes(*length) as usize..).unwrap_or_default();
    texts.split(|&byte| byte == 0).map(|text| text.len() as u64).max().unwrap_or(0).max(1)
}

/// Decodes base64; other characters are skipped.
fn from_base64(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for letter in text.bytes() {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => continue,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn check(normalizer: Value, expected: u64) {
        assert_eq!(growth(&normalizer, 1), expected, "{normalizer}");
    }

    #[test]
    fn the_growth_of_each_step_is_bounded_and_steps_multiply() {
        let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
        check(Value::Null, 1);
        check(json!({"type": "NFKC"}), 11);
        check(json!({"type": "Prepend", "prepend": "▁"}), 4);
        check(replace(" ", "▁"), 3);
        check(replace("``", "\""), 1);
        check(replace("", "ab"), 3);
        check(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}), 3);
        check(json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "▁"}), 4);
        let llama =
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]});
        check(llama, 12);
        let bomb = replace("1", &"1".repeat(1000));
        check(json!({"type": "Sequence", "normalizers": [bomb, bomb, bomb, bomb]}), 1_000_000_000_000);
        let stand_ins = [replace("\n", "\u{e000}"), replace("\t", "\u{e001}"), replace("ab", "\u{e002}")];
        check(json!({"type": "Sequence", "normalizers": stand_ins}), 3);
        check(json!({"type": "Sequence", "normalizers": [replace("a", "bb"), replace("b", "cc")]}), 4);
    }

    #[test]
    fn a_precompiled_map_grows_text_by_its_longest_entry() {
        // An index of four bytes, then "ab", "cdefg" and "h".
        let map = "BAAAAAAAAABhYgBjZGVmZwBoAA==";
        check(json!({"type": "Precompiled", "precompiled_charsmap": map}), 5);
        check(json!({"type": "Precompiled", "precompiled_charsmap": ""}), 1);
        check(json!({"type": "Precompiled"}), 1);
    }
}
