//! [`Mixture`]: the task of the sample at each position, and its row. A pure function of seed, epoch and the tasks, without a table.
//!
//! The rows of the tasks follow each other in one dataset. In an epoch each task gives a fixed number of samples, as evenly spread as whole
//! numbers allow: sample `i` of the `n` samples of a task is due at `(2 i + 1) / 2 n` of the epoch, and samples come as they are due. Within a
//! task the rows have an [`Order`] of their own, which goes on from epoch to epoch: a task that gives half of its rows an epoch has given
//! all of them after two, each once.
//!
//! Invariants:
//! - the row at a position is computed in time that depends on the number of tasks alone, in exact whole numbers;
//! - every epoch has exactly [`MixedTask::samples`] samples of each task;
//! - the windows of all tasks together have no more rows than the one of an unmixed order.

use std::ops::Range;
use std::sync::Arc;

use crate::Error;
use crate::order::{EpochOrder, Order, OrderOptions};

/// A task of a mixture.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct MixedTask {
    /// Its name.
    pub name: String,
    /// Its rows in the dataset, behind those of the tasks before it.
    pub rows: u64,
    /// Its samples in an epoch.
    pub samples: u64,
    /// Put before each of its sources.
    pub source_prefix: String,
}

/// Tasks whose samples are mixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mixture {
    tasks: Vec<MixedTask>,
    /// The end of each task's rows in the dataset.
    ends: Vec<u64>,
    samples: u64,
}

/// How many samples tasks give, beside each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mixing {
    /// As many as they have rows.
    Proportional,
    /// All the same.
    Equal,
    /// Their rows to the power of one over this temperature.
    Temperature(f64),
}

/// The samples of each task in an epoch: rates as seqio defines them, `min(rows, limit)^(1 / temperature)` times a weight, scaled to the sum of
/// the tasks' rows up to the limit. `None`: all rates are 0.
pub fn samples_of(rows: &[u64], mixing: Mixing, limit: Option<u64>, weights: &[f64]) -> Option<Vec<u64>> {
    let limited: Vec<u64> = rows.iter().map(|rows| limit.map_or(*rows, |limit| limit.min(*rows))).collect();
    if mixing == Mixing::Proportional && weights.iter().all(|weight| *weight == 1.0) {
        return Some(limited);
    }
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let rate = |(rows, weight): (&u64, &f64)| match mixing {
        Mixing::Proportional => weight * *rows as f64,
        Mixing::Equal => *weight,
        Mixing::Temperature(temperature) => weight * (*rows as f64).powf(1.0 / temperature),
    };
    let rates: Vec<f64> = limited.iter().zip(weights).map(rate).collect();
    let (sum, total): (f64, u64) = (rates.iter().sum(), limited.iter().sum());
    if !(sum > 0.0 && sum.is_finite()) {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "a number of samples")]
    let exact: Vec<f64> = rates.iter().map(|rate| rate / sum * total as f64).collect();
    #[expect(clippy::cast_sign_loss, reason = "rates are not negative")]
    let mut samples: Vec<u64> = exact.iter().map(|exact| exact.floor() as u64).collect();
    // The samples that rounding left out go to the tasks that lost most.
    let mut by_loss: Vec<usize> = (0..rows.len()).filter(|task| rates[*task] > 0.0).collect();
    by_loss.sort_by(|one, other| exact[*other].fract().total_cmp(&exact[*one].fract()).then(one.cmp(other)));
    let missing = total.saturating_sub(samples.iter().sum()) as usize;
    by_loss.iter().cycle().take(missing).for_each(|task| samples[*task] += 1);
    Some(samples)
}

impl Mixture {
    /// The mixture of these tasks.
    ///
    /// # Errors
    /// [`Error::Options`] for a task with samples and no rows, for a mixture without samples, and for numbers above 2^61.
    pub fn new(tasks: Vec<MixedTask>) -> Result<Self, Error> {
        if let Some(task) = tasks.iter().find(|task| task.rows == 0 && task.samples > 0) {
            return Err(Error::Options(format!("task `{}` has no rows", task.name)));
        }
        let sum = |of: fn(&MixedTask) -> u64| tasks.iter().map(|task| u128::from(of(task))).sum::<u128>();
        let (rows, samples) = (sum(|task| task.rows), sum(|task| task.samples));
        if samples == 0 || rows.max(samples) > 1 << 61 {
            return Err(Error::Options(format!("a mixture of {samples} samples an epoch: expected 1 to 2^61")));
        }
        let mut end = 0;
        let ends = tasks.iter().map(|task| {
            end += task.rows;
            end
        });
        Ok(Self { ends: ends.collect(), samples: samples as u64, tasks })
    }

    /// The tasks.
    pub fn tasks(&self) -> &[MixedTask] {
        &self.tasks
    }

    /// Samples of an epoch.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The task of a row of the dataset.
    pub fn task_of(&self, row: u64) -> usize {
        self.ends.partition_point(|end| *end <= row).min(self.tasks.len() - 1)
    }

    /// The rows of a task in the dataset.
    pub fn rows_of(&self, task: usize) -> Range<u64> {
        self.ends[task] - self.tasks[task].rows..self.ends[task]
    }

    /// Samples of each task before a position of an epoch.
    fn before(&self, position: u64) -> Vec<u64> {
        // Sample i is due at time t / 2^62 where i is at most n t / 2^62 - 1/2.
        let due = |task: &MixedTask, time: u64| {
            ((u128::from(task.samples) * u128::from(time) + (1 << (TIME_BITS - 1))) >> TIME_BITS) as u64
        };
        let all_due = |time: u64| self.tasks.iter().map(|task| u128::from(due(task, time))).sum::<u128>();
        let (mut low, mut high) = (0, 1_u64 << TIME_BITS);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if all_due(middle) <= u128::from(position) { low = middle } else { high = middle }
        }
        let mut done: Vec<u64> = self.tasks.iter().map(|task| due(task, low)).collect();
        // Fewer than one sample of each task is due within one unit of time.
        for _ in done.iter().sum::<u64>()..position {
            let next = self.next(&done);
            done[next] += 1;
        }
        done
    }

    /// The task whose next sample is due first; of several the first one.
    fn next(&self, done: &[u64]) -> usize {
        let left = (0..self.tasks.len()).filter(|task| done[*task] < self.tasks[*task].samples);
        let due = |task: usize| (u128::from(2 * done[task] + 1), u128::from(self.tasks[task].samples));
        left.reduce(|one, other| {
            let ((of_one, one_in), (of_other, other_in)) = (due(one), due(other));
            if of_other * one_in < of_one * other_in { other } else { one }
        })
        .expect("a position within the epoch")
    }
}

/// Units of time in an epoch, as a power of two.
const TIME_BITS: u32 = 62;

/// The rows at the positions of an epoch: those of one order, or of the orders of several tasks.
pub(crate) enum Sequence {
    One(Order),
    Mixed(Arc<Mixture>, Vec<Order>),
}

impl Sequence {
    /// The sequence of a dataset's rows.
    ///
    /// # Errors
    /// As [`Order::new`]; [`Error::Options`] for a mixture of other rows.
    pub fn new(rows: u64, options: OrderOptions, mixture: Option<&Arc<Mixture>>) -> Result<Self, Error> {
        let Some(mixture) = mixture else { return Ok(Self::One(Order::new(rows, options)?)) };
        let of_tasks: u64 = mixture.tasks.iter().map(|task| task.rows).sum();
        if of_tasks != rows {
            return Err(Error::Options(format!("the tasks have {of_tasks} rows, and the dataset {rows}")));
        }
        let count = mixture.tasks.len() as u64;
        let (blocks, block_rows) = match options.window_blocks / count {
            0 => (1, (options.block_rows.saturating_mul(options.window_blocks) / count).max(1)),
            blocks => (blocks, options.block_rows),
        };
        let orders = mixture.tasks.iter().zip(0_u64..).map(|(task, number)| {
            let seed = options.seed.wrapping_add(number.wrapping_mul(SEEDS));
            Order::new(task.rows, OrderOptions { seed, window_blocks: blocks, block_rows, ..options })
        });
        Ok(Self::Mixed(Arc::clone(mixture), orders.collect::<Result<_, _>>()?))
    }

    /// Samples of an epoch.
    pub fn samples(&self) -> u64 {
        match self {
            Self::One(order) => order.rows(),
            Self::Mixed(mixture, _) => mixture.samples,
        }
    }

    /// The rows at `positions` of an epoch, in order.
    pub fn rows_at(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        let (mixture, orders) = match self {
            Self::One(order) => return order.epoch(epoch).rows_at(positions),
            Self::Mixed(mixture, orders) => (mixture, orders),
        };
        let mut done = mixture.before(positions.start);
        let mut passes: Vec<Option<(u64, EpochOrder)>> = vec![None; orders.len()];
        let rows = positions.map(|_| {
            let number = mixture.next(&done);
            let task = &mixture.tasks[number];
            let index = u128::from(epoch) * u128::from(task.samples) + u128::from(done[number]);
            let (pass, at) = ((index / u128::from(task.rows)) as u64, (index % u128::from(task.rows)) as u64);
            done[number] += 1;
            let known = passes[number].take().filter(|(known, _)| *known == pass);
            let (_, order) = passes[number].insert(known.unwrap_or_else(|| (pass, orders[number].epoch(pass))));
            mixture.rows_of(number).start + order.row(at)
        });
        rows.collect()
    }
}

/// Sets the seeds of the tasks apart.
const SEEDS: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mixture(tasks: &[(u64, u64)]) -> Arc<Mixture> {
        let task = |(number, (rows, samples)): (usize, &(u64, u64))| MixedTask {
            name: number.to_string(),
            rows: *rows,
            samples: *samples,
            source_prefix: String::new(),
        };
        Arc::new(Mixture::new(tasks.iter().enumerate().map(task).collect()).unwrap())
    }

    fn sequence(tasks: &[(u64, u64)], seed: u64) -> Sequence {
        let options = OrderOptions { seed, block_rows: 4, window_blocks: 4, shuffle: true };
        Sequence::new(tasks.iter().map(|(rows, _)| rows).sum(), options, Some(&mixture(tasks))).unwrap()
    }

    #[test]
    fn the_samples_of_tasks_follow_rates_limits_and_weights_and_add_up() {
        let check = |rows: &[u64], mixing, limit, weights: &[f64], expected: &[u64]| {
            assert_eq!(samples_of(rows, mixing, limit, weights).as_deref(), Some(expected));
        };
        check(&[1000, 10, 300], Mixing::Proportional, None, &[1.0; 3], &[1000, 10, 300]);
        check(&[1000, 10, 300], Mixing::Proportional, Some(200), &[1.0; 3], &[200, 10, 200]);
        check(&[1000, 10, 300], Mixing::Equal, Some(200), &[1.0; 3], &[137, 137, 136]);
        // Roots of 100 and 900 are 10 and 30.
        check(&[100, 900], Mixing::Temperature(2.0), None, &[1.0; 2], &[250, 750]);
        check(&[100, 100], Mixing::Proportional, None, &[3.0, 1.0], &[150, 50]);
        check(&[100, 100], Mixing::Equal, None, &[0.0, 1.0], &[0, 200]);
        assert_eq!(samples_of(&[100, 100], Mixing::Equal, None, &[0.0, 0.0]), None);
    }

    #[test]
    fn every_piece_of_an_epoch_has_its_share_of_each_task() {
        let tasks = [(500, 500), (50, 50), (450, 450)];
        let (sequence, mixed) = (sequence(&tasks, 3), mixture(&tasks));
        for start in (0..1000).step_by(100) {
            let rows = sequence.rows_at(0, start..start + 100);
            let count = |task| rows.iter().filter(|row| mixed.task_of(**row) == task).count();
            assert!((count(0), count(1), count(2)) == (50, 5, 45), "{start}: {} {} {}", count(0), count(1), count(2));
        }
    }

    #[test]
    fn a_task_that_gives_a_part_of_its_rows_goes_on_in_the_next_epoch() {
        let sequence = sequence(&[(10, 5), (3, 6)], 1);
        let of = |epochs: Range<u64>| {
            let mut rows: Vec<u64> = epochs.flat_map(|epoch| sequence.rows_at(epoch, 0..11)).collect();
            rows.sort_unstable();
            rows
        };
        let twice_of_second = [10, 10, 11, 11, 12, 12];
        assert_eq!(of(0..1)[5..], twice_of_second);
        let both: Vec<u64> = of(0..2);
        assert_eq!(both[..10], (0..10).collect::<Vec<u64>>());
    }

    #[test]
    fn fifty_tasks_of_a_million_rows_need_no_table() {
        let tasks = [(1_000_000, 1_000_000); 50];
        let sequence = sequence(&tasks, 9);
        let rows = sequence.rows_at(7, 49_999_990..50_000_000);
        assert_eq!(rows.len(), 10);
        assert!(rows.iter().all(|row| *row < 50_000_000));
    }

    #[test]
    fn tasks_without_rows_or_samples_are_refused() {
        let task = |rows, samples| MixedTask { name: "de".into(), rows, samples, source_prefix: String::new() };
        assert!(Mixture::new(vec![task(0, 1)]).unwrap_err().to_string().contains("`de` has no rows"));
        assert!(Mixture::new(vec![task(3, 0)]).is_err());
        assert!(Mixture::new(Vec::new()).is_err());
    }

    proptest! {
        #[test]
        fn an_epoch_has_the_samples_of_each_task_and_any_piece_is_that_piece_of_the_whole(
            tasks in prop::collection::vec((1_u64..60, 0_u64..90), 1..6), seed: u64, epoch in 0_u64..5, a: u64, b: u64,
        ) {
            prop_assume!(tasks.iter().any(|(_, samples)| *samples > 0));
            let (sequence, mixed) = (sequence(&tasks, seed), mixture(&tasks));
            let whole = sequence.rows_at(epoch, 0..mixed.samples());
            for (number, (_, samples)) in tasks.iter().enumerate() {
                let count = whole.iter().filter(|row| mixed.task_of(**row) == number).count() as u64;
                prop_assert_eq!(count, *samples);
            }
            let (a, b) = (a % (mixed.samples() + 1), b % (mixed.samples() + 1));
            let piece = a.min(b)..a.max(b);
            prop_assert_eq!(&sequence.rows_at(epoch, piece.clone())[..], &whole[piece.start as usize..piece.end as usize]);
        }
    }
}
