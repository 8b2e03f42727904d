//! [`Profile`]: the time of a step, operation by operation.
//!
//! Each numeric operation opens a `tracing` span with the floating-point operations that it is about to do. Normally the spans have no
//! listener. A [`Profiler`] listens on the steps' thread. For each name it adds up the time and the allocations between a span's two ends,
//! without those of inner spans. So the rows add up to the step, with one row for the work outside all operations.
//!
//! The profiler waits for a card at both ends of a span, so that an operation's time is its own. Such a step takes longer than a step whose
//! launches run ahead of the card.
//!
//! Without a profiler a span costs a load and a branch, and its fields are not computed.

use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use heap::Allocations;
use memory_policy::{Bytes, PageFaults, SystemProbe};
use serde_json::{Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Event, Metadata, Subscriber};

use crate::failure::{Failure, Outcome};
use crate::screen::warnings;

/// Profiles steps.
pub struct Profiler {
    spans: Arc<Spans>,
    dispatch: Dispatch,
    probe: SystemProbe,
    /// The peak rate of the units that compute the steps' products, on a processor.
    peak_gflops: Option<f64>,
    steps: u32,
    whole: Totals,
    faults: Option<PageFaults>,
}

/// The time of an average step, by operation.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Measured peak rate of this machine with all threads. For a card it is not measured.
    pub peak_gflops: Option<f64>,
    /// The number of steps in the average.
    pub steps: u32,
    /// The whole step.
    pub step: Totals,
    /// Its operations, longest first. The work outside all operations is one of them.
    pub operations: Vec<(&'static str, Totals)>,
    /// Page faults of one step, if the system counts them.
    pub faults: Option<PageFaults>,
}

/// Cost of an operation. In a [`Profile`], the share of one step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Time in the operation itself, without inner operations.
    pub time: Duration,
    /// How often it was called.
    pub calls: u64,
    /// Floating-point operations that it declared; 0 if it declared none.
    pub flops: u64,
    /// Its allocations, on any thread.
    pub allocations: Allocations,
}

/// The name of the row for work outside all operations.
const OUTSIDE: &str = "outside of operations";

impl Profiler {
    /// A profiler of steps that multiply in `activations` on a device. Measures a processor's peak, which takes a moment.
    pub fn new(activations: DType, device: &Device) -> Outcome<Self> {
        let spans =
            Arc::new(Spans { sums: Mutex::default(), card: Some(device.clone()).filter(|card| !card.is_cpu()) });
        let dispatch = Dispatch::new(Arc::clone(&spans));
        let of_processor = || t5_ops::peak_gflops(activations).map_err(|error| Failure::internal(error.to_string()));
        let peak_gflops = device.is_cpu().then(of_processor).transpose()?;
        let (probe, faults) = (SystemProbe::new(), Some(PageFaults::default()));
        Ok(Self { spans, dispatch, probe, peak_gflops, steps: 0, whole: Totals::default(), faults })
    }

    /// Profiles a step.
    pub fn watch<T>(&mut self, step: impl FnOnce() -> T) -> T {
        heap::count_allocations(true);
        let faults = self.probe.page_faults();
        let (result, time, allocations) = tracing::dispatcher::with_default(&self.dispatch, || {
            // `tracing` remembers whether a span has a listener from its first use, when there usually was none.
            tracing::callsite::rebuild_interest_cache();
            self.spans.wait_for_card();
            let (before, began) = (heap::allocations(), Instant::now());
            let result = step();
            self.spans.wait_for_card();
            (result, began.elapsed(), less(heap::allocations(), before))
        });
        self.whole.calls += 1;
        self.whole.add(time, allocations);
        heap::count_allocations(false);
        let now = self.probe.page_faults();
        self.faults = self.faults.zip(now.zip(faults)).map(|(sum, (now, before))| sum + (now - before));
        self.steps += 1;
        result
    }

    /// The profile of an average step.
    pub fn finish(self) -> Profile {
        let mut outside = Totals { calls: 0, ..self.whole };
        let mut operations = self.spans.lock().operations.clone();
        for (_, operation) in &operations {
            outside.time = outside.time.saturating_sub(operation.time);
            outside.allocations = less(outside.allocations, operation.allocations);
        }
        operations.push((OUTSIDE, outside));
        operations.sort_by_key(|(_, operation)| std::cmp::Reverse(operation.time));
        let steps = self.steps.max(1);
        let mut step = self.whole;
        step.flops = operations.iter().map(|(_, operation)| operation.flops).sum();
        Profile {
            peak_gflops: self.peak_gflops,
            steps,
            step: step.of_one(steps),
            operations: operations.into_iter().map(|(name, operation)| (name, operation.of_one(steps))).collect(),
            faults: self.faults.map(|faults| faults / u64::from(steps)),
        }
    }
}

impl Totals {
    fn add(&mut self, time: Duration, allocations: Allocations) {
        self.time += time;
        self.allocations.calls += allocations.calls;
        self.allocations.bytes += allocations.bytes;
    }

    /// The average of `steps` steps.
    fn of_one(self, steps: u32) -> Self {
        let share = |sum: u64| sum / u64::from(steps);
        Self {
            time: self.time / steps,
            calls: share(self.calls),
            flops: share(self.flops),
            allocations: Allocations { calls: share(self.allocations.calls), bytes: share(self.allocations.bytes) },
        }
    }

    fn milliseconds(&self) -> f64 {
        self.time.as_secs_f64() * 1e3
    }

    /// 10^9 floating-point operations a second.
    #[expect(clippy::cast_precision_loss, reason = "a rate for reading")]
    fn gflops(&self) -> Option<f64> {
        (self.flops > 0).then(|| self.flops as f64 / 1e9 / self.time.as_secs_f64().max(1e-9))
    }
}

impl Profile {
    /// The profile in `bench --json`.
    pub fn to_json(&self) -> Value {
        let row = |totals: &Totals| {
            let rate = totals.gflops();
            json!({
                "ms": totals.milliseconds(), "share": self.share(totals), "calls": totals.calls, "flops": totals.flops,
                "gflops_per_second": rate, "share_of_peak": self.share_of_peak(totals),
                "allocated_bytes": totals.allocations.bytes, "allocations": totals.allocations.calls,
            })
        };
        let operations = self.operations.iter().map(|(name, totals)| {
            let mut row = row(totals);
            row["name"] = json!(name);
            row
        });
        json!({
            "peak_gflops_per_second": self.peak_gflops, "steps": self.steps, "step": row(&self.step),
            "operations": operations.collect::<Vec<_>>(),
            "minor_page_faults": self.faults.map(|faults| faults.minor),
            "major_page_faults": self.faults.map(|faults| faults.major),
        })
    }

    /// The profile as a table of text.
    pub fn to_text(&self) -> String {
        let peak = self.peak_gflops.map_or("the GPU is waited for after each operation".to_owned(), |peak| {
            format!("peak rate of this machine: {peak:.0} GFLOP/s")
        });
        let mut text = format!(
            "\naverage of {} steps; {peak}\n{:<34}{:>9}{:>8}{:>8}{:>10}{:>9}{:>12}\n",
            self.steps, "operation", "ms", "share", "calls", "GFLOP/s", "of peak", "allocated"
        );
        for (name, totals) in self.operations.iter().chain([&("step", self.step)]) {
            let rate = totals.gflops().map_or(String::new(), |rate| format!("{rate:.1}"));
            let of_peak = self.share_of_peak(totals).map_or(String::new(), |share| format!("{:.0} %", 100.0 * share));
            let _ = writeln!(
                text,
                "{name:<34}{:>9.2}{:>7.1}%{:>8}{rate:>10}{of_peak:>9}{:>12}",
                totals.milliseconds(),
                100.0 * self.share(totals),
                totals.calls,
                Bytes(totals.allocations.bytes).to_string()
            );
        }
        let _ = write!(text, "allocations {}", self.step.allocations.calls);
        if let Some(faults) = self.faults {
            let _ = write!(text, "; page faults {} minor, {} major", faults.minor, faults.major);
        }
        text.push('\n');
        text
    }

    fn share_of_peak(&self, totals: &Totals) -> Option<f64> {
        Some(totals.gflops()? / self.peak_gflops?)
    }

    /// The share of the step's time.
    fn share(&self, totals: &Totals) -> f64 {
        totals.time.as_secs_f64() / self.step.time.as_secs_f64().max(1e-9)
    }
}

fn less(all: Allocations, part: Allocations) -> Allocations {
    Allocations { calls: all.calls.saturating_sub(part.calls), bytes: all.bytes.saturating_sub(part.bytes) }
}

/// Adds up spans by name.
struct Spans {
    sums: Mutex<Sums>,
    /// The card that they compute on.
    card: Option<Device>,
}

#[derive(Default)]
struct Sums {
    /// By name, in the order of their first use.
    operations: Vec<(&'static str, Totals)>,
    /// The entered spans. The innermost is last.
    entered: Vec<Entered>,
}

struct Entered {
    operation: usize,
    began: Instant,
    allocated: Allocations,
    /// Time of the spans inside this one.
    inside: Totals,
}

impl Spans {
    fn lock(&self) -> MutexGuard<'_, Sums> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all launched work is done. The next operation reports a failure of the card.
    fn wait_for_card(&self) {
        if let Some(card) = &self.card {
            let _ = card.synchronize();
        }
    }
}

impl Subscriber for Spans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() || warnings::is_one(metadata)
    }

    /// Spans with the same name are one operation, so its index is their id.
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut sums = self.lock();
        let name = span.metadata().name();
        let place = sums.operations.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
            sums.operations.push((name, Totals::default()));
            sums.operations.len() - 1
        });
        let totals = &mut sums.operations[place].1;
        totals.calls += 1;
        span.record(&mut Flops(&mut totals.flops));
        Id::from_u64(place as u64 + 1)
    }

    fn enter(&self, span: &Id) {
        let operation = usize::try_from(span.into_u64() - 1).expect("the place of an operation");
        self.wait_for_card();
        let (began, allocated) = (Instant::now(), heap::allocations());
        self.lock().entered.push(Entered { operation, began, allocated, inside: Totals::default() });
    }

    fn exit(&self, _: &Id) {
        self.wait_for_card();
        let mut sums = self.lock();
        let Some(left) = sums.entered.pop() else { return };
        let (time, allocated) = (left.began.elapsed(), less(heap::allocations(), left.allocated));
        let own_time = time.saturating_sub(left.inside.time);
        sums.operations[left.operation].1.add(own_time, less(allocated, left.inside.allocations));
        if let Some(around) = sums.entered.last_mut() {
            around.inside.add(time, allocated);
        }
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        warnings::show(event);
    }
}

/// Adds up the fields called `flops`.
struct Flops<'a>(&'a mut u64);

impl Visit for Flops<'_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "flops" {
            *self.0 += value;
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn profile(step: impl Fn()) -> Profile {
        let mut profiler = Profiler::new(DType::F32, &Device::Cpu).expect("a peak");
        // This step is not profiled, like a step that a measurement leaves out.
        step();
        profiler.watch(&step);
        profiler.watch(&step);
        profiler.finish()
    }

    fn operation(profile: &Profile, name: &str) -> Totals {
        profile.operations.iter().find(|(known, _)| *known == name).expect("an operation").1
    }

    #[test]
    fn calls_and_arithmetic_are_those_of_one_step() {
        let seen = profile(|| {
            for rows in [3usize, 4] {
                let _span = tracing::debug_span!("product", flops = 2 * rows, rows = rows).entered();
            }
            let _span = tracing::debug_span!("copy").entered();
        });
        assert_eq!((seen.steps, seen.step.calls, seen.step.flops), (2, 1, 14));
        assert_eq!((operation(&seen, "product").calls, operation(&seen, "product").flops), (2, 14));
        assert_eq!(operation(&seen, "copy").gflops(), None);
    }

    #[test]
    fn what_is_inside_another_operation_is_counted_once() {
        let inside = Cell::new(Duration::MAX);
        let seen = profile(|| {
            let _outer = tracing::debug_span!("outer").entered();
            let _inner = tracing::debug_span!("inner").entered();
            let start = Instant::now();
            std::hint::black_box((0..200_000u64).fold(1, |a, b| std::hint::black_box(a ^ b)));
            inside.set(inside.get().min(start.elapsed()));
        });
        // The mean of steps is not less than the shortest step.
        assert!(operation(&seen, "inner").time >= inside.get(), "{seen:?}");
        let parts: Duration = seen.operations.iter().map(|(_, totals)| totals.time).sum();
        assert!(parts <= seen.step.time && seen.step.time - parts < Duration::from_micros(1), "{seen:?}");
        assert!(seen.operations.is_sorted_by_key(|(_, totals)| std::cmp::Reverse(totals.time)), "{seen:?}");
    }

    #[test]
    fn the_table_names_every_operation_and_the_rest() {
        let seen = profile(|| drop(tracing::debug_span!("product", flops = 1_000_000u64).entered()));
        for word in ["product", OUTSIDE, "GFLOP/s", "of peak", "allocations"] {
            assert!(seen.to_text().contains(word), "{word} is not in\n{}", seen.to_text());
        }
    }
}
