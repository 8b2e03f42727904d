//! The queue between the server's thread and the engine's: bounded, and fair between clients.
//!
//! A client is an address. The next job is that of the client with the least work in progress. Clients behind one address cannot be told apart,
//! but long requests can be told from short ones: a client's jobs are shared out between their sizes in the same way. Jobs of one client and
//! one size are answered in order. So a client with many requests delays the other clients little, and its long requests delay its short
//! ones little.
//!
//! A place of the queue is the memory of one longest prompt. A request takes at least one place. Its short texts, however many, take as
//! many as their bytes fill, and no more than half of the queue. So no request leaves others without a place. A request that waits makes way
//! only if its client has another one, so the only request of a client stays, however large it is.
//!
//! Invariants: a dropped job counts as done, whatever its outcome. Before a new job is refused, jobs of disconnected
//! clients are dropped. After [`Queue::close`] no job is added, and the engine gets the remaining jobs.

pub(crate) mod places;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use self::places::PARTS;
use crate::delivery::Delivery;
use crate::error::ApiError;
use crate::event::Event;
use crate::request::{Options, Prompt, Wanted};

/// A client counts as active for this long after its last job began to wait.
const ACTIVE: Duration = Duration::from_secs(2);

/// Bytes of a usual token.
const BYTES_OF_A_TOKEN: usize = 4;

/// A prompt that waits for its answers. Dropping the job tells the receiver that no more events follow.
#[derive(Debug)]
pub struct Job {
    /// Index of the model in the server's settings.
    pub model: usize,
    /// The prompt, which jobs about several labels share.
    pub prompt: Arc<Prompt>,
    /// The settings for its answers.
    pub options: Options,
    /// Number of earlier jobs.
    pub number: u64,
    /// The number of the request's first job.
    request: u64,
    /// The memory that the job takes in the queue, in parts of a place.
    pub(crate) parts: usize,
    /// Who asks for how much.
    pub share: Share,
    /// The id of the request, for messages about it.
    pub request_id: Arc<str>,
    events: UnboundedSender<(usize, Event)>,
    delivery: Arc<Delivery>,
    /// Index of the job's first answer within the request.
    first_choice: usize,
    /// Held while the engine works on the job.
    running: Option<RunningGuard>,
}

/// Jobs that share memory and turns: those of a client that have about the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// The address that the request came from.
    pub client: IpAddr,
    /// The logarithm of the job's tokens, to the base 4.
    pub size: u32,
}

impl Share {
    /// The share of a job. `answer_tokens` is the longest answer of the server.
    pub(crate) fn new(client: IpAddr, prompt: &Prompt, options: &Options, answer_tokens: usize) -> Self {
        let of_prompt = match prompt {
            Prompt::Tokens(ids) => ids.len(),
            Prompt::Text(text) => text.len() / BYTES_OF_A_TOKEN,
            Prompt::Pair(query, document) => (query.len() + document.len()) / BYTES_OF_A_TOKEN,
            Prompt::Chat(messages) => messages.iter().map(|message| message.content.len() / BYTES_OF_A_TOKEN).sum(),
        };
        let rows = options.n.max(options.num_beams.unwrap_or(1)).max(options.labels.len());
        let of_answers = rows * options.max_tokens.unwrap_or(answer_tokens).min(answer_tokens);
        Share { client, size: (of_prompt + of_answers).max(1).ilog2() / 2 }
    }
}

/// What all jobs of a request have in common.
#[derive(Clone)]
pub(crate) struct Origin {
    pub model: usize,
    pub client: IpAddr,
    /// The longest answer of the server, in tokens.
    pub answer_tokens: usize,
    pub request_id: Arc<str>,
    pub events: UnboundedSender<(usize, Event)>,
    pub delivery: Arc<Delivery>,
}

impl Job {
    pub(crate) fn new(origin: &Origin, prompt: Arc<Prompt>, options: Options, first_choice: usize) -> Self {
        let Origin { model, client, answer_tokens, request_id, events, delivery } = origin.clone();
        let share = Share::new(client, &prompt, &options, answer_tokens);
        let (number, request, parts, running) = (0, 0, PARTS, None);
        Job {
            model,
            prompt,
            options,
            number,
            request,
            parts,
            share,
            request_id,
            events,
            delivery,
            first_choice,
            running,
        }
    }

    /// The parameter that the prompt came in, for errors about it.
    pub fn parameter(&self) -> &'static str {
        match (&*self.prompt, self.options.wanted) {
            (Prompt::Chat(_), _) => "messages",
            (Prompt::Pair(..), _) => "documents",
            (_, Wanted::Vector(_)) => "input",
            (Prompt::Text(_) | Prompt::Tokens(_), _) => "prompt",
        }
    }

    /// Whether no client waits for the events.
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
            let of_share = state.running.entry(self.share).or_default();
            of_share.work = of_share.work - running.work + work;
            running.work = work;
        }
    }
}

/// The error of a request whose client does not take its answer.
pub(crate) fn untaken() -> ApiError {
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
    /// The jobs of each share in order; no share without one.
    waiting: BTreeMap<Share, VecDeque<Job>>,
    /// The parts of places that they take.
    parts: usize,
    running: BTreeMap<Share, Running>,
    is_closed: bool,
    /// Number of jobs so far.
    number: u64,
    /// When the last job of each share began to wait.
    active: BTreeMap<Share, Instant>,
    /// The recent rate of finished jobs, for the estimate of a wait.
    recent: Recent,
}

/// The jobs of a share in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Running {
    work: u64,
    jobs: usize,
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
    share: Share,
    work: u64,
    /// Whether the job goes back to the queue.
    returns: bool,
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        if let Some(of_share) = state.running.get_mut(&self.share) {
            of_share.jobs -= 1;
            of_share.work -= self.work;
            if of_share.jobs == 0 {
                state.running.remove(&self.share);
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

/// What became of a job that was offered.
#[derive(Debug)]
pub enum Admission {
    /// The engine works on it.
    Begun,
    /// Its request cannot be answered, and was told so.
    Refused,
    /// It fits, but jobs of its share hold what they may.
    ShareIsFull(Job),
    /// Nothing can begin before something ends.
    Full(Job),
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
    /// Makes a queue of so many places.
    pub fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Queue { state: Mutex::default(), changed: Condvar::new(), capacity })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds all jobs of a request, or none. In a full queue, the last request of a share that has more in it makes way.
    ///
    /// # Errors
    /// 429 if they do not fit; 503 after [`Queue::close`].
    pub(crate) fn push(&self, mut jobs: Vec<Job>) -> Result<(), ApiError> {
        let Some(share) = jobs.first().map(|job| job.share) else { return Ok(()) };
        let all = jobs.iter().map(|job| job.parts).sum();
        jobs.iter_mut().for_each(|job| job.parts = places::counted(job.parts, all, self.capacity));
        let parts: usize = jobs.iter().map(|job| job.parts).sum();
        let mut state = self.state();
        if state.is_closed {
            return Err(ApiError::new(503, "shutting_down", "the server is shutting down"));
        }
        if state.parts + parts > self.capacity * PARTS {
            state.retain(|job| !job.is_cancelled());
        }
        while state.parts + parts > self.capacity * PARTS {
            let full = state.full(jobs.len());
            if !state.make_way(share, parts, &full) {
                return Err(full);
            }
        }
        let request = state.number;
        for mut job in jobs {
            (job.number, job.request) = (state.number, request);
            state.number += 1;
            state.saw(job.share);
            state.put(job);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for a job and returns the next one. `None`: the queue is closed and empty.
    pub fn next(self: &Arc<Self>) -> Option<Job> {
        let mut state = self.state();
        loop {
            if let Some(job) = state.take(&[]) {
                return Some(self.begun(&mut state, job));
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Offers waiting jobs to the engine, until none is left that could begin now. A refusal takes time, too, and it weighs nothing: a share
    /// has one at a time, so that refused requests, however many come, do not keep the others from their next token.
    pub fn admit(self: &Arc<Self>, mut offer: impl FnMut(Job) -> Admission) {
        let mut full = Vec::new();
        while let Some(job) = self.try_next(&full) {
            let share = job.share;
            match offer(job) {
                Admission::Begun => {}
                Admission::Refused => full.push(share),
                Admission::ShareIsFull(job) => {
                    full.push(share);
                    self.put_back(job);
                }
                Admission::Full(job) => return self.put_back(job),
            }
        }
    }

    /// Returns the next job, if there is one of another share than these.
    fn try_next(self: &Arc<Self>, full: &[Share]) -> Option<Job> {
        let mut state = self.state();
        let job = state.take(full)?;
        Some(self.begun(&mut state, job))
    }

    /// Puts a job back to its place.
    fn put_back(&self, mut job: Job) {
        if let Some(running) = &mut job.running {
            running.returns = true;
        }
        // It locks the queue when it is dropped.
        drop(job.running.take());
        let mut state = self.state();
        state.put(job);
    }

    fn begun(self: &Arc<Self>, state: &mut State, mut job: Job) -> Job {
        state.running.entry(job.share).or_default().jobs += 1;
        let (queue, share) = (Arc::clone(self), job.share);
        job.running = Some(RunningGuard { queue, share, work: 0, returns: false });
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
        Load { waiting: state.jobs().count(), running: state.running.values().map(|running| running.jobs).sum() }
    }

    /// In how many parts the engine's memory is divided so that each active client has the same, and of a client each active size.
    pub fn parts(&self, share: Share) -> usize {
        let mut state = self.state();
        let State { active, running, .. } = &mut *state;
        active.retain(|share, seen| running.contains_key(share) || seen.elapsed() < ACTIVE);
        let clients: BTreeSet<IpAddr> = active.keys().map(|active| active.client).collect();
        let sizes = active.keys().filter(|active| active.client == share.client).count();
        clients.len().max(1) * sizes.max(1)
    }
}

impl State {
    /// Takes the first job of the client with the least work in progress, and of its sizes that with the least.
    fn take(&mut self, full: &[Share]) -> Option<Job> {
        for jobs in self.waiting.values_mut() {
            while let Some(job) = jobs.pop_front_if(|job| job.is_cancelled()) {
                self.parts -= job.parts;
            }
        }
        self.waiting.retain(|_, jobs| !jobs.is_empty());
        let mut of_client: BTreeMap<IpAddr, Running> = BTreeMap::new();
        for (share, running) in &self.running {
            let all = of_client.entry(share.client).or_default();
            (all.work, all.jobs) = (all.work + running.work, all.jobs + running.jobs);
        }
        let of_share = |share: Share| self.running.get(&share).copied().unwrap_or_default();
        let work = |share: Share| (of_client.get(&share.client).copied().unwrap_or_default(), of_share(share));
        let heads = self.waiting.iter().filter(|(share, _)| !full.contains(share));
        let heads = heads.filter_map(|(share, jobs)| Some((*share, jobs.front()?.number)));
        let (share, _) = heads.min_by_key(|&(share, number)| (work(share), number))?;
        let job = self.waiting.get_mut(&share)?.pop_front()?;
        self.parts -= job.parts;
        Some(job)
    }

    /// Puts a job to its place among those of its share.
    fn put(&mut self, job: Job) {
        self.parts += job.parts;
        let jobs = self.waiting.entry(job.share).or_default();
        let place = jobs.partition_point(|other| other.number < job.number);
        jobs.insert(place, job);
    }

    fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.waiting.values().flatten()
    }

    fn retain(&mut self, mut keeps: impl FnMut(&Job) -> bool) {
        for jobs in self.waiting.values_mut() {
            jobs.retain(|job| {
                let is_kept = keeps(job);
                self.parts -= if is_kept { 0 } else { job.parts };
                is_kept
            });
        }
        self.waiting.retain(|_, jobs| !jobs.is_empty());
    }

    fn saw(&mut self, share: Share) {
        let now = Instant::now();
        if self.active.len() >= 1024 {
            self.active.retain(|_, seen| now.saturating_duration_since(*seen) < ACTIVE);
        }
        self.active.insert(share, now);
    }

    fn full(&self, jobs: usize) -> ApiError {
        let message = format!("{} texts wait already; try again later", self.jobs().count());
        ApiError { retry_after_s: Some(self.seconds_until_free(jobs)), ..ApiError::new(429, "queue_full", message) }
    }

    /// Refuses the last request of the client with most of the places, if it has more than the new one's client would have, and another one.
    /// Otherwise the same among the sizes of the new one's client.
    fn make_way(&mut self, new: Share, parts: usize, error: &ApiError) -> bool {
        let all = |job: &Job| Some(job.share.client);
        let heavier = self.heaviest(all, (new.client, parts)).unwrap_or(new.client);
        let own = |job: &Job| (job.share.client == heavier).then_some(job.share.size);
        // A size of another client has nothing to compare with.
        let own_parts = if heavier == new.client { parts } else { 0 };
        let Some(size) = self.heaviest(own, (new.size, own_parts)) else { return false };
        let share = Share { client: heavier, size };
        let Some(last) = self.waiting.get(&share).and_then(|jobs| jobs.back()) else { return false };
        last.send(Event::Failed(error.clone()));
        let request = last.request;
        self.retain(|other| other.request != request);
        true
    }

    /// Of the kinds with several requests the one with most places, if it has more than the new kind would have after `parts` more. With nothing
    /// new, any kind counts.
    fn heaviest<K: Ord + Copy>(&self, kind: impl Fn(&Job) -> Option<K>, (new, parts): (K, usize)) -> Option<K> {
        let mut waiting: BTreeMap<K, (usize, BTreeSet<u64>)> = BTreeMap::new();
        for (kind, job) in self.jobs().filter_map(|job| Some((kind(job)?, job))) {
            let of_kind = waiting.entry(kind).or_default();
            of_kind.0 += job.parts;
            of_kind.1.insert(job.request);
        }
        let own = if parts == 0 { 0 } else { waiting.get(&new).map_or(0, |of_kind| of_kind.0) + parts };
        let several = waiting.into_iter().filter(|(_, (_, requests))| parts == 0 || requests.len() > 1);
        several.max_by_key(|(_, (count, _))| *count).filter(|(_, (count, _))| *count > own).map(|(kind, _)| kind)
    }

    /// Estimated seconds until so many jobs have left the queue.
    fn seconds_until_free(&self, jobs: usize) -> u64 {
        let between = self.recent.between.unwrap_or(Duration::from_secs(1));
        let jobs = u32::try_from(jobs).unwrap_or(u32::MAX);
        (between.saturating_mul(jobs).as_secs() + 1).min(60)
    }
}

#[cfg(test)]
mod tests;
