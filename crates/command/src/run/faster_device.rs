//! The device of a command that names none (`--device auto`): a card if it is faster, otherwise the CPU.
//!
//! The command's work is planned for both devices as it would start there, with the budgets and the measured prices of each device. The
//! device with the shorter predicted step or answer is taken. A run's config then names this device, and a resumed run stays on it.

use candle_core::{DType, Device};
use planner::Wanted;
use run_plan::pace::in_words;
use serde_json::{Value as Json, json};
use toml::Value;
use trainer::checkpoint::Found;

use crate::cli::TrainArgs;
use crate::config::{Config, Origin, PricesFrom};
use crate::failure::{Failure, Outcome};
use crate::machine::device;
use crate::machine::device::AUTO;
use crate::run::bits::Kernels;
use crate::run::open::Opened;
use crate::run::planned_run::PlannedRun;
use crate::run::saved::saved_state;
use crate::run::target_machine;
use crate::screen::report;

const CPU: &str = "cpu";
const CARD: &str = "cuda";
/// The reason for the CPU if prices are given or built in.
const NOT_MEASURED: &str = "`auto` takes a GPU by measured prices alone, and `memory.prices` has others";

/// The seconds of a step or of an answer on a device, or the reason why the device cannot compute it.
type Offer = Result<f64, String>;

/// A device. If it was chosen among several, also the reason.
pub struct Chosen {
    /// The device.
    pub device: Device,
    /// The reason for this device.
    pub why: Option<String>,
}

impl Chosen {
    /// Prints a line to standard error with the device and the reason, if it was chosen among several.
    pub fn note(&self) {
        if let Some(why) = &self.why {
            report::note(&format!("on the {}: {why}", if self.device.is_cpu() { "CPU" } else { "GPU" }));
        }
    }

    /// Adds the device and the reason to a result.
    pub fn add_to(&self, result: &mut Json) {
        if let Some(why) = &self.why {
            result["device"] = json!(name(&self.device));
            result["device_reason"] = json!(why);
        }
    }
}

/// Chooses the device of a command other than a run: the device that was `named` and opened, or else the faster one. `offer` returns the
/// seconds of `what`, such as "a step", on a device, if known.
pub fn of_command(
    named: Option<&Device>,
    prices: PricesFrom,
    what: &str,
    offer: impl FnMut(&Device) -> Outcome<Option<f64>>,
) -> Chosen {
    if let Some(device) = named {
        return Chosen { device: device.clone(), why: None };
    }
    if !has_card() || !is_measured(prices) {
        return Chosen { device: Device::Cpu, why: has_card().then(|| NOT_MEASURED.to_owned()) };
    }
    let (device, why) = compared(what, offer);
    forget_other(&device);
    Chosen { device, why: Some(why) }
}

/// Chooses the device of a run that names none: that of the checkpoint that it resumes from, or else the faster one. Several processes stay
/// on the CPU.
///
/// Returns the config with that device. In a build for the CPU only, and on a machine without a card, it is the same config.
///
/// # Errors
/// The checkpoint is from another program.
pub fn choose(
    config: Config,
    opened: &mut Opened,
    flags: &TrainArgs,
    found: Option<&Found>,
    processes: usize,
) -> Outcome<Config> {
    if config.run.device != AUTO {
        return Ok(config);
    }
    let stays = match found.map(saved_state).transpose()? {
        _ if config.frozen.is_some() => "a model beside the trained one is read on the CPU",
        _ if processes > 1 => "several processes compute on GPUs where `--device` names them",
        Some(saved) => return resume(config, opened, saved.kernels.as_ref()),
        None if !has_card() => return Ok(config),
        None if !is_measured(config.memory.prices) => NOT_MEASURED,
        None => return compare(&config, opened, flags),
    };
    opened.why_device = has_card().then(|| stays.to_owned());
    Ok(config)
}

/// The reason for the device that a plan assumes without opening any, if there are several devices.
pub fn assumed(config: &Config) -> Option<String> {
    (config.run.device == AUTO && has_card()).then(|| {
        "planned for the CPU: without data no GPU is opened and measured; a run with `auto` compares both, and `--device cuda` plans for a GPU"
            .to_owned()
    })
}

/// Whether this process sees a card. The check opens none.
fn has_card() -> bool {
    device::cards().is_ok_and(|cards| cards > 0)
}

/// Whether prices are measured on the device itself.
pub fn is_measured(prices: PricesFrom) -> bool {
    matches!(prices, PricesFrom::Measured | PricesFrom::MeasuredAgain)
}

/// Takes the device of the checkpoint.
fn resume(config: Config, opened: &mut Opened, before: Option<&Kernels>) -> Outcome<Config> {
    if before.is_none_or(|before| before.device != CARD) {
        opened.why_device = has_card().then(|| "the run used the CPU before".to_owned());
        return Ok(config);
    }
    match device::open(CARD) {
        Ok(card) => take(&config, opened, card, "the run used a GPU before".to_owned()),
        Err(failure) => {
            report::warn(&format!("the run used a GPU before, and continues on the CPU: {}", first_line(&failure)));
            take(&config, opened, Device::Cpu, "the GPU is gone".to_owned())
        }
    }
}

/// Plans the run for both devices and takes the faster one.
fn compare(config: &Config, opened: &mut Opened, flags: &TrainArgs) -> Outcome<Config> {
    let (device, why) = compared("a step", |device| step_seconds(config, opened, flags, device));
    take(config, opened, device, why)
}

/// The faster device, and the reason. The work is planned for the CPU before the card is opened.
fn compared(what: &str, mut offer: impl FnMut(&Device) -> Outcome<Option<f64>>) -> (Device, String) {
    let mut on = |device: &Device| -> Offer {
        let seconds = offer(device).map_err(|failure| first_line(&failure));
        seconds?.ok_or_else(|| format!("the time of {what} is unknown"))
    };
    let on_cpu = on(&Device::Cpu);
    let (card, on_card) = match device::open(CARD) {
        Ok(card) => {
            let on_card = on(&card);
            (Some(card), on_card)
        }
        Err(failure) => (None, Err(first_line(&failure))),
    };
    let (takes_card, why) = faster(what, &on_cpu, &on_card);
    (card.filter(|_| takes_card).unwrap_or(Device::Cpu), why)
}

/// Whether the card is taken, and the reason.
fn faster(what: &str, on_cpu: &Offer, on_card: &Offer) -> (bool, String) {
    match (on_cpu, on_card) {
        (Ok(cpu), Ok(card)) => {
            let [cpu_time, card_time] = [*cpu, *card].map(in_words);
            (card < cpu, format!("{what} is predicted to take {card_time} on the GPU and {cpu_time} on the CPU"))
        }
        (Err(why), Ok(card)) => {
            (true, format!("{what} is predicted to take {} on the GPU; on the CPU: {why}", in_words(*card)))
        }
        (_, Err(why)) => (false, format!("the GPU is left alone: {why}")),
    }
}

/// The seconds of a step of the run on a device. The device is open afterwards.
fn step_seconds(config: &Config, opened: &mut Opened, flags: &TrainArgs, device: &Device) -> Outcome<Option<f64>> {
    let config = with_device(config, name(device))?;
    opened.compute_on(device.clone())?;
    let activations = if config.train.bf16 { DType::BF16 } else { DType::F32 };
    device::check_dtype(device, activations)?;
    let machine = target_machine::machine(flags, &config, Some(opened))?;
    let run = PlannedRun::new(&config, Some(opened), machine.as_ref(), Wanted::Undominated(None), 1)?;
    Ok(run.pace.step_time().map(|time| time.as_secs_f64()))
}

/// Makes the run compute on a device. Returns the config with its name.
fn take(config: &Config, opened: &mut Opened, device: Device, why: String) -> Outcome<Config> {
    let config = with_device(config, name(&device))?;
    opened.compute_on(device)?;
    opened.why_device = Some(why);
    forget_other(&opened.device);
    Ok(config)
}

/// Frees the memory of measuring and planning for the device that was not taken. A card is closed, because its context takes memory of the
/// process.
fn forget_other(taken: &Device) {
    if taken.is_cpu() {
        cuda_device::release_thread_caches();
    }
    heap::release_unused();
}

/// The device's name for a config.
fn name(device: &Device) -> &'static str {
    if device.is_cpu() { CPU } else { CARD }
}

fn with_device(config: &Config, name: &str) -> Outcome<Config> {
    let mut config = config.clone();
    config.values.set("run.device", Value::String(name.to_owned()), Origin::Run("taken by `auto`"))?;
    config.run.device = name.to_owned();
    Ok(config)
}

fn first_line(failure: &Failure) -> String {
    failure.message.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_card_is_taken_where_its_step_is_shorter_or_the_only_one() {
        let refused = || Err("no room".to_owned());
        for (on_cpu, on_card, takes_card, words) in [
            (Ok(2.0), Ok(0.5), true, "500 ms on the GPU and 2.0 s on the CPU"),
            (Ok(0.5), Ok(2.0), false, "2.0 s on the GPU and 500 ms on the CPU"),
            // A card that is only as fast is not taken.
            (Ok(2.0), Ok(2.0), false, "2.0 s on the GPU"),
            (refused(), Ok(2.0), true, "on the CPU: no room"),
            (Ok(2.0), refused(), false, "the GPU is left alone: no room"),
            (refused(), refused(), false, "the GPU is left alone: no room"),
        ] {
            let (takes, why) = faster("a step", &on_cpu, &on_card);
            assert!(takes == takes_card && why.contains(words), "{on_cpu:?}, {on_card:?}: {why}");
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_for_the_cpu_alone_assumes_nothing() {
        let mut values = crate::config::Values::defaults();
        values.set("model.config", "t5-small".into(), Origin::Default).expect("a key");
        let config = Config::resolve_without_data(values).expect("a model");
        assert_eq!((config.run.device.as_str(), assumed(&config)), (AUTO, None));
    }
}
