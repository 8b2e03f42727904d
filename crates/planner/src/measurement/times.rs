//! The time of a piece of work: the shortest of several times, less the time in which threads waited for a processor.

use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use t5_ops::evict_from_caches;

/// On a busy machine, timing takes at most three times its limit.
const WAITS_AT_MOST: u32 = 3;
/// A piece of work is timed at most twelve times.
const MAX_TIMES: usize = 12;
/// Work that is launched on a card before the host waits: its time, and the most calls.
const TOGETHER: Duration = Duration::from_millis(2);
const MAX_TOGETHER: usize = 32;

/// The shortest time of `work` on a device, in seconds. As in a step, the work is launched several times before the host waits, so that
/// launches and waiting overlap with computation. The first time does not count if there is time for another: it includes loading kernels.
pub(super) fn shortest_on(
    device: &Device,
    limit: Duration,
    mut work: impl FnMut() -> candle_core::Result<()>,
) -> candle_core::Result<f64> {
    let mut each_of = |count: usize| {
        let start = Instant::now();
        (0..count).try_for_each(|_| work())?;
        device.synchronize()?;
        candle_core::Result::Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    let began = Instant::now();
    each_of(1)?;
    let once = each_of(1)?;
    let count = ((TOGETHER.as_secs_f64() / once.max(1e-9)) as usize).clamp(1, MAX_TOGETHER);
    let mut least = once;
    for _ in 0..MAX_TIMES {
        if began.elapsed() >= limit {
            break;
        }
        least = least.min(each_of(count)?);
    }
    Ok(least)
}

/// The rounds in which launches are timed without waiting: an odd number, so that there is a median.
const ROUNDS: usize = 9;

/// The host's time to launch `work` once, in seconds: the median of some rounds of `count` launches. Between rounds the host waits for the
/// card; that wait is not timed.
pub(super) fn enqueued(
    device: &Device,
    count: usize,
    mut work: impl FnMut() -> candle_core::Result<()>,
) -> candle_core::Result<f64> {
    let mut round = || {
        device.synchronize()?;
        let start = Instant::now();
        (0..count).try_for_each(|_| work())?;
        candle_core::Result::Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    // The first round loads the kernel and fills the pool.
    round()?;
    let mut rounds = (0..ROUNDS).map(|_| round()).collect::<candle_core::Result<Vec<f64>>>()?;
    device.synchronize()?;
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}

/// The shortest of several times of `work`, in seconds, by [`undisturbed`]. The first time does not count if there is time for another: it
/// includes allocation, and may be ten times as long.
pub(super) fn shortest(limit: Duration, work: impl FnMut() -> candle_core::Result<()>) -> candle_core::Result<f64> {
    shortest_without(&[], limit, work)
}

/// The shortest of several times of `work`, if none of these tensors is in a cache when it begins.
pub(super) fn shortest_without(
    cold: &[&Tensor],
    limit: Duration,
    mut work: impl FnMut() -> candle_core::Result<()>,
) -> candle_core::Result<f64> {
    let mut once = || {
        cold.iter().try_for_each(|tensor| evict_from_caches(tensor))?;
        std::thread::yield_now();
        let (before, start) = (Scheduled::now(), Instant::now());
        work()?;
        let (seconds, waited) = (start.elapsed().as_secs_f64(), Scheduled::now());
        // The kernel updates a thread's running time when the thread yields its processor. The thread may then wait long for a processor.
        std::thread::yield_now();
        let after = waited.zip(Scheduled::now()).map(|(waited, now)| Scheduled { running: now.running, ..waited });
        let running = before.zip(after).map_or(1.0, |(before, after)| after.share_of_running(&before));
        candle_core::Result::Ok(Sample { seconds, running })
    };
    let began = Instant::now();
    shortest_of(limit, &|| began.elapsed(), &mut once)
}

/// The shortest of the times that `once` measures, by [`undisturbed`]. `elapsed` returns the total time so far.
fn shortest_of(
    limit: Duration,
    elapsed: &dyn Fn() -> Duration,
    once: &mut dyn FnMut() -> candle_core::Result<Sample>,
) -> candle_core::Result<f64> {
    let first = once()?;
    let (mut samples, mut sum) = (Vec::new(), 0.0);
    while samples.len() < MAX_TIMES && sum < limit.as_secs_f64() && elapsed() < limit * WAITS_AT_MOST {
        let sample = once()?;
        sum += sample.running_seconds();
        samples.push(sample);
    }
    Ok(undisturbed(if samples.is_empty() { std::slice::from_ref(&first) } else { &samples }))
}

/// A measured time, and the share of it in which runnable threads ran.
#[derive(Clone, Copy, Debug)]
struct Sample {
    seconds: f64,
    running: f64,
}

impl Sample {
    /// The time without that in which threads waited for a processor.
    fn running_seconds(&self) -> f64 {
        self.seconds * self.running
    }
}

/// With at least this share of running, a time is taken as it is.
const UNDISTURBED: f64 = 0.95;

/// The shortest time among those in which hardly any thread waited for a processor. If there is none, the time with the least waiting, less
/// the waiting. Waiting times are too imprecise to take the minimum of such differences.
fn undisturbed(samples: &[Sample]) -> f64 {
    let quiet = samples.iter().filter(|sample| sample.running >= UNDISTURBED).map(|sample| sample.seconds);
    let quietest = || samples.iter().max_by(|a, b| a.running.total_cmp(&b.running)).map(Sample::running_seconds);
    quiet.min_by(f64::total_cmp).or_else(quietest).expect("a time")
}

/// Nanoseconds in which the threads of this process ran, and in which they waited for a processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Scheduled {
    running: u64,
    waiting: u64,
}

impl Scheduled {
    /// Reads the sums up to now, if the system counts them.
    fn now() -> Option<Self> {
        let mut sum = Self { running: 0, waiting: 0 };
        for thread in std::fs::read_dir("/proc/self/task").ok()? {
            // A thread that has ended did none of the work.
            let Ok(text) = std::fs::read_to_string(thread.ok()?.path().join("schedstat")) else { continue };
            let mut numbers = text.split_whitespace().map(str::parse::<u64>);
            sum.running += numbers.next()?.ok()?;
            sum.waiting += numbers.next()?.ok()?;
        }
        Some(sum)
    }

    /// The share of running time in the running and waiting time since `before`.
    fn share_of_running(&self, before: &Self) -> f64 {
        let running = self.running.saturating_sub(before.running) as f64;
        let waiting = self.waiting.saturating_sub(before.waiting) as f64;
        if running > 0.0 { running / (running + waiting) } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_timed_in_rounds_and_the_median_counts() {
        let calls = std::cell::Cell::new(0usize);
        let seconds = enqueued(&Device::Cpu, 4, || {
            calls.set(calls.get() + 1);
            // One round is disturbed.
            if calls.get() == 4 * 3 {
                std::thread::yield_now();
                let start = Instant::now();
                while start.elapsed() < Duration::from_millis(40) {}
            }
            Ok(())
        });
        assert_eq!(calls.get(), 4 * (ROUNDS + 1));
        assert!((0.0..5e-3).contains(&seconds.unwrap()));
    }

    #[test]
    fn time_in_which_threads_waited_for_others_does_not_count() {
        let at = |running, waiting| Scheduled { running, waiting };
        assert_eq!(at(400, 100).share_of_running(&at(100, 100)), 1.0);
        assert_eq!(at(400, 1000).share_of_running(&at(100, 100)), 0.25);
        assert_eq!(at(100, 500).share_of_running(&at(100, 100)), 1.0);
    }

    #[test]
    fn a_time_without_waiting_counts_before_shorter_differences() {
        let sample = |seconds, running| Sample { seconds, running };
        assert_eq!(undisturbed(&[sample(3.0, 0.2), sample(2.0, 1.0), sample(1.5, 0.96), sample(1.6, 0.9)]), 1.5);
        assert_eq!(undisturbed(&[sample(3.0, 0.2), sample(2.0, 0.75)]), 1.5);
    }

    #[test]
    fn a_first_time_longer_than_the_limit_does_not_count() {
        // Seconds of the calls in order; the expected minimum of the times that count, and the number of calls.
        let check = |times: &[f64], expected: (f64, usize)| {
            let calls = std::cell::Cell::new(0);
            let elapsed = || Duration::from_secs_f64(times[..calls.get()].iter().sum());
            let mut once = || {
                let seconds = times[calls.replace(calls.get() + 1)];
                Ok(Sample { seconds, running: 1.0 })
            };
            let seconds = shortest_of(Duration::from_millis(200), &elapsed, &mut once).unwrap();
            assert_eq!((seconds, calls.get()), expected, "{times:?}");
        };
        check(&[0.25, 0.01, 0.25], (0.01, 3));
        check(&[0.001, 0.25], (0.25, 2));
        // There is no time for another call.
        check(&[0.7], (0.7, 1));
        check(&[0.01; MAX_TIMES + 1], (0.01, MAX_TIMES + 1));
        // The same with the real clock.
        let mut calls = 0;
        let seconds = shortest(Duration::from_secs(1), || {
            calls += 1;
            Ok(())
        });
        assert!(seconds.unwrap() < f64::INFINITY && (2..=MAX_TIMES + 1).contains(&calls), "{calls} calls");
    }
}
