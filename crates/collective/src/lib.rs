//! Processes that train one model together, and sums that do not depend on the number of processes.
//!
//! * [`Group`]: this process's handle of its group. An [`Engine`] moves the bytes: MPI between processes (feature `mpi`),
//!   or threads of one process in tests ([`threads`]). The group has a thread for this,
//!   so that sums go on ([`Group::submit`]) while other threads compute.
//! * [`Shards`]: the parts that an optimizer batch is divided into, and those that a process has.
//! * [`sums`]: the sum of one gradient from each shard, in an order that is a function of the number of shards alone. Two
//!   processes with two shards each and one process with four get the same bits.
//!
//! Invariants: every call is collective: every process of the group makes it, and all make their calls in the same order. No call moves
//! more than [`PIECE_BYTES`] at a time from one process, so buffers are bounded. This crate uses no tensor and no model.

mod engine;
#[cfg(feature = "mpi")]
pub mod engine_mpi;
mod group;
pub mod launcher;
pub mod network;
mod shards;
pub mod sums;
pub mod threads;
mod throttled;
mod values;
mod wire;

pub use engine::{Engine, Error, PIECE_BYTES, Result};
pub use group::{CommunicationStats, Group, Pending, WaitSignal};
pub use shards::{Extent, Shards};
pub use values::{Values, Zeros};
pub use wire::Wire;
