//! `train_low_mem eval`: what a model is worth on parquet rows.

use candle_core::DType;
use memory_policy::{
    Budget, Bytes, CostRow, Costs, DatasetResidency, LoaderChoice, Plan, Probe, StepChoice, SystemProbe,
};
use t5::costs::{Pass, Shape};
use toml::Value;

use crate::cli::EvalArgs;
use crate::config::{Config, Origin, Values};
use crate::evaluation::{Settings, evaluate};
use crate::failure::{Failure, Outcome};
use crate::open::Opened;
use crate::{options, report, setup};

/// Evaluates a model.
pub fn eval(flags: &EvalArgs) -> Outcome<()> {
    let config = config(flags)?;
    let opened = Opened::new(&config, None)?;
    let plan = plan(&config, &opened.model, flags.batch_samples)?;
    let model = t5::T5::load(&flags.model, DType::F32, &opened.device)?;
    let settings = Settings {
        samples: flags.samples,
        generate_samples: flags.generate_samples,
        examples: flags.show,
        ..options::evaluation(&config, &opened.model, &plan)
    };
    let figures = evaluate(&model, &opened.train, &opened.tokenizer, &settings, &|| false)?
        .ok_or_else(|| Failure::internal("nobody interrupts an evaluation"))?;
    if figures.samples == 0 {
        return Err(Failure::unusable(format!("no row could be evaluated; {} were left out", figures.bad_rows))
            .hint("`train_low_mem inspect` shows the columns of the files"));
    }
    if flags.json {
        report::print(&format!("{}\n", figures.to_json()));
        return Ok(());
    }
    report::print(&format!("{}\n{}\n", figures.line(), figures.bleu_signature));
    if !figures.examples.is_empty() {
        report::print(&format!("{}\n", figures.examples_text()));
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
    set("model.init_from", Value::String(flags.model.display().to_string()), "--model")?;
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

/// The largest cut up to `most_samples` that fits the budget.
fn plan(config: &Config, model: &t5::Config, most_samples: usize) -> Outcome<Plan> {
    let now = SystemProbe::new().snapshot()?;
    let activations = if config.train.bf16 { DType::BF16 } else { DType::F32 };
    let step = |samples: usize| {
        let shape = Shape {
            samples,
            source_tokens: config.data.max_source_tokens,
            target_tokens: config.data.max_target_tokens,
        };
        let pass = Pass { shape, activations, recompute_blocks: 0, loss_chunk_rows: LOSS_CHUNK_ROWS, dropout: false };
        let sum = |rows: Vec<t5::CostRow>| rows.iter().map(|row| row.bytes).sum::<u64>();
        let most_new = config.train.eval_max_new_tokens;
        let bytes = sum(t5::costs::evaluation(model, &pass)).max(sum(t5::costs::generation(
            model,
            &shape,
            most_new,
            activations,
        )));
        StepChoice {
            micro_batch_samples: samples,
            recompute_blocks: 0,
            loss_chunk_rows: LOSS_CHUNK_ROWS,
            rows: vec![CostRow::new("evaluation", bytes, format!("{samples} samples"))],
            #[expect(clippy::cast_precision_loss, reason = "a relative time")]
            relative_time: 1.0 + 1.0 / samples as f64,
        }
    };
    let samples = std::iter::successors(Some(most_samples.max(1)), |samples| (*samples > 1).then_some(samples / 2));
    let costs = Costs {
        batch_samples: most_samples,
        fixed: vec![
            CostRow::new("process", now.rss.0, "measured"),
            CostRow::new("parameters", t5::costs::parameters(model, DType::F32), "f32"),
        ],
        steps: samples.map(step).collect(),
        loaders: vec![LoaderChoice {
            residency: DatasetResidency::UltraLowMem,
            decode_threads: 0,
            prefetch_batches: 0,
            rows: Vec::new(),
            relative_time: 1.0,
        }],
    };
    let budget = config.memory.budget.map_or(Budget::ShareOfAvailable, |bytes| Budget::Explicit(Bytes(bytes)));
    Ok(memory_policy::plan(&now, &costs, budget)?)
}

const LOSS_CHUNK_ROWS: usize = 256;
