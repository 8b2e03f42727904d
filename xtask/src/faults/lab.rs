//! The environment of tries: the command, the library of fault points, a directory, and a journal of finished tries.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

use super::Options;
use super::process::Faults;
use super::table::{Row, Table};

const LIBRARY: &str = "libfault_points.so";

/// The run's directory, below the try's.
pub const RUN: &str = "run";

/// The environment of the tries.
pub struct Lab {
    /// The flags.
    pub options: Options,
    /// The command.
    pub program: PathBuf,
    root: PathBuf,
    preloaded: PathBuf,
    scratch: PathBuf,
    /// Earlier tries, with the promises that they broke.
    done: BTreeMap<String, Vec<String>>,
    journal: Option<Mutex<fs::File>>,
}

/// The promises that a try broke. An error is the harness's own, and ends it.
pub type Outcome = Result<Vec<String>, String>;

impl Lab {
    /// Builds the library, and makes an empty scratch directory.
    pub fn new(root: &Path, options: Options) -> Result<Self, String> {
        if !cfg!(target_os = "linux") {
            return Err("fault points need Linux".to_string());
        }
        let here = std::env::current_exe().map_err(|error| error.to_string())?;
        let program = options.program.clone().unwrap_or_else(|| here.with_file_name("train_low_mem"));
        if !program.is_file() {
            return Err(format!("{}: not built; `cargo build --release --workspace`", program.display()));
        }
        // Another user needs no library.
        if options.parts.iter().any(|part| part != "neighbours") {
            build_library(root)?;
        }
        let memory = Path::new("/dev/shm");
        let beside = if memory.is_dir() { memory } else { here.parent().unwrap_or(root) };
        let parent = options.scratch.clone().unwrap_or_else(|| beside.to_path_buf());
        let scratch = parent.join(format!("low-mem-t5-faults-{}", std::process::id()));
        let named = |error: std::io::Error| format!("{}: {error}", scratch.display());
        fs::create_dir_all(&scratch).map_err(named)?;
        // Fault points see paths as the kernel resolves them.
        let scratch = fs::canonicalize(&scratch).map_err(named)?;
        let (done, journal) = match &options.resume {
            None => (BTreeMap::new(), None),
            Some(path) => {
                let (done, file) = open_journal(path)?;
                (done, Some(Mutex::new(file)))
            }
        };
        let preloaded = here.with_file_name(LIBRARY);
        Ok(Self { root: root.to_path_buf(), options, program, preloaded, scratch, done, journal })
    }

    /// Faults for a run on one thread: the lines of `FAULT_POINTS`.
    pub fn faults(&self, program: impl Into<String>) -> Faults {
        Faults { preloaded: self.preloaded.clone(), program: program.into(), threads: 1 }
    }

    /// Makes an empty directory of this name.
    pub fn directory(&self, name: &str) -> Result<PathBuf, String> {
        let path = self.directory_of(name);
        empty(&path)?;
        Ok(path)
    }

    /// A file of the sample data.
    pub fn sample(&self, name: &str) -> PathBuf {
        self.root.join("data").join(name)
    }

    /// The tokenizer of the sample data.
    pub fn tokenizer(&self) -> PathBuf {
        self.sample("sample-tokenizer.json")
    }

    /// The path of the directory that [`Lab::directory`] makes for this name.
    pub fn directory_of(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// Whether a row of this name was requested.
    pub fn is_asked_for(&self, fault: &str) -> bool {
        fault.contains(&self.options.only)
    }

    /// Makes tries, each in an empty directory, and adds their row. A try has a name that reproduces it.
    ///
    /// # Errors
    ///
    /// The harness itself failed.
    pub fn try_all<T: Sync>(
        &self,
        table: &mut Table,
        fault: &str,
        tries: &[(String, T)],
        notes: Vec<String>,
        make: impl Fn(&T, &Path) -> Outcome + Sync,
    ) -> Result<(), String> {
        if let Some(mut row) = self.made(fault, tries, make)? {
            row.notes.splice(0..0, notes);
            table.add(row);
        }
        Ok(())
    }

    /// Like [`Lab::try_all`], for tries that repeat an action and count it: `250 kills`.
    ///
    /// # Errors
    ///
    /// The harness itself failed.
    pub fn try_counted<T: Sync>(
        &self,
        table: &mut Table,
        fault: &str,
        tries: &[(String, T)],
        (count, of): (&AtomicUsize, &str),
        make: impl Fn(&T, &Path) -> Outcome + Sync,
    ) -> Result<(), String> {
        if let Some(mut row) = self.made(fault, tries, make)? {
            row.notes.push(format!("{} {of}", count.load(Ordering::Relaxed)));
            table.add(row);
        }
        Ok(())
    }

    /// Makes the row of these tries, if it was requested.
    fn made<T: Sync>(
        &self,
        fault: &str,
        tries: &[(String, T)],
        make: impl Fn(&T, &Path) -> Outcome + Sync,
    ) -> Result<Option<Row>, String> {
        if !self.is_asked_for(fault) {
            return Ok(None);
        }
        let began = Instant::now();
        let chosen = spread(tries, self.options.tries);
        let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = |worker: usize| -> Result<(), String> {
            while let Some((name, what)) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                let id = format!("{fault}: {name}");
                let broken = match self.done.get(&id) {
                    Some(broken) => broken.clone(),
                    None => {
                        let directory = self.directory(&format!("worker-{worker}"))?;
                        let broken = make(what, &directory)?;
                        self.note(&id, &broken)?;
                        broken
                    }
                };
                if !broken.is_empty() {
                    failed.lock().expect("no try panics").push((name.clone(), broken));
                }
            }
            Ok(())
        };
        let work = &work;
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.options.jobs).map(|worker| scope.spawn(move || work(worker))).collect();
            workers.into_iter().try_for_each(|worker| worker.join().expect("no try panics"))
        })?;
        let mut failed = failed.into_inner().expect("no try panics");
        failed.sort();
        let mut notes = Vec::new();
        if chosen.len() < tries.len() {
            notes.push(format!("{} of {}", chosen.len(), tries.len()));
        }
        let seconds = began.elapsed().as_secs_f64();
        Ok(Some(Row { fault: fault.to_string(), tries: chosen.len(), failed, notes, seconds }))
    }

    fn note(&self, id: &str, broken: &[String]) -> Result<(), String> {
        let Some(journal) = &self.journal else { return Ok(()) };
        let line = format!("{}\n", json!({"try": id, "broken": broken}));
        journal.lock().expect("no try panics").write_all(line.as_bytes()).map_err(|error| error.to_string())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

/// At most `most` of these, evenly spread and including the first.
pub fn spread<T>(all: &[T], most: Option<usize>) -> Vec<&T> {
    let count = most.unwrap_or(all.len()).min(all.len());
    (0..count).map(|at| &all[at * all.len() / count]).collect()
}

fn build_library(root: &Path) -> Result<(), String> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(root).args(["build", "--quiet", "--release", "--locked", "--package", "fault-points"]);
    let status = cargo.status().map_err(|error| format!("cargo: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo build ended with {status}")) }
}

/// Reads the tries of a journal, and opens it for more. A torn last line is left out.
fn open_journal(path: &Path) -> Result<(BTreeMap<String, Vec<String>>, fs::File), String> {
    let named = |error: std::io::Error| format!("{}: {error}", path.display());
    fs::create_dir_all(path.parent().unwrap_or(Path::new("."))).map_err(named)?;
    let text = fs::read_to_string(path).unwrap_or_default();
    let done = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).filter_map(|line| {
        let broken = line["broken"].as_array()?.iter().filter_map(|what| what.as_str().map(str::to_string));
        Some((line["try"].as_str()?.to_string(), broken.collect()))
    });
    let mut file = fs::OpenOptions::new().create(true).append(true).open(path).map_err(named)?;
    if !text.is_empty() && !text.ends_with('\n') {
        file.write_all(b"\n").map_err(named)?;
    }
    Ok((done.collect(), file))
}

/// Makes an empty directory, and removes anything that was there.
pub fn empty(path: &Path) -> Result<(), String> {
    let named = |error: std::io::Error| format!("{}: {error}", path.display());
    if path.exists() {
        fs::remove_dir_all(path).map_err(named)?;
    }
    fs::create_dir_all(path).map_err(named)
}

/// Copies a directory with all its contents.
pub fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let named = |error: std::io::Error| format!("{}: {error}", from.display());
    fs::create_dir_all(to).map_err(named)?;
    for entry in fs::read_dir(from).map_err(named)? {
        let entry = entry.map_err(named)?;
        let target = to.join(entry.file_name());
        if entry.file_type().map_err(named)?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target).map_err(named)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_tries_is_spread_over_all_of_them() {
        let all: Vec<usize> = (0..10).collect();
        assert_eq!(spread(&all, Some(3)), [&0, &3, &6]);
        assert_eq!(spread(&all, Some(20)).len(), 10);
        assert_eq!(spread(&all, None).len(), 10);
        assert!(spread(&all[..0], Some(3)).is_empty());
    }
}
