//! Inference under a budget: how many samples `eval` and `generate` take at a time.

use candle_core::{DType, Device};
use memory_policy::{Budget, CostRow, Costs, LoaderChoice, Phase, Plan, Probe, StepChoice, SystemProbe};
use t5::costs::{Pass, Shape};
use trainer::{Precision, TrainerOptions};

use crate::bill;
use crate::evaluation::EvaluatedRows;
use crate::failure::Outcome;
use crate::rehearsal::rehearse;

/// What is computed.
pub struct Inference<'a> {
    /// By which model; its parameters are f32.
    pub model: &'a t5::Config,
    /// In which precision.
    pub precision: Precision,
    /// Where.
    pub device: &'a Device,
    /// Samples at a time, at most.
    pub most_samples: usize,
    /// The longest source.
    pub source_tokens: usize,
    /// The longest target, where a loss is computed too.
    pub target_tokens: Option<usize>,
    /// The longest answer.
    pub max_new_tokens: usize,
    /// The rows that are read, where they come from a dataset.
    pub rows: Option<EvaluatedRows<'a>>,
}

const LOSS_CHUNK_ROWS: usize = 256;

impl Inference<'_> {
    /// The largest cut that fits the budget.
    pub fn plan(&self, budget: Budget) -> Outcome<Plan> {
        let options = TrainerOptions { precision: self.precision, ..TrainerOptions::default() };
        rehearse(self.model, &options, self.device)?;
        let now = SystemProbe::new().snapshot()?;
        let samples = std::iter::successors(Some(self.most_samples.max(1)), |n| (*n > 1).then_some(n / 2));
        let costs = Costs {
            batch_samples: self.most_samples,
            fixed: vec![
                CostRow::new("process", now.rss.0, "measured"),
                bill::small_blocks(),
                CostRow::new("parameters", t5::costs::parameters(self.model, DType::F32), "f32"),
            ],
            steps: samples.map(|samples| self.choice(samples)).collect(),
            loaders: vec![LoaderChoice { relative_time: 1.0, ..LoaderChoice::default() }],
        };
        Ok(memory_policy::plan(&now, &costs, budget)?)
    }

    fn choice(&self, samples: usize) -> StepChoice {
        let target_tokens = self.target_tokens.unwrap_or(1);
        let shape = Shape { samples, source_tokens: self.source_tokens, target_tokens };
        let pass = Pass {
            shape,
            activations: self.precision.activations(),
            gradients: DType::F32,
            recompute_blocks: 0,
            loss_chunk_rows: LOSS_CHUNK_ROWS,
            dropout: false,
        };
        let reading = self.rows.as_ref().map_or(0, |rows| rows.bytes(samples));
        let reading = t5::CostRow { name: "rows", bytes: reading };
        let note = format!("{samples} samples");
        let row = |row: &t5::CostRow, note: &str| CostRow::new(row.name, row.bytes, note);
        let phase = |name: &str, tensors: Vec<t5::CostRow>| {
            let rows = tensors.iter().chain([&reading]).map(|tensor| row(tensor, &note)).collect();
            Phase { name: name.to_owned(), rows }
        };
        let loading = t5::costs::load(self.model, DType::F32);
        let loading = loading.iter().map(|tensor| row(tensor, "a tensor on its way")).collect();
        let generation = t5::costs::generation(self.model, &shape, self.max_new_tokens, self.precision.activations());
        // No row is read before the model is there.
        let mut phases = vec![Phase { name: "loading".to_owned(), rows: loading }, phase("generation", generation)];
        if self.target_tokens.is_some() {
            phases.push(phase("evaluation", t5::costs::evaluation(self.model, &pass)));
        }
        StepChoice {
            micro_batch_samples: samples,
            loss_chunk_rows: LOSS_CHUNK_ROWS,
            evaluation_samples: samples,
            other_phases: phases,
            #[expect(clippy::cast_precision_loss, reason = "a relative time")]
            relative_time: 1.0 + 1.0 / samples as f64,
            ..StepChoice::default()
        }
    }
}
