//! Every parser of foreign bytes (bytes that the product did not write), as one table of functions.
//!
//! A [`Parser`] takes any bytes and must return `Ok` (accepted) or `Err` (refused, with a message). It must not panic,
//! must end within seconds, and must not hold much more memory than its input. Two tools use the table. One is
//! libFuzzer, through the targets in `fuzz/`. The other is the seeded [`Mutator`] behind `cargo xtask faults inputs`.
//! It runs without libFuzzer and in child processes, so that a crash or a hang is one row of its table.
//!
//! ```
//! let scratch = foreign_bytes::Scratch::new()?;
//! let parser = foreign_bytes::parser("model_config").unwrap();
//! assert!((parser.parse)(br#"{"model_type": "t5"}"#, &scratch).is_ok());
//! assert!((parser.parse)(br#"{"num_layers": -1}"#, &scratch).is_err());
//! # Ok::<(), std::io::Error>(())
//! ```

mod bombs;
mod bytes;
mod command;
mod corpus;
mod driver;
mod json;
mod mutator;
mod parsers;
mod planted;
mod process_memory;
mod scratch;
mod table;

use std::panic::{catch_unwind, resume_unwind};
use std::sync::{Mutex, Once, PoisonError};

pub use command::try_command;
pub use corpus::corpus;
pub use driver::{Limits, Run, run_child, try_parser};
pub use mutator::Mutator;
pub use parsers::{PARSERS, Parser, Shape};
pub use scratch::Scratch;
pub use table::{Finding, Kind, Tally, report, table};

/// Returns the parser of this name, including planted parsers.
pub fn parser(name: &str) -> Option<&'static Parser> {
    PARSERS.iter().chain(planted::PLANTED).find(|parser| parser.name == name)
}

/// Runs one parser on one input, for libFuzzer. An input that the parser refuses is not a finding.
///
/// # Panics
/// If there is no such parser, if a temporary directory cannot be made, or if the parser panics.
pub fn fuzz(name: &str, input: &[u8]) {
    thread_local! {
        static SCRATCH: Scratch = Scratch::new().expect("a temporary directory");
    }
    static HOOK: Once = Once::new();
    // libFuzzer's hook ends the process at any panic. The tokenizers crate panics on files that it accepts, and the product
    // catches these panics. Panics that the product does not catch end the process here.
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = panic.to_string()
        }));
    });
    let parser = parser(name).expect("a target is named after its parser");
    let ended = catch_unwind(|| SCRATCH.with(|scratch| (parser.parse)(input, scratch)));
    if let Err(panic) = ended {
        eprintln!("{}", LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner));
        resume_unwind(panic);
    }
}

/// The message of the last panic on any thread.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());
