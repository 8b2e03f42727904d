//! Fault points below a program's own I/O: a library that is loaded before the program (`LD_PRELOAD`) and injects a fault
//! into its N-th file operation. `cargo xtask faults` uses it; no crate depends on it.
//!
//! Every system call that touches a file traps (seccomp) into a handler here. The caller may be the program, the C library,
//! or code that enters the kernel directly. So new I/O code is covered without any change here. The handler counts the
//! operations on the files that the settings name, and injects the fault of the settings.
//!
//! Invariants:
//! * The handler allocates nothing and takes no lock: it may interrupt anything.
//! * Nothing traps unless `FAULT_POINTS` is set. If trapping is not possible, the process prints an error and exits with
//!   125.

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

/// The settings; set before calls trap.
static PROGRAM: OnceLock<Program> = OnceLock::new();
/// Number of operations counted so far.
static COUNTED: AtomicU64 = AtomicU64::new(0);

/// The settings, and data that a handler cannot determine itself.
pub(crate) struct Program {
    settings: Settings,
    /// The working directory at the start, which relative paths begin in.
    working_directory: Vec<u8>,
    /// The descriptor for trace lines; -1 for none.
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

// SAFETY: the section holds addresses of functions, which the loader calls once each; the functions ignore their
// arguments.
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

/// Opens the trace at a descriptor that the program will not get, so that the program's descriptors stay as without a
/// trace.
fn open_trace(path: &str) -> std::io::Result<i64> {
    use std::os::fd::AsRawFd;
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    // SAFETY: duplicates a descriptor that is open; no memory is involved.
    let number = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 700) };
    if number < 0 { Err(std::io::Error::last_os_error()) } else { Ok(number.into()) }
}

/// Handles a trapped call: injects the fault or performs the call, and stores the result where the program expects it.
extern "C" fn on_trap(_signal: libc::c_int, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a signal handler the interrupted code's frame, which no other code uses until the handler returns.
    let registers = unsafe { Registers::from_context(context) };
    let (number, arguments) = registers.call();
    let result = match PROGRAM.get().and_then(|program| Operation::parse(program, number, &arguments)) {
        None => enter(number, &arguments),
        Some(operation) => operation.run(number),
    };
    registers.give(result);
}

impl Operation<'_> {
    /// Counts the operation, then performs it or injects the fault.
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
            Action::Hold(bytes) => {
                hold(bytes);
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
            Action::Hold(_) => "held",
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

/// Maps memory of the process, with all of its pages, and forgets it.
fn hold(bytes: i64) {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE);
    enter(libc::SYS_mmap, &[0, bytes as u64, access as u64, kind as u64, u64::MAX, 0]);
}

/// Sends a signal to this process.
fn kill(signal: i64) {
    let process = enter(libc::SYS_getpid, &[0; 6]);
    enter(libc::SYS_kill, &[process as u64, signal as u64, 0, 0, 0, 0]);
}
