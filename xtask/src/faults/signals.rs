//! Signals at random moments: measures how long a run takes to exit, and checks its messages about the exit.
//!
//! First, a run without a signal shows when each of its phases begins and how long it lasts. The phases are: starting
//! (reading, planning, loading), an evaluation with generation, steps, and a save. A try starts the same run, waits for the
//! beginning of a phase and for a random part of it, and sends SIGTERM, SIGINT or SIGHUP. The preset `tiny` is always tried.
//! Other presets need `--only t5-small` or `--only chatlm-0.2b`: they take minutes for each ten tries.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::Lab;
use super::table::Table;

/// The longest acceptable wait after a signal.
const MOST: Duration = Duration::from_secs(20);

/// Models; the first is always tried.
const PRESETS: [&str; 3] = ["tiny", "t5-small", "chatlm-0.2b"];

/// Default number of tries per phase.
const TRIES: usize = 5;

/// Phases of a run: name, the text that begins it (empty: the start), and the text that ends it.
const PHASES: [(&str, &str, &str); 4] = [
    ("starting", "", "evaluating"),
    ("evaluation with generation", "evaluating", "evaluation at step 0"),
    ("training", "evaluation at step 0", "step 1/"),
    ("saving", "step 1/", "saved run/"),
];

/// Runs the tries of each model and phase.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    if ignores_hangups() {
        return Err("SIGHUP is ignored here, and a run would ignore it, too: start without `nohup`".to_owned());
    }
    let asked_for = |preset: &&str| preset == &PRESETS[0] || lab.options.only.contains(*preset);
    for preset in PRESETS.into_iter().filter(asked_for) {
        let arguments = arguments(lab, preset);
        let rows = PHASES.map(|(name, ..)| format!("signals while {name}, {preset}"));
        if rows.iter().all(|row| !lab.is_asked_for(row)) {
            continue;
        }
        let spans = spans(lab, &arguments)?;
        for ((phase, row), span) in PHASES.iter().zip(rows).zip(spans) {
            let mut random = lab.options.seed;
            let tries: Vec<(String, Moment)> = (0..lab.options.tries.unwrap_or(TRIES))
                .map(|_| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let signal = ["TERM", "INT", "HUP"][(random >> 40) as usize % 3];
                    let delay = span.mul_f64((random >> 43) as f64 / (1u64 << 21) as f64);
                    (format!("{signal} after {} ms", delay.as_millis()), Moment { after: phase.1, delay, signal })
                })
                .collect();
            let took = Mutex::new(Vec::new());
            lab.try_all(table, &row, &tries, Vec::new(), |moment, directory| {
                let left = leave(lab, &arguments, moment, directory)?;
                took.lock().expect("no try panics").push((left.wall, left.processor));
                Ok(broken(&left, directory))
            })?;
            print_times(&row, took.into_inner().expect("no try panics"));
        }
    }
    Ok(())
}

/// A signal, and the moment to send it.
struct Moment {
    after: &'static str,
    delay: Duration,
    signal: &'static str,
}

/// The exit of a run.
struct Left {
    wall: Duration,
    processor: Duration,
    code: Option<i32>,
    out: String,
    err: String,
}

fn arguments(lab: &Lab, preset: &str) -> Vec<String> {
    let mut arguments: Vec<String> = ["--output", "run", "--max-steps", "2"].map(str::to_owned).into();
    let mut settings = Vec::new();
    if preset != "tiny" {
        let sample = |name: &str| lab.sample(name).display().to_string();
        settings.extend([
            format!("model.config={preset}"),
            format!("data.train={}", sample("sample-train.parquet")),
            format!("data.validation={}", sample("sample-validation.parquet")),
            format!("data.tokenizer={}", sample("sample-tokenizer.json")),
        ]);
    }
    // Signals arrive at any moment of a step: with fewer samples and tokens, a slow model gives more tries an hour.
    let [batch, samples, generated, tokens] = match preset {
        "tiny" => [64, 32, 16, 32],
        "chatlm-0.2b" => [8, 4, 2, 128],
        _ => [64, 32, 16, 512],
    };
    let sizes = [
        format!("train.batch_size={batch}"),
        format!("train.eval_samples={samples}"),
        format!("train.eval_generate_samples={generated}"),
        format!("train.eval_max_new_tokens={tokens}"),
    ];
    let common = ["checkpoint.every_steps=1", "run.log_every_steps=1"];
    let settings = settings.into_iter().chain(common.map(str::to_owned)).chain(sizes);
    arguments.extend(settings.flat_map(|setting| ["--set".to_owned(), setting]));
    arguments
}

/// Whether this process ignores SIGHUP, as under `nohup`. Its child processes then ignore it, too.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1))
}

/// The duration of each phase of an undisturbed run.
fn spans(lab: &Lab, arguments: &[String]) -> Result<[Duration; 4], String> {
    let directory = lab.directory("undisturbed")?;
    let (mut child, lines) = start(lab, arguments, &directory)?;
    let mut said: Vec<(Instant, String)> = vec![(Instant::now(), String::new())];
    said.extend(lines.iter());
    let status = child.wait().map_err(|error| error.to_string())?;
    if !status.success() {
        return Err(format!("an undisturbed run ended with {status}"));
    }
    let first = |words: &str, from: Instant| {
        said.iter().find(|(at, line)| *at >= from && line.contains(words)).map(|(at, _)| *at)
    };
    let mut spans = [Duration::ZERO; 4];
    for (span, (name, begins, ends)) in spans.iter_mut().zip(PHASES) {
        let begin = first(begins, said[0].0).ok_or_else(|| format!("{name} never began"))?;
        let end = first(ends, begin).ok_or_else(|| format!("{name} never ended"))?;
        *span = end - begin;
    }
    Ok(spans)
}

/// Starts the command, and returns a channel of its output lines.
fn start(lab: &Lab, arguments: &[String], directory: &Path) -> Result<(Child, Receiver<(Instant, String)>), String> {
    let mut command = Command::new(&lab.program);
    command.env("LOW_MEM_T5_PRICES", "built-in");
    command.args(arguments).current_dir(directory).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let (sender, lines) = channel();
    let out = BufReader::new(child.stdout.take().expect("a pipe"));
    std::thread::spawn(move || {
        for line in out.lines().map_while(Result::ok) {
            if sender.send((Instant::now(), line)).is_err() {
                break;
            }
        }
    });
    Ok((child, lines))
}

/// Sends the signal at its moment, and waits for the end.
fn leave(lab: &Lab, arguments: &[String], moment: &Moment, directory: &Path) -> Result<Left, String> {
    let (mut child, lines) = start(lab, arguments, directory)?;
    let mut out = String::new();
    if !moment.after.is_empty() {
        for (_, line) in &lines {
            out += &format!("{line}\n");
            if line.contains(moment.after) {
                break;
            }
        }
    }
    let at = Instant::now() + moment.delay;
    while let Ok((_, line)) = lines.recv_timeout(at.saturating_duration_since(Instant::now())) {
        out += &format!("{line}\n");
    }
    let before = processor_time(&child);
    let sent = Instant::now();
    let pid = child.id().to_string();
    Command::new("kill").args(["-s", moment.signal, &pid]).status().map_err(|error| error.to_string())?;
    for (_, line) in &lines {
        out += &format!("{line}\n");
    }
    let wall = sent.elapsed();
    let mut err = String::new();
    let _ = child.stderr.take().expect("a pipe").read_to_string(&mut err);
    // The process has ended but was not waited for, so its processor time can still be read.
    let processor = processor_time(&child).saturating_sub(before);
    let code = child.wait().map_err(|error| error.to_string())?.code();
    Ok(Left { wall, processor, code, out, err })
}

/// Processor time of a process, in hundredths of a second.
fn processor_time(child: &Child) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|ticks| ticks.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_millis(10 * (ticks(11) + ticks(12)))
}

/// The promises that a run broke at its exit.
fn broken(left: &Left, directory: &Path) -> Vec<String> {
    let mut broken = Vec::new();
    let mut expect = |holds: bool, what: String| {
        if !holds {
            broken.push(what);
        }
    };
    let Left { wall, code, out, err, .. } = left;
    expect(*wall <= MOST, format!("{:.1} s to leave", wall.as_secs_f64()));
    // A run that had made its last step, or was about to end, ends as if there had been no signal.
    let is_done = *code == Some(0) && directory.join("run/finished.json").is_file();
    expect(is_done || *code == Some(75), format!("exit {code:?}: {err}"));
    let made = out.lines().filter(|line| line.starts_with("step ")).count();
    let saved = err.lines().find_map(|line| line.split("; saved ").nth(1));
    match saved {
        Some(path) => expect(directory.join(path).join("manifest.json").is_file(), format!("{path} is not there")),
        None => expect(is_done || made == 0 && err.contains("nothing to save"), format!("{made} steps and {err}")),
    }
    broken
}

fn print_times(row: &str, mut took: Vec<(Duration, Duration)>) {
    took.sort();
    let Some((slowest, _)) = took.last() else { return };
    let most_processor = took.iter().map(|(_, processor)| *processor).max().unwrap_or_default();
    println!(
        "    {row}: {} exits, median {:.2} s, slowest {:.2} s, at most {:.2} s of processor time",
        took.len(),
        took[took.len() / 2].0.as_secs_f64(),
        slowest.as_secs_f64(),
        most_processor.as_secs_f64()
    );
}
