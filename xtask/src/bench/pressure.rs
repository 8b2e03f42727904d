//! `bench pressure`: another process takes most memory of a run's control group, and later frees it.

use std::cell::RefCell;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use super::child::{self, Group, Measured};
use super::data::Lengths;
use super::memory::train_arguments;
use super::{Options, mib, write_tables};

/// At this learning rate, training magnifies rounding differences little: losses differ by 8e-5 after forty steps. At 1e-4 they differ by
/// 1e-3 and more.
const RUN: &str = "train.max_steps=64 train.batch_size=8 optimizer.learning_rate=1e-5 train.eval_every_steps=40 train.eval_samples=8 train.eval_generate_samples=0 \
                   data.max_source_tokens=64 data.max_target_tokens=64 checkpoint.every_steps=30 checkpoint.keep_last=1 \
                   checkpoint.keep_best=0";
/// Memory limit of the group, for both processes.
const LIMIT: u64 = 2 << 30;
const BUDGET: &str = "1GiB";
/// The other process begins after `BEGINS_AFTER` steps of the run. It frees its memory after `RELEASES_AFTER` steps with
/// a smaller plan.
const BEGINS_AFTER: u64 = 15;
const RELEASES_AFTER: u64 = 15;
/// The most relative difference of any step's loss from the undisturbed run's: a smaller plan adds in another order.
const MAX_LOSS_DIFFERENCE: f64 = 2e-4;
/// Memory that the other process leaves free.
const LEFT: u64 = 16 << 20;
const CHUNK: u64 = 4 << 20;

/// Runs undisturbed and under pressure, and writes the tables.
///
/// # Errors
///
/// Also if the run did not shrink, did not grow, or had other losses, and if a process was killed or swapped.
pub fn run(options: &Options) -> Result<(), String> {
    if let Err(why) = Group::new(1 << 30) {
        println!("skipped: {why}");
        return Ok(());
    }
    let directory = options.scratch.join("pressure");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
    let calm = once(options, &directory, "calm", false)?;
    let swapped_before = swapped_pages();
    let pressed = once(options, &directory, "pressed", true)?;
    let swapped = swapped_pages() - swapped_before;
    let _ = fs::remove_dir_all(&directory);

    // Up to the first replan the losses of both runs are identical; after it rounding differs.
    let first = pressed.replans.first().map_or(0, |(step, _)| usize::try_from(*step).unwrap_or(0));
    let is_same_before = first > 0 && calm.losses.iter().take(first).eq(pressed.losses.iter().take(first));
    let parted = pressed.losses.iter().zip(&calm.losses).map(|(pressed, calm)| (pressed / calm - 1.0).abs());
    // A loss that is NaN counts as the largest difference.
    let difference = parted.max_by(f64::total_cmp).unwrap_or(f64::NAN);
    let kills = pressed.ran.group.unwrap_or_default().kills;
    let replans: Vec<String> =
        pressed.replans.iter().map(|(step, reason)| format!("after step {step}: {reason}")).collect();
    let is_well = kills == 0
        && swapped == 0
        && pressed.ran.exit_code == 0
        && calm.losses.len() == pressed.losses.len()
        && pressed.has("shrunk")
        && pressed.has("grown")
        && is_same_before
        && difference <= MAX_LOSS_DIFFERENCE;
    let verdict = if is_well { "held" } else { "FAILED" };
    let markdown = format!(
        "# A run beside a process that takes the memory\n\nt5-small in f32, 64 steps, budget {BUDGET}, in a control group of {:.0} MiB. After step\n\
         {BEGINS_AFTER} another process in the group takes memory until {:.0} MiB are left, holds it until the run has made {RELEASES_AFTER} steps with a\n\
         smaller plan, and lets go.\n\n**{verdict}**: {kills} kills, {swapped} pages swapped, losses the same to the bit up to the first\n\
         change ({is_same_before}), and at every step within {difference:.1e} of the undisturbed run's.\n\n{}\n\n\
         | | undisturbed | beside the other |\n| --- | --- | --- |\n| steps | {} | {} |\n| last loss | {:.6} | {:.6} |\n| peak MiB (`VmHWM`) | {:.0} | {:.0} |\n\
         | smallest resident set after a step, MiB | {:.0} | {:.0} |\n| most in the group, MiB | {:.0} | {:.0} |\n| seconds | {:.0} | {:.0} |\n",
        mib(LIMIT),
        mib(LEFT),
        replans.iter().map(|replan| format!("- {replan}")).collect::<Vec<_>>().join("\n"),
        calm.losses.len(),
        pressed.losses.len(),
        calm.losses.last().unwrap_or(&f64::NAN),
        pressed.losses.last().unwrap_or(&f64::NAN),
        mib(calm.ran.peak_bytes),
        mib(pressed.ran.peak_bytes),
        mib(calm.least_rss),
        mib(pressed.least_rss),
        mib(calm.ran.group.unwrap_or_default().peak_bytes),
        mib(pressed.ran.group.unwrap_or_default().peak_bytes),
        calm.ran.seconds,
        pressed.ran.seconds,
    );
    println!("{markdown}");
    let json = json!({"is_well": is_well, "kills": kills, "swapped_pages": swapped, "is_same_before": is_same_before, "most_parted": difference, "replans": replans,
                      "losses": pressed.losses, "losses_undisturbed": calm.losses});
    write_tables(options, &markdown, &json)?;
    if is_well { Ok(()) } else { Err(pressed.ran.stderr) }
}

/// A finished run.
struct Run {
    ran: Measured,
    losses: Vec<f64>,
    least_rss: u64,
    /// The step, and the reason in JSON.
    replans: Vec<(u64, Value)>,
}

impl Run {
    fn has(&self, change: &str) -> bool {
        self.replans.iter().any(|(_, reason)| reason.get(change).is_some())
    }
}

/// The process that takes memory; it frees the memory when its input ends.
enum Other {
    NotYet,
    Holds(Child),
    Gone,
}

fn once(options: &Options, directory: &Path, name: &str, is_pressed: bool) -> Result<Run, String> {
    let output = directory.join(name);
    let set: Vec<String> = RUN.split_whitespace().map(str::to_owned).collect();
    let mut arguments = train_arguments("t5-small", &set, Lengths::Uneven, directory, &output)?;
    arguments.extend(["--memory-budget", BUDGET].map(str::to_owned));
    let group = Group::new(LIMIT)?;
    let other = RefCell::new(Other::NotYet);
    let follow = || {
        let events = events(&output);
        let made = |event: &&Value| event["event"] == "step";
        let steps = events.iter().rev().find(made).and_then(|event| event["step"].as_u64()).unwrap_or(0);
        let shrunk = events.iter().find(|event| event["event"] == "replan").and_then(|event| event["step"].as_u64());
        let mut other = other.borrow_mut();
        match &mut *other {
            Other::NotYet if is_pressed && steps >= BEGINS_AFTER => match take_memory(&group) {
                Ok(child) => *other = Other::Holds(child),
                Err(problem) => println!("{problem}"),
            },
            Other::Holds(child) if shrunk.is_some_and(|shrunk| steps >= shrunk + RELEASES_AFTER) => {
                drop(child.stdin.take());
                let _ = child.wait();
                *other = Other::Gone;
            }
            _ => {}
        }
        false
    };
    let ran = child::run(&options.program, &arguments, Some(&group), &options.scratch, &follow)?;
    if let Other::Holds(mut child) = other.into_inner() {
        println!("the run ended without a smaller plan");
        drop(child.stdin.take());
        let _ = child.wait();
    }
    let events = events(&output);
    let steps = || events.iter().filter(|event| event["event"] == "step");
    let replans = events.iter().filter(|event| event["event"] == "replan");
    Ok(Run {
        losses: steps().filter_map(|event| event["loss"].as_f64()).collect(),
        least_rss: steps().filter_map(|event| event["rss_bytes"].as_u64()).min().unwrap_or(0),
        replans: replans.map(|event| (event["step"].as_u64().unwrap_or(0), event["reason"].clone())).collect(),
        ran,
    })
}

/// Starts this program again, in the group, as the process that takes memory.
fn take_memory(group: &Group) -> Result<Child, String> {
    let here = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = group.command(&here);
    command.args(["bench", "take-memory"]).arg(group.path()).stdin(Stdio::piped());
    command.spawn().map_err(|error| error.to_string())
}

/// Takes a group's memory until little is left, and holds it until standard input ends: `bench take-memory GROUP`.
pub fn take(arguments: &[String]) -> Result<(), String> {
    let group = PathBuf::from(arguments.first().ok_or("expected a control group")?);
    let mut held: Vec<Vec<u8>> = Vec::new();
    while child::left(&group)? > LEFT + CHUNK {
        held.push(vec![1; usize::try_from(CHUNK).map_err(|error| error.to_string())?]);
    }
    std::io::stdin().read_to_end(&mut Vec::new()).map_err(|error| error.to_string())?;
    drop(held);
    Ok(())
}

fn events(output: &Path) -> Vec<Value> {
    let metrics = fs::read_to_string(output.join("metrics.jsonl")).unwrap_or_default();
    metrics.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Number of pages that this machine has swapped, out and in.
fn swapped_pages() -> u64 {
    let counters = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let lines = counters.lines().filter_map(|line| line.split_once(' '));
    lines
        .filter(|(name, _)| matches!(*name, "pswpin" | "pswpout"))
        .filter_map(|(_, count)| count.parse::<u64>().ok())
        .sum()
}
