//! Memory that no bill has: the run ends well, and says that its peak is above the prediction, and which row was most likely wrong.

use std::path::Path;

use serde_json::Value;

use super::Lab;
use super::lab::{Outcome, RUN};
use super::scenario;
use super::table::Table;

/// Memory that the process gets in the middle of a run: much more than 5 % of its prediction, and less than what the budget leaves.
const HELD_BYTES: u64 = 32 << 20;
const SETTINGS: &str = "--memory-budget 160MiB --max-steps 3 --set train.batch_size=6 --set train.dropout=0 --set train.eval_samples=4 \
     --set train.eval_generate_samples=1 --set train.eval_max_new_tokens=2 --set memory.decode_threads=1";

/// A training of all weights. One of a small adapter predicts more than it would use with these bytes, so it cannot exceed its prediction.
///
/// # Errors
///
/// The harness itself failed.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    let tries = [("all weights".to_string(), String::new())];
    lab.try_all(table, "memory that no bill has", &tries, Vec::new(), |more, directory| beyond(lab, more, directory))
}

fn beyond(lab: &Lab, more: &str, directory: &Path) -> Outcome {
    let run = directory.join(RUN);
    let arguments = words(&format!("{SETTINGS} --output {} {more}", run.display()));
    // Of the events, the first steps follow the start, the data and the plan.
    let hold = format!("under={}\nonly=metrics.jsonl\ncalls=write\nfrom=4\ndo=hold:{HELD_BYTES}", run.display());
    let ran = scenario::run(lab, &arguments, directory, Some(&lab.faults(hold)))?;
    let mut broken = Vec::new();
    let mut expect = |is_met: bool, what: &str| {
        if !is_met {
            broken.push(format!("{what}: {}: {}{}", ran.ending(), ran.out, ran.err));
        }
    };
    expect(ran.code == Some(0), "expected a run that ends well");
    let warned = ran.err.lines().filter(|line| line.starts_with("warning: the peak is ")).collect::<Vec<_>>();
    let is_said = |line: &&str| line.contains("above the predicted") && line.contains("the likely cause is the row");
    expect(warned.len() == 1 && warned.iter().all(is_said), "expected one warning of a peak above the prediction");
    let events = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let exceeded = events.filter(|event| event["kind"] == "prediction").collect::<Vec<_>>();
    let is_above = |event: &Value| event["peak_rss_bytes"].as_u64() > event["predicted_peak_bytes"].as_u64();
    expect(exceeded.len() == 1 && exceeded.iter().all(is_above), "expected one event with both peaks");
    Ok(broken)
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}
