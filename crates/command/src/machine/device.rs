//! The device that computes: opened by its name, and the place of its tensors.

use std::fmt;
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device};
use cuda_device::DeviceBytes;
use memory_policy::{Bytes, Card, DeviceMemory, DeviceProbe, MemorySnapshot, MemorySpace, SystemProbe};
use planner::Plan;
use serde_json::{Value, json};

use crate::failure::{Failure, Outcome};
use crate::machine::processes;

/// The name that leaves the choice to the program.
pub const AUTO: &str = "auto";

/// The name of Apple's GPUs, which is known and refused: candle has no f64 there, in which losses are summed.
const METAL: &str = "metal";

fn refused(name: &str, problem: &str) -> Failure {
    Failure::usage(format!("`run.device`: cannot use `{name}`: {problem}")).hint("`--device cpu` works everywhere")
}

/// Opens the device of this name. `auto` is the CPU: a run that names no device may move to a card later ([`crate::run::faster_device`]).
pub fn open(name: &str) -> Outcome<Device> {
    let failed = |error: candle_core::Error| {
        if cfg!(feature = "cuda") {
            return refused(name, &t5::without_backtrace(error).to_string());
        }
        refused(name, "this build has no `cuda`").hint("to use it, build with `cargo build --release --features cuda`")
    };
    match name {
        "cpu" | AUTO => Ok(Device::Cpu),
        METAL => Err(refused(name, "no build has it: Apple's GPUs are not supported")),
        cuda => cards()
            .and_then(|cards| cuda_device::open_card(index_of_process(cuda, processes::number_on_host(), cards)))
            .map_err(failed),
    }
}

/// The cards as the driver's library describes them before this process opens one; empty if the library reports none.
static UNOPENED: OnceLock<Vec<Card>> = OnceLock::new();

/// The number of NVIDIA cards that this process sees. Counting them opens none.
pub fn cards() -> candle_core::Result<usize> {
    // The driver's first call already takes some memory of a card.
    UNOPENED.get_or_init(|| memory_policy::cards().map_or_else(|_| Vec::new(), |found| found.cards));
    cuda_device::cards()
}

/// Opens the device that a flag names; `None` without a flag. Then the device is chosen when the computation is known.
pub fn named(flag: Option<&str>) -> Outcome<Option<Device>> {
    flag.filter(|name| *name != AUTO).map(open).transpose()
}

/// The index of the card that a process opens: the index in the name, or else the next card for each process of a host.
fn index_of_process(name: &str, number_on_host: usize, cards: usize) -> usize {
    if name.contains(':') { index(name) } else { number_on_host % cards.max(1) }
}

/// The index of the card in a name such as `cuda:1`.
pub fn index(name: &str) -> usize {
    name.strip_prefix("cuda:").and_then(|index| index.parse().ok()).unwrap_or(0)
}

/// The card that this process computes on, by a name that all processes share; `None` for the CPU.
pub fn card(device: &Device, name: &str) -> Option<String> {
    let index = index(name);
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let seen = visible.split(',').nth(index).map(str::trim).filter(|card| !card.is_empty());
    (!device.is_cpu()).then(|| seen.map_or_else(|| index.to_string(), str::to_owned))
}

/// The place of a device's tensors.
pub fn place(device: &Device) -> MemorySpace {
    if device.is_cpu() { MemorySpace::Host } else { MemorySpace::Device }
}

/// Refuses a dtype for which the device has no kernels.
pub fn check_dtype(device: &Device, activations: DType) -> Outcome<()> {
    cuda_device::check_dtype(device, activations).map_err(|error| {
        Failure::usage(error.to_string()).hint("`--precision f32` works on every GPU").hint("or `--device cpu`")
    })
}

/// Limits the device to the plan's budget: tensors come from a pool that cannot hold more. Returns a warning if the driver has no such
/// limit.
pub fn limit(device: &Device, plan: &Plan, now: &MemorySnapshot) -> Option<String> {
    let budget = plan.bill.device.as_ref()?.budget?;
    let beside = plan.bill.device.as_ref()?.rows.iter().filter(|row| row.name == planner::names::CONTEXT);
    let beside: Bytes = beside.map(|row| row.bytes).sum();
    // Memory that other programs hold is not available.
    let ceiling = now.device.as_ref().map_or(budget, |device| budget.min(device.ceiling()));
    let limited = cuda_device::limit_device(device, ceiling.saturating_sub(beside).0);
    limited.err().map(|error| format!("the driver cannot limit this process to its budget on the device: {error}"))
}

/// Adds the peak of a device and its predicted peak to an event or a result, if a device computes.
pub fn add_peaks(now: &MemorySnapshot, predicted: Bytes, to: &mut Value) {
    if let Some(device) = &now.device {
        to["device_peak_bytes"] = json!(device.peak.0);
        to["predicted_device_peak_bytes"] = json!(predicted.0);
    }
}

/// The state of a device when it was opened, before any computation there.
#[derive(Clone, Debug, Default)]
pub struct DeviceBaseline {
    bytes: DeviceBytes,
    /// Free memory before this process opened it, if known.
    free_before: Option<u64>,
    /// The most bytes that its pool takes beyond a request; zero if unknown.
    pool_unit: Bytes,
    /// Host memory that its libraries will take for a step.
    kernels_on_host: Bytes,
}

/// Reads the state of a newly opened device; `None` on the CPU, or if the driver does not report it.
pub fn device_baseline(device: &Device) -> Option<DeviceBaseline> {
    let bytes = cuda_device::device_bytes(device)?;
    let before = UNOPENED.get().zip(cuda_device::card_id(device));
    let free_before = before.and_then(|(cards, id)| cards.iter().find(|card| card.id == id)).map(|card| card.free.0);
    let kernels_on_host = if has_library(LIBRARY_OF_KERNELS) { KERNELS_ON_HOST } else { Bytes::ZERO };
    Some(DeviceBaseline {
        bytes,
        free_before,
        pool_unit: Bytes(cuda_device::pool_unit(device).unwrap_or(0)),
        kernels_on_host,
    })
}

/// A probe of this machine and of the opened device.
pub fn probe(device: &Device, device_baseline: Option<DeviceBaseline>) -> SystemProbe {
    let probe = SystemProbe::new();
    let counted = device.clone();
    match device_baseline.map(|first| OpenedMemory::new(first, move || cuda_device::device_bytes(&counted))) {
        Some(memory) => probe.with_device(Arc::new(memory)),
        None => probe,
    }
}

/// The largest memory of a context before kernels are loaded: twice that of an H200 with driver 580. Without a limit, memory of other
/// programs could be taken for the context.
const LARGEST_CONTEXT_BYTES: u64 = 1 << 30;

/// Host memory that cuBLAS' kernels for the sizes of a step take, beyond those of a rehearsal: 15 MiB on an H200 in bf16.
const KERNELS_ON_HOST: Bytes = Bytes::mib(24);
/// The library that contains them, compressed.
const LIBRARY_OF_KERNELS: &str = "libcublasLt";

/// Whether this process has loaded a library of that name. The emulated card loads none.
fn has_library(name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.lines().any(|mapping| mapping.contains(name)))
}

/// The memory of an opened device: the driver's count of free memory, and this process's part of the rest.
///
/// Tensors come from a pool of this process, so their bytes are exact even if other processes use the device. The context, its kernels and
/// its libraries are the decrease of free memory until the first snapshot, which follows a rehearsal.
struct OpenedMemory {
    count: Box<dyn Fn() -> Option<DeviceBytes> + Send + Sync>,
    at_opening: DeviceBaseline,
    beside_the_pool: OnceLock<u64>,
}

impl OpenedMemory {
    fn new(at_opening: DeviceBaseline, count: impl Fn() -> Option<DeviceBytes> + Send + Sync + 'static) -> Self {
        Self { count: Box::new(count), at_opening, beside_the_pool: OnceLock::new() }
    }

    fn beside_the_pool(&self, now: &DeviceBytes) -> u64 {
        let DeviceBaseline { bytes: DeviceBytes { total, free, pool, .. }, free_before, .. } = self.at_opening;
        let context = free_before.unwrap_or(total).saturating_sub(free + pool).min(LARGEST_CONTEXT_BYTES);
        let fell_by = (free + pool).saturating_sub(now.free + now.pool);
        context + fell_by
    }
}

impl DeviceProbe for OpenedMemory {
    fn memory(&self) -> Result<DeviceMemory, String> {
        let now = (self.count)().ok_or("the driver does not say how much memory the device has")?;
        let beside = *self.beside_the_pool.get_or_init(|| self.beside_the_pool(&now));
        Ok(DeviceMemory {
            total: Bytes(now.total),
            free: Bytes(now.free),
            used: Bytes(beside + now.pool),
            peak: Bytes(beside + now.pool_peak),
            pool: Bytes(now.pool),
            pool_unit: self.at_opening.pool_unit,
            kernels_on_host: self.at_opening.kernels_on_host,
            name: now.name,
        })
    }
}

impl fmt::Debug for OpenedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedMemory").field("at_opening", &self.at_opening).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use run_plan::job::is_named;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A device of 8 GiB that plays these counts back, in MiB: free memory, the pool, and the pool's peak.
    fn scripted(free_before: Option<u64>, script: &'static [[u64; 3]]) -> OpenedMemory {
        let next = AtomicUsize::new(0);
        let count = move || {
            let [free, pool, pool_peak] = script[next.fetch_add(1, Ordering::Relaxed).min(script.len() - 1)];
            let [free, pool, pool_peak] = [free, pool, pool_peak].map(|mib| mib * MIB);
            Some(DeviceBytes {
                name: "a card".into(),
                total: 8192 * MIB,
                free,
                pool,
                pool_peak,
                ..DeviceBytes::default()
            })
        };
        let free_before = free_before.map(|mib| mib * MIB);
        let first = DeviceBaseline { bytes: count().expect("it counts"), free_before, ..DeviceBaseline::default() };
        OpenedMemory::new(first, count)
    }

    #[test]
    fn what_free_memory_falls_by_in_a_rehearsal_is_the_context_and_tensors_are_the_pool() {
        // The context takes 300 MiB at once and 150 MiB with kernels and libraries. After the rehearsal, the pool has 32 MiB.
        let memory = scripted(None, &[[7892, 0, 0], [7710, 32, 64], [5710, 2032, 2532], [4710, 2032, 2532]]);
        let [rehearsed, training, beside_others] = [0; 3].map(|_| memory.memory().expect("it counts"));
        let of = |memory: &DeviceMemory| [memory.used, memory.peak, memory.free, memory.ceiling()].map(|b| b.0 / MIB);
        assert_eq!(of(&rehearsed), [482, 514, 7710, 8192]);
        assert_eq!(of(&training), [2482, 2982, 5710, 8192]);
        // A GiB that another process takes does not count as this process's, but less memory is left.
        assert_eq!(of(&beside_others), [2482, 2982, 4710, 7192]);
        assert_eq!((rehearsed.total, rehearsed.name.as_str()), (Bytes::gib(8), "a card"));
    }

    #[test]
    fn what_others_hold_when_a_device_is_opened_is_no_context_of_ours() {
        let used = |free_before| {
            scripted(free_before, &[[2048, 0, 0], [1948, 0, 0]]).memory().expect("it counts").used.0 / MIB
        };
        assert_eq!(used(None), LARGEST_CONTEXT_BYTES / MIB + 100);
        // If the free memory before opening is known, this process took exactly the decrease.
        assert_eq!(used(Some(2575)), 527 + 100);
    }

    #[test]
    fn a_probe_beside_the_cpu_has_no_device() {
        assert!(probe(&Device::Cpu, device_baseline(&Device::Cpu)).device_memory().is_none());
        assert!(check_dtype(&Device::Cpu, DType::BF16).is_ok());
    }

    #[test]
    fn the_cpu_computes_unless_another_device_is_named() {
        for name in ["auto", "cpu"] {
            assert!(open(name).is_ok_and(|device| device.is_cpu() && place(&device) == MemorySpace::Host), "{name}");
            assert!(!is_named(name));
        }
        assert!(is_named("cuda") && is_named("cuda:1") && is_named("metal"));
        assert_eq!((index("cuda"), index("cuda:3")), (0, 3));
    }

    #[test]
    fn processes_of_a_host_take_one_card_after_the_other_unless_it_is_named() {
        assert_eq!([0, 1, 2, 3].map(|number| index_of_process("cuda", number, 3)), [0, 1, 2, 0]);
        assert_eq!(index_of_process("cuda:2", 1, 4), 2);
        assert_eq!(index_of_process("cuda", 1, 0), 0, "opening it says that there is none");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_device_that_the_build_lacks_is_refused_with_the_feature_that_it_takes() {
        for name in ["cuda", "cuda:1"] {
            let failure = open(name).unwrap_err().to_string();
            assert!(failure.contains("this build has no `cuda`") && failure.contains("--features cuda`"), "{failure}");
        }
    }

    #[test]
    fn apples_gpus_are_refused_by_every_build() {
        let failure = open(METAL).unwrap_err().to_string();
        assert!(failure.contains("no build has it") && !failure.contains("--features"), "{failure}");
    }
}
