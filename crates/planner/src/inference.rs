//! The choices of inference: samples at a time, rows of logits at a time, and the place of the weights.
//!
//! The levers come from the table of a step's levers. Weights in a file are read from the model's own files. Weights stored in another
//! dtype are first copied to a file.

use candle_core::DType;
use memory_policy::{Bytes, CostRow, MemorySpace, Name, Phase};
use t5::{LayerMajor, Levers, ParameterSpec, Part};

use crate::counted::{Counter, NamedBytes, Resident};
use crate::error::Result;
use crate::job::Inference;
use crate::lever::{FrozenBlocks, Pins, Space, Value};
use crate::levers::{
    LOSS_CHUNK_ROWS, MAX_COUNTS, MICRO_BATCH_SAMPLES, OFFLOAD_TO, Step, WEIGHT_BLOCKS_IN_MEMORY, WEIGHT_OFFLOAD,
    WEIGHTS_AT_A_TIME,
};
use crate::names::{EVALUATION, GENERATION, LOADING, PARAMETERS, READING_ROWS, ROWS};
use crate::prices::{READ, READ_FROM_DISK};
use crate::reading_bytes::Reading;
use crate::{Job, StepChoice, place};

/// The choices of inference. `memory_for_reading`: bytes of files that the system may keep in memory while they are read.
pub(crate) fn offer(job: &Job<'_>, inference: &Inference<'_>, memory_for_reading: Bytes) -> Result<Vec<StepChoice>> {
    let counter = Counter::new(job.model, inference.parameters, inference.activations, job.longest)?.at(job.place);
    let specs = ParameterSpec::all(job.model);
    let offer = Offer { job, inference, counter: &counter, memory_for_reading, specs };
    let mut choices: Vec<StepChoice> = offer.levers().iter().map(|levers| offer.choice(levers)).collect();
    let fastest = choices.iter().map(|choice| choice.relative_time).fold(f64::INFINITY, f64::min);
    choices.iter_mut().for_each(|choice| choice.relative_time /= fastest);
    Ok(choices)
}

/// A copy to a device takes about ten microseconds before its first byte. At 10 GB/s this many bytes take that long.
const COPY_BYTES: u64 = 100_000;

/// The values that all choices share.
struct Offer<'a> {
    job: &'a Job<'a>,
    inference: &'a Inference<'a>,
    counter: &'a Counter<'a>,
    memory_for_reading: Bytes,
    specs: Vec<ParameterSpec>,
}

impl Offer<'_> {
    /// The combinations of inference's levers. Inference goes through the layers once, like a step that goes layer by layer and trains
    /// nothing.
    fn levers(&self) -> Vec<Levers> {
        // A pinned micro-batch is meant for a step. The number of samples in inference is a setting of its own.
        let mut pins = Pins::default();
        let pinned = [&LOSS_CHUNK_ROWS, &WEIGHT_OFFLOAD, &WEIGHT_BLOCKS_IN_MEMORY, &WEIGHTS_AT_A_TIME, &OFFLOAD_TO];
        for lever in pinned.map(|lever| lever.name) {
            if let Some(value) = self.job.pins.value(lever) {
                pins = pins.with(lever, value);
            }
        }
        if self.inference.stored.is_none() {
            pins = pins.with(WEIGHT_OFFLOAD.name, Value::Word("none"));
        }
        let space = Space {
            pins: &pins,
            place: self.job.place,
            blocks: 0,
            batch_samples: self.job.samples,
            target_tokens: self.job.longest.1,
            has_large_moments: false,
            frozen: Some(FrozenBlocks::new(self.job.model, MAX_COUNTS)),
            has_others: false,
            casts_weights: false,
            casts_adapter: false,
            graphs: None,
        };
        let layer_major = Some(LayerMajor::default());
        let mut levers =
            vec![&MICRO_BATCH_SAMPLES, &WEIGHT_OFFLOAD, &WEIGHT_BLOCKS_IN_MEMORY, &WEIGHTS_AT_A_TIME, &OFFLOAD_TO];
        if self.inference.has_targets {
            levers.insert(1, &LOSS_CHUNK_ROWS);
        }
        space.combinations(&levers, Levers { loss_chunk_rows: 1, layer_major, ..Levers::default() })
    }

    #[expect(clippy::cast_precision_loss, reason = "samples of a batch")]
    fn choice(&self, levers: &Levers) -> StepChoice {
        let (inference, samples) = (self.inference, levers.micro_batch_samples);
        let note = format!("{samples} samples");
        let Reading { rows, batch } = inference.rows.as_ref().map_or(inference.prompts, |rows| rows.bytes(samples));
        let resident = self.resident(levers);
        let place = self.job.place;
        let parameters = |bytes| CostRow::new(PARAMETERS, bytes, self.note(levers)).at(place);
        let phase = |name: Name, (tensors, rows): (&[NamedBytes], u64), on_host: u64| {
            let tensors = tensors.iter().map(|held| held.row(&note).at(place));
            let rows = CostRow::new(ROWS, rows, &note);
            let rows = [parameters(resident.at_a_time)].into_iter().chain(tensors).chain([rows]);
            let on_host = place::staging(on_host.max(self.in_transit(levers).unwrap_or(0)));
            Phase { name, rows: rows.chain(on_host).chain(self.offloaded_to_host(levers)).collect() }
        };
        // If weights are in a file, their rows include the transit buffer. No row is read before the model is loaded.
        let reads_no_weights = levers.has_weights_on_disk() && levers.weight_blocks_in_memory() == 0;
        let transit: Vec<CostRow> = match self.in_transit(levers) {
            Some(bytes) => place::staging(bytes).into_iter().chain(self.offloaded_to_host(levers)).collect(),
            None if reads_no_weights => Vec::new(),
            None => self.counter.loading(inference.parameters, place, inference.stored.as_ref()),
        };
        let loading = [parameters(resident.loading)].into_iter().chain(transit).collect();
        let [evaluated, answered] = inference.counts.in_a_batch(samples);
        let counted = self.counter.evaluation([evaluated, answered], levers.loss_chunk_rows, inference.answer);
        // Times compare batches of any size, as if all of their samples were answered.
        let [of_evaluation, of_generation] = counted.multiply_adds;
        let multiply_adds = [of_evaluation, of_generation * evaluated as f64 / answered as f64];
        let of_operation = self.counter.weights_of_an_operation(levers);
        let rows_of_each = of_operation.map_or_else(|| counted.rows.clone(), |bytes| counted.beside_weights(bytes));
        let ([evaluation, generation], [for_evaluation, for_generation]) = (&rows_of_each, counted.on_host);
        let mut other_phases =
            vec![Phase { name: LOADING, rows: loading }, phase(GENERATION, (generation, batch), for_generation)];
        if rows > 0 {
            other_phases.push(phase(READING_ROWS, (&[], rows), 0));
        }
        if inference.has_targets {
            other_phases.push(phase(EVALUATION, (evaluation, batch), for_evaluation));
        }
        StepChoice {
            what: Step { levers: *levers, evaluation_samples: samples, is_inference: true },
            rows: Vec::new(),
            other_phases,
            relative_time: self.time_of_a_sample(levers, multiply_adds),
        }
    }

    /// Bytes in the host's memory of a weight while it is copied to a device; `None` if weights stay on the device, or if there is none.
    fn in_transit(&self, levers: &Levers) -> Option<u64> {
        let is_off = self.job.place == MemorySpace::Device && levers.has_weights_on_disk();
        let paged = || self.counter.paged(levers);
        let stored = self.inference.stored.as_ref();
        let in_place = || stored.map_or(0, |stored| paged().in_transit_in_place(stored));
        // A weight in a file is copied in pieces.
        is_off.then(|| paged().largest().max(in_place()).max(cuda_device::copies::STAGING_BYTES))
    }

    /// The row of weights that are copied to the host's memory because they are off a device.
    fn offloaded_to_host(&self, levers: &Levers) -> Option<CostRow> {
        let copied = self.inference.stored.filter(|_| levers.has_host_memory());
        place::offloaded_to_host(copied.map_or(0, |stored| stored.copied(self.inference.parameters)))
    }

    /// Bytes of the parameters in memory.
    fn resident(&self, levers: &Levers) -> Resident {
        match &self.inference.stored {
            Some(stored) if levers.has_weights_on_disk() => self.counter.resident_in_place(stored, levers, 0),
            _ => self.counter.resident(self.inference.parameters),
        }
    }

    /// The place of the parameters, in words.
    fn note(&self, levers: &Levers) -> String {
        let dtype = self.inference.parameters;
        let kept_in = if dtype == DType::BF16 { "bf16" } else { "f32" };
        if !levers.has_weights_on_disk() {
            return kept_in.to_owned();
        }
        let file = match self.inference.stored.map_or(0, |stored| stored.copied(dtype)) {
            0 => "in the model's own files".to_owned(),
            copied if levers.has_host_memory() => format!("{} copied to the host's memory", Bytes(copied)),
            copied => format!("in files, {} of them copied", Bytes(copied)),
        };
        place::note_of_weights(&format!("{kept_in}, {file}"), self.job.place, levers)
    }

    /// The encoder's share of an answer's arithmetic, by weights and tokens. On a card, whose fixed costs are large, the encoder's are
    /// counted apart: it computes all tokens of a source at once. A processor's fixed costs are small, so the decoder's few rows stand for
    /// all.
    #[expect(clippy::cast_precision_loss, reason = "bytes and tokens are far below 2^53")]
    fn share_of_encoder(&self, source_tokens: f64, new_rows: f64) -> f64 {
        if self.job.place == MemorySpace::Host {
            return 0.0;
        }
        let [encoder, decoder] = weights(&self.specs, self.inference.parameters, |_| true).map(|w| w.bytes as f64);
        let (encoder, decoder) = (encoder * source_tokens, decoder * new_rows);
        encoder / (encoder + decoder).max(1.0)
    }

    /// The time of the losses and answers of a sample, in multiply-adds.
    #[expect(clippy::cast_precision_loss, reason = "bytes and tokens are far below 2^53")]
    fn time_of_a_sample(&self, levers: &Levers, [evaluation, generation]: [f64; 2]) -> f64 {
        let (prices, (source_tokens, target_tokens)) = (&self.job.prices, self.job.longest);
        let new_tokens = self.inference.answer.max_new_tokens.max(1) as f64;
        let samples = levers.micro_batch_samples as f64;
        let elsewhere = weights_elsewhere(self.job.model, &self.specs, self.inference.parameters, levers);
        let bus = if self.job.place == MemorySpace::Device { prices.bus_byte } else { 0.0 };
        let [encoder, decoder] = weight_fetch_time(elsewhere, self.memory_for_reading, prices.file_byte, bus);
        // As in a step, a product has a fixed cost in the time of so many tokens.
        let pass = |multiply_adds: f64, tokens: f64| multiply_adds * (1.0 + prices.overhead_tokens / tokens);
        let loss = if self.inference.has_targets {
            let keeps =
                self.job.place == MemorySpace::Device || t5_ops::keeps_logits(DType::F32, levers.loss_chunk_rows);
            let again = if keeps { 1.0 } else { 1.1 };
            let chunks = 1.0 + 0.1 * prices.overhead_rows / levers.loss_chunk_rows.max(32) as f64;
            pass(evaluation, samples * (source_tokens + target_tokens) as f64) * again * chunks + encoder + decoder
        } else {
            0.0
        };
        let rows = self.inference.answer.rows as f64;
        let in_encoder = generation * self.share_of_encoder(source_tokens as f64, new_tokens * rows);
        let encoding = pass(in_encoder, samples * source_tokens.max(1) as f64);
        let decoding = pass(generation - in_encoder, samples * rows);
        // The decoder's weights are read for each token.
        let answers = encoding + decoding + encoder + decoder * new_tokens;
        (loss + answers) / samples
    }
}

/// Weights of the encoder or of the decoder.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StackWeights {
    /// Bytes.
    bytes: u64,
    /// Bytes, plus [`COPY_BYTES`] for each weight: they give the time of copying to a device.
    copied: u64,
}

/// The weights of the parts that `is_one` selects: those that a pass of the encoder reads, and those that each token of an answer needs.
fn weights(specs: &[ParameterSpec], dtype: DType, is_one: impl Fn(Part) -> bool) -> [StackWeights; 2] {
    let mut of = [StackWeights::default(); 2];
    for spec in specs.iter().filter(|spec| is_one(spec.part)) {
        let is_of_encoder = matches!(spec.part, Part::Encoder { .. } | Part::EncoderNorm);
        let weights = &mut of[usize::from(!is_of_encoder)];
        weights.bytes += spec.bytes(dtype);
        weights.copied += spec.bytes(dtype) + COPY_BYTES;
    }
    of
}

/// The weights that are copied to the place of computation each time that they are needed.
pub(crate) fn weights_elsewhere(
    model: &t5::Config,
    specs: &[ParameterSpec],
    dtype: DType,
    levers: &Levers,
) -> [StackWeights; 2] {
    let stays = |part| LayerMajor::keeps_weights(levers.weight_blocks_in_memory(), part, model);
    weights(specs, dtype, |part| levers.has_weights_on_disk() && !stays(part))
}

/// The time of copying these weights, where the system may keep `memory` bytes of files in memory. `file_byte` is the time of a byte that
/// is written to a file and read back, and `bus_byte` the time of a byte that is copied to a device.
#[expect(clippy::cast_precision_loss, reason = "bytes are far below 2^53")]
pub(crate) fn weight_fetch_time(
    elsewhere: [StackWeights; 2],
    memory: Bytes,
    file_byte: f64,
    bus_byte: f64,
) -> [f64; 2] {
    let bytes = elsewhere.iter().map(|weights| weights.bytes).sum::<u64>();
    let price = if bytes <= memory.0 { READ } else { READ_FROM_DISK };
    elsewhere.map(|weights| price * file_byte * weights.bytes as f64 + bus_byte * weights.copied as f64)
}

#[cfg(test)]
mod tests {
    use memory_policy::{Budget, Budgets, MemorySnapshot};
    use t5::step::count::{Precisions, Shape};
    use t5::{AnswerShape, StoredWeights};

    use super::*;
    use crate::names::{CACHE, LOSS, WORKSPACE};
    use crate::{Plan, Prices, RowCounts, plan, testing};

    /// The plan for t5-small over at most 8 samples of 128 tokens on either side, within `mib` MiB.
    fn planned(inference: &Inference<'_>, mib: u64, pins: &Pins) -> Result<Plan> {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let now = MemorySnapshot { rss: Bytes::mib(20), available: Bytes::gib(8), ..MemorySnapshot::default() };
        let job = Job {
            prices: Prices::vectors(),
            ..Job::of_inference(
                &model,
                inference.clone(),
                8,
                (128, 128),
                (Budget::Explicit(Bytes::mib(mib)).into(), pins),
            )
        };
        assert_eq!(job.budgets, Budgets::from(Budget::Explicit(Bytes::mib(mib))));
        Ok(plan(&job, &now)?.plan)
    }

    fn inference(parameters: DType, stored: Option<StoredWeights>) -> Inference<'static> {
        let activations = DType::F32;
        let (answer, counts, beside) = (AnswerShape::greedy(32), RowCounts::ANY, Vec::new());
        Inference {
            activations,
            parameters,
            stored,
            answer,
            counts,
            has_targets: true,
            rows: None,
            prompts: Reading::default(),
            beside,
        }
    }

    /// The least MiB that are enough on the stated processor.
    fn least(planned: impl Fn(u64) -> Result<Plan>) -> u64 {
        match planned(1) {
            Err(crate::Error::DoesNotFit(refusal)) => refusal.smallest_budget.0.div_ceil(1 << 20),
            _ => panic!("1 MiB is too little"),
        }
    }

    #[test]
    fn a_smaller_budget_leaves_weights_in_their_files_and_takes_fewer_samples_at_a_time() {
        let in_place = inference(DType::F32, Some(testing::STORED));
        let planned_in = |mib| planned(&in_place, mib, &Pins::default());
        let least = least(planned_in);
        let plans: Vec<Plan> = [2000, 300, least + 32, least].map(|mib| planned_in(mib).expect("it fits")).into();
        for (before, after) in plans.iter().zip(&plans[1..]) {
            assert!(after.predicted_peak <= before.predicted_peak && after.relative_time >= before.relative_time);
        }
        let on_disk = |plan: &Plan| plan.step.levers.has_weights_on_disk();
        assert!(!on_disk(&plans[0]) && on_disk(&plans[3]), "{plans:#?}");
        assert_eq!(plans[0].step.evaluation_samples, 8);
        assert!(plans[3].step.evaluation_samples < 8);
        assert!(words(&plans[3]).contains("in the model's own files; one matrix at a time in memory"));
        // If weights must stay in memory, the bill has all of them.
        let refused = planned(&inference(DType::F32, None), 200, &Pins::default());
        let Err(crate::Error::DoesNotFit(refusal)) = refused else { panic!("60 M parameters do not fit 200 MiB") };
        assert!(refusal.smallest_budget > Bytes(60_506_624 * 4));
    }

    #[test]
    fn answers_are_billed_for_the_samples_that_are_answered_and_losses_for_all() {
        let planned = |inference: &Inference<'_>| planned(inference, 2000, &Pins::default()).expect("it fits");
        let all = inference(DType::F32, None);
        let [whole, some, few] = [u64::MAX, 8, 3]
            .map(|answered| planned(&Inference { counts: RowCounts { answered, ..RowCounts::ANY }, ..all.clone() }));
        let bytes = |plan: &Plan, phase: Name, row: Name| {
            let rows = plan.bill.phase_rows.iter().filter(|found| found.name == phase).flat_map(|found| &found.rows);
            rows.filter(|found| found.name == row).map(|row| row.bytes.0).sum::<u64>()
        };
        assert_eq!(some.bill, whole.bill);
        assert_eq!(few.step.evaluation_samples, 8);
        let model = t5::Config::preset("t5-small").expect("a preset");
        let counter = Counter::new(&model, DType::F32, DType::F32, (128, 128)).expect("a T5");
        let of_three = counter.evaluation([3; 2], few.step.levers.loss_chunk_rows, all.answer);
        for held in &of_three.rows[1] {
            assert_eq!(bytes(&few, GENERATION, held.name.clone()), held.bytes, "{}: {}", held.name, few.bill);
        }
        assert!(bytes(&few, GENERATION, CACHE) < bytes(&whole, GENERATION, CACHE), "{}", few.bill);
        for row in [LOSS, WORKSPACE] {
            assert_eq!(bytes(&few, EVALUATION, row.clone()), bytes(&whole, EVALUATION, row), "{}", few.bill);
        }
        // The compared times are times of a sample, and do not depend on the number of answered rows.
        assert_eq!(few.relative_time.to_bits(), whole.relative_time.to_bits());
    }

    #[test]
    fn weights_of_an_operation_are_billed_with_the_tensors_that_are_there_then() {
        let in_place = inference(DType::F32, Some(testing::STORED));
        let planned_in = |mib| planned(&in_place, mib, &Pins::default());
        let plan = planned_in(least(planned_in)).expect("it fits");
        let levers = plan.step.levers;
        assert!(levers.has_weights_by_matrix() && levers.weight_blocks_in_memory() == 0, "{}", plan.bill);
        let model = t5::Config::preset("t5-small").expect("a preset");
        let (parameters, activations, gradients) = (DType::F32, DType::F32, DType::F32);
        let precisions = Precisions { parameters, activations, gradients };
        let passes = t5::step::count::Counter::new(&model, precisions, 0.0, &|_| false).expect("a T5");
        let samples = plan.step.evaluation_samples;
        let shape = Shape { samples, source_tokens: 128, target_tokens: 128 };
        let answered = passes.generation(samples, 128, &in_place.answer);
        let evaluated = passes.evaluation(shape, levers.loss_chunk_rows);
        let always = passes.weights_on_disk(&levers).always();
        for (phase, count) in [(GENERATION, answered), (EVALUATION, evaluated)] {
            let rows = plan.bill.phase_rows.iter().filter(|found| found.name == phase).flat_map(|found| &found.rows);
            let of_tensors = rows.filter(|row| [PARAMETERS, CACHE, LOSS, WORKSPACE].contains(&row.name));
            let billed: u64 = of_tensors.map(|row| row.bytes.0).sum();
            assert_eq!(billed, always + count.with_weights, "{phase}: {}", plan.bill);
            let largest_of_each = always + at_a_time(DType::F32) + count.cache + count.loss + count.workspace;
            assert!(billed < largest_of_each, "{phase}: {billed} of {largest_of_each}");
        }
    }

    /// The most bytes of t5-small's weights in memory at a time: its largest matrix, or a window of its table.
    fn at_a_time(dtype: DType) -> u64 {
        t5_ops::window_bytes((32_128, 512), dtype).max((2048 * 512 * dtype.size_in_bytes()) as u64)
    }

    /// The note of the parameters' row.
    fn words(plan: &Plan) -> String {
        let row = plan.bill.rows.iter().find(|row| row.name == PARAMETERS);
        row.map(|row| row.note.clone()).unwrap_or_default()
    }

    #[test]
    fn weights_in_bf16_take_half_and_a_copy_is_said() {
        let smallest = |inference: &Inference<'_>| match planned(inference, 25, &Pins::default()) {
            Err(crate::Error::DoesNotFit(refusal)) => refusal.smallest_budget,
            _ => panic!("25 MiB are too few"),
        };
        let [whole, half] = [DType::F32, DType::BF16].map(|dtype| smallest(&inference(dtype, Some(testing::STORED))));
        // The two tables of relative positions always stay in memory.
        let tables = 2 * 32 * 8 * 2;
        assert_eq!(whole.saturating_sub(half), Bytes(at_a_time(DType::F32) - at_a_time(DType::BF16) + tables));
        let copied = StoredWeights { copied_bytes: [0, 120 << 20], copying_bytes: [0, 240 << 20], ..testing::STORED };
        let pins = Pins::default().with(WEIGHT_OFFLOAD.name, Value::Word("disk"));
        let plan = planned(&inference(DType::BF16, Some(copied)), 2000, &pins).expect("it fits");
        let note = format!("in files, {} of them copied", Bytes::mib(120));
        assert!(words(&plan).contains(&note), "{}", plan.bill);
        assert!(smallest(&inference(DType::BF16, Some(copied))) > half, "a copy is on its way while it is loaded");
    }

    #[test]
    fn memory_that_is_left_keeps_blocks_of_weights_those_of_the_decoder_first() {
        let on_disk = Pins::default().with(WEIGHT_OFFLOAD.name, Value::Word("disk"));
        let kept = |plan: &Plan| plan.step.levers.weight_blocks_in_memory();
        // Beside these budgets the system has no memory for files.
        let planned = |mib: u64, pins: &Pins| {
            let model = t5::Config::preset("t5-small").expect("a preset");
            let now = MemorySnapshot { rss: Bytes::mib(20), available: Bytes::mib(mib), ..MemorySnapshot::default() };
            let budget = (Budget::Explicit(Bytes::mib(mib)).into(), pins);
            let inference = Inference { has_targets: false, ..inference(DType::F32, Some(testing::STORED)) };
            Ok(plan(&Job::of_inference(&model, inference, 1, (128, 128), budget), &now)?.plan)
        };
        let least = least(|mib| planned(mib, &on_disk));
        let budgets = [0, 34, 66, 98, 130].map(|more| least + more);
        let plans = budgets.map(|mib| planned(mib, &on_disk).expect("it fits"));
        let blocks = plans.each_ref().map(kept);
        // The encoder is read once for an answer, so keeping it in memory saves no time.
        assert_eq!(blocks, [0, 2, 4, 6, 6]);
        for (mib, plan) in budgets.into_iter().zip(&plans) {
            assert!(plan.predicted_peak <= Bytes::mib(mib));
            assert!(plan.relative_time <= plans[0].relative_time);
            // A block of the decoder has 16 MiB, a block of the encoder 12.
            let weights = plan.bill.rows.iter().find(|row| row.name == PARAMETERS).map_or(0, |row| row.bytes.0);
            let of_decoder = kept(plan).min(6) as u64;
            let of_encoder = kept(plan) as u64 - of_decoder;
            assert_eq!((weights - at_a_time(DType::F32)) >> 20, 16 * of_decoder + 12 * of_encoder, "{}", plan.bill);
        }
        let pins = on_disk.with(WEIGHT_BLOCKS_IN_MEMORY.name, Value::Count(3));
        let pinned = planned(budgets[4], &pins).expect("it fits");
        assert_eq!(kept(&pinned), 3);
        assert!(
            words(&pinned).contains("; 3 blocks in memory, and one matrix at a time of the others"),
            "{}",
            pinned.bill
        );
    }

    #[test]
    fn pins_of_weights_and_of_the_loss_are_kept_and_those_of_a_step_mean_nothing() {
        let pins = Pins::default().with(WEIGHT_OFFLOAD.name, Value::Word("disk"));
        let pins = pins.with(LOSS_CHUNK_ROWS.name, Value::Count(64)).with(MICRO_BATCH_SAMPLES.name, Value::Count(1));
        let plan = planned(&inference(DType::F32, Some(testing::STORED)), 2000, &pins).expect("it fits");
        let levers = plan.step.levers;
        assert!(levers.has_weights_on_disk() && levers.loss_chunk_rows == 64 && levers.micro_batch_samples == 8);
        assert_eq!(
            plan.bill.conclusion,
            "evaluation, micro-batches of 8, weights on disk, weights of 5 blocks in memory"
        );
    }
}
