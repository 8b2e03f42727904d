//! Inference as choices: how many samples `eval` and `generate` take at a time.

use candle_core::DType;
use memory_policy::{CostRow, Phase};
use t5::Levers;

use crate::counted::{Counter, Held};
use crate::error::Result;
use crate::job::Inference;
use crate::levers::Step;
use crate::names::{EVALUATION, GENERATION, LOADING, PARAMETERS, ROWS};
use crate::search::halvings;
use crate::{Job, StepChoice};

const LOSS_CHUNK_ROWS: usize = 256;

/// The choices of inference: its fixed memory, and the numbers of samples at a time.
pub(crate) fn offer(job: &Job<'_>, inference: &Inference<'_>) -> Result<(Vec<CostRow>, Vec<StepChoice>)> {
    let counter = Counter::new(job.model, inference.activations, job.longest)?;
    let parameters = CostRow::new(PARAMETERS, counter.parameters(DType::F32), "f32");
    let choice = |samples| inference.choice(&counter, samples);
    Ok((vec![parameters], halvings(job.samples).into_iter().map(choice).collect()))
}

impl Inference<'_> {
    fn choice(&self, counter: &Counter<'_>, samples: usize) -> StepChoice {
        let note = format!("{samples} samples");
        let reading = CostRow::new(ROWS, self.rows.as_ref().map_or(0, |rows| rows.bytes(samples)), &note);
        let phase = |name, tensors: &[Held]| {
            let rows = tensors.iter().map(|held| held.row(&note)).chain([reading.clone()]).collect();
            Phase { name, rows }
        };
        let loading = counter.loading(DType::F32).iter().map(|held| held.row("a tensor in transit")).collect();
        let counted = counter.evaluation(samples, LOSS_CHUNK_ROWS, self.max_new_tokens);
        let [evaluation, generation] = counted.as_ref();
        // No row is read before the model is there.
        let mut other_phases = vec![Phase { name: LOADING, rows: loading }, phase(GENERATION, generation)];
        if self.has_targets {
            other_phases.push(phase(EVALUATION, evaluation));
        }
        let levers = Levers { micro_batch_samples: samples, loss_chunk_rows: LOSS_CHUNK_ROWS, ..Levers::default() };
        StepChoice {
            what: Step { levers, evaluation_samples: samples },
            rows: Vec::new(),
            other_phases,
            #[expect(clippy::cast_precision_loss, reason = "a relative time")]
            relative_time: 1.0 + 1.0 / samples as f64,
        }
    }
}
