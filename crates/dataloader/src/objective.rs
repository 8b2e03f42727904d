//! What a row is turned into: [`Objective`] names the columns, a prepared objective makes the sample.

mod span_corruption;
mod text_to_text;

pub use span_corruption::{SpanCorruption, noise_mask, tokens_and_targets_length};

use crate::error::BadValue;
use crate::random::Key;
use crate::tokenizer::FIRST_TRY_BYTES_PER_TOKEN;
use crate::{Error, Tokenizer};

/// What a sample is made from.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "name", rename_all = "kebab-case")]
pub enum Objective {
    /// The prompt is the source, the response is the target.
    TextToText {
        /// Column of the prompts.
        prompt_column: String,
        /// Column of the responses.
        response_column: String,
    },
    /// The source is one text with spans cut out, the target is the spans.
    SpanCorruption {
        /// Column of the texts.
        text_column: String,
        /// How the spans are drawn.
        #[serde(flatten)]
        spans: SpanCorruption,
    },
}

impl Objective {
    /// The columns that are read, in the order in which the values of a row are given to the objective.
    pub fn columns(&self) -> Vec<String> {
        match self {
            Self::TextToText { prompt_column, response_column } => vec![prompt_column.clone(), response_column.clone()],
            Self::SpanCorruption { text_column, .. } => vec![text_column.clone()],
        }
    }
}

/// Token lengths and ids that every objective needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleLimits {
    /// Tokens of a source at most, the end-of-sequence token included.
    pub max_source_tokens: usize,
    /// Tokens of a target at most, the end-of-sequence token included.
    pub max_target_tokens: usize,
    /// Ends every source and every target.
    pub eos_id: u32,
}

/// One sample as token ids, end-of-sequence tokens included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    pub source: Vec<u32>,
    pub target: Vec<u32>,
    pub source_was_cut: bool,
    pub target_was_cut: bool,
}

/// A value that cannot be used, by its index in [`Objective::columns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub column: usize,
    pub value: BadValue,
}

/// Bytes of text that one sample tokenizes at a time, at most, for texts of more than one word.
pub(crate) fn tokenized_bytes(objective: &Objective, max_tokens: usize) -> u64 {
    match objective {
        Objective::TextToText { .. } => (max_tokens * FIRST_TRY_BYTES_PER_TOKEN) as u64,
        Objective::SpanCorruption { .. } => span_corruption::MAX_TEXT_BYTES as u64,
    }
}

/// An objective with everything that can be computed before the first row.
pub(crate) enum Prepared {
    TextToText(SampleLimits),
    SpanCorruption(span_corruption::Prepared),
}

impl Prepared {
    pub fn new(objective: &Objective, limits: SampleLimits, tokenizer: &Tokenizer) -> Result<Self, Error> {
        for (key, tokens) in
            [("data.max_source_tokens", limits.max_source_tokens), ("data.max_target_tokens", limits.max_target_tokens)]
        {
            if tokens < 2 {
                return Err(Error::Options(format!("`{key}` is {tokens}: expected at least 2, a token and its end")));
            }
        }
        Ok(match objective {
            Objective::TextToText { .. } => Self::TextToText(limits),
            Objective::SpanCorruption { spans, .. } => {
                Self::SpanCorruption(span_corruption::Prepared::new(*spans, limits, &tokenizer.sentinels())?)
            }
        })
    }

    /// Makes the sample of one row. `key` is the row's own; `texts` follow [`Objective::columns`].
    pub fn sample(&self, texts: &[&str], key: Key, tokenizer: &Tokenizer) -> Result<Result<Sample, Refused>, Error> {
        let mut ids = Vec::with_capacity(texts.len());
        for (column, text) in texts.iter().enumerate() {
            let of_text = match (self, column) {
                (Self::TextToText(limits), 0) => tokenizer.encode_start(text, limits.max_source_tokens)?,
                (Self::TextToText(limits), _) => tokenizer.encode_start(text, limits.max_target_tokens)?,
                (Self::SpanCorruption(_), _) => tokenizer.encode(span_corruption::piece(text, key))?,
            };
            if of_text.is_empty() {
                // White space that the tokenizer strips, for one.
                return Ok(Err(Refused { column, value: BadValue::Empty }));
            }
            ids.push(of_text);
        }
        Ok(Ok(match self {
            Self::TextToText(limits) => {
                let [source, target] = <[Vec<u32>; 2]>::try_from(ids).expect("a prompt and a response");
                text_to_text::sample(source, target, limits)
            }
            Self::SpanCorruption(spans) => {
                let [text] = <[Vec<u32>; 1]>::try_from(ids).expect("one text");
                spans.sample(&text, key)
            }
        }))
    }
}

impl Default for Objective {
    /// Text to text over the columns `prompt` and `response`.
    fn default() -> Self {
        Self::TextToText { prompt_column: "prompt".to_owned(), response_column: "response".to_owned() }
    }
}
