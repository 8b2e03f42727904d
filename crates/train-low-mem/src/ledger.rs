//! Runs beside each other: `train --wait` starts when the memory that its plan needs is left by the others.
//!
//! The ledger is one file, where each waiting or running run has a line: its process, and the bytes that it reserves. There is no
//! daemon. Whoever looks at the ledger holds its lock and removes the lines of processes that are gone.
//!
//! Invariants:
//! * A run reserves the bytes of its plan, its headroom included, before it loads anything. Reserved bytes that others do not
//!   hold yet count as taken.
//! * Runs start in the order of their arrival. A later one goes first only where the earlier ones do not fit.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use memory_policy::{Bytes, Limit, MemorySnapshot, Probe, ProbeError};
use planner::Costs;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Outcome};
use crate::stop::{self, Stop};

/// A longer ledger is none.
const MAX_BYTES: u64 = 16 << 20;
/// Between two looks of a run that waits.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a run relies on what it saw of the others.
const FRESH: Duration = Duration::from_secs(1);

/// A run in the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Its process, and when that started: a number may be given again.
    pub pid: u32,
    started: u64,
    /// Place in the order of arrival.
    number: u64,
    /// Seconds since 1970 at its arrival.
    pub arrived: u64,
    /// Its output directory.
    pub output: PathBuf,
    /// Bytes that it reserves; of one that waits, those that it needs at least.
    pub bytes: u64,
    /// Whether it still waits.
    pub waits: bool,
}

/// The file.
#[derive(Clone, Debug)]
pub struct Ledger {
    directory: PathBuf,
}

impl Ledger {
    /// That of this user.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn of_this_user() -> Outcome<Self> {
        let user = rustix::process::getuid().as_raw();
        let directory = match std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| Path::new(directory).is_dir()) {
            Some(directory) => Path::new(&directory).join("train_low_mem"),
            None => std::env::temp_dir().join(format!("train_low_mem-{user}")),
        };
        Self::in_directory(directory)
    }

    fn in_directory(directory: PathBuf) -> Outcome<Self> {
        std::fs::create_dir_all(&directory).map_err(|error| Failure::io("create it", &directory, &error))?;
        Ok(Self { directory })
    }

    /// The runs, in the order of their arrival.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn lines(&self) -> Outcome<Vec<Line>> {
        self.change(|lines| lines.clone())
    }

    /// Looks at the lines under the lock, without those of processes that are gone, and writes them again where `f` changes them.
    fn change<T>(&self, f: impl FnOnce(&mut Vec<Line>) -> T) -> Outcome<T> {
        let path = self.directory.join("ledger.json");
        let failed = |error: std::io::Error| Failure::io("use the ledger of runs", &path, &error);
        let lock = File::options().write(true).create(true).truncate(false).open(self.directory.join("lock"));
        let lock = lock.map_err(failed)?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
        let before: Vec<Line> = match regular_file::read(&path, MAX_BYTES) {
            // One that is damaged is begun again: every run that lives writes its line again.
            Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        let mut lines = before.clone();
        lines.retain(|line| started(line.pid) == Some(line.started));
        let result = f(&mut lines);
        if lines != before {
            let text = serde_json::to_vec(&lines).map_err(|error| Failure::internal(error.to_string()))?;
            trainer::write_atomic(&path, &text)?;
        }
        Ok(result)
    }

    /// Waits until a plan of these choices fits beside the other runs, and reserves its bytes. Returns the memory that is left to this
    /// run, and its line. A budget that nothing fits is left to whoever plans.
    ///
    /// # Errors
    /// The ledger cannot be used; a signal came.
    pub fn admit(
        &self,
        output: &Path,
        (machine, costs, budgets): (&dyn Probe, &Costs, memory_policy::Budgets),
        stop: &Stop,
        say: &dyn Fn(&str),
    ) -> Outcome<(MemorySnapshot, Reserved)> {
        let pid = std::process::id();
        let output = std::path::absolute(output).unwrap_or_else(|_| output.to_owned());
        let arrived = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let reserved = Reserved { ledger: self.clone(), pid, seen: Seen::default() };
        let mut has_said = false;
        loop {
            let now = machine.snapshot()?;
            let (left, needed, is_admitted, before) = self.change(|lines| {
                let number = lines.iter().map(|line| line.number + 1).max().unwrap_or(0);
                let mine = Line {
                    pid,
                    started: started(pid).unwrap_or(0),
                    number,
                    arrived,
                    output: output.clone(),
                    bytes: 0,
                    waits: true,
                };
                let mut mine = lines.iter().find(|line| line.pid == pid).cloned().unwrap_or(mine);
                lines.retain(|line| line.pid != pid);
                let left = beside(&now, lines);
                let (needed, fits) = match memory_policy::plan(&left, costs, budgets) {
                    Ok(plan) => (plan.required(), true),
                    Err(refusal) => {
                        // Without a budget of its own a run has a share of the memory that is left.
                        let fits_alone = || memory_policy::plan(&alone(&now, lines), costs, budgets).is_ok();
                        let waits = refusal.limited_by == Limit::Available || fits_alone();
                        (refusal.smallest_budget, !waits)
                    }
                };
                let free = left.ceiling();
                let goes_first = |line: &&Line| line.waits && line.number < mine.number && line.bytes <= free.0;
                let before = lines.iter().filter(|line| line.waits && line.number < mine.number).count();
                let is_admitted = fits && lines.iter().find(goes_first).is_none();
                (mine.bytes, mine.waits) = (needed.0, !is_admitted);
                lines.push(mine);
                lines.sort_by_key(|line| line.number);
                (left, needed, is_admitted, before)
            })?;
            if is_admitted {
                return Ok((left, reserved));
            }
            if !has_said {
                has_said = true;
                let others = memory_policy::plural(before as u64, "run");
                say(&format!(
                    "waiting for memory: {needed} needed, {} left by other runs; {others} before this one",
                    left.ceiling()
                ));
            }
            // The end of another run gives no sign.
            let nobody = Mutex::new(());
            let held = nobody.lock().unwrap_or_else(PoisonError::into_inner);
            drop(Condvar::new().wait_timeout(held, LOOK_EVERY));
            if stop.requested() {
                return Err(stop::nothing_to_save(None));
            }
        }
    }
}

/// When the others were looked at, and the bytes that they have yet to take.
type Seen = Arc<Mutex<Option<(Instant, u64)>>>;

/// The line of this run; removed when it is dropped.
#[derive(Debug)]
pub struct Reserved {
    ledger: Ledger,
    pid: u32,
    seen: Seen,
}

impl Reserved {
    /// Another plan: so many bytes are reserved from here on.
    ///
    /// # Errors
    /// The ledger cannot be used.
    pub fn set(&self, bytes: Bytes) -> Outcome<()> {
        self.ledger.change(|lines| {
            lines.iter_mut().filter(|line| line.pid == self.pid).for_each(|line| line.bytes = bytes.0);
        })
    }

    /// The machine as it is left to this run by the others.
    pub fn left_of(&self, machine: Box<dyn Probe>) -> Box<dyn Probe> {
        Box::new(Left { machine, ledger: self.ledger.clone(), pid: self.pid, seen: Arc::clone(&self.seen) })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // Whoever looks next would find the process gone.
        let _ = self.ledger.change(|lines| lines.retain(|line| line.pid != self.pid));
    }
}

/// The memory of a machine without what other runs have reserved and do not hold yet.
struct Left {
    machine: Box<dyn Probe>,
    ledger: Ledger,
    pid: u32,
    seen: Seen,
}

impl Probe for Left {
    fn snapshot(&self) -> Result<MemorySnapshot, ProbeError> {
        let now = self.machine.snapshot()?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = seen.filter(|(when, _)| when.elapsed() < FRESH);
        let (_, bytes) = *seen.insert(fresh.unwrap_or_else(|| {
            let lines = self.ledger.lines().unwrap_or_default();
            (Instant::now(), outstanding(lines.iter().filter(|line| line.pid != self.pid)))
        }));
        Ok(without(&now, bytes))
    }
}

/// The memory that is left beside other runs.
fn beside(now: &MemorySnapshot, others: &[Line]) -> MemorySnapshot {
    without(now, outstanding(others.iter()))
}

/// The memory that is left when the other runs are gone.
fn alone(now: &MemorySnapshot, others: &[Line]) -> MemorySnapshot {
    let held = Bytes(others.iter().map(|line| resident(line.pid)).sum());
    MemorySnapshot { available: now.available + held, ..now.clone() }
}

fn without(now: &MemorySnapshot, bytes: u64) -> MemorySnapshot {
    let left = now.ceiling().saturating_sub(now.rss).saturating_sub(Bytes(bytes));
    MemorySnapshot { available: left, ..now.clone() }
}

/// Bytes that runs have reserved and do not hold yet.
fn outstanding<'a>(lines: impl Iterator<Item = &'a Line>) -> u64 {
    lines.filter(|line| !line.waits).map(|line| line.bytes.saturating_sub(resident(line.pid))).sum()
}

/// When a process started, in ticks since the system did; none where there is no such process.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program is in brackets and may hold anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Bytes that a process holds in memory.
fn resident(pid: u32) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{pid}/statm"));
    let pages = pages.ok().and_then(|statm| statm.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(pid: u32, number: u64, bytes: u64, waits: bool) -> Line {
        let started = started(pid).unwrap_or(0);
        Line { pid, started, number, arrived: 0, output: PathBuf::from("run"), bytes, waits }
    }

    #[test]
    fn lines_of_processes_that_are_gone_are_swept() {
        let directory = tempfile::tempdir().unwrap();
        let ledger = Ledger::in_directory(directory.path().to_owned()).unwrap();
        let mine = std::process::id();
        let gone = Line { started: 1, ..line(mine, 1, 7, false) };
        ledger.change(|lines| *lines = vec![line(mine, 0, 5, false), gone, line(u32::MAX, 2, 9, true)]).unwrap();
        assert_eq!(ledger.lines().unwrap(), [line(mine, 0, 5, false)]);
    }

    #[test]
    fn a_damaged_ledger_is_begun_again() {
        let directory = tempfile::tempdir().unwrap();
        let ledger = Ledger::in_directory(directory.path().to_owned()).unwrap();
        std::fs::write(directory.path().join("ledger.json"), "[{").unwrap();
        assert_eq!(ledger.lines().unwrap(), []);
    }

    #[test]
    fn what_others_have_reserved_and_do_not_hold_counts_as_taken() {
        let now = MemorySnapshot {
            total: Bytes::gib(8),
            available: Bytes::gib(4),
            rss: Bytes::mib(10),
            ..MemorySnapshot::default()
        };
        let me = std::process::id();
        let held = resident(me);
        assert!(held > 0);
        let others = [line(me, 0, held + (1 << 30), false), line(me, 1, 1 << 40, true)];
        let left = beside(&now, &others).ceiling();
        let expected = now.ceiling().saturating_sub(Bytes::gib(1));
        assert!(left.0.abs_diff(expected.0) < 64 << 20, "{left} of {}", now.ceiling());
    }
}
