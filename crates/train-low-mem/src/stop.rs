//! Signals: SIGINT, SIGTERM and SIGUSR1 ask the run to stop; a second one ends it at once.
//!
//! The first signal only sets a flag. The trainer reads it between micro-batches, the loop saves and
//! leaves with exit code 75. The second signal ends the process inside the signal handler, whatever it is
//! doing; checkpoints are renamed into place whole, so nothing is corrupted by that.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

use crate::failure::{Exit, Failure, Outcome};

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
