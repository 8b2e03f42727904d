//! Probes over fixture trees: hosts and containers of every layout, built in a temporary directory.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::Group;

/// A directory that looks like a machine's root.
struct Machine(TempDir);

const V1_UNLIMITED: &str = "9223372036854771712\n";

impl Machine {
    /// 16 GiB of RAM, 8 of them available, 2 GiB of swap; a process of 100 MiB; no control groups.
    fn new() -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        let meminfo = "\
MemTotal:       16777216 kB
MemFree:         1048576 kB
MemAvailable:    8388608 kB
Buffers:           10240 kB
Cached:          2097152 kB
SwapTotal:       2097152 kB
SwapFree:        1572864 kB
HugePages_Total:       0
";
        let status = "\
Name:\ttrain_low_mem
Umask:\t0022
VmPeak:\t  999999 kB
VmHWM:\t  153600 kB
VmRSS:\t  102400 kB
VmSwap:\t    1024 kB
Threads:\t3
";
        machine.file("proc/meminfo", meminfo).file("proc/self/status", status)
    }

    fn file(self, path: &str, text: impl AsRef<[u8]>) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn v1_group(self, directory: &str, limit: &str, used_mib: u64, stat: &str) -> Self {
        let at = |name: &str| format!("sys/fs/cgroup/memory/{directory}/memory.{name}");
        self.file(&at("limit_in_bytes"), limit)
            .file(&at("usage_in_bytes"), format!("{}\n", used_mib << 20))
            .file(&at("stat"), stat)
    }

    fn v2_group(self, directory: &str, max: &str, used_mib: u64, stat: &str) -> Self {
        let at = |name: &str| format!("sys/fs/cgroup/{directory}/memory.{name}");
        self.file(&at("max"), max).file(&at("current"), format!("{}\n", used_mib << 20)).file(&at("stat"), stat)
    }

    fn snapshot(&self) -> MemorySnapshot {
        SystemProbe::with_root(self.0.path()).snapshot().unwrap()
    }

    fn group(&self) -> Option<(String, u64, u64)> {
        let Group { path, limit, .. } = self.snapshot().group?;
        Some((path, limit.0 >> 20, self.snapshot().group?.available().0 >> 20))
    }

    fn error(&self) -> String {
        let error = SystemProbe::with_root(self.0.path()).snapshot().unwrap_err();
        error.to_string().replace(&self.0.path().display().to_string(), "")
    }
}

fn mib(count: u64) -> String {
    format!("{}\n", count << 20)
}

const V1_MOUNT: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
const V2_MOUNT: &str = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const OTHER_MOUNTS: &str = "\
23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
malformed
";

#[test]
fn the_host_and_the_process_are_read_from_proc() {
    let now = Machine::new().file("proc/pressure/memory", PRESSURE).snapshot();
    let expected = MemorySnapshot {
        total: Bytes::gib(16),
        available: Bytes::gib(8),
        swap_total: Bytes::gib(2),
        swap_used: Bytes::mib(512),
        rss: Bytes::mib(100),
        peak_rss: Bytes::mib(150),
        swapped: Bytes::mib(1),
        group: None,
        device: None,
        pressure: Some(crate::Pressure { some_percent: 12.5, full_percent: 3.25 }),
        group_pressure: None,
        traffic: crate::Traffic::default(),
    };
    assert_eq!(now, expected);
}

const PRESSURE: &str = "\
some avg10=12.50 avg60=8.00 avg300=1.00 total=291430
full avg10=3.25 avg60=2.00 avg300=0.50 total=217350
";

#[test]
fn what_an_old_kernel_or_a_sandbox_leaves_out_is_made_up_for() {
    let machine = Machine::new()
        .file("proc/meminfo", "MemTotal: 4096 kB\nMemFree: 1000 kB\nCached: 500 kB\nBuffers: 24 kB\n")
        .file("proc/self/status", b"Name:\t\xff\xfe\nVmRSS:\t 300 kB\n");
    let now = machine.snapshot();
    assert_eq!((now.available, now.swap_total), (Bytes::kib(1524), Bytes::ZERO));
    assert_eq!((now.rss, now.peak_rss), (Bytes::kib(300), Bytes::kib(300)));

    // Without VmHWM the probe remembers the largest resident set that it has seen.
    let probe = SystemProbe::with_root(machine.0.path());
    probe.snapshot().unwrap();
    let _machine = machine.file("proc/self/status", "VmRSS:\t 200 kB\n");
    assert_eq!(probe.snapshot().unwrap().peak_rss, Bytes::kib(300));
}

#[test]
fn counters_that_say_nothing_are_errors_that_name_the_file() {
    let check = |machine: Machine, expected: &str| assert_eq!(machine.error(), expected);
    check(
        Machine::new().file("proc/meminfo", "MemTotal: many kB\nMemAvailable: 1 kB\n"),
        "/proc/meminfo: expected a number of kB, got `MemTotal: many kB`",
    );
    check(
        Machine::new().file("proc/meminfo", "MemTotal: 1 kB\n"),
        "/proc/meminfo: expected a line `MemAvailable: N kB` or `MemFree: N kB`, got none",
    );
    let machine = Machine::new();
    fs::remove_file(machine.0.path().join("proc/self/status")).unwrap();
    assert!(machine.error().starts_with("/proc/self/status: cannot be read: "), "{}", machine.error());
    let empty = Machine(tempfile::tempdir().unwrap());
    assert_eq!(empty.error(), "this system does not report its memory");
}

#[test]
fn a_v1_limit_counts_and_its_sentinel_does_not() {
    let stat = "cache 1\ntotal_inactive_file 104857600\ntotal_active_file 52428800\ntotal_mapped_file 10485760\n\
                hierarchical_memory_limit 9223372036854771712\n";
    let machine = |limit: &str| {
        Machine::new()
            .file("proc/self/cgroup", "9:name=systemd:/\n4:memory,hugetlb:/job\n1:cpu:/\n")
            .file("proc/self/mountinfo", [OTHER_MOUNTS, V1_MOUNT].concat())
            .v1_group("job", limit, 600, stat)
            .v1_group("", V1_UNLIMITED, 5000, "")
    };
    // 1000 - (600 - (100 + 50 - 10)): the kernel cannot drop mapped page cache.
    assert_eq!(machine(&mib(1000)).group(), Some(("/job".into(), 1000, 540)));
    assert_eq!(machine(V1_UNLIMITED).group(), None);
    assert_eq!(machine("not a number\n").group(), None);
    assert_eq!(machine(&mib(1000)).snapshot().usable(), Bytes::mib(540));
}

#[test]
fn a_v1_parent_that_is_out_of_sight_still_counts() {
    let machine = Machine::new()
        .file("proc/self/cgroup", "4:memory:/docker/abc\n")
        .file(
            "proc/self/mountinfo",
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n",
        )
        .v1_group("", V1_UNLIMITED, 100, "hierarchical_memory_limit 536870912\n");
    assert_eq!(machine.group(), Some(("/".into(), 512, 412)));
}

#[test]
fn a_v2_limit_counts_and_max_does_not() {
    let stat = "anon 1\nfile 2\ninactive_file 104857600\nactive_file 0\nfile_mapped 0\n";
    let machine = |max: &str| {
        Machine::new()
            .file("proc/self/cgroup", "0::/user.slice/run-1.scope\n")
            .file("proc/self/mountinfo", [OTHER_MOUNTS, V2_MOUNT].concat())
            .v2_group("user.slice/run-1.scope", max, 300, stat)
            .v2_group("user.slice", "max\n", 900, "")
            .file("sys/fs/cgroup/user.slice/run-1.scope/memory.pressure", PRESSURE)
    };
    assert_eq!(machine(&mib(1000)).group(), Some(("/user.slice/run-1.scope".into(), 1000, 800)));
    assert_eq!(machine("max\n").group(), None);
    assert_eq!(machine("max\n").snapshot().group_pressure.unwrap().some_percent, 12.5);
    let throttled = machine("max\n").file("sys/fs/cgroup/user.slice/run-1.scope/memory.high", mib(400));
    assert_eq!(throttled.group(), Some(("/user.slice/run-1.scope".into(), 400, 200)));
}

#[test]
fn the_level_that_leaves_the_least_wins_over_the_whole_hierarchy() {
    let machine = |outer: (u64, u64), middle: (u64, u64), own: (u64, u64)| {
        Machine::new()
            .file("proc/self/cgroup", "0::/a/b/c\n")
            .file("proc/self/mountinfo", V2_MOUNT)
            .v2_group("a", &mib(outer.0), outer.1, "")
            .v2_group("a/b", &mib(middle.0), middle.1, "")
            .v2_group("a/b/c", &mib(own.0), own.1, "")
    };
    let (roomy, limit) = ((4000, 100), (1000, 100));
    assert_eq!(machine(roomy, roomy, limit).group(), Some(("/a/b/c".into(), 1000, 900)));
    assert_eq!(machine(roomy, limit, roomy).group(), Some(("/a/b".into(), 1000, 900)));
    assert_eq!(machine(limit, roomy, roomy).group(), Some(("/a".into(), 1000, 900)));
    // A larger limit, nearly used up by siblings, leaves less than a smaller one.
    assert_eq!(machine((4000, 3900), limit, roomy).group(), Some(("/a".into(), 4000, 100)));
    // The group is over its limit already: zero is left, without an underflow.
    assert_eq!(machine(roomy, roomy, (1000, 1100)).group(), Some(("/a/b/c".into(), 1000, 0)));
}

#[test]
fn hybrid_hosts_are_read_in_both_versions() {
    let hybrid = |v1: &str, v2: &str| {
        let unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        Machine::new()
            .file("proc/self/cgroup", "4:memory:/job\n0::/job\n")
            .file("proc/self/mountinfo", [V1_MOUNT, unified, OTHER_MOUNTS].concat())
            .v1_group("job", v1, 100, "")
            .v2_group("unified/job", v2, 100, "")
    };
    assert_eq!(hybrid(&mib(700), "max\n").group(), Some(("/job".into(), 700, 600)));
    assert_eq!(hybrid(V1_UNLIMITED, &mib(800)).group(), Some(("/job".into(), 800, 700)));
    assert_eq!(hybrid(&mib(900), &mib(800)).group(), Some(("/job".into(), 800, 700)));
    assert_eq!(hybrid(V1_UNLIMITED, "max\n").group(), None);
}

#[test]
fn a_container_sees_its_own_group_at_the_mount() {
    // With a namespace the group is `/` (or outside the mount). Without one, the mount shows a part.
    let check = |cgroup: &str, mount: &str| {
        let machine = Machine::new().file("proc/self/cgroup", cgroup).file("proc/self/mountinfo", mount).v2_group(
            "",
            &mib(2048),
            48,
            "",
        );
        assert_eq!(machine.group(), Some(("/".into(), 2048, 2000)), "{cgroup} {mount}");
    };
    check("0::/\n", V2_MOUNT);
    check("0::/../../elsewhere\n", V2_MOUNT);
    check("0::/docker/abc\n", "31 23 0:28 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
    check("0::/docker/abcdef\n", "31 23 0:28 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
}

#[test]
fn mount_points_with_escaped_characters_are_found() {
    let machine = Machine::new()
        .file("proc/self/cgroup", "0::/job\n")
        .file("proc/self/mountinfo", "31 23 0:28 / /my\\040groups rw - cgroup2 cgroup2 rw\n")
        .file("my groups/job/memory.max", mib(64))
        .file("my groups/job/memory.current", mib(4));
    assert_eq!(machine.group(), Some(("/job".into(), 64, 60)));
}

#[test]
fn hierarchies_without_a_mount_or_without_files_are_no_limit() {
    let bare = Machine::new().file("proc/self/cgroup", "0::/job\n4:memory:/job\nnonsense\n");
    assert_eq!(bare.file("proc/self/mountinfo", OTHER_MOUNTS).group(), None);
    let empty = Machine::new().file("proc/self/cgroup", "0::/job\n4:memory:/job\n");
    assert_eq!(empty.file("proc/self/mountinfo", [V1_MOUNT, V2_MOUNT].concat()).group(), None);
    assert_eq!(Machine::new().file("proc/self/cgroup", "0::/job\n").group(), None);
}

#[test]
fn this_machine_can_be_read() {
    let now = SystemProbe::new().snapshot().unwrap();
    assert!(now.total > Bytes::ZERO && now.available <= now.total, "{now:?}");
    assert!(now.rss > Bytes::ZERO && now.peak_rss >= now.rss, "{now:?}");
    assert!(now.ceiling() > now.rss, "{now:?}");
}

#[test]
fn the_operating_systems_own_interface_agrees_with_proc() {
    let (proc, other) = (SystemProbe::new().snapshot().unwrap(), from_system().unwrap());
    assert_eq!(other.total, proc.total);
    assert!(other.rss > Bytes::ZERO && other.available > Bytes::ZERO, "{other:?}");
}

#[test]
fn a_scripted_probe_plays_its_script_and_repeats_the_end() {
    let at = |mib: u64| MemorySnapshot { available: Bytes::mib(mib), ..Default::default() };
    let probe = ScriptedProbe::new(vec![at(100), at(50), at(75)]);
    let seen: Vec<_> = (0..5).map(|_| probe.snapshot().unwrap().available.0 >> 20).collect();
    assert_eq!(seen, [100, 50, 75, 75, 75]);
}

#[test]
fn swap_traffic_and_the_times_that_a_group_met_its_limit_are_counted() {
    let vmstat = "nr_free_pages 12\npswpin 7\npswpout 41\npswpout_not 3\n";
    let host = Machine::new().file("proc/vmstat", vmstat);
    assert_eq!(host.snapshot().traffic, crate::Traffic { swapped_out: 41, swapped_in: 7, group_reclaims: 0 });
    let events = "low 0\nhigh 4\nmax 5\noom 0\noom_kill 0\n";
    let v2 = Machine::new()
        .file("proc/self/cgroup", "0::/\n")
        .file("proc/self/mountinfo", "30 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
        .file("sys/fs/cgroup/memory.events", events);
    assert_eq!(v2.snapshot().traffic.group_reclaims, 9);
    let v1 = Machine::new()
        .file("proc/self/cgroup", "4:memory:/\n")
        .file("proc/self/mountinfo", "30 1 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
        .file("sys/fs/cgroup/memory/memory.failcnt", "12\n");
    assert_eq!(v1.snapshot().traffic.group_reclaims, 12);
}
