//! What the engine tells about a job: its start, text, scores, and its end.

use crate::error::ApiError;

/// An event of a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The engine took up the job.
    Started {
        /// Tokens of the prompt, including the end-of-sequence token.
        prompt_tokens: usize,
        /// Whether the prompt was cut, because it was too long.
        is_cut: bool,
    },
    /// More text of an answer.
    Text {
        /// The index of the answer within the job.
        choice: usize,
        /// The text after the earlier texts of this answer.
        text: String,
        /// Number of tokens of the text.
        tokens: usize,
        /// The log-probabilities of these tokens, if they are wanted.
        logprobs: Vec<TokenLogprob>,
    },
    /// The log-probability of a label.
    Scored {
        /// The index of the label within the job.
        choice: usize,
        /// The sum of the log-probabilities of its tokens.
        logprob: f64,
        /// Its number of tokens.
        tokens: usize,
    },
    /// How well a document answers a query.
    Ranked {
        /// The index of the document within the job.
        choice: usize,
        /// The score: higher is better.
        score: f64,
    },
    /// The vector of a text.
    Vector {
        /// The index of the text within the job.
        choice: usize,
        /// Its numbers.
        values: Vec<f32>,
    },
    /// An answer is complete.
    Finished {
        /// The index of the answer within the job.
        choice: usize,
        /// The reason for the end.
        reason: Finish,
    },
    /// The job cannot be answered.
    Failed(ApiError),
}

impl Event {
    /// The index within the job of the answer that the event is about.
    pub(crate) fn choice(&self) -> Option<usize> {
        match self {
            Event::Text { choice, .. }
            | Event::Scored { choice, .. }
            | Event::Ranked { choice, .. }
            | Event::Vector { choice, .. }
            | Event::Finished { choice, .. } => Some(*choice),
            Event::Started { .. } | Event::Failed(_) => None,
        }
    }
}

/// The log-probability of a token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The text of the token.
    pub token: String,
    /// Its log-probability.
    pub logprob: f64,
    /// The likeliest tokens in its place, and their log-probabilities.
    pub likeliest: Vec<(String, f64)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended the answer, or a stop text did.
    Stop,
    /// The answer reached its token limit.
    Length,
}

impl Finish {
    /// OpenAI's name of the reason.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}
