//! The pace of a run: the time of a step, and the bytes that it writes to files.
//!
//! The time follows from a plan's levers, measured prices and the lengths of samples. Short samples share a micro-batch, so each
//! micro-batch is counted separately. No choice depends on the pace.

use memory_policy::{MemorySnapshot, MemorySpace};
use t5::{AnswerShape, Levers};
use t5_ops::Calls;

use crate::Plan;
use crate::counted::{Counter, StepCounter};
use crate::error::Result;
use crate::files::{StepIo, memory_beside};
use crate::job::{Job, Training, Work};
use crate::kinds;
use crate::prices::{MicroBatchOverhead, Prices, moving_time, relative_time};
use crate::traffic::{Computed, Traffic};

/// The pace of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// Seconds of a step; `None` if prices were not measured.
    pub step_seconds: Option<f64>,
    /// Bytes that a step writes to files in place of memory.
    pub step_written_bytes: u64,
    /// Bytes of weights that a step reads from files: from the disk if they are not in the page cache.
    pub step_read_bytes: u64,
    /// Bytes that a step copies between the host and a device, except its batch. Copies for other processes are included.
    pub step_bus_bytes: u64,
    /// The part of `step_bus_bytes` that is copied while blocks are computed.
    pub step_bus_bytes_behind: u64,
    /// On a card, the seconds of a step in which it waits for these copies and for files; `None` if prices were not measured.
    pub step_copy_wait_seconds: Option<f64>,
    /// On a card, the host's seconds for the launches of a step of full-length samples. Most of them overlap with the card's computation.
    /// `None` if launches were not measured.
    pub step_launch_seconds: Option<f64>,
    /// The most bytes that one of several processes sends to the others in a step.
    pub step_sent_bytes: u64,
    /// The seconds in which a process sends or receives, one transfer after the other.
    pub step_sent_seconds: f64,
    /// The part of `step_sent_seconds` in which nothing is computed; [`Pace::step_seconds`] includes it. Without measured prices it is
    /// computed for a processor of usual speed.
    pub step_waited_seconds: f64,
}

/// The pace of a plan. `lengths` are source and target tokens of some of the samples of a step. If `lengths` is empty, all samples are as
/// long as allowed.
///
/// # Errors
/// An unknown item in `freeze`, or everything frozen. Inference has no steps, so its pace is the default.
pub fn pace(job: &Job<'_>, now: &MemorySnapshot, plan: &Plan, lengths: &[(usize, usize)]) -> Result<Pace> {
    let Work::Training(training) = &job.work else { return Ok(Pace::default()) };
    let levers = plan.step.levers;
    let counter = StepCounter::new(job.model, training.options, job.samples, job.longest, &training.processes)?;
    let counter = counter.at(job.place, training.options);
    let all_longest = [job.longest];
    let lengths = if lengths.is_empty() { &all_longest } else { lengths };
    // Files of activations grow with the tokens; files of gradients and weights do not.
    let mean = |of: fn(&(usize, usize)) -> usize| lengths.iter().map(of).sum::<usize>().div_ceil(lengths.len()).max(1);
    let of_mean = StepCounter::new(
        job.model,
        training.options,
        job.samples,
        (mean(|l| l.0), mean(|l| l.1)),
        &training.processes,
    )?;
    let micro_batches = levers.micro_batches(job.samples);
    let of_mean = of_mean.at(job.place, training.options);
    let written = of_mean.written(&levers).in_micro_batches(micro_batches, of_mean.table_read(&levers));
    let reads_files = !levers.has_host_memory() || training.base.is_some();
    let step = StepEstimate { job, counter: &counter, levers, written, memory: memory_beside(now, plan) };
    let before = seconds_before(job, training, (mean(|l| l.0), mean(|l| l.1)))?;
    let of_step = Pace {
        step_seconds: step.seconds(&job.prices, lengths).zip(before).map(|(of_step, before)| of_step + before),
        step_copy_wait_seconds: step.copy_wait_seconds(lengths),
        step_launch_seconds: step.launching_seconds(),
        step_written_bytes: written.total(),
        step_read_bytes: if reads_files { counter.weights_read(&levers, micro_batches) } else { 0 },
        step_bus_bytes: written.bus_bytes,
        step_bus_bytes_behind: written.overlapped,
        ..Pace::default()
    };
    let traffic = Traffic::total(job.model, training, job.place)?;
    Ok(traffic.map_or(of_step, |traffic| step.with_sent(of_step, &traffic, lengths)))
}

/// Seconds of the forward passes before a step: of the model and its reference over answers that are compared, and of a teacher. `lengths` are
/// those of a mean sample.
#[expect(clippy::cast_precision_loss, reason = "samples are far below 2^53")]
fn seconds_before(job: &Job<'_>, training: &Training<'_>, lengths: (usize, usize)) -> Result<Option<f64>> {
    let options = training.options;
    let (own, of_frozen) = match options.preference {
        // Of rows with labels, each answer is compared with another one.
        Some(of) => {
            let answers = if of.loss.has_labels() { 2.0 } else { 1.0 };
            let own = if of.loss.has_reference() && !of.has_reference_model { 2.0 } else { 1.0 };
            (answers * own, answers)
        }
        // A teacher whose logits are kept reads a run's first epoch alone.
        None => (0.0, if training.frozen.is_some_and(|of| of.kept.is_none()) { 1.0 } else { 0.0 }),
    };
    let arithmetic = |model: &t5::Config| -> Result<f64> {
        let (dtype, activations) = (options.parameter_dtype(), options.precision.activations());
        let counter = Counter::new(model, dtype, activations, lengths)?;
        Ok(counter.evaluation([1, 0], ROWS_AT_A_TIME, AnswerShape::greedy(0)).multiply_adds[0])
    };
    let mut multiply_adds = 0.0;
    if own > 0.0 {
        multiply_adds += own * arithmetic(job.model)?;
    }
    if let Some(frozen) = training.frozen.filter(|_| of_frozen > 0.0) {
        multiply_adds += of_frozen * arithmetic(frozen.model)?;
    }
    let samples = (job.samples * training.processes.shards_of_a_process()) as f64;
    Ok(job.prices.multiply_add_ps.map(|ps| samples * multiply_adds * ps * 1e-12))
}

#[derive(Clone, Copy)]
struct StepEstimate<'a> {
    job: &'a Job<'a>,
    counter: &'a StepCounter<'a>,
    levers: Levers,
    written: StepIo,
    memory: memory_policy::Bytes,
}

impl StepEstimate<'_> {
    fn seconds(&self, prices: &Prices, lengths: &[(usize, usize)]) -> Option<f64> {
        Some(self.seconds_of_passes(prices, lengths)? + self.seconds_of_update(prices)?)
    }

    /// The seconds of the update. The host launches its kernels, too.
    #[expect(clippy::cast_precision_loss, reason = "parameters are far below 2^53")]
    fn seconds_of_update(&self, prices: &Prices) -> Option<f64> {
        let computing = prices.parameter_ps? * self.counter.trained_elements() as f64;
        let launching = prices.launching(&self.update_calls()) * prices.multiply_add_ps?;
        Some(computing.max(launching) * 1e-12)
    }

    #[expect(clippy::cast_precision_loss, reason = "samples are far below 2^53")]
    fn seconds_of_passes(&self, prices: &Prices, lengths: &[(usize, usize)]) -> Option<f64> {
        let multiply_add_ps = prices.multiply_add_ps?;
        let samples = self.job.samples;
        // A few samples stand for all samples of a step.
        let known: Vec<(usize, usize)> = lengths.iter().copied().cycle().take(samples.min(MAX_SAMPLES)).collect();
        let micro_batches = kinds::shapes(&known, self.levers.micro_batch_samples, self.job.longest);
        let moved = moving_time(prices, self.written, self.memory).times(1.0 / samples as f64);
        let is_recorded = self.is_recorded(lengths);
        let time = |&(count, longest): &kinds::Shape| {
            let longest = (longest.0.max(1), longest.1.max(1));
            let arithmetic = self.counter.arithmetic_of(count, longest);
            let moved = moved.times(count as f64);
            let part = count as f64 / samples as f64;
            let beside = moved.without_casts(prices, self.counter.spared_casts(&self.levers, part));
            let calls = || self.counter.pass_calls_of(count, longest, &self.levers);
            let beside = beside.with_launches(prices, calls, is_recorded);
            let tokens = count * kinds::tokens(longest);
            relative_time(prices, &self.levers, tokens, &arithmetic, beside) * arithmetic.training
        };
        let of_shard = micro_batches.iter().map(time).sum::<f64>() * samples as f64 / known.len() as f64;
        Some(of_shard * self.shards() as f64 * multiply_add_ps * 1e-12)
    }

    /// Whether micro-batches of such rows are launched as graphs.
    fn is_recorded(&self, lengths: &[(usize, usize)]) -> bool {
        let (Job { samples, longest, .. }, levers) = (self.job, &self.levers);
        levers.repeats && kinds::repeat(lengths, *samples, levers.micro_batch_samples, *longest)
    }

    /// The requests of an update to a card; none if launches have no price.
    fn update_calls(&self) -> Calls {
        let Work::Training(training) = &self.job.work else { return Calls::default() };
        let is_priced = self.job.place == MemorySpace::Device && self.job.prices.launch > 0.0;
        if is_priced { self.counter.update_calls(&self.levers, training.options) } else { Calls::default() }
    }

    /// The host's seconds for the launches of a step of full-length samples, if they have a price.
    fn launching_seconds(&self) -> Option<f64> {
        let (prices, levers) = (&self.job.prices, &self.levers);
        let multiply_add_ps = prices.multiply_add_ps.filter(|_| prices.launch > 0.0)?;
        let Work::Training(training) = &self.job.work else { return None };
        let calls = || self.counter.pass_calls(levers);
        let beside = MicroBatchOverhead::default().with_launches(prices, calls, self.is_recorded(training.lengths));
        let micro_batches = levers.micro_batches(self.job.samples) as f64;
        let passes = micro_batches * beside.launching.total();
        Some((passes + prices.launching(&self.update_calls())) * multiply_add_ps * 1e-12)
    }

    /// The seconds by which copies and files make a step on a card longer.
    fn copy_wait_seconds(&self, lengths: &[(usize, usize)]) -> Option<f64> {
        if self.job.place == MemorySpace::Host {
            return None;
        }
        let resident = StepEstimate { written: StepIo::default(), ..*self };
        let [all, computed] = [self, &resident].map(|step| step.seconds(&self.job.prices, lengths));
        Some(all? - computed?)
    }

    fn shards(&self) -> usize {
        if let Work::Training(training) = &self.job.work { training.processes.shards_of_a_process() } else { 1 }
    }

    /// The pace with the bytes sent to other processes.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    fn with_sent(&self, pace: Pace, traffic: &Traffic, lengths: &[(usize, usize)]) -> Pace {
        let Self { job, counter, ref levers, .. } = *self;
        let sent = traffic.sent(counter, job.samples, levers);
        let arithmetic = &counter.arithmetic(levers.micro_batch_samples);
        let micro_batches = traffic.micro_batches(job.samples, levers);
        let tokens = levers.micro_batch_samples * (job.longest.0 + job.longest.1);
        let calls = || counter.pass_calls(levers);
        let beside = MicroBatchOverhead::default().with_launches(&job.prices, calls, self.is_recorded(lengths));
        let time = relative_time(&job.prices, levers, tokens, arithmetic, beside);
        // The update of parameters overlaps with no communication.
        let passes = self.seconds_of_passes(&traffic.with_speed(&job.prices), lengths);
        let unit = passes.unwrap_or(0.0) / time;
        let step = Computed { time, arithmetic, levers, micro_batches };
        let byte = traffic.byte_seconds(&job.prices, &sent);
        let step_waited_seconds = unit * step.exposed(&sent, byte / unit.max(f64::MIN_POSITIVE));
        Pace {
            step_seconds: pace.step_seconds.map(|seconds| seconds + step_waited_seconds),
            step_sent_bytes: sent.bytes,
            step_sent_seconds: byte * sent.wire_bytes() as f64,
            step_waited_seconds,
            step_bus_bytes: pace.step_bus_bytes + sent.bus_bytes,
            ..pace
        }
    }
}

/// Rows of logits at a time in the arithmetic of a pass: any number has the same.
const ROWS_AT_A_TIME: usize = 256;

/// Samples of a step that are counted individually.
const MAX_SAMPLES: usize = 256;

#[cfg(test)]
mod tests {
    use trainer::TrainerOptions;

    use super::*;
    use crate::lever::{Pins, Value};
    use crate::testing;

    const LONGEST: (usize, usize) = (256, 256);

    /// The pace of t5-small over 8 samples, one picosecond a multiply-add.
    fn pace_of_t5_small(lengths: &[(usize, usize)], file: bool) -> Pace {
        let model = t5::Config::preset("t5-small").unwrap();
        let options = TrainerOptions { total_steps: 10, ..TrainerOptions::default() };
        let training = Training { disk_writes: 1 << 40, ..testing::training(&options) };
        let order = if file { "layer-major" } else { "micro-batch-major" };
        let pins =
            Pins::default().with("micro_batch_samples", Value::Count(2)).with("accumulation", Value::Word(order));
        let pins = if file { pins.with("gradient_offload", Value::Word("disk")) } else { pins };
        let prices = Prices { multiply_add_ps: Some(1.0), parameter_ps: Some(0.0), ..Prices::vectors() };
        let job = Job { longest: LONGEST, prices, ..testing::job(&model, training, &pins) };
        let now = testing::machine();
        let plan = crate::plan(&job, &now).unwrap().plan;
        pace(&job, &now, &plan, lengths).unwrap()
    }

    #[test]
    fn a_step_takes_the_time_of_its_tokens() {
        let [long, short] =
            [&[][..], &[(64, 64)]].map(|lengths| pace_of_t5_small(lengths, false).step_seconds.unwrap());
        // 8 x 512 tokens through 60 M parameters, forward and backward: about 370 billion multiply-adds.
        assert!((0.3..0.6).contains(&long), "{long}");
        assert!((3.8..4.8).contains(&(long / short)), "{long} {short}");
        assert_eq!(pace_of_t5_small(&[LONGEST; 3], false).step_seconds, Some(long));
        // One long sample among short ones does not pad the others to its length.
        let mixed = pace_of_t5_small(&[LONGEST, (64, 64), (64, 64), (64, 64)], false).step_seconds.unwrap();
        assert!(mixed < 0.75 * long && mixed > short, "{mixed} {long} {short}");
    }

    #[test]
    fn bytes_of_gradients_do_not_depend_on_the_length_of_samples() {
        let [long, short] = [&[][..], &[(64, 64)]].map(|lengths| pace_of_t5_small(lengths, true).step_written_bytes);
        assert!(long >= 60_506_624 * 4 && short <= long, "{long} {short}");
        assert_eq!(pace_of_t5_small(&[], false).step_written_bytes, 0);
    }
}
