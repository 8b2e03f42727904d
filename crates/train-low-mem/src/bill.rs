//! The bill: what every choice would cost, put together from what the parts say about themselves.
//!
//! Each part states rows of name and bytes; here they become the choices that the policy weighs. What a
//! choice costs in time is a relative number from a few measured facts, said where it is used. Nothing is
//! decided here: [`memory_policy::plan`] takes the fastest pair that fits.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use candle_core::{DType, Device};
use dataloader::DataLoader;
use memory_policy::{
    Budget, Budgets, Bytes, CostRow, Costs, LayerMajor, MemorySnapshot, Phase, Place, Plan, StepChoice,
};
use serde_json::{Value, json};
use t5::ParameterSpec;
use t5::costs::{Arithmetic, Pass, Shape, Trained, WeightsOnDisk};
use trainer::TrainerOptions;

use crate::config::{Config, Memory};
use crate::evaluation::EvaluatedRows;
use crate::failure::{Failure, Outcome};
use crate::feeding;
use crate::levers::{self, LOSS_CHUNK_ROWS, Way, even_cuts, halvings, pinned};
use crate::offload::{Written, file_room, layers_of};
use crate::open::{self, Opened};
use crate::prices;

/// The budgets that the config asks for.
pub fn budgets(config: &Config) -> Budgets {
    let budget = |bytes: Option<u64>| bytes.map_or(Budget::ShareOfAvailable, |bytes| Budget::Explicit(Bytes(bytes)));
    Budgets { process: budget(config.memory.budget), device: budget(config.memory.device_budget) }
}

/// Where a run's tensors lie. `auto` is the device that the probe finds, or else the one that was opened.
pub fn place(config: &Config, device: &Device, now: &MemorySnapshot) -> Place {
    let on_device = match config.run.device.as_str() {
        "cpu" => false,
        "auto" => now.device.is_some() || !device.is_cpu(),
        _ => true,
    };
    if on_device { Place::Device } else { Place::Host }
}

/// Which of the ways to cut a step are wanted.
#[derive(Clone, Copy)]
pub enum Wanted<'a> {
    /// All, to be explained.
    All,
    /// Those that some budget would take, and this plan's: little memory, for who plans within a budget that holds already.
    Undominated(Option<&'a Plan>),
}

impl Wanted<'_> {
    /// The wanted ones of those that are offered.
    pub fn of(self, offered: impl Iterator<Item = StepChoice>) -> Vec<StepChoice> {
        match self {
            Self::All => offered.collect(),
            Self::Undominated(plan) => {
                memory_policy::undominated(offered, |step| plan.is_some_and(|plan| plan.has_step(step)))
            }
        }
    }
}

/// What a run could choose from, and what it would cost.
pub fn costs(
    config: &Config,
    opened: &Opened,
    options: &TrainerOptions,
    now: &MemorySnapshot,
    loader: &DataLoader,
    wanted: Wanted<'_>,
) -> Outcome<Costs> {
    let step = StepCosts::new(config, &opened.model, options, place(config, &opened.device, now))?;
    let mut step = step.within(budgets(config).process, now);
    if let (Some(evaluated), Some(dataset)) = (&mut step.evaluation, &opened.validation) {
        let loader = open::loader_options(config, &opened.model);
        evaluated.rows = Some(EvaluatedRows { loader, tokenizer: &opened.tokenizer, dataset });
    }
    let mut fixed = vec![CostRow::new("process", now.rss.0, "measured: program, tokenizer, footers"), small_blocks()];
    fixed.extend(step.fixed(options)?);
    Ok(Costs {
        batch_samples: config.train.batch_size,
        fixed,
        steps: wanted.of(step.choices(&config.memory)),
        loaders: feeding::choices(config, &opened.train, loader),
    })
}

/// What the allocator keeps of blocks that are no pages of their own, in the threads' heaps, beyond what the
/// rehearsal left there: an estimate.
pub fn small_blocks() -> CostRow {
    CostRow::new("small blocks", 1 << 20, "threads' heaps, an estimate")
}

/// What decides the costs of a step.
pub struct StepCosts<'a> {
    model: &'a t5::Config,
    trained: Trained,
    /// Whether any parameter is frozen.
    freezes: bool,
    batch_samples: usize,
    /// Steps of the whole run: what is written to disk in each adds up.
    steps: u64,
    source_tokens: usize,
    target_tokens: usize,
    activations: DType,
    gradients: DType,
    dropout: bool,
    /// Bytes of all gradients.
    gradient_bytes: u64,
    /// Bytes of their sums of squares.
    square_sums: u64,
    /// Bytes of the parameters, for people, and what of them is resident where they lie in a file.
    parameters: (u64, String),
    weights_on_disk: WeightsOnDisk,
    /// What loading the model needs beside its parameters.
    loading: Vec<CostRow>,
    evaluation: Option<Evaluated<'a>>,
    /// What evaluation and generation hold, by samples and rows of logits at a time: many ways to cut a step ask for the same.
    counted: RefCell<HashMap<(usize, usize), EvaluationRows>>,
    /// Where tensors lie.
    place: Place,
    /// Bytes of files that the system keeps in memory beside the run before it writes them to the disk.
    file_room: Bytes,
}

/// The rows of an evaluation and of a generation.
type EvaluationRows = Rc<[Vec<t5::CostRow>; 2]>;

/// What an evaluation computes at a time, and the rows that it reads where they are known.
struct Evaluated<'a> {
    most_samples: usize,
    max_new_tokens: usize,
    rows: Option<EvaluatedRows<'a>>,
}

impl Evaluated<'_> {
    fn reading(&self, samples: usize) -> u64 {
        self.rows.as_ref().map_or(0, |rows| rows.bytes(samples))
    }
}

impl<'a> StepCosts<'a> {
    /// The costs of a run's steps: the longest samples that the config allows.
    pub fn new(config: &Config, model: &'a t5::Config, options: &TrainerOptions, place: Place) -> Outcome<Self> {
        let mut costs = Self::of_batch(
            model,
            options,
            config.train.batch_size,
            (config.data.max_source_tokens, config.data.max_target_tokens),
        )?;
        costs.evaluation = (!config.data.validation.is_empty()).then_some(Evaluated {
            most_samples: crate::options::MOST_EVALUATED_TOGETHER,
            max_new_tokens: config.train.eval_max_new_tokens,
            rows: None,
        });
        costs.place = place;
        if place == Place::Device && config.memory.weight_offload == Some(true) {
            return Err(Failure::usage(
                "`memory.weight_offload = \"disk\"` keeps weights in files of the host, and tensors are on a device",
            )
            .hint("leave it out, or `--device cpu`"));
        }
        Ok(costs)
    }

    /// The costs of steps over `samples` samples of `tokens` source and target tokens.
    pub fn of_batch(
        model: &'a t5::Config,
        options: &TrainerOptions,
        samples: usize,
        tokens: (usize, usize),
    ) -> Outcome<Self> {
        let specs = ParameterSpec::all(model);
        let trains = trainer::freeze::trainable(specs.iter().map(|spec| spec.name.as_str()), &options.freeze)?;
        let frozen: Vec<String> =
            specs.into_iter().zip(trains).filter(|(_, trains)| !trains).map(|(spec, _)| spec.name).collect();
        let trained = Trained::new(model, &|spec| !frozen.contains(&spec.name));
        let square_sums = trained.specs().iter().map(|spec| t5_ops::SquareSums::bytes(&spec.shape)).sum();
        let dtype = options.parameter_dtype();
        let loading = t5::costs::load(model, dtype).into_iter();
        let kept_in = if dtype == DType::BF16 { "bf16" } else { "f32" };
        #[expect(clippy::cast_precision_loss, reason = "for reading")]
        let millions = ParameterSpec::all(model).iter().map(ParameterSpec::elements).sum::<u64>() as f64 / 1e6;
        Ok(Self {
            model,
            parameters: (t5::costs::parameters(model, dtype), format!("{millions:.1} M x {kept_in}")),
            weights_on_disk: WeightsOnDisk::new(model, dtype),
            gradient_bytes: trained.gradient_bytes(options.gradient_dtype()),
            square_sums,
            loading: loading.map(|row| CostRow::new(row.name, row.bytes, "a tensor on its way")).collect(),
            freezes: !frozen.is_empty(),
            trained,
            batch_samples: samples,
            steps: options.total_steps,
            source_tokens: tokens.0,
            target_tokens: tokens.1,
            activations: options.precision.activations(),
            gradients: options.gradient_dtype(),
            dropout: options.dropout > 0.0,
            evaluation: None,
            counted: RefCell::default(),
            place: Place::Host,
            file_room: Bytes(u64::MAX),
        })
    }

    /// The same within a budget on a machine that has so much memory now.
    #[must_use]
    pub fn within(self, budget: Budget, now: &MemorySnapshot) -> Self {
        Self { file_room: file_room(now, budget.resolve(now)), ..self }
    }

    /// Held from the first step to the last.
    pub fn fixed(&self, options: &TrainerOptions) -> Outcome<Vec<CostRow>> {
        let optimizer = trainer::costs::optimizer_state(self.model, options, options.parameter_dtype())?;
        Ok(vec![CostRow::new("optimizer state", optimizer.bytes, "Adafactor, factored").at(self.place)])
    }

    /// The ways to cut a step, those that the pins leave.
    pub fn choices(&self, pins: &Memory) -> impl Iterator<Item = StepChoice> {
        let blocks = self.trained.blocks();
        let samples =
            pinned(pins.micro_batch_samples.map(|pin| pin.min(self.batch_samples)), even_cuts(self.batch_samples));
        let ways = levers::ways(pins, blocks).into_iter().map(|way| (way, self.written(way)));
        let ways = ways.filter(|(way, _)| self.place == Place::Host || !way.has_weights_on_disk());
        let ways: Vec<_> = ways.filter(|(way, written)| self.may_write(way, *written, pins)).collect();
        let cuts = samples.into_iter().flat_map(move |samples| {
            let chunks = LOSS_CHUNK_ROWS.map(|rows| rows.min(samples * self.target_tokens)).to_vec();
            pinned(pins.loss_chunk_rows, chunks).into_iter().map(move |chunk| (samples, chunk))
        });
        cuts.flat_map(move |(samples, loss_chunk_rows)| {
            let arithmetic = self.arithmetic(samples);
            let choice = |&(way, written): &(Way, Written)| {
                let pass = self.pass(samples, way.recompute_blocks, loss_chunk_rows);
                self.choice(&pass, &arithmetic, blocks, way.layers, written)
            };
            ways.iter().map(choice).collect::<Vec<_>>()
        })
    }

    /// Bytes written to files in a step of the longest samples.
    fn written(&self, way: Way) -> Written {
        let (Some(layers), pass) = (way.layers, self.pass(self.batch_samples, way.recompute_blocks, 1)) else {
            return Written::default();
        };
        let of = layers_of(layers);
        Written {
            once: t5::costs::layer_major_written(self.model, &pass, self.batch_samples, &of, &self.trained),
            weights: if layers.weights_on_disk { self.weights_on_disk.written(&self.trained) } else { 0 },
        }
    }

    /// Whether the allowance for the whole run covers what is written; what is pinned was asked for.
    fn may_write(&self, way: &Way, written: Written, pins: &Memory) -> bool {
        way.files_are_pinned(pins) || written.total().saturating_mul(self.steps) <= pins.disk_writes
    }

    /// A pass over a micro-batch of so many of the longest samples.
    fn pass(&self, samples: usize, recompute_blocks: usize, loss_chunk_rows: usize) -> Pass {
        Pass {
            shape: self.shape(samples),
            activations: self.activations,
            gradients: self.gradients,
            recompute_blocks,
            loss_chunk_rows,
            dropout: self.dropout,
        }
    }

    /// One way to cut a step.
    fn choice(
        &self,
        pass: &Pass,
        arithmetic: &Arithmetic,
        blocks: usize,
        layer_major: Option<LayerMajor>,
        written: Written,
    ) -> StepChoice {
        let (samples, recomputed, loss_chunk_rows) = (pass.shape.samples, pass.recompute_blocks, pass.loss_chunk_rows);
        let of = format!("{samples} x ({} + {}) tokens", self.source_tokens, self.target_tokens);
        let weights = layer_major.is_some_and(|layers| layers.weights_on_disk).then_some(&self.weights_on_disk);
        let note = |name: &str| match name {
            "parameters" => format!("{}, in a file, those of one block at a time in memory", self.parameters.1),
            "activations" if recomputed > 0 => format!("{of}, {recomputed} of {blocks} blocks recomputed"),
            "activations" => of.clone(),
            "loss" if t5_ops::keeps_logits(pass.activations, loss_chunk_rows) => {
                format!("{loss_chunk_rows} rows of logits at a time")
            }
            "loss" => "logits computed again, a block of the vocabulary at a time".into(),
            "workspace" if written.total() > 0 => format!("{} written to disk a step", Bytes(written.total())),
            _ => String::new(),
        };
        let training = match layer_major {
            None => t5::costs::training(self.model, pass, &self.trained),
            Some(layers) => {
                let layers = layers_of(layers);
                let on_disk = &self.weights_on_disk;
                t5::costs::layer_major(self.model, pass, self.batch_samples, &layers, &self.trained, on_disk)
            }
        };
        let frozen = if self.freezes { ", none for frozen parameters" } else { "" };
        // Layer by layer, the rows say how much of the gradients exists at a time, and none is left after a step.
        let gradients = if layer_major.is_some() { 0 } else { self.gradient_bytes };
        let mut rows = Vec::new();
        if weights.is_none() {
            rows.push(self.parameters_row(self.parameters.0));
        }
        if gradients > 0 {
            let kept_in = if self.gradients == DType::BF16 { "bf16, tables f32" } else { "f32" };
            rows.push(CostRow::new("gradients", gradients, format!("{kept_in}{frozen}")).at(self.place));
        }
        rows.extend(training.iter().map(|row| CostRow::new(row.name, row.bytes, note(row.name)).at(self.place)));
        if layer_major.is_some() {
            rows.push(CostRow::new("square sums", self.square_sums, "of every gradient, for the norm and the update"));
        }
        let of_step = rows.iter().filter(|row| row.name != "parameters").map(|row| row.bytes.0).sum();
        let evaluation_samples = self.evaluation_samples(pass, of_step);
        StepChoice {
            micro_batch_samples: samples,
            recompute_blocks: recomputed,
            loss_chunk_rows,
            layer_major,
            evaluation_samples,
            rows,
            other_phases: self.other_phases(pass, evaluation_samples, gradients, weights),
            relative_time: prices::relative_time(pass, arithmetic, layer_major, self.share(written, pass)),
        }
    }

    /// A micro-batch's share of what a whole batch writes.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    fn share(&self, written: Written, pass: &Pass) -> f64 {
        prices::priced_bytes(written, self.file_room) * pass.shape.samples as f64 / self.batch_samples as f64
    }

    fn arithmetic(&self, samples: usize) -> Arithmetic {
        t5::costs::arithmetic(self.model, &self.shape(samples), &self.trained)
    }

    fn shape(&self, samples: usize) -> Shape {
        Shape { samples, source_tokens: self.source_tokens, target_tokens: self.target_tokens }
    }

    /// What the phases hold that are not the step. Gradients are released before an evaluation.
    fn other_phases(
        &self,
        pass: &Pass,
        evaluation_samples: usize,
        gradients: u64,
        weights: Option<&WeightsOnDisk>,
    ) -> Vec<Phase> {
        let parameters = |of: fn(&WeightsOnDisk) -> u64| self.parameters_row(weights.map_or(self.parameters.0, of));
        let phase = |name: &str, parameters: CostRow, mut rows: Vec<CostRow>| {
            rows.insert(0, parameters);
            Phase { name: name.to_owned(), rows }
        };
        let rows = |rows: &[t5::CostRow], note: &str| -> Vec<CostRow> {
            rows.iter().map(|row| CostRow::new(row.name, row.bytes, note)).collect()
        };
        let mut saving = vec![CostRow::new("gradients", gradients, "kept for the next step").at(self.place)];
        let buffers = trainer::costs::saving();
        saving.push(CostRow::new(buffers.name, buffers.bytes, ""));
        // Where weights lie in a file, what is on its way is counted with them.
        let loading = if weights.is_some() { Vec::new() } else { self.loading.clone() };
        let mut phases = vec![
            phase("loading", parameters(WeightsOnDisk::loading), loading),
            phase("saving", parameters(WeightsOnDisk::saving), saving),
        ];
        let at_a_time = || parameters(WeightsOnDisk::at_a_time);
        if let Some(evaluated) = &self.evaluation {
            let counted = self.evaluation_rows(pass, evaluation_samples, evaluated);
            let [evaluation, generation] = counted.as_ref();
            let of = format!("{evaluation_samples} samples at a time");
            let reading = CostRow::new("validation rows", evaluated.reading(evaluation_samples), &of);
            let with_reading = |tensors: &[t5::CostRow]| -> Vec<CostRow> {
                let tensors = rows(tensors, &of).into_iter().map(|row| row.at(self.place));
                tensors.chain([reading.clone()]).collect()
            };
            phases.push(phase("evaluation", at_a_time(), with_reading(evaluation)));
            phases.push(phase("generation", at_a_time(), with_reading(generation)));
        }
        phases
    }

    fn parameters_row(&self, bytes: u64) -> CostRow {
        CostRow::new("parameters", bytes, &self.parameters.1).at(self.place)
    }

    /// The most samples that evaluation and generation take at a time without holding more than a step does.
    fn evaluation_samples(&self, pass: &Pass, step_bytes: u64) -> usize {
        let Some(evaluated) = &self.evaluation else { return 1 };
        let fits = |samples: &usize| self.evaluation_bytes(pass, *samples, evaluated) <= step_bytes;
        halvings(evaluated.most_samples).into_iter().find(fits).unwrap_or(1)
    }

    fn evaluation_bytes(&self, pass: &Pass, samples: usize, evaluated: &Evaluated<'_>) -> u64 {
        let sum = |rows: &Vec<t5::CostRow>| rows.iter().map(|row| row.bytes).sum::<u64>();
        let [evaluation, generation] = self.evaluation_rows(pass, samples, evaluated).as_ref().each_ref().map(sum);
        evaluated.reading(samples) + evaluation.max(generation)
    }

    /// The tensors of an evaluation and of a generation.
    fn evaluation_rows(&self, pass: &Pass, samples: usize, evaluated: &Evaluated<'_>) -> EvaluationRows {
        let mut counted = self.counted.borrow_mut();
        let rows = counted.entry((samples, pass.loss_chunk_rows)).or_insert_with(|| {
            let pass = Pass { shape: Shape { samples, ..pass.shape }, ..*pass };
            let evaluation = t5::costs::evaluation(self.model, &pass);
            let generation = t5::costs::generation(self.model, &pass.shape, evaluated.max_new_tokens, self.activations);
            Rc::new([evaluation, generation])
        });
        Rc::clone(rows)
    }
}

/// The row that most likely was too small when `phase` made the process hold `peak`, `tensors` of it in tensors.
///
/// Tensors above what their rows say: the largest row of that phase that is not known exactly. Otherwise what
/// grew is not tensors, and the rows that are measured or estimated are to blame.
pub fn wrong_row(plan: &Plan, phase: &str, peak: Bytes, tensors: Bytes) -> String {
    const NOT_TENSORS: [&str; 4] = ["process", "small blocks", "loader", "dataset"];
    const EXACT: [&str; 3] = ["parameters", "gradients", "optimizer state"];
    let rows = &plan.bill.rows;
    let named = |names: &[&str], row: &&CostRow| names.contains(&row.name.as_str());
    let foretold: Bytes = rows.iter().filter(|row| !named(&NOT_TENSORS, row)).map(|row| row.bytes).sum();
    if tensors > foretold {
        let shape_rows = rows.iter().filter(|row| !named(&NOT_TENSORS, row) && !named(&EXACT, row));
        return match plan.bill.binding == phase {
            true => shape_rows.max_by_key(|row| row.bytes).map_or(phase, |row| row.name.as_str()).to_owned(),
            false => phase.to_owned(),
        };
    }
    let others = peak.saturating_sub(tensors);
    let said: Bytes = rows.iter().filter(|row| named(&["process"], row)).map(|row| row.bytes).sum();
    if others > said { "process, loader or allocator".to_owned() } else { phase.to_owned() }
}

/// A plan for `metrics.jsonl` and `plan --json`.
pub fn plan_json(plan: &Plan) -> Value {
    let mut json = serde_json::to_value(plan).unwrap_or_else(|_| json!({}));
    json["budget_bytes"] = json!(plan.budget.0);
    json["predicted_peak_bytes"] = json!(plan.predicted_peak.0);
    json["smallest_budget_bytes"] = json!(plan.required().0);
    if plan.predicted_device_peak > Bytes::ZERO {
        json["predicted_device_peak_bytes"] = json!(plan.predicted_device_peak.0);
    }
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_lever_is_the_only_choice_offered() {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let options = TrainerOptions::default();
        let costs = StepCosts::of_batch(&model, &options, 16, (64, 64)).expect("costs");
        let free = costs.choices(&unpinned()).count();
        let pins = Memory { micro_batch_samples: Some(4), recompute_blocks: Some(3), ..unpinned() };
        let pinned: Vec<StepChoice> = costs.choices(&pins).collect();
        assert!(free > pinned.len());
        assert!(pinned.iter().all(|choice| choice.micro_batch_samples == 4 && choice.recompute_blocks == 3));
    }

    #[test]
    fn finer_cuts_and_recomputing_hold_less_and_take_longer() {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let costs = StepCosts::of_batch(&model, &TrainerOptions::default(), 16, (256, 256)).expect("costs");
        let bytes = |choice: &StepChoice| choice.rows.iter().map(|row| row.bytes.0).sum::<u64>();
        let choice = |samples, recomputed, rows| {
            let pass = costs.pass(samples, recomputed, rows);
            costs.choice(&pass, &costs.arithmetic(samples), 12, None, Written::default())
        };
        let all = choice(16, 0, 256);
        for smaller in [choice(4, 0, 256), choice(16, 12, 256)] {
            assert!(bytes(&smaller) < bytes(&all), "{smaller:?}");
            assert!(smaller.relative_time >= all.relative_time, "{smaller:?}");
        }
        // Logits are rarely what the peak is made of; a finer chunk never holds more.
        assert!(bytes(&choice(16, 0, 16)) <= bytes(&all));
    }

    #[test]
    fn what_is_written_to_disk_stays_within_the_allowance_unless_it_is_asked_for() {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let options = TrainerOptions { total_steps: 1000, ..TrainerOptions::default() };
        let costs = StepCosts::of_batch(&model, &options, 8, (256, 256)).expect("costs");
        let offered = |pins: Memory| -> Vec<LayerMajor> {
            costs
                .choices(&pins)
                .filter(|choice| choice.micro_batch_samples == 8)
                .filter_map(|choice| choice.layer_major)
                .collect()
        };
        let written =
            |layers: &LayerMajor| costs.written(Way { layers: Some(*layers), recompute_blocks: usize::MAX }).total();
        let gradients = LayerMajor { gradients_on_disk: true, ..LayerMajor::default() };
        // All of them, in f32; and weights, but for norms and tables of positions.
        assert_eq!(written(&gradients), 60_506_624 * 4);
        let weights = LayerMajor { weights_on_disk: true, ..gradients };
        assert_eq!(written(&weights) - written(&gradients), (60_506_624 - 32 * 512 - 2 * 32 * 8) * 4);
        for allowance in [0, 1000 * (60 << 20), 1000 * written(&gradients), u64::MAX] {
            let offered = offered(Memory { disk_writes: allowance, ..unpinned() });
            assert!(offered.iter().all(|layers| written(layers) * 1000 <= allowance), "{allowance}");
            assert_eq!(offered.contains(&gradients), allowance >= 1000 * written(&gradients));
            assert_eq!(offered.contains(&weights), allowance >= 1000 * written(&weights));
            assert_eq!(offered.iter().any(|layers| layers.boundaries_on_disk), allowance > 0);
        }
        let pinned = offered(Memory { disk_writes: 0, gradient_offload: Some(true), ..unpinned() });
        assert!(pinned.contains(&gradients));
        assert!(pinned.iter().all(|layers| layers.gradients_on_disk && !layers.boundaries_on_disk));
    }

    fn unpinned() -> Memory {
        levers::no_pins().expect("pins")
    }
}
