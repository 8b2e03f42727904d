//! Converts the config to the options of an evaluation and of a budget. This module makes no decisions.

use memory_policy::{Budget, Budgets};
use planner::Plan;
pub use run_plan::options::{answers, master_weights, trainer_options};
use text_metrics::bleu::Tokenization;

use crate::config::Config;
use crate::evaluation::Settings;
use crate::failure::{Failure, Outcome};
use crate::open::{self, Opened};

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

/// The budget of a `--memory-budget` flag; without one, the usual share of the available memory.
pub fn budget(flag: Option<&str>) -> Outcome<Budget> {
    budget_of_flag("--memory-budget", flag)
}

/// The budgets of `--memory-budget` and `--device-memory-budget`, each as for [`budget`].
pub fn budgets(process: Option<&str>, device: Option<&str>) -> Outcome<Budgets> {
    Ok(Budgets { process: budget(process)?, device: budget_of_flag("--device-memory-budget", device)? })
}

fn budget_of_flag(name: &str, text: Option<&str>) -> Outcome<Budget> {
    let Some(text) = text else { return Ok(Budget::ShareOfAvailable) };
    let bytes = text
        .parse()
        .map_err(|error| Failure::usage(format!("{name}: {error}")).hint("a size such as `512MiB` or `4GiB`"))?;
    Ok(Budget::Explicit(bytes))
}
