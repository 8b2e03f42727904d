//! The common part of `eval`, `generate` and `serve`: the plan, and the model with its weights placed by the plan.

use std::path::Path;

use candle_core::{DType, Device};
use memory_policy::{Budgets, Bytes, CostRow, MemorySnapshot, Probe, SystemProbe};
use planner::{AnsweredBatch, Inference, InferencePace, Job, Pins, Plan, Prices, RowCounts};
use serde_json::{Value, json};
use t5::peft::AdapterDirectory;
use t5::{AnswerShape, ModelDirectory, StoredWeights, T5};

use crate::answers::prompts::{Inputs, Limits};
use crate::cli::answer_flags::WeightFlags;
use crate::config::PricesFrom;
use crate::failure::{Exit, Failure, Outcome};
use crate::machine::stages::Stages;
use crate::machine::{device, speed};
use crate::run::faster_device::{self, Chosen};
use crate::screen::report;

/// The longest source and answer, in tokens, for comparing devices: few texts are as long as allowed.
const TYPICAL: (usize, usize) = (128, 64);

/// A model for inference, before it is loaded.
#[derive(Clone)]
pub struct Asked<'a> {
    /// Its directory.
    pub directory: &'a Path,
    /// The directory of an adapter, which is part of `config`.
    pub adapter: Option<&'a Path>,
    /// Its config.
    pub config: &'a t5::Config,
    /// The device that a flag names. Without one, the faster device is chosen.
    pub device: Option<&'a Device>,
    /// The prices for that choice.
    pub prices: PricesFrom,
    /// Dtype of activations.
    pub activations: DType,
    /// Dtype of the weights, if one other than the stored dtype was requested.
    pub parameters: Option<DType>,
    /// Flags of the command.
    pub flags: &'a WeightFlags,
    /// The memory of opening the model's files, its tokenizer and the rows.
    pub stages: &'a Stages,
}

/// The computation.
pub struct Shape {
    /// Samples at a time, at most.
    pub samples: usize,
    /// The longest source and target in tokens.
    pub longest: (usize, usize),
    /// The answers.
    pub answer: AnswerShape,
    /// Answers for each sample: less than one if some samples are only evaluated.
    pub answered: f64,
    /// The numbers of rows that are evaluated and answered.
    pub counts: RowCounts,
    /// Whether each sample has its own cache, and may arrive and leave at any time.
    pub is_served: bool,
    /// The bytes of prompts, while they are read and while they are answered.
    pub prompts: planner::Reading,
    /// Rows of the program's other memory.
    pub beside: Vec<CostRow>,
}

impl Shape {
    /// Only answers, to at most `samples` sources at a time, each with at most `source_tokens` tokens.
    pub fn of_answers(samples: usize, source_tokens: usize, answer: AnswerShape) -> Self {
        let (longest, beside) = ((source_tokens, 1), Vec::new());
        let (counts, prompts) = (RowCounts::ANY, planner::Reading::default());
        Self { samples, longest, answer, answered: 1.0, counts, is_served: false, prompts, beside }
    }

    /// A batch of `samples` samples with the lengths for comparing devices.
    fn typical(&self, samples: usize) -> AnsweredBatch {
        let (source_tokens, target_tokens) = self.longest;
        AnsweredBatch {
            samples,
            caches: if self.is_served { samples } else { 1 },
            source_tokens: source_tokens.min(TYPICAL.0),
            target_tokens: target_tokens.max(self.answer.max_new_tokens).min(TYPICAL.1),
        }
    }
}

/// A plan for a model, and the values needed to load it.
pub struct Planned<'a> {
    asked: Asked<'a>,
    on: OnDevice,
    /// The device that computes.
    pub chosen: Chosen,
    /// The plan.
    pub plan: Plan,
}

/// The facts about a device that determine a plan.
struct OnDevice {
    device: Device,
    model: t5::Config,
    parameters: DType,
    stored: StoredWeights,
    now: MemorySnapshot,
    probe: SystemProbe,
}

/// The rows that are evaluated.
type Rows<'a> = Option<planner::EvaluatedRows<'a>>;
/// The limits of a plan.
type Within<'a> = (Budgets, &'a Pins);

impl<'a> Asked<'a> {
    /// The plan with the widest limits of reading an input that fit, and these limits. `shape` is the computation within given ones.
    pub fn plan_to_read(
        self,
        inputs: Inputs<'_>,
        budgets: Budgets,
        shape: impl Fn(Limits) -> Shape,
    ) -> Outcome<(Planned<'a>, Limits)> {
        let now = SystemProbe::new().snapshot()?;
        let mut limits = Limits::within(inputs, budgets.process.resolve(&now), &now)?.into_iter().peekable();
        loop {
            let Some(within) = limits.next() else { return Err(Failure::internal("an input without limits")) };
            match self.clone().plan(&shape(within), None, (budgets, &Pins::default())) {
                Err(failure) if failure.exit == Exit::DoesNotFit && limits.peek().is_some() => {}
                planned => return Ok((planned?, within)),
            }
        }
    }

    /// The fastest plan that fits, on the named device or on the faster one. Prints a line with a chosen device.
    ///
    /// Weights keep the precision in which they are stored: the same values give the same bits, in f32 or in bf16.
    pub fn plan(self, shape: &Shape, rows: Rows<'_>, within: Within<'_>) -> Outcome<Planned<'a>> {
        self.flags.check_offload_dir()?;
        let what = if rows.is_some() {
            "a row".to_owned()
        } else {
            format!("an answer of {} tokens", shape.typical(1).target_tokens)
        };
        let chosen = faster_device::of_command(self.device, self.prices, &what, |device| {
            let on = self.on(device)?;
            let job = self.job(&on, shape, rows.clone(), within);
            let plan = self.plan_on(&on, &job)?;
            let batch = shape.typical(plan.step.evaluation_samples);
            let pace = self.pace(&on, &job, &plan, batch)?;
            #[expect(clippy::cast_precision_loss, reason = "samples of a batch")]
            Ok(pace.map(|pace| (pace.loss_seconds + shape.answered * pace.answers_seconds()) / batch.samples as f64))
        });
        chosen.note();
        // `eval` knows this flag as a key, and says it.
        if chosen.device.is_cpu() && self.flags.device_memory_budget.is_some() && rows.is_none() {
            report::warn("`--device-memory-budget` has no effect: the CPU computes");
        }
        let on = self.on(&chosen.device)?;
        let plan = self.plan_on(&on, &self.job(&on, shape, rows, within))?;
        Ok(Planned { asked: self, on, chosen, plan })
    }

    /// The facts about the device, after a rehearsal.
    fn on(&self, device: &Device) -> Outcome<OnDevice> {
        let stored = StoredWeights::read(self.directory, self.config)?;
        let adapter = self.adapter.map(|adapter| AdapterDirectory::open(adapter, self.config)).transpose()?;
        let stored = adapter.iter().fold(stored, StoredWeights::with_adapter);
        let parameters = self.parameters.unwrap_or(if stored.is_bf16 { DType::BF16 } else { DType::F32 });
        device::check_dtype(device, self.activations)?;
        // A card does not have kernels for every dtype of a frozen base.
        let kept = self.config.stored.clone().filter(|_| device.is_cpu());
        let model = t5::Config { stored: kept, ..self.config.clone() };
        let probe = device::probe(device, device::device_baseline(device));
        let now = planner::rehearse_inference(&model, (parameters, self.activations), device, &probe)?;
        Ok(OnDevice { device: device.clone(), model, parameters, stored, now, probe })
    }

    /// The job on that device.
    fn job<'b>(&self, on: &'b OnDevice, shape: &Shape, rows: Rows<'b>, (budgets, pins): Within<'b>) -> Job<'b> {
        let activations = self.activations;
        let inference = Inference {
            activations,
            parameters: on.parameters,
            stored: Some(on.stored),
            answer: shape.answer,
            counts: shape.counts,
            has_targets: rows.is_some(),
            rows,
            prompts: shape.prompts,
            beside: shape.beside.clone(),
        };
        let job = Job::of_inference(&on.model, inference, shape.samples, shape.longest, (budgets, pins));
        let place = device::place(&on.device);
        Job { place, prices: Prices::at(place, activations), past: self.stages.rows(&on.now), ..job }
    }

    /// The fastest plan that fits on that device.
    fn plan_on(&self, on: &OnDevice, job: &Job<'_>) -> Outcome<Plan> {
        let plan = planner::plan(job, &on.now).map_err(|error| match Failure::from(error) {
            failure if failure.exit == Exit::DoesNotFit && self.activations == DType::F32 => {
                failure.hint("`--precision bf16` needs less: activations and the key/value cache take half")
            }
            failure => failure,
        })?;
        Ok(plan.plan)
    }

    /// The pace of a plan over such batches, if the device was measured.
    fn pace(&self, on: &OnDevice, job: &Job<'_>, plan: &Plan, batch: AnsweredBatch) -> Outcome<Option<InferencePace>> {
        let speed = speed::measured(self.prices, &on.model, &on.device, &self.flags.offload_dir)?;
        Ok(planner::inference_pace(job, &on.now, plan, &speed, batch))
    }
}

impl Planned<'_> {
    /// The bill.
    pub fn bill(&self) -> String {
        self.plan.bill.to_string()
    }

    /// Counts the bytes of answers beside the parameters.
    pub fn answer_bytes(&self) -> Outcome<planner::AnswerBytes> {
        let precisions = (self.on.parameters, self.asked.activations);
        Ok(planner::AnswerBytes::new(&self.on.model, precisions, device::place(&self.on.device))?)
    }

    /// The pace of the plan over such batches, if devices are measured.
    pub fn pace(&self, shape: &Shape, within: Within<'_>, batch: AnsweredBatch) -> Outcome<Option<InferencePace>> {
        let job = self.asked.job(&self.on, shape, None, within);
        let is_measured = faster_device::is_measured(self.asked.prices);
        let pace = is_measured.then(|| self.asked.pace(&self.on, &job, &self.plan, batch)).transpose()?;
        Ok(pace.flatten())
    }

    /// The peak so far and the predicted peak, in words.
    pub fn peaks_in_words(&self) -> Outcome<String> {
        let (now, plan) = (self.on.probe.snapshot()?, &self.plan);
        let device = now
            .device
            .as_ref()
            .map(|device| format!("; on the device {} of {} planned", device.peak, plan.predicted_device_peak));
        let device = device.unwrap_or_default();
        Ok(format!("peak {} of {} planned{device}", now.peak_rss, plan.predicted_peak))
    }

    /// Adds both peaks to a result, and the reason for the device.
    pub fn add_peaks(&self, result: &mut Value) -> Outcome<()> {
        self.chosen.add_to(result);
        let (now, plan) = (self.on.probe.snapshot()?, &self.plan);
        result["peak_rss_bytes"] = json!(now.peak_rss.0);
        result["predicted_peak_bytes"] = json!(plan.predicted_peak.0);
        device::add_peaks(&now, plan.predicted_device_peak, result);
        Ok(())
    }

    /// Loads the model, with its weights placed by the plan. After this, the device is limited to its budget.
    pub fn load(&self) -> Outcome<T5> {
        let Asked { directory, flags, config, .. } = &self.asked;
        let directory = ModelDirectory { path: directory, head: Some(&config.head), seed: 0 };
        let OnDevice { device, parameters, now, .. } = &self.on;
        if let Some(text) = device::limit(device, &self.plan, now) {
            report::warn(&text);
        }
        let model = if self.plan.step.levers.has_weights_on_disk() {
            let copied = self.copied();
            if copied > Bytes::ZERO && !self.plan.step.levers.has_host_memory() {
                report::note(&format!("{copied} of weights are copied to a file in {}", flags.offload_dir.display()));
            }
            let files = planner::files(&flags.offload_dir, now, &self.plan);
            T5::load_in_place(directory, *parameters, device, &files).map_err(|error| match error {
                t5::Error::Offload { .. } => Failure::internal(error.to_string())
                    .hint("name a directory with room for a copy of the weights: `--offload-dir DIR`"),
                error => error.into(),
            })?
        } else {
            T5::load(directory, *parameters, device)?
        };
        let model = match (self.asked.adapter, &self.asked.config.lora) {
            (Some(adapter), Some(lora)) => {
                let mut model = model.with_adapter(lora.clone(), 0)?;
                AdapterDirectory::open(adapter, model.config())?.fill(model.parameters())?;
                model.set_prefix(self.asked.config.prefix());
                model
            }
            _ => model,
        };
        // Frees the memory of tensors in transit.
        heap::release_unused();
        Ok(model)
    }

    /// Bytes of weights that are copied to a file.
    pub fn copied(&self) -> Bytes {
        let is_on_disk = self.plan.step.levers.has_weights_on_disk();
        Bytes(if is_on_disk { self.on.stored.copied(self.on.parameters) } else { 0 })
    }
}
