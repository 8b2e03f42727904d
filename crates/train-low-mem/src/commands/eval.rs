//! `train_low_mem eval`: what a model is worth on parquet rows.

use candle_core::DType;
use memory_policy::{Probe, SystemProbe};
use planner::{EvaluatedRows, Inference, Job};
use serde_json::json;
use toml::Value;
use trainer::TrainerOptions;

use crate::cli::EvalArgs;
use crate::config::{Config, Origin, Values, paths};
use crate::evaluation::{Settings, evaluate};
use crate::failure::{Failure, Outcome};
use crate::open::{self, Opened};
use crate::stop::Stop;
use crate::{job, options, report, setup};

/// Evaluates a model.
pub fn eval(flags: &EvalArgs) -> Outcome<()> {
    let config = config(flags)?;
    let opened = Opened::new(&config, None)?;
    // Where pages lie says what reading them takes.
    opened.train.find_pages()?;
    let precision = if config.train.bf16 { trainer::Precision::Bf16 } else { trainer::Precision::F32 };
    let rows = EvaluatedRows {
        loader: open::loader_options(&config, &opened.model),
        tokenizer: &opened.tokenizer,
        dataset: &opened.train,
    };
    let inference = Inference {
        activations: precision.activations(),
        max_new_tokens: config.train.eval_max_new_tokens,
        has_targets: true,
        rows: Some(rows),
    };
    let longest = (config.data.max_source_tokens, config.data.max_target_tokens);
    let budget = job::budgets(&config).process;
    let options = TrainerOptions { precision, ..TrainerOptions::default() };
    let now = planner::rehearse(&opened.model, &options, &opened.device, &SystemProbe::new())?;
    let job = Job::of_inference(&opened.model, inference, flags.batch_samples, longest, budget);
    let plan = planner::plan(&job, &now)?.plan;
    let model = t5::T5::load(&flags.model, DType::F32, &opened.device)?;
    let settings = Settings {
        samples: flags.samples,
        generate_samples: flags.generate_samples,
        examples: flags.show,
        ..options::evaluation(&config, &opened.model, &plan)
    };
    let figures = evaluate(&model, &opened.train, &opened.tokenizer, &settings, &Stop::default())?
        .ok_or_else(|| Failure::internal("nobody interrupts an evaluation"))?;
    if figures.samples == 0 {
        return Err(Failure::unusable(format!("no row could be evaluated; {} were skipped", figures.bad_rows))
            .hint("`train_low_mem inspect FILE` lists the columns"));
    }
    if flags.json {
        let mut json = figures.to_json();
        json["predicted_peak_bytes"] = json!(plan.predicted_peak.0);
        json["peak_rss_bytes"] = json!(SystemProbe::new().snapshot()?.peak_rss.0);
        report::result(&format!("{json}\n"))?;
        return Ok(());
    }
    report::result(&format!("{}\n{}\n", figures.line(), figures.bleu_signature))?;
    if !figures.examples.is_empty() {
        report::result(&format!("{}\n", figures.examples_text()))?;
    }
    Ok(())
}

/// The flags as a config: the model's own tokenizer, the data as training rows, in the order of the files.
fn config(flags: &EvalArgs) -> Outcome<Config> {
    let mut values = Values::defaults();
    if let Some(path) = &flags.config {
        setup::apply_file(&mut values, path)?;
    }
    let mut set = |key: &str, value: Value, flag: &str| values.set(key, value, Origin::Flag(flag.to_string()));
    set("model.init_from", Value::String(paths::to_text(flags.model.as_os_str())), "--model")?;
    set("data.train", Value::from(flags.data.clone()), "--data")?;
    set("data.validation", Value::Array(Vec::new()), "--data")?;
    set("checkpoint.model", Value::String("final".to_string()), "eval")?;
    if flags.model.join("tokenizer.json").is_file() {
        set("data.tokenizer", Value::String("auto".to_string()), "--model")?;
    }
    for (key, flag, text) in [
        ("memory.budget", "--memory-budget", &flags.memory_budget),
        ("run.device", "--device", &flags.device),
        ("train.bleu_tokenizer", "--bleu-tokenizer", &flags.bleu_tokenizer),
    ] {
        if let Some(text) = text {
            set(key, Value::String(text.clone()), flag)?;
        }
    }
    flags.set.iter().try_for_each(|assignment| values.apply_assignment(assignment))?;
    Config::resolve(values)
}
