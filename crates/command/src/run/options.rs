//! Converts the config to the rows that a run reads, and to the options of an evaluation. This module makes no decisions.

use dataloader::Objective;
use planner::{Plan, RowsRead};
pub use run_plan::options::{answers, master_weights, trainer_options};
use t5::Head;
use text_metrics::bleu::Tokenization;
use text_metrics::{LabelsInText, Metric};
use trainer::ranking::{Ranking, RowLabels};

use crate::config::task::Task;
use crate::config::{Config, keys};
use crate::run::open::{self, Opened};
use crate::scores::evaluation::Settings;

/// The number of rows that the run reads.
pub fn rows_read(config: &Config, rows: u64) -> RowsRead {
    let (train, batch_samples) = (&config.train, config.train.batch_size as u64);
    let of_epochs = train.epochs.map_or(u64::MAX, |epochs| epochs.saturating_mul(rows));
    let of_steps = train.max_steps.map_or(u64::MAX, |steps| steps.saturating_mul(batch_samples));
    RowsRead { samples: of_epochs.min(of_steps), batch_samples }
}

/// The settings of evaluations in the training loop.
pub fn evaluation(config: &Config, opened: &Opened, plan: &Plan) -> Settings {
    Settings {
        task: None,
        samples: config.train.eval_samples,
        generate_samples: config.train.eval_generate_samples,
        micro_batch_samples: plan.step.evaluation_samples.max(1),
        loss_chunk_rows: plan.step.levers.loss_chunk_rows,
        generate: answers(config),
        metrics: metrics(config, &opened.model.head),
        of_metrics: text_metrics::Settings {
            tokenization: tokenization(&config.train.bleu_tokenizer),
            rouge_stems: config.train.rouge_stemmer,
            rouge_any_script: true,
            labels_in_text: match &opened.model.head {
                Head::Tokens(_) => LabelsInText::OfWords,
                Head::Sequence(labels) if labels.is_set() => LabelsInText::Set,
                _ => LabelsInText::One,
            },
        },
        examples: config.train.sample_generations,
        wrong_examples: false,
        preference: config.preference,
        reference: None,
        labels: opened.model.head.labels().cloned(),
        contrastive: config.embedding.clone().map(|of| (of, config.train.batch_size)),
        ranking: ranking(config, opened),
        loader: open::loader_options(config, opened),
    }
}

/// The loss of rankings, and the tokens that a score is made of.
fn ranking(config: &Config, opened: &Opened) -> Option<(Ranking, Vec<u32>)> {
    let (of, Objective::Lists { answers, .. }) = (config.ranking.as_ref()?, &opened.reading.objective) else {
        return None;
    };
    Some((of.of, answers[..of.answers.len()].to_vec()))
}

/// What the rows of a batch say beside their texts.
pub fn row_labels(batch: &dataloader::Batch) -> RowLabels<'_> {
    RowLabels { desirable: &batch.labels, lists: &batch.lists, gains: &batch.gains }
}

/// The metrics of evaluations: those of the config, or else the usual ones of the task. A ranking has no answers.
fn metrics(config: &Config, head: &Head) -> Vec<Metric> {
    let key = "train.eval_metrics";
    let is_default = config.values.setting(key).value == keys::default(key);
    let task = if config.ranking.is_some() { Task::Ranking } else { Task::from_head(head) };
    match task.usual_metrics(head) {
        Some(usual) if is_default || task == Task::Ranking => usual.to_vec(),
        _ => config.train.eval_metrics.clone(),
    }
}

/// sacreBLEU's tokenizer by its name, which the config has checked; `None` for `auto`.
fn tokenization(name: &str) -> Option<Tokenization> {
    match name {
        "zh" => Some(Tokenization::Zh),
        "char" => Some(Tokenization::Char),
        "none" => Some(Tokenization::None),
        "13a" => Some(Tokenization::V13a),
        _ => None,
    }
}
