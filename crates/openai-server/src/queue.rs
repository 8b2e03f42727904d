//! The queue between the server's thread and the engine's: bounded, first in, first out.
//!
//! Invariants: a dropped job counts as done, whatever its outcome. Before a new job is refused, jobs of disconnected
//! clients are dropped. After [`Queue::close`] no job is added, and the engine gets the remaining jobs.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use crate::error::ApiError;
use crate::request::{Options, Prompt};

/// An event of a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The engine took up the job.
    Started {
        /// Tokens of the prompt, including the end-of-sequence token.
        prompt_tokens: usize,
    },
    /// More text of an answer.
    Text {
        /// The index of the answer within the job.
        choice: usize,
        /// The text after the earlier texts of this answer.
        text: String,
        /// Number of tokens of the text.
        tokens: usize,
    },
    /// An answer is complete.
    Finished {
        /// The index of the answer within the job.
        choice: usize,
        /// The reason for the end.
        reason: Finish,
    },
    /// The job cannot be answered.
    Failed(ApiError),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended the answer, or a stop text did.
    Stop,
    /// The answer reached its token limit.
    Length,
}

impl Finish {
    /// OpenAI's name of the reason.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

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
    events: UnboundedSender<(usize, Event)>,
    /// Index of the job's first answer within the request.
    first_choice: usize,
    /// Held while the engine works on the job.
    _running: Option<RunningGuard>,
}

impl Job {
    pub(crate) fn new(
        model: usize,
        prompt: Prompt,
        options: Options,
        events: UnboundedSender<(usize, Event)>,
        first_choice: usize,
    ) -> Self {
        Job { model, prompt, options, number: 0, events, first_choice, _running: None }
    }

    /// Whether the receiver is gone.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Sends an event to the receiver.
    pub fn send(&self, event: Event) {
        // If the client has gone, `is_cancelled` shows it.
        let _ = self.events.send((self.first_choice, event));
    }
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
    running: usize,
    is_closed: bool,
    /// Number of jobs so far.
    number: u64,
    /// The recent rate of finished jobs, for the estimate of a wait.
    recent: Recent,
}

/// The recent rate at which jobs end.
#[derive(Debug, Default)]
struct Recent {
    last: Option<Instant>,
    between: Option<Duration>,
}

/// Counts a job as running until it is dropped.
#[derive(Debug)]
struct RunningGuard(Arc<Queue>);

impl Drop for RunningGuard {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.running -= 1;
        state.recent.ended(Instant::now());
        self.0.changed.notify_all();
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

    /// Adds all jobs of a request, or none.
    ///
    /// # Errors
    /// 429 if they do not fit; 503 after [`Queue::close`].
    pub(crate) fn push(&self, jobs: Vec<Job>) -> Result<(), ApiError> {
        let mut state = self.state();
        if state.is_closed {
            return Err(ApiError::new(503, "shutting_down", "the server is shutting down"));
        }
        state.waiting.retain(|job| !job.is_cancelled());
        if state.waiting.len() + jobs.len() > self.capacity {
            let error = ApiError::new(
                429,
                "queue_full",
                format!("{} requests wait already; try again later", state.waiting.len()),
            );
            return Err(ApiError { retry_after_s: Some(state.seconds_until_free(jobs.len())), ..error });
        }
        for mut job in jobs {
            job.number = state.number;
            state.number += 1;
            state.waiting.push_back(job);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for a job and returns the first one. `None`: the queue is closed and empty.
    pub fn next(self: &Arc<Self>) -> Option<Job> {
        let mut state = self.state();
        loop {
            if let Some(job) = state.take(|_| true) {
                return Some(self.begun(&mut state, job));
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the first waiting job if it `fits`. No later job is taken before it, so a large job does not starve.
    pub fn next_if(self: &Arc<Self>, fits: impl FnOnce(&Job) -> bool) -> Option<Job> {
        let mut state = self.state();
        let job = state.take(fits)?;
        Some(self.begun(&mut state, job))
    }

    fn begun(self: &Arc<Self>, state: &mut State, mut job: Job) -> Job {
        state.running += 1;
        job._running = Some(RunningGuard(Arc::clone(self)));
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
        Load { waiting: state.waiting.len(), running: state.running }
    }
}

impl State {
    fn take(&mut self, fits: impl FnOnce(&Job) -> bool) -> Option<Job> {
        while self.waiting.front().is_some_and(Job::is_cancelled) {
            self.waiting.pop_front();
        }
        if fits(self.waiting.front()?) { self.waiting.pop_front() } else { None }
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

    fn job(text: &str) -> (Job, UnboundedReceiver<(usize, Event)>) {
        let (events, receiver) = unbounded_channel();
        (Job::new(0, Prompt::Text(text.into()), Options::default(), events, 0), receiver)
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
        assert!(queue.next_if(|job| text(job) == "x").is_none());
        let second = queue.next_if(|job| text(job) == "b").unwrap();
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
}
