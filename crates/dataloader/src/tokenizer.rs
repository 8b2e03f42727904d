//! [`Tokenizer`]: text to token ids and back, from the files that models are published with: `tokenizer.json`, a SentencePiece
//! `spiece.model`, `vocab.json` with `merges.txt`, or no file for ByT5's bytes.
//!
//! Invariants:
//! - `encode` is a pure function of the text: no end-of-sequence token, no truncation, no padding, even if the file
//!   asks for them. The loader does these on ids.
//! - Memory does not grow with use: the [cached words](word_cache) are few and short, and the library's own word cache is off. Texts of
//!   any length are tokenized in [windows](windows).
//! - For any file and any text, the result is ids or a typed error that names the file.
//!
//! ```no_run
//! let tokenizer = dataloader::Tokenizer::load("data/sample-tokenizer.json".as_ref())?;
//! assert_eq!(tokenizer.decode(&tokenizer.encode("3 + 4")?)?, "3 + 4");
//! # Ok::<(), dataloader::Error>(())
//! ```

mod added_tokens;
mod byte_pairs;
mod companion_files;
mod cut;
mod encoding;
mod files;
mod growth;
mod lossy;
mod model;
mod normal_form;
mod piece_file;
mod prefixed;
mod sentence_piece;
mod traits;
mod transformers_config;
mod utf8_bytes;
mod vocabulary;
mod windows;
mod word_cache;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::Error;
use crate::error::panic_message;
use companion_files::CompanionFiles;
pub use files::COMPANION_FILES;
use growth::Head;
pub(crate) use lossy::{LOSSY_BYTES, Lossy};
pub use lossy::{LossyText, LossyTexts};
use model::Library;
pub(crate) use prefixed::Prefixed;
use traits::Traits;
use transformers_config::TransformersConfig;
use utf8_bytes::Utf8Bytes;
pub use vocabulary::{ChangedTokenizer, Vocabulary};
pub(crate) use windows::{Source, TextFault};
pub(crate) use word_cache::WORD_CACHE_BYTES;
use word_cache::WordCache;

/// A text that is encoded when a tokenizer is loaded: scripts, digits, spaces, a character that grows, broken pieces.
const PROBE: &str = "The quick  brown fox, 0123456789 km.\n\t\u{4e2d}\u{6587} \u{fdfa} \u{e9}e\u{301} \u{1f469}\u{200d}\u{1f467} <unk>\u{0} ";

const END_OF_SEQUENCE: [&str; 5] = ["</s>", "[EOS]", "<eos>", "<|endoftext|>", "<|im_end|>"];
const PADDING: [&str; 4] = ["<pad>", "[PAD]", "<|pad|>", "<|endoftext|>"];
const UNKNOWN: [&str; 3] = ["<unk>", "[UNK]", "<|unk|>"];

/// A longer file is not a tokenizer: the largest published ones are about 40 MB.
const LARGEST_FILE_BYTES: u64 = 512 << 20;

/// A loaded tokenizer. Cheap to share between threads behind an `Arc`.
pub struct Tokenizer {
    inner: Library,
    path: PathBuf,
    kind: Kind,
    /// Files in the same directory that belong to the tokenizer.
    companions: Vec<PathBuf>,
    fingerprint: String,
    vocab_size: usize,
    transformers_config: TransformersConfig,
    traits: Traits,
    /// Bytes of the longest token, and of the longest added token (found by name).
    longest_token: usize,
    longest_added: usize,
    growth: u64,
    start_ids: Vec<u32>,
    /// If texts keep special tokens: those that are left out anyway.
    kept_without: Option<Vec<u32>>,
    word_cache: WordCache,
}

/// The `tokenizer.json` of a tokenizer.
#[derive(Clone, Copy, Debug)]
pub enum TokenizerJson<'a> {
    /// A file, to copy as it is.
    File(&'a Path),
    /// The text of a `tokenizer.json` that exists as no file.
    Text(&'a str),
    /// There is none: transformers makes the tokenizer from its class alone.
    None,
}

/// The form that a tokenizer was read from.
enum Kind {
    /// A `tokenizer.json`.
    Json,
    /// A file of another kind, converted to this `tokenizer.json`.
    Converted(String),
    /// No file: the bytes of a text.
    Bytes(Utf8Bytes),
}

impl Tokenizer {
    /// The `tokenizer.json` to write beside a model with this tokenizer.
    pub fn json(&self) -> TokenizerJson<'_> {
        match &self.kind {
            Kind::Json => TokenizerJson::File(&self.path),
            Kind::Converted(text) => TokenizerJson::Text(text),
            Kind::Bytes(_) => TokenizerJson::None,
        }
    }

    /// Further files to copy beside a model with this tokenizer, except `tokenizer.json` and `tokenizer_config.json`.
    pub fn companions(&self) -> &[PathBuf] {
        &self.companions
    }

    /// Reads a tokenizer from the bytes of a `tokenizer.json`; `path` names it in errors.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the bytes are not a tokenizer, or the tokenizer fails or grows text without bound on
    /// any text.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        let head = Head::read(bytes).map_err(|error| unusable(path, error))?;
        // Checked before any of it runs: loading the file already normalizes the added tokens.
        head.check_pieces().map_err(|error| unusable(path, error))?;
        let growth = head.growth().map_err(|error| unusable(path, error))?;
        let tokenizer = guarded(path, "reading it", || Self::build(bytes, path, &head, growth))??;
        tokenizer.try_out()?;
        Ok(tokenizer)
    }

    /// Reads a tokenizer from the bytes of a `spiece.model`. `config` is the text of the `tokenizer_config.json` beside it, which
    /// may give the number of sentinels; `path` names the file in errors.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the bytes are not a SentencePiece model of kind unigram, or as for
    /// [`from_bytes`](Self::from_bytes).
    pub fn from_sentence_piece(bytes: &[u8], config: Option<&str>, path: &Path) -> Result<Self, Error> {
        let json = CompanionFiles::of_config(config)
            .and_then(|companion_files| sentence_piece::tokenizer_json(bytes, &companion_files));
        let json = json.map_err(|reason| unusable(path, reason))?;
        let tokenizer = Self::from_bytes(json.as_bytes(), path)?;
        Ok(Self { kind: Kind::Converted(json), ..tokenizer })
    }

    /// Encodes and decodes once, so that a tokenizer that always fails does so here, before any work that could be
    /// lost.
    fn try_out(&self) -> Result<(), Error> {
        let mut ids: Vec<u32> = (0..self.vocab_size.min(64) as u32).collect();
        match self.encode(PROBE) {
            Ok(of_text) => ids.extend(of_text),
            // A text without tokens is not the file's fault.
            Err(Error::Encode { .. }) => {}
            Err(error) => return Err(error),
        }
        self.decode(&ids).map(drop)
    }

    fn build(bytes: &[u8], path: &Path, head: &Head, growth: u64) -> Result<Self, Error> {
        let mut inner: Library = serde_json::from_slice(bytes).map_err(|error| unusable(path, error))?;
        inner.with_truncation(None).map_err(|error| unusable(path, error))?;
        inner.with_padding(None);
        if let Some(normalizer) = normal_form::with_composition(inner.get_normalizer()) {
            inner.with_normalizer(Some(normalizer)).map_err(|error| unusable(path, error))?;
        }
        let traits = Traits::new(&inner.get_model().0, head.unigram_unknown()).with(inner.get_normalizer());
        let added = inner.get_added_vocabulary().get_vocab();
        let longest_added = added.keys().map(String::len).max().unwrap_or(0);
        let longest_token = head.pieces().longest_bytes.max(longest_added);
        // Ids may have gaps; a model needs a row for the largest id.
        let of_added = added.values().max().map_or(0, |id| *id as usize + 1);
        let vocab_size = head.pieces().rows.max(of_added);
        if vocab_size == 0 {
            return Err(unusable(path, "its vocabulary is empty"));
        }
        let fingerprint = hexadecimal(&Sha256::digest(bytes));
        let start_ids = Self::start_of(&inner);
        let path = path.to_owned();
        let transformers_config = TransformersConfig::default();
        let mut tokenizer = Self {
            inner,
            path,
            kind: Kind::Json,
            companions: Vec::new(),
            fingerprint,
            vocab_size,
            transformers_config,
            traits,
            longest_token,
            longest_added,
            growth,
            start_ids,
            kept_without: None,
            word_cache: WordCache::default(),
        };
        tokenizer.transformers_config = TransformersConfig::made(tokenizer.new_transformers_config());
        Ok(tokenizer)
    }

    /// Memory for each byte of a word while it is tokenized; `None` for ByT5's bytes.
    pub(crate) fn word_byte_bytes(&self) -> Option<u64> {
        (!matches!(self.kind, Kind::Bytes(_))).then_some(self.traits.word_byte_bytes)
    }

    /// Returns the text of `ids`, without special tokens and ids outside the vocabulary. After
    /// [`keep_special_tokens`](Self::keep_special_tokens), with them.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        let kept: Option<Vec<u32>> =
            self.kept_without.as_ref().map(|without| ids.iter().copied().filter(|id| !without.contains(id)).collect());
        let (ids, is_kept) = (kept.as_deref().unwrap_or(ids), kept.is_some());
        if let Kind::Bytes(tokenizer) = &self.kind {
            return Ok(tokenizer.decode(ids, is_kept));
        }
        let decoded = guarded(&self.path, "decoding tokens", || self.inner.decode(ids, !is_kept))?;
        decoded.map_err(|error| unusable(&self.path, error))
    }

    /// From here on texts of ids keep special tokens, such as `<extra_id_0>`, except `without`: those that frame every answer.
    pub fn keep_special_tokens(&mut self, without: Vec<u32>) {
        self.kept_without = Some(without);
    }

    /// The first special token in `ids` that [`decode`](Self::decode) leaves out of their text, except `frame`.
    pub fn lost_token(&self, ids: &[u32], frame: &[u32]) -> Option<String> {
        let of_frame = |id: &u32| frame.contains(id);
        let lost = ids.iter().find(|id| !of_frame(id) && self.is_special(**id))?;
        self.token_name(*lost).filter(|_| self.kept_without.is_none())
    }

    /// The name of a token in the vocabulary.
    pub fn token_name(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Whether a token stands for no text of its own, such as the end of a text.
    pub fn is_special(&self, id: u32) -> bool {
        self.token_name(id).is_some_and(|name| self.inner.get_added_vocabulary().is_special_token(&name))
    }

    /// Whether a token has one of the usual names of the end of a text.
    pub fn is_usual_end(&self, id: u32) -> bool {
        self.token_name(id).is_some_and(|name| END_OF_SEQUENCE.contains(&name.as_str()))
    }

    /// The ids that the file puts before every text, such as `<s>` of CodeT5. Most T5 tokenizers have none.
    ///
    /// [`encode`](Self::encode) does not add them. The code that makes a sample does, as it adds the end-of-sequence id.
    pub fn start_ids(&self) -> &[u32] {
        &self.start_ids
    }

    /// The ids that the file's template puts before a text.
    fn start_of(inner: &Library) -> Vec<u32> {
        let Ok(encoding) = inner.encode("a", true) else { return Vec::new() };
        let marks = encoding.get_special_tokens_mask().iter();
        let (ids, specials) = (encoding.get_ids(), marks.take_while(|mark| **mark == 1).count());
        // A text of special tokens only has no start.
        if specials < ids.len() { ids[..specials].to_vec() } else { Vec::new() }
    }

    /// Whether the file's template puts a token after every text, as transformers does then. [`encode`](Self::encode) does not add it.
    pub fn ends_texts_with(&self, end: u32) -> bool {
        if let Kind::Bytes(_) = self.kind {
            return self.eos_id().is_ok_and(|id| id == end);
        }
        let encoding = self.inner.encode("a", true);
        encoding.is_ok_and(|encoding| encoding.get_ids().last() == Some(&end))
    }

    /// Rows that a model's embedding needs: the largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token by its exact name.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of one token within a longer text: SentencePiece's sign for a space is a space. `None`: there is no such token.
    pub fn token(&self, id: u32) -> Option<String> {
        match &self.kind {
            Kind::Bytes(tokenizer) => Some(tokenizer.decode(&[id], false)),
            _ => self.inner.id_to_token(id).map(|token| token.replace('\u{2581}', " ")),
        }
    }

    /// The end-of-sequence id: the one that `tokenizer_config.json` names, or `</s>`, or the first of its other usual names.
    ///
    /// # Errors
    /// [`Error::MissingToken`] when the tokenizer has none of them.
    pub fn eos_id(&self) -> Result<u32, Error> {
        self.named(&self.transformers_config.end).map_or_else(|| self.first_of(&END_OF_SEQUENCE, "end-of-sequence"), Ok)
    }

    /// The padding id: the one that `tokenizer_config.json` names, or `<pad>`, or the first of its other usual names.
    ///
    /// # Errors
    /// [`Error::MissingToken`] when the tokenizer has none of them.
    pub fn pad_id(&self) -> Result<u32, Error> {
        self.named(&self.transformers_config.padding).map_or_else(|| self.first_of(&PADDING, "padding"), Ok)
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

    /// The `tokenizer_config.json` to write beside this `tokenizer.json` and a T5 `config.json`. If the tokenizer came
    /// with one, it is returned byte for byte; otherwise a new one with its special tokens.
    ///
    /// Without this file transformers' `AutoTokenizer` takes T5's own class, which reads Unigram vocabularies only.
    pub fn transformers_config(&self) -> &str {
        &self.transformers_config.text
    }

    /// SHA-256 of the `tokenizer_config.json` that the tokenizer came with, in hexadecimal. `None`: there was none.
    pub fn config_fingerprint(&self) -> Option<String> {
        let config = &self.transformers_config;
        config.is_published.then(|| hexadecimal(&Sha256::digest(&config.text)))
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

    /// Whether two tokenizers have the same tokens with the same ids.
    pub fn agrees_with(&self, other: &Tokenizer) -> bool {
        let is_alike = || {
            let (ours, theirs) = (self.inner.get_vocab(true), other.inner.get_vocab(true));
            ours == theirs && self.encode(PROBE).ok() == other.encode(PROBE).ok()
        };
        self.fingerprint == other.fingerprint || is_alike()
    }

    /// SHA-256 of the file, in hexadecimal.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The path that the tokenizer was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn named(&self, token: &Option<String>) -> Option<u32> {
        self.token_id(token.as_ref()?)
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

/// Runs code of the tokenizers crate, which panics on some files that it loads without error.
fn guarded<T>(path: &Path, doing: &str, run: impl FnOnce() -> T) -> Result<T, Error> {
    // After a panic the state is dropped with the tokenizer, or it is a cache that is only read.
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let said = panic_message(&*panic);
        unusable(path, format!("the tokenizers library failed at {doing}: {said}"))
    })
}

fn unusable(path: &Path, reason: impl ToString) -> Error {
    Error::Tokenizer { path: path.to_owned(), reason: reason.to_string() }
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
#[path = "tokenizer/tests.rs"]
mod window_tests;

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
        assert_eq!(tokenizer.decode(&ids).unwrap(), "12 km");
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
        let made = load("tokenizer.json").unwrap().transformers_config().to_owned();
        assert_eq!(made, sample_tokenizer().transformers_config());
        let theirs = "{\"tokenizer_class\": \"T5Tokenizer\"}";
        std::fs::write(directory.path().join("tokenizer_config.json"), theirs).unwrap();
        assert_eq!(load("tokenizer.json").unwrap().transformers_config(), theirs);
        assert_eq!(load("another.json").unwrap().transformers_config(), made);
        std::fs::write(directory.path().join("tokenizer_config.json"), [0xff]).unwrap();
        assert!(load("tokenizer.json").unwrap_err().to_string().contains("tokenizer_config.json"));
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
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text).unwrap()).unwrap(), text);
        }
    }
}
