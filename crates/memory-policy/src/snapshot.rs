//! A memory snapshot: the memory of the machine, of the process's control groups and of the process itself at one instant. It is plain
//! data, so every decision made from it can be replayed.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, DeviceMemory};

/// Memory of the machine and of this process at one instant.
///
/// `Default` is an empty machine; tests set the fields that they need and take the rest from it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemorySnapshot {
    /// RAM of the host.
    pub total: Bytes,
    /// RAM that the host could give out without swapping: free memory, and caches that can be dropped.
    pub available: Bytes,
    /// Swap space of the host.
    pub swap_total: Bytes,
    /// Swap space of the host in use by any process.
    pub swap_used: Bytes,
    /// Resident set of this process.
    pub rss: Bytes,
    /// The largest resident set that this process has had.
    pub peak_rss: Bytes,
    /// Bytes of this process in swap.
    pub swapped: Bytes,
    /// The control group that leaves this process the least memory; `None` without a limit.
    pub group: Option<Group>,
    /// The memory of the device that computes, if it has its own and a probe finds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceMemory>,
    /// The share of time in which tasks wait for memory on the whole host; `None` if the kernel does not report it.
    pub pressure: Option<Pressure>,
    /// The same share for this process's own control group.
    pub group_pressure: Option<Pressure>,
    /// Counters of swap and control group since their start.
    pub traffic: Traffic,
}

/// Counters that only grow. Their growth between two snapshots is the traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Traffic {
    /// Pages that the host has written to swap.
    pub swapped_out: u64,
    /// Pages that the host has read from swap.
    pub swapped_in: u64,
    /// How often this process's control group reached its limit and had to reclaim memory.
    pub group_reclaims: u64,
}

/// A control group with a memory limit that contains this process, directly or through a child group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// The group's path inside its hierarchy: `/` or `/user.slice/user-1000.slice`.
    pub path: String,
    /// The limit of the group.
    pub limit: Bytes,
    /// Bytes in use, including page cache.
    pub used: Bytes,
    /// The bytes in use that the kernel could drop at once: page cache that no process has mapped.
    pub reclaimable: Bytes,
}

impl Group {
    /// Memory that the group can still take before it swaps or kills.
    pub fn available(&self) -> Bytes {
        self.limit.saturating_sub(self.used.saturating_sub(self.reclaimable))
    }
}

/// Pressure stall information: the share of wall time in which tasks waited for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pressure {
    /// Percent of the last ten seconds in which at least one task waited.
    pub some_percent: f64,
    /// Percent of the last ten seconds in which every task that could run waited.
    pub full_percent: f64,
}

impl MemorySnapshot {
    /// Memory that this process can still take: the minimum over the host and its groups.
    pub fn usable(&self) -> Bytes {
        match &self.group {
            Some(group) => self.available.min(group.available()),
            None => self.available,
        }
    }

    /// The most that this process could hold now: the memory that it holds, and the memory that it may still take.
    pub fn ceiling(&self) -> Bytes {
        self.rss + self.usable()
    }

    /// The source of [`usable`](Self::usable): `"host"` or `"cgroup"`.
    pub fn usable_is_set_by(&self) -> &'static str {
        match &self.group {
            Some(group) if group.available() < self.available => "cgroup",
            _ => "host",
        }
    }
}

/// One line for the log at a run's key moments.
///
/// `rss 412.0 MiB, peak 530.2 MiB; 6.21 GiB available (cgroup); swap 0 B of 2 GiB; pressure 0.4 %`
impl fmt::Display for MemorySnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} now, {} at most; ", self.rss, self.peak_rss)?;
        write!(f, "{} available ({})", self.usable(), self.usable_is_set_by())?;
        if let Some(device) = &self.device {
            write!(f, "; {} of {} held, {} free", device.used, device.name, device.free)?;
        }
        if self.swap_total > Bytes::ZERO {
            write!(f, "; swap {} of {}", self.swap_used, self.swap_total)?;
        }
        if self.swapped > Bytes::ZERO {
            write!(f, ", {} of it ours", self.swapped)?;
        }
        let worst = [self.pressure, self.group_pressure].into_iter().flatten().map(|p| p.some_percent);
        if let Some(percent) = worst.reduce(f64::max) {
            write!(f, "; waiting for memory {percent:.1} % of the time")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(limit: u64, used: u64, reclaimable: u64) -> Option<Group> {
        let [limit, used, reclaimable] = [limit, used, reclaimable].map(Bytes::mib);
        Some(Group { path: "/".into(), limit, used, reclaimable })
    }

    #[test]
    fn the_smaller_of_host_and_group_is_what_may_still_be_taken() {
        let check = |available: u64, group: Option<Group>, usable: u64, set_by: &str| {
            let now = MemorySnapshot { available: Bytes::mib(available), group, ..Default::default() };
            assert_eq!(now.usable(), Bytes::mib(usable));
            assert_eq!(now.usable_is_set_by(), set_by);
        };
        check(1000, None, 1000, "host");
        check(1000, group(600, 100, 0), 500, "cgroup");
        check(1000, group(600, 300, 250), 550, "cgroup");
        check(1000, group(6000, 100, 0), 1000, "host");
        check(1000, group(600, 700, 0), 0, "cgroup");
        check(1000, group(600, 100, 900), 600, "cgroup");
    }

    #[test]
    fn the_ceiling_counts_what_the_process_already_holds() {
        let now = MemorySnapshot {
            available: Bytes::gib(8),
            rss: Bytes::mib(300),
            group: group(1000, 400, 50),
            ..Default::default()
        };
        assert_eq!(now.ceiling(), Bytes::mib(950));
    }

    #[test]
    fn the_log_line_says_what_matters_and_leaves_out_what_is_not_there() {
        let mut now = MemorySnapshot {
            available: Bytes::gib(6),
            rss: Bytes::mib(412),
            peak_rss: Bytes::mib(530),
            ..Default::default()
        };
        assert_eq!(now.to_string(), "412 MiB now, 530 MiB at most; 6 GiB available (host)");
        now.group = group(1024, 600, 100);
        now.swap_total = Bytes::gib(2);
        now.swapped = Bytes::kib(12);
        now.swap_used = Bytes::mib(1);
        now.pressure = Some(Pressure { some_percent: 0.4, full_percent: 0.0 });
        now.group_pressure = Some(Pressure { some_percent: 12.25, full_percent: 3.0 });
        let line = "412 MiB now, 530 MiB at most; 524 MiB available (cgroup); \
                    swap 1 MiB of 2 GiB, 12 KiB of it ours; waiting for memory 12.2 % of the time";
        assert_eq!(now.to_string(), line);
    }

    #[test]
    fn a_snapshot_survives_json() {
        let now = MemorySnapshot { total: Bytes::gib(16), group: group(9, 3, 1), ..Default::default() };
        let json = serde_json::to_string(&now).unwrap();
        assert_eq!(serde_json::from_str::<MemorySnapshot>(&json).unwrap(), now);
    }
}
