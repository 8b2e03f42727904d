//! Signals: SIGINT, SIGTERM and SIGUSR1 ask the run to stop; a second one ends it at once.
//!
//! The first signal only sets a flag. The trainer reads it between micro-batches, the loop saves and
//! leaves with exit code 75. The second signal ends the process inside the signal handler, whatever it is
//! doing; checkpoints are renamed into place whole, so nothing is corrupted by that.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;

use crate::failure::{Exit, Failure, Outcome};

/// Makes a write beyond the limit on the size of a file (`ulimit -f`) an error of that write. By default the signal that comes
/// with it ends the process. To be called first in `main`.
pub fn survive_file_size_limit() {
    // Nobody reads the flag: a signal that has a handler does nothing else. If it cannot have one, all is as by default.
    let _ = flag::register(SIGXFSZ, Arc::default());
}

/// Whether someone asked the run to stop.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    requested: Arc<AtomicBool>,
}

impl Stop {
    /// Installs the handlers.
    pub fn on_signals() -> Outcome<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM, SIGUSR1] {
            // In this order: the first signal finds the flag still unset and passes the shutdown by.
            flag::register_conditional_shutdown(signal, Exit::Interrupted as i32, Arc::clone(&stop.requested))
                .and_then(|_| flag::register(signal, Arc::clone(&stop.requested)))
                .map_err(|error| Failure::internal(format!("cannot install a handler for signal {signal}: {error}")))?;
        }
        Ok(stop)
    }

    /// Whether a signal has come.
    pub fn requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }
}
