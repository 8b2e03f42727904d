//! The training task. An [`Objective`] names the columns; a prepared objective turns a row into a sample.

mod denoisers;
mod labels;
mod span_corruption;
mod text_to_text;

pub use denoisers::{Denoiser, Noise};
pub use labels::{labels_of_set, words_and_labels};
pub(crate) use span_corruption::MAX_PIECE_BYTES;
pub use span_corruption::{SpanCorruption, noise_mask, tokens_and_targets_length};

use std::ops::Range;

use crate::error::BadValue;
use crate::random::Key;
use crate::row_text::{RowText, TextLocation};
use crate::{Error, LoaderOptions, Tokenizer};

/// The source of a sample.
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
    /// The prompt is the source of two targets, of which one was chosen.
    Preference {
        /// Column of the prompts.
        prompt_column: String,
        /// Column of the chosen answers.
        chosen_column: String,
        /// Column of the rejected answers.
        rejected_column: String,
    },
    /// The prompt is the source of one target, which is desirable or not; or two texts have a score.
    Labelled {
        /// Column of the prompts.
        prompt_column: String,
        /// Column of the answers.
        completion_column: String,
        /// Column of the labels; see [`row_files::truth_of_label`].
        label_column: String,
        /// Whether labels are numbers.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        are_scores: bool,
    },
    /// The prompt is the source, and the response is its label or its number.
    Labels {
        /// Column of the prompts.
        prompt_column: String,
        /// Column of the labels.
        label_column: String,
        /// The labels, in the order of their indices; none: a number.
        labels: Vec<String>,
        /// Whether a source has any number of the labels.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        are_sets: bool,
    },
    /// The words of a row, with a label of each.
    LabelsOfWords {
        /// Column of the words.
        words_column: String,
        /// Column of the labels.
        labels_column: String,
        /// The labels, in the order of their indices.
        labels: Vec<String>,
    },
    /// Lists of sources, with a label of each, from 0 up. The target is one token.
    Lists {
        /// Column of the lists of sources, in JSON.
        texts_column: String,
        /// Column of the lists of labels.
        labels_column: String,
        /// The target of a relevant text, and that of another. They may be equal.
        answers: [u32; 2],
        /// The most texts of a list.
        most: usize,
    },
    /// The source is one text with spans cut out, the target is the spans.
    SpanCorruption {
        /// Column of the texts.
        text_column: String,
        /// The distribution of the spans.
        #[serde(flatten)]
        spans: SpanCorruption,
    },
    /// Source and target are made of one text by one of several denoisers.
    Denoising {
        /// Column of the texts.
        text_column: String,
        /// The denoisers, of which one at least has a weight.
        denoisers: Vec<Denoiser>,
    },
}

impl Objective {
    /// The columns that are read. The values of a row are given to the objective in this order.
    pub fn columns(&self) -> Vec<String> {
        match self {
            Self::TextToText { prompt_column, response_column } => vec![prompt_column.clone(), response_column.clone()],
            Self::Preference { prompt_column, chosen_column, rejected_column } => {
                vec![prompt_column.clone(), chosen_column.clone(), rejected_column.clone()]
            }
            Self::Labelled { prompt_column, completion_column, label_column, .. } => {
                vec![prompt_column.clone(), completion_column.clone(), label_column.clone()]
            }
            Self::Labels { prompt_column, label_column, .. } => vec![prompt_column.clone(), label_column.clone()],
            Self::LabelsOfWords { words_column, labels_column, .. } => {
                vec![words_column.clone(), labels_column.clone()]
            }
            Self::Lists { texts_column, labels_column, .. } => vec![texts_column.clone(), labels_column.clone()],
            Self::SpanCorruption { text_column, .. } | Self::Denoising { text_column, .. } => vec![text_column.clone()],
        }
    }

    /// Whether a row has a source and targets as texts of their own.
    pub fn has_targets(&self) -> bool {
        !matches!(self, Self::SpanCorruption { .. } | Self::Denoising { .. })
    }

    /// Whether targets are texts.
    pub fn is_of_texts(&self) -> bool {
        matches!(self, Self::TextToText { .. } | Self::Preference { .. } | Self::Labelled { .. })
    }

    /// How many samples a row makes, at most.
    pub fn samples_of_a_row(&self) -> usize {
        match self {
            Self::Preference { .. } => 2,
            Self::Lists { most, .. } => *most,
            _ => 1,
        }
    }

    /// The most tokens of a target, given the limits for source and target texts.
    pub fn max_target_tokens(&self, [source, target]: [usize; 2]) -> usize {
        match self {
            Self::Labels { labels, are_sets: true, .. } => labels.len().max(2),
            Self::Labels { .. } | Self::Lists { .. } => 2,
            Self::LabelsOfWords { .. } => source,
            _ => target,
        }
    }

    /// Whether a column has labels instead of texts.
    pub(crate) fn is_label(&self, column: usize) -> bool {
        matches!(self, Self::Labelled { .. }) && column == 2
    }

    /// The label that a text is.
    ///
    /// # Errors
    /// The text is none.
    pub(crate) fn judged(&self, text: &str) -> Result<Judged, BadValue> {
        match self {
            Self::Labelled { are_scores: true, .. } => {
                row_files::score_of_label(text).map(Judged::Score).ok_or(BadValue::NotANumber)
            }
            _ => row_files::truth_of_label(text).map(Judged::Truth).ok_or(BadValue::NoLabel),
        }
    }

    /// Bytes of a column's values that are read with their batch: enough for the tokens of usual text, or a whole
    /// piece.
    pub(crate) fn read_bytes(&self, column: usize, options: &LoaderOptions, tokenizer: &Tokenizer) -> u64 {
        match self {
            Self::TextToText { .. } | Self::Preference { .. } | Self::Labelled { .. } => {
                let tokens = if column == 0 { options.max_source_tokens } else { options.max_target_tokens };
                tokenizer.windows(tokens).usual_bytes(tokens) as u64
            }
            Self::SpanCorruption { .. } | Self::Denoising { .. } => MAX_PIECE_BYTES,
            // A list is read whole.
            Self::Lists { .. } => row_files::MAX_ROW_BYTES as u64,
            Self::Labels { .. } if column == 0 => {
                tokenizer.windows(options.max_source_tokens).usual_bytes(options.max_source_tokens) as u64
            }
            Self::Labels { .. } | Self::LabelsOfWords { .. } => MAX_PIECE_BYTES,
        }
    }
}

/// What a row says of its target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Judged {
    /// Whether it is desirable.
    Truth(bool),
    /// How near it is.
    Score(f64),
}

/// Token lengths and ids that every objective needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleLimits {
    /// Most tokens of a source, including the end-of-sequence token.
    pub max_source_tokens: usize,
    /// Most tokens of a target, including the end-of-sequence token.
    pub max_target_tokens: usize,
    /// The id at the end of every source and every target.
    pub eos_id: u32,
    /// The decoder's first input, if known.
    pub decoder_start_id: Option<u32>,
}

/// One sample as token ids, end-of-sequence tokens included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    pub source: Vec<u32>,
    pub target: Vec<u32>,
    /// The target that was not chosen, if the objective has such.
    pub rejected: Option<Vec<u32>>,
    pub source_was_cut: bool,
    pub target_was_cut: bool,
}

/// A value that cannot be used, by its index in [`Objective::columns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub column: usize,
    pub value: BadValue,
}

/// An objective with everything computed that does not depend on a row.
pub(crate) enum Prepared {
    /// The limits, and the ids to put before every source, and before every target. Of preferences too.
    TextToText(SampleLimits, [Vec<u32>; 2]),
    /// Span corruption, too.
    Denoising(denoisers::Prepared),
    /// With the tokens that begin a source, the labels, and whether a source has any number of them.
    Labels(SampleLimits, Vec<u32>, Vec<String>, bool),
    LabelsOfWords(SampleLimits, Vec<u32>, Vec<String>),
    /// With the targets of relevant texts and of others.
    Lists(SampleLimits, [u32; 2]),
}

/// The tokens of a text, and whether it was cut.
pub type Encoded = (Vec<u32>, bool);

impl Prepared {
    pub fn new(objective: &Objective, limits: SampleLimits, tokenizer: &Tokenizer) -> Result<Self, Error> {
        for (key, tokens) in
            [("data.max_source_tokens", limits.max_source_tokens), ("data.max_target_tokens", limits.max_target_tokens)]
        {
            if tokens < 2 {
                return Err(Error::Options(format!("`{key}` is {tokens}: expected at least 2, for one token and EOS")));
            }
        }
        Ok(match objective {
            Objective::TextToText { .. } | Objective::Preference { .. } | Objective::Labelled { .. } => {
                let of_source = tokenizer.start_ids();
                // The decoder's first input may be the start already, such as `<bos>` of T5Gemma.
                let of_target = if of_source == limits.decoder_start_id.as_slice() { &[] } else { of_source };
                Self::TextToText(limits, [of_source, of_target].map(<[u32]>::to_vec))
            }
            Objective::Labels { labels, are_sets, .. } => {
                Self::Labels(limits, tokenizer.start_ids().to_vec(), labels.clone(), *are_sets)
            }
            Objective::LabelsOfWords { labels, .. } => {
                Self::LabelsOfWords(limits, tokenizer.start_ids().to_vec(), labels.clone())
            }
            Objective::Lists { answers, .. } => Self::Lists(limits, *answers),
            Objective::SpanCorruption { spans, .. } => {
                Self::Denoising(denoisers::Prepared::new(&[Denoiser::spans(*spans)], limits, tokenizer)?)
            }
            Objective::Denoising { denoisers, .. } => {
                Self::Denoising(denoisers::Prepared::new(denoisers, limits, tokenizer)?)
            }
        })
    }

    /// The range to read of a value of `bytes` bytes, if at most `most` bytes of its column are read. `key` is the
    /// row's own.
    pub fn read_part(&self, bytes: u64, most: u64, key: Key) -> Range<u64> {
        match self {
            Self::Denoising(_) => span_corruption::piece(bytes, key),
            _ => 0..bytes.min(most),
        }
    }

    /// The text of a value of `bytes` bytes. `held` are the bytes of the range [`read_part`](Self::read_part).
    pub fn text<'a>(
        &self,
        place: TextLocation<'a>,
        bytes: u64,
        held: &'a [u8],
        key: Key,
        stop: &'a dyn Fn() -> bool,
    ) -> RowText<'a> {
        match self {
            Self::Denoising(_) => {
                let piece = span_corruption::within_characters(held, span_corruption::piece(bytes, key), bytes);
                RowText::new(place, piece.len(), piece, stop)
            }
            _ => RowText::new(place, bytes as usize, held, stop),
        }
    }

    /// The most tokens of a column's text that a sample uses.
    pub fn most_tokens(&self, column: usize) -> usize {
        match self {
            Self::TextToText(limits, _) if column == 0 => limits.max_source_tokens,
            Self::TextToText(limits, _) => limits.max_target_tokens,
            Self::Labels(limits, ..) | Self::LabelsOfWords(limits, ..) | Self::Lists(limits, ..) => {
                limits.max_source_tokens
            }
            Self::Denoising(_) => usize::MAX,
        }
    }

    /// Makes the sample of one row from the tokens of its texts, which are in the order of [`Objective::columns`].
    pub fn sample(&self, ids: Vec<Vec<u32>>, key: Key) -> Sample {
        match self {
            Self::TextToText(limits, [of_source, of_target]) => {
                let mut ids = ids;
                let starts = std::iter::once(of_source).chain(std::iter::repeat(of_target));
                ids.iter_mut().zip(starts).for_each(|(ids, start)| drop(ids.splice(0..0, start.iter().copied())));
                let mut ids = ids.into_iter();
                let (Some(source), Some(target)) = (ids.next(), ids.next()) else {
                    unreachable!("a prompt and a response");
                };
                let mut sample = text_to_text::sample(source, target, limits);
                if let Some(rejected) = ids.next() {
                    let of = text_to_text::sample(Vec::new(), rejected, limits);
                    sample.target_was_cut |= of.target_was_cut;
                    sample.rejected = Some(of.target);
                }
                sample
            }
            Self::Labels(limits, start, ..) => {
                let [mut source, label] = <[Vec<u32>; 2]>::try_from(ids).expect("a prompt and a label");
                source.splice(0..0, start.iter().copied());
                Sample { target: label, target_was_cut: false, ..text_to_text::sample(source, Vec::new(), limits) }
            }
            Self::LabelsOfWords(..) | Self::Lists(..) => unreachable!("lists are samples already"),
            Self::Denoising(denoisers) => {
                let [text] = <[Vec<u32>; 1]>::try_from(ids).expect("one text");
                denoisers.sample(&text, key)
            }
        }
    }

    /// The label that a text is, or for each label whether the text has it, in place of tokens.
    ///
    /// # Errors
    /// The text is none of the labels, or no number.
    pub fn labels(&self, text: &str) -> Result<Vec<u32>, BadValue> {
        match self {
            Self::Labels(_, _, labels, true) => labels::label_set(text, labels),
            Self::Labels(_, _, labels, false) => Ok(vec![labels::label(text, labels)?]),
            _ => unreachable!("a task without labels"),
        }
    }

    /// Whether a row is a sample where this column has an empty text: it is then no label of a set.
    pub fn may_be_empty(&self, column: usize) -> bool {
        column > 0 && matches!(self, Self::Labels(_, _, _, true))
    }

    /// Whether this column has a label, or words with labels, rather than a text.
    pub fn is_of_labels(&self, column: usize) -> bool {
        matches!(self, Self::LabelsOfWords(..) | Self::Lists(..)) || column > 0 && matches!(self, Self::Labels(..))
    }

    /// The samples of a list, with their labels, from the list of sources and that of labels. `encode` makes tokens of a source, and says whether
    /// it was cut. `None`: the row is of another task.
    ///
    /// # Errors
    /// [`BadValue`], or an error of `encode`.
    pub fn samples_of_list<E: From<BadValue>>(
        &self,
        [texts, labels]: [&str; 2],
        encode: &dyn Fn(&str, usize) -> Result<Encoded, E>,
    ) -> Result<Option<Vec<(Sample, f64)>>, E> {
        let Self::Lists(limits, answers) = self else { return Ok(None) };
        let texts: Vec<String> = serde_json::from_str(texts).map_err(|_| BadValue::NoList)?;
        let labels: Vec<f64> = serde_json::from_str(labels).map_err(|_| BadValue::NotANumber)?;
        if texts.len() != labels.len() {
            return Err(BadValue::UnequalLists.into());
        }
        let sample = |(text, label): (String, f64)| {
            let (mut source, source_was_cut) = encode(&text, limits.max_source_tokens - 1)?;
            source.push(limits.eos_id);
            source.shrink_to_fit(); // The bill counts the bytes of ids that wait in the queue.
            let target = vec![answers[usize::from(label <= 0.0)]];
            Ok((Sample { source, target, source_was_cut, ..Sample::default() }, label))
        };
        texts.into_iter().zip(labels).map(sample).collect::<Result<_, E>>().map(Some)
    }

    /// The sample of a row of words and their labels. `prefix` are tokens before them. `None`: the row is of another task.
    ///
    /// # Errors
    /// [`BadValue`] with its column, or an error of `encode`.
    pub fn sample_of_words<E: From<BadValue>>(
        &self,
        [text, labels]: [&str; 2],
        prefix: &[u32],
        encode: &dyn Fn(&str) -> Result<Vec<u32>, E>,
    ) -> Result<Option<Sample>, E> {
        let Self::LabelsOfWords(limits, start, names) = self else { return Ok(None) };
        let pairs = words_and_labels(text, labels)?;
        let start = [start, prefix].concat();
        labels::sample_of_words(&pairs, &start, (names, limits), encode).map(Some)
    }
}

impl Default for Objective {
    /// Text to text over the columns `prompt` and `response`.
    fn default() -> Self {
        Self::TextToText { prompt_column: "prompt".to_owned(), response_column: "response".to_owned() }
    }
}
