//! The first screen of a run: the model, the data, the settings, and the end of the run. A colleague can check it at a glance.

use memory_policy::{counted, labelled, plural};
use t5::{Lora, Targets};
use trainer::TrainerOptions;
use trainer::checkpoint::Found;
use trainer::groups::Group;
use trainer::schedule::{Schedule, ScheduleKind};

use crate::config::Config;
use crate::data::objective;
use crate::failure::Outcome;
use crate::files::run_dir;
use crate::machine::processes;
use crate::run::bits::Kernels;
use crate::run::open::Opened;
use crate::run::teacher_logits;
use crate::screen::progress::rate;
use crate::screen::shell_words::quoted;

/// The screen, one labelled paragraph for each subject. `done` steps were made before.
///
/// # Errors
/// `train.freeze` matches nothing, or everything.
pub fn text(config: &Config, opened: &Opened, options: &TrainerOptions, done: u64, total: u64) -> Outcome<String> {
    let paragraphs = [
        Some(("Model", model(config, opened, options, done)?)),
        vocabulary(config, opened).map(|words| ("Vocabulary", words)),
        opened.model.lora.as_ref().map(|lora| ("Adapter", adapter(lora))),
        Some(("Data", data(config, opened))),
        opened.reading.texts_in_words().map(|words| ("Texts", words)),
        Some(("Recipe", recipe(config, opened, options, total))),
        groups(opened, options)?.map(|words| ("Groups", words)),
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

/// The cost of a large table, and the command that gives it back.
fn vocabulary(config: &Config, opened: &Opened) -> Option<String> {
    const MANY: usize = 100_000;
    let model = config.model.init_from.as_deref().filter(|_| opened.model.vocab_size >= MANY)?;
    let specs = t5::ParameterSpec::all(&opened.model);
    let all: u64 = specs.iter().map(t5::ParameterSpec::elements).sum();
    let has_row_for_each =
        |spec: &&t5::ParameterSpec| spec.shape.len() == 2 && spec.shape[0] == opened.model.vocab_size;
    let table: u64 = specs.iter().filter(has_row_for_each).map(t5::ParameterSpec::elements).sum();
    let rows = opened.reading.train.originals.first()?;
    (table > all / 8).then(|| {
        format!(
            "{} entries have {} of the parameters ({:.0} %); `train_low_mem trim-vocab --model {} --keep-used {} --output trimmed` \
             keeps those that the rows use",
            counted(opened.model.vocab_size as u64),
            millions(table),
            share(table, all),
            quoted(model),
            quoted(rows),
        )
    })
}

fn data(config: &Config, opened: &Opened) -> String {
    let validation = opened.validation.as_ref().map_or("no validation rows".to_string(), |validation| {
        format!("{} for validation", plural(validation.rows(), "row"))
    });
    let data = &config.data;
    let task = objective::in_words(&opened.reading.objective, opened.reading.task, config);
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

/// The learning rate over the run. The rate that one-cycle is configured with is its first, and far below its peak.
fn learning_rate(configured: f64, schedule: &Schedule, total: u64) -> String {
    let name = schedule.kind.name();
    let warmup = match schedule.warmup_steps.unwrap_or(0) {
        0 => String::new(),
        steps => format!(" after {} of warm-up", plural(steps, "step")),
    };
    if matches!(schedule.kind, ScheduleKind::OneCycle { .. }) {
        let factors = [schedule.factor(0, total), schedule.highest(total).1, schedule.factor(total.max(1) - 1, total)];
        let [first, peak, last] = factors.map(|factor| rate(configured * factor));
        return format!("learning rate {first} first, {peak} at the peak, {last} last, {name}{warmup}");
    }
    format!("learning rate {}, {name}{warmup}", rate(configured))
}

/// Warnings about learning rates that a user may not expect, after `done` of `total` steps, the last one in a checkpoint.
pub fn rate_warnings(
    found: Option<&Found>,
    now: &TrainerOptions,
    (done, total): (u64, u64),
) -> impl IntoIterator<Item = String> {
    let jump = found.and_then(|found| rate_jumps(&found.state.options, now, done));
    warmup_is_too_long(now, total).into_iter().chain(jump)
}

/// The warning about a warm-up that the run ends in. `None` if the learning rate reaches its peak.
fn warmup_is_too_long(options: &TrainerOptions, total: u64) -> Option<String> {
    let steps = options.schedule.warmup_steps.filter(|&steps| steps > total)?;
    let (_, highest) = options.schedule.highest(total);
    let configured = options.optimizer.configured_learning_rate()?;
    let peak = match options.schedule.kind {
        ScheduleKind::OneCycle { div_factor, .. } => configured * div_factor,
        _ => configured,
    };
    Some(format!(
        "the warm-up of {} is longer than the run of {}: the learning rate reaches {} of {}; `schedule.warmup_steps` sets its length",
        plural(steps, "step"),
        plural(total, "step"),
        rate(configured * highest),
        rate(peak)
    ))
}

/// The warning about a learning rate that a longer or shorter run continues elsewhere: a schedule stretches over all steps of a run. `None` if
/// the schedule gives the next step the rate that it had before.
fn rate_jumps(before: &TrainerOptions, now: &TrainerOptions, done: u64) -> Option<String> {
    let of = |options: &TrainerOptions, step: u64| {
        let configured = options.optimizer.configured_learning_rate()?;
        Some(configured * options.schedule.factor(step, options.total_steps))
    };
    let is_stretched = before.total_steps != now.total_steps;
    let (last, would_be, next) = (of(before, done.checked_sub(1)?)?, of(before, done)?, of(now, done)?);
    let jumps = (next - would_be).abs() > 0.01 * next.abs().max(would_be.abs());
    (is_stretched && jumps).then(|| {
        format!(
            "the schedule now has {} instead of {}: the learning rate goes on at {}, and was {} at step {}",
            plural(now.total_steps, "step"),
            counted(before.total_steps),
            rate(next),
            rate(last),
            counted(done)
        )
    })
}

fn recipe(config: &Config, opened: &Opened, options: &TrainerOptions, total: u64) -> String {
    let (optimizer, train) = (&config.optimizer, &config.train);
    let learning_rate = match optimizer.learning_rate {
        Some(configured) => learning_rate(configured, &options.schedule, total),
        None => "Adafactor's own learning rate".to_string(),
    };
    let scaled = if optimizer.scale_parameter { ", times the size of each parameter" } else { "" };
    let name = optimizer.row.title;
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
    let share = (train.label_smoothing > 0.0).then(|| format!("; label smoothing {}", train.label_smoothing));
    let z_loss = (train.z_loss > 0.0).then(|| format!("; z-loss {}", train.z_loss));
    let preference = config.preference.map(|of| {
        let rows = if of.loss.has_labels() { "labels" } else { "pairs" };
        format!("; minimises {} of {rows}, beta {}", of.loss.name().to_uppercase(), of.beta)
    });
    let distillation = config.distillation.map(|of| {
        let logits = of.top_k.map_or_else(|| "a teacher".to_owned(), |count| format!("{count} logits of a teacher"));
        let kept = teacher_logits::planned(config, opened);
        let kept = kept.map_or_else(String::new, |kept| {
            format!(", kept in {} of {} at most", run_dir::TEACHER_LOGITS, memory_policy::Bytes(kept.file_bytes))
        });
        format!("; learns {} of the loss from {logits}, at temperature {}{kept}", of.alpha, of.temperature)
    });
    let frozen = config.frozen.as_ref().map(|frozen| format!("; {}: {}", frozen.called, frozen.named.display()));
    let beside = [share, z_loss, preference, distillation, frozen].into_iter().flatten().collect::<String>();
    format!(
        "{name}, {learning_rate}{scaled}; {} a step; dropout {}; {} activations, {weights}; {clip}{beside}",
        plural(train.batch_size as u64, "sample"),
        options.dropout,
        if train.bf16 { "bf16" } else { "f32" },
    )
}

/// The groups of parameters with numbers of their own, each with the elements that it has.
fn groups(opened: &Opened, options: &TrainerOptions) -> Outcome<Option<String>> {
    let elements = trainer::costs::elements_of_groups(&opened.model, options)?;
    let words = |(group, elements): (&Group, u64)| format!("{group} ({})", plural(elements, "parameter"));
    let all: Vec<String> = options.groups.iter().zip(elements).map(words).collect();
    Ok((!all.is_empty()).then(|| all.join("; ")))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn options(kind: ScheduleKind, warmup_steps: Option<u64>, total_steps: u64) -> TrainerOptions {
        let optimizer = trainer::adamw::AdamwOptions { learning_rate: 1e-4, ..Default::default() }.into();
        TrainerOptions {
            optimizer,
            schedule: Schedule { kind, warmup_steps },
            total_steps,
            ..TrainerOptions::default()
        }
    }

    const ONE_CYCLE: ScheduleKind = ScheduleKind::OneCycle { div_factor: 50.0, pct_start: 0.3, final_div_factor: 1e4 };

    #[test]
    fn the_screen_has_the_first_the_highest_and_the_last_rate_of_one_cycle() {
        let of = |kind, warmup_steps| learning_rate(1e-4, &Schedule { kind, warmup_steps }, 100);
        let expected = "learning rate 1.00e-4 first, 5.00e-3 at the peak, 1.00e-8 last, one-cycle";
        assert_eq!(of(ONE_CYCLE, None), expected);
        assert_eq!(of(ScheduleKind::Linear, Some(5)), "learning rate 1.00e-4, linear after 5 steps of warm-up");
        assert_eq!(of(ScheduleKind::Constant, None), "learning rate 1.00e-4, constant");
    }

    #[test]
    fn a_warm_up_that_the_run_ends_in_is_a_warning_with_the_rate_that_it_reaches() {
        let of = |kind, steps, total| warmup_is_too_long(&options(kind, steps, total), total);
        let text = of(ScheduleKind::Linear, Some(1000), 94).expect("a warning");
        assert!(text.contains("1,000 steps is longer than the run of 94 steps"), "{text}");
        assert!(text.contains("reaches 9.30e-6 of 1.00e-4"), "{text}");
        assert!(of(ONE_CYCLE, Some(1000), 94).expect("a warning").contains("of 5.00e-3"));
        assert_eq!(of(ScheduleKind::Linear, Some(94), 94), None);
        assert_eq!(of(ScheduleKind::Linear, None, 94), None);
        assert_eq!(of(ONE_CYCLE, None, 94), None);
    }

    #[test]
    fn a_schedule_that_stretches_over_more_steps_names_the_rate_that_it_goes_on_with() {
        let linear = |total| options(ScheduleKind::Linear, None, total);
        let text = rate_jumps(&linear(100), &linear(200), 100).expect("a warning");
        assert!(text.contains("now has 200 steps instead of 100"), "{text}");
        assert!(text.contains("goes on at 5.00e-5, and was 1.00e-6 at step 100"), "{text}");
        assert_eq!(rate_jumps(&linear(100), &linear(100), 50), None);
        let constant = |total| options(ScheduleKind::Constant, Some(3), total);
        assert_eq!(rate_jumps(&constant(100), &constant(200), 100), None);
    }
}
