//! Checks the promises of a run from outside: from its output and the files in its directory.
//!
//! The checks use no code of the command: they read manifests again themselves to verify checkpoints.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::lab::RUN;
use super::process::Ran;

/// The documented exit codes.
const DOCUMENTED: [i32; 7] = [0, 1, 2, 3, 4, 5, 75];
const SIGKILL: i32 = 9;
const MODEL: &str = "model/model.safetensors";
const CHECKPOINTS: &str = "checkpoints";
/// Files made from `metrics.jsonl`; `train_low_mem report` can make the page again.
const VIEWS: [&str; 2] = ["report.html", "events.out.tfevents.0.train_low_mem"];
/// Texts that indicate an internal error.
const PANICS: [&str; 3] = ["panicked at", "internal error:", "this is a bug"];

/// The result of an undisturbed run.
#[derive(Default)]
pub struct ReferenceRun {
    model: Option<Vec<u8>>,
    names: BTreeSet<String>,
}

impl ReferenceRun {
    /// Reads the names in the directory of an undisturbed run.
    pub fn read(directory: &Path) -> Result<Self, String> {
        let names = names(directory)?;
        Ok(Self { model: fs::read(directory.join(RUN).join(MODEL)).ok(), names })
    }

    /// Checks that the model equals that of an undisturbed run, byte for byte.
    pub fn same_model(&self, directory: &Path) -> Vec<String> {
        let Some(expected) = &self.model else { return Vec::new() };
        match fs::read(directory.join(RUN).join(MODEL)) {
            Ok(model) if model == *expected => Vec::new(),
            Ok(_) => vec!["the model has other bytes".to_string()],
            Err(error) => vec![format!("exit 0, and no model: {error}")],
        }
    }

    /// Checks that a run resumed without faults ended like an undisturbed run: same bytes, no files left behind.
    pub fn resumed(&self, ran: &Ran, directory: &Path) -> Vec<String> {
        if ran.code != Some(0) {
            return vec![format!("does not go on: {}: {}", ran.ending(), ran.first_error_line())];
        }
        let mut broken = self.same_model(directory);
        match names(directory) {
            Ok(names) => {
                // An additional checkpoint does no harm: the run that would have pruned it had a fault.
                let is_more = |name: &&String| !name.starts_with(&format!("{RUN}/{CHECKPOINTS}/step-"));
                let left: Vec<&String> = names.difference(&self.names).filter(is_more).collect();
                // A run that cannot write a view of its metrics warns, and continues without it.
                let is_promised = |name: &&String| !VIEWS.iter().any(|view| **name == format!("{RUN}/{view}"));
                let missing: Vec<&String> = self.names.difference(&names).filter(is_promised).collect();
                broken.extend(left.first().map(|name| format!("left behind: {name} (of {})", left.len())));
                broken.extend(missing.first().map(|name| format!("missing: {name} (of {})", missing.len())));
            }
            Err(error) => broken.push(error),
        }
        broken.extend(torn_metrics(&directory.join(RUN).join("metrics.jsonl")));
        broken
    }
}

/// The newest step that the run reported as saved.
pub fn acknowledged(out: &str) -> Option<u64> {
    let said = out.lines().filter_map(|line| line.strip_prefix("saved "));
    said.filter_map(|line| step(line.split(" (").next()?.rsplit('/').next()?)).max()
}

fn step(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// The steps of intact checkpoints; every file of them is read.
pub fn whole_checkpoints(run: &Path) -> Vec<u64> {
    let entries = fs::read_dir(run.join(CHECKPOINTS)).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let step = step(entry.file_name().to_str()?)?;
            is_whole(&entry.path()).then_some(step)
        })
        .collect()
}

/// Whether every file in the manifest exists, byte for byte.
fn is_whole(checkpoint: &Path) -> bool {
    let Ok(text) = fs::read(checkpoint.join("manifest.json")) else { return false };
    let Ok(manifest) = serde_json::from_slice::<Value>(&text) else { return false };
    let Some(files) = manifest["files"].as_array().filter(|files| !files.is_empty()) else { return false };
    files.iter().all(|file| {
        let bytes = file["name"].as_str().and_then(|name| fs::read(checkpoint.join(name)).ok());
        bytes.is_some_and(|bytes| file["sha256"].as_str() == Some(&hexadecimal(&Sha256::digest(bytes))))
    })
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks the end of a run: a documented exit code or the intended signal, and no panic.
pub fn ended_well(ran: &Ran, may_be_killed: bool) -> Vec<String> {
    let is_killed = may_be_killed && ran.signal == Some(SIGKILL);
    let is_documented = ran.code.is_some_and(|code| DOCUMENTED.contains(&code));
    let mut broken = Vec::new();
    if ran.hung || !is_killed && !is_documented {
        broken.push(ran.ending());
    }
    if PANICS.iter().any(|word| ran.err.contains(word)) {
        broken.push(format!("panic: {}", ran.first_error_line()));
    }
    if !is_killed && ran.code != Some(0) && !ran.err.lines().any(|line| line.starts_with("error: ")) {
        broken.push(format!("{} without a message", ran.ending()));
    }
    broken
}

/// Checks that the last acknowledged checkpoint, or a newer one, exists.
pub fn nothing_lost(run: &Path, newest_acknowledged: Option<u64>) -> Vec<String> {
    let Some(step) = newest_acknowledged else { return Vec::new() };
    let newest = whole_checkpoints(run).into_iter().max();
    if newest >= Some(step) {
        return Vec::new();
    }
    let found =
        newest.map_or("none is whole".to_string(), |newest| format!("the newest whole one is of step {newest}"));
    vec![format!("LOST: step {step} was saved, {found}")]
}

/// Finds a line that is not JSON, which would stop every reader of the file. The last line may be torn if it has no newline;
/// the next event then removes it.
fn torn_metrics(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let torn = whole.lines().position(|line| serde_json::from_str::<Value>(line).is_err())?;
    Some(format!("metrics.jsonl: line {} is torn", torn + 1))
}

/// Every file and directory below a directory, relative to it.
fn names(directory: &Path) -> Result<BTreeSet<String>, String> {
    let mut found = BTreeSet::new();
    let mut left = vec![directory.to_path_buf()];
    while let Some(path) = left.pop() {
        let entries = fs::read_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        for entry in entries.flatten() {
            let path = entry.path();
            let name = path.strip_prefix(directory).unwrap_or(&path);
            found.insert(name.to_string_lossy().into_owned());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(path);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run with an intact checkpoint of each step, in a directory of this test.
    fn run_with(name: &str, steps: &[u64]) -> std::path::PathBuf {
        let here = std::env::current_exe().expect("this program's path");
        let directory = here.with_file_name(format!("promises-{}-{name}", std::process::id()));
        for step in steps {
            let checkpoint = directory.join(RUN).join(CHECKPOINTS).join(format!("step-{step:08}"));
            fs::create_dir_all(&checkpoint).unwrap();
            fs::write(checkpoint.join("model.safetensors"), format!("weights of {step}")).unwrap();
            let sha256 = hexadecimal(&Sha256::digest(format!("weights of {step}")));
            let manifest = serde_json::json!({"format": 1, "files": [{"name": "model.safetensors", "sha256": sha256}]});
            fs::write(checkpoint.join("manifest.json"), manifest.to_string()).unwrap();
        }
        directory
    }

    #[test]
    fn the_newest_step_that_was_printed_as_saved_counts() {
        let out = "step 1/3\nsaved run/checkpoints/step-00000001 (1 MiB, 2 ms)\nsaved run/checkpoints/step-00000010 (1 MiB)\n";
        assert_eq!(acknowledged(out), Some(10));
        assert_eq!(acknowledged("memory after saving: rss\n"), None);
    }

    #[test]
    fn a_checkpoint_that_was_acknowledged_and_is_gone_is_lost() {
        let directory = run_with("gone", &[1, 2]);
        let run = directory.join(RUN);
        assert_eq!(nothing_lost(&run, Some(2)), [""; 0]);
        assert_eq!(nothing_lost(&run, None), [""; 0]);
        fs::remove_dir_all(run.join(CHECKPOINTS).join("step-00000002")).unwrap();
        assert_eq!(nothing_lost(&run, Some(2)), ["LOST: step 2 was saved, the newest whole one is of step 1"]);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_checkpoint_with_one_changed_byte_is_lost() {
        let directory = run_with("changed", &[1]);
        let run = directory.join(RUN);
        fs::write(run.join(CHECKPOINTS).join("step-00000001/model.safetensors"), "weights of 2").unwrap();
        assert_eq!(nothing_lost(&run, Some(1)), ["LOST: step 1 was saved, none is whole"]);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn other_bytes_leftovers_and_torn_lines_are_seen() {
        let directory = run_with("left", &[1]);
        let run = directory.join(RUN);
        fs::create_dir_all(run.join("model")).unwrap();
        fs::write(run.join(MODEL), "bytes").unwrap();
        fs::write(run.join("metrics.jsonl"), "{}\n").unwrap();
        let whole = ReferenceRun::read(&directory).unwrap();
        let done = Ran { code: Some(0), ..Ran::default() };
        assert_eq!(whole.resumed(&done, &directory), [""; 0]);
        fs::write(run.join(MODEL), "other").unwrap();
        fs::write(run.join("metrics.jsonl"), "{}\n{\"event\":\n{}\n{").unwrap();
        fs::write(run.join(".left"), "").unwrap();
        let expected = ["the model has other bytes", "left behind: run/.left (of 1)", "metrics.jsonl: line 2 is torn"];
        assert_eq!(whole.resumed(&done, &directory), expected);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn signals_panics_and_silence_are_no_good_end() {
        let ended = |code, signal, err: &str| Ran { code, signal, err: err.to_string(), ..Ran::default() };
        assert!(ended_well(&ended(Some(4), None, "error: damaged\nhint: x"), false).is_empty());
        assert!(ended_well(&ended(None, Some(9), ""), true).is_empty());
        assert_eq!(ended_well(&ended(None, Some(9), ""), false).len(), 2);
        assert_eq!(ended_well(&ended(None, Some(25), ""), true).len(), 2);
        assert_eq!(ended_well(&ended(Some(134), None, "error: x"), false), ["exit 134"]);
        assert_eq!(ended_well(&ended(Some(1), None, "error: internal error: a.rs:1: x"), false).len(), 1);
        assert_eq!(ended_well(&ended(Some(1), None, ""), false), ["exit 1 without a message"]);
    }
}
