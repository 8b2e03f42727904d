//! Texts that get a score or a vector instead of an answer. All that wait are computed together, as many as fit, those of one job after the
//! other.

use std::collections::BTreeMap;

use candle_core::DType;
use openai_server::{ApiError, Event, Job, Wanted};
use t5::{EvalContext, Head, T5};

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

/// The numbers of the texts to compute next: texts of about the same length, for the model of the first one and of its kind. One batch of them
/// needs no more memory than was reserved when they were admitted. `bytes(texts, tokens)` is the memory of a batch.
pub fn next(texts: &BTreeMap<u64, Text>, bytes: &dyn Fn(usize, usize) -> u64) -> Vec<u64> {
    let Some(first) = texts.values().next() else { return Vec::new() };
    let is_alike = |text: &Text| text.job.model == first.job.model && is_ranked(&text.job) == is_ranked(&first.job);
    let mut alike: Vec<(&u64, &Text)> = texts.iter().filter(|(_, text)| is_alike(text)).collect();
    let held: u64 = alike.iter().map(|(_, text)| text.bytes).sum();
    alike.sort_by_key(|(_, text)| std::cmp::Reverse(text.source.len()));
    let longest = alike[0].1.source.len();
    let count = (2..=alike.len()).take_while(|&count| bytes(count, longest) <= held).last().unwrap_or(1);
    alike[..count].iter().map(|(key, _)| **key).collect()
}

/// What is told about some sources.
pub fn events(
    served: &Served,
    model: &T5,
    vectors: Option<&Vectors>,
    (batch, activations): (&[Text], DType),
) -> Outcome<Vec<Event>> {
    let sources: Vec<&[u32]> = batch.iter().map(|text| text.source.as_slice()).collect();
    if batch.iter().any(|text| is_ranked(&text.job)) {
        let Ok((ranker, _)) = &served.ranking else { return Err(Failure::internal("a model without scores")) };
        let context = EvalContext { activations, loss_chunk_rows: sources.len() };
        let is_share = matches!(ranker, Ranker::Answers(tokens) if tokens.len() == 2);
        // The probability of the first of two answers.
        let event = |score: f64| Event::Ranked { choice: 0, score: if is_share { score.exp() } else { score } };
        return Ok(ranker.scores(model, &sources, context)?.into_iter().map(event).collect());
    }
    let Some(vectors) = vectors else { return Err(Failure::internal("a model without vectors")) };
    let made = vectors.compute(model, &sources)?;
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
