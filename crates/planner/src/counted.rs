//! The bytes and the arithmetic of a model, counted by rehearsal. No other module asks [`t5::step::count`].

mod moved;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use candle_core::DType;
use memory_policy::{CostRow, MemorySpace, Name};
use t5::costs::{self, WeightsOnDisk};
pub use t5::step::count::{Arithmetic, BlockArithmetic};
use t5::step::count::{CopiedWeights, InferenceCount, Moment, PassCalls, Precisions, Shape};
use t5::{AnswerShape, Levers, ParameterSpec, StoredWeights};
use t5_ops::Calls;
use trainer::costs::StateOnDisk;
use trainer::{Sharding, TrainerOptions};

use crate::error::Result;
use crate::names::{ACTIVATIONS, BOUNDARIES, CACHE, GRADIENTS, LOSS, PACKED, PARAMETERS, WORKSPACE};
use crate::processes::Processes;
use crate::step_parts::Parts;

/// Bytes of tensors in memory, by the name of their row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedBytes {
    pub name: Name,
    pub bytes: u64,
}

impl NamedBytes {
    /// The row of the bill.
    pub fn row(&self, note: impl Into<String>) -> CostRow {
        CostRow::new(self.name.clone(), self.bytes, note)
    }
}

fn held(rows: impl IntoIterator<Item = (Name, u64)>) -> Vec<NamedBytes> {
    rows.into_iter().map(|(name, bytes)| NamedBytes { name, bytes }).collect()
}

/// Counts of an evaluation and of a generation over some samples. Every pair holds the evaluation first.
#[derive(Debug)]
pub struct Evaluated {
    /// Tensors.
    pub rows: [Vec<NamedBytes>; 2],
    /// Bytes of the host's memory beside tensors on a device.
    pub on_host: [u64; 2],
    /// Multiply-adds.
    pub multiply_adds: [f64; 2],
    /// Bytes including the weights of one operation, as [`InferenceCount::with_weights`].
    with_weights: [u64; 2],
}

impl Evaluated {
    /// Peak tensor bytes when weights are paged in per operation, `at_a_time` bytes at most. The operation with the largest workspace may
    /// have small weights, so the workspace is limited accordingly.
    pub fn beside_weights(&self, at_a_time: u64) -> [Vec<NamedBytes>; 2] {
        let mut rows = self.rows.clone();
        for (rows, all) in rows.iter_mut().zip(self.with_weights) {
            let others = rows.iter().filter(|held| ![WORKSPACE, PACKED].contains(&held.name)).map(|held| held.bytes);
            let left = all.saturating_sub(at_a_time + others.sum::<u64>());
            rows.iter_mut().filter(|held| held.name == WORKSPACE).for_each(|held| held.bytes = held.bytes.min(left));
        }
        rows
    }
}

/// The bytes of a step.
#[derive(Debug)]
pub struct Step {
    /// Tensors at the step's peak, beside parameters that are in memory.
    pub tensors: Vec<NamedBytes>,
    /// Bytes of the host's memory beside tensors on a device: operands that the host makes for it, and copies under way.
    pub on_host: u64,
    /// Bytes of activations and gradients that are kept in the host's memory while the device does not need them.
    pub waiting: u64,
}

/// Shared, because many choices need the same counts.
pub type EvaluationRows = Rc<Evaluated>;

/// The key of an evaluation's counts: evaluated and answered samples, rows of logits at a time, and the answers.
type EvaluationOf = ([usize; 2], usize, AnswerShape);

/// Counts passes of one model in one precision, over samples of at most these lengths. Nothing is allocated.
pub struct Counter<'a> {
    model: &'a t5::Config,
    activations: DType,
    /// The longest source and target in tokens.
    longest: (usize, usize),
    passes: t5::step::count::Counter,
    place: MemorySpace,
    /// Counts made so far: many choices need the same ones.
    evaluated: RefCell<HashMap<EvaluationOf, EvaluationRows>>,
}

impl<'a> Counter<'a> {
    /// Counts passes that train nothing.
    ///
    /// # Errors
    /// A config that is not a T5's.
    pub fn new(model: &'a t5::Config, parameters: DType, activations: DType, longest: (usize, usize)) -> Result<Self> {
        let precisions = Precisions { parameters, activations, gradients: DType::F32 };
        let passes = t5::step::count::Counter::new(model, precisions, 0.0, &|_| false)?;
        Ok(Self::with_passes(model, activations, longest, passes))
    }

    fn with_passes(
        model: &'a t5::Config,
        activations: DType,
        longest: (usize, usize),
        passes: t5::step::count::Counter,
    ) -> Self {
        #[cfg(test)]
        crate::testing::state_processor();
        Self { model, activations, longest, passes, place: MemorySpace::Host, evaluated: RefCell::default() }
    }

    /// The same counter for tensors at `place`.
    pub fn at(self, place: MemorySpace) -> Self {
        match place {
            MemorySpace::Host => self,
            MemorySpace::Device => Self { passes: self.passes.on_device(&|_| [0; 2]), place, ..self },
        }
    }

    pub fn activations(&self) -> DType {
        self.activations
    }

    /// The most tokens of a target.
    pub fn longest_target(&self) -> usize {
        self.longest.1
    }

    /// Bytes of the parameters.
    pub fn parameters(&self, dtype: DType) -> u64 {
        costs::parameters(self.model, dtype)
    }

    /// Rows beside the parameters while they are loaded to `place`: a tensor that is read on the host, and its copy to `place`. `stored`
    /// describes the model's files, if known.
    pub fn loading(&self, dtype: DType, place: MemorySpace, stored: Option<&StoredWeights>) -> Vec<CostRow> {
        let row = |of: costs::CostRow| CostRow::new(Name::new(of.name), of.bytes, "a tensor in transit");
        match place {
            MemorySpace::Host => vec![row(costs::load(self.model, dtype, stored))],
            MemorySpace::Device => {
                let [on_host, there] = costs::load_to_device(self.model, dtype, stored).map(row);
                vec![on_host, there.at(place)]
            }
        }
    }

    /// The tensors of an evaluation of `samples` samples, and of generating such answers to `answered` of them.
    pub fn evaluation(
        &self,
        [samples, answered]: [usize; 2],
        loss_chunk_rows: usize,
        answer: AnswerShape,
    ) -> EvaluationRows {
        let mut evaluated = self.evaluated.borrow_mut();
        let rows = evaluated.entry(([samples, answered], loss_chunk_rows, answer)).or_insert_with(|| {
            let InferenceCount {
                loss,
                workspace,
                packed,
                multiply_adds: of_evaluation,
                on_host: for_evaluation,
                with_weights: evaluated_with,
                ..
            } = self.passes.evaluation(self.shape(samples), loss_chunk_rows);
            let evaluation = held([(LOSS, loss), (WORKSPACE, workspace), (PACKED, packed)]);
            let InferenceCount {
                cache,
                workspace,
                packed,
                multiply_adds: of_generation,
                on_host: for_generation,
                with_weights: answered_with,
                ..
            } = self.passes.generation(answered, self.longest.0, &answer);
            let generation = held([(CACHE, cache), (WORKSPACE, workspace), (PACKED, packed)]);
            Rc::new(Evaluated {
                rows: [evaluation, generation],
                on_host: [for_evaluation, for_generation],
                multiply_adds: [of_evaluation, of_generation],
                with_weights: [evaluated_with, answered_with],
            })
        });
        Rc::clone(rows)
    }

    /// Bytes of the parameters, if all are in memory.
    pub fn resident(&self, dtype: DType) -> Resident {
        let all = self.parameters(dtype);
        Resident { loading: all, saving: all, at_a_time: all, resting: all }
    }

    /// The weights that are at the place of computation only while they are used.
    pub fn paged(&self, levers: &Levers) -> Rc<WeightsOnDisk> {
        self.passes.weights_on_disk(levers)
    }

    /// Bytes of the parameters of a model that stays where it is stored. `later` are the bytes of tensors that are made after loading.
    pub fn resident_in_place(&self, stored: &StoredWeights, levers: &Levers, later: u64) -> Resident {
        let weights = self.passes.weights_on_disk(levers);
        self.resident_paged(&weights, weights.loading_in_place(stored, later))
    }

    /// Bytes of weights that come a part at a time. Those of a device are loaded on the host, and `loading` is billed there.
    fn resident_paged(&self, weights: &WeightsOnDisk, loading: u64) -> Resident {
        let loading = if self.place == MemorySpace::Device { weights.always() } else { loading };
        Resident { loading, saving: weights.saving(), at_a_time: weights.at_a_time(), resting: weights.always() }
    }

    /// Bytes of weights in memory while operations follow each other; `None` unless each operation reads its own weights from the files.
    pub fn weights_of_an_operation(&self, levers: &Levers) -> Option<u64> {
        let weights = self.passes.weights_on_disk(levers);
        let is_paged_by_matrix = levers.has_weights_by_matrix() && weights.all_come_apart();
        is_paged_by_matrix.then(|| weights.at_a_time() - weights.always())
    }

    fn shape(&self, samples: usize) -> Shape {
        Shape { samples, source_tokens: self.longest.0, target_tokens: self.longest.1 }
    }
}

/// Counts steps of a model. Some of its parameters may be frozen.
pub struct StepCounter<'a> {
    of_model: Counter<'a>,
    batch_samples: usize,
    /// Bytes of the parameters if all are in memory.
    parameters: u64,
    square_sums: u64,
    gradients: DType,
    freezes: bool,
    state_on_disk: Option<StateOnDisk>,
    /// The most bytes of the host's memory that the update of a parameter on a device takes.
    update_on_host: u64,
}

/// Bytes of the parameters in memory, by the phases of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// While the model is loaded or made.
    pub loading: u64,
    /// While a checkpoint is saved.
    pub saving: u64,
    /// In an evaluation or a generation.
    pub at_a_time: u64,
    /// While the model computes nothing.
    pub resting: u64,
}

impl<'a> StepCounter<'a> {
    /// Counts steps over `batch_samples` samples.
    ///
    /// # Errors
    /// An unknown item in `freeze`, or everything frozen.
    pub fn new(
        model: &'a t5::Config,
        options: &TrainerOptions,
        batch_samples: usize,
        longest: (usize, usize),
        processes: &Processes,
    ) -> Result<Self> {
        let specs = ParameterSpec::all(model);
        let trains = trainer::freeze::trainable(
            specs.iter().map(|spec| spec.name.as_str()),
            &options.freeze,
            model.lora.as_ref(),
        )?;
        let frozen: Vec<String> =
            specs.into_iter().zip(trains).filter(|(_, trains)| !trains).map(|(spec, _)| spec.name).collect();
        let precisions = Precisions {
            parameters: options.parameter_dtype(),
            activations: options.precision.activations(),
            gradients: options.gradient_dtype(),
        };
        let is_trained = |spec: &ParameterSpec| !frozen.contains(&spec.name);
        let passes = t5::step::count::Counter::new(model, precisions, options.dropout, &is_trained)?
            .minimising(options.token_loss());
        let passes = if options.weighs_samples() { passes.weighing_samples() } else { passes };
        let passes = if options.class_weights.is_empty() { passes } else { passes.weighing_classes() };
        let passes = match &options.contrastive {
            Some(of) => passes.pulling_vectors(of.pooling),
            None => passes,
        };
        let passes = among(passes, model, options, processes)?;
        let of_model = Counter::with_passes(model, precisions.activations, longest, passes);
        let trained = of_model.passes.trained();
        Ok(Self {
            parameters: of_model.parameters(precisions.parameters),
            square_sums: trained.specs().iter().map(|spec| t5_ops::SquareSums::bytes(&spec.shape)).sum(),
            of_model,
            batch_samples,
            gradients: options.gradient_dtype(),
            freezes: !frozen.is_empty(),
            state_on_disk: trainer::costs::optimizer_state_on_disk(model, options, options.parameter_dtype())?,
            update_on_host: 0,
        })
    }

    /// Counts steps beside a frozen model, which may be a teacher.
    ///
    /// # Errors
    /// Its config is not a T5's.
    pub fn beside(self, frozen: Option<&t5::Config>, options: &TrainerOptions) -> Result<Self> {
        let Some(teacher) = frozen.filter(|_| options.distillation.is_some()) else { return Ok(self) };
        let needs_all = options.distillation.is_some_and(|of| of.top_k.is_none());
        let of_all = needs_all.then(|| (teacher, options.parameter_dtype()));
        let passes = self.of_model.passes.learning_from(of_all)?;
        Ok(Self { of_model: Counter { passes, ..self.of_model }, ..self })
    }

    /// Whether weights are in memory only while they are worked on.
    pub fn pages_weights(&self, levers: &Levers) -> bool {
        self.of_model.passes.pages_weights(levers)
    }

    /// The same counter for tensors at `place`. On a device, `options` determines the host's memory for an update.
    pub fn at(self, place: MemorySpace, options: &TrainerOptions) -> Self {
        if place == MemorySpace::Host {
            return self;
        }
        let update = |specs: &[&ParameterSpec]| trainer::costs::update_on_device(options, specs);
        let specs: Vec<&ParameterSpec> = self.of_model.passes.trained().specs().iter().collect();
        let on_host = update(&specs).iter().map(|needs| needs.on_host).max().unwrap_or(0);
        let passes = self.of_model.passes.on_device(&|specs| update(specs).map(|needs| needs.transient));
        let of_model = Counter { passes, place, ..self.of_model };
        Self { of_model, update_on_host: on_host, ..self }
    }

    pub fn of_model(&self) -> &Counter<'a> {
        &self.of_model
    }

    /// Blocks that backward enters.
    pub fn blocks(&self) -> usize {
        self.of_model.passes.blocks()
    }

    /// Whether any parameter is frozen.
    pub fn freezes(&self) -> bool {
        self.freezes
    }

    /// Bytes of all gradients, if they exist together.
    pub fn gradient_bytes(&self) -> u64 {
        self.of_model.passes.trained().gradient_bytes(self.gradients)
    }

    /// The optimizer's state with its large moments in a file; `None` if it has no large moments.
    pub fn state_on_disk(&self) -> Option<StateOnDisk> {
        self.state_on_disk
    }

    pub fn gradients(&self) -> DType {
        self.gradients
    }

    /// Bytes of the sums of squares of all gradients.
    pub fn square_sums(&self) -> u64 {
        self.square_sums
    }

    /// The bytes of a step with these levers at its peak, beside parameters that are in memory.
    pub fn training(&self, levers: &Levers) -> Step {
        let count = self.of_model.passes.step(self.batch(), levers);
        let saved = if levers.layer_major.is_some() { BOUNDARIES } else { ACTIVATIONS };
        let gradients = levers.layer_major.map(|_| (GRADIENTS, count.gradients));
        let rows = count.parameters.map(|bytes| (PARAMETERS, bytes)).into_iter();
        let tensors = held(rows.chain([(saved, count.activations)]).chain(gradients).chain([
            (LOSS, count.loss),
            (WORKSPACE, count.workspace),
            (PACKED, count.packed),
        ]));
        let on_host = count.on_host.max(self.update_on_host).max(self.in_transit(levers)) + self.pinned(levers);
        let waiting = if levers.has_host_memory() { self.of_model.passes.waiting(self.batch(), levers) } else { 0 };
        Step { tensors, on_host, waiting }
    }

    /// Bytes of the host's pinned memory for copies that overlap computation, and for weights read from files.
    pub fn pinned(&self, levers: &Levers) -> u64 {
        let Some(layers) = levers.layer_major.filter(|_| self.of_model.place == MemorySpace::Device) else { return 0 };
        // A frozen base may stay in its own files, even if other tensors are kept in the host's memory.
        let are_in_files = !layers.in_host_memory || self.of_model.model.lora.is_some();
        let reads_files = layers.weights_on_disk && are_in_files;
        if layers.copies_overlap || reads_files { cuda_device::copies::STAGING_BYTES } else { 0 }
    }

    /// Bytes in the host's memory of the largest tensor while it is copied between a device and its place outside. A tensor kept in the host's
    /// memory needs no extra bytes. Of tensors in files, the next one is read ahead.
    fn in_transit(&self, levers: &Levers) -> u64 {
        let Some(layers) = levers.layer_major.filter(|_| self.of_model.place == MemorySpace::Device) else { return 0 };
        let passes = &self.of_model.passes;
        let weights = if layers.weights_on_disk { passes.weights_on_disk(levers).largest() } else { 0 };
        let moments = self.state_on_disk.filter(|_| layers.optimizer_on_disk).map_or(0, |state| state.resident);
        if layers.in_host_memory {
            return weights.max(moments);
        }
        let gradient = |spec: &ParameterSpec| spec.gradient_bytes(self.gradients);
        let gradients = passes.trained().specs().iter().map(gradient).max().unwrap_or(0);
        let gradients = if layers.gradients_on_disk { 2 * gradients } else { 0 };
        let activations = if layers.boundaries_on_disk { 2 * self.largest_activation(levers) } else { 0 };
        weights.max(moments).max(gradients).max(activations)
    }

    /// Bytes of the largest tensor that a block saves of a micro-batch. It is as wide as the feed-forward layer if the block saves that
    /// layer's activations.
    fn largest_activation(&self, levers: &Levers) -> u64 {
        let t5::Config { d_model, d_ff, num_heads, d_kv, .. } = *self.of_model.model;
        let keeps_all =
            levers.recompute_blocks < self.blocks() && !levers.layer_major.is_some_and(|l| l.goes_twice(self.blocks()));
        let width = if keeps_all { d_ff.max(d_model).max(num_heads * d_kv) } else { d_model.max(num_heads * d_kv) };
        let (source_tokens, target_tokens) = self.of_model.longest;
        let tokens = levers.micro_batch_samples.min(self.batch_samples) * source_tokens.max(target_tokens);
        (tokens * width * self.of_model.activations.size_in_bytes()) as u64
    }

    /// Bytes of weights and moments that stay in the host's memory because they are off the device. Of a frozen `base`, tensors that stay
    /// in its own files do not count.
    pub fn offloaded_to_host(&self, levers: &Levers, base: Option<&StoredWeights>, parameters: DType) -> u64 {
        let Some(layers) = levers.layer_major.filter(|layers| layers.in_host_memory) else { return 0 };
        let passes = &self.of_model.passes;
        let all = || passes.weights_on_disk(levers).in_files();
        let weights = || base.map_or_else(all, |base| base.copied(parameters));
        let moments = self.state_on_disk.filter(|_| layers.optimizer_on_disk).map_or(0, |state| state.written / 2);
        moments + if layers.weights_on_disk { weights() } else { 0 }
    }

    /// The moments of a step with these levers, in order.
    pub fn timeline(&self, levers: &Levers) -> Vec<Moment> {
        self.of_model.passes.timeline(self.batch(), levers)
    }

    /// The requests that a step with these levers sends to a card.
    pub fn calls(&self, levers: &Levers, options: &TrainerOptions) -> Calls {
        self.of_model.passes.calls(self.batch(), levers, &|specs| trainer::costs::update_on_device(options, specs))
    }

    /// The requests that the passes of a micro-batch send to a card if it is not recorded.
    pub fn pass_calls(&self, levers: &Levers) -> PassCalls {
        self.pass_calls_in(self.batch(), levers)
    }

    /// The requests that the passes of a micro-batch of these samples, source and target tokens send to a card if it is not recorded.
    pub fn pass_calls_of(&self, samples: usize, longest: (usize, usize), levers: &Levers) -> PassCalls {
        let (source_tokens, target_tokens) = longest;
        self.pass_calls_in(Shape { samples, source_tokens, target_tokens }, levers)
    }

    fn pass_calls_in(&self, batch: Shape, levers: &Levers) -> PassCalls {
        let PassCalls { blocks, head } = self.of_model.passes.pass_calls(batch, levers);
        // All micro-batches make the same number of requests.
        let parts = levers.layer_major.map_or(1, |_| levers.micro_batches(batch.samples)).max(1) as u64;
        let Calls { launches, products, .. } = blocks;
        PassCalls { blocks: Calls { launches: launches / parts, products: products / parts, ..Calls::default() }, head }
    }

    /// The requests of a step outside its passes: updates, the start of gradients, and copies of weights.
    pub fn update_calls(&self, levers: &Levers, options: &TrainerOptions) -> Calls {
        let PassCalls { blocks, head } = self.pass_calls(levers);
        let all = self.calls(&Levers { repeats: false, ..*levers }, options);
        let passes = (blocks + head) * levers.micro_batches(self.batch_samples) as u64;
        let (launches, products) =
            (all.launches.saturating_sub(passes.launches), all.products.saturating_sub(passes.products));
        Calls { launches, products, ..Calls::default() }
    }

    /// Whether a card can record micro-batches.
    pub fn is_recordable(&self) -> bool {
        self.of_model.passes.is_recordable()
    }

    /// The bytes that recorded micro-batches add to the peak of [`StepCounter::training`].
    pub fn recorded_beside(&self, levers: &Levers) -> u64 {
        self.of_model.passes.recorded_beside(self.batch(), levers)
    }

    /// How often a step moves gradients and weights between processes.
    pub fn moves(&self, micro_batches: usize, levers: &Levers) -> t5::step::count::Moves {
        self.of_model.passes.moves(micro_batches, levers)
    }

    /// Bytes of the parameters in memory in the other phases of a run. A frozen `base` stays where it is stored. `state` are the bytes of
    /// the optimizer's state, which is made after the model is loaded.
    pub fn resident(&self, levers: &Levers, base: Option<&StoredWeights>, state: u64) -> Resident {
        if self.pages_weights(levers) {
            let weights = self.of_model.passes.weights_on_disk(levers);
            if let Some(base) = base {
                // Only the adapter is saved.
                return Resident { saving: weights.always(), ..self.of_model.resident_in_place(base, levers, state) };
            }
            return self.of_model.resident_paged(&weights, weights.loading(state));
        }
        let all = self.parameters;
        Resident { loading: all, saving: all, at_a_time: all, resting: all }
    }

    /// Bytes of weights that a step of `micro_batches` micro-batches with these levers reads from files.
    pub fn weights_read(&self, levers: &Levers, micro_batches: usize) -> u64 {
        self.of_model.passes.weights_read(self.batch(), levers).in_micro_batches(micro_batches)
    }

    /// Bytes that each micro-batch reads of a table that comes by rows. [`StepCounter::weights_read`] includes them.
    pub fn table_read(&self, levers: &Levers) -> u64 {
        self.of_model.passes.table_read(self.batch(), levers)
    }

    /// Multiply-adds of a micro-batch.
    pub fn arithmetic(&self, samples: usize) -> Arithmetic {
        self.of_model.passes.arithmetic(self.of_model.shape(samples))
    }

    /// Multiply-adds of a micro-batch of these samples, and source and target tokens.
    pub fn arithmetic_of(&self, samples: usize, (source_tokens, target_tokens): (usize, usize)) -> Arithmetic {
        self.of_model.passes.arithmetic(Shape { samples, source_tokens, target_tokens })
    }

    /// Bytes of the copies of weights that these levers hold.
    pub fn weight_copies(&self, levers: &Levers) -> u64 {
        let CopiedWeights { of_blocks, of_head, .. } = self.copied_weights(levers);
        (of_blocks + of_head) * DType::BF16.size_in_bytes() as u64
    }

    /// Elements whose casts a micro-batch is spared with these levers. Casts after an update are subtracted; `part` is the micro-batch's
    /// share of the step.
    #[expect(clippy::cast_precision_loss, reason = "elements of a model")]
    pub fn spared_casts(&self, levers: &Levers, part: f64) -> Parts {
        let CopiedWeights { of_blocks, of_head, .. } = self.copied_weights(levers);
        let blocks = self.blocks();
        let recomputed = levers.recompute_blocks.min(blocks) as f64 / blocks.max(1) as f64;
        // A block that backward visits twice is computed again in both visits.
        let again = match levers.layer_major {
            Some(layers) if layers.goes_twice(blocks) => 3.0,
            _ => recomputed,
        };
        Parts { blocks: (2.0 + again - part) * of_blocks as f64, head: (1.0 - part) * of_head as f64 }
    }

    fn copied_weights(&self, levers: &Levers) -> CopiedWeights {
        if levers.weight_copies { self.of_model.passes.copied_weights() } else { CopiedWeights::default() }
    }

    /// Elements of the parameters that are trained.
    pub fn trained_elements(&self) -> u64 {
        self.of_model.passes.trained().specs().iter().map(|spec| spec.elements()).sum()
    }

    fn batch(&self) -> Shape {
        self.of_model.shape(self.batch_samples)
    }
}

/// The counter of one of several processes that divide gradients or weights among them. Shares have about the same size. All processes
/// count the largest share, so they choose the same plan.
fn among(
    passes: t5::step::count::Counter,
    model: &t5::Config,
    options: &TrainerOptions,
    processes: &Processes,
) -> Result<t5::step::count::Counter> {
    let &Processes { number, sharding, owners, gradient_sums, .. } = processes;
    let passes = passes.with_sums(gradient_sums);
    let passes = if number > 1 { passes.with_others() } else { passes };
    if sharding < Sharding::Gradients {
        return Ok(passes);
    }
    let dealt = trainer::costs::sharded_optimizer(model, options, owners)?;
    let rank = trainer::costs::fullest(&dealt);
    let held: HashSet<String> =
        dealt.into_iter().filter(|(_, owner)| *owner == rank).map(|(spec, _)| spec.name).collect();
    let passes = passes.among(&|spec| held.contains(&spec.name));
    let elsewhere = match sharding {
        Sharding::Weights => trainer::costs::weights_elsewhere(model, options, rank, owners)?,
        _ => HashSet::new(),
    };
    Ok(if elsewhere.is_empty() { passes } else { passes.without_weights(elsewhere) })
}
