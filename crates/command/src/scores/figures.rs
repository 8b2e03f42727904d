//! The results of an evaluation: of all rows and of each task, as JSON and as text.

use memory_policy::{counted, plural};
use run_report::visible;
use serde_json::{Value, json};
use text_metrics::Metric;
use text_metrics::labels::Labels;
use text_metrics::searches::CUTS;
use trainer::contrastive::Retrieval;
use trainer::evaluate::Example;
use trainer::preference::PreferenceStats;
use trainer::ranking::RankingStats;

use crate::files::metrics::number;
use crate::scores::class_scores;

/// Rows of an evaluation that were skipped.
#[derive(Clone, Debug, Default)]
pub struct Skipped {
    /// Their number.
    pub rows: u64,
    /// Where the first of them is, and what it lacks.
    pub first: Option<String>,
}

impl Skipped {
    /// Adds those of a batch.
    pub(super) fn count(&mut self, batch: &dataloader::Batch) {
        self.rows += batch.bad_rows;
        if self.first.is_none() {
            self.first = batch.first_bad_row.as_ref().map(ToString::to_string);
        }
    }

    /// In words, with the first of them; `used` rows were not skipped. `None`: there are none.
    pub fn in_words(&self, used: u64) -> Option<String> {
        let first = self.first.as_deref().unwrap_or_default();
        let (rows, all) = (counted(self.rows), plural(used + self.rows, "row"));
        (self.rows > 0).then(|| format!("{rows} of {all} were skipped; the first: {first}"))
    }
}

/// The result of an evaluation.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Rows scored.
    pub samples: u64,
    /// Rows left out because they were null, empty or not UTF-8.
    pub skipped: Skipped,
    /// Target tokens scored.
    pub target_tokens: u64,
    /// Mean loss of a target token.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Rows generated.
    pub generated_samples: u64,
    /// The scores of the answers, BLEU and exact match among them.
    pub values: Vec<(Metric, f64)>,
    /// The settings of scores that have settings.
    pub signatures: Vec<(Metric, String)>,
    /// The requested scores.
    pub wanted: Vec<Metric>,
    /// The counts of labels, if accuracy or macro-F1 was asked for.
    pub labels: Option<Labels>,
    /// A few answers.
    pub examples: Vec<Example>,
    /// Right answers beside rejected ones.
    pub preference: Option<PreferenceStats>,
    /// How well vectors find each other.
    pub retrieval: Option<Retrieval>,
    /// Whether cosines of pairs are compared with their scores: nothing is generated.
    pub is_of_pairs: bool,
    /// How well texts are ranked.
    pub ranking: Option<RankingStats>,
    /// The results of each task of a mixture, with its name.
    pub tasks: Vec<(String, Figures)>,
}

impl Figures {
    /// The results of tasks as one: the loss of all their target tokens, and the mean of each score over the tasks. `None`: there are none.
    pub(super) fn of_tasks(named: Vec<(String, Figures)>) -> Option<Self> {
        if let [(_, only)] = named.as_slice() {
            return Some(Self { tasks: named.clone(), ..only.clone() });
        }
        let tasks: Vec<&Figures> = named.iter().map(|(_, figures)| figures).collect();
        let first = tasks.first()?;
        let sum = |of: fn(&Figures) -> u64| tasks.iter().map(|figures| of(figures)).sum::<u64>();
        let target_tokens = sum(|of| of.target_tokens);
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let (loss, count) = (
            tasks.iter().map(|of| of.loss * of.target_tokens as f64).sum::<f64>() / target_tokens as f64,
            tasks.len() as f64,
        );
        let mean =
            |metric: Metric| Some((metric, tasks.iter().map(|of| of.value(metric)).sum::<Option<f64>>()? / count));
        Some(Self {
            samples: sum(|of| of.samples),
            skipped: Skipped {
                rows: sum(|of| of.skipped.rows),
                first: tasks.iter().find_map(|of| of.skipped.first.clone()),
            },
            target_tokens,
            loss,
            perplexity: loss.exp(),
            generated_samples: sum(|of| of.generated_samples),
            values: first.values.iter().filter_map(|(metric, _)| mean(*metric)).collect(),
            signatures: first.signatures.clone(),
            wanted: first.wanted.clone(),
            labels: None,
            examples: tasks.iter().flat_map(|of| of.examples.iter().take(1).cloned()).collect(),
            preference: None,
            retrieval: None,
            is_of_pairs: false,
            ranking: None,
            tasks: named,
        })
    }

    /// A score of the answers; `None` if there are no answers, or they do not have it.
    pub fn value(&self, metric: Metric) -> Option<f64> {
        self.values.iter().find(|(other, _)| *other == metric).map(|(_, value)| *value)
    }

    /// The fields of the `eval` event, and the output of `eval --json`.
    pub fn to_json(&self) -> Value {
        let mut json = json!({
            "loss": number(self.loss),
            "perplexity": number(self.perplexity),
            "bleu": self.value(Metric::Bleu),
            "exact_match": self.value(Metric::ExactMatch),
            "samples": self.samples,
            "generated_samples": self.generated_samples,
            "target_tokens": self.target_tokens,
            "bad_rows": self.skipped.rows,
            "metrics": self.wanted.iter().map(|metric| metric.name()).collect::<Vec<_>>(),
        });
        for (metric, value) in &self.values {
            json[metric.name()] = json!(value);
        }
        for (metric, signature) in &self.signatures {
            json[format!("{metric}_signature")] = json!(signature);
        }
        if let Some(preference) = &self.preference {
            preference_json(preference, &mut json);
        }
        if let Some((_, labels)) = self.labels.as_ref().and_then(class_scores::compute) {
            json["classes"] = labels;
        }
        for (name, value) in self.found() {
            json[name] = number(value);
        }
        if !self.tasks.is_empty() {
            json["tasks"] = self.tasks.iter().map(|(name, figures)| (name.clone(), figures.to_json())).collect();
        }
        json
    }

    /// The scores of what is found first, by their names in events.
    pub(super) fn found(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let ranked = self.ranking.map(|of| [("mrr@10", of.mrr), ("ndcg@10", of.ndcg)]);
        let of_vectors = self.retrieval.iter().flat_map(|of| search_scores(of.recall, of.mrr, of.ndcg));
        of_vectors.chain(ranked.into_iter().flatten())
    }

    /// The results in one line of text.
    pub fn line(&self) -> String {
        let scores: String = self
            .wanted
            .iter()
            .filter_map(|metric| Some(format!("  {} {}", metric.title(), metric.shown(self.value(*metric)?))))
            .collect();
        if self.is_of_pairs {
            return format!("loss {:.4}{scores}  ({} rows)", self.loss, self.samples);
        }
        if self.retrieval.is_some() || self.ranking.is_some() {
            let is_measure = |name: &str| FOUND.iter().any(|(measure, _)| *measure == name);
            let shown = self.found().filter(|(name, _)| is_measure(name));
            let scores: String = shown.map(|(name, value)| format!("  {name} {value:.4}")).collect();
            let lists = self.ranking.map_or_else(String::new, |of| format!("{}, ", plural(of.lists, "list")));
            return format!("loss {:.4}{scores}  ({lists}{} rows)", self.loss, self.samples);
        }
        let preference = self.preference.as_ref().map_or_else(String::new, |of| {
            let preferred = of.accuracy.map_or_else(String::new, |share| format!("preferred {:.1} %  ", 100.0 * share));
            format!("preference loss {:.4}  {preferred}", of.loss)
        });
        format!(
            "{preference}loss {:.4}  perplexity {}{scores}  ({} rows, {} generated)",
            self.loss,
            perplexity(self.perplexity),
            self.samples,
            self.generated_samples
        )
    }

    /// The results of each task, one per line.
    pub fn task_lines(&self) -> impl Iterator<Item = String> {
        self.tasks.iter().map(|(name, figures)| format!("  {}: {}", visible::line(name), figures.line()))
    }

    /// The settings of the requested scores, one per line.
    pub fn signature_lines(&self) -> String {
        let is_wanted = |metric: &Metric| self.wanted.contains(metric);
        let mut lines: Vec<String> = Vec::new();
        for (_, signature) in self.signatures.iter().filter(|(metric, _)| is_wanted(metric)) {
            if !lines.contains(signature) {
                lines.push(signature.clone());
            }
        }
        lines.join("\n")
    }

    /// The examples for the `eval` event, with long texts cut.
    pub fn examples_json(&self) -> Value {
        const MAX_CHARACTERS: usize = 1000;
        let text = |text: &str| run_report::figures::clipped(text, MAX_CHARACTERS);
        let examples = self.examples.iter().map(|example| {
            json!({"prompt": text(&example.source), "answer": text(&example.hypothesis), "expected": text(&example.reference)})
        });
        examples.collect()
    }

    /// The examples as text.
    pub fn examples_text(&self) -> String {
        const MAX_CHARACTERS: usize = 60;
        let shown = |text: &str| visible::line(&run_report::figures::clipped(text, MAX_CHARACTERS)).into_owned();
        let lines = self.examples.iter().map(|example| {
            let is_right = example.hypothesis.trim() == example.reference.trim();
            let verdict = if is_right { "right" } else { "wrong" };
            let wanted = if is_right { String::new() } else { format!("   (expected {})", shown(&example.reference)) };
            format!("  {verdict}  {} -> {}{wanted}", shown(&example.source), shown(&example.hypothesis))
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// The scores of searches by their names in events.
pub fn search_scores(recall: [f64; CUTS.len()], mrr: f64, ndcg: f64) -> impl Iterator<Item = (&'static str, f64)> {
    RECALL.into_iter().zip(recall).chain([("mrr@10", mrr), ("ndcg@10", ndcg)])
}

/// The names of recall, by [`CUTS`].
const RECALL: [&str; CUTS.len()] = ["recall@1", "recall@5", "recall@10", "recall@20", "recall@50", "recall@100"];

/// The scores of searches and rankings that evaluations are compared by and lines of text have, and their names in tables.
pub const FOUND: [(&str, &str); 4] =
    [("recall@1", "recall@1"), ("recall@10", "recall@10"), ("mrr@10", "MRR@10"), ("ndcg@10", "NDCG@10")];

/// Adds the numbers of a loss of preferences to an event, by TRL's names.
pub fn preference_json(of: &PreferenceStats, event: &mut Value) {
    let [chosen, rejected] = of.rewards;
    let numbers = [
        ("preference_loss", Some(of.loss)),
        ("kl", of.kl),
        ("rewards/chosen", chosen),
        ("rewards/rejected", rejected),
        ("rewards/margins", of.margin()),
        ("rewards/accuracies", of.accuracy),
        ("logps/chosen", of.log_probabilities[0]),
        ("logps/rejected", of.log_probabilities[1]),
    ];
    for (name, value) in numbers {
        value.into_iter().for_each(|value| event[name] = number(value));
    }
}

/// A perplexity as text: that of an untrained model is unlimited.
pub fn perplexity(perplexity: f64) -> String {
    if perplexity < 1e6 { format!("{perplexity:.2}") } else { format!("{perplexity:.1e}") }
}
