//! Signals: SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask the run to stop; a second signal ends it at once.
//!
//! A thread waits for signals. On the first signal it prints what happens next, and sets a flag. The trainer and the evaluation read the
//! flag between blocks and tokens; the loop saves and exits with code 75. Before a model is loaded there is nothing to save, so the thread
//! itself ends the process, with the same code. On the second signal it prints the steps that are lost, and ends the process with 128 and
//! the signal's number. Checkpoints are renamed into place whole, so neither signal corrupts them.
//!
//! SIGHUP stays ignored if it was ignored at the start, which `nohup` does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use durable_files::Leftover;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};

use crate::failure::{Exit, Failure, Outcome};
use crate::screen::output::{self, Kind, Shown, Stream};

/// Held by the thread that ends the process.
static END: Mutex<()> = Mutex::new(());

/// A thread calls this before it prints why it ends the process. So the process has one end and one exit code. A second thread that calls
/// this waits until the process has ended.
pub fn claim_process_exit() {
    std::mem::forget(END.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Turns a write beyond the file size limit (`ulimit -f`) into an error of that write. By default the signal SIGXFSZ would end the process.
/// `main` must call this first.
pub fn ignore_sigxfsz() {
    // The flag is never read: a signal with a handler has no other effect. If the handler cannot be installed, the default stays.
    let _ = flag::register(SIGXFSZ, Arc::default());
}

/// Whether the run was asked to stop, and the state of the run that decides the reaction.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    requested: Arc<AtomicBool>,
    state: Arc<Mutex<RunState>>,
}

/// The state of a run that decides the reaction to a signal.
#[derive(Clone, Debug, Default)]
struct RunState {
    doing: RunActivity,
    /// Steps made so far, if known.
    step: Option<u64>,
    /// The steps among these that no checkpoint has.
    unsaved_steps: u64,
    /// Whether this process has made a step.
    has_made_steps: bool,
    /// The end of a command that saves nothing. The first signal causes it.
    end: Option<fn() -> Failure>,
    /// Files and directories to remove if a signal ends the process.
    leftovers: Vec<Leftover>,
}

/// The current activity of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RunActivity {
    /// Reading, planning, loading: there is nothing to save.
    #[default]
    Starting,
    /// Steps and evaluations.
    Training,
    /// A checkpoint is being written.
    Saving,
    /// The last step is saved, and the model is being written to the output directory.
    Finishing,
}

/// The reaction to a signal.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Next {
    /// The process ends with this code.
    Leave(i32, String),
    /// The run is asked to stop.
    Stop(String),
}

impl Stop {
    /// Installs the handlers.
    pub fn on_signals() -> Outcome<Self> {
        let stop = Self::default();
        let mut handled = vec![SIGINT, SIGTERM, SIGUSR1];
        if !is_ignored(SIGHUP) {
            handled.push(SIGHUP);
        }
        let failed = |error| Failure::internal(format!("cannot install handlers for signals: {error}"));
        // A signal after the second ends the process without waiting for the second one's message.
        let is_leaving = Arc::new(AtomicBool::new(false));
        for &signal in &handled {
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&is_leaving)).map_err(failed)?;
        }
        let mut signals = Signals::new(&handled).map_err(failed)?;
        let of_thread = stop.clone();
        let thread = std::thread::Builder::new().name("signals".into()).stack_size(256 << 10);
        let spawned = thread.spawn({
            let is_leaving = Arc::clone(&is_leaving);
            move || signals.forever().for_each(|signal| of_thread.handle_signal(signal, &is_leaving))
        });
        if spawned.is_err() {
            // No message here: the first signal sets the flags, and the second finds the flag that ends the process.
            for signal in handled {
                flag::register(signal, Arc::clone(&stop.requested)).map_err(failed)?;
                flag::register(signal, Arc::clone(&is_leaving)).map_err(failed)?;
            }
        }
        Ok(stop)
    }

    /// Whether a signal has come.
    pub fn requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// The flag behind [`Stop::requested`].
    pub fn flag(&self) -> &Arc<AtomicBool> {
        &self.requested
    }

    /// Notes that the run is about to start after `step` steps.
    pub fn starts_at(&self, step: u64) {
        self.state().step = Some(step);
    }

    /// Notes that the run can stop gracefully from here on: a model is loaded, and the loop checks for signals.
    pub fn can_stop_gracefully(&self) {
        self.state().doing = RunActivity::Training;
    }

    /// Notes another step.
    pub fn note_step(&self, step: u64) {
        let mut state = self.state();
        state.step = Some(step);
        state.unsaved_steps += 1;
        state.has_made_steps = true;
    }

    /// Notes that a checkpoint is being written.
    pub fn note_saving(&self) {
        self.state().doing = RunActivity::Saving;
    }

    /// Notes that every step so far is in a checkpoint.
    pub fn note_saved(&self) {
        let mut state = self.state();
        state.doing = RunActivity::Training;
        state.unsaved_steps = 0;
    }

    /// Notes that only the model remains to be written to its place.
    pub fn note_finishing(&self) {
        self.state().doing = RunActivity::Finishing;
    }

    /// Notes that the command saves nothing: the first signal ends it at once with this failure.
    pub fn ends_with(&self, end: fn() -> Failure) {
        self.state().end = Some(end);
    }

    /// Makes a file or directory that is removed if a signal ends the process. No signal is handled between the two.
    pub fn remove_at_end<T>(
        &self,
        make: impl FnOnce() -> Outcome<T>,
        leftover: impl FnOnce(&T) -> Leftover,
    ) -> Outcome<T> {
        let mut state = self.state();
        let made = make()?;
        state.leftovers.push(leftover(&made));
        Ok(made)
    }

    fn state(&self) -> MutexGuard<'_, RunState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's reaction to a signal: prints a message, and sets the flag or ends the process.
    fn handle_signal(&self, signal: i32, is_leaving: &AtomicBool) {
        let state = self.state().clone();
        match state.next(signal, self.requested()) {
            Next::Stop(words) => {
                output::show(Stream::Err, Kind::Message, &Shown::text(&format!("{words}\n")));
                self.requested.store(true, Ordering::Relaxed);
            }
            Next::Leave(code, words) => {
                is_leaving.store(true, Ordering::Relaxed);
                // A run that ends in order at the same time must not exit with its own code after this message.
                claim_process_exit();
                output::show(Stream::Err, Kind::Message, &Shown::text(&format!("{words}\n")));
                output::drain();
                state.leftovers.iter().for_each(Leftover::remove);
                low_level::exit(code);
            }
        }
    }
}

impl RunState {
    /// The reaction to `signal`. `is_another`: it is not the first one.
    fn next(&self, signal: i32, is_another: bool) -> Next {
        let name = low_level::signal_name(signal).unwrap_or("signal");
        let lost = match self.unsaved_steps {
            0 => "loses no step".to_owned(),
            1 => "loses 1 step since the last checkpoint".to_owned(),
            steps => format!("loses {steps} steps since the last checkpoint"),
        };
        if is_another {
            return Next::Leave(128 + signal, format!("{name}: exiting at once; this {lost}"));
        }
        if let Some(end) = self.end {
            return Next::Leave(Exit::Interrupted as i32, end().to_string());
        }
        let step = self.step.unwrap_or(0);
        let does = match self.doing {
            RunActivity::Starting => {
                let failure = nothing_to_save(self.step);
                return Next::Leave(Exit::Interrupted as i32, failure.to_string());
            }
            RunActivity::Training if !self.has_made_steps => "stopping; there is no step to save".into(),
            RunActivity::Training if self.unsaved_steps == 0 => format!("stopping; step {step} is saved"),
            RunActivity::Training => format!("stopping within this step, then saving step {step}"),
            RunActivity::Saving => format!("stopping after the checkpoint of step {step} is written"),
            RunActivity::Finishing => "stopping after the model is in its place; the last step is saved".into(),
        };
        Next::Stop(format!("{name}: {does}; a second signal exits at once and {lost}"))
    }
}

/// The failure of a run that has made no step since its start, after `step` earlier steps, if known.
pub fn nothing_to_save(step: Option<u64>) -> Failure {
    let before = step.map_or_else(|| "before the first step".to_owned(), |step| format!("before step {}", step + 1));
    let again = match step {
        Some(1..) => "to resume, bit for bit, run the same command with `--keep-training`",
        _ => "run the same command with `--keep-training` to start again",
    };
    Failure::new(Exit::Interrupted, format!("interrupted {before}; nothing to save")).hint(again)
}

/// The failure of a command that writes its result last.
pub fn without_result() -> Failure {
    Failure::new(Exit::Interrupted, "interrupted; nothing was written").hint("run the same command again")
}

/// The failure of a command that goes on where it ended.
pub fn with_part() -> Failure {
    Failure::new(Exit::Interrupted, "interrupted").hint("run the same command again: it goes on where it ended")
}

/// The failure of a dry run.
pub fn tried() -> Failure {
    Failure::new(Exit::Interrupted, "interrupted; a dry run saves nothing")
}

/// Whether the process ignores a signal. Linux reports it; on other systems SIGHUP keeps its default.
fn is_ignored(signal: i32) -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return true };
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_none_or(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(state: &RunState, is_another: bool, code: Option<i32>, words: &str) {
        match state.next(SIGTERM, is_another) {
            Next::Leave(left_with, said) => assert_eq!((Some(left_with), said.as_str()), (code, words)),
            Next::Stop(said) => assert_eq!((None, said.as_str()), (code, words)),
        }
    }

    #[test]
    fn the_first_signal_says_what_happens_next_and_the_second_what_is_lost() {
        let starting = RunState::default();
        check(
            &starting,
            false,
            Some(75),
            "interrupted before the first step; nothing to save\nhint: run the same command with `--keep-training` to start again",
        );
        let resumed = RunState { step: Some(7), ..starting };
        check(
            &resumed,
            false,
            Some(75),
            "interrupted before step 8; nothing to save\nhint: to resume, bit for bit, run the same command with `--keep-training`",
        );
        let before_a_step = RunState { doing: RunActivity::Training, ..resumed };
        check(
            &before_a_step,
            false,
            None,
            "SIGTERM: stopping; there is no step to save; a second signal exits at once and loses no step",
        );
        let steps = RunState { step: Some(19), unsaved_steps: 12, has_made_steps: true, ..before_a_step };
        let first = "SIGTERM: stopping within this step, then saving step 19; a second signal exits at once and loses 12 steps since the last checkpoint";
        check(&steps, false, None, first);
        check(&steps, true, Some(143), "SIGTERM: exiting at once; this loses 12 steps since the last checkpoint");
        let saving = RunState { doing: RunActivity::Saving, unsaved_steps: 1, ..steps.clone() };
        check(
            &saving,
            false,
            None,
            "SIGTERM: stopping after the checkpoint of step 19 is written; a second signal exits at once and loses 1 step since the last checkpoint",
        );
        let tried = RunState { end: Some(tried), ..steps.clone() };
        check(&tried, false, Some(75), "interrupted; a dry run saves nothing");
        let saved = RunState { unsaved_steps: 0, ..steps };
        check(&saved, true, Some(143), "SIGTERM: exiting at once; this loses no step");
    }
}
