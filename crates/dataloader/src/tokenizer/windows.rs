//! Tokenizes a text of any length in bounded memory: window by window, and words longer than a window in parts.
//!
//! The window sizes count bytes of the original text. A window is normalized and cut into words by the tokenizer's rules.
//! Words that end well before the window ends are certain, and are tokenized. The next window begins some words earlier.
//! Effects of a text's beginning (a space that is put before it, say) are thus over before the first character that counts.
//!
//! A word that goes on beyond the window is collected, normalized, across windows. Up to [`Windows::word_bytes`] it is
//! tokenized whole. A longer word is tokenized in parts: the tokens well before the part's end are taken, and the next part
//! begins where they ended. Byte-pair merges give the same tokens from there on, because any run of a word's tokens is the
//! tokenization of the text that it covers. The same holds for any run of Unigram's best path. WordPiece and WordLevel look
//! up whole words only; if a word is longer than any that they know, the rest of it is skipped.
//!
//! Some tokenizers strip the blanks at the end of a text. The end of a window must not look like the end of the text, so a
//! letter is added after blanks there. Blanks at the edge of a window are provisional: after `"a  "`, the text may end, which
//! strips them, or go on with `"b"`, which keeps them. Their tokens are taken back in the first case, or if the name of a token that strips blanks follows.
//! The rest of the window does not show which case applies, because it may hold a name that is cut.
//!
//! Invariants:
//! - The ids are a function of (text, max_tokens), and equal those of the whole text if its words fit `word_bytes`.
//!   In a longer word Unigram may break a tie differently: the library's choice depends on how its sums were rounded.
//! - Memory depends on the sizes alone, never on the text. Time is linear in the bytes that are read.

mod pieces;

use std::ops::Range;

use tokenizers::{Model, NormalizedString, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Token};

use pieces::{Found, Pieces, Step, origin_before};

use super::model::Library;
use super::normal_form::{Normalization, is_decomposed, is_second};
use super::traits::{Traits, drops};
use super::word_cache::WordCache;
use crate::Error;

/// Why a text gives no tokens.
#[derive(Debug)]
pub(crate) enum TextFault {
    /// The text's bytes are not UTF-8.
    NotUtf8,
    /// The caller no longer needs the text.
    Stopped,
    /// Reading or tokenizing the text failed.
    Error(Error),
}

impl TextFault {
    /// The error of a text in memory.
    pub fn of_memory(self) -> Error {
        match self {
            Self::Error(error) => error,
            Self::NotUtf8 | Self::Stopped => unreachable!("a `str` is UTF-8 and is there"),
        }
    }
}

impl From<Error> for TextFault {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// A text that is handed out in segments.
pub(crate) trait Source {
    /// Bytes of the whole text.
    fn len(&self) -> usize;

    /// Returns the text from `range.start`, a character border, to the last border up to `range.end`. Starts and ends
    /// rise from call to call.
    fn segment(&mut self, range: Range<usize>) -> Result<&str, TextFault>;
}

impl Source for &str {
    fn len(&self) -> usize {
        str::len(self)
    }

    fn segment(&mut self, range: Range<usize>) -> Result<&str, TextFault> {
        Ok(&self[range.start..self.floor_char_boundary(range.end)])
    }
}

/// The sizes that bound the memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Windows {
    /// Text by which each window advances.
    pub step_bytes: usize,
    /// Text before the point where the last window stopped; the next window reads it again.
    pub context_bytes: usize,
    /// Text at the end of a window that is uncertain: a cut word, or the cut name of a special token.
    pub margin_bytes: usize,
    /// The most normalized text of a word that is tokenized whole.
    pub word_bytes: usize,
    /// Normalized text at the end of a word's part whose tokens may change with the text after it.
    pub word_margin_bytes: usize,
}

impl Windows {
    /// The sizes for the first `max_tokens` tokens of texts.
    ///
    /// `longest_token` is the longest token of the vocabulary, `longest_added` the longest added token (found by name),
    /// and `growth` the most that one byte can become before it is cut into tokens. All are in bytes.
    pub fn new(max_tokens: usize, longest_token: usize, longest_added: usize, growth: u64) -> Self {
        // Text that can grow much is processed in smaller windows.
        let step = STEP_BYTES * USUAL_GROWTH / (growth as usize).max(USUAL_GROWTH);
        let word = max_tokens.saturating_mul(8).clamp(MIN_WORD_BYTES, MAX_WORD_BYTES);
        Self {
            step_bytes: step.max(MIN_STEP_BYTES),
            context_bytes: CONTEXT_BYTES,
            margin_bytes: MARGIN_BYTES + longest_added.min(MAX_NAME_BYTES),
            word_bytes: word,
            word_margin_bytes: (4 * longest_token).clamp(64, MIN_WORD_BYTES / 4),
        }
    }

    /// The most text that is normalized and cut at once.
    pub fn max_bytes(&self) -> usize {
        self.around_bytes() + self.step_bytes
    }

    /// Bytes at the beginning of a text that usually hold `max_tokens` tokens. Most tokens take 2 to 6 bytes.
    pub fn usual_bytes(&self, max_tokens: usize) -> usize {
        self.around_bytes() + max_tokens.saturating_mul(8).saturating_add(1024).min(MAX_USUAL_BYTES)
    }

    /// The same of a window that does not begin within a long word.
    pub fn usual_window_bytes(&self) -> usize {
        2 * self.context_bytes + self.margin_bytes + self.step_bytes
    }

    fn around_bytes(&self) -> usize {
        8 * self.context_bytes + self.margin_bytes
    }
}

/// A window takes up to 400 times its text. Beside this step it repeats some hundred bytes of the last window.
const STEP_BYTES: usize = 512;
const MAX_WORD_BYTES: usize = 16 << 10;
const MAX_USUAL_BYTES: usize = 16 << 10;
const MIN_STEP_BYTES: usize = 256;
const MIN_WORD_BYTES: usize = 4 << 10;
const CONTEXT_BYTES: usize = 64;
const MARGIN_BYTES: usize = 64;
const MAX_NAME_BYTES: usize = 256;
/// Tokenizers in use make text grow less than this.
const USUAL_GROWTH: usize = 64;
/// The most characters that follow the first one of a composed character.
const MAX_COMPOSED: usize = 4;
/// This letter is added after blanks at the end of a window that is not the end of the text.
const LETTER: char = 'a';

type Fault = Box<dyn std::error::Error + Send + Sync>;

/// A text while it is tokenized.
pub(super) struct Tokenizing<'t> {
    tokenizer: &'t Library,
    word_cache: &'t WordCache,
    traits: Traits,
    sizes: Windows,
    max_tokens: usize,
    ids: Vec<u32>,
    /// Bytes of the text that have been cut into words.
    at: usize,
    /// The next window is this text and the text from `from` on. Normalizing or cutting removes all text in between.
    carried: String,
    from: usize,
    is_over: bool,
    word: Word,
    blanks: Option<Blanks>,
}

/// A run of blanks at the end of a window. Part of it is tokenized, though it may be the end of the text.
struct Blanks {
    /// The run's start in the text.
    start: usize,
    /// The window, and the state before it was added.
    window: String,
    carried: String,
    at: usize,
    from: usize,
    ids: usize,
    word: Word,
}

/// A word that goes on beyond the window.
#[derive(Clone, Default)]
struct Word {
    /// Normalized text of the word: `done` bytes that are tokenized, then the rest, which is not.
    text: String,
    done: usize,
    /// The last token is the unknown token and may go on.
    ends_unknown: bool,
    /// The word's tokens are known; the rest of the word is skipped.
    is_decided: bool,
}

impl<'t> Tokenizing<'t> {
    pub fn new(
        (tokenizer, word_cache): (&'t Library, &'t WordCache),
        traits: Traits,
        sizes: Windows,
        max_tokens: usize,
    ) -> Self {
        Self {
            tokenizer,
            word_cache,
            traits,
            sizes,
            max_tokens,
            ids: Vec::new(),
            at: 0,
            carried: String::new(),
            from: 0,
            is_over: false,
            word: Word::default(),
            blanks: None,
        }
    }

    /// The next segment of a text of `bytes` bytes; `None` once there are enough tokens or no more text.
    pub fn next(&self, bytes: usize) -> Option<Range<usize>> {
        let end = self.at.saturating_add(self.sizes.step_bytes + self.sizes.margin_bytes);
        (!self.is_over).then_some(self.from..bytes.min(end))
    }

    /// Takes the ids that are certain, so that the next ones do not add to them.
    pub fn take_certain(&mut self) -> Vec<u32> {
        // The tokens of blanks may be taken back by their place.
        if self.blanks.is_none() { std::mem::take(&mut self.ids) } else { Vec::new() }
    }

    /// Forgets ids before the last `most`, now and then, so that a long text of which only the end counts takes little memory.
    pub fn keep_last(&mut self, most: usize) {
        const AT_A_TIME: usize = 4096;
        // The tokens of blanks may be taken back by their place.
        if self.blanks.is_none() && self.ids.len() > most.saturating_add(AT_A_TIME) {
            self.ids.drain(..self.ids.len() - most);
        }
    }

    /// Returns the ids. One id above `max_tokens` shows that the text has more.
    pub fn finish(mut self) -> Vec<u32> {
        self.ids.truncate(self.max_tokens.saturating_add(1));
        self.ids
    }

    /// Tokenizes the segment that [`next`](Self::next) asked for.
    pub fn add(&mut self, segment: &str, is_last: bool) -> Result<(), Fault> {
        let window = format!("{}{segment}", self.carried);
        let text = window.as_str();
        // A character at each end may exceed the limit.
        debug_assert!(text.len() <= self.sizes.max_bytes() + 8, "a window of {} bytes", text.len());
        if !self.traits.strips_end {
            return self.add_window(text, self.cut(text)?, is_last);
        }
        let kept = text.trim_end().len();
        let cut = if is_last || kept == text.len() { self.cut(text) } else { self.cut(&format!("{text}{LETTER}")) }?;
        let limit = self.limit(text, is_last);
        if let Some(end) = self.end_of_blanks(text).filter(|&end| end <= limit) {
            let blanks = self.blanks.take().expect("they have an end");
            if end == text.len() || self.is_stripped_before(&cut, end) {
                return self.strip(blanks, self.from + end - self.carried.len(), end == text.len());
            }
        }
        // Text after these blanks may be the beginning of a name, which strips them as the end of a text does.
        let before = text[..limit].trim_end().len();
        if before < limit && !is_last && self.blanks.is_none() {
            let (carried, word) = (self.carried.clone(), self.word.clone());
            let (at, from, ids) = (self.at, self.from, self.ids.len());
            let start = (from + before).saturating_sub(carried.len());
            self.blanks = Some(Blanks { start, window: text[..limit].to_owned(), carried, at, from, ids, word });
        }
        self.add_window(text, cut, is_last)
    }

    /// Cuts a window into words.
    fn cut(&self, text: &str) -> Result<PreTokenizedString, Fault> {
        let is_composed = !is_decomposed(text);
        let normalizer = self.tokenizer.get_normalizer().map(|normalizer| Normalization { normalizer, is_composed });
        let mut cut = self.tokenizer.get_added_vocabulary().extract_and_normalize(normalizer.as_ref(), text);
        if let Some(cutter) = self.tokenizer.get_pre_tokenizer() {
            cutter.pre_tokenize(&mut cut)?;
        }
        Ok(cut)
    }

    /// The end of a window's certain part.
    fn limit(&self, text: &str, is_last: bool) -> usize {
        if is_last {
            return text.len();
        }
        let mut limit = text.floor_char_boundary(text.len() - self.sizes.margin_bytes);
        // A character stays with those that it is composed of. Nothing is composed of more than a few.
        for _ in 0..MAX_COMPOSED {
            if !text[limit..].chars().next().is_some_and(is_second) {
                break;
            }
            limit = text.floor_char_boundary(limit.saturating_sub(1));
        }
        limit
    }

    /// The end, in this window, of the run of blanks that began in an earlier window.
    fn end_of_blanks(&self, text: &str) -> Option<usize> {
        let start = self.carried.len() + self.blanks.as_ref()?.start.saturating_sub(self.from);
        Some(text.len() - text[start..].trim_start().len())
    }

    /// Whether an added token at `end` ends the text before it, as the end of a text does.
    fn is_stripped_before(&self, cut: &PreTokenizedString, end: usize) -> bool {
        let names = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        cut.get_splits(OffsetReferential::Original, OffsetType::None).iter().any(|(_, place, tokens)| {
            let name = tokens.as_ref().and_then(|tokens| names.get(&tokens.first()?.id));
            place.0 <= end && end < place.1 && name.is_some_and(|name| !name.normalized)
        })
    }

    /// Takes back the tokens of blanks that turned out to be stripped. The text resumes at `end`.
    fn strip(&mut self, blanks: Blanks, end: usize, is_last: bool) -> Result<(), Fault> {
        self.ids.truncate(blanks.ids);
        (self.word, self.carried, self.at, self.from) = (blanks.word, blanks.carried, blanks.at, blanks.from);
        let cut = self.cut(&blanks.window)?;
        self.add_window(&blanks.window, cut, true)?;
        (self.at, self.from) = (end, end);
        self.carried.clear();
        self.is_over = is_last || self.ids.len() > self.max_tokens;
        Ok(())
    }

    fn add_window(&mut self, text: &str, mut cut: PreTokenizedString, is_last: bool) -> Result<(), Fault> {
        let at = self.carried.len() + self.at - self.from;
        let limit = self.limit(text, is_last);
        let pieces = Pieces::new(&cut, if self.at == 0 { None } else { Some(at) }, limit, is_last);
        let latest = limit.saturating_sub(self.sizes.context_bytes);
        let last = pieces.last_before(latest);
        let restart = pieces.restart(latest);
        // The origin in the window's text of the last character of a word that is longer than a window may look back.
        let mut origin = None;
        let mut found = Found::default();
        let mut named = pieces.named.iter().filter(|(index, _)| pieces.whole.contains(index)).peekable();
        cut.split(|index, piece| {
            while let Some((_, id)) = named.next_if(|(named, _)| *named < index) {
                found.steps.push(Step::Name(*id));
            }
            found.add(index, &piece, &pieces, at..limit);
            if last == Some(index) && latest - restart > 7 * self.sizes.context_bytes {
                origin = Some(origin_before(&piece, latest));
            }
            Ok(Vec::<NormalizedString>::new())
        })?;
        found.steps.extend(named.map(|(_, id)| Step::Name(*id)));
        let begins_within = pieces.begins_within;
        // A cut window takes far more memory than its text.
        drop((cut, pieces));
        if !begins_within {
            // A word that seemed to go on ended exactly here.
            self.end_word()?;
        }
        self.take(&found)?;
        if is_last {
            self.end_word()?;
        }
        // The tokens of blanks may yet be taken back.
        self.is_over = is_last || (self.ids.len() > self.max_tokens && self.blanks.is_none());
        self.at = self.from + limit - self.carried.len();
        self.move_on(text, restart, origin, latest);
        Ok(())
    }

    /// Begins the next window at `restart`. If that is too far back, it begins at `origin`, within a word.
    fn move_on(&mut self, text: &str, restart: usize, origin: Option<usize>, latest: usize) {
        let context = self.sizes.context_bytes;
        if latest - restart <= 7 * context {
            return self.begin_at(restart);
        }
        let left = origin.unwrap_or(restart);
        if latest - left <= 7 * context {
            return self.begin_at(left);
        }
        // The normalizer or the cutter removes the text after `left`, however long that text is: most of it is skipped.
        let start = if left - restart <= 3 * context { restart } else { left };
        let (end, resume) = (text.ceil_char_boundary(left + context), text.floor_char_boundary(latest - context));
        self.from += resume - self.carried.len();
        text[start..end].clone_into(&mut self.carried);
    }

    /// Begins the next window at a place in this one.
    fn begin_at(&mut self, place: usize) {
        let carried = place.min(self.carried.len());
        self.carried.drain(..carried);
        self.from += place - carried;
    }

    /// Tokenizes what a window has, as far as more tokens are wanted.
    fn take(&mut self, found: &Found) -> Result<(), Fault> {
        for step in &found.steps {
            match step {
                Step::Name(id) => self.ids.push(*id),
                _ if self.ids.len() > self.max_tokens => {}
                Step::Word(place) => self.add_word(found.text(place))?,
                Step::Part(place) => self.extend_word(found.text(place))?,
                Step::End => self.end_word()?,
            }
        }
        Ok(())
    }

    /// The tokens of a word, with their places in the word.
    fn tokenize(&self, text: &str) -> Result<Vec<Token>, Fault> {
        let mut tokens = self.tokenizer.get_model().tokenize(text)?;
        // The model's offsets do not count a first character that it drops.
        let first = text.chars().next().filter(|&first| self.is_dropped(first, true));
        for token in tokens.iter_mut().filter(|_| first.is_some()) {
            let dropped = first.map_or(0, char::len_utf8);
            token.offsets = (token.offsets.0 + dropped, token.offsets.1 + dropped);
        }
        Ok(tokens)
    }

    fn is_dropped(&self, character: char, is_first: bool) -> bool {
        self.traits.drops_unknown && drops(&self.tokenizer.get_model().0, character, is_first)
    }

    /// Adds a word that lies in one window.
    fn add_word(&mut self, text: &str) -> Result<(), Fault> {
        if text.len() <= self.sizes.word_bytes {
            let model = self.tokenizer.get_model();
            let tokenize = || Ok(model.tokenize(text)?.iter().map(|token| token.id).collect());
            return self.word_cache.add(text, &mut self.ids, tokenize);
        }
        self.extend_word(text)?;
        self.end_word()
    }

    /// Adds more text of a word that goes on.
    fn extend_word(&mut self, text: &str) -> Result<(), Fault> {
        let mut rest = text;
        while !rest.is_empty() && !self.word.is_decided && self.ids.len() <= self.max_tokens {
            let room = self.sizes.word_bytes.saturating_sub(self.word.text.len());
            let (piece, after) = rest.split_at(rest.floor_char_boundary(room));
            if piece.is_empty() {
                self.take_part()?;
            }
            self.push(piece);
            rest = after;
        }
        Ok(())
    }

    /// Adds the characters that the model does not drop to the word, so that offsets in it are valid. The first and the
    /// last character stay: the model looks them up under names of their own.
    fn push(&mut self, piece: &str) {
        if !self.traits.drops_unknown {
            return self.word.text.push_str(piece);
        }
        for character in piece.chars() {
            let last = self.word.text.char_indices().next_back();
            let last = last.filter(|&(place, _)| place > 0 && place >= self.word.done);
            if let Some((place, _)) = last.filter(|&(_, last)| self.is_dropped(last, false)) {
                self.word.text.truncate(place);
            }
            self.word.text.push(character);
        }
    }

    /// Tokenizes the rest of a word that is complete.
    fn end_word(&mut self) -> Result<(), Fault> {
        let word = std::mem::take(&mut self.word);
        if word.text.len() > word.done {
            let tokens = self.tokenize(&word.text)?;
            let tokens = word.new_tokens(&tokens, self.traits.fused_unknown);
            self.ids.extend(tokens.iter().map(|token| token.id));
        }
        Ok(())
    }

    /// Takes the certain tokens from a word that is too long to be tokenized whole.
    fn take_part(&mut self) -> Result<(), Fault> {
        let tokens = self.tokenize(&self.word.text)?;
        if self.traits.whole_words {
            self.ids.extend(tokens.iter().map(|token| token.id));
            self.word = Word { is_decided: true, ..Word::default() };
            return Ok(());
        }
        let text = &self.word.text;
        let limit = text.floor_char_boundary(text.len() - self.sizes.word_margin_bytes.min(text.len()));
        let unknown_end = self.word.unknown_end(&tokens, self.traits.fused_unknown);
        let tokens = self.word.new_tokens(&tokens, self.traits.fused_unknown);
        let mut part = if unknown_end > limit {
            // The unknown token that was taken before goes on, and adds no token.
            Part { tokens: 0, end: limit, ends_unknown: true }
        } else {
            Part::up_to_border(tokens, text, limit, self.traits.fused_unknown)
        };
        if part.end <= self.word.done {
            // There is no border; a part has to end somewhere.
            part = Part { tokens: tokens.len(), end: text.len(), ends_unknown: false };
        }
        self.ids.extend(tokens[..part.tokens].iter().map(|token| token.id));
        // The next part begins like a word. If word beginnings differ, it begins with some known tokens.
        let kept = if self.traits.marks_first { self.sizes.word_margin_bytes.min(part.end) } else { 0 };
        let kept_from = text.floor_char_boundary(part.end - kept);
        self.word.done = part.end - kept_from;
        self.word.ends_unknown = part.ends_unknown;
        self.word.text.drain(..kept_from);
        Ok(())
    }
}

impl Word {
    /// The end of the unknown token that was taken when it began; 0 if none goes on.
    fn unknown_end(&self, tokens: &[Token], fused_unknown: Option<u32>) -> usize {
        let first = tokens.iter().find(|token| token.offsets.0 >= self.done);
        first.filter(|first| self.ends_unknown && Some(first.id) == fused_unknown).map_or(0, |first| first.offsets.1)
    }

    /// The text's tokens that were not taken before.
    fn new_tokens<'a>(&self, tokens: &'a [Token], fused_unknown: Option<u32>) -> &'a [Token] {
        let tokens = &tokens[tokens.iter().take_while(|token| token.offsets.0 < self.done).count()..];
        match tokens.first() {
            // This token was taken when it began.
            Some(_) if self.unknown_end(tokens, fused_unknown) > 0 => &tokens[1..],
            _ => tokens,
        }
    }
}

/// The tokens at the beginning of a word's part that do not depend on the text after the part.
struct Part {
    tokens: usize,
    /// Bytes of the part's text that the tokens cover.
    end: usize,
    ends_unknown: bool,
}

impl Part {
    /// The tokens that end at a character border up to `limit`. A run of unknown characters is a single token, or one token
    /// for each of its bytes, all with the run's offsets; it ends at the limit.
    fn up_to_border(tokens: &[Token], text: &str, limit: usize, fused_unknown: Option<u32>) -> Self {
        let mut part = Self { tokens: 0, end: 0, ends_unknown: false };
        let mut taken = 0;
        for run in tokens.chunk_by(|a, b| a.offsets == b.offsets) {
            let (start, end) = run[0].offsets;
            let is_unknown = run.len() == 1 && Some(run[0].id) == fused_unknown;
            if end <= limit {
                taken += run.len();
                if text.is_char_boundary(end) {
                    part = Self { tokens: taken, end, ends_unknown: false };
                }
                continue;
            }
            if start < limit && text.is_char_boundary(start) {
                if is_unknown {
                    part = Self { tokens: taken + 1, end: limit, ends_unknown: true };
                } else if run.len() > 1 && run.len() == end - start {
                    part = Self { tokens: taken + limit - start, end: limit, ends_unknown: false };
                }
            }
            break;
        }
        part
    }
}
