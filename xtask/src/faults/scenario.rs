//! A scenario: a run for faults to be injected into, its undisturbed result, and its file operations.

use std::fs;
use std::path::{Path, PathBuf};

use super::lab::{self, Lab, Outcome, RUN};
use super::process::{self, Faults, Ran};
use super::promises::{self, ReferenceRun};

/// A few small steps that save each time, prune, evaluate and export. One thread: the N-th operation is always the same.
const SETTINGS: &[&str] = &[
    "train.batch_size=6",
    "train.dropout=0.1",
    "train.eval_samples=4",
    "train.eval_generate_samples=1",
    "train.eval_max_new_tokens=2",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=1",
    "memory.micro_batch_samples=4",
    "memory.decode_threads=1",
    "memory.prefetch_batches=1",
];

/// Everything that can be offloaded to disk is.
const ON_DISK: &[&str] = &[
    "memory.accumulation=layer-major",
    "memory.activation_offload=disk",
    "memory.blocks_in_memory=0",
    "memory.gradient_offload=disk",
    "memory.weight_offload=disk",
];

/// The preset `tiny`, made smaller. The file operations are the same.
const SMALL: &str = "model.overrides={num_layers=1,num_decoder_layers=1,d_model=16,d_ff=32,d_kv=8,num_heads=2}";

/// Number of steps of a run.
const STEPS: u64 = 3;

/// Another thread reads these rows, so the order of its operations relative to the run's is not fixed.
const READ_BY_THE_LOADER: &str = "sample-train.parquet";

/// A run that faults are injected into.
pub struct Scenario {
    /// The name, such as `fresh`.
    pub name: &'static str,
    /// Arguments of the run.
    pub arguments: Vec<String>,
    /// Arguments of the resumed run after a fault.
    pub resume_arguments: Vec<String>,
    /// The state before the run.
    template: Option<PathBuf>,
    /// The run without a fault.
    pub whole: ReferenceRun,
    /// The undisturbed run's file operations, in order.
    pub points: Vec<Point>,
}

/// A file operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// The operation's number, from 1.
    pub number: u64,
    /// The system call.
    pub call: String,
    /// The path relative to the try's directory; for a rename both paths.
    pub path: String,
    /// Bytes or flags.
    pub detail: u64,
}

impl Point {
    /// Whether half of the operation can be performed.
    pub fn is_write(&self) -> bool {
        matches!(self.call.as_str(), "write" | "pwrite") && self.detail > 1
    }

    /// Whether the operation changes the disk, or the part of it that survives a power cut.
    pub fn is_change(&self) -> bool {
        const O_CREAT: u64 = 0o100;
        let is_made = self.call.starts_with("open") && self.detail & O_CREAT != 0;
        let calls = ["write", "pwrite", "ftruncate", "truncate", "fallocate", "link", "symlink", "creat"];
        is_made || self.is_turning() || calls.contains(&self.call.as_str())
    }

    /// Whether the order of changes on the disk depends on the operation: rename, removal, sync, new directory or lock.
    pub fn is_turning(&self) -> bool {
        ["rename", "unlink", "rmdir", "fsync", "fdatasync", "mkdir", "flock"]
            .iter()
            .any(|call| self.call.starts_with(call))
    }

    /// A name for the table.
    pub fn name(&self) -> String {
        format!("{} {} {}", self.number, self.call, self.path)
    }
}

/// The names of all scenarios.
pub const NAMES: [&str; 5] = ["fresh", "resumed", "on disk", "finished", "dry run"];

impl Scenario {
    /// Makes a scenario: runs it undisturbed, twice, to find its operations.
    ///
    /// # Errors
    ///
    /// The undisturbed run fails, or the two runs make different operations.
    pub fn new(lab: &Lab, name: &'static str, is_small: bool) -> Result<Self, String> {
        let mut settings: Vec<&str> = SETTINGS.to_vec();
        if is_small {
            settings.push(SMALL);
        }
        if name == "on disk" {
            settings.extend(ON_DISK);
        }
        let mut arguments = words(&["--memory-budget", "200MiB", "--output", RUN, "--max-steps"]);
        arguments.push(STEPS.to_string());
        arguments.extend(settings.iter().flat_map(|setting| words(&["--set", setting])));
        let mut resume_arguments = [arguments.clone(), words(&["--keep-training"])].concat();
        let file_name = name.replace(' ', "-");
        let mut template = None;
        match name {
            "resumed" => {
                let directory = lab.directory(&format!("template-{file_name}"))?;
                // Killed before the second save is renamed: this leaves one checkpoint, and an unfinished run.
                let renamed = format!("calls=rename,renameat,renameat2\nonly=step-{:08}\nfrom=1\ndo=kill-before", 2);
                let faults = lab.faults(format!("under={}\n{renamed}", directory.display()));
                let ran = run(lab, &arguments, &directory, Some(&faults))?;
                if promises::acknowledged(&ran.out) != Some(1) {
                    return Err(format!("{name}: expected a run that was killed after step 1: {}", ran.ending()));
                }
                template = Some(directory);
                arguments.clone_from(&resume_arguments);
            }
            "finished" => {
                let directory = lab.directory(&format!("template-{file_name}"))?;
                succeed(name, &run(lab, &arguments, &directory, None)?)?;
                template = Some(directory);
                arguments.clone_from(&resume_arguments);
            }
            "dry run" => {
                arguments.push("--dry-run".to_string());
                resume_arguments.clone_from(&arguments);
            }
            _ => {}
        }
        let mut scenario = Scenario {
            name,
            arguments,
            resume_arguments,
            template,
            whole: ReferenceRun::default(),
            points: Vec::new(),
        };
        scenario.points = scenario.count(lab)?;
        let again = scenario.count(lab)?;
        if again.len() != scenario.points.len() {
            return Err(format!(
                "{name}: two undisturbed runs made {} and {} operations: `the N-th` means nothing",
                scenario.points.len(),
                again.len()
            ));
        }
        // Two threads write and read offloaded tensors: the order of operations may differ, their number may not.
        let is_ordered = name != "on disk";
        if let Some((a, b)) = scenario.points.iter().zip(&again).find(|(a, b)| is_ordered && a.call != b.call) {
            return Err(format!("{name}: two undisturbed runs part at `{}` and `{}`", a.name(), b.name()));
        }
        scenario.whole = ReferenceRun::read(&lab.directory_of(&format!("whole-{file_name}")))?;
        Ok(scenario)
    }

    /// Makes an undisturbed run, and returns its operations.
    fn count(&self, lab: &Lab) -> Result<Vec<Point>, String> {
        let directory = lab.directory(&format!("whole-{}", self.name.replace(' ', "-")))?;
        self.prepare(&directory)?;
        let trace = directory.with_extension("trace");
        let _ = fs::remove_file(&trace);
        let faults = lab.faults(format!("{}\ntrace={}", counted(&directory), trace.display()));
        succeed(self.name, &run(lab, &self.arguments, &directory, Some(&faults))?)?;
        let text = fs::read_to_string(&trace).map_err(|error| format!("{}: {error}", trace.display()))?;
        let points: Vec<Point> = text.lines().filter_map(|line| point(line, &directory)).collect();
        if points.is_empty() { Err(format!("{}: no operation was counted", self.name)) } else { Ok(points) }
    }

    /// Copies the state before the run into an empty directory.
    pub fn prepare(&self, directory: &Path) -> Result<(), String> {
        self.template.as_ref().map_or(Ok(()), |template| lab::copy(template, directory))
    }

    /// The arguments that continue the run in a directory: they start it if it was ended before it began.
    pub fn resume_arguments(&self, directory: &Path) -> &[String] {
        let has_begun = ["resolved.toml", "checkpoints"].iter().any(|name| directory.join(RUN).join(name).exists());
        if has_begun { &self.resume_arguments } else { &self.arguments }
    }

    /// Makes one run under faults and a resumed run without faults, and returns the promises that they broke.
    ///
    /// # Errors
    ///
    /// The harness itself failed.
    pub fn try_once(&self, lab: &Lab, directory: &Path, faults: &str) -> Outcome {
        let is_killed = faults.contains("do=kill");
        let faults = lab.faults(format!("{}\n{faults}", counted(directory)));
        self.try_under(lab, directory, &faults, is_killed).map(|(_, broken)| broken)
    }

    /// Like [`Scenario::try_once`] with unchanged faults; also returns the end of the run under faults.
    ///
    /// # Errors
    ///
    /// The harness itself failed.
    pub fn try_under(
        &self,
        lab: &Lab,
        directory: &Path,
        faults: &Faults,
        is_killed: bool,
    ) -> Result<(Ran, Vec<String>), String> {
        self.prepare(directory)?;
        let before = promises::whole_checkpoints(&directory.join(RUN));
        let ran = run(lab, &self.arguments, directory, Some(faults))?;
        let broken = self.judge(lab, directory, &ran, &before, is_killed)?;
        Ok((ran, broken))
    }

    /// Checks the state after a run with a fault, and that a resumed run reaches the same bytes.
    ///
    /// # Errors
    ///
    /// The harness itself failed.
    pub fn judge(&self, lab: &Lab, directory: &Path, ran: &Ran, before: &[u64], is_killed: bool) -> Outcome {
        let mut broken = promises::ended_well(ran, is_killed);
        let newest = promises::acknowledged(&ran.out).max(before.iter().copied().max());
        // A dry run removes its own checkpoint.
        if self.name != "dry run" {
            broken.extend(promises::nothing_lost(&directory.join(RUN), newest));
        }
        if ran.code == Some(0) {
            broken.extend(self.whole.same_model(directory));
        }
        let resumed = run(lab, self.resume_arguments(directory), directory, None)?;
        broken.extend(self.whole.resumed(&resumed, directory));
        Ok(broken)
    }
}

/// The lines of `FAULT_POINTS` that count the file operations of a run in this directory.
pub fn counted(directory: &Path) -> String {
    format!("under={}\nnot={READ_BY_THE_LOADER}", directory.display())
}

/// Runs the command to its end.
pub fn run(lab: &Lab, arguments: &[String], directory: &Path, faults: Option<&Faults>) -> Result<Ran, String> {
    process::start(&lab.program, arguments, directory, faults)?.end()
}

fn succeed(name: &str, ran: &Ran) -> Result<(), String> {
    if ran.code == Some(0) {
        return Ok(());
    }
    Err(format!("{name}: the undisturbed run ended with {}\n{}", ran.ending(), ran.err))
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

/// Parses a line of a trace.
fn point(line: &str, directory: &Path) -> Option<Point> {
    let mut words = line.split('\t');
    let number = words.next()?.parse().ok()?;
    let call = words.next()?.to_string();
    let base = format!("{}/", directory.display());
    let short = |path: &str| path.strip_prefix(&base).unwrap_or(path).to_string();
    let (first, second) = (short(words.next()?), short(words.next()?));
    let path = if second.is_empty() { first } else { format!("{first} {second}") };
    #[expect(clippy::cast_sign_loss, reason = "flags and lengths are printed as they lie in the register")]
    let detail = words.next()?.parse::<i64>().ok()? as u64;
    Some(Point { number, call, path, detail })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_trace_is_an_operation() {
        let line = "7\twrite\t/d/run/model/config.json\t\t625\t625\t";
        let expected = Point { number: 7, call: "write".into(), path: "run/model/config.json".into(), detail: 625 };
        assert_eq!(point(line, Path::new("/d")), Some(expected.clone()));
        assert!(expected.is_write() && !expected.is_turning());
        let renamed = point("8\trenameat\t/d/a\t/d/b\t-9187\t0\t", Path::new("/d")).unwrap();
        assert_eq!(renamed.path, "a b");
        assert!(renamed.is_turning());
        assert_eq!(point("no trace", Path::new("/d")), None);
    }
}
