//! The queue between the server's thread and the engine's: bounded, first in, first out.
//!
//! Invariants: a job that is dropped counts as done, whatever happened to it. One whose client has gone is dropped before
//! another is turned away for it. After [`Queue::close`] nothing comes in, and the engine gets what is left.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use crate::error::ApiError;
use crate::request::{Options, Prompt};

/// News of a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It was taken up; the prompt has so many tokens.
    Started {
        /// Tokens of the prompt, the end of the sequence among them.
        prompt_tokens: usize,
    },
    /// More text of an answer.
    Text {
        /// Which of the job's answers.
        choice: usize,
        /// The text that comes after what was sent before.
        text: String,
        /// Tokens made for it.
        tokens: usize,
    },
    /// An answer is whole.
    Finished {
        /// Which of the job's answers.
        choice: usize,
        /// Why it ended.
        reason: Finish,
    },
    /// It cannot be answered.
    Failed(ApiError),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it, or a stop text did.
    Stop,
    /// It has as many tokens as it may.
    Length,
}

impl Finish {
    /// As OpenAI calls it.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

/// A prompt that waits for its answers. When it is dropped, whoever waits for it learns that nothing more comes.
#[derive(Debug)]
pub struct Job {
    /// Index of the model among those of the server.
    pub model: usize,
    /// The prompt.
    pub prompt: Prompt,
    /// How it is answered.
    pub options: Options,
    /// How many jobs came before it.
    pub number: u64,
    events: UnboundedSender<(usize, Event)>,
    /// The place of its first answer among those of the request.
    first_choice: usize,
    /// Held while it is worked on.
    _turn: Option<Turn>,
}

impl Job {
    pub(crate) fn new(
        model: usize,
        prompt: Prompt,
        options: Options,
        events: UnboundedSender<(usize, Event)>,
        first_choice: usize,
    ) -> Self {
        Job { model, prompt, options, number: 0, events, first_choice, _turn: None }
    }

    /// Whether nobody waits for the answer any more.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Tells whoever waits.
    pub fn send(&self, event: Event) {
        // A client that has gone is seen by `is_cancelled`.
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
    /// Jobs so far.
    number: u64,
    /// Jobs that were done, and when the first of a busy time began: what an estimate is made of.
    recent: Recent,
}

/// The rate at which jobs end, over the last few.
#[derive(Debug, Default)]
struct Recent {
    last: Option<Instant>,
    between: Option<Duration>,
}

/// Counts a job as running until it is dropped.
#[derive(Debug)]
struct Turn(Arc<Queue>);

impl Drop for Turn {
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

/// Numbers of jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Jobs that wait.
    pub waiting: usize,
    /// Jobs that are answered.
    pub running: usize,
}

impl Queue {
    /// A queue in which so many jobs can wait.
    pub fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Queue { state: Mutex::default(), changed: Condvar::new(), capacity })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds all jobs of a request, or none.
    ///
    /// # Errors
    /// 429 where they do not fit; 503 after [`Queue::close`].
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

    /// The first job that waits, once there is one. `None`: the queue is closed and empty.
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

    /// The first job that waits, if it `fits`. No other is taken before it: a large one does not starve.
    pub fn next_if(self: &Arc<Self>, fits: impl FnOnce(&Job) -> bool) -> Option<Job> {
        let mut state = self.state();
        let job = state.take(fits)?;
        Some(self.begun(&mut state, job))
    }

    fn begun(self: &Arc<Self>, state: &mut State, mut job: Job) -> Job {
        state.running += 1;
        job._turn = Some(Turn(Arc::clone(self)));
        job
    }

    /// Takes nothing more in. Whoever waits for a job wakes up.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// Jobs now.
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

    /// In about how many seconds so many jobs have left the queue.
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
