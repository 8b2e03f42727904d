//! The speed of this machine, or of a card in it. It is measured once, kept in the user's cache directory, and converted to the prices of a
//! run.
//!
//! The file is `train_low_mem/speed.json` in `$XDG_CACHE_HOME`, or else in `~/.cache`. It has one measurement for each processor,
//! instruction set, number of threads, card with its driver, and size of model, all of one build of this program. If the file is missing,
//! damaged or not writable, the machine is measured again.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::Device;
use memory_policy::MemorySpace;
use planner::{MachineSpeed, MeasuredSizes};
use run_plan::priced::Priced;
use serde::{Deserialize, Serialize};
use trainer::TrainerOptions;

use crate::config::{Config, PricesFrom};
use crate::failure::{Failure, Outcome};
use crate::files::disk::existing_ancestor;
use crate::job;
use crate::screen::report;

/// A longer file is not from this program.
const MAX_CACHE_BYTES: u64 = 1 << 20;
/// The most measurements that are kept; older ones are removed.
const MAX_KEPT: usize = 64;
const CACHE_FILE: &str = "speed.json";

/// The prices of a run of this model on a device, from the source in the config. A plan for a card does not open it, and passes the CPU.
///
/// # Errors
/// The planner refuses the options, or an operation fails.
pub fn priced_run(config: &Config, model: &t5::Config, options: &TrainerOptions, device: &Device) -> Outcome<Priced> {
    let tokens = (config.data.max_source_tokens, config.data.max_target_tokens);
    let directory = existing_ancestor(&config.run.output_dir);
    priced(config.memory.prices, model, options, tokens, (job::place(config), device), &directory)
}

/// The prices from this source. Files are measured in `directory`.
///
/// # Errors
/// As [`priced_run`].
pub fn priced(
    from: PricesFrom,
    model: &t5::Config,
    options: &TrainerOptions,
    tokens: (usize, usize),
    (place, device): (MemorySpace, &Device),
    directory: &Path,
) -> Outcome<Priced> {
    // If the card is not open, the processor's speed does not apply to it.
    let is_there = place == MemorySpace::Host || device.is_cuda();
    if !is_there || matches!(from, PricesFrom::Given(_) | PricesFrom::BuiltIn) {
        return Ok(Priced::without_measuring(from, place, options.precision.activations()));
    }
    let speed = measured(from, model, device, directory)?;
    let (prices, bf16_over_f32) = speed.prices(model, options, tokens)?;
    Ok(match place {
        MemorySpace::Host => Priced { prices, bf16_over_f32: Some(bf16_over_f32), origin: "measured on this machine" },
        MemorySpace::Device => Priced { prices, bf16_over_f32: None, origin: "measured on this GPU" },
    })
}

/// The speed of a device at the sizes of a model. Measures it if that has not been done. Files are measured in `directory`.
///
/// # Errors
/// An operation fails.
pub fn measured(from: PricesFrom, model: &t5::Config, device: &Device, directory: &Path) -> Outcome<MachineSpeed> {
    kept_speed(MeasuredSizes::new(model), device, directory, from == PricesFrom::MeasuredAgain)
}

/// Kept measurements.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Cache {
    measured: Vec<Kept>,
}

/// A measurement and its circumstances.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Kept {
    #[serde(flatten)]
    circumstances: Circumstances,
    speed: MachineSpeed,
}

/// The circumstances of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Circumstances {
    /// Version of the program and of its kernels, and size and time of its file.
    build: String,
    /// The processor's name.
    processor: String,
    instruction_set: String,
    threads: usize,
    /// The name of a card and the version of its driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    card: Option<String>,
    sizes: MeasuredSizes,
}

impl Circumstances {
    fn of_this_process(sizes: MeasuredSizes, device: &Device) -> Self {
        let file = std::env::current_exe().and_then(std::fs::metadata).ok();
        let changed = file.as_ref().and_then(|file| file.modified().ok());
        let changed = changed.and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok()).unwrap_or_default();
        let (bytes, seconds) = (file.map_or(0, |file| file.len()), changed.as_secs());
        Self {
            build: format!("{}-{}-{bytes}-{seconds}", env!("CARGO_PKG_VERSION"), t5_ops::KERNELS_VERSION),
            processor: processor(),
            instruction_set: t5_ops::instruction_set().to_string(),
            threads: t5_ops::threads(),
            card: cuda_device::card_and_driver(device),
            sizes,
        }
    }
}

impl Cache {
    /// The kept measurements; none if there is no such file, or if it has another format.
    fn read(path: &Path) -> Self {
        let bytes = regular_file::read(path, MAX_CACHE_BYTES).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    fn find(&self, circumstances: &Circumstances) -> Option<MachineSpeed> {
        self.measured.iter().rev().find(|kept| kept.circumstances == *circumstances).map(|kept| kept.speed)
    }

    /// Adds a measurement, and removes those of other builds.
    fn with(mut self, kept: Kept) -> Self {
        let (build, of) = (&kept.circumstances.build, &kept.circumstances);
        self.measured.retain(|other| other.circumstances.build == *build && other.circumstances != *of);
        self.measured.push(kept);
        let surplus = self.measured.len().saturating_sub(MAX_KEPT);
        self.measured.drain(..surplus);
        self
    }

    fn write(&self, path: &Path) -> Result<(), String> {
        let text = serde_json::to_vec_pretty(self).map_err(|error| error.to_string())?;
        let directory = path.parent().ok_or("it has no directory")?;
        durable_files::create_directories(directory).map_err(|error| error.to_string())?;
        durable_files::write_atomic(path, &text).map_err(|error| error.to_string())
    }
}

/// The kept speed of this machine or of a card. If there is none, measures it and keeps it.
fn kept_speed(sizes: MeasuredSizes, device: &Device, directory: &Path, again: bool) -> Outcome<MachineSpeed> {
    let circumstances = Circumstances::of_this_process(sizes, device);
    let what = if device.is_cpu() { "this machine" } else { "this GPU" };
    let path = cache_directory().map(|directory| directory.join(CACHE_FILE));
    let cache = path.as_deref().map(Cache::read).unwrap_or_default();
    if let Some(speed) = cache.find(&circumstances).filter(|_| !again) {
        return Ok(speed);
    }
    drop(cache);
    report::note(&format!("measuring the speed of {what}, which takes a moment"));
    let began = Instant::now();
    let speed = match device {
        Device::Cpu => planner::measure(sizes, directory),
        card => planner::measure_card(sizes, card, directory),
    };
    let speed = speed.map_err(|error| Failure::internal(format!("measuring the speed of {what}: {error}")))?;
    heap::release_unused();
    let seconds = began.elapsed().as_secs_f64();
    let kept = match &path {
        // The file is read again, because another process may have kept a measurement meanwhile.
        Some(path) => match Cache::read(path).with(Kept { circumstances, speed }).write(path) {
            Ok(()) => format!("kept in {}", path.display()),
            Err(error) => format!("not kept: {error}"),
        },
        None => "not kept: neither XDG_CACHE_HOME nor HOME is an absolute path".to_string(),
    };
    report::note(&format!("measured the speed of {what} in {seconds:.1} s; {kept}"));
    Ok(speed)
}

/// This program's directory below the user's cache directory.
fn cache_directory() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(caches.join("train_low_mem"))
}

/// The processor's name according to the system.
fn processor() -> String {
    let mut text = String::new();
    // The first processor's lines are enough.
    let read = std::fs::File::open("/proc/cpuinfo").and_then(|file| file.take(8 << 10).read_to_string(&mut text));
    let value = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_string())
    };
    let named = value("model name").or_else(|| Some(format!("{} {}", value("CPU implementer")?, value("CPU part")?)));
    named.filter(|_| read.is_ok()).unwrap_or_else(|| std::env::consts::ARCH.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(build: &str, threads: usize) -> Kept {
        let sizes = MeasuredSizes { d_model: 1, d_ff: 1, heads: 1, d_kv: 1, from_memory: false };
        let (processor, instruction_set) = ("a processor".to_string(), "avx2".to_string());
        let build = build.to_string();
        let circumstances = Circumstances { build, processor, instruction_set, threads, card: None, sizes };
        let few = planner::FewRows { one_row_ps: 1.0, eight_rows_ps: 1.0, most_rows_ps: 1.0 };
        let answers = planner::AnswerSpeed {
            f32_weights: few,
            bf16_weights: few,
            query_ps: 1.0,
            block_ps: 1.0,
            source_ps: 1.0,
            token_ps: 1.0,
        };
        let speed = planner::Speed {
            product_ps: 1.0,
            product_overhead_rows: 1.0,
            attention_ps: 1.0,
            attention_overhead_keys: 1.0,
            attention_backward_ps: 1.0,
            attention_backward_overhead_keys: 1.0,
            head_ps: 1.0,
            head_overhead_rows: 1.0,
            between_ps: 1.0,
            between_backward_ps: 1.0,
            update_ps: 1.0,
            file_byte_ps: None,
            answers,
            card: None,
        };
        Kept { circumstances, speed: MachineSpeed { f32: speed, bf16: speed } }
    }

    #[test]
    fn measurements_of_another_build_go_and_the_newest_stay() {
        let cache =
            Cache::default().with(kept("old", 1)).with(kept("new", 1)).with(kept("new", 2)).with(kept("new", 1));
        assert_eq!(cache.measured.len(), 2);
        assert!(cache.find(&kept("old", 1).circumstances).is_none());
        assert!(cache.find(&kept("new", 2).circumstances).is_some());
        let many = (0..100).fold(cache, |cache, threads| cache.with(kept("new", threads)));
        assert_eq!(many.measured.len(), MAX_KEPT);
        assert!(many.find(&kept("new", 99).circumstances).is_some());
    }

    #[test]
    fn a_file_of_something_else_keeps_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("below").join(CACHE_FILE);
        Cache::default().with(kept("new", 3)).write(&path).unwrap();
        assert!(Cache::read(&path).find(&kept("new", 3).circumstances).is_some());
        for text in ["", "{}", "{\"measured\": 7}", "\u{0}"] {
            std::fs::write(&path, text).unwrap();
            assert!(Cache::read(&path).measured.is_empty(), "{text}");
        }
    }
}
