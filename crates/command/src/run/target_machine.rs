//! The machine that a run is planned for: this one, or the machine that a file describes.

use memory_policy::{MemorySnapshot, Probe, ScriptedProbe, SystemProbe};

use crate::cli::TrainArgs;
use crate::config::Config;
use crate::failure::{Failure, Outcome};
use crate::machine::device;
use crate::run::open::Opened;
use crate::run::setup;
use crate::screen::report;

/// The source of memory snapshots: this machine, or the machine that `--machine` describes. If a GPU computes and its memory is unknown, a
/// note says so and the run continues. Without `opened`, a GPU's memory is read through its driver's library.
pub fn machine(flags: &TrainArgs, config: &Config, opened: Option<&Opened>) -> Outcome<Box<dyn Probe>> {
    let Some(path) = &flags.machine else {
        let Some(index) = card(&config.run.device) else { return Ok(Box::new(SystemProbe::new())) };
        let probe = opened.map_or_else(|| SystemProbe::new().with_card(index), probe_of);
        if let Some(Err(why)) = probe.device_memory() {
            report::note(&format!(
                "{why}; the free GPU memory is unknown, so only --device-memory-budget bounds the device"
            ));
        }
        return Ok(Box::new(probe));
    };
    let text = setup::read_named_file(path, "machine")?;
    let snapshots: Vec<MemorySnapshot> = serde_json::from_str(&text).map_err(|error| {
        Failure::usage(format!("{}: {error}", path.display()))
            .hint("expected a JSON list of snapshots, one for each plan, such as [{\"total\": 17179869184, \"available\": 1503238553}]")
    })?;
    if snapshots.is_empty() {
        return Err(Failure::usage(format!("{}: expected at least one snapshot, got none", path.display())));
    }
    Ok(Box::new(ScriptedProbe::around_this_process(snapshots)))
}

/// A probe of this machine and of the opened device.
pub fn probe_of(opened: &Opened) -> SystemProbe {
    device::probe(&opened.device, opened.device_baseline.clone())
}

/// The index of the NVIDIA card for a device's name, as [`device::open`] would open it.
fn card(name: &str) -> Option<u32> {
    name.starts_with("cuda").then(|| u32::try_from(device::index(name)).unwrap_or(u32::MAX))
}
