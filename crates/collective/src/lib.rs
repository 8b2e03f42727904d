//! Processes that train one model together, and the sums that do not depend on how many they are.
//!
//! * [`Group`]: this process among the others. What they say to each other goes through an engine that exists ([`Engine`]): MPI
//!   between processes (feature `mpi`), threads of one process in tests ([`threads`]). A thread of the group's own talks to the others,
//!   so that sums go on ([`Group::hand_over`]) while others compute.
//! * [`Shards`]: the parts that an optimizer batch is divided into, and those that a process has.
//! * [`sums`]: the sum of one gradient from each shard, in an order that is a function of the number of shards alone. Two
//!   processes with two shards each and one process with four get the same bits.
//!
//! Invariants: every call is collective, that is every process of the group makes it, and all in the same order. No call moves
//! more than [`PIECE_BYTES`] at a time from one process, so buffers are bounded. This crate knows no tensor and no model.

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
pub use group::{Awaited, Group, Pending, Spent};
pub use shards::{Shards, Stretch};
pub use throttled::{Rate, Throttled};
pub use values::{Values, Zeros};
pub use wire::Wire;
