//! A run of the command: starts it under faults, limits its time, and collects its output.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A run that takes longer counts as hanging.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The end of a run.
#[derive(Clone, Debug, Default)]
pub struct Ran {
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether the harness killed the run, because it exceeded the time limit.
    pub hung: bool,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Ran {
    /// A readable description of the end.
    pub fn ending(&self) -> String {
        match (self.hung, self.code, self.signal) {
            (true, ..) => format!("still running after {} s", LIMIT.as_secs()),
            (_, Some(code), _) => format!("exit {code}"),
            (_, None, Some(signal)) => format!("killed by signal {signal}"),
            (_, None, None) => "ended".to_string(),
        }
    }

    /// The first line that reports an error.
    pub fn first_error_line(&self) -> &str {
        let words = |line: &&str| line.starts_with("error") || line.contains("panicked");
        self.err.lines().find(words).unwrap_or_default()
    }
}

/// The library of fault points, and its settings.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The library.
    pub preloaded: PathBuf,
    /// The lines of `FAULT_POINTS`.
    pub program: String,
    /// Threads of the run.
    pub threads: usize,
}

impl Faults {
    /// The same faults, for a run with `threads` threads.
    pub fn on_threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }
}

/// A run that has not ended.
pub struct Running {
    child: Child,
    began: Instant,
    ended: mpsc::Receiver<(bool, Vec<u8>)>,
    hung: bool,
    texts: [Option<Vec<u8>>; 2],
}

/// Starts a program.
///
/// # Errors
///
/// The program cannot be started; this is not a failure of the program itself.
pub fn start(
    program: &Path,
    arguments: &[String],
    directory: &Path,
    faults: Option<&Faults>,
) -> Result<Running, String> {
    let mut command = Command::new(program);
    let threads = faults.map_or(1, |faults| faults.threads);
    command.args(arguments).current_dir(directory).env("RAYON_NUM_THREADS", threads.to_string());
    // A measurement of prices would add file operations, in the first run only.
    command.env("LOW_MEM_T5_PRICES", "built-in");
    if let Some(faults) = faults {
        command.env("LD_PRELOAD", &faults.preloaded).env("FAULT_POINTS", &faults.program);
    }
    start_command(command)
}

/// Starts a command whose arguments and environment are set.
///
/// # Errors
///
/// The command cannot be started; this is not a failure of the command itself.
pub fn start_command(mut command: Command) -> Result<Running, String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let began = Instant::now();
    let name = command.get_program().display().to_string();
    let mut child = command.spawn().map_err(|error| format!("{name}: {error}"))?;
    let (sender, ended) = mpsc::channel();
    let out = child.stdout.take().expect("a pipe");
    let err = child.stderr.take().expect("a pipe");
    // These threads end with their pipes; only the channel is waited for.
    let read = |mut pipe: Box<dyn Read + Send>, is_error: bool, sender: mpsc::Sender<(bool, Vec<u8>)>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = pipe.read_to_end(&mut text);
            let _ = sender.send((is_error, text));
        })
    };
    read(Box::new(out), false, sender.clone());
    read(Box::new(err), true, sender);
    Ok(Running { child, began, ended, hung: false, texts: [None, None] })
}

impl Running {
    /// Waits for the run's end, at most until `moment` after its start. Returns whether it has ended.
    pub fn wait_until(&mut self, moment: Duration) -> bool {
        while self.texts.iter().any(Option::is_none) {
            let left = moment.saturating_sub(self.began.elapsed());
            match self.ended.recv_timeout(left) {
                Ok((is_error, text)) => self.texts[usize::from(is_error)] = Some(text),
                Err(mpsc::RecvTimeoutError::Timeout) => return false,
                Err(mpsc::RecvTimeoutError::Disconnected) => return true,
            }
        }
        true
    }

    /// Kills the run now.
    pub fn kill(&mut self) -> Result<(), String> {
        self.child.kill().map_err(|error| error.to_string())
    }

    /// Waits for the run's end, and kills it after the time limit.
    pub fn end(mut self) -> Result<Ran, String> {
        if !self.wait_until(LIMIT) {
            self.hung = true;
            self.kill()?;
            self.wait_until(LIMIT + LIMIT);
        }
        let status = self.child.wait().map_err(|error| error.to_string())?;
        let [out, err] = self.texts.map(|text| String::from_utf8_lossy(&text.unwrap_or_default()).into_owned());
        Ok(Ran { code: status.code(), signal: status.signal(), hung: self.hung, out, err })
    }
}
