//! [`Tokenizer`]: text to token ids and back, from a Hugging Face `tokenizer.json`.
//!
//! Invariants:
//! - `encode` is a pure function of the text: no end-of-sequence token, no truncation, no padding, whatever the
//!   file asks for. Those are the loader's business and are done on ids.
//! - Memory does not grow with use: the tokenizer's own word cache is capped at [`CACHED_WORDS`] words a thread
//!   and never stores a word of more than 256 bytes.
//!
//! ```no_run
//! let tokenizer = dataloader::Tokenizer::load("data/sample-tokenizer.json".as_ref())?;
//! assert_eq!(tokenizer.decode(&tokenizer.encode("3 + 4")?), "3 + 4");
//! # Ok::<(), dataloader::Error>(())
//! ```

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tokenizers::ModelWrapper;

use crate::Error;

/// Words that the tokenizer remembers the tokens of, for each thread that encodes.
///
/// The most common words of a language are worth remembering; a longer list is not measurably faster. Where text has no
/// spaces a word is a clause, and takes kilobytes: the tokenizer keeps 32 bytes for each byte that it was merged from.
pub const CACHED_WORDS: usize = 512;

/// Where [`Tokenizer::encode_start`] first looks for the tokens it wants: generous, most tokens take 2 to 6 bytes.
pub(crate) const FIRST_TRY_BYTES_PER_TOKEN: usize = 16;
const FIRST_TRY_BYTES: usize = 1024;
/// Cutting a text can change words near the cut: the one that is cut, its neighbours where the tokenizer looks
/// around it, and the pieces of the name of a special token that is cut.
const CERTAIN_WORDS: u32 = 16;

const END_OF_SEQUENCE: [&str; 5] = ["</s>", "[EOS]", "<eos>", "<|endoftext|>", "<|im_end|>"];
const PADDING: [&str; 4] = ["<pad>", "[PAD]", "<|pad|>", "<|endoftext|>"];
const UNKNOWN: [&str; 3] = ["<unk>", "[UNK]", "<|unk|>"];

/// The names under which transformers looks for a tokenizer and for what to make of it.
const FILE: &str = "tokenizer.json";
const CONFIG_FILE: &str = "tokenizer_config.json";
/// A longer file is not a tokenizer: the largest published ones have about 40 MB.
const LARGEST_FILE_BYTES: u64 = 512 << 20;

/// A loaded tokenizer. Cheap to share between threads behind an `Arc`.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    fingerprint: String,
    vocab_size: usize,
    transformers_config: String,
}

impl Tokenizer {
    /// Loads a `tokenizer.json`, and the `tokenizer_config.json` beside it where there is one.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the file is missing or is not a tokenizer, or the config beside it cannot be read.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let bytes = regular_file::read(path, LARGEST_FILE_BYTES).map_err(|error| unusable(path, error))?;
        let mut tokenizer = Self::from_bytes(&bytes, path)?;
        if let Some(config) = config_beside(path)? {
            tokenizer.transformers_config = config;
        }
        Ok(tokenizer)
    }

    /// Reads a tokenizer from the bytes of a `tokenizer.json`; `path` names it in errors.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the bytes are not a tokenizer.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| unusable(path, error))?;
        inner.with_truncation(None).map_err(|error| unusable(path, error))?;
        inner.with_padding(None);
        let mut model = inner.get_model().clone();
        match &mut model {
            ModelWrapper::BPE(bpe) => bpe.resize_cache(CACHED_WORDS),
            ModelWrapper::Unigram(unigram) => unigram.resize_cache(CACHED_WORDS),
            ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => {} // These two have no cache.
        }
        inner.with_model(model);
        // Ids may have gaps; a model needs a row for the largest of them.
        let largest = inner.get_vocab(true).into_values().max();
        let vocab_size = largest.map_or(0, |id| id as usize + 1);
        if vocab_size == 0 {
            return Err(unusable(path, "its vocabulary is empty"));
        }
        let fingerprint = hexadecimal(&Sha256::digest(bytes));
        let path = path.to_owned();
        let mut tokenizer = Self { inner, path, fingerprint, vocab_size, transformers_config: String::new() };
        tokenizer.transformers_config = tokenizer.new_transformers_config();
        Ok(tokenizer)
    }

    /// The token ids of `text`, without an end-of-sequence token.
    ///
    /// # Errors
    /// [`Error::Encode`] when the tokenizer cannot represent the text and has no unknown token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| Error::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Ids of which the first `max_tokens` are those of [`encode`](Self::encode), and more than `max_tokens` if the
    /// text has more; what follows them is not all there.
    ///
    /// Of a long text only as much is tokenized as these take, so that one enormous row does not cost a hundred
    /// times its size in memory. This is exact because tokens never cross the words that the tokenizer cuts text
    /// into: a prefix of the text is enough once the tokens wanted end well before its last word. A text that
    /// is a single word is tokenized whole.
    ///
    /// # Errors
    /// Those of [`encode`](Self::encode).
    pub fn encode_start(&self, text: &str, max_tokens: usize) -> Result<Vec<u32>, Error> {
        let mut bytes = FIRST_TRY_BYTES + max_tokens * FIRST_TRY_BYTES_PER_TOKEN;
        while text.len() > bytes {
            let prefix = &text[..text.floor_char_boundary(bytes)];
            let encoding = self.inner.encode(prefix, false).map_err(|error| Error::Encode(error.to_string()))?;
            let words = encoding.get_word_ids();
            if let (Some(Some(word)), Some(Some(last))) = (words.get(max_tokens), words.last())
                && word + CERTAIN_WORDS <= *last
            {
                return Ok(encoding.get_ids()[..=max_tokens].to_vec());
            }
            bytes = bytes.saturating_mul(4);
        }
        self.encode(text)
    }

    /// The text of `ids`, special tokens left out, ids outside the vocabulary too.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.inner.decode(ids, true).unwrap_or_default()
    }

    /// Rows that a model's embedding needs: the largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token by its exact name.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The end-of-sequence id: `</s>`, or the first of its other usual names.
    ///
    /// # Errors
    /// [`Error::MissingToken`] when the tokenizer has none of them.
    pub fn eos_id(&self) -> Result<u32, Error> {
        self.first_of(&END_OF_SEQUENCE, "end-of-sequence")
    }

    /// The padding id: `<pad>`, or the first of its other usual names.
    ///
    /// # Errors
    /// [`Error::MissingToken`] when the tokenizer has none of them.
    pub fn pad_id(&self) -> Result<u32, Error> {
        self.first_of(&PADDING, "padding")
    }

    /// The id of unknown text, for tokenizers that have one.
    pub fn unknown_id(&self) -> Option<u32> {
        UNKNOWN.iter().find_map(|name| self.token_id(name))
    }

    /// The ids of `<extra_id_0>`, `<extra_id_1>`, ... up to the first that is missing.
    ///
    /// Span corruption marks its spans with these. T5 keeps them at the end of the vocabulary in falling order,
    /// but they are found by name.
    pub fn sentinels(&self) -> Vec<u32> {
        (0..).map_while(|number| self.token_id(&format!("<extra_id_{number}>"))).collect()
    }

    /// The `tokenizer_config.json` to write beside this `tokenizer.json` and a T5 `config.json`: the one that this
    /// tokenizer came with, byte for byte, or where it came with none a new one of its special tokens.
    ///
    /// Without it transformers' `AutoTokenizer` takes the class that belongs to T5, which reads Unigram
    /// vocabularies only.
    pub fn transformers_config(&self) -> &str {
        &self.transformers_config
    }

    fn new_transformers_config(&self) -> String {
        let mut config = serde_json::json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            // The class would also make `token_type_ids`, which T5's `generate` refuses.
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": false,
        });
        let roles =
            [("eos_token", self.eos_id().ok()), ("pad_token", self.pad_id().ok()), ("unk_token", self.unknown_id())];
        for (role, id) in roles {
            if let Some(name) = id.and_then(|id| self.inner.id_to_token(id)) {
                config[role] = name.into();
            }
        }
        let sentinels = 0..self.sentinels().len();
        config["additional_special_tokens"] = sentinels.map(|number| format!("<extra_id_{number}>")).collect();
        format!("{config:#}\n")
    }

    /// SHA-256 of the file, in hexadecimal.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Where the tokenizer came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn first_of(&self, names: &[&str], role: &'static str) -> Result<u32, Error> {
        names.iter().find_map(|name| self.token_id(name)).ok_or_else(|| Error::MissingToken {
            path: self.path.clone(),
            role,
            expected: names.join(", "),
        })
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, vocab_size, fingerprint, .. } = self;
        write!(formatter, "Tokenizer({}, {vocab_size} tokens, sha256 {fingerprint})", path.display())
    }
}

/// The text of the `tokenizer_config.json` that belongs to this file. A file of another name than `tokenizer.json`
/// has none: what lies beside it is another tokenizer's.
fn config_beside(path: &Path) -> Result<Option<String>, Error> {
    if path.file_name() != Some(FILE.as_ref()) {
        return Ok(None);
    }
    let path = path.with_file_name(CONFIG_FILE);
    match regular_file::read_to_string(&path, LARGEST_FILE_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unusable(&path, error)),
    }
}

fn unusable(path: &Path, reason: impl ToString) -> Error {
    Error::Tokenizer { path: path.to_owned(), reason: reason.to_string() }
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample_tokenizer;
    use proptest::prelude::*;

    #[test]
    fn special_tokens_have_the_ids_that_t5_gives_them() {
        let tokenizer = sample_tokenizer();
        assert_eq!(tokenizer.pad_id().unwrap(), 0);
        assert_eq!(tokenizer.eos_id().unwrap(), 1);
        assert_eq!(tokenizer.unknown_id(), Some(2));
        let last = tokenizer.vocab_size() as u32 - 1;
        assert_eq!(tokenizer.sentinels(), (0..100).map(|number| last - number).collect::<Vec<_>>());
    }

    #[test]
    fn encoding_adds_no_special_tokens_though_the_file_asks_for_them() {
        let tokenizer = sample_tokenizer();
        assert!(!tokenizer.encode("7 + 9").unwrap().contains(&1));
        assert!(tokenizer.encode("").unwrap().is_empty());
    }

    #[test]
    fn decoding_leaves_out_special_tokens_and_ids_outside_the_vocabulary() {
        let tokenizer = sample_tokenizer();
        let mut ids = tokenizer.encode("12 km").unwrap();
        ids.insert(0, 0);
        ids.extend([1, 0, 5_000_000]);
        assert_eq!(tokenizer.decode(&ids), "12 km");
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_a_typed_error() {
        let check = |bytes: &[u8], expected: &str| {
            let error = Tokenizer::from_bytes(bytes, Path::new("some/tokenizer.json")).unwrap_err().to_string();
            assert!(error.starts_with("some/tokenizer.json: not a usable tokenizer: "), "{error}");
            assert!(error.contains(expected), "{error}");
        };
        check(b"", "EOF");
        check(b"{}", "");
        check(b"{\"version\":\"1.0\",\"model\":{\"type\":\"WordLevel\",\"vocab\":{},\"unk_token\":\"x\"}}", "");
        check(&[0xff, 0xfe, 0x00], "");
        let missing = Tokenizer::load(Path::new("no/such/tokenizer.json")).unwrap_err();
        assert!(matches!(missing, Error::Tokenizer { .. }) && missing.hint().is_some());
    }

    #[test]
    fn the_start_of_a_long_text_is_tokenized_as_the_whole_is() {
        let tokenizer = sample_tokenizer();
        let units = [
            "three red cats, ",
            "倒过来：天地人。",
            "2024-03-15 ",
            "wörld 👩‍👩‍👧 ",
            "<extra_id_7>",
            "一二三四五六七",
            "   \n",
        ];
        for unit in units {
            let text = unit.repeat(20_000 / unit.len());
            let whole = tokenizer.encode(&text).unwrap();
            for max_tokens in [1, 2, 63, 64, 65, 500, 5000, 100_000] {
                let start = tokenizer.encode_start(&text, max_tokens).unwrap();
                let expected = max_tokens.min(whole.len());
                assert_eq!(start[..expected], whole[..expected], "{unit:?}, {max_tokens} tokens");
                assert_eq!(start.len() > max_tokens, whole.len() > max_tokens, "{unit:?}, {max_tokens} tokens");
            }
        }
    }

    #[test]
    fn transformers_is_told_the_class_and_the_special_tokens() {
        let config: serde_json::Value = serde_json::from_str(sample_tokenizer().transformers_config()).unwrap();
        assert_eq!(config["tokenizer_class"], "PreTrainedTokenizerFast");
        assert_eq!((&config["eos_token"], &config["pad_token"]), (&"</s>".into(), &"<pad>".into()));
        assert_eq!(config["additional_special_tokens"].as_array().map(Vec::len), Some(100));
    }

    #[test]
    fn a_config_that_a_tokenizer_came_with_is_kept_and_one_of_another_tokenizer_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let load = |name: &str| {
            let path = directory.path().join(name);
            std::fs::copy(sample_tokenizer().path(), &path).unwrap();
            Tokenizer::load(&path)
        };
        let made = load(FILE).unwrap().transformers_config().to_owned();
        assert_eq!(made, sample_tokenizer().transformers_config());
        let theirs = "{\"tokenizer_class\": \"T5Tokenizer\"}";
        std::fs::write(directory.path().join(CONFIG_FILE), theirs).unwrap();
        assert_eq!(load(FILE).unwrap().transformers_config(), theirs);
        assert_eq!(load("another.json").unwrap().transformers_config(), made);
        std::fs::write(directory.path().join(CONFIG_FILE), [0xff]).unwrap();
        assert!(load(FILE).unwrap_err().to_string().contains(CONFIG_FILE));
    }

    #[test]
    fn the_fingerprint_follows_the_bytes() {
        let bytes = std::fs::read(sample_tokenizer().path()).unwrap();
        let mut changed = bytes.clone();
        changed.push(b'\n');
        let load = |bytes: &[u8]| Tokenizer::from_bytes(bytes, Path::new("t.json")).unwrap().fingerprint().to_owned();
        assert_eq!(load(&bytes), load(&bytes));
        assert_ne!(load(&bytes), load(&changed));
    }

    proptest! {
        #[test]
        fn every_text_survives_encoding_and_decoding(text in any::<String>()) {
            prop_assume!(!text.contains('<'));
            let tokenizer = sample_tokenizer();
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text).unwrap()), text);
        }
    }
}
