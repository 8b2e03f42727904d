//! `/proc`: the host's memory, the process's own, and pressure. See proc_meminfo(5),
//! proc_pid_status(5) and the kernel's `accounting/psi`.

use std::fs;
use std::path::{Path, PathBuf};

use super::ProbeError;
use crate::{Bytes, MemorySnapshot, Pressure, Traffic};

/// The readings of `meminfo`, `self/status` and `pressure/memory` below `proc`.
pub(super) fn snapshot(proc: &Path) -> Result<MemorySnapshot, ProbeError> {
    let meminfo = Fields::read(proc.join("meminfo"))?;
    let status = Fields::read(proc.join("self/status"))?;
    let swap_total = meminfo.get("SwapTotal")?.unwrap_or_default();
    let rss = status.get("VmRSS")?.unwrap_or_default();
    Ok(MemorySnapshot {
        total: meminfo.required("MemTotal", "a line `MemTotal: N kB`")?,
        available: available(&meminfo)?,
        swap_total,
        swap_used: swap_total.saturating_sub(meminfo.get("SwapFree")?.unwrap_or_default()),
        rss,
        peak_rss: status.get("VmHWM")?.unwrap_or(rss),
        swapped: status.get("VmSwap")?.unwrap_or_default(),
        pressure: pressure(&proc.join("pressure/memory")),
        traffic: swap_traffic(&proc.join("vmstat")),
        ..Default::default()
    })
}

/// Pages that the host has moved to and from swap; zero if the kernel does not report them.
fn swap_traffic(path: &Path) -> Traffic {
    let text = fs::read_to_string(path).unwrap_or_default();
    let counter = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
    };
    Traffic { swapped_out: counter("pswpout"), swapped_in: counter("pswpin"), group_reclaims: 0 }
}

/// `MemAvailable`; on kernels before 3.14 and in sandboxes without it, free and cached memory.
fn available(meminfo: &Fields) -> Result<Bytes, ProbeError> {
    if let Some(available) = meminfo.get("MemAvailable")? {
        return Ok(available);
    }
    let free = meminfo.required("MemFree", "a line `MemAvailable: N kB` or `MemFree: N kB`")?;
    Ok(free + meminfo.get("Cached")?.unwrap_or_default() + meminfo.get("Buffers")?.unwrap_or_default())
}

/// Pressure stall information of the host or of a control group; `None` if the kernel has none.
///
/// A missing and an unreadable file are treated alike: pressure is an early warning, and no decision requires it.
pub(super) fn pressure(path: &Path) -> Option<Pressure> {
    let text = fs::read_to_string(path).ok()?;
    let percent_of_ten_seconds = |kind: &str| -> Option<f64> {
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(kind))?;
        line.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
    };
    let some_percent = percent_of_ten_seconds("some")?;
    Some(Pressure { some_percent, full_percent: percent_of_ten_seconds("full").unwrap_or(0.0) })
}

/// A file of lines `Name:   123 kB`.
struct Fields {
    path: PathBuf,
    text: String,
}

impl Fields {
    fn read(path: PathBuf) -> Result<Self, ProbeError> {
        // Lossy, because the process's own name in `status` may not be UTF-8.
        match fs::read(&path) {
            Ok(bytes) => Ok(Self { text: String::from_utf8_lossy(&bytes).into_owned(), path }),
            Err(source) => Err(ProbeError::Unreadable { path, source }),
        }
    }

    fn get(&self, name: &str) -> Result<Option<Bytes>, ProbeError> {
        let line = self.text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let Some(value) = line.map(str::trim) else {
            return Ok(None);
        };
        let kib = value.strip_suffix("kB").and_then(|number| number.trim().parse().ok());
        match kib {
            Some(kib) => Ok(Some(Bytes::kib(kib))),
            None => Err(ProbeError::Malformed {
                path: self.path.clone(),
                expected: "a number of kB",
                got: format!("`{name}: {value}`"),
            }),
        }
    }

    fn required(&self, name: &str, expected: &'static str) -> Result<Bytes, ProbeError> {
        let missing = || ProbeError::Malformed { path: self.path.clone(), expected, got: "none".to_string() };
        self.get(name)?.ok_or_else(missing)
    }
}
