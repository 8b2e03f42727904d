//! Probes, which take a [`MemorySnapshot`].
//!
//! [`SystemProbe`] reads the machine; [`ScriptedProbe`] plays snapshots back, so that a test can put a
//! run under pressure at a chosen step.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

pub(crate) use cgroup::own_groups;
pub use faults::PageFaults;

use crate::{Bytes, DeviceMemory, MemorySnapshot};

mod cgroup;
mod faults;
#[cfg(not(any(target_family = "wasm", target_env = "musl")))]
mod nvml;
#[cfg(any(target_family = "wasm", target_env = "musl"))]
#[path = "probe/without_nvml.rs"]
mod nvml;
mod procfs;
#[cfg(test)]
mod tests;

/// Takes memory snapshots.
pub trait Probe: Send + Sync {
    /// Used and free memory now.
    ///
    /// # Errors
    ///
    /// When the system's own counters cannot be read or understood.
    fn snapshot(&self) -> Result<MemorySnapshot, ProbeError>;
}

/// Reads the memory of the device that computes.
pub trait DeviceProbe: std::fmt::Debug + Send + Sync {
    /// Used and free memory of the device now.
    ///
    /// # Errors
    ///
    /// The reason why nothing is known of the memory, in words.
    fn memory(&self) -> Result<DeviceMemory, String>;
}

/// The reason why no snapshot could be taken.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// A counter that every kernel with `/proc` has could not be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's message.
        source: std::io::Error,
    },
    /// A counter's file was read, but has an unexpected text.
    #[error("{}: expected {expected}, got {got}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The expected text.
        expected: &'static str,
        /// The found text.
        got: String,
    },
    /// Neither `/proc` nor the operating system's own interface reports the memory.
    #[error("this system does not report its memory")]
    Unsupported,
}

/// Reads the machine: `/proc` and control groups if they exist. Otherwise it uses the operating system's own interface: system calls on
/// Linux, `sysinfo` on other systems.
///
/// Control groups of version 1 and 2 are read, also mounted side by side, over the whole hierarchy from the process's own group to the
/// root. The level that leaves the least memory decides.
#[derive(Debug)]
pub struct SystemProbe {
    /// `/`, or a fixture tree that looks like one.
    root: PathBuf,
    /// The largest resident set seen, for systems that do not record it.
    peak_seen: AtomicU64,
    /// The probe of the device that computes, unless that is the CPU.
    device: Option<Arc<dyn DeviceProbe>>,
}

impl SystemProbe {
    /// A probe of this machine.
    pub fn new() -> Self {
        Self::with_root("/")
    }

    /// A probe that finds `proc` and every mounted hierarchy below `root` instead of `/`.
    pub fn with_root(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), peak_seen: AtomicU64::new(0), device: None }
    }

    /// The same probe, which also reads the memory of the NVIDIA card of this index. Without driver or card its snapshots have no device
    /// memory; [`SystemProbe::device_memory`] returns the reason.
    #[must_use]
    pub fn with_card(self, index: u32) -> Self {
        self.with_device(Arc::new(nvml::Card::new(index)))
    }

    /// The same probe, which also reads the memory of the device that computes.
    #[must_use]
    pub fn with_device(self, device: Arc<dyn DeviceProbe>) -> Self {
        Self { device: Some(device), ..self }
    }

    /// The device's memory, or the reason why nothing is known of it; `None` if the probe has no device.
    pub fn device_memory(&self) -> Option<Result<DeviceMemory, String>> {
        self.device.as_ref().map(|device| device.memory())
    }

    /// The page faults of this process so far; `None` if the system does not count them.
    pub fn page_faults(&self) -> Option<PageFaults> {
        faults::page_faults(&self.root.join("proc"))
    }

    /// The larger of this resident set and all earlier ones.
    fn peak_with(&self, rss: Bytes) -> Bytes {
        Bytes(self.peak_seen.fetch_max(rss.0, Ordering::Relaxed).max(rss.0))
    }
}

impl Default for SystemProbe {
    fn default() -> Self {
        Self::new()
    }
}

impl Probe for SystemProbe {
    fn snapshot(&self) -> Result<MemorySnapshot, ProbeError> {
        let proc = self.root.join("proc");
        let mut now = if proc.join("meminfo").exists() {
            procfs::snapshot(&proc)?
        } else if self.root == Path::new("/") {
            from_system().ok_or(ProbeError::Unsupported)?
        } else {
            return Err(ProbeError::Unsupported);
        };
        now.peak_rss = now.peak_rss.max(self.peak_with(now.rss));
        let groups = cgroup::read(&self.root);
        now.group = groups.tightest;
        now.group_pressure = groups.pressure;
        now.traffic.group_reclaims = groups.reclaims;
        now.device = self.device_memory().and_then(Result::ok);
        Ok(now)
    }
}

/// A snapshot of Linux without a mounted `/proc`. Files in memory count as used. The resident set is the largest one so far, because no
/// system call returns the current one.
#[cfg(target_os = "linux")]
fn from_system() -> Option<MemorySnapshot> {
    use nix::sys::resource::{UsageWho, getrusage};

    let machine = nix::sys::sysinfo::sysinfo().ok()?;
    let own = getrusage(UsageWho::RUSAGE_SELF).ok()?;
    let peak_rss = Bytes::kib(u64::try_from(own.max_rss()).ok()?);
    Some(MemorySnapshot {
        total: Bytes(machine.ram_total()),
        available: Bytes(machine.ram_unused()),
        swap_total: Bytes(machine.swap_total()),
        swap_used: Bytes(machine.swap_total().saturating_sub(machine.swap_free())),
        rss: peak_rss,
        peak_rss,
        ..Default::default()
    })
}

/// A snapshot of a system without `/proc`. Such systems have no control groups and no `VmHWM`.
#[cfg(not(any(target_os = "linux", target_family = "wasm")))]
fn from_system() -> Option<MemorySnapshot> {
    use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};

    let mut system = System::new().ok()?;
    system.refresh_memory();
    let own = sysinfo::get_current_pid().ok()?;
    let memory_only = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[own]), false, memory_only);
    let rss = Bytes(system.process(own)?.memory());
    Some(MemorySnapshot {
        total: Bytes(system.total_memory()),
        available: Bytes(system.available_memory()),
        swap_total: Bytes(system.total_swap()),
        swap_used: Bytes(system.used_swap()),
        rss,
        peak_rss: rss,
        ..Default::default()
    })
}

/// WebAssembly has no system to ask.
#[cfg(target_family = "wasm")]
fn from_system() -> Option<MemorySnapshot> {
    None
}

/// Plays snapshots back in order and repeats the last one for ever.
#[derive(Debug)]
pub struct ScriptedProbe {
    script: Vec<MemorySnapshot>,
    next: AtomicUsize,
    /// Measures the process's own counters, if they are not scripted.
    process: Option<SystemProbe>,
}

impl ScriptedProbe {
    /// A probe that returns these snapshots, one for each call.
    ///
    /// # Panics
    ///
    /// When there are none.
    pub fn new(script: Vec<MemorySnapshot>) -> Self {
        assert!(!script.is_empty(), "a scripted probe needs a snapshot to repeat");
        Self { script, next: AtomicUsize::new(0), process: None }
    }

    /// The same probe with the process's own counters measured: this process on another machine.
    ///
    /// # Panics
    ///
    /// When there are no snapshots.
    pub fn around_this_process(script: Vec<MemorySnapshot>) -> Self {
        Self { process: Some(SystemProbe::new()), ..Self::new(script) }
    }
}

impl Probe for ScriptedProbe {
    fn snapshot(&self) -> Result<MemorySnapshot, ProbeError> {
        let next = self.next.fetch_add(1, Ordering::Relaxed).min(self.script.len() - 1);
        let scripted = self.script[next].clone();
        let Some(process) = &self.process else { return Ok(scripted) };
        let measured = process.snapshot()?;
        Ok(MemorySnapshot { rss: measured.rss, peak_rss: measured.peak_rss, swapped: measured.swapped, ..scripted })
    }
}
