//! A network of a given rate between threads, for tests: an engine whose calls take as long as over that network.
//!
//! The model: each process has a link of this rate in both directions. A message takes the time of the bytes that this process sends
//! or of those that it receives, whichever are more. A broadcast takes the time of all copies that its root sends.

use std::time::{Duration, Instant};

use crate::engine::{Engine, Result};

/// The rate of a network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rate {
    /// The rate in each direction.
    pub(crate) bits_per_second: f64,
}

impl Rate {
    /// The time that a message of `bytes` bytes takes.
    pub(crate) fn time(self, bytes: u64) -> Duration {
        #[expect(clippy::cast_precision_loss, reason = "bytes of a message")]
        let bits = bytes as f64 * 8.0;
        Duration::try_from_secs_f64(bits / self.bits_per_second).unwrap_or(Duration::MAX)
    }
}

/// An engine, and the rate that it is slowed down to, if any.
#[derive(Debug)]
pub(crate) struct Throttled<E> {
    engine: E,
    rate: Option<Rate>,
}

impl<E: Engine> Throttled<E> {
    /// An engine that moves bytes no faster than this rate.
    pub(crate) fn new(engine: E, rate: Option<Rate>) -> Self {
        Self { engine, rate }
    }

    /// Makes a call. Returns no earlier than these bytes would take.
    fn taking<T>(&self, bytes: usize, move_them: impl FnOnce() -> Result<T>) -> Result<T> {
        let began = Instant::now();
        let moved = move_them()?;
        let takes = self.rate.map_or(Duration::ZERO, |rate| rate.time(bytes as u64));
        while let Some(left) = takes.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
            // A thread that waits for the end of a message wakes this thread.
            std::thread::park_timeout(left);
        }
        Ok(moved)
    }
}

impl<E: Engine> Engine for Throttled<E> {
    fn rank(&self) -> usize {
        self.engine.rank()
    }

    fn size(&self) -> usize {
        self.engine.size()
    }

    fn exchange(&self, send: &[u8], send_bytes: &[usize], received: &mut [u8], received_bytes: &[usize]) -> Result<()> {
        let with_others = |bytes: &[usize]| bytes.iter().sum::<usize>() - bytes[self.rank()];
        let bytes = with_others(send_bytes).max(with_others(received_bytes));
        self.taking(bytes, || self.engine.exchange(send, send_bytes, received, received_bytes))
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()> {
        self.taking(bytes.len() * (self.size() - 1), || self.engine.broadcast(root, bytes))
    }

    fn end(&mut self) {
        self.engine.end();
    }

    fn abort(&self, code: i32) -> ! {
        self.engine.abort(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads;

    #[test]
    fn a_message_takes_the_time_of_its_bytes_and_work_goes_on_meanwhile() {
        let rate = Rate { bits_per_second: 8e6 };
        assert_eq!(rate.time(10_000), Duration::from_millis(10));
        let spent = threads::run_at(2, Some(rate), |group| {
            let pending = group.submit(|wire| wire.broadcast(0, &mut [1; 10_000]));
            assert_eq!(group.spent().waited, Duration::ZERO, "whoever hands work over does not wait");
            pending.wait().expect("the thread lives").expect("nobody is lost");
            group.barrier().expect("nobody is lost");
            group.spent()
        });
        assert!(spent.iter().all(|spent| spent.communication >= Duration::from_millis(10)), "{spent:?}");
        assert_eq!(spent[0].sent_bytes, 10_000 + 8);
    }
}
