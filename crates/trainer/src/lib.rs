//! Exact optimizer steps from batches of token ids, and everything needed to make them again after a crash.
//!
//! * [`schedule`]: the learning rate of every step; [`freeze`]: what trains; [`bleu`]: corpus BLEU.
//! * [`RunLock`]: one writer per output directory; [`write_atomic`]: the one way in which the house writes small files.
//!
//! Architecture invariants: this crate parses no configuration file, prints nothing and never asks the operating system
//! about memory. How a batch is cut is told by the caller and changes nothing but the order of summation.

pub mod bleu;
mod error;
mod files;
pub mod freeze;
pub mod micro_batches;
mod run_lock;
pub mod schedule;

pub use error::{Error, Result};
pub use files::write_atomic;
pub use run_lock::RunLock;
