//! What the model counts: bytes of tensors, bytes written and arithmetic. The one place that asks [`t5::costs`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use candle_core::DType;
use memory_policy::{CostRow, Name};
use t5::costs::{self, Pass, Trained, WeightsOnDisk};
pub use t5::costs::{Arithmetic, BlockArithmetic, Shape};
use t5::{Levers, ParameterSpec};
use trainer::TrainerOptions;

use crate::error::Result;
use crate::files::Written;

/// Tensors that are held, by the name of their row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    pub name: Name,
    pub bytes: u64,
}

impl Held {
    /// As a row of the bill.
    pub fn row(&self, note: impl Into<String>) -> CostRow {
        CostRow::new(self.name.clone(), self.bytes, note)
    }
}

fn held(rows: &[t5::CostRow]) -> Vec<Held> {
    rows.iter().map(|row| Held { name: Name::new(row.name), bytes: row.bytes }).collect()
}

/// The tensors of an evaluation and of a generation.
pub type EvaluationRows = Rc<[Vec<Held>; 2]>;

/// What is counted of a model in one precision, over samples of at most these lengths. Nothing is allocated.
pub struct Counter<'a> {
    model: &'a t5::Config,
    activations: DType,
    /// The longest source and target in tokens.
    longest: (usize, usize),
    /// Many choices ask for the same, by samples and rows of logits at a time.
    evaluated: RefCell<HashMap<(usize, usize, usize), EvaluationRows>>,
}

impl<'a> Counter<'a> {
    pub fn new(model: &'a t5::Config, activations: DType, longest: (usize, usize)) -> Self {
        Self { model, activations, longest, evaluated: RefCell::default() }
    }

    pub fn activations(&self) -> DType {
        self.activations
    }

    /// Bytes of the parameters.
    pub fn parameters(&self, dtype: DType) -> u64 {
        costs::parameters(self.model, dtype)
    }

    /// Beside the parameters while they are loaded.
    pub fn loading(&self, dtype: DType) -> Vec<Held> {
        held(&costs::load(self.model, dtype))
    }

    /// The tensors of an evaluation, and of a generation of so many tokens.
    pub fn evaluation(&self, samples: usize, loss_chunk_rows: usize, max_new_tokens: usize) -> EvaluationRows {
        let mut evaluated = self.evaluated.borrow_mut();
        let rows = evaluated.entry((samples, loss_chunk_rows, max_new_tokens)).or_insert_with(|| {
            let pass = self.pass(samples, 0, loss_chunk_rows, DType::F32, false);
            let generation = costs::generation(self.model, &pass.shape, max_new_tokens, self.activations);
            Rc::new([held(&costs::evaluation(self.model, &pass)), held(&generation)])
        });
        Rc::clone(rows)
    }

    fn shape(&self, samples: usize) -> Shape {
        Shape { samples, source_tokens: self.longest.0, target_tokens: self.longest.1 }
    }

    fn pass(&self, samples: usize, recompute_blocks: usize, rows: usize, gradients: DType, dropout: bool) -> Pass {
        Pass {
            shape: self.shape(samples),
            activations: self.activations,
            gradients,
            recompute_blocks,
            loss_chunk_rows: rows,
            dropout,
        }
    }
}

/// What is counted of a step of a model of which some parameters train.
pub struct StepCounter<'a> {
    of_model: Counter<'a>,
    trained: Trained,
    weights_on_disk: WeightsOnDisk,
    batch_samples: usize,
    /// Bytes of the parameters where all lie in memory.
    parameters: u64,
    square_sums: u64,
    gradients: DType,
    dropout: bool,
    freezes: bool,
}

/// What is resident of the parameters in the phases of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// While the model is loaded or made.
    pub loading: u64,
    /// While a checkpoint is saved.
    pub saving: u64,
    /// In an evaluation or a generation.
    pub at_a_time: u64,
}

impl<'a> StepCounter<'a> {
    /// Of steps over `batch_samples` samples.
    ///
    /// # Errors
    /// An unknown item in `freeze`, or everything frozen.
    pub fn new(
        model: &'a t5::Config,
        options: &TrainerOptions,
        batch_samples: usize,
        longest: (usize, usize),
    ) -> Result<Self> {
        let specs = ParameterSpec::all(model);
        let trains = trainer::freeze::trainable(specs.iter().map(|spec| spec.name.as_str()), &options.freeze)?;
        let frozen: Vec<String> =
            specs.into_iter().zip(trains).filter(|(_, trains)| !trains).map(|(spec, _)| spec.name).collect();
        let dtype = options.parameter_dtype();
        let of_model = Counter::new(model, options.precision.activations(), longest);
        let trained = Trained::new(model, &|spec| !frozen.contains(&spec.name));
        Ok(Self {
            parameters: of_model.parameters(dtype),
            square_sums: trained.specs().iter().map(|spec| t5_ops::SquareSums::bytes(&spec.shape)).sum(),
            of_model,
            trained,
            weights_on_disk: WeightsOnDisk::new(model, dtype),
            batch_samples,
            gradients: options.gradient_dtype(),
            dropout: options.dropout > 0.0,
            freezes: !frozen.is_empty(),
        })
    }

    pub fn of_model(&self) -> &Counter<'a> {
        &self.of_model
    }

    /// Blocks that backward enters.
    pub fn blocks(&self) -> usize {
        self.trained.blocks()
    }

    /// Whether any parameter is frozen.
    pub fn freezes(&self) -> bool {
        self.freezes
    }

    /// Bytes of all gradients where they exist together.
    pub fn gradient_bytes(&self) -> u64 {
        self.trained.gradient_bytes(self.gradients)
    }

    pub fn gradients(&self) -> DType {
        self.gradients
    }

    /// Bytes of the sums of squares of every gradient.
    pub fn square_sums(&self) -> u64 {
        self.square_sums
    }

    /// A step with these levers, at its peak, beside parameters that lie in memory.
    pub fn training(&self, levers: &Levers) -> Vec<Held> {
        let pass = self.pass(levers.micro_batch_samples, levers);
        let model = self.of_model.model;
        held(&match &levers.layer_major {
            None => costs::training(model, &pass, &self.trained),
            Some(layers) => {
                let weights = &self.weights_on_disk;
                costs::layer_major(model, &pass, self.batch_samples, layers, &self.trained, weights)
            }
        })
    }

    /// What a step with these levers writes to files.
    pub fn written(&self, levers: &Levers) -> Written {
        let Some(layers) = &levers.layer_major else { return Written::default() };
        let pass = self.pass(self.batch_samples, levers);
        let model = self.of_model.model;
        Written {
            once: costs::layer_major_written(model, &pass, self.batch_samples, layers, &self.trained),
            weights: if layers.weights_on_disk { self.weights_on_disk.written(&self.trained) } else { 0 },
        }
    }

    /// What is resident of the parameters in other phases.
    pub fn resident(&self, levers: &Levers) -> Resident {
        if levers.has_weights_on_disk() {
            let weights = &self.weights_on_disk;
            return Resident { loading: weights.loading(), saving: weights.saving(), at_a_time: weights.at_a_time() };
        }
        Resident { loading: self.parameters, saving: self.parameters, at_a_time: self.parameters }
    }

    /// Multiply-adds of a micro-batch.
    pub fn arithmetic(&self, samples: usize) -> Arithmetic {
        costs::arithmetic(self.of_model.model, &self.of_model.shape(samples), &self.trained)
    }

    fn pass(&self, samples: usize, levers: &Levers) -> Pass {
        let (blocks, rows) = (levers.recompute_blocks, levers.loss_chunk_rows);
        self.of_model.pass(samples, blocks, rows, self.gradients, self.dropout)
    }
}
