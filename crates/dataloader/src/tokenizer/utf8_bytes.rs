//! ByT5's tokenizer: three named tokens, then the bytes of UTF-8, then the sentinels.
//!
//! It has no file of its own. The files beside it give the number of sentinels, and whether the three named tokens strip
//! adjacent blanks. Ids equal those of transformers' `ByT5Tokenizer` (5.23).
//!
//! Invariants: a text is read one segment at a time, and no more ids are held than were asked for.

use serde_json::{Map, Value, json};

use super::companion_files::CompanionFiles;
use super::windows::{Source, TextFault};

/// The class by which the files of a model name this tokenizer.
pub(super) const CLASS: &str = "ByT5Tokenizer";
/// Rows of the published ByT5 tables: 3 named tokens, 256 bytes, and 125 sentinels.
pub(super) const USUAL_ROWS: u64 = FIRST_SENTINEL as u64 + SENTINELS as u64;

/// The tokens before the bytes, with their keys in the files.
const NAMED: [(&str, &str); 3] = [("pad_token", "<pad>"), ("eos_token", "</s>"), ("unk_token", "<unk>")];
const FIRST_BYTE: u32 = NAMED.len() as u32;
const FIRST_SENTINEL: u32 = FIRST_BYTE + 256;
const SENTINELS: usize = 125;

/// Bytes of text that are processed at a time.
const STEP_BYTES: usize = 4 << 10;
/// The most bytes of a token's name.
const MAX_NAME_BYTES: usize = 256;
/// The most added tokens. Every one of them is searched for.
const MAX_NAMED: usize = 4096;

/// The tokenizer.
pub(super) struct Utf8Bytes {
    tokens: Vec<Named>,
    longest_name: usize,
    /// The first bytes of names.
    first_bytes: Vec<u8>,
}

/// An added token, which is found by its name.
#[derive(Clone, Debug)]
struct Named {
    name: String,
    id: u32,
    /// Whether the token strips the blanks before it, and after it.
    strips: [bool; 2],
    is_special: bool,
}

impl Utf8Bytes {
    /// Makes the tokenizer that these files describe.
    ///
    /// # Errors
    /// The fault in the files.
    pub fn new(companion_files: &CompanionFiles) -> Result<Self, String> {
        let mut tokens = Vec::new();
        for ((key, usual), id) in NAMED.into_iter().zip(0..) {
            // The list of all tokens is the newest form and takes precedence.
            let token = match companion_files.list() {
                Some(list) => list.get(&id.to_string()),
                None => companion_files.role(key),
            };
            let token = Named::parse(token.unwrap_or(&Value::Null), usual, id)?;
            tokens.push(Named { is_special: true, ..token });
        }
        match companion_files.list() {
            Some(list) => {
                let further = list.iter().filter_map(|(id, token)| Some((id.parse().ok()?, token)));
                let mut further: Vec<(u32, &Value)> = further.filter(|(id, _)| *id >= FIRST_SENTINEL).collect();
                further.sort_by_key(|(id, _)| *id);
                for (id, token) in further {
                    tokens.push(Named { strips: strips(token, false), ..Named::parse(token, "", id)? });
                }
            }
            None => {
                let is_special = true;
                let implied =
                    (0..sentinels(companion_files)?).map(|number| Value::String(format!("<extra_id_{number}>")));
                let further = companion_files.further().unwrap_or_else(|| implied.collect());
                for (token, id) in further.iter().zip(FIRST_SENTINEL..) {
                    tokens.push(Named { strips: strips(token, false), is_special, ..Named::parse(token, "", id)? });
                }
            }
        }
        tokens.retain(|token| !token.name.is_empty());
        let longest_name = tokens.iter().map(|token| token.name.len()).max().unwrap_or(0);
        if tokens.len() > MAX_NAMED {
            return Err(format!("{} tokens have names, expected at most {MAX_NAMED}", tokens.len()));
        }
        if longest_name > MAX_NAME_BYTES {
            return Err(format!("a token has a name of {longest_name} bytes, expected at most {MAX_NAME_BYTES}"));
        }
        let mut first_bytes: Vec<u8> = tokens.iter().map(|token| token.name.as_bytes()[0]).collect();
        first_bytes.sort_unstable();
        first_bytes.dedup();
        Ok(Self { tokens, longest_name, first_bytes })
    }

    /// The same vocabulary as a `tokenizer.json`. It gives the same tokens, except for blanks beside named tokens and broken
    /// UTF-8.
    pub fn tokenizer_json(&self) -> String {
        let mut vocabulary: Map<String, Value> =
            byte_names().zip(FIRST_BYTE..).map(|(name, id)| (name, id.into())).collect();
        vocabulary
            .extend(self.tokens.iter().filter(|token| token.id < FIRST_BYTE).map(|t| (t.name.clone(), t.id.into())));
        let added = self.tokens.iter().map(|token| {
            json!({"id": token.id, "content": token.name, "single_word": false, "lstrip": token.strips[0],
                   "rstrip": token.strips[1], "normalized": false, "special": token.is_special})
        });
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []});
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": null, "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes, "model": model,
        })
        .to_string()
    }

    /// The `tokenizer_config.json` with which transformers recognises this tokenizer.
    pub fn transformers_config(&self) -> String {
        let sentinels = self.tokens.iter().filter(|token| token.id >= FIRST_SENTINEL).count();
        format!("{:#}\n", json!({"tokenizer_class": CLASS, "extra_ids": sentinels}))
    }

    /// Returns the first `max_tokens` ids of a text, and one more if there are more.
    pub fn encode(&self, source: &mut impl Source, max_tokens: usize) -> Result<Vec<u32>, TextFault> {
        let mut encoding = Encoding { ids: Vec::new(), blanks: Vec::new(), strips: false, max_tokens };
        let (bytes, mut at) = (source.len(), 0);
        while at < bytes && encoding.ids.len() <= max_tokens {
            let end = bytes.min(at + STEP_BYTES + self.longest_name);
            let text = source.segment(at..end)?;
            // A name may be cut off at the end of a segment.
            let certain = if end == bytes { text.len() } else { text.len().saturating_sub(self.longest_name + 4) };
            at += self.add(text, certain, &mut encoding);
        }
        encoding.keep_blanks();
        encoding.ids.truncate(max_tokens.saturating_add(1));
        Ok(encoding.ids)
    }

    /// Adds the tokens that begin before `certain`. Returns the end of the last one.
    fn add(&self, text: &str, certain: usize, encoding: &mut Encoding) -> usize {
        let mut at = 0;
        while at < certain && encoding.ids.len() <= encoding.max_tokens {
            let rest = &text[at..];
            if let Some(token) = self.named_at(rest) {
                encoding.add_named(token);
                at += token.name.len();
                continue;
            }
            let Some(character) = rest.chars().next() else { break };
            encoding.add(character);
            at += character.len_utf8();
        }
        at
    }

    /// The token whose name begins the text.
    fn named_at(&self, text: &str) -> Option<&Named> {
        let is_first = text.bytes().next().is_some_and(|byte| self.first_bytes.contains(&byte));
        let named = self.tokens.iter().filter(|token| is_first && text.starts_with(&token.name));
        named.max_by_key(|token| token.name.len())
    }

    /// Returns the text of `ids`, with or without special tokens. Bytes that are not UTF-8 are left out, as with Python's
    /// `errors="ignore"`.
    pub fn decode(&self, ids: &[u32], keeps_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len());
        for &id in ids {
            if (FIRST_BYTE..FIRST_SENTINEL).contains(&id) {
                bytes.extend(u8::try_from(id - FIRST_BYTE));
            } else if let Some(token) =
                self.tokens.iter().find(|token| token.id == id && (keeps_special || !token.is_special))
            {
                bytes.extend(token.name.bytes());
            }
        }
        bytes.utf8_chunks().map(|chunk| chunk.valid()).collect()
    }
}

impl Named {
    fn parse(token: &Value, usual: &str, id: u32) -> Result<Named, String> {
        let name = match token {
            Value::Null => usual,
            Value::String(name) => name,
            token => token["content"].as_str().ok_or_else(|| format!("the token {id} is {token}, expected a name"))?,
        };
        let is_special = token["special"].as_bool().unwrap_or(true);
        Ok(Named { name: name.to_owned(), id, strips: strips(token, true), is_special })
    }
}

/// Whether a token strips the blanks before it and after it. `usual` applies if only its name is given.
fn strips(token: &Value, usual: bool) -> [bool; 2] {
    ["lstrip", "rstrip"].map(|key| if token.is_object() { token[key].as_bool().unwrap_or(false) } else { usual })
}

/// The number of sentinels: from the config, or ByT5's usual number if the table has room for it.
fn sentinels(companion_files: &CompanionFiles) -> Result<usize, String> {
    if let Some(said) = companion_files.setting("extra_ids") {
        let number = said.as_u64().filter(|number| *number <= MAX_NAMED as u64);
        let number = number.ok_or_else(|| format!("`extra_ids`: expected a number up to {MAX_NAMED}, got {said}"))?;
        return Ok(number as usize);
    }
    let room = companion_files.rows.map_or(u64::MAX, |rows| rows.saturating_sub(u64::from(FIRST_SENTINEL)));
    Ok(SENTINELS.min(usize::try_from(room).unwrap_or(usize::MAX)))
}

/// The letters that represent the bytes 0 to 255 in byte-level vocabularies (`bytes_to_unicode` of GPT-2).
fn byte_names() -> impl Iterator<Item = String> {
    let mut substitutes = (256..).filter_map(char::from_u32);
    (0..=255).map(move |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte).to_string(),
        _ => substitutes.next().map(String::from).unwrap_or_default(),
    })
}

/// A text while it is encoded.
struct Encoding {
    ids: Vec<u32>,
    /// Blanks that the next token may strip. Never more than could be returned.
    blanks: Vec<u32>,
    /// Whether blanks are dropped: the token before them strips them.
    strips: bool,
    max_tokens: usize,
}

impl Encoding {
    fn add_named(&mut self, token: &Named) {
        let [before, after] = token.strips;
        if before {
            self.blanks.clear();
        }
        self.keep_blanks();
        self.ids.push(token.id);
        self.strips = after;
    }

    fn add(&mut self, character: char) {
        let mut buffer = [0; 4];
        let bytes = character.encode_utf8(&mut buffer).bytes().map(|byte| u32::from(byte) + FIRST_BYTE);
        if !is_blank(character) {
            self.keep_blanks();
            self.strips = false;
            self.ids.extend(bytes);
        } else if !self.strips && self.ids.len() + self.blanks.len() <= self.max_tokens {
            self.blanks.extend(bytes);
        }
    }

    fn keep_blanks(&mut self) {
        self.ids.append(&mut self.blanks);
    }
}

/// Whether Python's `str.strip` removes this character.
fn is_blank(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer(config: &Value) -> Utf8Bytes {
        Utf8Bytes::new(&CompanionFiles { config: config.as_object().cloned(), ..CompanionFiles::default() }).unwrap()
    }

    #[test]
    fn ids_are_bytes_after_three_named_tokens_and_before_the_sentinels() {
        let bytes = tokenizer(&json!({}));
        let check =
            |text: &str, expected: &[u32]| assert_eq!(bytes.encode(&mut &*text, 99).unwrap(), expected, "{text:?}");
        check("a\u{e9}", &[100, 198, 172]);
        check("<extra_id_0> <extra_id_124>", &[259, 35, 383]);
        check(" </s> \u{1f}b<pad><unk>", &[1, 101, 0, 2]);
        check("</s", &[63, 50, 118]);
        assert_eq!(bytes.decode(&[1, 198, 172, 259, 198, 35, 2, 900], false), "\u{e9} ");
    }

    #[test]
    fn names_and_blanks_may_lie_across_stretches() {
        let bytes = tokenizer(&json!({}));
        for before in STEP_BYTES - 20..STEP_BYTES + 20 {
            let text = format!("{}   </s>   {}", "x".repeat(before), " ".repeat(3 * STEP_BYTES));
            let ids = bytes.encode(&mut text.as_str(), usize::MAX).unwrap();
            assert_eq!((ids.len(), ids[before]), (before + 1, 1));
            assert_eq!(bytes.encode(&mut text.as_str(), 7).unwrap(), [123; 8]);
        }
    }

    #[test]
    fn a_small_table_has_fewer_sentinels_and_a_config_says_how_many() {
        let sentinels = |config: &Value, rows| {
            let bytes = Utf8Bytes::new(&CompanionFiles {
                config: config.as_object().cloned(),
                rows,
                ..CompanionFiles::default()
            })
            .unwrap();
            bytes.tokens.len() - NAMED.len()
        };
        assert_eq!(sentinels(&json!({}), Some(384)), 125);
        assert_eq!(sentinels(&json!({}), Some(260)), 1);
        assert_eq!(sentinels(&json!({"extra_ids": 3}), Some(384)), 3);
        let huge = json!({"extra_ids": 1e18});
        assert!(
            Utf8Bytes::new(&CompanionFiles { config: huge.as_object().cloned(), ..CompanionFiles::default() }).is_err()
        );
    }

    #[test]
    fn a_token_with_its_settings_keeps_the_blanks_that_it_does_not_strip() {
        let bytes = tokenizer(&json!({"eos_token": {"content": "</s>", "lstrip": false, "rstrip": true}}));
        assert_eq!(bytes.encode(&mut " </s> a", 9).unwrap(), [35, 1, 100]);
    }
}
