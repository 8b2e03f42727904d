//! [`DataLoader`]: the stream of batches, made a bounded distance ahead.
//!
//! Batch `i` of an epoch has the order's positions `[i * batch_size, (i + 1) * batch_size)`, fewer at the end. A run
//! that resumes at another sample counts its batches from that sample.
//!
//! Invariants:
//! - The stream is a function of (seed, data, tokenizer, options, start). The number of threads, the prefetch depth and
//!   changes of either do not affect it. Without threads or prefetch, each batch is made when it is asked for.
//! - At most `prefetch_batches` batches exist beside those that were handed out.
//! - An error surfaces in place of its batch; the next call tries that batch again.
//! - Dropping the loader stops its threads at the next row and joins them.
//! - Once the flag of [`DataLoader::stop_on`] is set, no caller waits for a batch.
//!
//! ```no_run
//! use dataloader::{DataLoader, LoaderLimits, LoaderOptions, Objective, Position, Tokenizer};
//! use parquet_dataset::{Dataset, DatasetOptions};
//! use std::sync::Arc;
//!
//! let objective = Objective::default();
//! let dataset = Dataset::open(&["train.parquet".into()], &DatasetOptions::new(objective.columns())).unwrap();
//! let tokenizer = Tokenizer::load("tokenizer.json".as_ref())?;
//! let options = LoaderOptions { batch_size: 128, eos_id: tokenizer.eos_id()?, objective, ..LoaderOptions::default() };
//! let limits = LoaderLimits { prefetch_batches: 2, decode_threads: 1 };
//! let start = Position::default();
//! let mut loader = DataLoader::new(Arc::new(dataset), Arc::new(tokenizer), options, start, limits)?;
//! while let Some(batch) = loader.next_batch()? {
//!     println!("epoch {}: {} samples, {} target tokens", batch.epoch, batch.len(), batch.target_tokens());
//! }
//! # Ok::<(), dataloader::Error>(())
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use collective::Shards;
use parquet_dataset::Dataset;

use crate::batch::{BadRows, Batch, BatchMaker, Position};
use crate::costs::{CostRow, costs};
use crate::error::panic_message;
use crate::mixture::Mixture;
use crate::objective::Objective;
use crate::order::OrderOptions;
use crate::side::Side;
use crate::{Error, Tokenizer};

/// Definition of the stream of batches. Nothing here depends on memory.
#[derive(Clone, Debug, PartialEq)]
pub struct LoaderOptions {
    /// The source of a sample.
    pub objective: Objective,
    /// Samples of an optimizer step.
    pub batch_size: usize,
    /// The seed and the kind of shuffling.
    pub order: OrderOptions,
    /// Epochs until the stream ends; `None`: it never ends.
    pub epochs: Option<u64>,
    /// Most tokens of a source, including the end-of-sequence token.
    pub max_source_tokens: usize,
    /// Most tokens of a target, including the end-of-sequence token.
    pub max_target_tokens: usize,
    /// The id at the end of every source and target: the model's `eos_token_id`, or [`Tokenizer::eos_id`].
    pub eos_id: u32,
    /// The decoder's first input, which a target does not repeat; `None`: targets begin as sources do.
    pub decoder_start_id: Option<u32>,
    /// Tokens that stand for images. A row with one of them cannot be a sample.
    pub image_ids: Vec<u32>,
    /// Put before the text of every source of [`Objective::TextToText`], such as `summarize: `.
    pub source_prefix: String,
    /// The side on which sources of [`Objective::TextToText`] are cut.
    pub truncation_side: Side,
    /// Treatment of rows that cannot be samples.
    pub bad_rows: BadRows,
    /// Keep the text of each sample's last column beside its ids, for evaluation.
    pub keep_texts: bool,
    /// Keep the text of each sample's first column too, if there are several.
    pub keep_prompts: bool,
    /// The part of every batch that this process makes.
    pub share: BatchShare,
    /// Tasks whose rows are mixed; `None`: all rows are one task. A task's prefix replaces [`Self::source_prefix`].
    pub mixture: Option<Arc<Mixture>>,
}

/// The part of every batch that one of several processes makes: some of its shards, by position. The default is the whole
/// batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShare {
    /// The shards of a batch, and the number of processes.
    pub shards: Shards,
    /// The number of this process.
    pub rank: usize,
}

impl Default for BatchShare {
    fn default() -> Self {
        Self { shards: Shards { count: 1, processes: 1 }, rank: 0 }
    }
}

impl BatchShare {
    /// Positions of each of this process's shards, within the batch with these positions.
    pub(crate) fn positions(&self, batch: &Range<u64>) -> Vec<Range<u64>> {
        let length = (batch.end - batch.start) as usize;
        let place = |position: usize| batch.start + position as u64;
        let of_shard = |shard| {
            let positions = self.shards.positions(shard, length);
            place(positions.start)..place(positions.end)
        };
        self.shards.owned_by(self.rank).map(of_shard).collect()
    }

    /// The most samples that this process has of a batch of `batch_size`.
    pub(crate) fn max_samples(&self, batch_size: usize) -> usize {
        self.positions(&(0..batch_size as u64)).iter().map(|positions| (positions.end - positions.start) as usize).sum()
    }
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self {
            objective: Objective::default(),
            batch_size: 1,
            order: OrderOptions::default(),
            epochs: Some(1),
            max_source_tokens: 512,
            max_target_tokens: 512,
            eos_id: 1,
            decoder_start_id: None,
            image_ids: Vec::new(),
            source_prefix: String::new(),
            truncation_side: Side::default(),
            bad_rows: BadRows::default(),
            keep_texts: false,
            keep_prompts: false,
            share: BatchShare::default(),
            mixture: None,
        }
    }
}

/// Limits of the loader. They affect time and memory, never the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderLimits {
    /// Batches that may be made before they are asked for; 0: each is made when it is asked for.
    pub prefetch_batches: usize,
    /// Threads that read and tokenize; 0: the caller's own thread does.
    pub decode_threads: usize,
}

/// The stream of batches.
pub struct DataLoader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    limits: LoaderLimits,
    position: Position,
}

/// State that the loader and its threads share.
struct Shared {
    maker: BatchMaker,
    schedule: Schedule,
    queue: Mutex<Queue>,
    /// Signals threads that there may be work.
    work: Condvar,
    /// Signals that a batch is finished.
    done: Condvar,
    stop: AtomicBool,
    /// The caller's flag: once it is set, no more batches are made.
    stop_on: OnceLock<Arc<AtomicBool>>,
}

/// The interval at which a caller that waits for a batch looks at the flag of [`DataLoader::stop_on`].
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Batches by their number since the start.
#[derive(Default)]
struct Queue {
    /// The next batch to hand out.
    next_out: u64,
    /// The next batch that no thread has begun.
    next_begun: u64,
    begun: BTreeSet<u64>,
    finished: BTreeMap<u64, Result<Batch, Error>>,
    /// Batches that may be begun before they are asked for.
    depth: u64,
    /// Threads that may keep running.
    threads: usize,
}

impl DataLoader {
    /// Makes the stream over `dataset`, from `start` on.
    ///
    /// # Errors
    /// [`Error::Options`] for options that contradict each other or the tokenizer; [`Error::Position`] for a
    /// start that this data does not have.
    pub fn new(
        dataset: Arc<Dataset>,
        tokenizer: Arc<Tokenizer>,
        options: LoaderOptions,
        start: Position,
        limits: LoaderLimits,
    ) -> Result<Self, Error> {
        let samples = options.mixture.as_ref().map_or(dataset.rows(), |mixture| mixture.samples());
        let schedule = Schedule::new(samples, options.batch_size as u64, options.epochs, start)?;
        let maker = BatchMaker::new(dataset, tokenizer, options)?;
        let shared = Arc::new(Shared {
            maker,
            queue: Mutex::new(Queue::default()),
            work: Condvar::new(),
            done: Condvar::new(),
            stop: AtomicBool::new(false),
            stop_on: OnceLock::new(),
            schedule,
        });
        let position = shared.schedule.start;
        let mut loader = Self { shared, threads: Vec::new(), limits, position };
        loader.set_limits(limits);
        Ok(loader)
    }

    /// Makes the stream end early once `flag` is set: [`DataLoader::next_batch`] then returns `None`, within a row's time
    /// or 50 ms. The position stays the same. Only the first call has an effect.
    pub fn stop_on(&self, flag: &Arc<AtomicBool>) {
        let _ = self.shared.stop_on.set(Arc::clone(flag));
    }

    /// Returns the next batch, or `None` after the last epoch or once the flag of [`DataLoader::stop_on`] is set.
    ///
    /// # Errors
    /// Any error of making this batch. The position stays before the batch; the next call tries the batch again.
    pub fn next_batch(&mut self) -> Result<Option<Batch>, Error> {
        let shared = &self.shared;
        let mut queue = shared.lock();
        let number = queue.next_out;
        let Some((epoch, samples)) = shared.schedule.batch(number) else {
            return Ok(None);
        };
        let outcome = loop {
            if shared.is_stopped() {
                return Ok(None);
            }
            if let Some(outcome) = queue.finished.remove(&number) {
                drop(queue);
                break outcome;
            }
            let is_left_to_threads = queue.next_begun <= number && queue.depth > 0 && queue.threads > 0;
            if queue.begun.contains(&number) || is_left_to_threads {
                (queue, _) = shared.done.wait_timeout(queue, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            // There is no thread to make the batch, or a thread met an error and this call tries again.
            queue.next_begun = queue.next_begun.max(number + 1);
            drop(queue);
            match shared.maker.make(epoch, samples, &|| shared.is_stopped()) {
                Ok(Some(batch)) => break Ok(batch),
                Ok(None) => return Ok(None),
                Err(error) => break Err(error),
            }
        };
        let batch = outcome?;
        shared.lock().next_out += 1;
        shared.work.notify_all();
        self.position = batch.position_after;
        Ok(Some(batch))
    }

    /// Changes the prefetch depth and the number of threads, from the next batch on. Finished batches are kept, so
    /// memory falls as they are consumed.
    pub fn set_limits(&mut self, limits: LoaderLimits) {
        self.limits = limits;
        let wanted = if limits.prefetch_batches == 0 { 0 } else { limits.decode_threads };
        self.allow(limits.prefetch_batches, wanted);
        if wanted < self.threads.len() {
            // The surplus threads end after the batch in hand.
            self.threads.split_off(wanted).into_iter().for_each(join);
        }
        while self.threads.len() < wanted {
            let (shared, number) = (Arc::clone(&self.shared), self.threads.len());
            let thread = std::thread::Builder::new().name(format!("decode-{number}"));
            match thread.spawn(move || shared.run_thread(number)) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    // The stream does not depend on the number of threads; it is only slower.
                    tracing::warn!("using {number} decoding threads instead of {wanted}: {error}");
                    self.allow(limits.prefetch_batches, number);
                    break;
                }
            }
        }
    }

    fn allow(&self, prefetch_batches: usize, threads: usize) {
        let mut queue = self.shared.lock();
        queue.depth = prefetch_batches as u64;
        queue.threads = threads;
        drop(queue);
        self.shared.work.notify_all();
    }

    /// The limits in force.
    pub fn limits(&self) -> LoaderLimits {
        self.limits
    }

    /// The stream's position: after the last batch that was handed out.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Batches from the current position to the end; `None` if the stream has no end.
    pub fn batches_left(&self) -> Option<u64> {
        let schedule = &self.shared.schedule;
        schedule.batches().map(|batches| batches - self.shared.lock().next_out)
    }

    /// Samples of an epoch: the rows of the dataset, or the samples of a mixture.
    pub fn samples_per_epoch(&self) -> u64 {
        self.shared.schedule.rows
    }

    /// Memory of this loader under `limits`; see [`costs`].
    pub fn costs(&self, limits: LoaderLimits) -> Vec<CostRow> {
        let maker = &self.shared.maker;
        costs(maker.options(), limits, maker.tokenizer(), maker.dataset())
    }
}

impl Drop for DataLoader {
    fn drop(&mut self) {
        // Set under the lock, so that no thread can miss it between checking the flag and waiting.
        let queue = self.shared.lock();
        self.shared.stop.store(true, Ordering::Relaxed);
        drop(queue);
        self.shared.work.notify_all();
        self.threads.drain(..).for_each(join);
    }
}

/// Threads catch their own panics, so that joining cannot fail.
fn join(thread: JoinHandle<()>) {
    let _ = thread.join();
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Batches are made outside the lock, and code under the lock does not panic halfway.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.stop_on.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// Makes batches until none are left, or until this thread is surplus.
    fn run_thread(&self, thread: usize) {
        let mut queue = self.lock();
        loop {
            if self.is_stopped() || thread >= queue.threads {
                return;
            }
            let number = queue.next_begun;
            let is_near = number < queue.next_out.saturating_add(queue.depth);
            let Some((epoch, samples)) = self.schedule.batch(number).filter(|_| is_near) else {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.next_begun += 1;
            queue.begun.insert(number);
            drop(queue);
            // A panic here would leave the caller waiting forever.
            let made = catch_unwind(AssertUnwindSafe(|| self.maker.make(epoch, samples, &|| self.is_stopped())));
            queue = self.lock();
            queue.begun.remove(&number);
            let outcome = match made {
                Ok(Ok(Some(batch))) => Ok(batch),
                Ok(Ok(None)) => return,
                Ok(Err(error)) => Err(error),
                Err(panic) => Err(Error::Thread(panic_message(&*panic))),
            };
            queue.finished.insert(number, outcome);
            self.done.notify_all();
        }
    }
}

/// Maps batch numbers to samples: arithmetic only.
#[derive(Clone, Debug)]
struct Schedule {
    rows: u64,
    batch_size: u64,
    epochs: Option<u64>,
    start: Position,
}

impl Schedule {
    fn new(rows: u64, batch_size: u64, epochs: Option<u64>, start: Position) -> Result<Self, Error> {
        if rows == 0 {
            return Err(Error::Options("the dataset has no rows".to_owned()));
        }
        let start = match start.sample.cmp(&rows) {
            std::cmp::Ordering::Less => start,
            std::cmp::Ordering::Equal => Position { epoch: start.epoch + 1, sample: 0 },
            std::cmp::Ordering::Greater => {
                return Err(Error::Position { epoch: start.epoch, sample: start.sample, rows });
            }
        };
        Ok(Self { rows, batch_size: batch_size.max(1), epochs, start })
    }

    /// The epoch and samples of batch `number`, counted from the start; `None` after the last epoch.
    fn batch(&self, number: u64) -> Option<(u64, Range<u64>)> {
        let in_first_epoch = (self.rows - self.start.sample).div_ceil(self.batch_size);
        let (epoch, first) = if number < in_first_epoch {
            (self.start.epoch, self.start.sample + number * self.batch_size)
        } else {
            let per_epoch = self.rows.div_ceil(self.batch_size);
            let later = number - in_first_epoch;
            (self.start.epoch + 1 + later / per_epoch, later % per_epoch * self.batch_size)
        };
        let is_over = self.epochs.is_some_and(|epochs| epoch >= epochs);
        (!is_over).then(|| (epoch, first..self.rows.min(first + self.batch_size)))
    }

    /// Batches from the start to the end.
    fn batches(&self) -> Option<u64> {
        let epochs_left = self.epochs?.saturating_sub(self.start.epoch);
        if epochs_left == 0 {
            return Some(0);
        }
        let in_first_epoch = (self.rows - self.start.sample).div_ceil(self.batch_size);
        Some(in_first_epoch + (epochs_left - 1) * self.rows.div_ceil(self.batch_size))
    }
}

#[cfg(test)]
mod tests;
