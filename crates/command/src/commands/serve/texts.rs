//! Texts that get a score or a vector instead of an answer.

use candle_core::DType;
use openai_server::{ApiError, Event, Job, Wanted};
use t5::{EvalContext, Head, T5};

use super::fair::Waiting;
use super::models::Served;
use crate::answers::ranker::Ranker;
use crate::answers::vectors::{Vectors, normalize};
use crate::failure::{Failure, Outcome};

/// A text that was taken up.
pub struct Text {
    pub job: Job,
    pub source: Vec<u32>,
    /// The bytes of computing it alone.
    pub bytes: u64,
}

impl Text {
    /// The text with its key, as [`Fair`](super::fair::Fair) sees it: those of one model and of one kind are computed together.
    pub fn waiting(&self, key: u64) -> Waiting<(usize, bool)> {
        Waiting { key, share: self.job.share, tokens: self.source.len(), kind: (self.job.model, is_ranked(&self.job)) }
    }
}

/// Refuses what a model does not do.
pub fn check(served: &Served, wanted: Wanted) -> Result<(), ApiError> {
    let (name, head) = (&served.name, &served.config.head);
    let message = match (wanted, head) {
        (Wanted::Answers, Head::Language) | (Wanted::Vector(_), Head::Encoder) => return Ok(()),
        (Wanted::Score, Head::Language | Head::Sequence(_)) => match &served.ranking {
            Ok(_) => return Ok(()),
            Err(reason) => format!("`{name}` ranks nothing: {reason}"),
        },
        (Wanted::Answers | Wanted::Score, Head::Encoder) => {
            format!("`{name}` is an encoder: it has vectors of texts, and no text of its own; ask /v1/embeddings")
        }
        (Wanted::Answers, _) => format!("`{name}` gives a number for a text, and no text; ask /v1/rerank"),
        (Wanted::Vector(_), _) => format!("`{name}` is no encoder; vectors are made by a server of one"),
        (Wanted::Score, Head::Tokens(_)) => format!("`{name}` ranks nothing"),
    };
    Err(ApiError::new(400, "not_supported", message))
}

/// What is told about some sources. `between` is called before every block of the model.
pub fn events(
    served: &Served,
    model: &T5,
    vectors: Option<&Vectors>,
    (batch, activations): (&[Text], DType),
    between: &dyn Fn(),
) -> Outcome<Vec<Event>> {
    let sources: Vec<&[u32]> = batch.iter().map(|text| text.source.as_slice()).collect();
    if batch.iter().any(|text| is_ranked(&text.job)) {
        let Ok((ranker, _)) = &served.ranking else { return Err(Failure::internal("a model without scores")) };
        let context = EvalContext { activations, loss_chunk_rows: sources.len() };
        let is_share = matches!(ranker, Ranker::Answers(tokens) if tokens.len() == 2);
        // The probability of the first of two answers.
        let event = |score: f64| Event::Ranked { choice: 0, score: if is_share { score.exp() } else { score } };
        return Ok(ranker.scores(model, &sources, context, between)?.into_iter().map(event).collect());
    }
    let Some(vectors) = vectors else { return Err(Failure::internal("a model without vectors")) };
    let made = vectors.compute(model, &sources, between)?;
    let cut = |(values, text): (&[f32], &Text)| {
        let mut values = values.to_vec();
        if let Wanted::Vector(Some(most)) = text.job.options.wanted {
            values.truncate(most);
            if vectors.modules.normalizes {
                normalize(&mut values);
            }
        }
        Event::Vector { choice: 0, values }
    };
    Ok(made.chunks(vectors.width(model.config())).zip(batch).map(cut).collect())
}

fn is_ranked(job: &Job) -> bool {
    job.options.wanted == Wanted::Score
}
