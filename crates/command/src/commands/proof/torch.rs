//! The same training by PyTorch and transformers, beside the program, one after the other.
//!
//! Both start from the weights that transformers wrote, read the same rows in the same order, and use AdamW with the same numbers.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use memory_policy::Bytes;
use serde_json::{Value, json};

use super::runs::{Lab, Names, Run};
use super::{Check, number, page};
use crate::failure::{Failure, Outcome};
use crate::screen::report;

/// What Python runs.
const SCRIPT: &str = include_str!("transformers_run.py");

/// Largest relative difference of losses. AdamW's first steps are signs of gradients, so rounding grows faster than in a sum.
const SAME_LOSS: f64 = 1e-3;

/// A Python with PyTorch and transformers.
pub struct Python {
    program: PathBuf,
    versions: String,
}

/// Finds Python and its libraries.
pub fn find(program: &Path) -> Outcome<Python> {
    const VERSIONS: &str = "import platform, torch, transformers, tokenizers, safetensors\n\
        print('Python', platform.python_version() + ', torch', torch.__version__ + ', transformers', transformers.__version__)";
    let missing = |why: &str| {
        Failure::usage(format!("--torch: {}: {why}", program.display()))
            .hint("`pip install torch transformers` in an environment, and name its Python with `--python`")
            .hint("without `--torch` the proof needs no Python")
    };
    let output = Command::new(program).args(["-c", VERSIONS]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| missing(&format!("cannot start it: {error}")))?;
    let last =
        |text: &[u8]| String::from_utf8_lossy(text).trim().lines().next_back().unwrap_or("no version").to_owned();
    match output.status.success() {
        true => Ok(Python { program: program.to_owned(), versions: last(&output.stdout) }),
        false => Err(missing(&last(&output.stderr))),
    }
}

/// Both runs.
#[derive(Debug)]
pub struct Beside {
    ours: Run,
    versions: String,
    /// `losses`, `seconds` and `peak_bytes` of Python.
    theirs: Value,
}

/// Trains with transformers and then with the program at this budget.
pub fn beside(lab: &Lab<'_>, python: &Python, budget: Bytes) -> Outcome<Beside> {
    let rows: String = (0..192 * lab.steps).map(|row| format!("{}\n", row_of(row))).collect();
    durable_files::write_atomic(&lab.path("rows.jsonl"), rows.as_bytes())?;
    durable_files::write_atomic(&lab.path("transformers_run.py"), SCRIPT.as_bytes())?;
    let mut command = Command::new(&python.program);
    // The script and its files have fixed names in the directory, which is its working directory.
    let directory = lab.path("");
    command.args(["transformers_run.py", &lab.steps.to_string()]).current_dir(&directory).stdin(Stdio::null());
    // A name of a hub is never looked up.
    command.envs([("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "1")]);
    let output = command.output().map_err(|error| Failure::internal(format!("Python: {error}")))?;
    let theirs =
        String::from_utf8_lossy(&output.stdout).lines().next_back().and_then(|line| serde_json::from_str(line).ok());
    let Some(theirs) = theirs else {
        let text = String::from_utf8_lossy(&output.stderr);
        let why = text.trim().lines().next_back().unwrap_or("it printed no result");
        return Err(Failure::internal(format!("--torch: the training by transformers failed: {why}")));
    };
    report::note(&format!("{}: done", python.versions));
    let enclosure = lab.enclosure(budget, Names::BesideTorch);
    let ours = lab.run(Names::BesideTorch, budget, &enclosure)?;
    Ok(Beside { ours, versions: python.versions.clone(), theirs })
}

/// A row whose source and target fill the limits of 8 tokens.
fn row_of(row: u64) -> Value {
    let (a, b) = (row * 7919 % 9973 + 1000, row * 104_729 % 9967 + 1000);
    json!({"prompt": format!("{a} + {b} + {row}"), "response": format!("{} {a} {b}", a + b + row)})
}

impl Beside {
    /// Whether both had the same losses.
    pub fn check(&self) -> Check {
        let tried = self.ours.expect_done().and_then(|()| {
            let theirs: Vec<f64> =
                self.theirs["losses"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
            if theirs.len() != self.ours.steps.len() {
                return Err(format!("transformers made {} of {} steps", theirs.len(), self.ours.steps.len()));
            }
            let differences =
                self.ours.steps.iter().zip(&theirs).map(|(step, loss)| (number(step, "loss") / loss - 1.0).abs());
            let largest =
                differences.fold(0.0, |largest: f64, one| if one.is_nan() { f64::INFINITY } else { largest.max(one) });
            Ok((largest <= SAME_LOSS, format!("largest difference {largest:.1e}, allowed {SAME_LOSS:e}")))
        });
        Check::new("the losses are those of transformers", tried)
    }

    /// The part of the page about both.
    pub fn in_markdown(&self) -> String {
        let mut text = format!(
            "\n## Beside transformers\n\n{}, one after the other, without dropout.\n\n",
            page::cell(&self.versions)
        );
        text += "| | peak memory | seconds a step | first loss | last loss |\n| --- | --- | --- | --- | --- |\n";
        let steps = &self.ours.steps;
        // Half of the steps are faster than this.
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
        };
        let ours = median(steps.iter().map(|step| number(step, "step_ms") / 1000.0).collect());
        let ends =
            |losses: Vec<f64>| [losses.first().copied(), losses.last().copied()].map(|loss| loss.unwrap_or(f64::NAN));
        let [first, last] = ends(steps.iter().map(|step| number(step, "loss")).collect());
        let _ = writeln!(
            text,
            "| train_low_mem at {} | {} | {ours:.2} | {first:.6} | {last:.6} |",
            self.ours.budget, self.ours.peak
        );
        let list =
            |key: &str| self.theirs[key].as_array().into_iter().flatten().filter_map(Value::as_f64).collect::<Vec<_>>();
        let [first, last] = ends(list("losses"));
        let peak = Bytes(self.theirs["peak_bytes"].as_u64().unwrap_or(0));
        let _ = writeln!(text, "| transformers | {peak} | {:.2} | {first:.6} | {last:.6} |", median(list("seconds")));
        text
    }
}
