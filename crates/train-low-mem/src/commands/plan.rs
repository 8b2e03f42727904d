//! `train_low_mem plan`: what a run would hold and how it would be cut, without allocating any of it.

use dataloader::Position;
use memory_policy::{Bytes, CostRow, Costs, DatasetResidency, Explained, LoaderChoice, MemorySnapshot, Plan, Probe};
use serde_json::json;

use crate::bill::Wanted;
use crate::cli::PlanArgs;
use crate::config::Config;
use crate::failure::Outcome;
use crate::open;
use crate::rehearsal::rehearse;
use crate::run_dir::{RunDir, own_names};
use crate::{bill, options, report, setup};

/// Prints the bill and the plan.
pub fn plan(flags: &PlanArgs) -> Outcome<()> {
    let config = setup::read_config_to_plan(&flags.train)?;
    let machine = setup::machine(&flags.train, &config)?;
    // Whoever wants nothing explained needs only the choices that some budget would take.
    let wanted = if flags.explain { Wanted::All } else { Wanted::Undominated(None) };
    let (costs, total_steps) = costs(&config, machine.as_ref(), wanted)?;
    let now = machine.snapshot()?;
    let plan = memory_policy::plan(&now, &costs, bill::budgets(&config))?;
    if flags.json {
        let mut json = bill::plan_json(&plan);
        json["total_steps"] = json!(total_steps);
        report::result(&format!("{json:#}\n"))?;
        return Ok(());
    }
    report::result(&format!("{}\n{}", plan.bill, in_words(&plan)))?;
    if flags.explain {
        report::result(&format!("\n{}", explanation(&memory_policy::explain(&costs, &plan), &plan)))?;
    }
    Ok(())
}

/// Other values of a lever that are shown, of many evenly spaced ones.
const SHOWN: usize = 8;

/// Every lever with its value, and below it the others that were offered.
fn explanation(levers: &[Explained], plan: &Plan) -> String {
    let (mut text, peak) = (String::new(), plan.peak_of_tensors());
    for lever in levers {
        text += &format!("{} = {}\n", lever.lever, lever.chosen);
        let shown = || lever.others.iter().step_by(lever.others.len().div_ceil(SHOWN).max(1));
        let width = shown().map(|other| other.value.len()).max().unwrap_or(0);
        for other in shown() {
            let (sign, bytes) = match other.predicted_peak > peak {
                true => ("+", other.predicted_peak.saturating_sub(peak)),
                false => ("-", peak.saturating_sub(other.predicted_peak)),
            };
            let percent = 100.0 * (other.relative_time - 1.0);
            text += &format!("  {:<width$}  {sign}{:<12} {percent:+.1} % time\n", other.value, bytes.to_string());
        }
    }
    text
}

/// The costs of the config's run, and its steps where the data says how many.
fn costs(config: &Config, probe: &dyn Probe, wanted: Wanted<'_>) -> Outcome<(Costs, Option<u64>)> {
    if config.data.train.is_empty() {
        return Ok((costs_without_data(config, probe, wanted)?, config.train.max_steps));
    }
    // The embedded files have to lie somewhere while their footers are read.
    let (temporary, names) = (std::env::temp_dir(), own_names());
    trainer::Scratch::remove_abandoned(&temporary, &names);
    let directory = trainer::Scratch::create_in(&temporary, &names)?;
    let mut place = RunDir::look_at(directory.path());
    let config = setup::place_embedded_files(config.clone(), &mut place)?;
    let opened = setup::open(&config, directory.path(), false)?;
    let (loader, total_steps) = setup::steps(&config, &opened, Position::default(), 0)?;
    let options = options::trainer_options(&config, &opened.model, total_steps);
    rehearse(&opened.model, &options, &opened.device)?;
    let now = for_another_start(probe.snapshot()?);
    Ok((bill::costs(&config, &opened, &options, &now, &loader, wanted)?, Some(total_steps)))
}

/// The plan is for a run that is yet to start: what it accepts, that run accepts, though it measures its own process.
fn for_another_start(now: MemorySnapshot) -> MemorySnapshot {
    MemorySnapshot { rss: now.rss + memory_policy::ANOTHER_START, ..now }
}

/// The costs as far as they are known before any data is: the queue of batches, and no dataset.
fn costs_without_data(config: &Config, probe: &dyn Probe, wanted: Wanted<'_>) -> Outcome<Costs> {
    let model = open::model_without_data(config)?;
    // The writes of a run of unknown length are unknown, so only pinned files are offered.
    let options = options::trainer_options(config, &model, config.train.max_steps.unwrap_or(u64::MAX));
    rehearse(&model, &options, &candle_core::Device::Cpu)?;
    let now = for_another_start(probe.snapshot()?);
    let place = bill::place(config, &candle_core::Device::Cpu, &now);
    let step = bill::StepCosts::new(config, &model, &options, place)?.within(bill::budgets(config).process, &now);
    let mut fixed = vec![CostRow::new("process", now.rss.0, "measured; without the tokenizer")];
    fixed.push(bill::small_blocks());
    fixed.extend(step.fixed(&options)?);
    let prefetch_batches = config.memory.prefetch_batches.unwrap_or(2);
    let tokens = config.data.max_source_tokens + config.data.max_target_tokens;
    let batches = (prefetch_batches + 1) * config.train.batch_size * (4 * tokens + 96);
    Ok(Costs {
        batch_samples: config.train.batch_size,
        fixed,
        steps: wanted.of(step.choices(&config.memory)),
        loaders: vec![LoaderChoice {
            residency: DatasetResidency::UltraLowMem,
            decode_threads: config.memory.decode_threads.unwrap_or(1),
            prefetch_batches,
            rows: vec![CostRow::new("loader", batches as u64, "without the dataset, because `data.train` is not set")],
            relative_time: 1.0,
        }],
    })
}

/// The plan's numbers under the names of their pins.
fn in_words(plan: &Plan) -> String {
    let lines = [
        ("micro_batch_samples", plan.micro_batch_samples.to_string()),
        ("recompute_blocks", plan.recompute_blocks.to_string()),
        ("loss_chunk_rows", plan.loss_chunk_rows.to_string()),
        ("prefetch_batches", plan.prefetch_batches.to_string()),
        ("decode_threads", plan.decode_threads.to_string()),
        ("dataset_residency", plan.residency.to_string()),
        ("smallest budget of this plan", Bytes::to_string(&plan.required())),
    ];
    lines.iter().map(|(name, value)| format!("  {name:<30}{value}\n")).collect()
}
