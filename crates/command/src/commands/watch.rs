//! `train_low_mem watch`: shows a run in the terminal, from its files.

use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use run_report::{MetricsTail, ReadError, screen};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::report::read;
use crate::cli::view_flags::WatchArgs;
use crate::failure::{Failure, Outcome};
use crate::files::run_dir::RunDir;
use crate::screen::report::result;
use crate::screen::terminal_text;

/// The time between two reads of the files.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
/// Keys that quit. Ctrl-C and Escape arrive as bytes, because the terminal is in raw mode.
const LEAVING_KEYS: [&[u8]; 4] = [b"q", b"Q", b"\x03", b"\x1b"];

/// Follows the run until `q`. If standard output is no terminal, prints the current state and ends.
pub fn watch(flags: &WatchArgs) -> Outcome<()> {
    if !std::io::stdout().is_terminal() {
        return result(&screen::summary(&read(&flags.run)?));
    }
    let metrics = RunDir::open_read_only(&flags.run).metrics();
    let followed = MetricsTail::new(&metrics, &flags.run.display().to_string());
    // A signal ends the command as `q` does, after restoring the terminal.
    let is_over = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&is_over))
            .map_err(|error| Failure::internal(format!("cannot listen to signals: {error}")))?;
    }
    let watched = Terminal::take().and_then(|terminal| terminal.follow(followed, &is_over));
    watched.map_err(|error| Failure::internal(format!("the terminal: {error}")))
}

/// Keeps what stands in the way of reading the run, and forgets it once the run can be read. Returns whether the screen changes.
fn note(polled: Result<bool, ReadError>, trouble: &mut Option<String>) -> bool {
    let now = match &polled {
        Ok(_) => None,
        Err(error) if error.error.kind() == ErrorKind::NotFound => Some("waiting for the run to begin".to_owned()),
        Err(error) => Some(error.to_string()),
    };
    let is_new = *trouble != now;
    *trouble = now;
    is_new || polled.is_ok_and(|changed| changed)
}

/// The terminal with a screen of its own. Dropping it restores the terminal.
struct Terminal {
    /// The terminal's earlier settings, if keys are read from it.
    before: Option<Termios>,
}

impl Terminal {
    fn take() -> std::io::Result<Self> {
        let stdin = std::io::stdin();
        let before = if stdin.is_terminal() { Some(tcgetattr(&stdin)?) } else { None };
        if let Some(before) = &before {
            let mut raw = before.clone();
            raw.make_raw();
            tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        }
        let terminal = Self { before };
        // An alternate screen without a cursor, and without wrapping of long rows.
        write_all("\x1b[?1049h\x1b[?25l\x1b[?7l")?;
        Ok(terminal)
    }

    fn follow(&self, mut followed: MetricsTail, is_over: &AtomicBool) -> std::io::Result<()> {
        let (mut trouble, mut shown, mut is_stale) = (None, None, true);
        while !is_over.load(Ordering::Relaxed) {
            is_stale |= note(followed.poll(), &mut trouble);
            let size =
                tcgetwinsize(std::io::stdout()).map_or((80, 24), |size| (size.ws_col.into(), size.ws_row.into()));
            if is_stale || shown != Some(size) {
                (is_stale, shown) = (false, Some(size));
                let rows = screen::rows(followed.run(), size, trouble.as_deref());
                let rows: String = rows.iter().map(|row| format!("\x1b[2K{}\r\n", row.ansi())).collect();
                let rows = terminal_text::drawing(rows.trim_end_matches("\r\n").into());
                write_all(&format!("\x1b[H{rows}\x1b[J"))?;
            }
            if self.is_left()? {
                break;
            }
        }
        Ok(())
    }

    /// Waits for a key until the next read of the files. Returns whether the key quits.
    fn is_left(&self) -> std::io::Result<bool> {
        let stdin = std::io::stdin();
        let mut keys = PollFd::new(&stdin, PollFlags::IN);
        let keys = if self.before.is_some() { std::slice::from_mut(&mut keys) } else { &mut [] };
        match poll(keys, Some(&POLL_INTERVAL)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            found => found?,
        };
        let mut bytes = [0; 64];
        let count = stdin.lock().read(&mut bytes)?;
        // A terminal that has disappeared sends no more keys.
        Ok(count == 0 || LEAVING_KEYS.contains(&&bytes[..count]))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = write_all("\x1b[?7h\x1b[?25h\x1b[?1049l");
        if let Some(before) = &self.before {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}

fn write_all(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_begins_later_leaves_no_trouble_on_the_screen() {
        let failed = |kind: ErrorKind| Err(ReadError { path: "metrics.jsonl".into(), error: kind.into() });
        let mut trouble = None;
        assert!(note(failed(ErrorKind::NotFound), &mut trouble));
        assert_eq!(trouble.as_deref(), Some("waiting for the run to begin"));
        assert!(!note(failed(ErrorKind::NotFound), &mut trouble), "nothing new");
        assert!(note(Ok(true), &mut trouble) && trouble.is_none());
        assert!(!note(Ok(false), &mut trouble));
        assert!(note(failed(ErrorKind::PermissionDenied), &mut trouble));
        assert!(note(Ok(false), &mut trouble) && trouble.is_none());
    }
}
