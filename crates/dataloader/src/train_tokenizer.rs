//! Trains a T5 tokenizer: byte-level BPE, made for mixed Chinese and English.
//!
//! Text is first cut into words: single digits (numbers are spelled, so arithmetic can be learned), runs of Han
//! characters, and runs of other letters or of punctuation with the space before them. Merges never cross a word. The
//! alphabet is the 256 bytes. So no text is unknown, every text decodes to itself byte for byte, and a rare character
//! costs a few tokens instead of an entry in the vocabulary.
//!
//! Ids are laid out like T5's: `<pad>` 0, `</s>` 1, `<unk>` 2 (never produced), the bytes, the merges, and the
//! sentinels, with `<extra_id_0>` as the very last id.
//!
//! Invariants: the result is a function of the texts in their order and of [`TokenizerTraining`], not of threads
//! or hash seeds; memory is bounded by [`TokenizerTraining::max_bytes`], however long the texts are.
//!
//! BPE: Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword Units", ACL 2016.
//! Bytes as the alphabet: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, 2.2.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use row_files::ReadOptions;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{
    AddedToken, Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior,
};

use crate::texts::TextFiles;
use crate::{Error, bpe};

/// Cuts text into the words that merges never cross. `fancy-regex` reads it here and Oniguruma in Python, so it uses
/// only syntax that both treat alike. It has no look-around, so matching is linear.
const WORDS: &str = r"\p{N}|\p{Han}+| ?[^\s\p{Han}\p{N}\p{P}\p{S}]+| ?[\p{P}\p{S}]+|\s+";

const SPECIAL: [&str; 3] = ["<pad>", "</s>", "<unk>"];
const BYTES: usize = 256;
/// Longer words are counted in pieces of this many bytes, so that no text makes training quadratic.
const MAX_WORD_BYTES: usize = 256;

/// Settings of the training. The default is a T5-sized vocabulary.
#[derive(Clone, Debug)]
pub struct TokenizerTraining {
    /// Tokens, including special tokens and sentinels. The result has fewer if the texts have too few words.
    pub vocab_size: usize,
    /// Sentinels `<extra_id_N>` for span corruption.
    pub sentinels: usize,
    /// A pair is merged only if it occurs at least this often.
    pub min_frequency: u64,
    /// Words are counted in about this many bytes at most; beyond, the rarest words are forgotten. Learning the merges
    /// takes about four times as much.
    pub max_counted_bytes: usize,
}

/// The most bytes that a counted byte takes, first in the table of words and then while merges are learned.
const LEARNING_BYTES_PER_COUNTED: u64 = 6;
/// Memory of a vocabulary entry, in the tokenizer and in its file. An estimate with room.
const ENTRY_OF_TOKENIZER_BYTES: u64 = 1536;
/// Memory for cutting a piece of text into words, and other fixed memory.
const CUTTING_BYTES: u64 = 6 << 20;
/// The smallest table of words with which training learns a useful vocabulary.
const MIN_COUNTED_BYTES: u64 = 512 << 10;

impl TokenizerTraining {
    /// The most bytes that training takes, without reading the texts.
    pub fn max_bytes(&self) -> u64 {
        self.max_counted_bytes as u64 * LEARNING_BYTES_PER_COUNTED + self.fixed_bytes()
    }

    /// Returns these settings with the table of words reduced to fit `bytes`. The table never grows.
    ///
    /// # Errors
    /// The bytes that would be needed.
    pub fn within(&self, bytes: u64) -> Result<Self, u64> {
        let least = self.fixed_bytes() + MIN_COUNTED_BYTES * LEARNING_BYTES_PER_COUNTED;
        if bytes < least {
            return Err(least);
        }
        let counted = (bytes - self.fixed_bytes()) / LEARNING_BYTES_PER_COUNTED;
        Ok(Self { max_counted_bytes: self.max_counted_bytes.min(counted as usize), ..self.clone() })
    }

    fn fixed_bytes(&self) -> u64 {
        CUTTING_BYTES + self.vocab_size as u64 * ENTRY_OF_TOKENIZER_BYTES
    }

    /// # Errors
    /// [`Error::Options`] when `vocab_size` has no room for the bytes, the special tokens and the sentinels.
    pub fn check(&self) -> Result<(), Error> {
        let smallest = (SPECIAL.len() + BYTES).saturating_add(self.sentinels);
        if self.vocab_size >= smallest {
            return Ok(());
        }
        Err(Error::Options(format!(
            "a vocabulary of {} is too small: expected at least {smallest} ({} special tokens, {BYTES} bytes, {} sentinels)",
            self.vocab_size,
            SPECIAL.len(),
            self.sentinels
        )))
    }
}

impl Default for TokenizerTraining {
    fn default() -> Self {
        Self { vocab_size: 32_100, sentinels: 100, min_frequency: 2, max_counted_bytes: 32 << 20 }
    }
}

/// The result of training.
#[derive(Clone, Debug)]
pub struct TrainedTokenizer {
    /// The bytes of `tokenizer.json`.
    pub json: Vec<u8>,
    /// Tokens in it.
    pub vocab_size: usize,
    /// Texts read.
    pub texts: u64,
    /// Bytes of text read.
    pub text_bytes: u64,
    /// True when rare words were forgotten to stay within `max_counted_bytes`.
    pub pruned: bool,
    /// Values of parquet files of which only the beginning was read.
    pub long_values: u64,
}

/// Trains a tokenizer on files: the lines of text files, and the values of parquet files' string columns. If `columns`
/// is empty, all string columns are used. Files are streamed.
///
/// The result is bytes. The caller writes them, with its one function that writes files atomically.
///
/// # Errors
/// Errors of reading a file, and those of [`train_tokenizer_on`].
pub fn train_tokenizer(
    inputs: &[PathBuf],
    columns: &[String],
    training: &TokenizerTraining,
) -> Result<TrainedTokenizer, Error> {
    train_tokenizer_on_files(&TextFiles::open(inputs, columns, &ReadOptions::default())?, training)
}

/// Trains a tokenizer on files that have been opened and checked.
///
/// # Errors
/// The same as for [`train_tokenizer`].
pub fn train_tokenizer_on_files(files: &TextFiles, training: &TokenizerTraining) -> Result<TrainedTokenizer, Error> {
    let long_values = std::cell::Cell::new(0);
    let trained = train_tokenizer_on(files.texts(&long_values), training)?;
    Ok(TrainedTokenizer { long_values: long_values.get(), ..trained })
}

/// Trains a tokenizer on `texts`, read once and in order.
///
/// # Errors
/// The first error of `texts`; those of [`TokenizerTraining::check`]; [`Error::Training`] when there is no text.
pub fn train_tokenizer_on(
    texts: impl IntoIterator<Item = Result<String, Error>>,
    training: &TokenizerTraining,
) -> Result<TrainedTokenizer, Error> {
    training.check()?;
    let splitter = word_splitter()?;
    let mut words = WordCounts::new(training.max_counted_bytes);
    let (mut read, mut text_bytes) = (0, 0);
    for text in texts {
        let text = text?;
        read += 1;
        text_bytes += text.len() as u64;
        words.count(&text, &splitter)?;
    }
    if words.counts.is_empty() {
        return Err(Error::Training("the inputs contain no text".to_owned()));
    }
    let pruned = words.forgotten > 0;
    let tokenizer = assemble(words, training)?;
    let json = tokenizer.to_string(true).map_err(failed)?.into_bytes();
    let vocab_size = tokenizer.get_vocab_size(true);
    Ok(TrainedTokenizer { json, vocab_size, texts: read, text_bytes, pruned, long_values: 0 })
}

/// Learns the merges and builds the tokenizer from them.
fn assemble(words: WordCounts, training: &TokenizerTraining) -> Result<tokenizers::Tokenizer, Error> {
    let letters = byte_letters();
    let mut alphabet: [u8; BYTES] = std::array::from_fn(|byte| byte as u8);
    alphabet.sort_unstable_by_key(|&byte| letters[usize::from(byte)]);
    let symbols = training.vocab_size - training.sentinels - SPECIAL.len();
    let learned = bpe::learn(words.counts, &alphabet, symbols, training.min_frequency);

    let spelled = |symbol: u32| -> String {
        learned.symbols[symbol as usize].iter().map(|&byte| letters[usize::from(byte)]).collect()
    };
    let tokens = (0..learned.symbols.len() as u32).map(|symbol| (spelled(symbol), symbol + SPECIAL.len() as u32));
    let specials = (0..).zip(SPECIAL).map(|(id, name)| (name.to_owned(), id));
    // A merge's rank is looked up by its pair, so a pair may have only one rank.
    let mut seen = HashSet::new();
    let merges = learned.merges.iter().filter(|merge| seen.insert(merge.pair));
    let merges = merges.map(|merge| (spelled(merge.pair.0), spelled(merge.pair.1))).collect();
    let bpe = BPE::builder()
        .vocab_and_merges(specials.chain(tokens).collect::<Vocab>(), merges)
        .unk_token("<unk>".to_owned())
        .build()
        .map_err(failed)?;
    let eos = bpe.token_to_id("</s>").expect("it was put there");

    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    let template = TemplateProcessing::builder()
        .try_single("$A </s>")
        .and_then(|template| template.try_pair("$A </s> $B </s>"))
        .map_err(failed)?
        .special_tokens(vec![("</s>", eos)])
        .build()
        .map_err(failed)?;
    let bytes = ByteLevel::new(false, false, false);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![word_splitter()?.into(), bytes.into()])));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.with_post_processor(Some(template));
    let special = |name: &str| AddedToken::from(name, true);
    tokenizer.add_special_tokens(SPECIAL.map(special)).map_err(failed)?;
    let sentinels = (0..training.sentinels).rev().map(|number| special(&format!("<extra_id_{number}>")));
    tokenizer.add_special_tokens(sentinels.collect::<Vec<_>>()).map_err(failed)?;
    Ok(tokenizer)
}

/// The letter for each byte in a byte-level vocabulary: the byte itself if it is printable, else the next letter from
/// U+0100 on. (`bytes_to_unicode` in openai/gpt-2, `src/encoder.py`)
fn byte_letters() -> [char; BYTES] {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = (0x100_u32..).map(|letter| char::from_u32(letter).expect("far below the surrogates"));
    std::array::from_fn(|byte| {
        let byte = byte as u8;
        if is_printable(byte) { char::from(byte) } else { others.next().expect("there are enough letters") }
    })
}

fn word_splitter() -> Result<Split, Error> {
    let words = SplitPattern::Regex(WORDS.to_owned());
    Split::new(words, SplitDelimiterBehavior::Isolated, false).map_err(failed)
}

/// Words and how often they occur, in bounded memory.
///
/// When the table is full, every word seen no more often than a rising threshold is forgotten, as in word2vec
/// (`ReduceVocab` in Mikolov et al.'s word2vec.c). The forgotten words depend on the order of the texts only.
struct WordCounts {
    counts: HashMap<String, u64>,
    bytes: usize,
    max_bytes: usize,
    forgotten: u64,
}

/// Approximate bytes of an entry of the table, without its letters.
const ENTRY_BYTES: usize = 64;

impl WordCounts {
    fn new(max_bytes: usize) -> Self {
        Self { counts: HashMap::new(), bytes: 0, max_bytes, forgotten: 0 }
    }

    fn count(&mut self, text: &str, splitter: &Split) -> Result<(), Error> {
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(piece_end(rest));
            self.count_piece(piece, splitter)?;
            rest = after;
        }
        Ok(())
    }

    fn count_piece(&mut self, text: &str, splitter: &Split) -> Result<(), Error> {
        let mut cut = PreTokenizedString::from(text);
        splitter.pre_tokenize(&mut cut).map_err(failed)?;
        for (word, ..) in cut.get_splits(OffsetReferential::Original, OffsetType::None) {
            let mut rest = word;
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rest.floor_char_boundary(MAX_WORD_BYTES));
                self.add(piece);
                rest = after;
            }
        }
        if self.bytes > self.max_bytes {
            self.forget();
        }
        Ok(())
    }

    fn add(&mut self, word: &str) {
        if let Some(count) = self.counts.get_mut(word) {
            *count += 1;
        } else {
            self.bytes += word.len() + ENTRY_BYTES;
            self.counts.insert(word.to_owned(), 1);
        }
    }

    fn forget(&mut self) {
        // Forgets down to half, so that it is rarely needed.
        while self.bytes > self.max_bytes / 2 {
            self.forgotten += 1;
            let threshold = self.forgotten;
            self.counts.retain(|_, count| *count > threshold);
            self.bytes = self.counts.keys().map(|word| word.len() + ENTRY_BYTES).sum();
        }
        self.counts.shrink_to_fit();
    }
}

/// The place to cut a long text, so that cutting it into words costs little at a time. It is before white space, where a
/// word ends anyway, or else within a word that is counted in pieces.
fn piece_end(text: &str) -> usize {
    const PIECE_BYTES: usize = 8 << 10;
    let end = text.floor_char_boundary(PIECE_BYTES);
    if end == text.len() {
        return end;
    }
    let words_end = |at: &usize| {
        let (before, after) = text.split_at(*at);
        !before.ends_with(char::is_whitespace) && after.starts_with(char::is_whitespace)
    };
    (1..=end).rev().filter(|&at| text.is_char_boundary(at)).find(words_end).unwrap_or(end)
}

fn failed(error: impl ToString) -> Error {
    Error::Training(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokenizer;
    use std::path::Path;

    const TEXTS: [&str; 6] = [
        "the cat sat on the mat, the cat sat",
        "显存不足时，训练器会减小微批大小。显存不足！",
        "on 2024-03-15 the trainer used 512 MiB",
        "训练 T5 on mixed 中文 and English text",
        "the the the 训练器 训练器",
        "tabs\tand\nlines  and   spaces",
    ];

    fn train(vocab_size: usize) -> TrainedTokenizer {
        let training = TokenizerTraining { vocab_size, ..TokenizerTraining::default() };
        train_tokenizer_on(TEXTS.iter().map(|text| Ok((*text).to_owned())), &training).unwrap()
    }

    fn load(trained: &TrainedTokenizer) -> Tokenizer {
        Tokenizer::from_bytes(&trained.json, Path::new("trained.json")).unwrap()
    }

    #[test]
    fn the_same_texts_always_give_the_same_bytes() {
        assert!((0..5).all(|_| train(420).json == train(420).json));
    }

    #[test]
    fn common_words_become_tokens_and_digits_stay_single() {
        let tokenizer = load(&train(420));
        for (text, tokens) in [(" the", 1), ("训练器", 1), ("2024", 4), (" 512", 4)] {
            assert_eq!(tokenizer.encode(text).unwrap().len(), tokens, "{text}");
        }
    }

    #[test]
    fn text_of_any_script_decodes_to_itself_though_never_seen_in_training() {
        let tokenizer = load(&train(360));
        for text in ["ὕδωρ", "👩‍👩‍👧 🇨🇳", "龘靐齉", " leading", "trailing ", "\u{0}\u{7f}\u{85}", "a\r\n\tb"]
        {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
        }
    }

    #[test]
    fn a_vocabulary_without_room_for_the_bytes_is_refused() {
        let training = TokenizerTraining { vocab_size: 300, ..TokenizerTraining::default() };
        let error = train_tokenizer_on([Ok("text".to_owned())], &training).unwrap_err().to_string();
        assert!(error.contains("expected at least 359"), "{error}");
    }

    #[test]
    fn no_text_at_all_is_an_error_and_few_words_give_a_smaller_vocabulary() {
        let training = TokenizerTraining { vocab_size: 1000, ..TokenizerTraining::default() };
        assert!(train_tokenizer_on([], &training).is_err());
        assert!(train_tokenizer_on([Ok(String::new())], &training).is_err());
        let trained = train_tokenizer_on([Ok("abc abc abc".to_owned())], &training).unwrap();
        assert!(trained.vocab_size < 1000 && load(&trained).vocab_size() == trained.vocab_size);
    }

    #[test]
    fn counting_words_stays_within_its_memory_and_keeps_the_common_ones() {
        let training =
            TokenizerTraining { vocab_size: 420, max_counted_bytes: 100_000, ..TokenizerTraining::default() };
        let texts = (0..20_000).map(|number: u64| {
            let rare: String = number.to_string().bytes().map(|digit| char::from(digit + 49)).collect();
            Ok(format!("common words {rare}"))
        });
        let trained = train_tokenizer_on(texts, &training).unwrap();
        assert!(trained.pruned);
        assert_eq!(load(&trained).encode(" words").unwrap().len(), 1);
    }

    #[test]
    fn a_very_long_word_is_counted_in_pieces() {
        let training = TokenizerTraining { vocab_size: 420, ..TokenizerTraining::default() };
        let text = "存".repeat(100_000);
        let trained = train_tokenizer_on([Ok(text.clone())], &training).unwrap();
        let tokenizer = load(&trained);
        assert_eq!(tokenizer.decode(&tokenizer.encode(&text).unwrap()).unwrap(), text);
    }

    #[test]
    fn a_long_text_has_the_words_of_its_lines() {
        let lines: Vec<String> = (0..3000).map(|n| format!("line {n}  of words, {}", "天地".repeat(n % 7))).collect();
        let mut whole = WordCounts::new(1 << 30);
        let mut pieces = WordCounts::new(1 << 30);
        let text = lines.join("\n");
        whole.count_piece(&text, &word_splitter().unwrap()).unwrap();
        pieces.count(&text, &word_splitter().unwrap()).unwrap();
        assert!(whole.counts == pieces.counts);
    }

    #[test]
    fn a_training_within_a_budget_counts_fewer_words_and_never_takes_more() {
        let training = TokenizerTraining { vocab_size: 1000, ..TokenizerTraining::default() };
        for bytes in [12 << 20, 40 << 20, 100 << 20, 1 << 30] {
            let within = training.within(bytes).unwrap();
            assert!(within.max_bytes() <= bytes && within.max_counted_bytes <= training.max_counted_bytes);
        }
        assert_eq!(training.within(1 << 40).unwrap().max_counted_bytes, training.max_counted_bytes);
        assert!(training.within(1 << 20).unwrap_err() > 1 << 20);
    }
}
