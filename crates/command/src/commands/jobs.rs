//! `train_low_mem jobs`: lists the runs of this machine; `jobs run FILE` trains a list of runs.
//!
//! Each run of the list is another process of this command with `--wait`, and `--keep-training` if the run has begun. So it starts when its memory is free, and an
//! interrupted list continues where it stopped.

use std::collections::VecDeque;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use durable_files::RunLock;
use memory_policy::{Bytes, plural};
use run_plan::pace::duration;
use run_report::figures::clipped;
use run_report::visible;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toml::Table;

use crate::cli::job_flags::{AddArgs, JobsArgs, JobsCommand};
use crate::config::paths;
use crate::failure::{Exit, Failure, Outcome};
use crate::files::outputs;
use crate::files::run_dir;
use crate::machine::ledger::{Ledger, OnDisk};
use crate::run::setup;
use crate::run::summary;
use crate::scores::best::Measure;
use crate::screen::report;
use crate::screen::stop::Stop;

/// The time between two checks for a signal.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The time between two reads of the list.
const READ_EVERY: Duration = Duration::from_secs(1);

/// A list of runs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    /// Processes at a time, including those that wait.
    #[serde(default = "four")]
    at_once: usize,
    #[serde(default)]
    run: Vec<Entry>,
}

fn four() -> usize {
    4
}

/// A run, or one for each combination of a sweep's values.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    output: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    config: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    set: Vec<String>,
    /// More flags of `train`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    flags: Vec<String>,
    /// Runs of higher priority start first.
    #[serde(default)]
    priority: i64,
    #[serde(default, skip_serializing_if = "Table::is_empty")]
    sweep: Table,
}

/// An entry as written in a list.
#[derive(Serialize)]
struct Added {
    run: [Entry; 1],
}

/// One run.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Job {
    output: PathBuf,
    arguments: Vec<String>,
    priority: i64,
}

impl Job {
    /// The name of the run without its seed: equal for runs that differ only by their seed.
    fn but_for_seed(&self) -> String {
        let text = paths::to_text(self.output.as_os_str());
        let (directory, name) = text.rsplit_once('/').unwrap_or(("", &text));
        let others: Vec<&str> = name.split(',').filter(|setting| !setting.starts_with("seed=")).collect();
        [directory, &others.join(",")].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/")
    }

    /// The log file, beside its directory.
    fn log(&self) -> PathBuf {
        let mut name = self.output.clone().into_os_string();
        name.push(".log");
        PathBuf::from(name)
    }
}

/// Lists runs, or trains a list of runs.
pub fn jobs(flags: &JobsArgs, threads: Option<u16>) -> Outcome<()> {
    match &flags.command {
        None => list(flags.json),
        Some(JobsCommand::Add(flags)) => add(flags),
        Some(JobsCommand::Run { file }) => run(&paths::from_text(file), threads, flags.json),
    }
}

fn list(as_json: bool) -> Outcome<()> {
    let lines = Ledger::of_this_user()?.lines()?;
    if as_json {
        let line = |line: &crate::machine::ledger::Line| {
            json!({"pid": line.pid, "state": state(line.waits), "bytes": line.bytes,
                "card": line.card.as_ref().map(|(card, _)| card), "card_bytes": line.card.as_ref().map(|(_, bytes)| bytes),
                "disk_bytes": line.disk.as_ref().map(OnDisk::bytes),
                "output": line.output.display().to_string(), "arrived": line.arrived})
        };
        return report::result(&format!("{:#}\n", Value::Array(lines.iter().map(line).collect())));
    }
    if lines.is_empty() {
        return report::result("no run waits or trains with `--wait`\n");
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let mut text = format!(
        "{:>8}  {:<8}  {:>10}  {:>10}  {:>10}  {:>12}  output\n",
        "process", "state", "memory", "GPU", "disk", "since"
    );
    for line in &lines {
        let since = duration(Duration::from_secs(now.saturating_sub(line.arrived)));
        let (state, bytes, output) =
            (state(line.waits), Bytes(line.bytes).to_string(), line.output.display().to_string());
        let output = visible::line(&output);
        let or_none = |bytes: Option<u64>| bytes.map_or("-".to_owned(), |bytes| Bytes(bytes).to_string());
        let (card, disk) =
            (or_none(line.card.as_ref().map(|(_, bytes)| *bytes)), or_none(line.disk.as_ref().map(OnDisk::bytes)));
        text += &format!("{:>8}  {state:<8}  {bytes:>10}  {card:>10}  {disk:>10}  {since:>12}  {output}\n", line.pid);
    }
    report::result(&text)
}

fn state(waits: bool) -> &'static str {
    if waits { "waits" } else { "trains" }
}

fn run(file: &Path, threads: Option<u16>, as_json: bool) -> Outcome<()> {
    let (at_once, jobs) = read_list(file)?;
    let stop = Stop::on_signals()?;
    stop.can_stop_gracefully();
    let (all, ended) = train_all(Source { file, threads, read: Instant::now(), known: jobs }, at_once, &stop)?;
    let results: Vec<Value> = all.iter().map(|job| result_of(job, &ended)).collect();
    report::result(&if as_json { format!("{:#}\n", json!(results)) } else { table(&results) })?;
    if stop.requested() {
        return Err(Failure::new(Exit::Interrupted, "interrupted; runs that had begun are saved")
            .hint("to continue, run the same command again"));
    }
    match ended.iter().filter(|ended| ended.code != 0).count() as u64 {
        0 => Ok(()),
        failed => Err(Failure::new(Exit::Internal, format!("{} failed; see their `.log`", plural(failed, "run")))),
    }
}

/// The number of processes at a time, and the runs of a list in starting order.
fn read_list(file: &Path) -> Outcome<(usize, Vec<Job>)> {
    let text = setup::read_named_file(file, "list of runs")?;
    let list: List = toml::from_str(&text).map_err(|error| {
        Failure::usage(format!("{}: {}", file.display(), error.to_string().trim_end())).hint("docs/runs.md shows one")
    })?;
    if list.at_once == 0 || list.run.is_empty() {
        return Err(Failure::usage(format!("{}: expected `at_once` of at least 1 and one `[[run]]`", file.display())));
    }
    let mut jobs: Vec<Job> = list.run.iter().map(expanded).collect::<Outcome<Vec<_>>>()?.concat();
    for (place, job) in jobs.iter().enumerate() {
        if jobs[..place].iter().any(|other| other.output == job.output) {
            let problem = format!("{}: two runs write to {}", file.display(), job.output.display());
            return Err(Failure::usage(problem).hint("give each `[[run]]` its own `output`"));
        }
    }
    // The sort is stable: runs of equal priority keep the list's order.
    jobs.sort_by_key(|job| std::cmp::Reverse(job.priority));
    Ok((list.at_once, jobs))
}

/// Appends a run to a list. The list's other lines and comments stay as they are.
fn add(flags: &AddArgs) -> Outcome<()> {
    let file = paths::from_text(&flags.file);
    let mut sweep = Table::new();
    for setting in &flags.sweep {
        let wrong = || Failure::usage(format!("--sweep: expected KEY=[VALUE, ..], got `{setting}`"));
        let (key, values) = setting.split_once('=').ok_or_else(wrong)?;
        let values: Table = toml::from_str(&format!("values = {values}")).map_err(|_| wrong())?;
        sweep.extend(values.into_iter().map(|(_, values)| (key.trim().to_owned(), values)));
    }
    let entry = Entry {
        output: paths::from_text(&flags.output),
        config: flags.config.as_deref().map(paths::from_text),
        set: flags.set.clone(),
        flags: flags.flags.clone(),
        priority: flags.priority,
        sweep,
    };
    let added = expanded(&entry)?;
    let text = if file.exists() { setup::read_named_file(&file, "list of runs")? } else { String::new() };
    if !text.trim().is_empty() {
        let (_, jobs) = read_list(&file)?;
        if let Some(job) = added.iter().find(|job| jobs.iter().any(|other| other.output == job.output)) {
            let problem = format!("{}: a run writes to {} already", file.display(), job.output.display());
            return Err(Failure::usage(problem).hint("give the run another `--output`"));
        }
    }
    let entry = toml::to_string(&Added { run: [entry] }).map_err(|error| Failure::usage(error.to_string()))?;
    let between = if text.is_empty() || text.ends_with("\n") { "\n" } else { "\n\n" };
    let whole = if text.is_empty() { entry } else { format!("{text}{between}{entry}") };
    outputs::remove_leftovers_beside(&file);
    durable_files::write_atomic(&file, whole.as_bytes())?;
    report::note(&format!("added {} to {}", plural(added.len() as u64, "run"), file.display()));
    Ok(())
}

/// A list that may grow while its runs are trained.
struct Source<'a> {
    file: &'a Path,
    /// Threads of each run.
    threads: Option<u16>,
    read: Instant,
    known: Vec<Job>,
}

impl Source<'_> {
    /// Runs that were added since the list was last read. A list that is damaged at the moment, or deleted, adds none.
    fn added(&mut self) -> Vec<Job> {
        if self.read.elapsed() < READ_EVERY {
            return Vec::new();
        }
        self.read = Instant::now();
        let Ok((_, jobs)) = read_list(self.file) else { return Vec::new() };
        let is_new = |job: &Job| self.known.iter().all(|known| known.output != job.output);
        let new: Vec<Job> = jobs.into_iter().filter(is_new).collect();
        self.known.extend(new.iter().cloned());
        new
    }
}

/// The runs of an entry.
fn expanded(entry: &Entry) -> Outcome<Vec<Job>> {
    let mut combinations: Vec<Vec<(String, String)>> = vec![Vec::new()];
    for (key, values) in &entry.sweep {
        let toml::Value::Array(values) = values else {
            return Err(Failure::usage(format!("sweep: `{key}`: expected a list of values, got {values}")));
        };
        let with = |so_far: &Vec<(String, String)>| {
            let value = |value: &toml::Value| {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                [so_far.as_slice(), &[(key.clone(), text)]].concat()
            };
            values.iter().map(value).collect::<Vec<_>>()
        };
        combinations = combinations.iter().flat_map(with).collect();
    }
    let job = |settings: Vec<(String, String)>| {
        let short = |(key, value): &(String, String)| format!("{}={value}", key.rsplit('.').next().unwrap_or(key));
        let name = settings.iter().map(short).collect::<Vec<_>>().join(",").replace('/', "_");
        let output = if name.is_empty() { entry.output.clone() } else { entry.output.join(name) };
        let mut arguments = vec!["train".to_owned(), "--wait".into()];
        arguments.extend(["--output".into(), paths::to_text(output.as_os_str())]);
        if let Some(config) = &entry.config {
            arguments.extend(["--config".into(), paths::to_text(config.as_os_str())]);
        }
        let set = settings.iter().map(|(key, value)| format!("{key}={value}"));
        for setting in entry.set.iter().cloned().chain(set) {
            arguments.extend(["--set".into(), setting]);
        }
        arguments.extend(entry.flags.iter().cloned());
        Job { output, arguments, priority: entry.priority }
    };
    Ok(combinations.into_iter().map(job).collect())
}

/// A run that has ended, and its exit code: -1 if a signal ended it.
struct Ended {
    output: PathBuf,
    code: i32,
}

/// Trains the runs of a list, `at_once` processes at a time. Returns all runs, and the exit of each.
fn train_all(mut source: Source<'_>, at_once: usize, stop: &Stop) -> Outcome<(Vec<Job>, Vec<Ended>)> {
    let program = std::env::current_exe().map_err(|error| Failure::internal(format!("this program: {error}")))?;
    let mut left = VecDeque::from(source.known.clone());
    let mut running: Vec<(PathBuf, Option<Pid>)> = Vec::new();
    let mut ended: Vec<Ended> = Vec::new();
    // Runs that a killed predecessor of this command started, and that still train.
    let mut begun_before: Vec<Job> = Vec::new();
    let (tell, told) = channel();
    let mut is_stopped = false;
    while !running.is_empty() || !(left.is_empty() && begun_before.is_empty() || stop.requested()) {
        let added = source.added();
        if !added.is_empty() {
            report::note(&format!("{} more in {}", plural(added.len() as u64, "run"), source.file.display()));
            left.extend(added);
            left.make_contiguous().sort_by_key(|job| std::cmp::Reverse(job.priority));
        }
        if let Some(at) = begun_before.iter().position(|job| !RunLock::is_held(&job.output)) {
            // Continued where it ended: a finished run ends at once.
            left.push_front(begun_before.remove(at));
        }
        while running.len() + begun_before.len() < at_once
            && !stop.requested()
            && let Some(job) = left.pop_front()
        {
            if RunLock::is_held(&job.output) {
                report::note(&format!("{}: another process trains it; waiting for its end", job.output.display()));
                begun_before.push(job);
                continue;
            }
            let word = if run_dir::is_run(&job.output) { "continued" } else { "started" };
            let child = start(&program, &job, source.threads)?;
            report::note(&format!("{word} {}", job.output.display()));
            running.push((job.output.clone(), Pid::from_raw(child.id().cast_signed())));
            wait_for(child, job.output, tell.clone())?;
        }
        if stop.requested() && !std::mem::replace(&mut is_stopped, true) {
            for pid in running.iter().filter_map(|(_, pid)| *pid) {
                // A process that has ended meanwhile needs no signal.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        let Ok(one) = told.recv_timeout(POLL_INTERVAL) else { continue };
        running.retain(|(output, _)| *output != one.output);
        if let Some(job) = source.known.iter().find(|job| job.output == one.output && is_of_another(job, one.code)) {
            report::note(&format!("{}: another process trains it; waiting for its end", one.output.display()));
            begun_before.push(job.clone());
            continue;
        }
        let words = if one.code == 0 { "finished".to_owned() } else { format!("ended with exit code {}", one.code) };
        let (number, all) = (ended.len() + 1, source.known.len());
        report::note(&format!("{words}: {} ({number} of {all})", one.output.display()));
        ended.push(one);
    }
    Ok((source.known, ended))
}

/// Whether a run was refused because another process had taken its directory meanwhile, such as one that a killed predecessor of this
/// command had just started.
fn is_of_another(job: &Job, code: i32) -> bool {
    let is_refused = || reason(&job.log()).is_some_and(|reason| reason.contains("in use by another run"));
    code != 0 && (RunLock::is_held(&job.output) || is_refused())
}

/// Sends a message when a run has ended.
fn wait_for(mut child: Child, output: PathBuf, tell: Sender<Ended>) -> Outcome<()> {
    let thread = std::thread::Builder::new().name("run".into()).stack_size(64 << 10);
    let waiting = thread.spawn(move || {
        let code = child.wait().ok().and_then(|status| status.code()).unwrap_or(-1);
        // After this command has left, no one receives the message.
        let _ = tell.send(Ended { output, code });
    });
    waiting.map(drop).map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))
}

/// Starts a run with its output redirected to `OUTPUT.log`.
fn start(program: &Path, job: &Job, threads: Option<u16>) -> Outcome<Child> {
    let log = job.log();
    let failed = |error: std::io::Error| Failure::io("write to it", &log, &error);
    if let Some(parent) = log.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        durable_files::create_directories(parent)?;
    }
    let file = durable_files::append(&log).map_err(failed)?;
    let both = [file.try_clone().map_err(failed)?, file];
    let [out, err] = both.map(Stdio::from);
    let mut command = Command::new(program);
    if let Some(threads) = threads {
        // A run may have a `--threads` of its own, which takes precedence.
        command.env("OMP_NUM_THREADS", threads.to_string());
    }
    // A run that was interrupted continues.
    command
        .args(&job.arguments)
        .args(run_dir::is_run(&job.output).then_some("--keep-training"))
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err);
    command.spawn().map_err(|error| Failure::internal(format!("{}: cannot start it: {error}", program.display())))
}

/// The result of a run: its exit code, steps, and its last evaluation.
fn result_of(job: &Job, ended: &[Ended]) -> Value {
    let code = ended.iter().find(|ended| ended.output == job.output).map(|ended| ended.code);
    let finished = run_dir::read_finished(&job.output).unwrap_or_default();
    let history = &finished["history"];
    let kept = &history["kept_evaluation"];
    let evaluation = if kept.is_null() { &history["last_evaluation"] } else { kept };
    let scores: serde_json::Map<String, Value> = summary::wanted(evaluation)
        .into_iter()
        .map(|measure| (measure.name().to_owned(), evaluation[measure.name()].clone()))
        .filter(|(_, value)| !value.is_null())
        .collect();
    let reason = if code == Some(0) { None } else { reason(&job.log()) };
    json!({"output": job.output.display().to_string(), "exit_code": code, "steps": finished["step"],
        "loss": evaluation["loss"], "bleu": evaluation["bleu"], "exact_match": evaluation["exact_match"],
        "scores": scores, "measure": history["stalled"]["measure"], "model_step": kept["step"], "reason": reason,
        "but_for_seed": job.but_for_seed()})
}

/// The last error in a run's log.
fn reason(log: &Path) -> Option<String> {
    const MAX_BYTES: i64 = 64 << 10;
    let mut file = regular_file::open(log).ok()?;
    let length = file.metadata().ok()?.len().cast_signed();
    file.seek(SeekFrom::Start((length - MAX_BYTES).max(0).cast_unsigned())).ok()?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let last = text.lines().rev().find_map(|line| line.strip_prefix("error: "));
    Some(clipped(last?, 200))
}

/// The value by which a result's run compares evaluations, where larger is better.
fn rank(result: &Value) -> Option<f64> {
    let measure = Measure::from_name(result["measure"].as_str().unwrap_or_default());
    let value = if measure == Measure::Loss { &result["loss"] } else { &result["scores"][measure.name()] };
    value.as_f64().map(|value| measure.score_of(value))
}

/// The results as text: the best run first, then runs without a result, and why they failed. Runs that differ only by their seed also have a mean.
fn table(results: &[Value]) -> String {
    let mut sorted: Vec<&Value> = results.iter().collect();
    let rank = |result: &Value| rank(result).unwrap_or(f64::NEG_INFINITY);
    sorted.sort_by(|a, b| rank(b).total_cmp(&rank(a)));
    let measures: Vec<Measure> = Measure::scores()
        .filter(|measure| results.iter().any(|result| result["scores"].get(measure.name()).is_some()))
        .collect();
    let width = |measure: &Measure| measure.title().len().max(11);
    let mut text = format!("{:>5}  {:>7}  {:>9}", "exit", "steps", "loss");
    measures.iter().for_each(|measure| text += &format!("  {:>1$}", measure.title(), width(measure)));
    text += "  run\n";
    for result in &sorted {
        let whole = |key: &str| result[key].as_i64().map_or("-".into(), |value| value.to_string());
        let loss = result["loss"].as_f64().map_or("-".into(), |loss| format!("{loss:.4}"));
        text += &format!("{:>5}  {:>7}  {loss:>9}", whole("exit_code"), whole("steps"));
        for measure in &measures {
            let value = result["scores"][measure.name()].as_f64().map_or("-".into(), |value| measure.shown(value));
            text += &format!("  {value:>0$}", width(measure));
        }
        text += &format!("  {}\n", visible::line(result["output"].as_str().unwrap_or_default()));
        if let Some(reason) = result["reason"].as_str() {
            text += &format!("{:>5}  {}\n", "", visible::line(reason));
        }
    }
    text + &over_seeds(&sorted, &measures)
}

/// Mean and standard deviation of the runs that differ only by their seed.
fn over_seeds(sorted: &[&Value], measures: &[Measure]) -> String {
    let mut groups: Vec<(&str, Vec<&Value>)> = Vec::new();
    for result in sorted.iter().filter(|result| rank(result).is_some()) {
        let name = result["but_for_seed"].as_str().unwrap_or_default();
        match groups.iter_mut().find(|(other, _)| *other == name) {
            Some((_, group)) => group.push(result),
            None => groups.push((name, vec![result])),
        }
    }
    let mut text = String::new();
    for (name, group) in groups.iter().filter(|(_, group)| group.len() > 1) {
        #[expect(clippy::cast_precision_loss, reason = "a count of runs")]
        let spread = |values: Vec<f64>| {
            let count = values.len() as f64;
            let mean = values.iter().sum::<f64>() / count;
            (mean, (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0)).sqrt())
        };
        let (mean, deviation) = spread(group.iter().filter_map(|result| result["loss"].as_f64()).collect());
        text += &format!("mean and standard deviation over {} seeds: {}\n", group.len(), visible::line(name));
        text += &format!("  {:<14}{mean:>11.4} ± {deviation:.4}\n", "loss");
        for measure in measures {
            let values: Vec<f64> =
                group.iter().filter_map(|result| result["scores"][measure.name()].as_f64()).collect();
            if values.len() > 1 {
                let (mean, deviation) = spread(values);
                let [mean, deviation] = [mean, deviation].map(|value| measure.shown(value));
                text += &format!("  {:<14}{mean:>11} ± {deviation}\n", measure.title());
            }
        }
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_best_first_means_over_seeds_and_reasons() {
        let result = |name: &str, f1: f64| {
            let output = Path::new("runs").join(name);
            let job = Job { output: output.clone(), arguments: Vec::new(), priority: 0 };
            json!({"output": output.display().to_string(), "exit_code": 0, "steps": 9, "loss": 1.0, "scores": {"macro_f1": f1},
                "measure": "macro_f1", "but_for_seed": job.but_for_seed()})
        };
        let failed = json!({"output": "runs/c", "exit_code": 3, "steps": null, "loss": null, "scores": {}, "measure": null,
            "reason": "expected at least 90 MiB", "but_for_seed": "runs/c"});
        let text =
            table(&[failed, result("rate=1,seed=1", 0.5), result("rate=1,seed=2", 0.7), result("rate=2,seed=1", 0.6)]);
        let places =
            ["rate=1,seed=2", "rate=2,seed=1", "rate=1,seed=1", "runs/c", "90 MiB", "over 2 seeds: runs/rate=1"];
        assert!(places.map(|words| text.find(words).expect(words)).is_sorted(), "{text}");
        assert!(text.contains("macro-F1") && text.contains("60.0 % ± 14.1 %") && !text.contains("BLEU"), "{text}");
    }

    #[test]
    fn a_run_that_another_process_began_first_is_told_from_one_that_failed() {
        let directory = tempfile::tempdir().unwrap();
        let job = Job { output: directory.path().join("a"), arguments: Vec::new(), priority: 0 };
        let check = |log: &str, code: i32, expected: bool| {
            std::fs::write(job.log(), log).unwrap();
            assert_eq!(is_of_another(&job, code), expected, "{code}: {log}");
        };
        let in_use = durable_files::Error::Locked { path: job.output.clone(), pid: Some(7) };
        check(&format!("started\nerror: {in_use}\nhint: wait\n"), 2, true);
        check(&format!("error: {in_use}\n"), 0, false);
        check(&format!("error: {in_use}\nerror: no rows\n"), 4, false);
        check("", -1, false);
    }

    #[test]
    fn a_sweep_is_a_run_for_each_combination() {
        let text = "[[run]]\noutput = \"runs\"\nset = [\"train.epochs=1\"]\npriority = 2\n\
            [run.sweep]\n\"run.seed\" = [1, 2]\n\"optimizer.learning_rate\" = [1e-3]\n";
        let list: List = toml::from_str(text).unwrap();
        let jobs = expanded(&list.run[0]).unwrap();
        let outputs: Vec<_> = jobs.iter().map(|job| job.output.display().to_string()).collect();
        assert_eq!(outputs, ["runs/seed=1,learning_rate=0.001", "runs/seed=2,learning_rate=0.001"]);
        assert_eq!(jobs[0].log(), Path::new("runs/seed=1,learning_rate=0.001.log"));
        let arguments = jobs[1].arguments.join(" ");
        assert!(arguments.ends_with("--set train.epochs=1 --set run.seed=2 --set optimizer.learning_rate=0.001"));
        assert!(expanded(&toml::from_str("output = \"r\"\n[sweep]\n\"run.seed\" = 1\n").unwrap()).is_err());
        assert!(toml::from_str::<List>("[[run]]\noutput = \"a\"\nepochs = 3\n").is_err());
    }
}
