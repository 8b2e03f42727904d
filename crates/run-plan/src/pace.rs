//! The pace of a run in words: its time and its writes, shown before it begins.
//!
//! Texts are often shorter than the limit, so a few rows from the whole run are read to find typical lengths. If no row can be read, every
//! sample counts as one of full length.

use std::time::Duration;

use candle_core::DType;
use memory_policy::{Bytes, MemorySnapshot, plural};
use planner::{Job, Pace, Plan, Prices, Work};
use serde_json::{Value, json};
use t5::ParameterSpec;
use t5_ops::Calls;
use trainer::TrainerOptions;

use crate::config::Config;
use crate::failure::Outcome;
use crate::job;
use crate::priced::Priced;

/// The pace of a run.
#[derive(Clone, Debug, Default)]
pub struct RunPace {
    pace: Pace,
    /// Remaining steps, if known.
    steps: Option<u64>,
    /// Steps of an epoch, if known.
    epoch_steps: Option<u64>,
    knows_lengths: bool,
    /// The number of rows that were read, and how many of their sources and of their targets are cut.
    cut: (u64, u64, u64),
    /// The lengths at which sources and targets are cut.
    longest: (usize, usize),
    /// Bytes of a checkpoint.
    checkpoint_bytes: u64,
    checkpoints: Option<u64>,
    /// Checkpoints that are on disk at a time.
    kept_checkpoints: u64,
    /// Bytes of a teacher's logits.
    logit_bytes: u64,
    /// Bytes of the model.
    model_bytes: u64,
    is_bf16: bool,
    bf16_over_f32: Option<f64>,
    prices: Option<Prices>,
    /// The moments of a step.
    timeline: Option<planner::Timeline>,
    /// The requests of a step to a card.
    calls: Option<Calls>,
}

/// A few rows from the whole run.
#[derive(Clone, Debug, Default)]
pub struct SampledRows {
    /// Rows of the data.
    pub all: u64,
    /// Source and target tokens of the rows that were read.
    pub lengths: Vec<(usize, usize)>,
    /// Sources that are cut for the model.
    pub cut_sources: u64,
    /// Targets that are cut for the model.
    pub cut_targets: u64,
}

/// The bytes that a run keeps on disk at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskNeed {
    /// Files in place of memory, which are removed when the process ends.
    pub files: u64,
    /// Checkpoints that are kept, and the checkpoint that is being written.
    pub checkpoints: u64,
    /// The model at the end.
    pub model: u64,
}

impl DiskNeed {
    /// The need of a run that follows a plan.
    ///
    /// # Errors
    /// The planner refuses the options.
    pub fn estimate(of: &PaceInputs<'_>, job: &Job<'_>, now: &MemorySnapshot, plan: &Plan) -> Outcome<Self> {
        Ok(RunPace::in_numbers(of, job, now, plan)?.disk_need())
    }

    /// The sum.
    pub fn total(&self) -> Bytes {
        Bytes(self.files.saturating_add(self.checkpoints).saturating_add(self.model))
    }
}

/// The facts that determine the pace of a run.
#[derive(Clone, Copy)]
pub struct PaceInputs<'a> {
    /// The resolved config.
    pub config: &'a Config,
    /// The trainer's options.
    pub options: &'a TrainerOptions,
    /// The data, if any.
    pub rows: Option<&'a SampledRows>,
    /// Remaining steps, if known.
    pub steps: Option<u64>,
    /// The prices that the plan was made from.
    pub priced: &'a Priced,
}

impl RunPace {
    /// The pace of a run that follows a plan.
    ///
    /// # Errors
    /// The planner refuses the options.
    pub fn new(of: &PaceInputs<'_>, job: &Job<'_>, now: &MemorySnapshot, plan: &Plan) -> Outcome<Self> {
        let timeline = planner::timeline(job, plan)?;
        Ok(Self { timeline, calls: planner::device_calls(job, plan)?, ..Self::in_numbers(of, job, now, plan)? })
    }

    /// The pace without the moments of a step and its requests.
    fn in_numbers(of: &PaceInputs<'_>, job: &Job<'_>, now: &MemorySnapshot, plan: &Plan) -> Outcome<Self> {
        let PaceInputs { config, options, rows, steps, priced } = *of;
        let lengths = rows.map_or(&[][..], |rows| &rows.lengths);
        let pace = planner::pace(job, now, plan, lengths)?;
        // A run of an adapter never writes the base.
        let elements = match job.model.lora {
            Some(_) => trainer::costs::trained_elements(job.model, options)?,
            None => ParameterSpec::elements_of_all(job.model),
        };
        let dtype = if job.model.lora.is_some() { DType::F32 } else { options.parameter_dtype() };
        let state = trainer::costs::optimizer_state(job.model, options, options.parameter_dtype())?;
        let timed = Self { pace, steps, ..Self::default() };
        let seconds = timed.seconds();
        Ok(Self {
            epoch_steps: rows.map(|rows| rows.all.div_ceil(config.train.batch_size as u64)),
            knows_lengths: !lengths.is_empty(),
            cut: rows.map_or((0, 0, 0), |rows| (rows.lengths.len() as u64, rows.cut_sources, rows.cut_targets)),
            longest: job.longest,
            kept_checkpoints: config.checkpoint.keep_last as u64 + config.checkpoint.keep_best as u64 + 1,
            logit_bytes: match &job.work {
                Work::Training(training) => training.frozen.and_then(|of| of.kept).map_or(0, |kept| kept.file_bytes),
                Work::Inference(_) => 0,
            },
            model_bytes: elements * dtype.size_in_bytes() as u64,
            checkpoint_bytes: elements * dtype.size_in_bytes() as u64 + state.bytes,
            checkpoints: steps.map(|steps| checkpoints(config, steps, seconds)),
            is_bf16: config.train.bf16,
            bf16_over_f32: priced.bf16_over_f32,
            prices: Some(priced.prices),
            ..timed
        })
    }

    /// Seconds of all steps.
    #[expect(clippy::cast_precision_loss, reason = "steps are far below 2^53")]
    fn seconds(&self) -> Option<f64> {
        Some(self.steps? as f64 * self.pace.step_seconds?)
    }

    /// The predicted time of a step.
    pub fn step_time(&self) -> Option<Duration> {
        self.pace.step_seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
    }

    /// The bytes that the run keeps on disk at a time.
    pub fn disk_need(&self) -> DiskNeed {
        let checkpoints = self.checkpoints.unwrap_or(u64::MAX).min(self.kept_checkpoints);
        DiskNeed {
            files: self.pace.step_written_bytes.saturating_add(self.logit_bytes),
            checkpoints: checkpoints.saturating_mul(self.checkpoint_bytes),
            model: self.model_bytes,
        }
    }

    /// The lines below a bill.
    pub fn in_words(&self) -> String {
        let disk = [
            ("Disk space", Some(format!("{} at a time", self.disk_need().total()))),
            ("Disk writes", self.writes()),
            ("Disk reads", self.reads()),
        ];
        let lines = [("Truncation", self.truncation()), ("Time", self.time()), ("Precision", self.precision())]
            .into_iter()
            .chain(disk)
            .chain([("Bus", self.bus()), ("Network", self.network()), ("GPU", self.requests())]);
        lines.filter_map(|(name, words)| Some(memory_policy::labelled(name, &words?))).collect()
    }

    fn reads(&self) -> Option<String> {
        let bytes = self.pace.step_read_bytes;
        (bytes > 0).then(|| format!("{} of weights a step, where the page cache does not have them", Bytes(bytes)))
    }

    /// The bytes of a step that are copied to a card and back, in words.
    fn bus(&self) -> Option<String> {
        let bytes = self.pace.step_bus_bytes;
        let behind = self.pace.step_bus_bytes_behind;
        let beside = || format!(", {} of it while blocks are computed", Bytes(behind));
        let beside = if behind > 0 { beside() } else { String::new() };
        let waits = |seconds| format!("; the GPU waits for them for about {}", in_words(seconds));
        let waits = self.pace.step_copy_wait_seconds.map(waits).unwrap_or_default();
        (bytes > 0).then(|| format!("{} between host and GPU a step{beside}{waits}", Bytes(bytes)))
    }

    /// The bytes of a step that are sent to other processes, in words.
    fn network(&self) -> Option<String> {
        let Pace { step_sent_bytes: bytes, step_sent_seconds: seconds, step_waited_seconds: waited, .. } = self.pace;
        let hidden = 100.0 * (1.0 - waited / seconds.max(f64::MIN_POSITIVE)).max(0.0);
        let rate = bytes as f64 * 8e-6 / seconds.max(f64::MIN_POSITIVE);
        let took =
            || format!("{} at {rate:.0} Mbit/s, {hidden:.0} % of it while something is computed", in_words(seconds));
        (bytes > 0).then(|| format!("a process sends {} a step: {}", Bytes(bytes), took()))
    }

    /// The number of requests of a step to a card, in words.
    fn requests(&self) -> Option<String> {
        let Calls { graphs, launches, products, uploads, downloads } = self.calls?;
        let counts = [(launches, "kernel"), (products, "matrix product"), (uploads, "upload"), (downloads, "download")];
        let [launches, products, uploads, downloads] = counts.map(|(count, of)| plural(count, of));
        let beside = if graphs > 0 { format!(" beside {}", plural(graphs, "graph")) } else { String::new() };
        let launching = |seconds| format!("; the host launches them in about {}", in_words(seconds));
        let launching = self.pace.step_launch_seconds.map(launching).unwrap_or_default();
        Some(format!("a step has {launches} and {products}{beside}, at most {uploads}, and {downloads}{launching}"))
    }

    /// The number of texts that are cut, in words.
    fn truncation(&self) -> Option<String> {
        let (rows, sources, targets) = self.cut;
        let of = [("source", sources, self.longest.0), ("target", targets, self.longest.1)];
        let cut = of.into_iter().filter(|(_, count, _)| *count > 0);
        let cut: Vec<String> =
            cut.map(|(what, count, most)| format!("{} cut at {most} tokens", plural(count, what))).collect();
        (!cut.is_empty()).then(|| format!("of {} looked at: {}", plural(rows, "row"), cut.join(", ")))
    }

    fn time(&self) -> Option<String> {
        let step = self.pace.step_seconds?;
        let of = if self.knows_lengths { "about" } else { "samples of full length: about" };
        let all = self.seconds().zip(self.steps).map(|(seconds, steps)| {
            format!(", {} for {}, without evaluations and checkpoints", in_words(seconds), plural(steps, "step"))
        });
        #[expect(clippy::cast_precision_loss, reason = "steps are far below 2^53")]
        let an_epoch = self
            .epoch_steps
            .filter(|_| self.steps.is_none())
            .map(|steps| format!(", {} an epoch", in_words(steps as f64 * step)));
        Some(format!("{of} {} a step{}", in_words(step), all.or(an_epoch).unwrap_or_default()))
    }

    fn writes(&self) -> Option<String> {
        let step = Some(self.pace.step_written_bytes).filter(|bytes| *bytes > 0).map(|bytes| {
            let all = self.steps.map(|steps| format!(", {} in all", Bytes(bytes.saturating_mul(steps))));
            format!("{} a step in place of memory{}", Bytes(bytes), all.unwrap_or_default())
        });
        let saved = self.checkpoints.map(|count| {
            let all = Bytes(self.checkpoint_bytes.saturating_mul(count));
            format!("checkpoints and model of {} each, {all} in all", Bytes(self.checkpoint_bytes))
        });
        let both: Vec<String> = step.into_iter().chain(saved).collect();
        if both.is_empty() { None } else { Some(both.join("; ")) }
    }

    /// A sentence if the other precision would be better.
    fn precision(&self) -> Option<String> {
        let ratio = self.bf16_over_f32?;
        match self.is_bf16 {
            true if ratio > 1.03 => {
                Some(format!("bf16 takes {ratio:.2} times as long as f32 on this processor; it only saves memory"))
            }
            false if ratio < 0.9 => {
                let times = 1.0 / ratio;
                let decimals = usize::from(times < 3.0);
                Some(format!("{times:.decimals$}x faster here: `--set train.precision=bf16`"))
            }
            _ => None,
        }
    }

    /// A plan and its pace, for `metrics.jsonl` and `plan --json`.
    pub fn plan_json(&self, plan: &Plan) -> Value {
        let mut json = job::plan_json(plan);
        let in_all = |bytes: u64| self.steps.map(|steps| bytes.saturating_mul(steps));
        json["step_seconds"] = json!(self.pace.step_seconds);
        json["run_seconds"] = json!(self.seconds());
        json["step_written_bytes"] = json!(self.pace.step_written_bytes);
        json["step_read_bytes"] = json!(self.pace.step_read_bytes);
        json["step_bus_bytes"] = json!(self.pace.step_bus_bytes);
        json["step_bus_bytes_behind"] = json!(self.pace.step_bus_bytes_behind);
        if let Some(seconds) = self.pace.step_copy_wait_seconds {
            json["step_copy_wait_seconds"] = json!(seconds);
        }
        if let Some(seconds) = self.pace.step_launch_seconds {
            json["step_launch_seconds"] = json!(seconds);
        }
        if self.pace.step_sent_bytes > 0 {
            json["step_sent_bytes"] = json!(self.pace.step_sent_bytes);
            json["step_sent_seconds"] = json!(self.pace.step_sent_seconds);
            json["step_waited_seconds"] = json!(self.pace.step_waited_seconds);
        }
        json["run_written_bytes"] = json!(in_all(self.pace.step_written_bytes));
        json["checkpoint_bytes"] = json!(self.checkpoint_bytes);
        json["checkpoints"] = json!(self.checkpoints);
        json["truncation"] = json!({"rows": self.cut.0, "sources": self.cut.1, "targets": self.cut.2});
        json["prices"] = json!(self.prices);
        json["bf16_over_f32"] = json!(self.bf16_over_f32);
        json["timeline"] = json!(self.timeline);
        if let Some(Calls { graphs, launches, products, uploads, downloads }) = self.calls {
            json["device_step"] = json!({"graphs": graphs, "launches": launches, "products": products,
                "uploads": uploads, "downloads": downloads});
        }
        json
    }
}

/// The number of saves in a run of `steps` steps, including the final model: by steps or by time, whichever gives more.
fn checkpoints(config: &Config, steps: u64, seconds: Option<f64>) -> u64 {
    let by_steps = config.checkpoint.every_steps.map_or(0, |every| steps.saturating_sub(1) / every);
    let by_clock = config.checkpoint.every_minutes.zip(seconds);
    let by_clock = by_clock.map_or(0, |(every, seconds)| (seconds / (60.0 * every)) as u64);
    by_steps.max(by_clock) + 2
}

/// A time in words: `85 ms`, `2.1 s`, `3 min 20 s`, `2 h 05 min`.
pub fn in_words(seconds: f64) -> String {
    match seconds {
        ..1.0 => format!("{:.0} ms", seconds * 1e3),
        1.0..59.5 => format!("{seconds:.1} s"),
        _ => duration(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
    }
}

/// A duration in words: `42 s`, `3 min 20 s`, `2 h 05 min`.
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(step_seconds: Option<f64>) -> RunPace {
        RunPace {
            pace: Pace { step_seconds, step_written_bytes: 1 << 20, ..Pace::default() },
            steps: Some(1000),
            knows_lengths: true,
            checkpoint_bytes: 10 << 20,
            checkpoints: Some(4),
            ..RunPace::default()
        }
    }

    #[test]
    fn a_run_says_its_hours_and_bytes() {
        let words = pace(Some(7.5)).in_words();
        let expected = "\
Time              about 7.5 s a step, 2 h 05 min for 1,000 steps, without
                  evaluations and checkpoints
Disk space        1 MiB at a time
Disk writes       1 MiB a step in place of memory, 1000 MiB in all;
                  checkpoints and model of 10 MiB each, 40 MiB in all
";
        assert_eq!(words, expected);
        assert!(!pace(None).in_words().contains("Time"));
        let unknown = RunPace { steps: None, checkpoints: None, knows_lengths: false, ..pace(Some(0.05)) };
        assert!(unknown.in_words().starts_with("Time              samples of full length: about 50 ms a step\n"));
        let epoch = RunPace { epoch_steps: Some(100), ..unknown };
        assert!(epoch.in_words().contains("50 ms a step, 5.0 s an epoch\n"));
    }

    #[test]
    fn durations_are_for_reading() {
        for (seconds, expected) in [(0, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")] {
            assert_eq!(duration(Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn the_slower_precision_is_named() {
        let of = |is_bf16, ratio| RunPace { is_bf16, bf16_over_f32: Some(ratio), ..pace(None) }.precision();
        assert!(of(true, 1.13).unwrap().contains("1.13 times as long as f32"));
        assert_eq!(of(false, 0.6).unwrap(), "1.7x faster here: `--set train.precision=bf16`");
        assert_eq!(of(false, 0.14).unwrap(), "7x faster here: `--set train.precision=bf16`");
        assert_eq!((of(true, 0.5), of(false, 1.13)), (None, None));
    }
}
