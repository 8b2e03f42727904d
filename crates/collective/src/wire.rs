//! The connection to the other processes, for the thread that uses it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::{Engine, PIECE_BYTES, Result};
use crate::values::Values;

/// Bytes and times of a process, counted by the threads that spend them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub sent: AtomicU64,
    pub busy_ns: AtomicU64,
    pub waited_ns: AtomicU64,
}

/// The engine of a process, and calls that are built on it. Every process makes the same calls in the same order.
#[derive(Debug)]
pub struct Wire {
    engine: Box<dyn Engine>,
    counters: Arc<Counters>,
}

impl Wire {
    pub(crate) fn new(engine: Box<dyn Engine>, counters: Arc<Counters>) -> Self {
        Self { engine, counters }
    }

    /// The number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        self.engine.size()
    }

    fn note_sent(&self, bytes: u64) {
        self.counters.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// See [`Engine::exchange`].
    ///
    /// # Errors
    /// As [`Engine::exchange`].
    pub fn exchange(
        &self,
        send: &[u8],
        send_bytes: &[usize],
        received: &mut [u8],
        received_bytes: &[usize],
    ) -> Result<()> {
        let to_others = send_bytes.iter().sum::<usize>() - send_bytes[self.rank()];
        self.note_sent(to_others as u64);
        self.engine.exchange(send, send_bytes, received, received_bytes)
    }

    /// Gathers `mine` of every process, one process behind the other: `bytes[process]` of each.
    ///
    /// # Errors
    /// As [`Engine::exchange`].
    pub fn gather_into(&self, mine: &[u8], gathered: &mut [u8], bytes: &[usize]) -> Result<()> {
        let send = mine.repeat(self.size());
        self.exchange(&send, &vec![mine.len(); self.size()], gathered, bytes)
    }

    /// The message of every process, in the order of their numbers. For short messages.
    ///
    /// # Errors
    /// As [`Engine::exchange`].
    pub fn gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (size, width) = (self.size(), size_of::<u64>());
        let mut lengths = vec![0; size * width];
        self.gather_into(&(mine.len() as u64).to_le_bytes(), &mut lengths, &vec![width; size])?;
        let lengths: Vec<usize> = numbers(&lengths).map(|length| length as usize).collect();
        let mut gathered = vec![0; lengths.iter().sum()];
        self.gather_into(mine, &mut gathered, &lengths)?;
        let mut rest = gathered.as_slice();
        let parts = lengths.iter().map(|&length| {
            let (part, left) = rest.split_at(length);
            rest = left;
            part.to_vec()
        });
        Ok(parts.collect())
    }

    /// Some numbers of every process, equally many of each.
    ///
    /// # Errors
    /// As [`Engine::exchange`].
    pub fn gather_numbers(&self, mine: &[u64]) -> Result<Vec<Vec<u64>>> {
        let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut gathered = vec![0; bytes.len() * self.size()];
        self.gather_into(&bytes, &mut gathered, &vec![bytes.len(); self.size()])?;
        let all: Vec<u64> = numbers(&gathered).collect();
        Ok(all.chunks(mine.len().max(1)).map(<[u64]>::to_vec).collect())
    }

    /// Copies `bytes` from process `root` to all others, a piece at a time.
    ///
    /// # Errors
    /// As [`Engine::broadcast`].
    pub fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()> {
        if self.rank() == root {
            self.note_sent(bytes.len() as u64 * (self.size() as u64 - 1));
        }
        bytes.chunks_mut(PIECE_BYTES).try_for_each(|piece| self.engine.broadcast(root, piece))
    }

    /// [`Wire::broadcast`] for values that may be outside of memory.
    ///
    /// # Errors
    /// As [`Engine::broadcast`] and [`Values`].
    pub fn broadcast_values(&self, root: usize, values: &mut impl Values) -> Result<()> {
        let (bytes, mut piece) = (values.bytes(), Vec::new());
        for start in (0..bytes).step_by(PIECE_BYTES) {
            let here = start..bytes.min(start + PIECE_BYTES);
            if self.rank() == root {
                piece.clear();
                values.read(here, &mut piece)?;
                self.broadcast(root, &mut piece)?;
            } else {
                values.write(here, &mut |bytes| self.broadcast(root, bytes))?;
            }
        }
        Ok(())
    }

    /// The message of process 0. Messages of other processes are ignored.
    ///
    /// # Errors
    /// As [`Engine`].
    pub fn broadcast_from_root(&self, mine: Vec<u8>) -> Result<Vec<u8>> {
        let length = self.gather_numbers(&[mine.len() as u64])?[0][0];
        let mut said = if self.rank() == 0 { mine } else { vec![0; length as usize] };
        self.broadcast(0, &mut said)?;
        Ok(said)
    }

    /// Leaves the group, as every process does at this place.
    pub(crate) fn end(mut self) {
        self.engine.end();
    }

    /// Ends all processes, this one with `code`.
    pub(crate) fn abort(&self, code: i32) -> ! {
        self.engine.abort(code)
    }
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number))
}
