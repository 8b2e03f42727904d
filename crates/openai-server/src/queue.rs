//! The queue between the server's thread and the engine's: bounded, and fair between clients.
//!
//! A client is an address. The next job is that of the client with the least work in progress, and of its jobs the first one. So many
//! requests of one client delay others by little, and requests of one client are answered in order.
//!
//! Invariants: a dropped job counts as done, whatever its outcome. Before a new job is refused, jobs of disconnected
//! clients are dropped. After [`Queue::close`] no job is added, and the engine gets the remaining jobs.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use crate::delivery::Delivery;
use crate::error::ApiError;
use crate::event::Event;
use crate::request::{Options, Prompt};

/// A client counts as active for this long after its last job began to wait.
const ACTIVE: Duration = Duration::from_secs(2);

/// A prompt that waits for its answers. Dropping the job tells the receiver that no more events follow.
#[derive(Debug)]
pub struct Job {
    /// Index of the model in the server's settings.
    pub model: usize,
    /// The prompt.
    pub prompt: Prompt,
    /// The settings for its answers.
    pub options: Options,
    /// Number of earlier jobs.
    pub number: u64,
    /// The address that the request came from.
    pub client: IpAddr,
    /// The id of the request, for messages about it.
    pub request_id: Arc<str>,
    events: UnboundedSender<(usize, Event)>,
    delivery: Arc<Delivery>,
    /// Index of the job's first answer within the request.
    first_choice: usize,
    /// Held while the engine works on the job.
    running: Option<RunningGuard>,
}

/// What all jobs of a request have in common.
#[derive(Clone)]
pub(crate) struct Origin {
    pub model: usize,
    pub client: IpAddr,
    pub request_id: Arc<str>,
    pub events: UnboundedSender<(usize, Event)>,
    pub delivery: Arc<Delivery>,
}

impl Job {
    pub(crate) fn new(origin: &Origin, prompt: Prompt, options: Options, first_choice: usize) -> Self {
        let Origin { model, client, request_id, events, delivery } = origin.clone();
        Job { model, prompt, options, number: 0, client, request_id, events, delivery, first_choice, running: None }
    }

    /// Whether nobody waits for the events.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed() || self.delivery.is_cut()
    }

    /// Sends an event to the receiver.
    pub fn send(&self, event: Event) {
        if self.delivery.is_cut() {
            return;
        }
        let is_welcome = self.delivery.sent(&event);
        let event = if is_welcome { event } else { Event::Failed(untaken()) };
        // If the client has gone, `is_cancelled` shows it.
        let _ = self.events.send((self.first_choice, event));
    }

    /// Notes that a token of an answer was made. The first one counts for the time to the first token.
    pub fn token_made(&self) {
        self.delivery.token_made();
    }

    /// States the work in progress for this job, in the engine's unit. Jobs of clients with less of it go first.
    pub fn weigh(&mut self, work: u64) {
        if let Some(running) = &mut self.running {
            let mut state = running.queue.state();
            let of_client = state.running.entry(self.client).or_default();
            of_client.work = of_client.work - running.work + work;
            running.work = work;
        }
    }
}

/// The error of a request whose client does not take its answer.
fn untaken() -> ApiError {
    ApiError::new(503, "answer_not_taken", "the answers that no client takes fill the memory; read faster")
}

/// The queue.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    capacity: usize,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Job>,
    running: BTreeMap<IpAddr, Running>,
    is_closed: bool,
    /// Number of jobs so far.
    number: u64,
    /// When the last job of each client began to wait.
    active: BTreeMap<IpAddr, Instant>,
    /// The recent rate of finished jobs, for the estimate of a wait.
    recent: Recent,
}

/// The jobs of a client in progress.
#[derive(Clone, Copy, Debug, Default)]
struct Running {
    jobs: usize,
    work: u64,
}

/// The recent rate at which jobs end.
#[derive(Debug, Default)]
struct Recent {
    last: Option<Instant>,
    between: Option<Duration>,
}

/// Counts a job as running until it is dropped.
#[derive(Debug)]
struct RunningGuard {
    queue: Arc<Queue>,
    client: IpAddr,
    work: u64,
    /// Whether the job goes back to the queue.
    returns: bool,
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        if let Some(of_client) = state.running.get_mut(&self.client) {
            of_client.jobs -= 1;
            of_client.work -= self.work;
            if of_client.jobs == 0 {
                state.running.remove(&self.client);
            }
        }
        if !self.returns {
            state.recent.ended(Instant::now());
        }
        drop(state);
        self.queue.changed.notify_all();
    }
}

impl Recent {
    fn ended(&mut self, now: Instant) {
        if let Some(last) = self.last.replace(now) {
            let since = now.saturating_duration_since(last);
            self.between = Some(self.between.map_or(since, |between| (between * 7 + since) / 8));
        }
    }
}

/// Current numbers of jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Waiting jobs.
    pub waiting: usize,
    /// Jobs that the engine works on.
    pub running: usize,
}

impl Queue {
    /// Makes a queue for at most `capacity` waiting jobs.
    pub fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Queue { state: Mutex::default(), changed: Condvar::new(), capacity })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds all jobs of a request, or none. In a full queue, the last jobs of a client that has more of them make way.
    ///
    /// # Errors
    /// 429 if they do not fit; 503 after [`Queue::close`].
    pub(crate) fn push(&self, jobs: Vec<Job>) -> Result<(), ApiError> {
        let Some(client) = jobs.first().map(|job| job.client) else { return Ok(()) };
        let mut state = self.state();
        if state.is_closed {
            return Err(ApiError::new(503, "shutting_down", "the server is shutting down"));
        }
        state.waiting.retain(|job| !job.is_cancelled());
        while state.waiting.len() + jobs.len() > self.capacity {
            let full = state.full(jobs.len());
            if !state.make_way(client, jobs.len(), &full) {
                return Err(full);
            }
        }
        state.saw(client);
        for mut job in jobs {
            job.number = state.number;
            state.number += 1;
            state.waiting.push_back(job);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for a job and returns the next one. `None`: the queue is closed and empty.
    pub fn next(self: &Arc<Self>) -> Option<Job> {
        let mut state = self.state();
        loop {
            if let Some(job) = state.take() {
                return Some(self.begun(&mut state, job));
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the next job, if there is one. An engine that has no room for it [puts it back](Self::put_back).
    pub fn try_next(self: &Arc<Self>) -> Option<Job> {
        let mut state = self.state();
        let job = state.take()?;
        Some(self.begun(&mut state, job))
    }

    /// Puts a job back to its place.
    pub fn put_back(&self, mut job: Job) {
        if let Some(running) = &mut job.running {
            running.returns = true;
        }
        // It locks the queue when it is dropped.
        drop(job.running.take());
        let mut state = self.state();
        let place = state.waiting.partition_point(|other| other.number < job.number);
        state.waiting.insert(place, job);
    }

    fn begun(self: &Arc<Self>, state: &mut State, mut job: Job) -> Job {
        let of_client = state.running.entry(job.client).or_default();
        of_client.jobs += 1;
        let (queue, client) = (Arc::clone(self), job.client);
        job.running = Some(RunningGuard { queue, client, work: 0, returns: false });
        job
    }

    /// Closes the queue to new jobs, and wakes all callers that wait for a job.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// The current numbers of jobs.
    pub fn load(&self) -> Load {
        let state = self.state();
        Load { waiting: state.waiting.len(), running: state.running.values().map(|running| running.jobs).sum() }
    }

    /// The number of clients that have jobs, or had some a moment ago.
    pub fn active_clients(&self) -> usize {
        let mut state = self.state();
        let State { active, running, .. } = &mut *state;
        active.retain(|client, seen| running.contains_key(client) || seen.elapsed() < ACTIVE);
        active.len()
    }
}

impl State {
    /// Takes the first job of the client with the least work in progress.
    fn take(&mut self) -> Option<Job> {
        self.waiting.retain(|job| !job.is_cancelled());
        let work = |job: &Job| self.running.get(&job.client).map_or((0, 0), |running| (running.work, running.jobs));
        let place = (0..self.waiting.len()).min_by_key(|&place| work(&self.waiting[place]))?;
        self.waiting.remove(place)
    }

    fn saw(&mut self, client: IpAddr) {
        let now = Instant::now();
        if self.active.len() >= 1024 {
            self.active.retain(|_, seen| now.saturating_duration_since(*seen) < ACTIVE);
        }
        self.active.insert(client, now);
    }

    fn full(&self, jobs: usize) -> ApiError {
        let message = format!("{} requests wait already; try again later", self.waiting.len());
        ApiError { retry_after_s: Some(self.seconds_until_free(jobs)), ..ApiError::new(429, "queue_full", message) }
    }

    /// Refuses the last request of the client with most waiting jobs, if it has more than `client` would have.
    fn make_way(&mut self, client: IpAddr, jobs: usize, error: &ApiError) -> bool {
        let mut waiting: BTreeMap<IpAddr, usize> = BTreeMap::new();
        self.waiting.iter().for_each(|job| *waiting.entry(job.client).or_default() += 1);
        let own = waiting.get(&client).copied().unwrap_or(0) + jobs;
        let most = waiting.into_iter().max_by_key(|(_, count)| *count);
        let Some((heaviest, _)) = most.filter(|&(_, count)| count > own) else { return false };
        let Some(last) = self.waiting.iter().rposition(|job| job.client == heaviest) else { return false };
        let Some(job) = self.waiting.remove(last) else { return false };
        job.send(Event::Failed(error.clone()));
        self.waiting.retain(|other| !other.events.same_channel(&job.events));
        true
    }

    /// Estimated seconds until so many jobs have left the queue.
    fn seconds_until_free(&self, jobs: usize) -> u64 {
        let between = self.recent.between.unwrap_or(Duration::from_secs(1));
        let jobs = u32::try_from(jobs).unwrap_or(u32::MAX);
        (between.saturating_mul(jobs).as_secs() + 1).min(60)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    use crate::delivery::Untaken;

    fn job_of(client: u8, text: &str) -> (Job, UnboundedReceiver<(usize, Event)>) {
        let (events, receiver) = unbounded_channel();
        let delivery = Delivery::new(&Untaken::new(1 << 20, 1));
        let origin =
            Origin { model: 0, client: IpAddr::from([127, 0, 0, client]), request_id: "r".into(), events, delivery };
        (Job::new(&origin, Prompt::Text(text.into()), Options::default(), 0), receiver)
    }

    fn job(text: &str) -> (Job, UnboundedReceiver<(usize, Event)>) {
        job_of(1, text)
    }

    fn text(job: &Job) -> &str {
        let Prompt::Text(text) = &job.prompt else { panic!("{job:?}") };
        text
    }

    #[test]
    fn jobs_come_out_in_order_and_only_so_many_wait() {
        let queue = Queue::new(2);
        let (jobs, receivers): (Vec<_>, Vec<_>) = ["a", "b", "c"].map(job).into_iter().unzip();
        let mut jobs = jobs.into_iter();
        queue.push(jobs.by_ref().take(2).collect()).unwrap();
        let refused = queue.push(jobs.collect()).unwrap_err();
        assert_eq!((refused.status, refused.retry_after_s), (429, Some(2)));
        let first = queue.next().unwrap();
        assert_eq!((text(&first), queue.load()), ("a", Load { waiting: 1, running: 1 }));
        queue.put_back(queue.try_next().unwrap());
        assert_eq!(queue.load(), Load { waiting: 1, running: 1 });
        let second = queue.try_next().unwrap();
        assert_eq!(text(&second), "b");
        assert_eq!((first.number, second.number), (0, 1));
        drop((first, second));
        assert_eq!(queue.load(), Load::default());
        drop(receivers);
    }

    #[test]
    fn a_job_that_nobody_waits_for_makes_way() {
        let queue = Queue::new(1);
        let (gone, receiver) = job("gone");
        queue.push(vec![gone]).unwrap();
        drop(receiver);
        let (next, _receiver) = job("next");
        queue.push(vec![next]).unwrap();
        assert_eq!(text(&queue.next().unwrap()), "next");
    }

    #[test]
    fn a_closed_queue_gives_out_what_it_has_and_then_says_so() {
        let queue = Queue::new(2);
        let (only, _receiver) = job("a");
        queue.push(vec![only]).unwrap();
        queue.close();
        assert_eq!(queue.push(vec![job("b").0]).unwrap_err().status, 503);
        assert!(queue.next().is_some() && queue.next().is_none());
    }

    #[test]
    fn the_client_with_the_least_work_in_progress_is_next() {
        let queue = Queue::new(8);
        let (jobs, _receivers): (Vec<_>, Vec<_>) = [(1, "a1"), (1, "a2"), (1, "a3"), (2, "b1"), (2, "b2"), (3, "c1")]
            .map(|(c, text)| job_of(c, text))
            .into_iter()
            .unzip();
        jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
        assert_eq!(queue.active_clients(), 3);
        let mut running = Vec::new();
        for (expected, work) in [("a1", 10), ("b1", 5), ("c1", 20), ("b2", 5), ("a2", 1), ("a3", 1)] {
            let mut next = queue.try_next().unwrap();
            assert_eq!(text(&next), expected);
            next.weigh(work);
            running.push(next);
        }
        running.clear();
        assert_eq!(queue.load(), Load::default());
    }

    #[test]
    fn in_a_full_queue_the_client_with_most_jobs_makes_way_for_one_with_fewer() {
        let queue = Queue::new(3);
        let (jobs, mut receivers): (Vec<_>, Vec<_>) = ["a1", "a2", "a3"].map(job).into_iter().unzip();
        jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
        assert_eq!(queue.push(vec![job("a4").0]).unwrap_err().status, 429);
        let (other, _receiver) = job_of(2, "b1");
        queue.push(vec![other]).unwrap();
        assert!(matches!(receivers.pop().unwrap().try_recv(), Ok((0, Event::Failed(error))) if error.status == 429));
        let order: Vec<String> = std::iter::from_fn(|| queue.try_next()).map(|job| text(&job).to_owned()).collect();
        assert_eq!(order, ["a1", "a2", "b1"]);
    }
}
