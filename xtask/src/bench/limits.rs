//! `bench limits`: whole runs inside a control group whose limit is the budget. One byte too many is a kill.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::child::{self, Group, Measured};
use super::data::Lengths;
use super::memory::{planned_peak, train_arguments};
use super::{Options, mib, write_tables};

/// A model under test, and what its runs look like.
struct Subject {
    name: &'static str,
    model: &'static str,
    set: &'static str,
    quick: bool,
}

const RUN: &str = "train.max_steps=30 train.eval_every_steps=15 train.eval_samples=8 train.eval_generate_samples=4 \
                   train.eval_max_new_tokens=64 checkpoint.every_steps=10 checkpoint.keep_last=1 checkpoint.keep_best=0";

const SUBJECTS: [Subject; 4] = [
    Subject { name: "tiny f32", model: "tiny", set: "train.batch_size=16", quick: true },
    Subject { name: "t5-small f32", model: "t5-small", set: "train.batch_size=4", quick: false },
    Subject {
        name: "t5-small stochastic rounding",
        model: "t5-small",
        set: "train.batch_size=4 train.precision=bf16 train.master_weights=stochastic-rounding",
        quick: false,
    },
    Subject {
        name: "chatlm-0.2b bf16",
        model: "chatlm-0.2b",
        set: "train.batch_size=4 train.precision=bf16",
        quick: false,
    },
];

/// Budgets over the smallest that is accepted, in percent.
const BUDGETS_PERCENT: [u64; 6] = [100, 110, 125, 150, 200, 300];

/// The run is killed once it has made so many steps, and then goes on.
const KILLED_AFTER_STEPS: u64 = 17;

/// Runs every budget and writes the tables.
pub fn run(options: &Options) -> Result<(), String> {
    if let Err(why) = Group::new(1 << 30) {
        println!("skipped: {why}");
        return Ok(());
    }
    let mut rows = Vec::new();
    for subject in SUBJECTS {
        if (options.quick && !subject.quick) || !subject.name.contains(&options.filter) {
            continue;
        }
        let directory = options.scratch.join("limits");
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
        let smallest = smallest_budget(options, &subject, &directory)?;
        for percent in BUDGETS_PERCENT {
            let row = one_budget(options, &subject, &directory, smallest * percent / 100)?;
            println!("{}", line(&row));
            rows.push(row);
        }
        let _ = fs::remove_dir_all(&directory);
    }
    let kills: u64 = rows.iter().filter_map(|row| row["kills"].as_u64()).sum();
    let failed = rows.iter().filter(|row| row["exit_code"] != 0).count();
    println!("{} runs: {kills} kills, {failed} that did not end well", rows.len());
    let mut markdown = format!(
        "# Runs inside a hard limit\n\nWritten by `cargo xtask bench limits`. Every run is in a control group of its own whose limit is the budget:\n\
         30 steps over rows of very uneven length, two evaluations with generation, saves, a kill after step {KILLED_AFTER_STEPS}, and a resume.\n\n\
         {} runs, {kills} kills by the kernel.\n\n| run | budget MiB | predicted MiB | measured MiB | of the budget | reclaims | kills | s |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        rows.len()
    );
    rows.iter().for_each(|row| markdown += &line(row));
    write_tables(options, "memory-limits", &markdown, &json!({"runs": rows, "kills": kills}))
}

fn line(row: &Value) -> String {
    let bytes = |name: &str| mib(row[name].as_u64().unwrap_or(0));
    format!(
        "| {} | {:.0} | {:.0} | {:.0} | {:.0} % | {} | {} | {:.0} |\n",
        row["run"].as_str().unwrap_or(""),
        bytes("budget_bytes"),
        bytes("predicted_bytes"),
        bytes("measured_bytes"),
        100.0 * bytes("measured_bytes") / bytes("budget_bytes"),
        row["reclaims"],
        row["kills"],
        row["seconds"].as_f64().unwrap_or(0.0),
    )
}

/// The smallest budget that the command accepts inside a group with that limit, in bytes.
fn smallest_budget(options: &Options, subject: &Subject, directory: &Path) -> Result<u64, String> {
    let mut budget_mib = 16;
    for _ in 0..8 {
        let group = Group::new((budget_mib << 20).max(256 << 20))?;
        let mut arguments = arguments(subject, directory, budget_mib << 20)?;
        arguments[0] = "plan".to_owned();
        let planned = child::run(&options.program, &arguments, Some(&group), &options.scratch, &|| false)?;
        if planned.exit_code == 0 {
            // `train` measures its own process, which may differ by some pages from that of `plan`.
            return Ok((budget_mib + 1) << 20);
        }
        let named =
            planned.stderr.split("--memory-budget ").nth(1).and_then(|rest| rest.split("MiB").next()?.parse().ok());
        let named: u64 = named.ok_or_else(|| format!("no budget is named: {}", planned.stderr))?;
        budget_mib = named.max(budget_mib + 1);
    }
    Err("no budget is accepted".to_owned())
}

fn arguments(subject: &Subject, directory: &Path, budget: u64) -> Result<Vec<String>, String> {
    let set: Vec<String> = format!("{RUN} {}", subject.set).split_whitespace().map(str::to_owned).collect();
    let mut arguments = train_arguments(subject.model, &set, Lengths::Uneven, directory, &directory.join("run"))?;
    arguments.extend(["--memory-budget".to_owned(), format!("{}MiB", budget >> 20)]);
    Ok(arguments)
}

fn one_budget(options: &Options, subject: &Subject, directory: &Path, budget: u64) -> Result<Value, String> {
    let output = directory.join("run");
    let _ = fs::remove_dir_all(&output);
    let group = Group::new(budget)?;
    let arguments = arguments(subject, directory, budget)?;
    let is_far_enough = || steps_made(&output) >= KILLED_AFTER_STEPS;
    let killed = child::run(&options.program, &arguments, Some(&group), &options.scratch, &is_far_enough)?;
    drop(group);
    let group = Group::new(budget)?;
    let mut again = arguments;
    again.push("--keep-training".to_owned());
    let ended = child::run(&options.program, &again, Some(&group), &options.scratch, &|| false)?;
    if ended.exit_code != 0 {
        println!("{}", ended.stderr);
    }
    let of = |read: fn(&Measured) -> u64| [&killed, &ended].map(read);
    Ok(json!({
        "run": subject.name,
        "budget_bytes": budget,
        "predicted_bytes": planned_peak(&output)?,
        "measured_bytes": of(|run| run.peak_bytes).into_iter().max(),
        "group_bytes": of(|run| run.group.unwrap_or_default().most_bytes).into_iter().max(),
        "reclaims": of(|run| run.group.unwrap_or_default().failures).iter().sum::<u64>(),
        "kills": of(|run| run.group.unwrap_or_default().kills).iter().sum::<u64>(),
        "steps": steps_made(&output),
        "exit_code": ended.exit_code,
        "seconds": killed.seconds + ended.seconds,
    }))
}

/// The newest step in a run's metrics.
fn steps_made(output: &Path) -> u64 {
    let metrics = fs::read_to_string(output.join("metrics.jsonl")).unwrap_or_default();
    let events = metrics.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut steps = events.filter(|event| event["event"] == "step").filter_map(|event| event["step"].as_u64());
    steps.next().unwrap_or(0)
}
