//! Engines, which move bytes between processes, and their errors.

use std::fmt::Debug;

/// Bytes that a process sends at a time, at most.
pub const PIECE_BYTES: usize = 4 << 20;

/// An error between processes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine gave up: another process has ended, or the network failed.
    #[error("the processes lost each other: {0}")]
    Lost(String),
    /// Processes sent different messages at the same place of the program.
    #[error("process {rank} sent {got} bytes where {expected} were expected; do all run the same program and config?")]
    OutOfStep {
        /// The number of the process that sent the bytes.
        rank: usize,
        /// How many were sent.
        got: usize,
        /// How many were expected.
        expected: usize,
    },
    /// Values could not be read or written where they are.
    #[error("values that processes send each other: {0}")]
    Values(String),
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An engine that moves bytes between processes. Each call is made by all of them, and all calls by one thread.
pub trait Engine: Debug {
    /// The number of this process, from 0.
    fn rank(&self) -> usize;
    /// The number of processes.
    fn size(&self) -> usize;
    /// Sends to each process the next `send_bytes[process]` bytes of `send`. Puts the bytes that each sends to this process into
    /// `received`, one process behind the other: `received_bytes[process]` bytes of each.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    fn exchange(&self, send: &[u8], send_bytes: &[usize], received: &mut [u8], received_bytes: &[usize]) -> Result<()>;
    /// Copies `bytes` from process `root` to all others.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()>;
    /// Leaves the group, as every process does at this place.
    fn end(&mut self) {}
    /// Ends all processes, this one with `code`.
    fn abort(&self, code: i32) -> !;
}

/// The engine of a group of one process.
#[derive(Debug)]
pub(crate) struct Alone;

impl Engine for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn exchange(&self, send: &[u8], _: &[usize], received: &mut [u8], _: &[usize]) -> Result<()> {
        if send.len() != received.len() {
            return Err(Error::OutOfStep { rank: 0, got: send.len(), expected: received.len() });
        }
        received.copy_from_slice(send);
        Ok(())
    }

    fn broadcast(&self, _: usize, _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn abort(&self, code: i32) -> ! {
        std::process::exit(code)
    }
}
