//! A hard limit of memory around processes that this one starts: a control group of their own where the system allows one, else a limit
//! of resources (RLIMIT_DATA).
//!
//! A control group counts every page of its processes, page cache too, and the kernel ends a process that needs one more. RLIMIT_DATA counts
//! what a process may write, touched or not, so it leaves room for stacks and reserves: it catches a process that has lost all measure.
//!
//! Invariant: this process is in the group only while it starts a child. So it is not limited itself, and no shell has to stand between.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::Bytes;
use crate::probe::own_groups;

/// What RLIMIT_DATA allows beyond the limit: stacks of threads and reserves of the allocator, which are counted untouched.
#[cfg(target_os = "linux")]
const RESERVES: Bytes = Bytes(1 << 30);

/// The longest wait for a group to be empty: a killed process leaves it a moment after it was waited for.
const EMPTY_WITHIN: Duration = Duration::from_secs(2);

/// A limit around processes.
#[derive(Debug)]
pub struct Enclosure {
    limit: Bytes,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// The group of the children, and the group of this process.
    Group {
        group: PathBuf,
        home: PathBuf,
    },
    Resource,
}

impl Enclosure {
    /// A limit of this many bytes; `name` is the last part of a group's name, and free for the caller's use.
    pub fn new(limit: Bytes, name: &str) -> Self {
        let kind = group(Path::new("/"), limit, name).unwrap_or(Kind::Resource);
        Self { limit, kind }
    }

    /// Starts a process within the limit.
    ///
    /// # Errors
    /// It cannot be started, or this process cannot enter or leave the group.
    pub fn start(&self, command: &mut Command) -> io::Result<Child> {
        match &self.kind {
            Kind::Group { group, home } => {
                let id = std::process::id().to_string();
                fs::write(group.join("cgroup.procs"), &id)?;
                let child = command.spawn();
                fs::write(home.join("cgroup.procs"), &id)?;
                child
            }
            Kind::Resource => with_resource_limit(self.limit, || command.spawn()),
        }
    }

    /// What limits the processes, in words.
    pub fn in_words(&self) -> String {
        let limit = self.limit;
        match &self.kind {
            Kind::Group { .. } => format!("a control group of {limit}, page cache included"),
            #[cfg(target_os = "linux")]
            Kind::Resource => {
                let allowed = Bytes(limit.0 + RESERVES.0);
                format!(
                    "RLIMIT_DATA of {allowed}, untouched reserves included, because no control group is allowed here"
                )
            }
            #[cfg(not(target_os = "linux"))]
            Kind::Resource => "nothing but the program itself: this system has no control groups".to_owned(),
        }
    }
}

impl Drop for Enclosure {
    fn drop(&mut self) {
        let Kind::Group { group, .. } = &self.kind else { return };
        let began = Instant::now();
        while fs::remove_dir(group).is_err() && began.elapsed() < EMPTY_WITHIN {
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }
}

/// Makes a group with this limit below the process's own group, or beside it where version 2 allows no group below one with processes.
fn group(root: &Path, limit: Bytes, name: &str) -> Option<Kind> {
    own_groups(root).into_iter().find_map(|(home, file)| {
        [Some(home.as_path()), home.parent()].into_iter().flatten().find_map(|parent| {
            let group = parent.join(format!("train-low-mem-{}-{name}", std::process::id()));
            fs::create_dir(&group).ok()?;
            let is_limited = fs::write(group.join(file), limit.0.to_string()).is_ok();
            if !is_limited || !is_open(&group) {
                let _ = fs::remove_dir(&group);
                return None;
            }
            Some(Kind::Group { group, home: home.clone() })
        })
    })
}

/// Whether this process may add processes to the group: the file can be opened to write.
fn is_open(group: &Path) -> bool {
    fs::OpenOptions::new().write(true).open(group.join("cgroup.procs")).is_ok()
}

/// Calls `start` with a soft limit that the process it starts inherits.
#[cfg(target_os = "linux")]
fn with_resource_limit<T>(limit: Bytes, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    let (soft, hard) = getrlimit(Resource::RLIMIT_DATA)?;
    setrlimit(Resource::RLIMIT_DATA, soft.min(limit.0 + RESERVES.0), hard)?;
    let started = start();
    setrlimit(Resource::RLIMIT_DATA, soft, hard)?;
    started
}

#[cfg(not(target_os = "linux"))]
fn with_resource_limit<T>(_: Bytes, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    start()
}

/// The largest resident set of a process so far (`VmHWM`); `None` once it has ended, or without `/proc`.
pub fn peak_of(process: u32) -> Option<Bytes> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(Bytes::kib(line.trim().strip_suffix("kB")?.trim().parse().ok()?))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_started_process_has_the_limit_and_this_one_keeps_its_own() {
        use nix::sys::resource::{Resource, getrlimit};

        let before = getrlimit(Resource::RLIMIT_DATA).unwrap();
        let enclosure = Enclosure { limit: Bytes(64 << 20), kind: Kind::Resource };
        let mut shell = Command::new("sh");
        shell.args(["-c", "test $(ulimit -d) -le 1114112"]);
        assert!(enclosure.start(&mut shell).unwrap().wait().unwrap().success());
        assert_eq!(getrlimit(Resource::RLIMIT_DATA).unwrap(), before);
        assert!(enclosure.in_words().starts_with("RLIMIT_DATA of 1.06 GiB"), "{}", enclosure.in_words());
    }

    /// Where the system allows a group: a process that fills its memory is ended, and one that does not is not.
    #[test]
    fn a_group_ends_the_process_that_exceeds_it_and_is_removed() {
        let enclosure = Enclosure::new(Bytes(64 << 20), "test");
        let Kind::Group { group, home } = &enclosure.kind else { return };
        let (group, home) = (group.clone(), home.clone());
        // `dd` holds one block of the given size.
        let dd = |mib: u32| {
            let mut dd = Command::new("dd");
            dd.args(["if=/dev/zero", "of=/dev/null", "count=1", &format!("bs={mib}M"), "status=none"]);
            enclosure.start(&mut dd).unwrap().wait().unwrap().success()
        };
        assert!(dd(16));
        assert!(!dd(256));
        let procs = fs::read_to_string(home.join("cgroup.procs")).unwrap();
        assert!(procs.lines().any(|id| id == std::process::id().to_string()));
        drop(enclosure);
        assert!(!group.exists());
    }

    #[test]
    fn the_peak_of_a_living_process_is_read_and_that_of_none_is_not() {
        assert!(peak_of(std::process::id()).unwrap() > Bytes(1 << 20));
        assert_eq!(peak_of(u32::MAX), None);
    }
}
