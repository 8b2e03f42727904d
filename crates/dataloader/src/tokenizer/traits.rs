//! [`Traits`]: properties of a tokenizer that [windows](super::windows) need.

use tokenizers::{Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper};

/// Longer words give WordPiece's unknown token, since it tries every substring of a word. Files set 100 or 200 characters.
pub(super) const MAX_WORD_PIECE_CHARS: usize = 1000;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traits {
    /// The unknown token, if a run of unknown characters becomes a single one.
    pub fused_unknown: Option<u32>,
    /// Words are looked up whole: no position within a word can be a border.
    pub whole_words: bool,
    /// The first characters of a word are looked up under another name than later ones.
    pub marks_first: bool,
    /// Unknown characters give no token, and their neighbours may be merged.
    pub drops_unknown: bool,
    /// Blanks at the end of a text are removed.
    pub strips_end: bool,
    /// Memory for each byte of a word while it is tokenized.
    pub word_byte_bytes: u64,
}

/// A byte-pair model has a symbol of 32 bytes for each byte, a queue of merges with up to 48 while it grows, and later a token of 48
/// bytes with its text. Measured: 85 for a word of 16 KiB.
const PAIR_BYTES: u64 = 112;
/// A unigram model has an entry of the best path, a piece with its text in a vector that doubles, and the token. Measured:
/// 76.
const PIECE_BYTES: u64 = 120;
/// If unknown characters become bytes, there is also a token for each byte in two vectors that double.
const PIECE_AND_FALLBACK_BYTES: u64 = 256;

impl Traits {
    pub fn new(model: &ModelWrapper, unigram_unknown: Option<u32>) -> Self {
        match model {
            ModelWrapper::BPE(bpe) => Self {
                fused_unknown: bpe.unk_token.as_ref().filter(|_| bpe.fuse_unk).and_then(|name| bpe.token_to_id(name)),
                marks_first: bpe.continuing_subword_prefix.as_ref().is_some_and(|prefix| !prefix.is_empty()),
                drops_unknown: bpe.unk_token.is_none(),
                // Each unknown character gives a token with this text.
                word_byte_bytes: PAIR_BYTES + bpe.unk_token.as_ref().map_or(0, |name| name.len() as u64),
                ..Self::default()
            },
            ModelWrapper::Unigram(unigram) => Self {
                fused_unknown: unigram_unknown,
                word_byte_bytes: if unigram.byte_fallback() { PIECE_AND_FALLBACK_BYTES } else { PIECE_BYTES },
                ..Self::default()
            },
            ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => {
                Self { whole_words: true, word_byte_bytes: PAIR_BYTES, ..Self::default() }
            }
        }
    }

    /// Adds the traits that the normalizer implies.
    pub fn with(self, normalizer: Option<&NormalizerWrapper>) -> Self {
        let normalized = |text: &str| {
            let mut text = NormalizedString::from(text);
            normalizer?.normalize(&mut text).ok()?;
            Some(text.get().to_owned())
        };
        let is_stripped = |text: &str| normalized(text).is_some_and(|text| Some(text) == normalized("a"));
        Self { strips_end: is_stripped("a \n") && is_stripped("a\n "), ..self }
    }
}

/// Whether a byte-pair model without an unknown token drops this character, at the beginning of a word or within it.
pub(super) fn drops(model: &ModelWrapper, character: char, is_first: bool) -> bool {
    let ModelWrapper::BPE(bpe) = model else { return false };
    let prefix = bpe.continuing_subword_prefix.as_deref().filter(|_| !is_first).unwrap_or_default();
    let name = format!("{prefix}{character}");
    let is_token = |name: &str| bpe.token_to_id(name).is_some();
    let has_its_bytes = || bpe.byte_fallback && name.bytes().all(|byte| is_token(&format!("<{byte:#04X}>")));
    !(is_token(&name) || has_its_bytes())
}
