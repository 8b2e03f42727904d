//! `bench limits`: whole runs inside a control group whose limit is the budget. A single byte above the limit kills the
//! run.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::child::{self, Group, Measured};
use super::data::Lengths;
use super::memory::{planned_peak, train_arguments};
use super::{Options, mib, write_tables};

/// A model under test, and its runs' settings.
struct Subject {
    name: &'static str,
    model: &'static str,
    set: &'static str,
    quick: bool,
}

const RUN: &str = "train.max_steps=30 train.eval_every_steps=15 train.eval_samples=4 train.eval_generate_samples=2 \
                   train.eval_max_new_tokens=16 checkpoint.every_steps=10 checkpoint.keep_last=1 checkpoint.keep_best=0 \
                   data.max_source_tokens=48 data.max_target_tokens=96";

const SUBJECTS: [Subject; 6] = [
    Subject { name: "tiny f32", model: "tiny", set: "train.batch_size=16", quick: true },
    Subject { name: "t5-small f32", model: "t5-small", set: "train.batch_size=2", quick: false },
    Subject {
        name: "t5-small stochastic rounding",
        model: "t5-small",
        set: "train.batch_size=2 train.precision=bf16 train.master_weights=stochastic-rounding",
        quick: false,
    },
    Subject { name: "t5-small f32, 16 samples a step", model: "t5-small", set: "train.batch_size=16", quick: false },
    Subject { name: "chatlm-0.2b f32", model: "chatlm-0.2b", set: "train.batch_size=2", quick: false },
    Subject {
        name: "chatlm-0.2b stochastic rounding",
        model: "chatlm-0.2b",
        set: "train.batch_size=2 train.precision=bf16 train.master_weights=stochastic-rounding",
        quick: false,
    },
];

/// Budgets for each subject, from the smallest accepted budget to the memory that the fastest plan requires.
const BUDGETS: u64 = 12;

/// The run is killed after this many steps, and then resumed.
const KILLED_AFTER_STEPS: u64 = 17;

/// Runs every budget and writes the tables.
///
/// # Errors
///
/// Also if a run was killed, did not end, or held more than its budget.
pub fn run(options: &Options) -> Result<(), String> {
    if let Err(why) = Group::new(1 << 30) {
        println!("skipped: {why}");
        return Ok(());
    }
    let directory = options.scratch.join("limits");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
    let is_meant = |subject: &&Subject| (subject.quick || !options.quick) && subject.name.contains(&options.filter);
    let mut ranges = Vec::new();
    for subject in SUBJECTS.iter().filter(is_meant) {
        let smallest = smallest_budget(options, subject, &directory)?;
        let ample = required(&plan(options, subject, &directory, 64 << 30)?)?.max(smallest);
        ranges.push((subject, smallest, ample));
    }
    if ranges.is_empty() {
        return Err(format!("no run has {:?} in its name", options.filter));
    }
    // Every model's smallest budget first: even an interrupted pass then covers the hardest cases.
    let mut rows = Vec::new();
    for place in 0..BUDGETS {
        for &(subject, smallest, ample) in &ranges {
            let budget = (smallest + (ample - smallest) * place / (BUDGETS - 1)).next_multiple_of(1 << 20);
            let row = one_budget(options, subject, &directory, budget)?;
            print!("{}", line(&row));
            rows.push(row);
        }
        write(options, &mut rows)?;
    }
    let _ = fs::remove_dir_all(&directory);
    let failed = rows.iter().filter(|row| row["is_well"] != true).count();
    if failed > 0 { Err(format!("{failed} runs failed")) } else { Ok(()) }
}

/// Writes the tables of the runs so far, grouped by model.
fn write(options: &Options, rows: &mut [Value]) -> Result<(), String> {
    rows.sort_by_key(|row| SUBJECTS.iter().position(|subject| row["run"] == subject.name));
    let kills: u64 = rows.iter().filter_map(|row| row["kills"].as_u64()).sum();
    let failed = rows.iter().filter(|row| row["is_well"] != true).count();
    let conclusion = format!("{} runs: {kills} kills by the kernel, {failed} other failures", rows.len());
    println!("{conclusion}");
    let mut markdown = format!(
        "# Runs inside a hard limit\n\nEvery run is in a control group of its own whose limit is the budget. It takes 30\n\
         steps over rows of very uneven length, evaluates with generation, and saves. SIGKILL ends it after step\n\
         {KILLED_AFTER_STEPS}, and it is resumed in another such group. For each model, the first budget is the smallest that\n\
         `plan` accepts; the last is the one its fastest plan requires.\n\n\
         - measured: `VmHWM`, the larger of both parts.\n- group: the most that the group counted, page cache included.\n\
         - reclaims: how often the group met its limit and dropped page cache.\n\n\
         {conclusion}.\n\n| run | budget MiB | predicted MiB | measured MiB | of the budget | group MiB | reclaims | kills | s |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    rows.iter().for_each(|row| markdown += &line(row));
    write_tables(options, &markdown, &json!({"runs": rows, "kills": kills, "failed": failed}))
}

fn line(row: &Value) -> String {
    let bytes = |name: &str| mib(row[name].as_u64().unwrap_or(0));
    format!(
        "| {} | {:.0} | {:.0} | {:.0} | {:.0} %{} | {:.0} | {} | {} | {:.0} |\n",
        row["run"].as_str().unwrap_or(""),
        bytes("budget_bytes"),
        bytes("predicted_bytes"),
        bytes("measured_bytes"),
        100.0 * bytes("measured_bytes") / bytes("budget_bytes"),
        if row["is_well"] == true { "" } else { " (failed)" },
        bytes("group_bytes"),
        row["reclaims"],
        row["kills"],
        row["seconds"].as_f64().unwrap_or(0.0),
    )
}

/// The smallest budget, in bytes, that the command accepts in a group with that limit.
fn smallest_budget(options: &Options, subject: &Subject, directory: &Path) -> Result<u64, String> {
    let refused = plan(options, subject, directory, 16 << 20)?;
    let named = refused.stderr.split("--memory-budget ").nth(1).and_then(|rest| rest.split("MiB").next()?.parse().ok());
    let named: u64 = named.ok_or_else(|| format!("the refusal names no budget: {}", refused.stderr))?;
    let accepted = plan(options, subject, directory, named << 20)?;
    match accepted.exit_code {
        0 => Ok(named << 20),
        _ => Err(format!("{named} MiB: named as enough, then refused: {}", accepted.stderr)),
    }
}

/// Runs `plan` under a budget.
fn plan(options: &Options, subject: &Subject, directory: &Path, budget: u64) -> Result<Measured, String> {
    let mut arguments = arguments(options, subject, directory, budget)?;
    arguments[0] = "plan".to_owned();
    arguments.push("--json".to_owned());
    child::run(&options.program, &arguments, None, &options.scratch, &|| false)
}

/// Reads the smallest budget from the printed plan.
fn required(planned: &Measured) -> Result<u64, String> {
    let plan: Value = serde_json::from_str(&planned.stdout).map_err(|error| format!("{error}: {}", planned.stderr))?;
    plan["smallest_budget_bytes"].as_u64().ok_or_else(|| "no `smallest_budget_bytes` in the plan".to_owned())
}

fn arguments(options: &Options, subject: &Subject, directory: &Path, budget: u64) -> Result<Vec<String>, String> {
    let set: Vec<String> = format!("{RUN} {}", subject.set).split_whitespace().map(str::to_owned).collect();
    let mut arguments = train_arguments(subject.model, &set, Lengths::Uneven, directory, &directory.join("run"))?;
    if let Some(rows) = &options.rows {
        for key in ["data.train", "data.validation"] {
            arguments.extend(["--set".to_owned(), format!("{key}=[{:?}]", rows.display().to_string())]);
        }
    }
    arguments.extend(["--memory-budget".to_owned(), format!("{}MiB", budget >> 20)]);
    Ok(arguments)
}

fn one_budget(options: &Options, subject: &Subject, directory: &Path, budget: u64) -> Result<Value, String> {
    let output = directory.join("run");
    let _ = fs::remove_dir_all(&output);
    let group = Group::new(budget)?;
    let arguments = arguments(options, subject, directory, budget)?;
    let is_far_enough = || steps_made(&output) >= KILLED_AFTER_STEPS;
    let killed = child::run(&options.program, &arguments, Some(&group), &options.scratch, &is_far_enough)?;
    drop(group);
    let group = Group::new(budget)?;
    let mut again = arguments;
    again.push("--keep-training".to_owned());
    let ended = child::run(&options.program, &again, Some(&group), &options.scratch, &|| false)?;
    let of = |read: fn(&Measured) -> u64| [&killed, &ended].map(read);
    let kills: u64 = of(|run| run.group.unwrap_or_default().kills).iter().sum();
    let measured = of(|run| run.peak_bytes).into_iter().max().unwrap_or(0);
    let steps = steps_made(&output);
    let is_well = kills == 0 && measured <= budget && ended.exit_code == 0 && steps == 30;
    if !is_well {
        println!("{}{}", killed.stderr, ended.stderr);
    }
    Ok(json!({
        "run": subject.name,
        "budget_bytes": budget,
        "predicted_bytes": planned_peak(&output)?,
        "measured_bytes": measured,
        "group_bytes": of(|run| run.group.unwrap_or_default().peak_bytes).into_iter().max(),
        "reclaims": of(|run| run.group.unwrap_or_default().failures).iter().sum::<u64>(),
        "kills": kills,
        "steps": steps,
        "exit_code": ended.exit_code,
        "is_well": is_well,
        "seconds": killed.seconds + ended.seconds,
    }))
}

/// The last step in a run's metrics.
fn steps_made(output: &Path) -> u64 {
    let metrics = fs::read_to_string(output.join("metrics.jsonl")).unwrap_or_default();
    let events = metrics.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut steps = events.filter(|event| event["event"] == "step").filter_map(|event| event["step"].as_u64());
    steps.next().unwrap_or(0)
}
