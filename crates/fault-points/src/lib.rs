//! Fault points below a program's own I/O: a library that is loaded before it (`LD_PRELOAD`) and strikes its
//! N-th operation on a file. `cargo xtask faults` uses it; no crate depends on it.
//!
//! Every system call that touches a file traps (seccomp) into a handler here, whoever made it: this program, the
//! C library in its own depths, or code that enters the kernel directly. So a write is covered on the day that it is written.
//! The handler counts the operations on the files that the settings name, and does what they say.
//!
//! Invariants:
//! * The handler allocates nothing and takes no lock: it may interrupt anything.
//! * Nothing is trapped unless `FAULT_POINTS` is set. Where trapping is not possible the process says so and ends with 125.

#![allow(unsafe_code, reason = "signal frames, seccomp and raw system calls have no safe interface")]
#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

mod calls;
mod enter;
mod filter;
mod operation;
mod settings;
#[cfg(test)]
mod tests;
mod threads;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use enter::{Registers, enter};
use operation::Operation;
use settings::{Action, Settings};

/// The settings; set from the moment that calls trap.
static PROGRAM: OnceLock<Program> = OnceLock::new();
/// Operations that counted so far.
static COUNTED: AtomicU64 = AtomicU64::new(0);

/// The settings, and what a handler cannot find out for itself.
pub(crate) struct Program {
    settings: Settings,
    /// The working directory at the start; relative paths begin there.
    working_directory: Vec<u8>,
    /// Where lines are written; -1 for nowhere.
    trace: i64,
}

/// Runs before `main`, because its address is in `.init_array`.
extern "C" fn start() {
    let Ok(text) = std::env::var("FAULT_POINTS") else { return };
    if let Err(message) = install(&text) {
        eprintln!("fault-points: {message}");
        std::process::exit(125);
    }
}

// SAFETY: the section holds addresses of functions, which the loader calls once each; what it passes is ignored.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

fn install(text: &str) -> Result<(), String> {
    let settings = Settings::parse(text)?;
    if let Some(name) = settings.calls.iter().find(|name| calls::all().all(|call| call.name != name.as_str())) {
        return Err(format!("unknown call `{name}`"));
    }
    let working_directory = std::env::current_dir().map_err(|error| error.to_string())?;
    let trace = match &settings.trace {
        None => -1,
        Some(path) => open_trace(path).map_err(|error| format!("{path}: {error}"))?,
    };
    let working_directory = working_directory.into_os_string().into_encoded_bytes();
    let program = Program { settings, working_directory, trace };
    PROGRAM.set(program).map_err(|_| "started twice".to_string())?;
    filter::install(on_trap).map_err(|error| format!("cannot trap system calls: {error}"))
}

/// A number that the program will not get for a file of its own, so that numbers are what they would be without it.
fn open_trace(path: &str) -> std::io::Result<i64> {
    use std::os::fd::AsRawFd;
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    // SAFETY: duplicates a descriptor that is open; no memory is involved.
    let number = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 700) };
    if number < 0 { Err(std::io::Error::last_os_error()) } else { Ok(number.into()) }
}

/// A call trapped: does what is to be done, and puts the result where the program expects it.
extern "C" fn on_trap(_signal: libc::c_int, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a signal handler the frame of what it interrupted, which nobody else uses until the handler returns.
    let registers = unsafe { Registers::of(context) };
    let (number, arguments) = registers.call();
    let result = match PROGRAM.get().and_then(|program| Operation::of(program, number, &arguments)) {
        None => enter(number, &arguments),
        Some(operation) => operation.run(number),
    };
    registers.give(result);
}

impl Operation<'_> {
    /// Counts the operation, and does it or what is to be done in its place.
    fn run(&self, number: i64) -> i64 {
        let arguments = self.arguments();
        let count = COUNTED.fetch_add(1, Ordering::Relaxed) + 1;
        let action = self.program.settings.action(count);
        if matches!(action, Action::KillBefore) {
            self.trace(count, 0, "killed before");
            kill(libc::SIGKILL.into());
        }
        let result = match action {
            Action::Errno(error) => -error,
            Action::Lie => self.success(),
            Action::Short => enter(number, &self.part(3)),
            Action::KillIn => enter(number, &self.part(2)),
            Action::Signal(signal) => {
                kill(signal);
                enter(number, arguments)
            }
            Action::Count | Action::KillBefore | Action::KillAfter => enter(number, arguments),
        };
        let note = match action {
            Action::Count => "",
            Action::KillIn => "killed in",
            Action::KillAfter => "killed after",
            Action::Errno(_) => "failed",
            Action::Signal(_) => "signalled",
            Action::Short => "short",
            Action::Lie => "lied",
            Action::KillBefore => "killed before",
        };
        self.trace(count, result, note);
        if action == Action::Count && result == 0 {
            self.record(count);
        }
        if matches!(action, Action::KillIn | Action::KillAfter) {
            kill(libc::SIGKILL.into());
        }
        result
    }
}

/// Sends this process a signal.
fn kill(signal: i64) {
    let process = enter(libc::SYS_getpid, &[0; 6]);
    enter(libc::SYS_kill, &[process as u64, signal as u64, 0, 0, 0, 0]);
}
