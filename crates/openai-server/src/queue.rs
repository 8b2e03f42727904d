//! The queue between the server's thread and the engine's: bounded, and fair between clients.
//!
//! A client is an address. The next job is that of the client with the least work in progress. Clients behind one address cannot be told apart,
//! but long requests can be told from short ones: a client's jobs are shared out between their sizes in the same way. Jobs of one client and
//! one size are answered in order. So a client with many requests delays the other clients little, and its long requests delay its short
//! ones little.
//!
//! Invariants: a dropped job counts as done, whatever its outcome. Before a new job is refused, jobs of disconnected
//! clients are dropped. After [`Queue::close`] no job is added, and the engine gets the remaining jobs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
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

/// Bytes of a usual token.
const BYTES_OF_A_TOKEN: usize = 4;

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
    pub(crate) fn new(origin: &Origin, prompt: Prompt, options: Options, first_choice: usize) -> Self {
        let Origin { model, client, answer_tokens, request_id, events, delivery } = origin.clone();
        let share = Share::new(client, &prompt, &options, answer_tokens);
        Job { model, prompt, options, number: 0, share, request_id, events, delivery, first_choice, running: None }
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
    waiting: VecDeque<Job>,
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
    /// Makes a queue for at most `capacity` waiting jobs.
    pub fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Queue { state: Mutex::default(), changed: Condvar::new(), capacity })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds all jobs of a request, or none. In a full queue, the last jobs of a share that has more of them make way.
    ///
    /// # Errors
    /// 429 if they do not fit; 503 after [`Queue::close`].
    pub(crate) fn push(&self, jobs: Vec<Job>) -> Result<(), ApiError> {
        let Some(share) = jobs.first().map(|job| job.share) else { return Ok(()) };
        let mut state = self.state();
        if state.is_closed {
            return Err(ApiError::new(503, "shutting_down", "the server is shutting down"));
        }
        state.waiting.retain(|job| !job.is_cancelled());
        while state.waiting.len() + jobs.len() > self.capacity {
            let full = state.full(jobs.len());
            if !state.make_way(share, jobs.len(), &full) {
                return Err(full);
            }
        }
        state.saw(share);
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
        let place = state.waiting.partition_point(|other| other.number < job.number);
        state.waiting.insert(place, job);
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
        Load { waiting: state.waiting.len(), running: state.running.values().map(|running| running.jobs).sum() }
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
        self.waiting.retain(|job| !job.is_cancelled());
        let mut of_client: BTreeMap<IpAddr, Running> = BTreeMap::new();
        for (share, running) in &self.running {
            let all = of_client.entry(share.client).or_default();
            (all.work, all.jobs) = (all.work + running.work, all.jobs + running.jobs);
        }
        let of_share = |share: Share| self.running.get(&share).copied().unwrap_or_default();
        let work = |share: Share| (of_client.get(&share.client).copied().unwrap_or_default(), of_share(share));
        let places = (0..self.waiting.len()).filter(|&place| !full.contains(&self.waiting[place].share));
        let place = places.min_by_key(|&place| work(self.waiting[place].share))?;
        self.waiting.remove(place)
    }

    fn saw(&mut self, share: Share) {
        let now = Instant::now();
        if self.active.len() >= 1024 {
            self.active.retain(|_, seen| now.saturating_duration_since(*seen) < ACTIVE);
        }
        self.active.insert(share, now);
    }

    fn full(&self, jobs: usize) -> ApiError {
        let message = format!("{} requests wait already; try again later", self.waiting.len());
        ApiError { retry_after_s: Some(self.seconds_until_free(jobs)), ..ApiError::new(429, "queue_full", message) }
    }

    /// Refuses the last request of the client with most waiting jobs, if it has more than the new one's client would have. Otherwise the same
    /// among the sizes of the new one's client.
    fn make_way(&mut self, new: Share, jobs: usize, error: &ApiError) -> bool {
        let all = |job: &Job| Some(job.share.client);
        let heavier = self.heaviest(all, (new.client, jobs)).unwrap_or(new.client);
        let own = |job: &Job| (job.share.client == heavier).then_some(job.share.size);
        // A size of another client has nothing to compare with.
        let own_jobs = if heavier == new.client { jobs } else { 0 };
        let Some(size) = self.heaviest(own, (new.size, own_jobs)) else { return false };
        let share = Share { client: heavier, size };
        let Some(last) = self.waiting.iter().rposition(|job| job.share == share) else { return false };
        let Some(job) = self.waiting.remove(last) else { return false };
        job.send(Event::Failed(error.clone()));
        self.waiting.retain(|other| !other.events.same_channel(&job.events));
        true
    }

    /// The kind with the most waiting jobs, if it has more than the new kind would have after `jobs` more. With no new jobs, any kind counts.
    fn heaviest<K: Ord + Copy>(&self, kind: impl Fn(&Job) -> Option<K>, (new, jobs): (K, usize)) -> Option<K> {
        let mut waiting: BTreeMap<K, usize> = BTreeMap::new();
        self.waiting.iter().filter_map(kind).for_each(|kind| *waiting.entry(kind).or_default() += 1);
        let own = if jobs == 0 { 0 } else { waiting.get(&new).copied().unwrap_or(0) + jobs };
        waiting.into_iter().max_by_key(|(_, count)| *count).filter(|&(_, count)| count > own).map(|(kind, _)| kind)
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
            Origin { model: 0, client: address(client), answer_tokens: 256, request_id: "r".into(), events, delivery };
        let options =
            Options { n: 1, max_tokens: Some(if text.starts_with("long") { 256 } else { 8 }), ..Options::default() };
        (Job::new(&origin, Prompt::Text(text.into()), options, 0), receiver)
    }

    fn address(client: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, client])
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
        queue.put_back(queue.try_next(&[]).unwrap());
        assert_eq!(queue.load(), Load { waiting: 1, running: 1 });
        let second = queue.try_next(&[]).unwrap();
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
        assert_eq!(queue.parts(job("a").0.share), 3);
        let mut running = Vec::new();
        for (expected, work) in [("a1", 10), ("b1", 5), ("c1", 20), ("b2", 5), ("a2", 1), ("a3", 1)] {
            let mut next = queue.try_next(&[]).unwrap();
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
        let order: Vec<String> = std::iter::from_fn(|| queue.try_next(&[])).map(|job| text(&job).to_owned()).collect();
        assert_eq!(order, ["a1", "a2", "b1"]);
    }

    #[test]
    fn of_refused_jobs_a_share_has_one_before_the_running_jobs_go_on() {
        let queue = Queue::new(8);
        let (jobs, _receivers): (Vec<_>, Vec<_>) =
            [(1, "bad 1"), (1, "bad 2"), (1, "bad 3"), (2, "good"), (3, "bad 4")]
                .map(|(c, text)| job_of(c, text))
                .into_iter()
                .unzip();
        jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
        let (mut running, mut rounds) = (Vec::new(), Vec::new());
        while queue.load().waiting > 0 {
            let mut round = Vec::new();
            queue.admit(|job| {
                round.push(text(&job).to_owned());
                match text(&job).starts_with("bad") {
                    true => Admission::Refused,
                    false => {
                        running.push(job);
                        Admission::Begun
                    }
                }
            });
            rounds.push(round);
        }
        assert_eq!(rounds, [vec!["bad 1", "good", "bad 4"], vec!["bad 2"], vec!["bad 3"]]);
    }

    #[test]
    fn jobs_without_room_stay_in_their_places() {
        let queue = Queue::new(8);
        let (jobs, _receivers): (Vec<_>, Vec<_>) =
            [(1, "a1"), (1, "a2"), (2, "b1"), (3, "c1")].map(|(c, text)| job_of(c, text)).into_iter().unzip();
        jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
        let mut offered = Vec::new();
        queue.admit(|job| {
            offered.push(text(&job).to_owned());
            if offered.len() == 2 { Admission::Full(job) } else { Admission::ShareIsFull(job) }
        });
        assert_eq!((offered, queue.load()), (vec!["a1".to_owned(), "b1".to_owned()], Load { waiting: 4, running: 0 }));
        assert_eq!(text(&queue.next().unwrap()), "a1");
    }

    #[test]
    fn short_jobs_do_not_wait_for_the_long_ones_of_their_client() {
        let queue = Queue::new(4);
        let (jobs, mut receivers): (Vec<_>, Vec<_>) =
            ["long 1", "long 2", "long 3", "long 4"].map(job).into_iter().unzip();
        jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
        let mut running = vec![queue.try_next(&[]).unwrap()];
        running[0].weigh(100);
        for (number, text) in ["a1", "a2", "a3"].into_iter().enumerate() {
            let (job, receiver) = job(text);
            // The queue has room for one. Then the last long one makes way, until both sizes have two.
            assert_eq!(queue.push(vec![job]).is_ok(), number < 2, "{text}");
            receivers.push(receiver);
        }
        assert!(matches!(receivers[3].try_recv(), Ok((0, Event::Failed(error))) if error.status == 429));
        assert_eq!(queue.parts(running[0].share), 2, "sizes of one client");
        let mut order = Vec::new();
        while let Some(mut next) = queue.try_next(&[]) {
            next.weigh(if text(&next).starts_with("long") { 100 } else { 1 });
            order.push(text(&next).to_owned());
            running.push(next);
        }
        assert_eq!(order, ["a1", "a2", "long 2", "long 3"]);
    }

    #[test]
    fn sizes_are_those_of_prompts_and_answers_together_and_few() {
        let size = |prompt: Prompt, options: Options| Share::new(address(1), &prompt, &options, 256).size;
        let check = |prompt: &str, n, max_tokens, expected| {
            let options = Options { n, max_tokens, ..Options::default() };
            assert_eq!(size(Prompt::Text(prompt.into()), options), expected, "{n} answers of {max_tokens:?} tokens");
        };
        check("short", 1, Some(8), 1);
        check("short", 1, Some(16), 2);
        check("short", 1, None, 4);
        check("short", 4, Some(1 << 40), 5);
        check(&"long".repeat(4096), 1, Some(1), 6);
        let labels = Options { labels: vec![String::new(); 64], max_tokens: Some(1), ..Options::default() };
        assert_eq!(size(Prompt::Tokens(Vec::new()), labels), 3);
    }
}
