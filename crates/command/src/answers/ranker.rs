//! [`Ranker`]: how well a text answers a query, by a model's answer to both.
//!
//! A model of text answers with one of two words, and the score is the logarithm of the first one's share of both probabilities (monoT5,
//! Nogueira et al., 2020). Of one token alone, the score is its logit (RankT5, Zhuang et al., 2022). Of a model of numbers, the number is
//! the score.

use std::path::Path;

use dataloader::Tokenizer;
use t5::{Config, EvalContext, Head, MicroBatch, StepContext, T5};
use trainer::ranking;

use crate::config;
use crate::data::labels::token;
use crate::failure::{Failure, Outcome};
use crate::files::run_dir;

/// The default text that a ranker reads for a query and a text.
pub const USUAL_TEMPLATE: &str = "Query: {query} Document: {text} Relevant:";

/// How a model gives a score.
#[derive(Clone, Debug)]
pub enum Ranker {
    /// By the tokens of two answers, or of one.
    Answers(Vec<u32>),
    /// The number that it gives.
    Number,
}

/// What the run of a ranker says.
#[derive(Clone, Debug, Default)]
pub struct OfRun {
    /// The answers that a score is made of; none: the run is of another task.
    pub answers: Vec<String>,
    /// The template of its sources.
    pub template: Option<String>,
}

impl OfRun {
    /// The answers, or those of monoT5.
    pub fn answers(&self) -> Vec<String> {
        if self.answers.is_empty() { ["true", "false"].map(String::from).to_vec() } else { self.answers.clone() }
    }

    /// The settings of the first run that made one of these directories.
    pub fn find<'a>(trained: impl Iterator<Item = &'a Path>) -> Self {
        let Some(Ok((_, values))) = run_dir::values_of(trained) else { return Self::default() };
        match config::ranking::from_values(&values) {
            Ok(Some(of)) => Self { answers: of.answers, template: values.text("data.source_template") },
            _ => Self::default(),
        }
    }
}

impl Ranker {
    /// The ranker that a model is, with these answers.
    pub fn open(config: &Config, tokenizer: &Tokenizer, answers: &[String], setting: &str) -> Outcome<Ranker> {
        match &config.head {
            Head::Sequence(labels) if labels.is_number() => return Ok(Ranker::Number),
            Head::Language => {}
            head => {
                let class = head.architecture(config.family);
                return Err(Failure::unusable(format!("a {class} gives a pair of texts no score"))
                    .hint("expected a model that answers, such as monoT5, or one of `task.name = \"regression\"`")
                    .hint("an encoder has vectors: `train_low_mem embed`"));
            }
        }
        if !(1..=2).contains(&answers.len()) {
            return Err(Failure::usage(format!(
                "`{setting}`: expected two, or one whose logit counts, got {}",
                answers.len()
            ))
            .hint("`--answers true,false`, or `--answers '<extra_id_10>'` for RankT5"));
        }
        Ok(Ranker::Answers(answers.iter().map(|word| token(tokenizer, word, setting)).collect::<Outcome<_>>()?))
    }

    /// The scores of some sources, in their order. `between` is called before every block.
    pub fn scores(&self, model: &T5, sources: &[&[u32]], cx: EvalContext, between: &dyn Fn()) -> Outcome<Vec<f64>> {
        let numbers: Vec<u32> = (0..sources.len() as u32).collect();
        let target = [if let Ranker::Answers(tokens) = self { tokens[0] } else { 0 }];
        let targets = vec![&target[..]; sources.len()];
        let batch = MicroBatch::new(sources, &targets, &numbers, model.config(), model.device())?;
        let Ranker::Answers(tokens) = self else {
            let numbers = model.class_logits(&batch, cx.activations, between)?;
            return Ok(numbers.into_iter().map(f64::from).collect());
        };
        let cx = StepContext::without_dropout(cx.activations, cx.loss_chunk_rows).measuring(tokens.len() == 1);
        let is_interrupted = || {
            between();
            false
        };
        let losses = model.losses_of_step(&[batch.with_answers(tokens.clone())], &cx, &is_interrupted)?;
        let of_text = |losses: &[f64]| match losses {
            &[first, second] => ranking::score_of_answers([first, second]),
            losses => -losses[0],
        };
        Ok(losses.unwrap_or_default().concat().chunks(tokens.len()).map(of_text).collect())
    }
}
