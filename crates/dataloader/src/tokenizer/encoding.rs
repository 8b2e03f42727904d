//! From texts to token ids.

use super::windows::{Source, TextFault, Tokenizing, Windows};
use super::{Kind, Tokenizer, guarded};
use crate::Error;

impl Tokenizer {
    /// The token ids of `text`, without an end-of-sequence token.
    ///
    /// # Errors
    /// [`Error::Encode`] when the tokenizer cannot represent the text and has no unknown token; [`Error::Tokenizer`]
    /// when it fails on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_start(text, usize::MAX)
    }

    /// Returns the first `max_tokens` ids of [`encode`](Self::encode), and one more if the text has more.
    ///
    /// Only the part of a long text that these ids take is tokenized, in windows of a few KiB. No text costs a multiple
    /// of its size, however its words are cut. The ids equal those of the whole text wherever its words are shorter
    /// than one window; within longer words, the token borders may differ.
    ///
    /// # Errors
    /// The same as for [`encode`](Self::encode).
    pub fn encode_start(&self, text: &str, max_tokens: usize) -> Result<Vec<u32>, Error> {
        self.encode_source(&mut &*text, max_tokens).map_err(TextFault::of_memory)
    }

    /// Returns the first `max_tokens` ids of a text, and one more if there are more. Reads the text only as far as they
    /// take.
    pub(crate) fn encode_source(&self, source: &mut impl Source, max_tokens: usize) -> Result<Vec<u32>, TextFault> {
        self.encode_in(self.windows(max_tokens), source, max_tokens)
    }

    pub(super) fn encode_in(
        &self,
        sizes: Windows,
        source: &mut impl Source,
        max_tokens: usize,
    ) -> Result<Vec<u32>, TextFault> {
        if let Kind::Bytes(tokenizer) = &self.kind {
            return tokenizer.encode(source, max_tokens);
        }
        self.tokenize(sizes, source, max_tokens, |_| {})
    }

    /// Hands the ids of [`encode`](Self::encode) to `each`, in order and some at a time. Memory does not depend on the text, except with
    /// ByT5's bytes.
    ///
    /// # Errors
    /// The same as for [`encode`](Self::encode).
    pub fn encode_each(&self, text: &str, mut each: impl FnMut(&[u32])) -> Result<(), Error> {
        let rest = match &self.kind {
            Kind::Bytes(tokenizer) => tokenizer.encode(&mut &*text, usize::MAX),
            _ => self.tokenize(self.windows(usize::MAX), &mut &*text, usize::MAX, |tokenizing| {
                each(&tokenizing.take_certain());
            }),
        };
        each(&rest.map_err(TextFault::of_memory)?);
        Ok(())
    }

    /// Tokenizes a text window by window, and returns the ids that `after_window` left.
    pub(super) fn tokenize(
        &self,
        sizes: Windows,
        source: &mut impl Source,
        max_tokens: usize,
        mut after_window: impl FnMut(&mut Tokenizing),
    ) -> Result<Vec<u32>, TextFault> {
        let bytes = source.len();
        let mut tokenizing = Tokenizing::new((&self.inner, &self.word_cache), self.traits, sizes, max_tokens);
        while let Some(range) = tokenizing.next(bytes) {
            let is_last = range.end == bytes;
            let text = source.segment(range)?;
            let added = guarded(&self.path, "encoding a text", || tokenizing.add(text, is_last))?;
            added.map_err(|error| Error::Encode { path: self.path.clone(), reason: error.to_string() })?;
            after_window(&mut tokenizing);
        }
        Ok(tokenizing.finish())
    }

    /// Window sizes for texts of which the first `max_tokens` tokens are needed.
    pub(crate) fn windows(&self, max_tokens: usize) -> Windows {
        Windows::new(max_tokens, self.longest_token, self.longest_added, self.growth)
    }
}
