//! How long a piece of work takes: the shortest of several times, less the time in which threads waited for a processor.

use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use t5_ops::evict_from_caches;

/// On a busy machine, timing takes at most three times as long as it may.
const WAITS_AT_MOST: u32 = 3;
/// A piece of work is timed at most twelve times.
const MOST_TIMES: usize = 12;
/// Work that is launched on a card before it is waited for: its time, and the most calls.
const TOGETHER: Duration = Duration::from_millis(2);
const MOST_TOGETHER: usize = 32;

/// The shortest time of `work` on a device, in seconds. As in a step, it is launched several times before it is waited for, so that launches
/// and waiting hide behind what is computed. The first is not counted where there is time for another: it loads kernels.
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
    let count = ((TOGETHER.as_secs_f64() / once.max(1e-9)) as usize).clamp(1, MOST_TOGETHER);
    let mut least = once;
    for _ in 0..MOST_TIMES {
        if began.elapsed() >= limit {
            break;
        }
        least = least.min(each_of(count)?);
    }
    Ok(least)
}

/// The rounds in which launches are timed without waiting; an odd number, so that one of them is in the middle.
const ROUNDS: usize = 9;

/// The host's time to launch `work` once, in seconds: the median of some rounds of `count` launches. What the card does with them is waited
/// for between rounds, which no clock sees.
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
    // The first loads the kernel and fills the pool.
    round()?;
    let mut rounds = (0..ROUNDS).map(|_| round()).collect::<candle_core::Result<Vec<f64>>>()?;
    device.synchronize()?;
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}

/// The shortest of several times that `work` takes, in seconds, by [`undisturbed`]. The first is not counted where there is time for
/// another: it allocates, and may so take ten times as long.
pub(super) fn shortest(limit: Duration, work: impl FnMut() -> candle_core::Result<()>) -> candle_core::Result<f64> {
    shortest_without(&[], limit, work)
}

/// The same where `work` begins with these tensors in no cache.
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
        // A thread's own running time is brought up to date when it gives its processor up, and it may wait long to get it back.
        std::thread::yield_now();
        let after = waited.zip(Scheduled::now()).map(|(waited, now)| Scheduled { running: now.running, ..waited });
        let running = before.zip(after).map_or(1.0, |(before, after)| after.share_of_running(&before));
        candle_core::Result::Ok(Sample { seconds, running })
    };
    let began = Instant::now();
    shortest_of(limit, &|| began.elapsed(), &mut once)
}

/// The shortest of the times that `once` takes, by [`undisturbed`], where `elapsed` says how long all of them took so far.
fn shortest_of(
    limit: Duration,
    elapsed: &dyn Fn() -> Duration,
    once: &mut dyn FnMut() -> candle_core::Result<Sample>,
) -> candle_core::Result<f64> {
    let first = once()?;
    let (mut samples, mut sum) = (Vec::new(), 0.0);
    while samples.len() < MOST_TIMES && sum < limit.as_secs_f64() && elapsed() < limit * WAITS_AT_MOST {
        let sample = once()?;
        sum += sample.running_seconds();
        samples.push(sample);
    }
    Ok(undisturbed(if samples.is_empty() { std::slice::from_ref(&first) } else { &samples }))
}

/// A time, and the share of it in which threads that wanted to run did.
#[derive(Clone, Copy, Debug)]
struct Sample {
    seconds: f64,
    running: f64,
}

impl Sample {
    /// Without the time in which threads waited for a processor.
    fn running_seconds(&self) -> f64 {
        self.seconds * self.running
    }
}

/// A time is taken as it is where threads ran in this share of it.
const UNDISTURBED: f64 = 0.95;

/// The shortest time of those in which hardly a thread waited for a processor. Where there is none, that in which threads waited
/// least, less the waiting. How long they waited is known too roughly to take the least of such differences.
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
    /// Until now, where the system counts it.
    fn now() -> Option<Self> {
        let mut sum = Self { running: 0, waiting: 0 };
        for thread in std::fs::read_dir("/proc/self/task").ok()? {
            // A thread that ended meanwhile did none of the work.
            let Ok(text) = std::fs::read_to_string(thread.ok()?.path().join("schedstat")) else { continue };
            let mut numbers = text.split_whitespace().map(str::parse::<u64>);
            sum.running += numbers.next()?.ok()?;
            sum.waiting += numbers.next()?.ok()?;
        }
        Some(sum)
    }

    /// Of the time since `before` in which threads ran or wanted to, the share in which they ran.
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
        // Seconds that the calls take, one after the other: the least of those that count, and how many were made.
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
        // There is no time for another.
        check(&[0.7], (0.7, 1));
        check(&[0.01; MOST_TIMES + 1], (0.01, MOST_TIMES + 1));
        // The clock itself.
        let mut calls = 0;
        let seconds = shortest(Duration::from_secs(1), || {
            calls += 1;
            Ok(())
        });
        assert!(seconds.unwrap() < f64::INFINITY && (2..=MOST_TIMES + 1).contains(&calls), "{calls} calls");
    }
}
