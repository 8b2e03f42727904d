//! `train_low_mem bench`: optimizer steps over synthetic full-length samples, timed and measured.
//!
//! A step is the same as in training: forward, backward, clipping and Adafactor, with dropout, over `batch` samples without padding. With
//! `--lora` it trains an adapter, and the optimizer is AdamW. The first step is not timed, because it allocates. If a plan records
//! micro-batches, steps are not timed until every micro-batch is launched as graphs.

use std::time::{Duration, Instant};

use candle_core::Device;
use memory_policy::{Budgets, CostRow, MemorySnapshot, MemorySpace, Probe, SystemProbe};
use planner::{Feed, Job, Pace, Plan, Prices, RECORDED_MICRO_BATCHES, Training, Value, Wanted, Work};
use run_plan::priced::Priced;
use run_report::figures::median;
use serde_json::{Value as Json, json};
use t5::{Lora, ParameterSpec, T5};
use trainer::adafactor::AdafactorOptions;
use trainer::adamw::AdamwOptions;
use trainer::{Batch, StepOutcome, StepPlan, StepStats, Trainer, TrainerOptions};

use crate::cli::flag_values::Precision;
use crate::cli::{BenchArgs, OtherBench};
use crate::config::PricesFrom;
use crate::failure::{Failure, Outcome};
use crate::machine::device;
use crate::machine::profile::{Profile, Profiler};
use crate::machine::speed::priced;
use crate::machine::stages::{self, Stages};
use crate::run::faster_device::{self, Chosen};
use crate::run::open;
use crate::run::options::master_weights;
use crate::screen::report;

/// Bytes that a bench may write if no flag asks for a file: the default of `memory.disk_writes`.
const MAX_WRITTEN: u64 = 1 << 40;
/// The most steps that are not timed. Micro-batches of one or two kinds are all launched as graphs by the fifth step.
const MAX_WARM_UP: usize = 8;

/// Times steps.
pub fn bench(flags: &BenchArgs) -> Outcome<()> {
    if let Some(OtherBench::Serve(flags)) = &flags.other {
        return super::bench_serve::bench_serve(flags);
    }
    let model = flags.model.as_deref().ok_or_else(|| Failure::usage("`bench` needs `--model`"))?;
    let base = open::named_config(model)?;
    let lora = flags.lora.map(|rank| Lora { rank: rank as usize, alpha: 2.0 * f64::from(rank), ..Lora::default() });
    let model = if let Some(lora) = &lora { base.with_adapter(lora.clone())? } else { base.clone() };
    if flags.batch == 0 || flags.source_tokens < 2 || flags.target_tokens < 2 || flags.steps == 0 {
        return Err(Failure::usage("`bench` needs at least 1 sample, 2 source and 2 target tokens and 1 step")
            .hint("for example `--batch 8 --source-tokens 256 --target-tokens 256 --steps 5`"));
    }
    flags.levers.check_directories()?;
    let options = options(flags, &model);
    let named = device::named(flags.device.as_deref())?;
    let prices = PricesFrom::of_environment();
    let chosen = faster_device::of_command(named.as_ref(), prices, "a step", |device| {
        Ok(BenchSetup::new(flags, &model, &options, device)?.pace.step_seconds)
    });
    chosen.note();
    let device = &chosen.device;
    let setup = BenchSetup::new(flags, &model, &options, device)?;
    if let Some(warning) = device::limit(device, &setup.plan, &setup.now) {
        report::warn(&warning);
    }
    let plan = StepPlan { levers: setup.plan.step.levers, longest: None };
    let mut profiler = if flags.profile { Some(Profiler::new(options.precision.activations(), device)?) } else { None };
    let files = planner::files(flags.levers.directory(), &setup.now, &setup.plan);
    let weights = plan.levers.has_weights_on_disk().then_some(&files);
    let new = T5::init_in(&base, 0, options.parameter_dtype(), device, weights).map_err(of_a_step)?;
    let new = if let Some(lora) = lora { new.with_adapter(lora, 0)? } else { new };
    let mut trainer = Trainer::new(new, options)?;
    trainer.offload_to(files);
    let timed = Timed::measure(flags, &model, &mut trainer, &plan, profiler.as_mut())?;
    let measured = setup.probe.snapshot()?;
    let measurement = Measurement {
        flags,
        chosen: &chosen,
        parameters: ParameterSpec::elements_of_all(&model),
        plan,
        timed,
        measured,
        profile: profiler.map(Profiler::finish),
        setup,
    };
    report::result(&if flags.json { format!("{}\n", measurement.to_json()) } else { measurement.to_text() })
}

fn options(flags: &BenchArgs, model: &t5::Config) -> TrainerOptions {
    let trains_adapter = flags.lora.is_some();
    TrainerOptions {
        dropout: model.dropout_rate,
        precision: flags.precision.into(),
        master_weights: master_weights(flags.master_weights.into(), flags.precision == Precision::Bf16, trains_adapter),
        optimizer: if trains_adapter { AdamwOptions::default().into() } else { AdafactorOptions::default().into() },
        gradient_precision: flags.gradient_precision.into(),
        total_steps: (MAX_WARM_UP + flags.steps) as u64,
        ..TrainerOptions::default()
    }
}

/// What a bench measured, beside what was predicted.
struct Measurement<'a> {
    flags: &'a BenchArgs,
    chosen: &'a Chosen,
    parameters: u64,
    setup: BenchSetup,
    plan: StepPlan,
    timed: Timed,
    /// The memory after the last step.
    measured: MemorySnapshot,
    profile: Option<Profile>,
}

impl Measurement<'_> {
    /// The median time of a step in milliseconds, and the tokens of a second.
    fn speed(&self) -> (f64, f64) {
        let median_ms = median(self.timed.step_ms.iter().copied()).unwrap_or(f64::NAN);
        let tokens = self.flags.batch * (self.flags.source_tokens + self.flags.target_tokens);
        #[expect(clippy::cast_precision_loss, reason = "tokens of a batch are far below 2^53")]
        let tokens_per_second = tokens as f64 * 1e3 / median_ms;
        (median_ms, tokens_per_second)
    }

    fn precision(&self) -> &'static str {
        if self.flags.precision == Precision::F32 { "f32" } else { "bf16" }
    }

    fn to_json(&self) -> Json {
        let Self { flags, setup: BenchSetup { plan: planned, pace, priced, .. }, timed, measured, .. } = self;
        let ((median_ms, tokens_per_second), levers) = (self.speed(), &self.plan.levers);
        let mut json = json!({
            "step_ms": median_ms, "tokens_per_second": tokens_per_second, "peak_rss_bytes": measured.peak_rss.0,
            "predicted_peak_bytes": planned.predicted_peak.0, "required_bytes": planned.required().0,
            "parameters": self.parameters, "precision": self.precision(),
            "threads": t5_ops::threads(), "instruction_set": t5_ops::instruction_set(), "steps": flags.steps, "batch": flags.batch, "source_tokens": flags.source_tokens,
            "target_tokens": flags.target_tokens, "micro_batch_samples": levers.micro_batch_samples,
            "recompute_blocks": levers.recompute_blocks, "relative_time": planned.relative_time,
            "predicted_step_ms": pace.step_seconds.map(|seconds| seconds * 1e3), "step_written_bytes": pace.step_written_bytes,
            "bf16_over_f32": priced.bf16_over_f32, "prices": priced.prices, "loss_chunk_rows": levers.loss_chunk_rows,
            "plan": planned.bill.conclusion, "tensor_bytes": heap::held().peak_live,
            "accumulation": accumulation(levers.layer_major.as_ref()), "step_ms_each": timed.step_ms,
            "warm_up_steps": timed.warm_up, "micro_batches": timed.micro_batches,
        });
        if levers.repeats {
            json["graph_micro_batches"] = json!(timed.graph_micro_batches());
        }
        self.chosen.add_to(&mut json);
        if let Some(on_device) = &measured.device {
            json["device_peak_bytes"] = json!(on_device.peak.0);
            json["predicted_device_peak_bytes"] = json!(planned.predicted_device_peak.0);
        }
        if let Some(profile) = &self.profile {
            json["profile"] = profile.to_json();
        }
        json
    }

    fn to_text(&self) -> String {
        let Self { flags, setup: BenchSetup { plan: planned, .. }, timed, measured, parameters, .. } = self;
        let ((median_ms, tokens_per_second), precision) = (self.speed(), self.precision());
        let mut text = format!(
            "{}: {parameters} parameters, {} x ({} + {}) tokens, {precision}, {} threads\n{median_ms:.1} ms a step (median of {}), {tokens_per_second:.0} tokens/s, peak {} (predicted {})\n",
            flags.model.as_deref().unwrap_or_default(),
            flags.batch,
            flags.source_tokens,
            flags.target_tokens,
            t5_ops::threads(),
            flags.steps,
            measured.peak_rss,
            planned.predicted_peak
        );
        if self.plan.levers.repeats {
            let (graph_micro_batches, of) = (timed.graph_micro_batches(), timed.micro_batches);
            text += &format!("micro-batches launched as graphs: {graph_micro_batches} of {of} a step\n");
        }
        if let Some(on_device) = &measured.device {
            let predicted = planned.predicted_device_peak;
            text += &format!("peak on the device {} (predicted {predicted})\n", on_device.peak);
        }
        text + &self.profile.as_ref().map(Profile::to_text).unwrap_or_default()
    }
}

/// The steps of a bench.
#[derive(Debug, Default)]
struct Timed {
    /// Steps that are not timed, because later steps take a different time.
    warm_up: usize,
    step_ms: Vec<f64>,
    micro_batches: usize,
    /// For each timed step, the micro-batches that were launched as graphs.
    graph_micro_batches: Vec<usize>,
    /// Whether the next step is timed.
    is_warm: bool,
}

impl Timed {
    /// Makes steps until `flags.steps` of them are timed.
    fn measure(
        flags: &BenchArgs,
        model: &t5::Config,
        trainer: &mut Trainer,
        plan: &StepPlan,
        mut profiler: Option<&mut Profiler>,
    ) -> Outcome<Self> {
        let mut timed = Self::default();
        while timed.step_ms.len() < flags.steps {
            let step = (timed.warm_up + timed.step_ms.len()) as u64;
            let [sources, targets] =
                [flags.source_tokens, flags.target_tokens].map(|tokens| samples(model, flags.batch, tokens, step));
            let began = Instant::now();
            let mut one_step = || trainer.step(&Batch { sources: &sources, targets: &targets }, plan, &|| false);
            let outcome = match profiler.as_mut().filter(|_| step > 0) {
                Some(profiler) => profiler.watch(one_step),
                None => one_step(),
            };
            let outcome = outcome.map_err(of_a_step)?;
            let StepOutcome::Done(stats) = outcome else {
                return Err(Failure::internal(format!("a step failed: {outcome}")));
            };
            timed.add(began.elapsed(), &stats, trainer.model().records_micro_batches());
        }
        Ok(timed)
    }

    /// Adds a step. `records`: repeating micro-batches will become graphs, if they are not graphs yet.
    fn add(&mut self, took: Duration, stats: &StepStats, records: bool) {
        self.micro_batches = stats.micro_batches;
        if self.is_warm {
            self.step_ms.push(took.as_secs_f64() * 1e3);
            self.graph_micro_batches.push(stats.graph_micro_batches);
        } else {
            self.warm_up += 1;
            let is_recorded = !records || stats.graph_micro_batches == stats.micro_batches;
            self.is_warm = is_recorded || self.warm_up == MAX_WARM_UP;
        }
    }

    /// The fewest micro-batches of a timed step that were launched as graphs.
    fn graph_micro_batches(&self) -> usize {
        self.graph_micro_batches.iter().copied().min().unwrap_or(0)
    }
}

/// A device with the facts that its plan follows from.
struct BenchSetup {
    probe: SystemProbe,
    now: MemorySnapshot,
    priced: Priced,
    plan: Plan,
    pace: Pace,
}

impl BenchSetup {
    /// Gathers the facts for the flags. Measures the device if that has not been done.
    fn new(flags: &BenchArgs, model: &t5::Config, options: &TrainerOptions, device: &Device) -> Outcome<Self> {
        device::check_dtype(device, options.precision.activations())?;
        let mut stages = Stages::begin()?;
        let probe = device::probe(device, device::device_baseline(device));
        let (tokens, place) = ((flags.source_tokens, flags.target_tokens), device::place(device));
        let (from, on) = (PricesFrom::of_environment(), (place, device));
        let priced = priced(from, model, options, tokens, on, flags.levers.directory())?;
        stages.ends(stages::SPEED)?;
        let now = planner::rehearse(model, options, device, &probe)?;
        let (plan, pace) = plan(flags, model, options, (place, &now, stages.rows(&now)), priced.prices)?;
        Ok(Self { probe, now, priced, plan, pace })
    }
}

/// The plan for the flags, and its pace. With a budget, the planner chooses the levers that no flag sets.
fn plan(
    flags: &BenchArgs,
    model: &t5::Config,
    options: &TrainerOptions,
    (place, now, past): (MemorySpace, &MemorySnapshot, Vec<CostRow>),
    prices: Prices,
) -> Outcome<(Plan, Pace)> {
    let is_free = flags.memory_budget.is_some() || flags.device_memory_budget.is_some();
    let pins = flags.levers.pins((!is_free).then_some(place));
    // The operations of a graph cannot be timed individually.
    let pins = if flags.profile { pins.with(RECORDED_MICRO_BATCHES.name, Value::Word("none")) } else { pins };
    let training = Training {
        options,
        disk_writes: MAX_WRITTEN,
        evaluation: None,
        saves: false,
        wanted: Wanted::Undominated(None),
        base: None,
        frozen: None,
        processes: planner::Processes::default(),
        lengths: &[],
    };
    let job = Job {
        model,
        work: Work::Training(training),
        samples: flags.batch,
        longest: (flags.source_tokens, flags.target_tokens),
        place,
        budgets: Budgets {
            process: planner::budget_of(flags.memory_budget.map(|bytes| bytes.0)),
            device: planner::budget_of(flags.device_memory_budget.map(|bytes| bytes.0)),
        },
        pins: &pins,
        feed: Feed::Given,
        process_note: "measured: program",
        past,
        prices,
    };
    let plan = planner::plan(&job, now)?.plan;
    let pace = planner::pace(&job, now, &plan, &[])?;
    Ok((plan, pace))
}

/// A failure of the model or of a step. A bench keeps nothing that could be resumed.
fn of_a_step(error: impl Into<trainer::Error>) -> Failure {
    match error.into() {
        trainer::Error::Model(error @ t5::Error::Offload { .. }) => Failure::internal(error.to_string())
            .hint("name a directory with more room: `--offload DIR` and similar flags"),
        error => error.into(),
    }
}

/// The name in `--json` of the order of micro-batches and blocks: the debug form, which scripts read.
fn accumulation(layer_major: Option<&t5::LayerMajor>) -> String {
    layer_major.map_or("MicroBatchMajor".to_owned(), |layers| format!("LayerMajor({layers:?})"))
}

/// Samples of full length, ended by EOS. Each token depends only on its position.
fn samples(model: &t5::Config, count: usize, tokens: usize, step: u64) -> Vec<Vec<u32>> {
    let eos = model.eos_token_ids.first().copied().unwrap_or(1);
    let ordinary = (model.vocab_size as u64).saturating_sub(3).max(1);
    let token = |sample: usize, place: usize| {
        let mut bits = (step << 40) ^ ((sample as u64) << 20) ^ place as u64;
        // The finaliser of splitmix64 spreads neighbouring positions over the vocabulary.
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u32::try_from((bits ^ (bits >> 31)) % ordinary).unwrap_or(0) + if ordinary > 3 { 3 } else { 0 }
    };
    (0..count).map(|sample| (0..tokens - 1).map(|place| token(sample, place)).chain([eos]).collect()).collect()
}

#[cfg(test)]
mod tests {
    use memory_policy::Bytes;

    use super::*;

    /// The plan of t5-small with these flags on a device of 8 GiB.
    fn on_a_device(flags: &[&str]) -> Outcome<Plan> {
        #[derive(clap::Parser)]
        struct Flags {
            #[command(flatten)]
            flags: BenchArgs,
        }
        let typed = ["bench", "--model", "t5-small", "--batch", "2", "--source-tokens", "16", "--target-tokens", "16"];
        let Flags { flags } = clap::Parser::parse_from(typed.iter().chain(flags));
        let model = t5::Config::preset("t5-small").expect("a preset");
        let card = memory_policy::DeviceMemory { total: Bytes::gib(8), free: Bytes::gib(8), ..Default::default() };
        let now = MemorySnapshot { available: Bytes::gib(8), device: Some(card), ..MemorySnapshot::default() };
        let options = TrainerOptions { total_steps: 2, ..TrainerOptions::default() };
        Ok(plan(&flags, &model, &options, (MemorySpace::Device, &now, Vec::new()), Prices::vectors())?.0)
    }

    #[test]
    fn a_device_that_computes_is_billed_and_so_is_the_host_for_what_waits_there() {
        let plan = on_a_device(&[]).expect("it fits");
        // Parameters and gradients in f32.
        assert!(plan.predicted_device_peak > Bytes(2 * 4 * 60_506_624), "{}", plan.bill);
        // The host holds the largest tensor while it is copied, and little else.
        assert!(plan.predicted_peak < Bytes(4 * 32_128 * 512) + Bytes::mib(4), "{}", plan.bill);
        for flag in ["--offload", "--offload-gradients", "--offload-weights"] {
            let [disk, host] = ["disk", "host"].map(|place| {
                on_a_device(&["--accumulation", "layer-major", flag, ".", "--offload-to", place]).expect("it fits")
            });
            assert!(disk.step.levers.uses_files() && !host.step.levers.uses_files(), "{flag}: {}", host.bill);
            let waits = |plan: &Plan| {
                let mut rows = plan.bill.phase_rows.iter().flat_map(|phase| &phase.rows);
                rows.any(|row| row.name == planner::names::OFFLOADED_TO_HOST && row.bytes > Bytes::ZERO)
            };
            assert!(waits(&host) && !waits(&disk), "{flag}: {}", host.bill);
        }
        let failure = on_a_device(&["--device-memory-budget", "100MiB"]).expect_err("too little").to_string();
        assert!(failure.contains("device memory budget"), "{failure}");
    }

    #[test]
    fn steps_are_timed_from_the_first_that_later_ones_are_like() {
        let stats = |graph_micro_batches| StepStats {
            preference: None,
            contrastive: None,
            ranking: None,
            step: 1,
            loss: 0.0,
            objective: None,
            lr: 0.0,
            grad_norm: 0.0,
            target_tokens: 1,
            source_tokens: 1,
            padded_tokens: 2,
            micro_batches: 2,
            graph_micro_batches,
        };
        let warm_up = |graph_micro_batches: &[usize], records| {
            let mut timed = Timed::default();
            graph_micro_batches.iter().for_each(|&count| timed.add(Duration::from_millis(1), &stats(count), records));
            assert_eq!(timed.warm_up + timed.step_ms.len(), graph_micro_batches.len());
            (timed.warm_up, timed.graph_micro_batches())
        };
        assert_eq!(warm_up(&[0, 0, 0], false), (1, 0));
        assert_eq!(warm_up(&[0, 1, 2, 2], true), (3, 2));
        assert_eq!(warm_up(&[0, 1, 2, 2, 1, 2], true), (3, 1));
        // If micro-batches never become graphs, the bench notices.
        assert_eq!(warm_up(&[1; 20], true), (MAX_WARM_UP, 1));
    }

    #[test]
    fn samples_are_full_and_inside_the_vocabulary() {
        let model = t5::Config::preset("tiny").expect("a preset");
        let samples = samples(&model, 3, 10, 1);
        assert!(samples.iter().all(|sample| sample.len() == 10 && sample[9] == 1));
        assert!(samples.iter().flatten().all(|id| (*id as usize) < model.vocab_size));
        assert_ne!(samples[0], samples[1]);
    }
}
