//! The choices of training: the memory of a step under each combination of levers, and of the other phases of a run.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use candle_core::DType;
use memory_policy::{Bytes, CostRow, FEEDING, MemorySpace, Name, Phase, undominated};
use t5::{Levers, ParameterSpec};
use trainer::Sharding;
use trainer::contrastive::Contrastive;
use trainer::costs::SavedFrom;

use crate::counted::{self, Arithmetic, NamedBytes, Resident, StepCounter};
use crate::error::Result;
use crate::files::StepIo;
use crate::frozen_model::FrozenModel;
use crate::job::{Evaluation, Training, Wanted};
use crate::kinds;
use crate::lever::{FrozenBlocks, Graphs, Space};
use crate::levers::{PARTS, Step};
use crate::names::{
    ACTIVATIONS, EVALUATION, FROZEN_PASS, GENERATION, GRADIENTS, GRAPHS, LOADING, LOSS, OPTIMIZER_STATE, PACKED,
    PARAMETERS, READING_ROWS, SAVING, SMALL_TENSORS, SQUARE_SUMS, VALIDATION_ROWS, VECTORS, WEIGHT_COPIES, WORKSPACE,
};
use crate::prices::{Prices, moving_time, relative_time};
use crate::processes::Processes;
use crate::reading_bytes::Reading;
use crate::search::halvings;
use crate::traffic::{Computed, Traffic};
use crate::{Job, StepChoice, place};

/// The most rows that an evaluation computes at a time: enough to keep two cores busy, and few enough to notice a signal soon.
pub const MAX_EVALUATED_TOGETHER: usize = 16;

/// Small blocks of a step beyond the estimates for every phase. Up to 0.9 MiB beyond the first of these estimates were measured. Most of
/// them are tensors of short samples, which are beside the pages of the long ones.
const SMALL_TENSORS_BYTES: u64 = 768 << 10;

/// The choices of training: the fixed memory of a run, and the ways to carry out a step.
pub(crate) fn offer(
    job: &Job<'_>,
    training: &Training<'_>,
    memory_for_files: Bytes,
) -> Result<(Vec<CostRow>, Vec<StepChoice>)> {
    let counter = StepCounter::new(job.model, training.options, job.samples, job.longest, &training.processes)?;
    let counter = counter.beside(training.frozen.map(|of| of.model), training.options)?.at(job.place, training.options);
    let Processes { owners, .. } = training.processes;
    let optimizer =
        trainer::costs::optimizer_state_shard(job.model, training.options, training.options.parameter_dtype(), owners)?;
    let state = CostRow::new(OPTIMIZER_STATE, optimizer.bytes, training.options.optimizer.in_words()).at(job.place);
    let offer = Offer {
        state: Some(state.clone()),
        // With virtual shards the bits do not depend on the number of processes, so neither does the plan.
        traffic: Traffic::total(job.model, training, job.place)?.filter(|_| !training.processes.closes_shards),
        ..Offer::new(job, training, &counter, memory_for_files)?
    };
    let steps = match training.wanted {
        Wanted::All => offer.choices().collect(),
        Wanted::Undominated(kept) => {
            let is_kept = |choice: &StepChoice| kept.is_some_and(|plan| plan.step.levers == choice.what.levers);
            undominated(offer.choices(), is_kept)
        }
    };
    // If moments may be in a file, they are a part of each choice.
    let mut fixed = if counter.state_on_disk().is_some() { Vec::new() } else { vec![state] };
    fixed.extend(place::communication(job.place, &training.processes));
    Ok((fixed, steps))
}

/// The values that all choices share.
struct Offer<'a> {
    job: &'a Job<'a>,
    training: &'a Training<'a>,
    counter: &'a StepCounter<'a>,
    memory_for_files: Bytes,
    /// A note about the source of the parameters, for the bill.
    parameters_note: String,
    gradients_note: String,
    loading: Vec<CostRow>,
    /// Memory of saving, with moments in memory and in a file.
    saving: [CostRow; 2],
    /// The optimizer's state in memory.
    state: Option<CostRow>,
    /// The traffic to other processes, if any.
    traffic: Option<Traffic>,
    /// The frozen model beside the trained one, if there is one.
    frozen: Option<FrozenModel<'a>>,
    /// By samples of a micro-batch: whether such micro-batches have the same shapes step after step.
    repeating: RefCell<HashMap<usize, bool>>,
}

impl<'a> Offer<'a> {
    fn new(
        job: &'a Job<'a>,
        training: &'a Training<'a>,
        counter: &'a StepCounter<'a>,
        memory_for_files: Bytes,
    ) -> Result<Self> {
        let dtype = training.options.parameter_dtype();
        let kept_in = |dtype| if dtype == DType::BF16 { "bf16" } else { "f32" };
        #[expect(clippy::cast_precision_loss, reason = "for reading")]
        let millions = ParameterSpec::elements_of_all(job.model) as f64 / 1e6;
        let frozen = if counter.freezes() { ", none for frozen parameters" } else { "" };
        let gradients = if counter.gradients() == DType::BF16 { "bf16, tables f32" } else { "f32" };
        let loading = counter.of_model().loading(dtype, job.place, training.base.as_ref());
        let saving = |moments_in_file: bool| -> Result<CostRow> {
            let from = SavedFrom { device: job.place == MemorySpace::Device, moments_in_file };
            let row = match training.processes.number {
                1 => trainer::costs::saving(job.model, training.options, dtype, from)?,
                _ => trainer::costs::saving_of_several(),
            };
            Ok(CostRow::new(Name::new(row.name), row.bytes, "a piece of a tensor on its way to a file"))
        };
        Ok(Self {
            job,
            training,
            counter,
            memory_for_files,
            parameters_note: format!("{millions:.1} M x {}", kept_in(dtype)),
            gradients_note: format!("{gradients}{frozen}"),
            loading,
            saving: [saving(false)?, saving(true)?],
            state: None,
            traffic: None,
            frozen: training
                .frozen
                .map(|frozen| FrozenModel::new(frozen, training.options, job.samples, job.longest))
                .transpose()?,
            repeating: RefCell::default(),
        })
    }

    /// The ways to carry out a step that the pins and the allowance for files permit.
    fn choices(&self) -> impl Iterator<Item = StepChoice> {
        let space = Space {
            pins: self.job.pins,
            place: self.job.place,
            blocks: self.counter.blocks(),
            batch_samples: self.job.samples,
            target_tokens: self.job.longest.1,
            has_large_moments: self.counter.state_on_disk().is_some(),
            frozen: self.training.base.map(|_| FrozenBlocks::new(self.job.model, PARTS)),
            has_others: self.traffic.is_some(),
            casts_weights: self.casts_weights(DType::F32 == self.training.options.parameter_dtype()),
            casts_adapter: self.casts_weights(self.job.place == MemorySpace::Device && self.job.model.lora.is_some()),
            graphs: self.graphs(),
        };
        let (ways, cuts) = space.schedules_and_sizes();
        // The sums of several shards are kept separately until all of them are complete.
        let Processes { closes_shards, owners, sharding, .. } = self.training.processes;
        let is_possible = |way: &Levers| {
            // Tables that wait in files are summed over all shards at once.
            let is_summed = !closes_shards || way.layer_major.is_none_or(|layers| !layers.gradients_on_disk);
            let is_dealt_out = owners == 1 || !way.has_optimizer_on_disk();
            // Micro-batch by micro-batch, weights are received again for each micro-batch.
            let is_brought_once = way.layer_major.is_some() || closes_shards;
            let is_here =
                owners == 1 || sharding < Sharding::Weights || (!way.has_weights_on_disk() && is_brought_once);
            is_summed && is_dealt_out && is_here
        };
        let ways = ways.into_iter().filter(is_possible).map(|way| (way, self.counter.written(&way)));
        let ways: Rc<[_]> = ways.filter(|(way, written)| self.may_write(&space, way, *written)).collect();
        cuts.into_iter().flat_map(move |cut| {
            let (ways, arithmetic) = (Rc::clone(&ways), self.counter.arithmetic(cut.micro_batch_samples));
            // Choices are made one at a time, so a caller that keeps few of them never holds all ways of a cut.
            (0..ways.len()).map(move |index| {
                let (way, written) = ways[index];
                let Levers { micro_batch_samples, loss_chunk_rows, .. } = cut;
                self.choice(&Levers { micro_batch_samples, loss_chunk_rows, ..way }, &arithmetic, written)
            })
        })
    }

    /// Recordings of micro-batches that go through all blocks at once.
    fn graphs(&self) -> Option<Graphs> {
        let is_possible = self.counter.is_recordable() && !self.counter.pages_weights(&Levers::default());
        let (are_wanted, have_prices) = (cuda_device::records_micro_batches(), self.job.prices.knows_graphs());
        (self.job.place == MemorySpace::Device && is_possible).then_some(Graphs { are_wanted, have_prices })
    }

    /// Whether these levers record micro-batches, and rows are similar enough in length.
    fn is_recorded(&self, levers: &Levers) -> bool {
        let samples = levers.micro_batch_samples;
        let repeat = || kinds::repeat(self.training.lengths, self.job.samples, samples, self.job.longest);
        levers.repeats && *self.repeating.borrow_mut().entry(samples).or_insert_with(repeat)
    }

    /// Whether the allowance for the whole run covers the written bytes. Files that a pin asks for are always allowed.
    fn may_write(&self, space: &Space<'_>, way: &Levers, written: StepIo) -> bool {
        let steps = self.training.options.total_steps;
        space.files_are_pinned(way) || written.total().saturating_mul(steps) <= self.training.disk_writes
    }

    /// One way to carry out a step.
    fn choice(&self, levers: &Levers, arithmetic: &Arithmetic, written: StepIo) -> StepChoice {
        let place = self.job.place;
        let counted::Step { tensors, on_host, waiting } = self.counter.training(levers);
        let state = self.state(levers, true).map_or(0, |row| row.bytes.0);
        let resident = self.counter.resident(levers, self.training.base.as_ref(), state);
        // Layer by layer, the tensor rows include the gradients that exist at a time, and no gradients remain after a step.
        let sums = self.training.processes.gradient_sums as u64;
        let gradients = if levers.layer_major.is_some() { 0 } else { sums * self.counter.gradient_bytes() };
        let mut rows = Vec::with_capacity(tensors.len() + 3);
        if !self.counter.pages_weights(levers) {
            rows.push(self.parameters(resident.at_a_time));
        }
        if gradients > 0 {
            rows.push(CostRow::new(GRADIENTS, gradients, &self.gradients_note).at(place));
        }
        rows.extend(tensors.iter().map(|held| held.row(self.note(&held.name, levers, written)).at(place)));
        rows.extend(place::staging(on_host + place::pinned_for_others(place, &self.training.processes)));
        rows.extend(place::offloaded_to_host(self.offloaded_to_host(levers) + waiting));
        if levers.layer_major.is_some() && self.counter.square_sums() > 0 {
            let note = "of each gradient, for the norm and the update";
            rows.push(CostRow::new(SQUARE_SUMS, self.counter.square_sums(), note).at(place));
        }
        let packed = tensors.iter().filter(|held| held.name == PACKED).map(|held| held.bytes).sum();
        let of_step = rows.iter().filter(|row| row.name != PARAMETERS).map(|row| row.bytes.0).sum();
        rows.push(CostRow::new(SMALL_TENSORS, SMALL_TENSORS_BYTES, "estimate: tensors of short samples"));
        rows.extend(self.vectors(self.job.samples));
        rows.extend(self.state_of_choice(levers, false));
        rows.extend(self.weight_copies(levers));
        rows.extend(self.frozen.iter().flat_map(FrozenModel::in_step));
        if levers.repeats {
            let bytes = self.counter.recorded_beside(levers);
            rows.push(CostRow::new(GRAPHS, bytes, "kept between launches").at(place));
        }
        let evaluation_samples = self.evaluation_samples(levers, (of_step, packed));
        StepChoice {
            what: Step { levers: *levers, evaluation_samples, is_inference: false },
            rows,
            other_phases: self.other_phases(levers, evaluation_samples, (gradients, packed, waiting), resident),
            relative_time: self.relative_time(levers, arithmetic, written),
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "bytes and samples of a step are far below 2^53")]
    fn relative_time(&self, levers: &Levers, arithmetic: &Arithmetic, written: StepIo) -> f64 {
        let prices: &Prices = &self.job.prices;
        let of_a_micro_batch = levers.micro_batch_samples as f64 / self.job.samples as f64;
        let of_table = self.counter.table_read(levers);
        let written = written.in_micro_batches(levers.micro_batches(self.job.samples), of_table);
        let moved = moving_time(prices, written, self.memory_for_files).times(of_a_micro_batch);
        let beside = moved.without_casts(prices, self.counter.spared_casts(levers, of_a_micro_batch));
        let beside = beside.with_launches(prices, || self.counter.pass_calls(levers), self.is_recorded(levers));
        let tokens = levers.micro_batch_samples * (self.job.longest.0 + self.job.longest.1);
        let computing = relative_time(prices, levers, tokens, arithmetic, beside);
        let Some(traffic) = &self.traffic else { return computing };
        let sent = traffic.sent(self.counter, self.job.samples, levers);
        let step = Computed {
            time: computing,
            arithmetic,
            levers,
            micro_batches: traffic.micro_batches(self.job.samples, levers),
        };
        computing + step.exposed(&sent, traffic.byte(prices, &sent) / (arithmetic.training * step.micro_batches as f64))
    }

    fn keeps_logits(&self, chunk_rows: usize) -> bool {
        self.job.place == MemorySpace::Device || t5_ops::keeps_logits(self.counter.of_model().activations(), chunk_rows)
    }

    /// A note about the source of a row's number.
    fn note(&self, row: &Name, levers: &Levers, written: StepIo) -> String {
        let (source_tokens, target_tokens) = self.job.longest;
        let of = || format!("{} x ({source_tokens} + {target_tokens}) tokens", levers.micro_batch_samples);
        let (recomputed, chunk) = (levers.recompute_blocks, levers.loss_chunk_rows);
        if *row == PARAMETERS {
            let file = match (&self.training.base, levers.has_weights_on_disk()) {
                (_, false) if levers.layer_major.is_none_or(|layers| layers.overlaps) => {
                    "those of others with other processes, the next block's on their way"
                }
                (_, false) => "those of others with other processes",
                (Some(_), true) => "in the model's own files",
                (None, true) if levers.has_host_memory() => "in the host's memory",
                (None, true) => "in a file",
            };
            place::note_of_weights(&format!("{}, {file}", self.parameters_note), self.job.place, levers)
        } else if *row == GRADIENTS && levers.layer_major.is_some_and(|layers| layers.overlaps) {
            "a block's on their way to other processes among them".into()
        } else if *row == ACTIVATIONS && recomputed > 0 {
            format!("{}, {recomputed} of {} blocks recomputed", of(), self.counter.blocks())
        } else if *row == ACTIVATIONS {
            of()
        } else if *row == LOSS && self.keeps_logits(chunk) {
            format!("{chunk} rows of logits at a time")
        } else if *row == LOSS {
            "logits recomputed, a block of the vocabulary at a time".into()
        } else if *row == PACKED {
            "matrices in the order in which products read them".into()
        } else if *row == WORKSPACE && written.total() > 0 {
            format!("{} written to disk a step", Bytes(written.total()))
        } else {
            String::new()
        }
    }

    /// Memory of the phases other than the step. Gradients are freed before an evaluation and before saving. So is the memory where tensors
    /// off the card have been `waiting`. Operands that a step `packed` stay.
    fn other_phases(
        &self,
        levers: &Levers,
        evaluation_samples: usize,
        (gradients, packed, waiting): (u64, u64, u64),
        resident: Resident,
    ) -> Vec<Phase> {
        let place = self.job.place;
        let phase = |name, parameters, rows: Vec<CostRow>| self.phase(levers, (name, parameters), waiting, rows);
        let buffers = &self.saving[usize::from(levers.has_optimizer_on_disk())];
        // Pinned memory stays after a step has used it.
        let pinned = self.counter.pinned(levers) + place::pinned_for_others(place, &self.training.processes);
        let kept = || std::iter::once(CostRow::new(PACKED, packed, "").at(place)).chain(place::staging(pinned));
        let gradients = CostRow::new(GRADIENTS, gradients, "kept for the next step").at(place);
        let of_frozen = self.frozen.as_ref().map(|frozen| {
            let (weights, tensors) =
                frozen.pass(levers.micro_batch_samples, evaluation_samples, levers.loss_chunk_rows);
            let of = format!("{} samples at a time", levers.micro_batch_samples);
            let tensors = tensors.iter().map(|held| beside_a_step(held, packed).row(&of));
            let rows = [gradients.clone(), weights].into_iter().chain(frozen.states());
            rows.chain(tensors).chain(place::staging(pinned)).collect()
        });
        let resting = std::iter::once(gradients).chain(kept()).collect();
        let saving = std::iter::once(buffers.clone()).chain(kept()).collect();
        let loading = phase(LOADING, resident.loading, self.loading_rows(levers));
        let mut phases = vec![loading, phase(FEEDING, resident.saving, resting)];
        phases.extend(of_frozen.map(|rows| phase(FROZEN_PASS, resident.resting, rows)));
        phases.extend(self.training.saves.then(|| phase(SAVING, resident.saving, saving)));
        if let Some(evaluated) = &self.training.evaluation {
            let counted = self.evaluation(evaluation_samples, levers, evaluated);
            let [evaluation, generation] = &counted.rows;
            let of = format!("{evaluation_samples} samples at a time");
            let Reading { rows, batch } = evaluated.reading(evaluation_samples);
            let with_rows = |tensors: &[NamedBytes], rows: u64, on_host: u64| -> Vec<CostRow> {
                let tensors = tensors.iter().map(|held| beside_a_step(held, packed).row(&of).at(place));
                let rows = CostRow::new(VALIDATION_ROWS, rows, &of);
                let vectors = self.vectors(self.evaluated_texts(evaluated.counts.evaluated));
                tensors.chain([rows]).chain(vectors).chain(place::staging(on_host + pinned)).collect()
            };
            let [for_evaluation, for_generation] = counted.on_host;
            let with_batch = |tensors, on_host| with_rows(tensors, batch, on_host);
            if evaluated.rows.is_some() {
                phases.push(phase(
                    READING_ROWS,
                    resident.at_a_time,
                    with_rows(&[NamedBytes { name: PACKED, bytes: packed }], rows, 0),
                ));
            }
            phases.push(phase(EVALUATION, resident.at_a_time, with_batch(evaluation, for_evaluation)));
            phases.push(phase(GENERATION, resident.at_a_time, with_batch(generation, for_generation)));
        }
        phases
    }

    /// A phase with the rows of all phases other than the step. While rows are fed, tensors off the card have the memory of those that were
    /// `waiting`.
    fn phase(&self, levers: &Levers, (name, parameters): (Name, u64), waiting: u64, rows: Vec<CostRow>) -> Phase {
        let is_loading = name == LOADING;
        let frozen = self.frozen.as_ref().filter(|_| name != FROZEN_PASS);
        let waiting = if name == FEEDING { waiting } else { 0 };
        let rows = std::iter::once(self.parameters(parameters))
            .chain(self.state_of_choice(levers, is_loading))
            .chain(self.weight_copies(levers).filter(|_| !is_loading))
            .chain(frozen.map(|frozen| if is_loading { frozen.loading() } else { frozen.resting() }))
            .chain(place::offloaded_to_host(self.offloaded_to_host(levers) + waiting))
            .chain(rows)
            .collect();
        Phase { name, rows }
    }

    /// The rows of loading alone. If weights are in a file, their rows include the transit buffer.
    fn loading_rows(&self, levers: &Levers) -> Vec<CostRow> {
        match (self.counter.pages_weights(levers), self.job.place) {
            // The weights are copied to their place on the host.
            (true, MemorySpace::Device) => {
                let paged = self.counter.of_model().paged(levers);
                let base = self.training.base.as_ref();
                let bytes = base.map_or_else(|| paged.in_transit(), |base| paged.in_transit_in_place(base));
                place::staging(bytes).into_iter().collect()
            }
            (true, MemorySpace::Host) if levers.weight_blocks_in_memory() == 0 => Vec::new(),
            _ => self.loading.clone(),
        }
    }

    /// How many texts an evaluation of `rows` rows has at once. If the number of rows is not known, as many as a step.
    fn evaluated_texts(&self, rows: u64) -> usize {
        let of_a_row = self.training.options.contrastive.as_ref().map_or(1, Contrastive::texts_of_a_row);
        let rows = usize::try_from(rows).unwrap_or(usize::MAX);
        rows.checked_mul(of_a_row).filter(|texts| *texts < usize::MAX).unwrap_or(self.job.samples)
    }

    /// The bill's row for the vectors of `texts` texts, if the loss is one of vectors.
    fn vectors(&self, texts: usize) -> Option<CostRow> {
        let of = self.training.options.contrastive.as_ref()?;
        let bytes = of.bytes(texts, self.job.model.vector_width());
        Some(CostRow::new(VECTORS, bytes, "of all texts, with their gradients"))
    }

    /// Bytes that are kept in the host's memory beside a device during the whole run.
    fn offloaded_to_host(&self, levers: &Levers) -> u64 {
        let parameters = self.training.options.parameter_dtype();
        self.counter.offloaded_to_host(levers, self.training.base.as_ref(), parameters)
    }

    /// The row of the optimizer's state if its moments may be in a file. Otherwise the job has that row, not the choice.
    fn state_of_choice(&self, levers: &Levers, is_loading: bool) -> Option<CostRow> {
        self.counter.state_on_disk()?;
        self.state(levers, is_loading)
    }

    /// The optimizer's state with these levers.
    fn state(&self, levers: &Levers, is_loading: bool) -> Option<CostRow> {
        let in_memory = self.state.clone()?;
        let Some(state) = self.counter.state_on_disk().filter(|_| levers.has_optimizer_on_disk()) else {
            return Some(in_memory);
        };
        let is_read = is_loading && self.job.place == MemorySpace::Host;
        let bytes = if is_read { state.loading } else { state.resident };
        let lies = if levers.has_host_memory() { "in the host's memory" } else { "in a file" };
        let words = self.training.options.optimizer.in_words();
        let note = format!("{words}, {lies}; some rows at a time {}", place::in_memory(self.job.place));
        Some(CostRow::new(OPTIMIZER_STATE, bytes, note).at(self.job.place))
    }

    /// Whether products cast any f32 weights that this process always has. `are_there` says whether there are such weights.
    fn casts_weights(&self, are_there: bool) -> bool {
        let Training { options, processes, .. } = self.training;
        let has_all = processes.owners == 1 || processes.sharding < Sharding::Weights;
        has_all && are_there && options.precision.activations() == DType::BF16
    }

    /// The row of weight copies that make these casts unnecessary, if there are any.
    fn weight_copies(&self, levers: &Levers) -> Option<CostRow> {
        let bytes = self.counter.weight_copies(levers);
        let row = || CostRow::new(WEIGHT_COPIES, bytes, "bf16, as products take them").at(self.job.place);
        (bytes > 0).then(row)
    }

    fn parameters(&self, bytes: u64) -> CostRow {
        CostRow::new(PARAMETERS, bytes, &self.parameters_note).at(self.job.place)
    }

    /// The most samples that evaluation and generation compute at a time without more memory than a step.
    fn evaluation_samples(&self, levers: &Levers, (step_bytes, packed): (u64, u64)) -> usize {
        let Some(evaluated) = &self.training.evaluation else { return 1 };
        let sum = |held: &Vec<NamedBytes>| held.iter().map(|held| beside_a_step(held, packed).bytes).sum::<u64>();
        let fits = |samples: &usize| {
            let [evaluation, generation] = self.evaluation(*samples, levers, evaluated).rows.each_ref().map(sum);
            let Reading { rows, batch } = evaluated.reading(*samples);
            rows.max(batch + evaluation.max(generation)) <= step_bytes
        };
        halvings(evaluated.counts.in_a_batch(MAX_EVALUATED_TOGETHER)[0]).into_iter().find(fits).unwrap_or(1)
    }

    fn evaluation(&self, samples: usize, levers: &Levers, evaluated: &Evaluation<'_>) -> counted::EvaluationRows {
        let in_a_batch = evaluated.counts.in_a_batch(samples);
        self.counter.of_model().evaluation(in_a_batch, levers.loss_chunk_rows, evaluated.answer)
    }
}

/// Tensors of an evaluation between steps: threads keep the operands that a step `packed`.
fn beside_a_step(held: &NamedBytes, packed: u64) -> NamedBytes {
    let bytes = if held.name == PACKED { held.bytes.max(packed) } else { held.bytes };
    NamedBytes { bytes, ..held.clone() }
}

#[cfg(test)]
mod tests {
    use t5::LayerMajor;
    use trainer::TrainerOptions;

    use super::*;
    use crate::lever::Pins;
    use crate::levers::{MICRO_BATCH_SAMPLES, RECOMPUTE_BLOCKS};
    use crate::{Value, testing};

    /// Calls `look` with the offer of a step of t5-small over `samples` samples of so many tokens on either side.
    fn with_offer<T>(
        samples: usize,
        tokens: usize,
        pins: &Pins,
        allowance: (u64, u64),
        look: impl FnOnce(&Offer) -> T,
    ) -> T {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let options = TrainerOptions { total_steps: allowance.0, ..TrainerOptions::default() };
        let training = Training { disk_writes: allowance.1, wanted: Wanted::All, ..testing::training(&options) };
        let job = Job { samples, longest: (tokens, tokens), ..testing::job(&model, training.clone(), pins) };
        let counter =
            StepCounter::new(&model, &options, samples, job.longest, &Processes::default()).expect("it trains");
        look(&Offer::new(&job, &training, &counter, Bytes(u64::MAX)).expect("it trains"))
    }

    #[test]
    fn a_pinned_lever_is_the_only_choice_offered() {
        let all = (TrainerOptions::default().total_steps, 1 << 40);
        let free = with_offer(16, 64, &Pins::default(), all, |offer| offer.choices().count());
        let pins = Pins::default().with(MICRO_BATCH_SAMPLES.name, Value::Count(4));
        let pins = pins.with(RECOMPUTE_BLOCKS.name, Value::Count(3));
        let pinned: Vec<StepChoice> = with_offer(16, 64, &pins, all, |offer| offer.choices().collect());
        assert!(free > pinned.len());
        let levers = |choice: &StepChoice| choice.what.levers;
        assert!(
            pinned.iter().map(levers).all(|chosen| chosen.micro_batch_samples == 4 && chosen.recompute_blocks == 3)
        );
    }

    #[test]
    fn finer_cuts_and_recomputing_hold_less_and_take_longer() {
        let bytes = |choice: &StepChoice| choice.rows.iter().map(|row| row.bytes.0).sum::<u64>();
        let choice = |micro_batch_samples, recompute_blocks, loss_chunk_rows| {
            let levers = Levers {
                micro_batch_samples,
                recompute_blocks,
                loss_chunk_rows,
                layer_major: None,
                ..Levers::default()
            };
            with_offer(16, 256, &Pins::default(), (1, 0), |offer| {
                offer.choice(&levers, &offer.counter.arithmetic(micro_batch_samples), StepIo::default())
            })
        };
        let all = choice(16, 0, 256);
        for smaller in [choice(4, 0, 256), choice(16, 12, 256)] {
            assert!(bytes(&smaller) < bytes(&all), "{smaller:?}");
            assert!(smaller.relative_time >= all.relative_time, "{smaller:?}");
        }
        // Logits are rarely at the peak. A smaller chunk holds no more, unless it has so few rows that many threads divide their sums.
        assert!(bytes(&choice(16, 0, 32)) <= bytes(&all));
    }

    #[test]
    fn vectors_of_an_evaluation_are_billed_by_its_rows_or_by_a_step_if_they_are_not_known() {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let options = TrainerOptions { contrastive: Some(Contrastive::default()), ..TrainerOptions::default() };
        let (training, pins) = (testing::training(&options), Pins::default());
        let job = Job { samples: 32, ..testing::job(&model, training.clone(), &pins) };
        let counter = StepCounter::new(&model, &options, 32, job.longest, &Processes::default()).expect("it trains");
        let offer = Offer::new(&job, &training, &counter, Bytes(u64::MAX)).expect("it trains");
        assert_eq!([100, u64::MAX].map(|rows| offer.evaluated_texts(rows)), [200, 32]);
        let bytes = offer.vectors(200).expect("vectors").bytes.0;
        assert_eq!(bytes, 4 * 200 * 512 * 8);
        // More rows than any memory holds are a bill that is refused, not one that overflows.
        let most = offer.vectors(offer.evaluated_texts(u64::MAX / 2)).expect("vectors").bytes.0;
        assert!(most > 1 << 62, "{most}");
    }

    #[test]
    fn tensors_of_short_samples_are_billed_beside_a_step_alone() {
        with_offer(8, 64, &Pins::default(), (1, 0), |offer| {
            let choice = offer.choices().next().expect("a way");
            let is_billed = |rows: &[CostRow]| rows.iter().any(|row| row.name == SMALL_TENSORS);
            assert!(choice.phases().all(|(name, rows)| is_billed(rows) == (*name == memory_policy::TRAINING)));
            assert!(choice.other_phases.len() > 1);
        });
    }

    #[test]
    fn what_is_written_to_disk_stays_within_the_allowance_unless_it_is_asked_for() {
        let offered = |pins: &Pins, allowance: u64| -> Vec<LayerMajor> {
            with_offer(8, 256, pins, (1000, allowance), |offer| {
                let choices = offer.choices().map(|choice| choice.what.levers);
                choices
                    .filter(|levers| levers.micro_batch_samples == 8)
                    .filter_map(|levers| levers.layer_major)
                    .collect()
            })
        };
        let written = |layers: &LayerMajor| {
            let levers = Levers { layer_major: Some(*layers), recompute_blocks: usize::MAX, ..Levers::default() };
            with_offer(8, 256, &Pins::default(), (1000, 0), |offer| offer.counter.written(&levers).total())
        };
        let gradients = LayerMajor { gradients_on_disk: true, ..LayerMajor::default() };
        // All gradients in f32; and weights, except norms and tables of positions.
        assert_eq!(written(&gradients), 60_506_624 * 4);
        let weights = LayerMajor { weights_on_disk: true, ..gradients };
        assert_eq!(written(&weights) - written(&gradients), (60_506_624 - 32 * 512 - 2 * 32 * 8) * 4);
        for allowance in [0, 1000 * (60 << 20), 1000 * written(&gradients), u64::MAX] {
            let offered = offered(&Pins::default(), allowance);
            assert!(offered.iter().all(|layers| written(layers) * 1000 <= allowance), "{allowance}");
            assert_eq!(offered.contains(&gradients), allowance >= 1000 * written(&gradients));
            assert_eq!(offered.contains(&weights), allowance >= 1000 * written(&weights));
            assert_eq!(offered.iter().any(|layers| layers.boundaries_on_disk), allowance > 0);
        }
        let asked = Pins::default().with("gradient_offload", Value::Word("disk"));
        let pinned = offered(&asked, 0);
        assert!(pinned.contains(&gradients));
        assert!(pinned.iter().all(|layers| layers.gradients_on_disk && !layers.boundaries_on_disk));
    }
}
