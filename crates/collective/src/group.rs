//! A process among others.

use std::cell::Cell;
use std::fmt::Debug;
use std::rc::Rc;

/// Bytes that a process sends at a time, at most.
pub const PIECE_BYTES: usize = 4 << 20;

/// What can go wrong between processes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine gave up: another process is gone, or the network between them.
    #[error("the processes lost each other: {0}")]
    Lost(String),
    /// They say different things at one place of the program.
    #[error("process {rank} sent {got} bytes where {expected} were expected; do all run the same program and config?")]
    OutOfStep {
        /// Who sent them.
        rank: usize,
        /// How many were sent.
        got: usize,
        /// How many were expected.
        expected: usize,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An engine that moves bytes between processes. Each call is made by all of them.
pub trait Engine: Debug {
    /// The number of this process, from 0.
    fn rank(&self) -> usize;
    /// How many processes there are.
    fn size(&self) -> usize;
    /// Sends to each process the next `send_bytes[process]` bytes of `send`, and puts what each sends here one behind the other
    /// into `received`, `received_bytes[process]` bytes of each.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    fn exchange(&self, send: &[u8], send_bytes: &[usize], received: &mut [u8], received_bytes: &[usize]) -> Result<()>;
    /// Makes `bytes` everywhere what they are at process `root`.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()>;
    /// Ends every process, this one with `code`.
    fn abort(&self, code: i32) -> !;
}

/// This process and the others. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Group {
    engine: Rc<dyn Engine>,
    sent: Rc<Cell<u64>>,
}

impl Group {
    /// The group that an engine connects.
    pub fn new(engine: impl Engine + 'static) -> Self {
        Self { engine: Rc::new(engine), sent: Rc::default() }
    }

    /// A group of this process alone.
    pub fn alone() -> Self {
        Self::new(Alone)
    }

    /// The number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// How many processes there are.
    pub fn size(&self) -> usize {
        self.engine.size()
    }

    /// Whether this is the process that prints and writes.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Bytes that this process has sent to others so far.
    pub fn sent_bytes(&self) -> u64 {
        self.sent.get()
    }

    /// See [`Engine::exchange`].
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    pub fn exchange(
        &self,
        send: &[u8],
        send_bytes: &[usize],
        received: &mut [u8],
        received_bytes: &[usize],
    ) -> Result<()> {
        let to_others = send_bytes.iter().sum::<usize>() - send_bytes[self.rank()];
        self.sent.set(self.sent.get() + to_others as u64);
        self.engine.exchange(send, send_bytes, received, received_bytes)
    }

    /// Gathers `mine` of every process, one behind the other: `bytes[process]` of each.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    pub fn gather_into(&self, mine: &[u8], gathered: &mut [u8], bytes: &[usize]) -> Result<()> {
        let send = mine.repeat(self.size());
        self.exchange(&send, &vec![mine.len(); self.size()], gathered, bytes)
    }

    /// What every process says, in the order of their numbers. For short messages.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
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

    /// Some numbers of every process, as many of each.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    pub fn gather_numbers(&self, mine: &[u64]) -> Result<Vec<Vec<u64>>> {
        let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut gathered = vec![0; bytes.len() * self.size()];
        self.gather_into(&bytes, &mut gathered, &vec![bytes.len(); self.size()])?;
        let all: Vec<u64> = numbers(&gathered).collect();
        Ok(all.chunks(mine.len().max(1)).map(<[u64]>::to_vec).collect())
    }

    /// Whether any process says yes.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    pub fn any(&self, mine: bool) -> Result<bool> {
        Ok(self.gather_numbers(&[u64::from(mine)])?.iter().any(|said| said[0] != 0))
    }

    /// Makes `bytes` everywhere what they are at process `root`, a piece at a time.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()> {
        if self.rank() == root {
            self.sent.set(self.sent.get() + bytes.len() as u64 * (self.size() as u64 - 1));
        }
        bytes.chunks_mut(PIECE_BYTES).try_for_each(|piece| self.engine.broadcast(root, piece))
    }

    /// What process 0 says. The others may say anything.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    pub fn of_first(&self, mine: Vec<u8>) -> Result<Vec<u8>> {
        let length = self.gather_numbers(&[mine.len() as u64])?[0][0];
        let mut said = if self.is_first() { mine } else { vec![0; length as usize] };
        self.broadcast(0, &mut said)?;
        Ok(said)
    }

    /// Waits until every process is here.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn meet(&self) -> Result<()> {
        self.any(false).map(drop)
    }

    /// Ends every process, this one with `code`.
    pub fn abort(&self, code: i32) -> ! {
        self.engine.abort(code)
    }
}

/// One process has nobody to talk to but itself.
#[derive(Debug)]
struct Alone;

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

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number))
}
