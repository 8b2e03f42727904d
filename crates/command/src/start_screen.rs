//! The first screen of a run: the model, the data, the settings, and the end of the run. A colleague can check it at a glance.

use dataloader::Objective;
use memory_policy::{counted, labelled, plural};
use t5::{Lora, Targets};
use trainer::TrainerOptions;

use crate::bits::Kernels;
use crate::config::Config;
use crate::failure::Outcome;
use crate::open::Opened;
use crate::processes;
use crate::progress::rate;

/// The screen, one labelled paragraph for each subject. `done` steps were made before.
///
/// # Errors
/// `train.freeze` matches nothing, or everything.
pub fn text(config: &Config, opened: &Opened, options: &TrainerOptions, done: u64, total: u64) -> Outcome<String> {
    let paragraphs = [
        Some(("Model", model(config, opened, options, done)?)),
        opened.model.lora.as_ref().map(|lora| ("Adapter", adapter(lora))),
        Some(("Data", data(config, opened))),
        opened.reading.texts_in_words().map(|words| ("Texts", words)),
        Some(("Recipe", recipe(config, options))),
        Some(("Length", length(config, opened, done, total))),
        Some(("Device", device(&Kernels::of_this_process(&opened.device), opened.why_device.as_deref()))),
        Some(("Output", config.run.output_dir.display().to_string())),
    ];
    Ok(paragraphs.iter().flatten().map(|(label, words)| labelled(label, words)).collect())
}

fn model(config: &Config, opened: &Opened, options: &TrainerOptions, done: u64) -> Outcome<String> {
    let trained = trainer::costs::trained_elements(&opened.model, options)?;
    let all: u64 = t5::ParameterSpec::elements_of_all(&opened.model);
    let start = match &config.model.init_from {
        _ if done > 0 => "from its checkpoint".to_string(),
        Some(directory) => format!("from {}", directory.display()),
        None => "new weights".to_string(),
    };
    let trains = match all - trained {
        0 => "all are trained".to_string(),
        frozen => format!(
            "{} trained ({:.1} %), {} frozen ({})",
            millions(trained),
            share(trained, all),
            millions(frozen),
            if opened.model.lora.is_some() { "beside an adapter".to_owned() } else { config.train.freeze.join(", ") }
        ),
    };
    Ok(format!("T5 with {} parameters, {start}; {trains}", millions(all)))
}

fn data(config: &Config, opened: &Opened) -> String {
    let validation = opened.validation.as_ref().map_or("no validation rows".to_string(), |validation| {
        format!("{} for validation", plural(validation.rows(), "row"))
    });
    let data = &config.data;
    let task = match &opened.reading.objective {
        Objective::TextToText { prompt_column, response_column } => format!("`{prompt_column}` to `{response_column}`"),
        Objective::SpanCorruption { text_column, .. } => format!("span corruption of `{text_column}`"),
    };
    format!(
        "{}, {validation}; {task}, at most {} and {} tokens",
        plural(opened.train.rows(), "row"),
        data.max_source_tokens,
        data.max_target_tokens
    )
}

fn adapter(lora: &Lora) -> String {
    let kind = if lora.dora { "DoRA" } else { "LoRA" };
    let rank_stable = if lora.rslora { ", rank-stabilised" } else { "" };
    let targets = match &lora.targets {
        Targets::AllLinear => "every linear layer of the blocks".to_owned(),
        Targets::Names(names) => names.join(", "),
    };
    let others = match (lora.rank_pattern.is_empty(), lora.alpha_pattern.is_empty()) {
        (true, true) => "",
        _ => ", some layers have others",
    };
    let saved = match lora.modules_to_save.as_slice() {
        [] => String::new(),
        modules => format!("; {} trained whole", modules.join(", ")),
    };
    let dropout = if lora.dropout > 0.0 { format!("; dropout {}", lora.dropout) } else { String::new() };
    format!("{kind}{rank_stable}, rank {}, alpha {}{others}, on {targets}{saved}{dropout}", lora.rank, lora.alpha)
}

fn recipe(config: &Config, options: &TrainerOptions) -> String {
    let (optimizer, train) = (&config.optimizer, &config.train);
    let schedule = match (config.schedule.name.as_str(), config.schedule.warmup_steps.unwrap_or(0)) {
        (name, 0) => name.to_string(),
        (name, steps) => format!("{name} after {} of warm-up", plural(steps, "step")),
    };
    let learning_rate = match optimizer.learning_rate {
        Some(first) if config.schedule.name == "one-cycle" => format!(
            "learning rate {} first, {} at the peak, {} last, {schedule}",
            rate(first),
            rate(first * config.schedule.div_factor),
            rate(first / config.schedule.final_div_factor)
        ),
        Some(learning_rate) => format!("learning rate {}, {schedule}", rate(learning_rate)),
        None => "Adafactor's own learning rate".to_string(),
    };
    let scaled = if optimizer.scale_parameter { ", times the size of each parameter" } else { "" };
    let name = if optimizer.is_adamw { "AdamW" } else { "Adafactor" };
    let weights = match options.master_weights {
        trainer::MasterWeights::StochasticRounding if config.lora.is_some() => "bf16 base weights",
        trainer::MasterWeights::F32 => "f32 weights",
        trainer::MasterWeights::StochasticRounding => "bf16 weights with stochastic rounding",
        trainer::MasterWeights::NearestRounding => "bf16 weights with rounding to nearest",
    };
    let clip = match train.grad_clip_norm {
        norm if norm > 0.0 => format!("gradient norm at most {norm}"),
        _ => "no clipping".to_string(),
    };
    format!(
        "{name}, {learning_rate}{scaled}; {} a step; dropout {}; {} activations, {weights}; {clip}",
        plural(train.batch_size as u64, "sample"),
        options.dropout,
        if train.bf16 { "bf16" } else { "f32" },
    )
}

/// The steps of the run, and the limit that ends it.
fn length(config: &Config, opened: &Opened, done: u64, total: u64) -> String {
    let train = &config.train;
    let an_epoch = opened.train.rows().div_ceil(train.batch_size as u64);
    let steps = match done {
        0 => plural(total, "step"),
        _ => format!("steps {} to {}", counted(done + 1), counted(total)),
    };
    #[expect(clippy::cast_precision_loss, reason = "for reading")]
    let epochs = total as f64 / an_epoch.max(1) as f64;
    let ended_by = match (train.max_steps, train.epochs) {
        (Some(_), None) => "`max_steps` ends the run, however many epochs that takes".to_string(),
        (Some(most), Some(_)) if most <= total => "`max_steps` ends the run before `epochs` does".to_string(),
        (_, Some(epochs)) => format!("`epochs = {epochs}` ends the run"),
        (None, None) => "nothing ends the run".to_string(),
    };
    let early = train.early_stopping_patience.map_or_else(String::new, |patience| {
        let evaluations = plural(patience, "evaluation");
        format!(", or {evaluations} without a better {}", config.checkpoint.best_metric)
    });
    format!("{steps}, {epochs:.2} epochs of {}; {ended_by}{early}", plural(an_epoch, "step"))
}

/// The device, and the reason for it, if it was chosen among several.
fn device(kernels: &Kernels, why: Option<&str>) -> String {
    let device = match kernels.device.as_str() {
        "cpu" => {
            let by = processes::variable_of_threads(kernels.threads);
            let by = by.map_or_else(String::new, |variable| format!(" ({variable})"));
            format!("CPU, {}{by}, kernels for {}", plural(kernels.threads as u64, "thread"), kernels.instruction_set)
        }
        other => other.to_string(),
    };
    why.map_or_else(|| device.clone(), |why| format!("{device}; {why}"))
}

#[expect(clippy::cast_precision_loss, reason = "for reading")]
fn millions(parameters: u64) -> String {
    format!("{:.1} M", parameters as f64 / 1e6)
}

#[expect(clippy::cast_precision_loss, reason = "for reading")]
fn share(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}
