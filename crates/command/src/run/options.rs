//! Converts the config to the options of an evaluation. This module makes no decisions.

use planner::Plan;
pub use run_plan::options::{answers, master_weights, trainer_options};
use text_metrics::bleu::Tokenization;

use crate::config::Config;
use crate::run::open::{self, Opened};
use crate::scores::evaluation::Settings;

/// The settings of evaluations in the training loop.
pub fn evaluation(config: &Config, opened: &Opened, plan: &Plan) -> Settings {
    Settings {
        samples: config.train.eval_samples,
        generate_samples: config.train.eval_generate_samples,
        micro_batch_samples: plan.step.evaluation_samples.max(1),
        loss_chunk_rows: plan.step.levers.loss_chunk_rows,
        generate: answers(config),
        metrics: config.train.eval_metrics.clone(),
        of_metrics: text_metrics::Settings {
            tokenization: tokenization(&config.train.bleu_tokenizer),
            rouge_stems: config.train.rouge_stemmer,
            rouge_any_script: true,
        },
        examples: config.train.sample_generations,
        wrong_examples: false,
        preference: config.preference,
        loader: open::loader_options(config, opened),
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
