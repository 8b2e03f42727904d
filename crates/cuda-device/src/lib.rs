//! Devices through their drivers: memory, launches, copies that overlap with work, recorded launches (CUDA graphs), and the exchange of
//! tensors between cards. Operations are above, and this crate knows none of them.
//!
//! A build without the feature `cuda` has the same functions for the CPU, where most of them do nothing. The module `launch` is for cards alone.
//!
//! Invariants
//!
//! - One stream of a card carries all computation. Memory is allocated, used and freed in the order of this stream.
//! - Other streams carry copies alone. They wait for the stream that computes, and it waits for them.
//! - What a thread keeps of a card for later calls, [`release_thread_caches`] drops.

// Unsafe code is allowed here: a driver is called like a library in C.
#![allow(unsafe_code)]

#[cfg(feature = "cuda")]
mod allocator;
pub mod copies;
#[cfg(feature = "cuda")]
mod copy_streams;
pub mod copy_waits;
mod device;
mod graphs;
#[cfg(feature = "cuda")]
pub mod launch;
mod memory;
pub mod nccl;
pub mod page_locked;
pub mod pieces;
pub mod pinned_copies;
mod replay;
mod rounds;
mod staging;
#[cfg(test)]
extern crate self as cuda_device;
#[cfg(test)]
#[path = "../tests/support/device.rs"]
mod test_device;
mod thread_caches;
mod transfer;

pub use device::{card_and_driver, card_id, cards, check_dtype, cublas, open_card};
pub use graphs::{GraphInputs, Turn, records_launches, records_micro_batches};
pub use memory::{DeviceBytes, device_bytes, is_out_of_device_memory, pool_unit, release_unused_of_device};
pub use replay::{Replay, refuse_recording};
pub use rounds::GraphRounds;
pub use staging::{STAGING_BYTES, Staged, Staging};
pub use thread_caches::{limit_device, release_thread_caches};
pub use transfer::copied_to;
