//! Several runs on one machine: `train --wait` starts when other runs leave enough memory, card memory and disk space for its plan.
//!
//! The ledger is one file with a line for each waiting or running run: its process, and the bytes that it reserves. There is no daemon.
//! Each process that reads the ledger holds its lock, and removes the lines of processes that have ended.
//!
//! Invariants:
//! * A run reserves the bytes of its plan, including headroom, before it loads anything. Memory that another run has reserved
//!   but not allocated is not available. The ledger does not know how much of a GPU another process holds, so all bytes that other runs
//!   reserved on it are not available.
//! * Runs start in the order of their arrival. A later run starts first only if the earlier ones do not fit.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use durable_files::Directory;
use memory_policy::{Bytes, DeviceMemory, Limit, MemorySnapshot, Probe, ProbeError};
use planner::{Costs, Plan};
use run_plan::pace::DiskNeed;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Outcome};
use crate::files::disk::{existing_ancestor, free_bytes};
use crate::screen::stop::{self, Stop};

/// A longer ledger is invalid.
const MAX_BYTES: u64 = 16 << 20;
/// The longest that another process may use the ledger at a time.
const LOCK_LIMIT: Duration = Duration::from_secs(10);
/// The time between two checks of a waiting run.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The time for which a run relies on its last view of the other runs.
const FRESH: Duration = Duration::from_secs(1);

/// Levels of directories below a run's whose files count. A run has two.
const LEVELS: u32 = 4;

/// A run in the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Its process id. The start time is needed too, because ids are reused.
    pub pid: u32,
    started: u64,
    /// Its place in the order of arrival.
    number: u64,
    /// Seconds since 1970 at its arrival.
    pub arrived: u64,
    /// Its output directory.
    pub output: PathBuf,
    /// Bytes that it reserves; for a waiting run, the least that it needs.
    pub bytes: u64,
    /// The card that it computes on, and the bytes that it reserves there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<(String, u64)>,
    /// Its reservation on a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<OnDisk>,
    /// Whether it is still waiting.
    pub waits: bool,
    /// Whether it waits for memory. Later runs then leave the memory to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    waits_for_memory: bool,
}

/// Space on a disk that a run reserves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnDisk {
    /// The number of the file system.
    device: u64,
    /// Bytes of files in place of memory, which are removed with the run.
    files: u64,
    /// Bytes of checkpoints and the model, which stay.
    kept: u64,
}

impl OnDisk {
    /// The space for a run that writes to this directory; `None` if the system does not identify the disk.
    fn new(need: &DiskNeed, directory: &Path) -> Option<Self> {
        let metadata = existing_ancestor(directory).metadata().ok()?;
        Some(Self { device: metadata.dev(), files: need.files, kept: need.checkpoints.saturating_add(need.model) })
    }

    /// The sum.
    pub fn bytes(&self) -> u64 {
        self.files.saturating_add(self.kept)
    }

    /// The needed and the remaining space, if the disk, with `free` bytes free, has too little beside these other runs. `None` if the space
    /// is enough, or if it would not be enough even after they end.
    fn waits_beside(&self, others: &[Line], free: Bytes) -> Option<Resource> {
        let running = others.iter().filter(|line| !line.waits);
        let on_disk = running.filter_map(|line| Some((line, line.disk.as_ref()?)));
        let on_this = on_disk.filter(|(_, disk)| disk.device == self.device);
        let (mut left, mut later) = (free, Bytes::ZERO);
        for (line, disk) in on_this {
            left = left.saturating_sub(Bytes(disk.bytes().saturating_sub(written_below(&line.output))));
            later += Bytes(disk.files);
        }
        let needed = Bytes(self.bytes());
        (needed > left && needed <= left + later).then_some(Resource::Disk(needed, left))
    }
}

/// The needs of a run.
pub struct Needs<'a> {
    /// The machine that it is planned for.
    pub machine: &'a dyn Probe,
    /// The plans to choose from.
    pub costs: &'a Costs,
    /// Their limits.
    pub budgets: memory_policy::Budgets,
    /// The name of the card that it computes on; `None` for the CPU.
    pub card: Option<String>,
    /// The disk space of a plan.
    pub disk: &'a dyn Fn(&MemorySnapshot, &Plan) -> Outcome<DiskNeed>,
}

/// Whether a run can start beside the others.
struct Fit {
    /// The machine without the memory of the others.
    left: MemorySnapshot,
    /// Host memory of the plan, or the least that would be enough.
    memory: Bytes,
    card: Option<(String, u64)>,
    disk: Option<OnDisk>,
    /// The resource that the others must free first. `None` if the run starts, or if planning will report the problem.
    waits_for: Option<Resource>,
}

/// A resource of the machine: the needed bytes, and the remaining bytes.
enum Resource {
    Memory(Bytes, Bytes),
    Card(Bytes, Bytes),
    Disk(Bytes, Bytes),
}

impl Resource {
    fn in_words(&self) -> String {
        let (what, needed, left) = match self {
            Self::Memory(needed, left) => ("memory", needed, left),
            Self::Card(needed, left) => ("memory of the GPU", needed, left),
            Self::Disk(needed, left) => ("disk space", needed, left),
        };
        format!("waiting for {what}: {needed} needed, {left} left by other runs")
    }
}

/// The disk space of one way to carry out a step.
type Known = (planner::Step, DiskNeed);

/// The result of a check beside other runs.
enum Found {
    Fit(Box<Fit>),
    /// A plan whose disk space must be computed first, and the machine without the memory of the others.
    Unknown(Box<(MemorySnapshot, Plan)>),
}

impl Needs<'_> {
    /// Checks whether the run fits beside these others.
    fn beside(&self, now: &MemorySnapshot, others: &[Line], output: &Path, known: Option<&Known>) -> Found {
        let left = beside(now, others, self.card.as_deref());
        let mut fit = Fit { left, memory: Bytes::ZERO, card: None, disk: None, waits_for: None };
        let plan = match memory_policy::plan(&fit.left, self.costs, self.budgets) {
            Ok(plan) => plan,
            Err(refusal) => {
                fit.memory = refusal.smallest_plan.required();
                // Without a budget of its own, a run has a share of the remaining memory. A run that does not fit even alone does not wait:
                // planning reports the reason.
                let alone = alone(now, others, self.card.as_deref());
                let fits_alone = || memory_policy::plan(&alone, self.costs, self.budgets).is_ok();
                if matches!(refusal.limited_by, Limit::DeviceAvailable | Limit::DeviceBudget) {
                    let left = fit.left.device.as_ref().map(DeviceMemory::ceiling).unwrap_or_default();
                    fit.waits_for = fits_alone().then_some(Resource::Card(refusal.smallest_budget, left));
                } else if refusal.limited_by == Limit::Available || fits_alone() {
                    fit.waits_for = Some(Resource::Memory(fit.memory, fit.left.ceiling()));
                }
                return Found::Fit(Box::new(fit));
            }
        };
        let Some((_, disk)) = known.filter(|(step, _)| *step == plan.step) else {
            return Found::Unknown(Box::new((fit.left, plan)));
        };
        fit.memory = plan.required();
        fit.card = on_card(self.card.as_deref(), &plan);
        fit.disk = OnDisk::new(disk, output);
        fit.waits_for =
            fit.disk.as_ref().zip(free_bytes(output)).and_then(|(disk, free)| disk.waits_beside(others, free));
        Found::Fit(Box::new(fit))
    }
}

/// Bytes of the files below a directory, as far as they are readable.
fn written_below(directory: &Path) -> u64 {
    Directory::open(directory).map_or(0, |directory| directory.written_bytes(LEVELS))
}

/// The ledger file.
#[derive(Clone, Debug)]
pub struct Ledger {
    directory: Directory,
}

impl Ledger {
    /// The ledger of this user.
    ///
    /// # Errors
    /// The directory cannot be made, or another user can write to it.
    pub fn of_this_user() -> Outcome<Self> {
        let user = rustix::process::geteuid().as_raw();
        // `sudo` may hand on the directory of another user.
        let is_of_this_user = |path: &OsString| Directory::open(path.as_ref()).is_ok_and(|found| found.is_guarded());
        Self::in_directory(&match std::env::var_os("XDG_RUNTIME_DIR").filter(is_of_this_user) {
            Some(directory) => Path::new(&directory).join("train_low_mem"),
            None => std::env::temp_dir().join(format!("train_low_mem-{user}")),
        })
    }

    fn in_directory(directory: &Path) -> Outcome<Self> {
        Ok(Self { directory: Directory::private(directory)? })
    }

    /// The runs, in the order of their arrival.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn lines(&self) -> Outcome<Vec<Line>> {
        self.change(|lines| lines.clone())
    }

    /// Calls `f` with the lines under the lock, without those of processes that have ended. Writes the lines again if `f` changes them.
    fn change<T>(&self, f: impl FnOnce(&mut Vec<Line>) -> T) -> Outcome<T> {
        let (name, path) = (OsStr::new("ledger.json"), self.directory.path().join("ledger.json"));
        let failed = |error: std::io::Error| Failure::io("use the ledger of runs", &path, &error);
        let lock = self.directory.append(OsStr::new("lock")).map_err(failed)?;
        durable_files::lock_within(&lock, &self.directory.path().join("lock"), LOCK_LIMIT)?;
        let before: Vec<Line> = match self.directory.read(name, MAX_BYTES) {
            // A damaged ledger is started again: every living run writes its line again.
            Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        let mut lines = before.clone();
        lines.retain(|line| started(line.pid) == Some(line.started));
        let result = f(&mut lines);
        if lines != before {
            let text = serde_json::to_vec(&lines).map_err(|error| Failure::internal(error.to_string()))?;
            self.directory.write_atomic(name, &text)?;
        }
        // Unlocked explicitly: a child that another thread is starting also has the open file, until it executes another program.
        let _ = lock.unlock();
        Ok(result)
    }

    /// Waits until a plan of these choices fits beside the other runs, and reserves its bytes. Returns the memory that remains for this
    /// run, and its line. If nothing fits the budget, this returns too, and planning reports the reason.
    ///
    /// # Errors
    /// The ledger cannot be used, or a signal came.
    pub fn admit(
        &self,
        output: &Path,
        needs: &Needs<'_>,
        stop: &Stop,
        say: &dyn Fn(&str),
    ) -> Outcome<(MemorySnapshot, Reservation)> {
        let pid = std::process::id();
        let output = std::path::absolute(output).unwrap_or_else(|_| output.to_owned());
        let arrived = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let (ledger, card, seen) = (self.clone(), needs.card.clone(), Seen::default());
        let reserved = Reservation { ledger, pid, output: output.clone(), card, seen };
        let (mut has_said, mut known) = (false, None);
        loop {
            let now = needs.machine.snapshot()?;
            let found = self.change(|lines| {
                let number = lines.iter().map(|line| line.number.saturating_add(1)).max().unwrap_or(0);
                let mine = Line {
                    pid,
                    started: started(pid).unwrap_or(0),
                    number,
                    arrived,
                    output: output.clone(),
                    bytes: 0,
                    card: None,
                    disk: None,
                    waits: true,
                    waits_for_memory: false,
                };
                let mut mine = lines.iter().find(|line| line.pid == pid).cloned().unwrap_or(mine);
                let others: Vec<Line> = lines.iter().filter(|line| line.pid != pid).cloned().collect();
                let mut fit = match needs.beside(&now, &others, &output, known.as_ref()) {
                    Found::Fit(fit) => *fit,
                    Found::Unknown(plan) => return Err(plan),
                };
                *lines = others;
                let free = fit.left.ceiling();
                // A run that waits for another card or for a disk does not hold back others from memory.
                let goes_first = |line: &&Line| line.waits && line.number < mine.number && line.bytes <= free.0;
                let before = lines.iter().filter(|line| line.waits && line.number < mine.number).count();
                let mut before_for_memory = lines.iter().filter(|line| line.waits_for_memory);
                if fit.waits_for.is_none() && before_for_memory.any(|line| goes_first(&line)) {
                    fit.waits_for = Some(Resource::Memory(fit.memory, free));
                }
                (mine.bytes, mine.card, mine.disk) = (fit.memory.0, fit.card.clone(), fit.disk.clone());
                mine.waits = fit.waits_for.is_some();
                mine.waits_for_memory = matches!(fit.waits_for, Some(Resource::Memory(..)));
                lines.push(mine);
                lines.sort_by_key(|line| line.number);
                Ok((fit, before))
            })?;
            let (fit, before) = match found {
                Ok(found) => found,
                Err(plan) => {
                    // The computation takes a while, so it runs without the lock.
                    let (left, plan) = *plan;
                    known = Some((plan.step, (needs.disk)(&left, &plan)?));
                    continue;
                }
            };
            let Some(resource) = fit.waits_for else { return Ok((fit.left, reserved)) };
            if !has_said {
                has_said = true;
                let others = memory_policy::plural(before as u64, "run");
                say(&format!("{}; {others} before this one", resource.in_words()));
            }
            // The end of another run sends no signal, so this waits for a fixed time.
            let nobody = Mutex::new(());
            let held = nobody.lock().unwrap_or_else(PoisonError::into_inner);
            drop(Condvar::new().wait_timeout(held, POLL_INTERVAL));
            if stop.requested() {
                return Err(stop::nothing_to_save(None));
            }
        }
    }
}

/// The last view of the others: its time, the bytes that they have yet to take, and the bytes that they reserved on this run's card.
type Seen = Arc<Mutex<Option<(Instant, (u64, u64))>>>;

/// The line of this run. Dropping this value removes the line.
#[derive(Debug)]
pub struct Reservation {
    ledger: Ledger,
    pid: u32,
    output: PathBuf,
    card: Option<String>,
    seen: Seen,
}

impl Reservation {
    /// Reserves the bytes of another plan from here on: memory, card memory and disk space.
    ///
    /// # Errors
    /// The ledger cannot be used.
    pub fn set(&self, plan: &Plan, disk: &DiskNeed) -> Outcome<()> {
        let disk = OnDisk::new(disk, &self.output);
        self.ledger.change(|lines| {
            for line in lines.iter_mut().filter(|line| line.pid == self.pid) {
                line.bytes = plan.required().0;
                line.card = on_card(self.card.as_deref(), plan);
                line.disk.clone_from(&disk);
            }
        })
    }

    /// A probe of the machine without the memory of the other runs.
    pub fn remaining_memory_probe(&self, machine: Box<dyn Probe>) -> Box<dyn Probe> {
        let (ledger, card, seen) = (self.ledger.clone(), self.card.clone(), Arc::clone(&self.seen));
        Box::new(RemainingMemoryProbe { machine, ledger, pid: self.pid, card, seen })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // If this fails, the next process that reads the ledger removes the line.
        let _ = self.ledger.change(|lines| lines.retain(|line| line.pid != self.pid));
    }
}

/// The memory of a machine without the bytes that other runs have reserved and do not hold yet.
struct RemainingMemoryProbe {
    machine: Box<dyn Probe>,
    ledger: Ledger,
    pid: u32,
    card: Option<String>,
    seen: Seen,
}

impl Probe for RemainingMemoryProbe {
    fn snapshot(&self) -> Result<MemorySnapshot, ProbeError> {
        let now = self.machine.snapshot()?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = seen.filter(|(when, _)| when.elapsed() < FRESH);
        let (_, bytes) = *seen.insert(fresh.unwrap_or_else(|| {
            let lines = self.ledger.lines().unwrap_or_default();
            let others = || lines.iter().filter(|line| line.pid != self.pid);
            (Instant::now(), (outstanding(others()), reserved_on(others(), self.card.as_deref())))
        }));
        Ok(without(&now, bytes))
    }
}

/// The memory that remains beside other runs.
fn beside(now: &MemorySnapshot, others: &[Line], card: Option<&str>) -> MemorySnapshot {
    without(now, (outstanding(others.iter()), reserved_on(others.iter(), card)))
}

/// The memory that remains after the other runs have ended.
fn alone(now: &MemorySnapshot, others: &[Line], card: Option<&str>) -> MemorySnapshot {
    let held = Bytes(others.iter().map(|line| resident(line.pid)).sum());
    let on_card = Bytes(reserved_on(others.iter(), card));
    let device = now.device.clone().map(|device| {
        let free = (device.free + on_card).min(device.total.saturating_sub(device.used));
        DeviceMemory { free, ..device }
    });
    MemorySnapshot { available: now.available + held, device, ..now.clone() }
}

/// The machine without `bytes` of memory, and with at least `on_card` bytes of the card taken.
fn without(now: &MemorySnapshot, (bytes, on_card): (u64, u64)) -> MemorySnapshot {
    let left = now.ceiling().saturating_sub(now.rss).saturating_sub(Bytes(bytes));
    let device = now.device.clone().map(|device| {
        let unreserved = device.total.saturating_sub(device.used).saturating_sub(Bytes(on_card));
        DeviceMemory { free: device.free.min(unreserved), ..device }
    });
    MemorySnapshot { available: left, device, ..now.clone() }
}

/// The card of a plan, and the bytes that the plan reserves on it.
fn on_card(card: Option<&str>, plan: &Plan) -> Option<(String, u64)> {
    let peak = plan.predicted_device_peak;
    card.filter(|_| peak > Bytes::ZERO).map(|card| (card.to_owned(), (peak + memory_policy::headroom(peak)).0))
}

/// Bytes that runs have reserved on a card, held or not.
fn reserved_on<'a>(lines: impl Iterator<Item = &'a Line>, card: Option<&str>) -> u64 {
    let on_card = |line: &'a Line| line.card.as_ref().filter(|(name, _)| !line.waits && Some(name.as_str()) == card);
    lines.filter_map(on_card).fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}

/// Bytes that runs have reserved and do not hold yet.
fn outstanding<'a>(lines: impl Iterator<Item = &'a Line>) -> u64 {
    let not_held = |line: &Line| line.bytes.saturating_sub(resident(line.pid));
    lines.filter(|line| !line.waits).fold(0, |sum, line| sum.saturating_add(not_held(line)))
}

/// The start time of a process, in ticks since the system started; `None` if there is no such process. A process that has ended counts as
/// none, even if its parent has not collected its exit code: the first process of a container may never do so.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program is in parentheses, and may contain any characters.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let has_ended = matches!(fields.next()?, "Z" | "X");
    fields.nth(18).filter(|_| !has_ended)?.parse().ok()
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
        let waits_for_memory = waits;
        Line {
            pid,
            started,
            number,
            arrived: 0,
            output: "run".into(),
            bytes,
            card: None,
            disk: None,
            waits,
            waits_for_memory,
        }
    }

    #[test]
    fn lines_of_processes_that_are_gone_are_swept() {
        let directory = tempfile::tempdir().unwrap();
        let ledger = Ledger::in_directory(directory.path()).unwrap();
        let mine = std::process::id();
        let gone = Line { started: 1, ..line(mine, 1, 7, false) };
        ledger.change(|lines| *lines = vec![line(mine, 0, 5, false), gone, line(u32::MAX, 2, 9, true)]).unwrap();
        assert_eq!(ledger.lines().unwrap(), [line(mine, 0, 5, false)]);
    }

    #[test]
    fn a_process_that_ended_and_that_nobody_asked_for_its_exit_code_is_gone() {
        let mut process = std::process::Command::new("sleep").arg("3600").spawn().unwrap();
        assert!(started(process.id()).is_some());
        process.kill().unwrap();
        let killed = Instant::now();
        while started(process.id()).is_some() {
            assert!(killed.elapsed() < Duration::from_secs(60), "a killed process is never gone");
            std::thread::yield_now();
        }
        process.wait().unwrap();
    }

    #[test]
    fn a_damaged_ledger_is_begun_again() {
        let directory = tempfile::tempdir().unwrap();
        let ledger = Ledger::in_directory(directory.path()).unwrap();
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
        assert!(resident(std::process::id()) > 0);
        // A process that holds little memory, and the same amount at each check.
        let mut other = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let (pid, held) = (other.id(), resident(other.id()));
        let others = [line(pid, 0, held + (1 << 30), false), line(pid, 1, 1 << 40, true)];
        let left = beside(&now, &others, None).ceiling();
        let expected = now.ceiling().saturating_sub(Bytes::gib(1));
        assert!(left.0.abs_diff(expected.0) < 64 << 20, "{left} of {}", now.ceiling());
        drop(other.stdin.take());
        other.wait().unwrap();
    }

    /// Plans of one way to carry out a step.
    fn costs() -> Costs {
        let step = memory_policy::Choice::new(planner::Step::default(), Vec::new(), 1.0);
        let feeding = memory_policy::Choice::new(planner::Feeding::default(), Vec::new(), 1.0);
        Costs { steps: vec![step], loaders: vec![feeding], ..Costs::default() }
    }

    #[test]
    fn disk_space_is_counted_while_others_may_use_the_ledger_and_follows_the_plan() {
        let directory = tempfile::tempdir().unwrap();
        let ledger = Ledger::in_directory(directory.path()).unwrap();
        let available = MemorySnapshot { total: Bytes::gib(8), available: Bytes::gib(8), ..MemorySnapshot::default() };
        let machine = memory_policy::ScriptedProbe::new(vec![available; 4]);
        let counted = std::cell::Cell::new(0);
        let disk = |_: &MemorySnapshot, _: &Plan| {
            counted.set(counted.get() + 1);
            let path = directory.path().join("lock");
            let lock = std::fs::File::open(&path).unwrap();
            durable_files::lock_within(&lock, &path, Duration::ZERO).expect("nobody holds the lock meanwhile");
            Ok(DiskNeed { files: 5, checkpoints: 7, model: 11 })
        };
        let budgets = memory_policy::Budget::Explicit(Bytes::gib(1)).into();
        let costs = costs();
        let needs = Needs { machine: &machine, costs: &costs, budgets, card: None, disk: &disk };
        let (left, reserved) = ledger.admit(&directory.path().join("run"), &needs, &Stop::default(), &|_| ()).unwrap();
        let on_disk = || ledger.lines().unwrap()[0].disk.as_ref().map(|disk| (disk.files, disk.kept));
        assert_eq!((counted.get(), on_disk()), (1, Some((5, 18))));
        let plan = memory_policy::plan(&left, &costs, budgets).unwrap();
        reserved.set(&plan, &DiskNeed { files: 0, checkpoints: 7, model: 11 }).unwrap();
        assert_eq!(on_disk(), Some((0, 18)));
        drop(reserved);
        assert_eq!(ledger.lines().unwrap(), []);
    }

    #[test]
    fn a_card_is_left_what_others_have_not_reserved_of_it() {
        let card = DeviceMemory {
            total: Bytes::gib(24),
            free: Bytes::gib(23),
            used: Bytes::gib(1),
            ..DeviceMemory::default()
        };
        let now = MemorySnapshot { available: Bytes::gib(4), device: Some(card), ..MemorySnapshot::default() };
        let me = std::process::id();
        let on = |card: &str, waits: bool| Line { card: Some((card.into(), 10 << 30)), ..line(me, 0, 0, waits) };
        let left = |others: &[Line], card: Option<&str>| beside(&now, others, card).device.map(|device| device.free);
        let others = [on("0", false), on("1", false), on("0", true)];
        assert_eq!(left(&others, Some("0")), Some(Bytes::gib(13)));
        assert_eq!(left(&others, None), Some(Bytes::gib(23)));
        // Memory of a process without a line in the ledger is visible only to the driver.
        assert_eq!(alone(&now, &others, Some("0")).device.map(|device| device.free), Some(Bytes::gib(23)));
    }

    #[test]
    fn lines_of_a_version_that_knew_memory_alone_are_read() {
        let text = r#"[{"pid":1,"started":2,"number":3,"arrived":4,"output":"run","bytes":5,"waits":false}]"#;
        let lines: Vec<Line> = serde_json::from_str(text).unwrap();
        assert_eq!((lines[0].bytes, &lines[0].card, &lines[0].disk), (5, &None, &None));
    }
}
