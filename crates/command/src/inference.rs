//! What `eval`, `generate` and `serve` share: the plan, and the model where the plan has it.

use std::path::Path;

use candle_core::{DType, Device};
use memory_policy::{Budgets, Bytes, CostRow, MemorySnapshot, Probe, SystemProbe};
use planner::{Inference, Job, Pins, Plan, Prices};
use serde_json::{Value, json};
use t5::{AnswerShape, StoredWeights, T5};

use crate::answer_flags::WeightFlags;
use crate::failure::{Exit, Failure, Outcome};
use crate::{device, report};

/// A model that nobody trains, before it is loaded.
pub struct Asked<'a> {
    /// Its directory.
    pub directory: &'a Path,
    /// The directory of an adapter, which its shape has.
    pub adapter: Option<&'a Path>,
    /// Its shape.
    pub config: &'a t5::Config,
    /// Where it computes.
    pub device: &'a Device,
    /// Dtype of activations.
    pub activations: DType,
    /// Dtype of the weights, where another than the stored one was asked for.
    pub parameters: Option<DType>,
    /// Flags of the command.
    pub flags: &'a WeightFlags,
}

/// The computation.
pub struct Shape {
    /// Samples at a time, at most.
    pub samples: usize,
    /// The longest source and target in tokens.
    pub longest: (usize, usize),
    /// The answers.
    pub answer: AnswerShape,
    /// What the program holds beside.
    pub beside: Vec<CostRow>,
}

/// A plan for a model, and what is needed to load it.
pub struct Planned<'a> {
    asked: Asked<'a>,
    parameters: DType,
    stored: Option<StoredWeights>,
    now: MemorySnapshot,
    probe: SystemProbe,
    /// The plan.
    pub plan: Plan,
}

impl<'a> Asked<'a> {
    /// The fastest plan that fits.
    ///
    /// Weights keep the precision in which they are stored: whether in f32 or in bf16, the same values give the same bits.
    pub fn plan(
        self,
        shape: &Shape,
        rows: Option<planner::EvaluatedRows<'_>>,
        (budgets, pins): (Budgets, &Pins),
    ) -> Outcome<Planned<'a>> {
        let stored = StoredWeights::of(self.directory, self.config)?;
        let parameters = self.parameters.unwrap_or(if stored.is_bf16 { DType::BF16 } else { DType::F32 });
        let inference = Inference {
            activations: self.activations,
            parameters,
            stored: Some(stored),
            answer: shape.answer,
            has_targets: rows.is_some(),
            rows,
            beside: shape.beside.clone(),
        };
        let precisions = (parameters, self.activations);
        device::check_dtype(self.device, self.activations)?;
        let probe = device::probe(self.device, t5_ops::device_bytes(self.device));
        let now = planner::rehearse_inference(self.config, precisions, self.device, &probe)?;
        let job = Job::of_inference(self.config, inference, shape.samples, shape.longest, (budgets, pins));
        let place = device::place(self.device);
        let job = Job { place, prices: Prices::at(place, self.activations), ..job };
        let activations = self.activations;
        let plan = planner::plan(&job, &now).map_err(|error| match Failure::from(error) {
            failure if failure.exit == Exit::DoesNotFit && activations == DType::F32 => {
                failure.hint("`--precision bf16` needs less: activations and the key/value cache take half")
            }
            failure => failure,
        })?;
        let plan = plan.plan;
        Ok(Planned { asked: self, parameters, stored: Some(stored), now, probe, plan })
    }
}

impl Planned<'_> {
    /// The bill.
    pub fn bill(&self) -> String {
        self.plan.bill.to_string()
    }

    /// What answers hold beside the parameters.
    pub fn answer_bytes(&self) -> Outcome<planner::AnswerBytes> {
        let precisions = (self.parameters, self.asked.activations);
        Ok(planner::AnswerBytes::new(self.asked.config, precisions, device::place(self.asked.device))?)
    }

    /// The peak so far beside the predicted one, for people.
    pub fn peaks_in_words(&self) -> Outcome<String> {
        let (now, plan) = (self.probe.snapshot()?, &self.plan);
        let device = now.device.as_ref().map(|device| {
            format!("; on the device {} bytes, {} predicted", device.peak.0, plan.predicted_device_peak.0)
        });
        let device = device.unwrap_or_default();
        Ok(format!("peak {} bytes, {} predicted{device}", now.peak_rss.0, plan.predicted_peak.0))
    }

    /// Adds the same to a result.
    pub fn add_peaks(&self, result: &mut Value) -> Outcome<()> {
        let (now, plan) = (self.probe.snapshot()?, &self.plan);
        result["peak_rss_bytes"] = json!(now.peak_rss.0);
        result["predicted_peak_bytes"] = json!(plan.predicted_peak.0);
        device::add_peaks(&now, plan.predicted_device_peak, result);
        Ok(())
    }

    /// Loads the model to where the plan has its weights. From here on a device gives no more than its budget.
    pub fn load(&self) -> Outcome<T5> {
        let Asked { directory, device, flags, .. } = &self.asked;
        if let Some(text) = device::limit(device, &self.plan, &self.now) {
            report::warn(&text);
        }
        let model = if self.plan.step.levers.has_weights_on_disk() {
            let copied = self.copied();
            if copied > Bytes::ZERO && !self.plan.step.levers.has_host_memory() {
                report::note(&format!("{copied} of weights are copied to a file in {}", flags.offload_dir.display()));
            }
            let files = planner::files(&flags.offload_dir, &self.now, &self.plan);
            T5::load_in_place(directory, self.parameters, device, &files).map_err(|error| match error {
                t5::Error::Offload { .. } => Failure::internal(error.to_string())
                    .hint("name a directory with room for a copy of the weights: `--offload-dir DIR`"),
                error => error.into(),
            })?
        } else {
            T5::load(directory, self.parameters, device)?
        };
        let model = match (self.asked.adapter, &self.asked.config.lora) {
            (Some(adapter), Some(lora)) => {
                let model = model.with_adapter(lora.clone(), 0)?;
                t5::peft::AdapterDirectory::open(adapter, model.config())?.fill(model.parameters())?;
                model
            }
            _ => model,
        };
        // The memory of what was on its way.
        heap::release_unused();
        Ok(model)
    }

    /// Bytes of weights that are copied to a file.
    pub fn copied(&self) -> Bytes {
        let is_on_disk = self.plan.step.levers.has_weights_on_disk();
        Bytes(self.stored.filter(|_| is_on_disk).map_or(0, |stored| stored.copied(self.parameters)))
    }
}
