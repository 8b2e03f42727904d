//! The bill of a step: its events, added up.
//!
//! A unit is rehearsed once for each shape and each way of saving: its event is carried out on counted tensors. A tally then
//! goes through the events of a whole step and adds up these rehearsals, so that tens of thousands of choices are
//! counted in a second.
//!
//! ```
//! use candle_core::DType;
//! use t5::step::count::{Counter, Precisions, Shape};
//! use t5::{Config, Levers};
//!
//! let config = Config::preset("t5-small").unwrap();
//! let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
//! let shape = Shape { samples: 8, source_tokens: 256, target_tokens: 256 };
//! let levers = Levers { micro_batch_samples: 8, loss_chunk_rows: 256, ..Levers::default() };
//! let [all, decoder] = [Counter::new(&config, precisions, 0.1, &|_| true), {
//!     Counter::new(&config, precisions, 0.1, &|spec| spec.part.is_decoder())
//! }]
//! .map(|counter| counter.unwrap().step(shape, &levers).total());
//! assert!(decoder < all); // a frozen encoder keeps nothing
//! ```

mod buffers;
mod calls;
mod handed_over;
mod live;
mod moves;
mod rehearsal;
mod tallied;
mod tally;
#[cfg(test)]
mod tests;
mod timeline;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use candle_core::DType;
use t5_ops::{Calls, TokenLoss};

use super::schedule::Outline;
use crate::config::Config;
use crate::context::StepContext;
use crate::costs::{Trained, WeightsOnDisk};
use crate::error::Result;
use crate::generate::beams::BeamSearch;
use crate::generate::cache::Decoding;
use crate::generate::{AnswerShape, GenerateOptions};
use crate::levers::{LayerMajor, Levers};
use crate::micro_batch::MicroBatch;
use crate::ops::{Counted, Ops};
use crate::parameters::ParameterSpec;
use crate::pooling::Pooling;
use crate::step::inference::infer;
use handed_over::HandedOver;
pub use moves::{Moves, WeightsRead};
use rehearsal::{Cost, Rehearsal};
use tallied::Tallied;
use tally::Tally;
pub use timeline::Moment;

/// A rectangle of tokens: samples, and the longest source and target among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Samples (B).
    pub samples: usize,
    /// Tokens of the longest source (S).
    pub source_tokens: usize,
    /// Tokens of the longest target (T).
    pub target_tokens: usize,
}

/// Dtypes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precisions {
    /// Of parameters; vectors of a bf16 model are f32.
    pub parameters: DType,
    /// Of activations.
    pub activations: DType,
    /// Of the blocks' gradient accumulators, as for [`crate::Gradients::new`].
    pub gradients: DType,
}

/// Bytes that a step holds at its peak, beside optimizer state and parameters that are always in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCount {
    /// Where weights lie in a file: the bytes of weights in memory at the peak, including small weights that are always there.
    pub parameters: Option<u64>,
    /// Saved activations, and the activations and gradients that pass between blocks.
    pub activations: u64,
    /// Gradient accumulators.
    pub gradients: u64,
    /// Logits and the sums of the loss.
    pub loss: u64,
    /// Temporary tensors of one micro-batch in one block.
    pub workspace: u64,
    /// Operands that threads keep packed from one product to the next.
    pub packed: u64,
    /// Bytes of the host's memory that the processor fills for a device: masks. They are not part of the sum.
    pub on_host: u64,
}

impl StepCount {
    /// The sum.
    pub fn total(&self) -> u64 {
        let StepCount { parameters, activations, gradients, loss, workspace, packed, on_host: _ } = *self;
        parameters.unwrap_or(0) + activations + gradients + loss + workspace + packed
    }
}

/// Bytes that a pass without gradients holds at its peak, beside the parameters, and the arithmetic of that pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct InferenceCount {
    /// The key/value cache; 0 where nothing is generated.
    pub cache: u64,
    /// Logits and the sums of the loss; 0 where something is generated.
    pub loss: u64,
    /// Temporary tensors.
    pub workspace: u64,
    /// Operands that threads keep packed from one product to the next.
    pub packed: u64,
    /// Multiply-adds of matrix products.
    pub multiply_adds: f64,
    /// As [`StepCount::on_host`].
    pub on_host: u64,
    /// The peak without operands that are kept packed, where each operation reads its weights, or rows of a table, from a file. It includes
    /// the weights that are in memory at that moment.
    pub with_weights: u64,
}

impl InferenceCount {
    /// The bytes.
    pub fn total(&self) -> u64 {
        self.cache + self.loss + self.workspace + self.packed
    }
}

/// Multiply-adds of a training pass over a micro-batch, and the shares of its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Arithmetic {
    /// Each block that backward enters, in the order in which `recompute_blocks` counts them.
    pub blocks: Vec<BlockArithmetic>,
    /// The output projection and the loss, forward and backward.
    pub head: f64,
    /// Forward and backward of the whole model, without recomputation.
    pub training: f64,
}

/// Multiply-adds of one block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockArithmetic {
    /// Forward a second time, for backward: all but the feed-forward's last product.
    pub again: f64,
    /// The attention outputs in `again`: scores and weighted values.
    pub heads: f64,
    /// Backward.
    pub backward: f64,
}

/// The requests of a step's passes to a card, without those of the update. Gradients exist already, as in later micro-batches. In the
/// first one, each gradient of a norm and of a table of positions begins with one launch more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassCalls {
    /// Embeddings and blocks, forward and backward: of all micro-batches layer by layer, of one otherwise.
    pub blocks: Calls,
    /// The output projection and the loss of one micro-batch.
    pub head: Calls,
}

/// Weights that a step may hold in bf16 beside f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopiedWeights {
    /// How many there are.
    pub tensors: usize,
    /// Elements of the weights in blocks.
    pub of_blocks: u64,
    /// Elements of the head's table.
    pub of_head: u64,
}

impl CopiedWeights {
    fn new(config: &Config, dtype: DType) -> Self {
        let specs = ParameterSpec::all(config).into_iter().filter(|spec| spec.takes_copy(dtype, config));
        specs.fold(Self::default(), |mut all, spec| {
            all.tensors += 1;
            *(if spec.part.is_table() { &mut all.of_head } else { &mut all.of_blocks }) += spec.elements();
            all
        })
    }
}

/// Counts the steps and passes of one model.
#[derive(Debug)]
pub struct Counter {
    config: Config,
    precisions: Precisions,
    trained: Trained,
    weights: Rc<WeightsOnDisk>,
    /// `weights` with some blocks in memory, by the number of these blocks and whether the others are read matrix by matrix.
    weights_beside: RefCell<HashMap<(usize, bool), Rc<WeightsOnDisk>>>,
    /// Whether other processes hold weights, so that these are in this process only while they are in use.
    has_weights_elsewhere: bool,
    /// Whether gradients are summed over several processes.
    has_others: bool,
    /// The number of sums of a gradient that exist at a time, each over different shards of the batch.
    sums: usize,
    rehearsal: Rehearsal,
    /// The rehearsal with bf16 copies of the weights that products would cast.
    with_copies: Option<Rehearsal>,
    copied: CopiedWeights,
    /// The bytes that the trainer holds while gradients are handed over.
    handed_over: HandedOver,
    /// Tallies of steps over one shape, cut into micro-batches one way. Another chunk of logits changes only the cost of the head.
    tallies: RefCell<Tallies>,
}

/// Tallies of steps over batches of one shape, in micro-batches of one size. A planner goes through such cuts one by one.
#[derive(Debug, Default)]
struct Tallies {
    cut: Option<(Shape, usize)>,
    by_levers: HashMap<Levers, Tallied>,
}

impl Tallies {
    /// The tally with these levers; the chunk of logits does not matter. Tallies of another cut are dropped.
    fn find(&mut self, batch: Shape, levers: &Levers) -> Option<Tallied> {
        let cut = Some((batch, levers.micro_batch_samples));
        if self.cut != cut {
            *self = Tallies { cut, by_levers: HashMap::new() };
        }
        self.by_levers.get(levers).cloned()
    }
}

impl Counter {
    /// Counts for steps that minimise these terms beside the cross-entropy.
    pub fn minimising(mut self, token_loss: TokenLoss) -> Counter {
        [Some(&mut self.rehearsal), self.with_copies.as_mut()]
            .into_iter()
            .flatten()
            .for_each(|all| all.minimise(token_loss));
        self
    }

    /// Counts for steps whose micro-batches have [class factors](crate::MicroBatch::with_class_factors).
    pub fn weighing_classes(mut self) -> Counter {
        [Some(&mut self.rehearsal), self.with_copies.as_mut()].into_iter().flatten().for_each(Rehearsal::weigh_classes);
        self
    }

    /// Counts for steps whose micro-batches are [weighted](crate::MicroBatch::weighted).
    pub fn weighing_samples(mut self) -> Counter {
        [Some(&mut self.rehearsal), self.with_copies.as_mut()].into_iter().flatten().for_each(Rehearsal::weigh_samples);
        self
    }

    /// Counts for steps that compare with this teacher's logits, its parameters in its files; `None`: with [some](crate::MicroBatch::taught).
    ///
    /// # Errors
    /// The config is not a T5's.
    pub fn learning_from(mut self, teacher: Option<(&Config, DType)>) -> Result<Counter> {
        let rehearsals = [Some(&mut self.rehearsal), self.with_copies.as_mut()];
        rehearsals.into_iter().flatten().try_for_each(|rehearsal| rehearsal.learn_from(teacher))?;
        Ok(self)
    }

    /// Counts for steps whose micro-batches are [pulled](crate::MicroBatch::pulled) by the gradients of vectors.
    pub fn pulling_vectors(mut self, pooling: Pooling) -> Counter {
        let rehearsals = [Some(&mut self.rehearsal), self.with_copies.as_mut()];
        rehearsals.into_iter().flatten().for_each(|rehearsal| rehearsal.pull_vectors(pooling));
        self
    }

    /// Counts for a model that trains the parameters for which `is_trained` returns true.
    ///
    /// # Errors
    /// The config is not a T5's.
    pub fn new(
        config: &Config,
        precisions: Precisions,
        dropout: f64,
        is_trained: &dyn Fn(&ParameterSpec) -> bool,
    ) -> Result<Counter> {
        let trained = Trained::new(config, is_trained);
        let copied = match precisions.activations {
            DType::BF16 => CopiedWeights::new(config, precisions.parameters),
            _ => CopiedWeights::default(),
        };
        Ok(Counter {
            rehearsal: Rehearsal::new(config, precisions, dropout, is_trained, false)?,
            with_copies: (copied.tensors > 0)
                .then(|| Rehearsal::new(config, precisions, dropout, is_trained, true))
                .transpose()?,
            weights: Rc::new(WeightsOnDisk::new(config, precisions.parameters)),
            weights_beside: RefCell::default(),
            copied,
            has_weights_elsewhere: false,
            has_others: false,
            sums: 1,
            config: config.clone(),
            precisions,
            trained,
            handed_over: HandedOver::default(),
            tallies: RefCell::default(),
        })
    }

    /// Counts for one of several processes. It drops a gradient as soon as it is summed if `is_held` returns false for the parameter.
    #[must_use]
    pub fn among(mut self, is_held: &dyn Fn(&ParameterSpec) -> bool) -> Counter {
        self.trained = self.trained.among(is_held);
        self.tallies = RefCell::default();
        self
    }

    /// Counts for one of several processes that sum their gradients.
    #[must_use]
    pub fn with_others(self) -> Counter {
        Counter { has_others: true, tallies: RefCell::default(), ..self }
    }

    /// Counts for steps over several shards of a batch. `sums` sums of a gradient exist at a time.
    #[must_use]
    pub fn with_sums(self, sums: usize) -> Counter {
        Counter { sums: sums.max(1), tallies: RefCell::default(), ..self }
    }

    /// Counts for one of several processes, where other processes hold the weights of these names.
    #[must_use]
    pub fn without_weights(mut self, elsewhere: HashSet<String>) -> Counter {
        self.weights = Rc::new(WeightsOnDisk::elsewhere(&self.config, self.precisions.parameters, elsewhere));
        self.has_weights_elsewhere = true;
        self.tallies = RefCell::default();
        self
    }

    /// Whether weights are in memory only while they are in use.
    pub fn pages_weights(&self, levers: &Levers) -> bool {
        self.has_weights_elsewhere || levers.has_weights_on_disk()
    }

    /// Counts for tensors on a device. `handed_over` gives the bytes that the trainer holds while the gradients of these parameters
    /// are handed over together: to be measured, and to be applied.
    #[must_use]
    pub fn on_device(self, handed_over: &dyn Fn(&[&ParameterSpec]) -> [u64; 2]) -> Counter {
        [Some(&self.rehearsal), self.with_copies.as_ref()].into_iter().flatten().for_each(|rehearsal| {
            rehearsal.ledger().move_to_device();
        });
        let handed_over = HandedOver::new(self.trained.specs(), handed_over);
        Counter { handed_over, ..self }
    }

    /// The rehearsal of steps with these levers.
    fn rehearsal_of(&self, levers: &Levers) -> &Rehearsal {
        self.with_copies.as_ref().filter(|_| levers.weight_copies).unwrap_or(&self.rehearsal)
    }

    /// The parameters that [`Levers::weight_copies`] holds a second time. None where no product casts a weight.
    pub fn copied_weights(&self) -> CopiedWeights {
        self.copied
    }

    /// The parameters that are trained.
    pub fn trained(&self) -> &Trained {
        &self.trained
    }

    /// The parameters of a model whose weights lie in a file, without the blocks that keep their weights in memory.
    pub fn weights_on_disk(&self, levers: &Levers) -> Rc<WeightsOnDisk> {
        match (levers.weight_blocks_in_memory(), levers.has_weights_by_matrix()) {
            (0, false) => Rc::clone(&self.weights),
            (blocks, by_matrix) => {
                let weights = || WeightsOnDisk::clone(&self.weights).keeping(blocks, &self.config);
                let beside = || Rc::new(weights().coming(by_matrix));
                Rc::clone(self.weights_beside.borrow_mut().entry((blocks, by_matrix)).or_insert_with(beside))
            }
        }
    }

    /// The most blocks that can be recomputed: the blocks that backward enters.
    pub fn blocks(&self) -> usize {
        self.trained.blocks()
    }

    /// The peak of a step over a batch of this shape, all samples as long as the longest.
    pub fn step(&self, batch: Shape, levers: &Levers) -> StepCount {
        let (tallied, head) = (self.tally(batch, levers), self.head(batch, levers));
        let peak = tallied.peak_with(&head);
        let parameters = self.pages_weights(levers).then(|| self.weights_on_disk(levers).always() + peak.weights);
        let packed = tallied.packed.max(head.packed).total();
        let live = peak.rows(levers.layer_major.is_none());
        StepCount { parameters, packed, on_host: tallied.on_host.max(head.on_host), ..live }
    }

    /// The bytes by which recorded micro-batches ([`Levers::repeats`]) raise the peak of a step on a device above [`Counter::step`].
    pub fn recorded_beside(&self, batch: Shape, levers: &Levers) -> u64 {
        self.tally(batch, levers).recorded_beside(&self.head(batch, levers), self.precisions.activations)
    }

    /// Whether a card can record the micro-batches of a step ([`Levers::repeats`]): all their operations have kernels there.
    pub fn is_recordable(&self) -> bool {
        // Products of f32 are not summed in bf16.
        let has_sums = self.precisions.gradients != DType::BF16 || self.precisions.activations == DType::BF16;
        self.config.has_kernels_on_card() && has_sums
    }

    /// The cost of the head for one micro-batch of a batch of this shape.
    fn head(&self, batch: Shape, levers: &Levers) -> Cost {
        let micro = Shape { samples: levers.micro_batch_samples.clamp(1, batch.samples.max(1)), ..batch };
        self.rehearsal_of(levers).head(micro, levers.loss_chunk_rows)
    }

    /// Bytes that a step writes to files and reads once or twice, without the weights that it changes in a file.
    pub fn written(&self, batch: Shape, levers: &Levers) -> u64 {
        self.tally(batch, levers).written
    }

    /// The bytes of gradients in [`Counter::written`].
    pub fn gradients_written(&self, batch: Shape, levers: &Levers) -> u64 {
        self.tally(batch, levers).gradients_written
    }

    /// The most bytes of activations and gradients that wait in files at a time.
    pub fn waiting(&self, batch: Shape, levers: &Levers) -> u64 {
        self.tally(batch, levers).waiting
    }

    fn tally(&self, batch: Shape, levers: &Levers) -> Tallied {
        let alike = Levers { loss_chunk_rows: 0, repeats: false, ..*levers };
        if let Some(tallied) = self.tallies.borrow_mut().find(batch, &alike) {
            return tallied;
        }
        let outline = self.outline(levers.recompute_blocks, levers.layer_major.as_ref());
        let tallied = Tally::count(self, outline, batch, levers);
        self.tallies.borrow_mut().by_levers.insert(alike, tallied.clone());
        tallied
    }

    /// The events of a step over a batch of this shape, one after the other. The largest of them equals [`Counter::step`],
    /// without the packed operands, which stay from event to event.
    pub fn timeline(&self, batch: Shape, levers: &Levers) -> Vec<Moment> {
        let outline = self.outline(levers.recompute_blocks, levers.layer_major.as_ref());
        let always = self.pages_weights(levers).then(|| self.weights_on_disk(levers).always());
        Tally::timeline(self, outline, batch, levers).moments(always)
    }

    fn outline<'a>(&'a self, recompute_blocks: usize, layer_major: Option<&'a LayerMajor>) -> Outline<'a> {
        Outline {
            reach: self.trained.reach(),
            trains_tables: self.rehearsal.trains_tables(),
            recompute_blocks,
            layer_major,
            has_paged_weights: self.has_weights_elsewhere || layer_major.is_some_and(|layers| layers.weights_on_disk),
            overlaps: self.has_others && layer_major.is_none_or(|layers| layers.overlaps),
            copies_overlap: layer_major.is_some_and(|layers| layers.copies_overlap),
        }
    }

    /// The bytes by which micro-batches are compared: [`Counter::step`] of one micro-batch, micro-batch-major. It leaves out the
    /// packed operands that do not depend on the micro-batch's tokens.
    pub fn micro_batch(&self, shape: Shape, recompute_blocks: usize, loss_chunk_rows: usize) -> u64 {
        let levers = Levers {
            micro_batch_samples: shape.samples,
            recompute_blocks,
            loss_chunk_rows,
            layer_major: None,
            ..Levers::default()
        };
        let tallied = self.tally(shape, &levers);
        let head = self.rehearsal.head(shape, loss_chunk_rows);
        tallied.peak_with(&head).total() + tallied.packed.max(head.packed).along_tokens()
    }

    /// The requests of a step's passes to a card, if no micro-batch is recorded. Lists that are on the card already count as uploads.
    pub fn pass_calls(&self, batch: Shape, levers: &Levers) -> PassCalls {
        PassCalls { blocks: self.tally(batch, levers).calls, head: self.head(batch, levers).calls }
    }

    /// The arithmetic of a pass over a micro-batch.
    pub fn arithmetic(&self, shape: Shape) -> Arithmetic {
        let (outline, rehearsal) = (self.outline(0, None), &self.rehearsal);
        let (mut forward, mut blocks) = (0.0, Vec::new());
        for decoder in [false, true] {
            for block in 0..rehearsal.blocks(decoder) {
                let of_block = rehearsal.block_work(shape, decoder, block, outline.reach);
                forward += of_block.forward;
                blocks.extend(of_block.entered);
            }
        }
        let head = rehearsal.head(shape, 1).work.all;
        let training = forward + blocks.iter().map(|block: &BlockArithmetic| block.backward).sum::<f64>() + head;
        Arithmetic { blocks, head, training }
    }

    /// The peak of [`crate::T5::loss`] beside the parameters.
    pub fn evaluation(&self, shape: Shape, loss_chunk_rows: usize) -> InferenceCount {
        let (ledger, network) = (self.rehearsal.ledger(), self.rehearsal.network());
        let events = Outline::inference(&self.config, false).evaluation();
        let batch = rehearsal::batch(ledger, shape);
        let cx = StepContext { dropout: 0.0, loss_chunk_rows, ..*self.rehearsal.cx() };
        ledger.begin();
        let live = ledger.live();
        drop(infer(network, &events, &cx, std::slice::from_ref(&batch), &|| false).expect("counting cannot fail"));
        let loss = ledger.loss();
        let (packed, multiply_adds) = (ledger.kept().total(), ledger.work().all);
        let (workspace, on_host) = (ledger.peak() - live - loss, ledger.on_host());
        let with_weights = ledger.peak_with_weights() - live;
        InferenceCount { cache: 0, loss, workspace, packed, multiply_adds, on_host, with_weights }
    }

    /// The peak of the stacks' output, and of a classifier, beside the parameters: of a model that makes no text.
    fn outputs(&self, samples: usize, source_tokens: usize) -> InferenceCount {
        let (ledger, network) = (self.rehearsal.ledger(), self.rehearsal.network());
        let events = Outline::inference(&self.config, false).forward_only(true);
        let batch = rehearsal::batch(ledger, Shape { samples, source_tokens, target_tokens: source_tokens });
        let cx = StepContext { dropout: 0.0, ..*self.rehearsal.cx() };
        ledger.begin();
        let live = ledger.live();
        let step = infer(network, &events, &cx, std::slice::from_ref(&batch), &|| false).expect("counting cannot fail");
        if let (Some(z), true) = (step.and_then(|mut step| step.take_output()), self.config.head.labels().is_some()) {
            drop(network.class_logits(&z, &batch).expect("counting cannot fail"));
        }
        let (packed, multiply_adds) = (ledger.kept().total(), ledger.work().all);
        let (peak, with_weights) = (ledger.peak() - live, ledger.peak_with_weights() - live);
        // The output in f32 on the host, and what is made of it.
        let on_host = (2 * samples * source_tokens * self.config.d_model * size_of::<f32>()) as u64;
        let (beside, on_host) = match ledger.is_on_device() {
            true => (0, ledger.on_host() + on_host),
            false => (on_host, ledger.on_host()),
        };
        let workspace = peak + beside;
        InferenceCount {
            cache: 0,
            loss: 0,
            workspace,
            packed,
            multiply_adds,
            on_host,
            with_weights: with_weights + beside,
        }
    }

    /// The peak of [`crate::T5::generate`] beside the parameters, for one batch of sources.
    pub fn generation(&self, samples: usize, source_tokens: usize, answer: &AnswerShape) -> InferenceCount {
        let &AnswerShape { max_new_tokens, rows, .. } = answer;
        if !self.config.head.is_language() {
            return self.outputs(samples, source_tokens);
        }
        if max_new_tokens == 0 || samples == 0 {
            return InferenceCount::default();
        }
        let (ledger, network) = (self.rehearsal.ledger(), self.rehearsal.network());
        let activations = self.precisions.activations;
        let options = GenerateOptions { max_new_tokens, activations, sequences: rows, ..GenerateOptions::default() };
        let decoding = Decoding { network, options, has_paged_weights: false };
        let sources = ledger.beside(&[samples, source_tokens], DType::U32);
        ledger.begin();
        let live = ledger.live();
        let batch = MicroBatch::of_sources(sources, Vec::new());
        let cache = decoding.begin(batch, &self.config, &|| false).expect("counting cannot fail");
        let mut cache = cache.expect("nobody interrupts");
        let ids: Counted = ledger.beside(&[samples * rows, 1], DType::U32);
        // One token at each size of the cache: nothing changes between two sizes.
        let (mut position, mut multiply_adds) = (0, ledger.work().all);
        loop {
            let before = ledger.work().all;
            cache.skip_to(position);
            decoding.make_space(&mut [&mut cache]).expect("counting cannot fail");
            // A recording of the token's launches keeps the memory of all of its tensors.
            let token = ledger.hold();
            let logits = decoding.logits(&ids, None, &[&cache]).expect("counting cannot fail");
            let likeliest = || {
                let offsets = vec![0.0; samples * rows];
                let wanted = BeamSearch::wanted(rows, self.config.answer_ends()).min(self.config.vocab_size);
                logits.candidates(&offsets, wanted).expect("counting cannot fail")
            };
            match answer.looks_at_scores {
                true if answer.likeliest_are_enough && likeliest().is_some() => Ok(()),
                // Scores for beams take more memory than scores for sampling.
                true => logits.scores(true).map(drop),
                false => logits.largest().map(drop),
            }
            .expect("counting cannot fail");
            drop((logits, token));
            let end = cache.capacity().min(max_new_tokens);
            multiply_adds += (ledger.work().all - before) * (end - position) as f64;
            if end == max_new_tokens {
                break;
            }
            position = end;
        }
        let (peak, cache) = (ledger.peak() - live, cache.bytes());
        let beside = answer.bytes_beside(samples, self.config.vocab_size);
        let packed = ledger.kept().total();
        let (beside, on_host) = if ledger.is_on_device() { (0, ledger.on_host() + beside) } else { (beside, 0) };
        let (workspace, with_weights) = (peak - cache + beside, ledger.peak_with_weights() - live + beside);
        InferenceCount { cache, loss: 0, workspace, packed, multiply_adds, on_host, with_weights }
    }
}
