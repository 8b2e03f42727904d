//! [`Evaluation`]: the figures of an evaluation, from its event.

use serde_json::Value;

use crate::figures::clipped;
use crate::line::number_of;

/// The most scores of an evaluation that are kept.
const MAX_SCORES: usize = 12;
/// The most bytes of the scores of labels that are kept.
const MAX_CLASSES_BYTES: usize = 32 << 10;

/// Numbers of an event that are no scores.
const FIGURES: [&str; 9] =
    ["loss", "perplexity", "samples", "generated_samples", "target_tokens", "bad_rows", "step", "event", "time"];
/// Scores that are shown although they are none of answers.
const NO_ANSWERS: [&str; 7] =
    ["preference_loss", "rewards/accuracies", "rewards/margins", "recall@1", "recall@10", "mrr@10", "ndcg@10"];

/// The figures of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The evaluation's step.
    pub step: u64,
    /// Mean loss per target token.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Scores of answers, by name. Those that were asked for come first.
    pub scores: Vec<(String, f64)>,
    /// The number of scores that were asked for.
    pub wanted: usize,
    /// Rows scored, and of these, rows generated.
    pub samples: (u64, u64),
    /// The share of texts that are among the first, by their number. Empty if nothing is searched.
    pub recall: Vec<(f64, f64)>,
    /// The scores of each label as JSON text, if the answers are labels.
    pub classes: Option<String>,
    /// The scores of each task as JSON text, if the rows have tasks.
    pub tasks: Option<String>,
}

impl Evaluation {
    /// The figures of an event; `None` if it has no loss.
    pub(crate) fn from_event(step: u64, fields: &Value) -> Option<Self> {
        let loss = number_of(&fields["loss"])?;
        let perplexity = number_of(&fields["perplexity"]).unwrap_or_else(|| loss.exp());
        let scores = fields.as_object().into_iter().flatten();
        let scores = scores.filter(|(name, _)| !FIGURES.contains(&name.as_str()));
        let scores = scores.filter_map(|(name, value)| Some((clipped(name, 24), value.as_f64()?)));
        let of_others = NO_ANSWERS.into_iter().filter(|name| fields[name].is_number());
        let metrics = fields["metrics"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let wanted: Vec<&str> = of_others.chain(metrics).collect();
        let mut scores: Vec<(String, f64)> = scores.collect();
        scores.sort_by_key(|(name, _)| wanted.iter().position(|other| other == name).unwrap_or(usize::MAX));
        scores.truncate(MAX_SCORES);
        let text_of =
            |name: &str| fields.get(name).map(Value::to_string).filter(|text| text.len() <= MAX_CLASSES_BYTES);
        Some(Evaluation {
            step,
            loss,
            perplexity,
            wanted: if wanted.is_empty() { scores.len().min(2) } else { wanted.len().min(scores.len()) },
            scores,
            samples: (fields["samples"].as_u64().unwrap_or(0), fields["generated_samples"].as_u64().unwrap_or(0)),
            recall: recall(fields),
            classes: text_of("classes"),
            tasks: text_of("tasks"),
        })
    }
}

/// The shares in fields `recall@K` of an evaluation, by K.
fn recall(fields: &Value) -> Vec<(f64, f64)> {
    const MOST: usize = 16;
    let named = fields.as_object().into_iter().flatten().filter_map(|(name, value)| {
        let cut: u32 = name.strip_prefix("recall@")?.parse().ok().filter(|cut| *cut > 0)?;
        Some((f64::from(cut), value.as_f64().filter(|share| (0.0..=1.0).contains(share))?))
    });
    let mut curve: Vec<(f64, f64)> = named.take(MOST).collect();
    curve.sort_by(|one, other| one.0.total_cmp(&other.0));
    curve
}
