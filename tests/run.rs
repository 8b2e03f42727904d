//! Starts the command and reads its output and files.

pub mod schema;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

/// The embedded default, shortened to a few small steps. Dropout is on.
pub const SHORT: [&str; 20] = [
    "--max-steps",
    "6",
    "--set",
    "train.batch_size=6",
    "--set",
    "memory.micro_batch_samples=4",
    "--set",
    "train.dropout=0.1",
    "--set",
    "train.eval_samples=12",
    "--set",
    "train.eval_generate_samples=3",
    "--set",
    "train.eval_max_new_tokens=4",
    "--set",
    "checkpoint.every_steps=2",
    "--set",
    "run.log_every_steps=1",
    "--output",
    "run",
];

/// Endless steps: a signal to such a run always comes before its last step. Its learning rate does not depend on the number of steps.
pub const ENDLESS: [&str; 4] = ["--set", "schedule.name=constant", "--set", "train.max_steps=1000000"];

/// Words that the line of every step has, and no other line.
pub const OF_A_STEP: &str = "(mean ";

/// The environment in which no plan depends on the speed of the machine, nor on the number of its processors. Tidy refuses a test that
/// starts a process without it.
pub const STATED: [(&str, &str); 2] = [("LOW_MEM_T5_PRICES", "built-in"), ("RAYON_NUM_THREADS", "2")];

/// The longest time of a test's command.
const LONGEST: Duration = Duration::from_secs(900);

/// A separate directory for one test. The command runs in it. At the end every event of its runs must be one that the schema describes.
pub struct Scene {
    directory: TempDir,
}

impl Drop for Scene {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            schema::check_runs_below(self.directory.path());
        }
    }
}

/// Output and exit code of a finished command.
#[derive(Debug)]
pub struct Ran {
    /// The exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// A running command. It is killed when the test ends.
pub struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

/// The short run's arguments, and more. If the others name a model or data, the demo's other parts are named as well, because the command
/// then takes none of them by default.
pub fn short(more: &[&str]) -> Vec<String> {
    let names = |key: &str| more.iter().any(|argument| argument.starts_with(key));
    let (data, weights) = (names("data.train="), names("model.init_from="));
    let model = weights || names("model.config=");
    let mut parts = Vec::new();
    if (data || model) && !more.contains(&"--keep-training") {
        if !model {
            parts.push("model.config=tiny".to_string());
        }
        if !weights && !names("data.tokenizer=") {
            parts.push(sample("data.tokenizer", "sample-tokenizer.json"));
        }
        if !data {
            parts.push(sample("data.train", "sample-train.parquet"));
            parts.push(sample("data.validation", "sample-validation.parquet"));
            parts.extend(["data.max_source_tokens=32", "data.max_target_tokens=32"].map(str::to_string));
        }
    }
    let parts = parts.into_iter().flat_map(|part| ["--set".to_string(), part]);
    let all: Vec<String> =
        SHORT.iter().map(ToString::to_string).chain(parts).chain(more.iter().map(ToString::to_string)).collect();
    each_once(&all)
}

/// The arguments without those that a later one replaces. Tests add arguments to the usual ones, and the command refuses a setting that is
/// given twice.
fn each_once<S: AsRef<str>>(arguments: &[S]) -> Vec<String> {
    let words: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
    let given = |place: usize| match (words[place], words.get(place + 1)) {
        ("--set", Some(assignment)) => assignment.split_once('=').map(|(key, _)| key),
        (
            flag
            @ ("--device" | "--device-memory-budget" | "--epochs" | "--max-steps" | "--memory-budget" | "--output"),
            Some(_),
        ) => Some(flag),
        _ => None,
    };
    let is_replaced = |place: usize| {
        let name = given(place);
        name.is_some() && (place + 1..words.len()).any(|later| given(later) == name)
    };
    let is_gone = |place: usize| is_replaced(place) || place > 0 && is_replaced(place - 1);
    (0..words.len()).filter(|place| !is_gone(*place)).map(|place| words[place].to_owned()).collect()
}

/// A setting whose value is one of the demo's files.
pub fn sample(key: &str, file: &str) -> String {
    format!("{key}={}", repository().join("data").join(file).display())
}

impl Scene {
    /// An empty scene.
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().expect("a temporary directory") }
    }

    /// A path in the scene.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The flag that resumes a run, if it has begun.
    pub fn resumes(&self, run: &str) -> &'static [&'static str] {
        if self.path(run).join("resolved.toml").exists() { &["--keep-training"] } else { &[] }
    }

    /// Writes a file of the scene.
    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory in the scene");
        std::fs::write(&path, text).expect("a file in the scene");
        path
    }

    /// A file of the scene.
    #[track_caller]
    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Reads a file of text.
    pub fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(&self.read(name)).into_owned()
    }

    /// The names in a directory of the scene, sorted.
    pub fn names(&self, name: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(name)).expect("a directory");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Every file below a directory of the scene, with its contents.
    pub fn contents(&self, name: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut left = vec![self.path(name)];
        while let Some(path) = left.pop() {
            if path.is_dir() {
                left.extend(
                    std::fs::read_dir(&path).expect("a directory").map(|entry| entry.expect("an entry").path()),
                );
            } else {
                found.insert(path.clone(), std::fs::read(&path).expect("a file"));
            }
        }
        found
    }

    /// The setting that ends a run of [`ENDLESS`]: two steps after the last saved one, of which the run may have made the first.
    #[track_caller]
    pub fn two_more_steps(&self, run: &str) -> String {
        let names = self.names(&format!("{run}/checkpoints"));
        let saved = names.iter().rev().find_map(|name| name.strip_prefix("step-")?.parse::<u64>().ok());
        format!("train.max_steps={}", saved.expect("a checkpoint") + 2)
    }

    fn command<S: AsRef<str>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_train_low_mem"));
        command.args(each_once(arguments)).current_dir(self.directory.path());
        command.envs(STATED);
        command
    }

    /// Runs the command to its end.
    pub fn run<S: AsRef<str>>(&self, arguments: &[S]) -> Ran {
        to_the_end(self.command(arguments))
    }

    /// Runs the command to its end, in a shell that ran `setup` before, such as `ulimit -f 100`.
    #[cfg(unix)]
    pub fn run_after<S: AsRef<str>>(&self, setup: &str, arguments: &[S]) -> Ran {
        let command = self.command(arguments);
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("{setup}; exec \"$0\" \"$@\"")).arg(command.get_program());
        shell.args(command.get_args()).current_dir(self.directory.path()).envs(STATED);
        to_the_end(shell)
    }

    /// Runs the command to its end below another one, such as `mpirun -n 2`.
    #[cfg_attr(feature = "mpi", allow(dead_code, reason = "a build with MPI has other tests of launchers"))]
    pub fn run_under<S: AsRef<str>>(&self, launcher: &str, arguments: &[S]) -> Ran {
        to_the_end(self.under(launcher, arguments))
    }

    fn under<S: AsRef<str>>(&self, launcher: &str, arguments: &[S]) -> Command {
        let (command, mut words) = (self.command(arguments), launcher.split(' '));
        let mut launched = Command::new(words.next().expect("a launcher"));
        launched.args(words).arg(command.get_program()).args(command.get_args());
        launched.current_dir(self.directory.path()).envs(STATED);
        launched
    }

    /// Runs a line as typed into a shell.
    #[cfg(unix)]
    pub fn shell(&self, line: &str) -> Ran {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(line).current_dir(self.directory.path()).envs(STATED);
        to_the_end(shell)
    }

    /// Starts the command and returns while it runs.
    pub fn start<S: AsRef<str>>(&self, arguments: &[S]) -> Running {
        started(self.command(arguments))
    }

    /// Starts the command below another one, such as `env NAME=value`.
    pub fn start_under<S: AsRef<str>>(&self, launcher: &str, arguments: &[S]) -> Running {
        started(self.under(launcher, arguments))
    }

    /// Checks that no peak of a run was above its prediction by more than 2 % or 4 MiB.
    #[track_caller]
    pub fn expect_predicted_peaks(&self, run: &str) {
        let steps = self.events(run, "step");
        let bytes = |step: &Value, name: &str| step[name].as_u64().expect("bytes");
        for step in &steps {
            let [peak, predicted] = ["peak_rss_bytes", "predicted_peak_bytes"].map(|name| bytes(step, name));
            assert!(peak <= predicted + (predicted / 50).max(4 << 20), "{run}: {peak} of {predicted}: {step}");
        }
        assert!(!steps.is_empty(), "{run} has steps");
    }

    /// The events of a run's `metrics.jsonl` with this name.
    #[track_caller]
    pub fn events(&self, run: &str, event: &str) -> Vec<Value> {
        let text = String::from_utf8(self.read(&format!("{run}/metrics.jsonl"))).expect("UTF-8");
        let lines = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}")));
        lines.filter(|line| line["event"] == event).collect()
    }
}

fn started(mut command: Command) -> Running {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let lines = BufReader::new(child.stdout.take().expect("a pipe"));
    Running { child, lines }
}

/// Runs a command to its end. A command that hangs fails the test by name; the test runner would wait for ever.
fn to_the_end(mut command: Command) -> Ran {
    let named = format!("{command:?}");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let child = command.spawn().unwrap_or_else(|error| panic!("{named}: {error}"));
    let group = child.id();
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let output = ended.recv_timeout(LONGEST).unwrap_or_else(|_| {
        let _ = Command::new("kill").args(["-s", "KILL", "--", &format!("-{group}")]).status();
        panic!("still running after {LONGEST:?}: {named}")
    });
    output.expect("the command ends").into()
}

impl Running {
    /// Reads the command's output up to a line that contains `words`; false if it ended before.
    pub fn wait_for(&mut self, words: &str) -> bool {
        let mut line = String::new();
        while self.lines.read_line(&mut line).expect("a pipe") > 0 {
            if line.contains(words) {
                return true;
            }
            line.clear();
        }
        false
    }

    /// Reads `count` lines of the command's output; false if it ended before.
    pub fn wait_for_lines(&mut self, count: usize) -> bool {
        let mut line = String::new();
        (0..count).all(|_| self.lines.read_line(&mut line).expect("a pipe") > 0)
    }

    /// The first line of standard error with these words. Earlier lines are consumed.
    #[track_caller]
    pub fn error_line(&mut self, words: &str) -> String {
        let errors = self.child.stderr.as_mut().expect("a pipe");
        let mut line = Vec::new();
        let mut byte = [0];
        // Reads no byte beyond the line: the rest is read at the end.
        while errors.read(&mut byte).expect("a pipe") > 0 {
            line.push(byte[0]);
            if byte[0] == b'\n' {
                let text = String::from_utf8_lossy(&line).into_owned();
                if text.contains(words) {
                    return text;
                }
                line.clear();
            }
        }
        panic!("it ended without a line with {words:?}")
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", name, &pid]).status().expect("the kill command");
        assert!(status.success(), "kill -s {name} {pid}");
    }

    /// Kills the command, as a power cut would.
    pub fn kill(mut self) {
        self.child.kill().expect("the command can be killed");
        self.child.wait().expect("the command ends");
    }

    /// Waits for the end.
    pub fn end(mut self) -> Ran {
        let mut out = String::new();
        self.lines.read_to_string(&mut out).expect("a pipe");
        let output = self.child.wait_with_output().expect("the command ends");
        let mut ran = Ran::from(output);
        ran.out = out;
        ran
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ran {
    /// Checks the exit code, and shows the output if it differs.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        let Self { code: got, out, err } = &self;
        assert_eq!(*got, Some(code), "standard output:\n{out}\nstandard error:\n{err}");
        self
    }

    /// Checks that the command printed these words, on either output.
    #[track_caller]
    pub fn expect_words(self, words: &[&str]) -> Self {
        let Self { out, err, .. } = &self;
        for word in words {
            assert!(out.contains(word) || err.contains(word), "`{word}` is not in\n{out}\nnor in\n{err}");
        }
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}:\n{}", self.out))
    }
}

/// The repository's root.
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
