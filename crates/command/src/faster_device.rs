//! The device of a run that names none (`--device auto`): the card where it is the faster path, and the CPU everywhere else.
//!
//! Both runs are planned as they would start, each within its own budgets and by the measured prices of its device. The one whose step is
//! predicted to take less time is taken, and the config has its name from then on. A run that goes on stays where it was.

use candle_core::{DType, Device};
use planner::Wanted;
use run_plan::pace::in_words;
use toml::Value;
use trainer::checkpoint::Found;

use crate::bits::Kernels;
use crate::cli::TrainArgs;
use crate::config::{Config, Origin, PricesFrom};
use crate::failure::{Failure, Outcome};
use crate::open::Opened;
use crate::planned_run::PlannedRun;
use crate::saved::saved_state;
use crate::{device, machine, report};

const AUTO: &str = "auto";
const CPU: &str = "cpu";
const CARD: &str = "cuda";

/// The seconds of a step on a device, or why it cannot make one.
type Offer = Result<f64, String>;

/// Chooses the device of a run that names none: that of the checkpoint that it goes on from, or else the faster one. Several processes stay on
/// the CPU.
///
/// On a build for the CPU alone, and on a machine without a card, nothing changes.
///
/// # Errors
/// A checkpoint of another program.
pub fn choose(
    config: &mut Config,
    opened: &mut Opened,
    flags: &TrainArgs,
    found: Option<&Found>,
    processes: usize,
) -> Outcome<()> {
    if config.run.device != AUTO {
        return Ok(());
    }
    let stays = match found.map(saved_state).transpose()? {
        _ if processes > 1 => "several processes compute on cards where `--device` names them",
        Some(saved) => return go_on(config, opened, saved.kernels.as_ref()),
        None if !has_card() => return Ok(()),
        None if !is_measured(config) => "`auto` takes a card by measured prices alone, and `memory.prices` has others",
        None => return compare(config, opened, flags),
    };
    opened.why_device = has_card().then(|| stays.to_owned());
    Ok(())
}

/// The device that a plan assumes which opens none, where that is not the only one.
pub fn assumed(config: &Config) -> Option<String> {
    (config.run.device == AUTO && has_card()).then(|| {
        "planned for the CPU: without data no card is opened and measured; a run with `auto` compares both, and `--device cuda` plans for a card"
            .to_owned()
    })
}

/// Whether this process sees a card. None is opened for that.
fn has_card() -> bool {
    t5_ops::cards().is_ok_and(|cards| cards > 0)
}

fn is_measured(config: &Config) -> bool {
    matches!(config.memory.prices, PricesFrom::Measured | PricesFrom::MeasuredAgain)
}

/// Takes the device that the checkpoint was made on.
fn go_on(config: &mut Config, opened: &mut Opened, before: Option<&Kernels>) -> Outcome<()> {
    if before.is_none_or(|before| before.device != CARD) {
        opened.why_device = has_card().then(|| "the run was on the CPU before".to_owned());
        return Ok(());
    }
    match device::open(CARD) {
        Ok(card) => take(config, opened, card, "the run was on a card before".to_owned()),
        Err(failure) => {
            report::warn(&format!("the run was on a card before, and goes on on the CPU: {}", first_line(&failure)));
            take(config, opened, Device::Cpu, "the card is gone".to_owned())
        }
    }
}

/// Plans the run for both devices and takes the faster one.
fn compare(config: &mut Config, opened: &mut Opened, flags: &TrainArgs) -> Outcome<()> {
    let on_cpu = offer(&with_device(config, CPU)?, opened, flags);
    let (card, on_card) = match device::open(CARD) {
        Ok(card) => {
            opened.compute_on(card.clone())?;
            let on_card = offer(&with_device(config, CARD)?, opened, flags);
            (Some(card), on_card)
        }
        Err(failure) => (None, Err(first_line(&failure))),
    };
    let (takes_card, why) = faster(&on_cpu, &on_card);
    let device = card.filter(|_| takes_card).unwrap_or(Device::Cpu);
    take(config, opened, device, why)
}

/// Whether the card is taken, and why.
fn faster(on_cpu: &Offer, on_card: &Offer) -> (bool, String) {
    match (on_cpu, on_card) {
        (Ok(cpu), Ok(card)) => {
            let words = format!(
                "a step is predicted to take {} on the card and {} on the CPU",
                in_words(*card),
                in_words(*cpu)
            );
            (card < cpu, words)
        }
        (Err(why), Ok(card)) => {
            (true, format!("a step is predicted to take {} on the card; on the CPU: {why}", in_words(*card)))
        }
        (_, Err(why)) => (false, format!("the card is left alone: {why}")),
    }
}

/// The seconds of a step of the run on the device that is open.
fn offer(config: &Config, opened: &Opened, flags: &TrainArgs) -> Offer {
    let planned = || -> Outcome<Option<f64>> {
        let activations = if config.train.bf16 { DType::BF16 } else { DType::F32 };
        device::check_dtype(&opened.device, activations)?;
        let machine = machine::machine(flags, config, Some(opened))?;
        let run = PlannedRun::new(config, Some(opened), machine.as_ref(), Wanted::Undominated(None), 1)?;
        Ok(run.pace.step_time().map(|time| time.as_secs_f64()))
    };
    let seconds = planned().map_err(|failure| first_line(&failure));
    seconds?.ok_or_else(|| "the time of a step is unknown".to_owned())
}

/// Has the run compute on a device, and its config name it.
fn take(config: &mut Config, opened: &mut Opened, device: Device, why: String) -> Outcome<()> {
    *config = with_device(config, if device.is_cpu() { CPU } else { CARD })?;
    opened.compute_on(device)?;
    opened.why_device = Some(why);
    // What was measured and planned for the other one.
    heap::release_unused();
    Ok(())
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
            (Ok(2.0), Ok(0.5), true, "500 ms on the card and 2.0 s on the CPU"),
            (Ok(0.5), Ok(2.0), false, "2.0 s on the card and 500 ms on the CPU"),
            // Nothing is gained by a card that is as fast.
            (Ok(2.0), Ok(2.0), false, "2.0 s on the card"),
            (refused(), Ok(2.0), true, "on the CPU: no room"),
            (Ok(2.0), refused(), false, "the card is left alone: no room"),
            (refused(), refused(), false, "the card is left alone: no room"),
        ] {
            let (takes, why) = faster(&on_cpu, &on_card);
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
