//! A process in its group.
//!
//! A separate thread owns the engine. Other threads hand work to it through a bounded queue, and it does the work in order.
//! So every process makes the same calls in the same order, and a thread may compute after it has submitted work.

use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::engine::{Alone, Engine, Error, Result};
use crate::wire::{Counters, Wire};

/// The most work in the queue.
const QUEUE_CAPACITY: usize = 1024;
/// The time between two tests of a message for which no thread waits.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// The time that a busy engine may take to end all processes.
const ABORTS_WITHIN: Duration = Duration::from_secs(3);

enum Job {
    Work(Box<dyn FnOnce(&Wire) + Send>),
    End,
}

/// Does the work.
enum Worker {
    /// The calling thread: there are no other processes.
    Here(Wire),
    Thread {
        jobs: SyncSender<Job>,
        ended: Receiver<()>,
    },
}

struct Shared {
    rank: usize,
    size: usize,
    worker: Worker,
    counters: Arc<Counters>,
    awaited: WaitSignal,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {}", self.rank, self.size)
    }
}

/// Whether a thread waits for the end of an engine's work.
#[derive(Clone, Debug, Default)]
pub struct WaitSignal {
    is_awaited: Arc<AtomicBool>,
    worker: Arc<OnceLock<Thread>>,
}

impl WaitSignal {
    /// Lets other threads compute for a moment, a short one if a thread waits. `looks`: how often this was called for a message.
    pub fn pause(&self, looks: u32) {
        const SPINS: u32 = 256;
        if looks < SPINS && self.is_awaited.load(Ordering::Acquire) {
            std::thread::yield_now();
        } else {
            std::thread::park_timeout(POLL_INTERVAL);
        }
    }

    fn set(&self, is_awaited: bool) {
        self.is_awaited.store(is_awaited, Ordering::Release);
        if let (true, Some(worker)) = (is_awaited, self.worker.get()) {
            worker.unpark();
        }
    }
}

/// The bytes and the time that a process has spent on communication so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommunicationStats {
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Time in which bytes were being moved, or one process waited for another.
    pub communication: Duration,
    /// The part of `communication` in which nothing was computed because of it.
    pub waited: Duration,
}

impl CommunicationStats {
    /// The difference to an earlier count.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            sent_bytes: self.sent_bytes - earlier.sent_bytes,
            communication: self.communication.saturating_sub(earlier.communication),
            waited: self.waited.saturating_sub(earlier.waited),
        }
    }

    /// The share of communication that computation overlapped. `None` without communication.
    pub fn hidden(self) -> Option<f64> {
        let all = self.communication.as_secs_f64();
        (all > 0.0).then(|| (1.0 - self.waited.as_secs_f64() / all).max(0.0))
    }
}

/// Work that was submitted.
#[derive(Debug)]
pub struct Pending<T> {
    answer: Receiver<T>,
    shared: Rc<Shared>,
}

impl<T> Pending<T> {
    /// Waits for the end of the work.
    ///
    /// # Errors
    /// [`Error::Lost`] if the thread that does it has ended.
    pub fn wait(self) -> Result<T> {
        match self.answer.try_recv() {
            Ok(answer) => return Ok(answer),
            Err(TryRecvError::Disconnected) => return Err(gone()),
            Err(TryRecvError::Empty) => {}
        }
        let answer = self.shared.timed_wait(|| self.answer.recv());
        answer.map_err(|_| gone())
    }
}

fn gone() -> Error {
    Error::Lost("the thread that talks to the others has ended".into())
}

impl Shared {
    /// Calls `wait`, which waits for the engine, and counts the time.
    fn timed_wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        self.awaited.set(true);
        let waited = wait();
        self.awaited.set(false);
        note(&self.counters.waited_ns, began);
        waited
    }
}

fn note(counter: &std::sync::atomic::AtomicU64, began: Instant) {
    counter.fetch_add(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// This process's handle of its group. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Group {
    shared: Rc<Shared>,
}

impl Group {
    /// The group that an engine connects. `make` is called by the thread that then makes all calls of the engine.
    ///
    /// # Errors
    /// `make` returns an error.
    pub fn start<E: Engine + 'static>(make: impl FnOnce(WaitSignal) -> Result<E> + Send + 'static) -> Result<Self> {
        let (jobs, queue) = sync_channel(QUEUE_CAPACITY);
        let (started, first) = channel();
        let (ending, ended) = channel();
        let (counters, awaited) = (Arc::new(Counters::default()), WaitSignal::default());
        let (of_thread, paused) = (Arc::clone(&counters), awaited.clone());
        let work = move || {
            let _ = paused.worker.set(std::thread::current());
            let wire = match make(paused) {
                Ok(engine) => Wire::new(Box::new(engine), Arc::clone(&of_thread)),
                Err(error) => return drop(started.send(Err(error))),
            };
            let _ = started.send(Ok((wire.rank(), wire.size())));
            work_on(wire, &queue, &of_thread);
            let _ = ending.send(());
        };
        let spawned = std::thread::Builder::new().name("communication".into()).spawn(work);
        spawned.map_err(|error| Error::Lost(format!("no thread for the others: {error}")))?;
        let (rank, size) = first.recv().map_err(|_| gone())??;
        let worker = Worker::Thread { jobs, ended };
        Ok(Self { shared: Rc::new(Shared { rank, size, worker, counters, awaited }) })
    }

    /// A group of this process alone.
    pub fn alone() -> Self {
        let counters = Arc::new(Counters::default());
        let worker = Worker::Here(Wire::new(Box::new(Alone), Arc::clone(&counters)));
        Self { shared: Rc::new(Shared { rank: 0, size: 1, worker, counters, awaited: WaitSignal::default() }) }
    }

    /// The number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// Whether this is the process that prints and writes files.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Bytes that this process has sent to others, and its time.
    pub fn spent(&self) -> CommunicationStats {
        let Counters { sent, busy_ns, waited_ns } = &*self.shared.counters;
        let [sent_bytes, busy, waited] = [sent, busy_ns, waited_ns].map(|counter| counter.load(Ordering::Relaxed));
        CommunicationStats {
            sent_bytes,
            communication: Duration::from_nanos(busy),
            waited: Duration::from_nanos(waited),
        }
    }

    /// Counts bytes that this process sends to others outside the group.
    pub fn note_sent(&self, bytes: u64) {
        self.shared.counters.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Submits work, which is done after all earlier work. Every process submits the same work in the same order.
    pub fn submit<T: Send + 'static>(&self, work: impl FnOnce(&Wire) -> T + Send + 'static) -> Pending<T> {
        let (sender, answer) = channel();
        let pending = Pending { answer, shared: Rc::clone(&self.shared) };
        match &self.shared.worker {
            Worker::Here(wire) => drop(sender.send(work(wire))),
            Worker::Thread { jobs, .. } => {
                let job = Job::Work(Box::new(move |wire| drop(sender.send(work(wire)))));
                // That the thread has ended shows when its answer is waited for.
                if let Err(std::sync::mpsc::TrySendError::Full(job)) = jobs.try_send(job) {
                    let _ = self.shared.timed_wait(|| jobs.send(job));
                }
            }
        }
        pending
    }

    fn call<T: Send + 'static>(&self, work: impl FnOnce(&Wire) -> Result<T> + Send + 'static) -> Result<T> {
        self.submit(work).wait()?
    }

    /// See [`Wire::gather`].
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    pub fn gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mine = mine.to_vec();
        self.call(move |wire| wire.gather(&mine))
    }

    /// See [`Wire::gather_numbers`].
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    pub fn gather_numbers(&self, mine: &[u64]) -> Result<Vec<Vec<u64>>> {
        let mine = mine.to_vec();
        self.call(move |wire| wire.gather_numbers(&mine))
    }

    /// Whether `mine` is true in any process.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    pub fn any(&self, mine: bool) -> Result<bool> {
        Ok(self.gather_numbers(&[u64::from(mine)])?.iter().any(|said| said[0] != 0))
    }

    /// See [`Wire::broadcast_from_root`].
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfStep`].
    pub fn broadcast_from_root(&self, mine: Vec<u8>) -> Result<Vec<u8>> {
        self.call(move |wire| wire.broadcast_from_root(mine))
    }

    /// Waits until every process is here.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn barrier(&self) -> Result<()> {
        self.any(false).map(drop)
    }

    /// Leaves the group, as every process does at this place. The engine is dropped, and no more calls can be made.
    pub fn end(&self) {
        if let Worker::Thread { jobs, ended } = &self.shared.worker
            && jobs.send(Job::End).is_ok()
        {
            // An error means that the thread has ended already.
            let _ = ended.recv();
        }
    }

    /// Ends all processes, this one with `code`.
    pub fn abort(&self, code: i32) -> ! {
        let Worker::Thread { jobs, ended } = &self.shared.worker else { std::process::exit(code) };
        let job = Job::Work(Box::new(move |wire| wire.abort(code)));
        if jobs.try_send(job).is_ok() {
            self.shared.awaited.set(true);
            let _ = ended.recv_timeout(ABORTS_WITHIN);
        }
        // The thread waits for a message that will not come. A launcher ends the other processes when one exits like this.
        std::process::exit(code)
    }
}

/// Does the work in the queue, in order.
fn work_on(wire: Wire, queue: &Receiver<Job>, counters: &Counters) {
    while let Ok(job) = queue.recv() {
        match job {
            Job::Work(work) => {
                let began = Instant::now();
                work(&wire);
                note(&counters.busy_ns, began);
            }
            Job::End => return wire.end(),
        }
    }
}
