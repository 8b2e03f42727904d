//! Processes that are threads of this one: the engine of tests.

use std::sync::mpsc::{Receiver, Sender, channel};

use crate::engine::{Engine, Error, Result};
use crate::group::Group;
use crate::throttled::{Rate, Throttled};

/// One of the threads.
#[derive(Debug)]
struct Thread {
    rank: usize,
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
}

/// Runs `work` as `processes` processes, and returns the result of each.
///
/// # Panics
/// If one of them does.
pub fn run<T: Send>(processes: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    run_at(processes, None, work)
}

/// [`run`] with a network of this rate between the processes, for tests of this crate.
pub(crate) fn run_at<T: Send>(processes: usize, rate: Option<Rate>, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let mut ends: Vec<Thread> = (0..processes).map(|rank| Thread { rank, to: Vec::new(), from: Vec::new() }).collect();
    for from in 0..processes {
        for to in 0..processes {
            let (sender, receiver) = channel();
            ends[from].to.push(sender);
            ends[to].from.push(receiver);
        }
    }
    let work = |end: Thread| {
        let group = Group::start(move |_| Ok(Throttled::new(end, rate))).expect("a thread");
        work(group)
    };
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || work(end))).collect();
        let ended: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        ended.into_iter().map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

impl Thread {
    fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        self.to[to].send(bytes.to_vec()).map_err(|_| Error::Lost(format!("process {to} is gone")))
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        let received = self.from[from].recv().map_err(|_| Error::Lost(format!("process {from} is gone")))?;
        if received.len() != bytes.len() {
            return Err(Error::OutOfStep { rank: from, got: received.len(), expected: bytes.len() });
        }
        bytes.copy_from_slice(&received);
        Ok(())
    }
}

impl Engine for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.to.len()
    }

    fn exchange(
        &self,
        mut send: &[u8],
        send_bytes: &[usize],
        mut received: &mut [u8],
        received_bytes: &[usize],
    ) -> Result<()> {
        for (to, &bytes) in send_bytes.iter().enumerate() {
            let (part, rest) = send.split_at(bytes);
            self.send(to, part)?;
            send = rest;
        }
        for (from, &bytes) in received_bytes.iter().enumerate() {
            let (part, rest) = received.split_at_mut(bytes);
            self.receive(from, part)?;
            received = rest;
        }
        Ok(())
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()> {
        if self.rank == root {
            (0..self.size()).filter(|&to| to != root).try_for_each(|to| self.send(to, bytes))
        } else {
            self.receive(root, bytes)
        }
    }

    fn abort(&self, code: i32) -> ! {
        panic!("process {} ends all of them with code {code}", self.rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_hears_everybody() {
        let heard = run(3, |group| {
            let said = vec![b'a' + group.rank() as u8; group.rank() + 1];
            assert_eq!(group.broadcast_from_root(said.clone()).unwrap(), b"a");
            assert!(group.any(group.rank() == 2).unwrap() && !group.any(false).unwrap());
            group.barrier().unwrap();
            group.gather(&said).unwrap()
        });
        assert!(heard.iter().all(|heard| *heard == [b"a".to_vec(), b"bb".to_vec(), b"ccc".to_vec()]));
    }

    #[test]
    fn a_process_that_left_is_an_error_of_the_others_and_not_a_hang() {
        let ended = run(2, |group| if group.is_first() { Ok(()) } else { group.barrier() });
        assert!(matches!(ended[1], Err(Error::Lost(_))), "{ended:?}");
    }
}
