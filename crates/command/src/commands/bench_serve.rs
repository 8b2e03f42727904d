//! `train_low_mem bench serve`: times and measures answers of a fixed length, made as in `serve`.
//!
//! Sources are random tokens without padding, and no answer ends early. All sources of a batch arrive together, so the time to the first
//! token is the time of their encoder passes and of one step.

use std::rc::Rc;
use std::time::Instant;

use candle_core::DType;
use memory_policy::Bytes;
use planner::{AnsweredBatch, Pins};
use run_report::figures::median;
use serde_json::{Value, json};
use t5::{Beams, ContinuousBatch, GenerateOptions, Processors, Search, T5};

use crate::answers::inference::{Asked, Shape};
use crate::cli::answer_flags::WeightFlags;
use crate::cli::serve_flags::BenchServeArgs;
use crate::config::PricesFrom;
use crate::failure::{Exit, Failure, Outcome};
use crate::machine::device;
use crate::machine::stages::Stages;
use crate::model::model_directory;
use crate::screen::report;

/// Answers batches of each size.
pub fn bench_serve(flags: &BenchServeArgs) -> Outcome<()> {
    let sizes = &flags.batch;
    if sizes.contains(&0) || flags.source_tokens < 2 || flags.new_tokens < 2 || flags.num_beams == 0 {
        return Err(Failure::usage("`bench serve` needs at least 1 source, 2 tokens of it and 2 new ones, and 1 beam"));
    }
    let device = device::named(flags.device.as_deref())?;
    let activations: DType = trainer::Precision::from(flags.precision).activations();
    let directory = model_directory::find(&flags.model)?;
    let config = t5::Config::from_file(&directory.join("config.json"))?.with_head(t5::Head::Language)?;
    let search = match flags.num_beams {
        1 => Search::Greedy,
        count => Search::Beams(Beams { count, ..Beams::default() }),
    };
    let answers = GenerateOptions {
        max_new_tokens: flags.new_tokens,
        activations,
        processors: Processors { min_new_tokens: flags.new_tokens, ..Processors::default() },
        search,
        ..GenerateOptions::default()
    };
    let weights = WeightFlags {
        memory_budget: flags.memory_budget.clone(),
        device_memory_budget: None,
        offload_dir: ".".into(),
        dry_run: false,
    };
    let stages = Stages::begin()?;
    let asked = Asked {
        directory: &directory,
        adapter: None,
        config: &config,
        device: device.as_ref(),
        prices: PricesFrom::of_environment(),
        activations,
        parameters: None,
        flags: &weights,
        stages: &stages,
    };
    let samples = sizes.iter().copied().max().unwrap_or(1);
    let shape = Shape { is_served: true, ..Shape::of_answers(samples, flags.source_tokens, answers.shape()) };
    let pins = Pins::default();
    let within = (weights.budgets()?, &pins);
    let planned = asked.plan(&shape, None, within)?;
    let most = planned.plan.step.evaluation_samples;
    let fitting: Vec<usize> = sizes.iter().copied().filter(|&size| size <= most).collect();
    let predicted = |&size: &usize| {
        let (source_tokens, target_tokens) = (flags.source_tokens, flags.new_tokens);
        planned.pace(&shape, within, AnsweredBatch { samples: size, caches: size, source_tokens, target_tokens })
    };
    // Before the model is loaded, because the measurements for it take memory.
    let predicted: Vec<_> = fitting.iter().map(predicted).collect::<Outcome<_>>()?;
    let model = Rc::new(planned.load()?);
    let mut lines = Vec::new();
    for (&size, predicted) in fitting.iter().zip(predicted) {
        // The first time does not count: it pages in code and packs weights.
        let times: Vec<(f64, f64)> =
            (0..=flags.rounds).map(|_| timed(&model, size, flags.source_tokens, &answers)).collect::<Outcome<_>>()?;
        let median = |of: fn(&(f64, f64)) -> f64| median(times[1..].iter().map(of)).unwrap_or(f64::NAN);
        let (first, whole) = (median(|times| times.0), median(|times| times.1));
        #[expect(clippy::cast_precision_loss, reason = "tokens are far below 2^53")]
        let tokens = (size * flags.new_tokens) as f64;
        lines.push(json!({
            "batch": size,
            "tokens_per_second": tokens / whole,
            "first_token_ms": first * 1e3,
            "answer_ms": whole * 1e3,
            "predicted_answer_ms": predicted.map(|pace| pace.answers_seconds() * 1e3),
        }));
    }
    let mut result = json!({
        "model": directory.display().to_string(),
        "source_tokens": flags.source_tokens,
        "new_tokens": flags.new_tokens,
        "num_beams": flags.num_beams,
        "precision": flags.precision.name(),
        "threads": t5_ops::threads(),
        "batches": lines,
    });
    planned.add_peaks(&mut result)?;
    report::result(&if flags.json { format!("{result}\n") } else { table(&result) })?;
    match sizes.iter().find(|&&size| size > most) {
        None => Ok(()),
        Some(size) => {
            Err(Failure::new(Exit::DoesNotFit, format!("{size} sources do not fit the budget together; {most} do"))
                .hint("raise `--memory-budget`, or name smaller batches: `--batch 1,8`"))
        }
    }
}

/// Seconds to the first token of all answers, and to the last.
fn timed(model: &Rc<T5>, size: usize, source_tokens: usize, answers: &GenerateOptions) -> Outcome<(f64, f64)> {
    let mut together = ContinuousBatch::new(Rc::clone(model), answers.activations);
    let config = model.config();
    let begun = Instant::now();
    for key in 0..size {
        // Any tokens, except the special ones at the front of most vocabularies.
        let token = |place: usize| (3 + (key * 7919 + place * 104_729) % (config.vocab_size.max(4) - 3)) as u32;
        let mut source: Vec<u32> = (1..source_tokens).map(token).collect();
        source.extend(config.eos_token_ids.first().copied());
        together.join(key as u64, &source, answers, &|| false)?;
    }
    together.step(&mut |_| false)?;
    let first = begun.elapsed().as_secs_f64();
    while !together.is_empty() {
        together.step(&mut |_| false)?;
    }
    Ok((first, begun.elapsed().as_secs_f64()))
}

/// The result as text.
fn table(result: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or_default();
    let mut text = format!(
        "{} new tokens after {} of the source, beams: {}, {}\n{:>6} {:>14} {:>16} {:>12} {:>12}\n",
        result["new_tokens"],
        result["source_tokens"],
        result["num_beams"],
        result["precision"].as_str().unwrap_or_default(),
        "batch",
        "tokens/s",
        "first token ms",
        "answer ms",
        "predicted"
    );
    for line in result["batches"].as_array().into_iter().flatten() {
        text += &format!(
            "{:>6} {:>14.1} {:>16.1} {:>12.1} {:>12}\n",
            line["batch"],
            number(&line["tokens_per_second"]),
            number(&line["first_token_ms"]),
            number(&line["answer_ms"]),
            line["predicted_answer_ms"].as_f64().map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1}"))
        );
    }
    let bytes = |name: &str| Bytes(result[name].as_u64().unwrap_or(0));
    text + &format!("peak {}, {} predicted\n", bytes("peak_rss_bytes"), bytes("predicted_peak_bytes"))
}
