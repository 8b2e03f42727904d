//! The metrics of evaluations, and the rules for keys that depend on them: the best checkpoint, and early stopping.

use text_metrics::Metric;

use super::{Config, Values};
use crate::failure::{Failure, Outcome};

/// The metrics of answers: the metrics to show, and the metric that selects the best checkpoint.
pub(super) fn metrics(values: &Values) -> Vec<Metric> {
    let names = values.list("train.eval_metrics").unwrap_or_default();
    let best = values.text("checkpoint.best_metric").filter(|name| name.parse::<Metric>().is_ok());
    let names: Vec<String> = names.into_iter().chain(best).collect();
    Metric::list(&names.join(",")).expect("names are checked on the way in")
}

/// Refuses to rank checkpoints by a number that evaluations will not have.
fn of_preferences(config: &Config) -> Outcome<()> {
    let best = config.checkpoint.best_metric.as_str();
    let is_of_pairs = best == "rewards/accuracies";
    let is_of_preferences = is_of_pairs || ["preference_loss", "rewards/margins"].contains(&best);
    let origin = config.values.origin("checkpoint.best_metric");
    match &config.preference {
        None if is_of_preferences => Err(Failure::usage(format!(
            "`checkpoint.best_metric = \"{best}\"` ({origin}) is a number of preferences, and `preference.loss` is not set"
        ))
        .hint("`--set checkpoint.best_metric=loss`, or train on preferences: `--set preference.loss=orpo`")),
        Some(preference) if is_of_pairs && preference.loss.has_labels() => Err(Failure::usage(format!(
            "`checkpoint.best_metric = \"{best}\"` ({origin}) is a share of pairs, and rows of `preference.loss = \"{}\"` are no pairs",
            preference.loss.name()
        ))
        .hint("`--set checkpoint.best_metric=rewards/margins`, or `preference_loss`")),
        _ => Ok(()),
    }
}

/// Refuses to rank vectors and rankings by a score of answers, and answers by what vectors find.
fn of_found(config: &Config) -> Outcome<()> {
    let best = config.checkpoint.best_metric.as_str();
    let origin = config.values.origin("checkpoint.best_metric");
    let has_scores = config.embedding.as_ref().is_some_and(|of| of.loss.has_scores());
    let (is_of_vectors, is_ranking) = (config.embedding.is_some(), config.ranking.is_some());
    let of_rankings = ["mrr@10", "ndcg@10"];
    let of_vectors = ["recall@1", "recall@10", "mrr@10", "ndcg@10"];
    let own: &[&str] = match (is_of_vectors, is_ranking) {
        (true, _) if has_scores => &["pearson", "spearman"],
        (true, _) => &of_vectors,
        (_, true) => &of_rankings,
        _ => &[],
    };
    if own.contains(&best) || !(of_vectors.contains(&best) || !own.is_empty() && best.parse::<Metric>().is_ok()) {
        return Ok(());
    }
    let (message, hint) = match own {
        [] => ("is a score of vectors or of rankings, and this run has answers".to_owned(), "loss"),
        [.., last] => {
            let task = config.values.text("task.name").unwrap_or_default();
            let loss = if has_scores { " with scores" } else { "" };
            (format!("is none of the scores of `task.name = \"{task}\"`{loss}: {}", own.join(", ")), *last)
        }
    };
    Err(Failure::usage(format!("`checkpoint.best_metric = \"{best}\"` ({origin}) {message}"))
        .hint(format!("`--set checkpoint.best_metric={hint}`")))
}

/// Rules about keys that need evaluations. `has_validation`: whether there are rows for them, or may be.
pub fn check(config: &Config, has_validation: bool) -> Outcome<()> {
    of_preferences(config)?;
    of_found(config)?;
    let compares = config.checkpoint.best_metric != "loss" || config.train.early_stopping_patience.is_some();
    if compares && !has_validation {
        return Err(Failure::usage(
        "`checkpoint.best_metric` and `train.early_stopping_patience` compare evaluations, and there are no validation rows",
        )
        .hint("use `--validation rows.parquet`, or `--set data.validation_split=0.01` for a share of `data.train`"));
    }
    if config.train.early_stopping_patience.is_some() && config.train.eval_every_steps == 0 {
        return Err(Failure::usage(
        "`train.early_stopping_patience` needs evaluations between the first step and the last, and `train.eval_every_steps` is 0",
        )
        .hint("use `--set train.eval_every_steps=100`"));
    }
    if config.checkpoint.model_is_best && (config.checkpoint.keep_best == 0 || !has_validation) {
        return Err(Failure::usage(
            "`checkpoint.model = \"best\"` needs `data.validation` and `checkpoint.keep_best` of at least 1",
        )
        .hint("use `--set checkpoint.model=final` for the last checkpoint"));
    }
    Ok(())
}
