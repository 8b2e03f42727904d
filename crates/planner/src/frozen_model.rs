//! The bill of a frozen model beside the trained one: a reference or a teacher, whose weights stay in its files.
//!
//! Each operation reads the weights that it needs from the files. So the model's memory is that of one matrix, a window of rows of a table,
//! and small parameters that are always there; and while it computes, the activations of a forward pass.

use memory_policy::{CostRow, MemorySpace};
use t5::{AnswerShape, LayerMajor, Levers};
use trainer::TrainerOptions;

use crate::counted::{Counter, NamedBytes, Resident};
use crate::error::Result;
use crate::job::Frozen;
use crate::names::{FROZEN_MODEL, LOSS, TEACHER_LOGITS, TEACHER_STATES};

/// Its levers: each operation reads its weights. Other levers are the step's.
const LEVERS: LayerMajor = LayerMajor { weights_on_disk: true, weights_by_matrix: true, ..LayerMajor::PLAIN };

/// Counts the passes of a frozen model.
pub(crate) struct FrozenModel<'a> {
    counter: Counter<'a>,
    resident: Resident,
    /// Bytes of weights in memory while an operation runs, beside small parameters.
    of_operation: Option<u64>,
    is_evaluated: bool,
    /// Of a teacher: the bytes of its head's table while the loss reads it, and of what it says about a batch.
    in_loss: Option<[u64; 2]>,
    /// The bytes of a row of logits of a pass that finds the largest of them.
    row_of_logits: Option<u64>,
    /// The bytes of the table of logits that are kept in a file.
    table: u64,
    note: String,
}

impl<'a> FrozenModel<'a> {
    /// # Errors
    /// A config that is not a T5's.
    pub fn new(of: Frozen<'a>, options: &TrainerOptions, samples: usize, longest: (usize, usize)) -> Result<Self> {
        let (dtype, activations) = (options.parameter_dtype(), options.precision.activations());
        let counter = Counter::new(of.model, dtype, activations, longest)?;
        let levers = Levers { layer_major: Some(LEVERS), ..Levers::default() };
        let states = || {
            let values = samples * longest.1 * of.model.decoder_width();
            (values * activations.size_in_bytes()) as u64
        };
        let in_loss = options.distillation.map(|distillation| match distillation.top_k {
            None => [counter.paged(&levers).of_head(of.model), states()],
            Some(count) => {
                let logits = (samples * longest.1 * count) as u64;
                [0, logits * (size_of::<u32>() + activations.size_in_bytes()) as u64]
            }
        });
        let finds_largest = options.distillation.is_some_and(|of| of.top_k.is_some());
        Ok(Self {
            in_loss,
            row_of_logits: finds_largest.then(|| (of.model.vocab_size * activations.size_in_bytes()) as u64),
            table: of.kept.map_or(0, |kept| kept.table_bytes),
            resident: counter.resident_in_place(&of.stored, &levers, 0),
            of_operation: counter.weights_of_an_operation(&levers),
            is_evaluated: of.is_evaluated,
            note: format!("{}, in its own files", of.called),
            counter,
        })
    }

    /// The row while the trained model computes.
    pub fn resting(&self) -> CostRow {
        self.row(self.resident.resting)
    }

    /// The rows of a step of the trained model, whose loss may read the head's table.
    pub fn in_step(&self) -> impl Iterator<Item = CostRow> {
        let [table, _] = self.in_loss.unwrap_or_default();
        [self.row(self.resident.resting + table)].into_iter().chain(self.states())
    }

    /// The row of a teacher's states or largest logits, from its pass to the end of the step.
    pub fn states(&self) -> Option<CostRow> {
        let name = if self.row_of_logits.is_some() { TEACHER_LOGITS } else { TEACHER_STATES };
        self.in_loss.map(|[_, states]| CostRow::new(name, states, "of the whole batch").at(MemorySpace::Host))
    }

    /// The row while both models are loaded.
    pub fn loading(&self) -> CostRow {
        self.row(self.resident.loading)
    }

    /// The weights and tensors of a pass over a micro-batch of a step of `samples` samples, or of an evaluation.
    pub fn pass(
        &self,
        samples: usize,
        evaluation_samples: usize,
        loss_chunk_rows: usize,
    ) -> (CostRow, Vec<NamedBytes>) {
        let samples = if self.is_evaluated { samples.max(evaluation_samples) } else { samples };
        let counted = self.counter.evaluation([samples, 0], loss_chunk_rows, AnswerShape::greedy(0));
        let [mut tensors, _] =
            self.of_operation.map_or_else(|| counted.rows.clone(), |bytes| counted.beside_weights(bytes));
        if let Some(row) = self.row_of_logits {
            // Whole rows of logits, in place of the loss.
            let rows = loss_chunk_rows.min(samples * self.counter.longest_target()) as u64;
            tensors.iter_mut().filter(|held| held.name == LOSS).for_each(|held| held.bytes = rows * row);
        }
        (self.row(self.resident.at_a_time), tensors)
    }

    fn row(&self, bytes: u64) -> CostRow {
        CostRow::new(FROZEN_MODEL, bytes + self.table, &self.note).at(MemorySpace::Host)
    }
}
