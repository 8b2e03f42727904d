//! A curve in bounded memory: buckets of equal width, each with the least, the largest and the mean of its values.
//!
//! When a value is beyond the last bucket, neighbouring buckets are joined and the width doubles. The least, largest,
//! sum and count of a bucket stay exact, so a spike survives any down-sampling.

use crate::figures::median;

/// The most buckets of a series: about the width of a chart in pixels.
pub const MAX_BUCKETS: usize = 512;

/// The values in a range of the x axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    /// The number of values.
    pub count: u64,
    /// The sum of the values.
    pub sum: f64,
    /// The least value.
    pub least: f64,
    /// The largest value.
    pub most: f64,
}

impl Bucket {
    const EMPTY: Bucket = Bucket { count: 0, sum: 0.0, least: f64::INFINITY, most: f64::NEG_INFINITY };

    /// The mean of the values.
    #[expect(clippy::cast_precision_loss, reason = "a count of values")]
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    fn join(&mut self, other: Bucket) {
        self.count += other.count;
        self.sum += other.sum;
        self.least = self.least.min(other.least);
        self.most = self.most.max(other.most);
    }
}

/// A curve.
#[derive(Clone, Debug)]
pub struct Series {
    /// Width of a bucket, in units of the x axis.
    width: u64,
    buckets: Vec<Bucket>,
    last: Option<(u64, f64)>,
    not_finite: u64,
}

impl Series {
    /// Makes an empty series. A bucket is `width` wide at first.
    pub fn new(width: u64) -> Self {
        // Touch the pages of all buckets now, so that a curve's memory is constant from its first value on.
        let mut buckets = vec![Bucket::EMPTY; MAX_BUCKETS];
        buckets.clear();
        Self { width: width.max(1), buckets, last: None, not_finite: 0 }
    }

    /// Adds a value at `x`. A value that is not finite is only counted.
    pub fn note(&mut self, x: u64, value: f64) {
        if !value.is_finite() {
            self.not_finite += 1;
            return;
        }
        while x / self.width >= MAX_BUCKETS as u64 {
            self.double();
        }
        let at = usize::try_from(x / self.width).expect("below the most buckets");
        if self.buckets.len() <= at {
            self.buckets.resize(at + 1, Bucket::EMPTY);
        }
        self.buckets[at].join(Bucket { count: 1, sum: value, least: value, most: value });
        self.last = Some((x, value));
    }

    fn double(&mut self) {
        for at in 0..self.buckets.len().div_ceil(2) {
            let mut joined = self.buckets[2 * at];
            joined.join(self.buckets.get(2 * at + 1).copied().unwrap_or(Bucket::EMPTY));
            self.buckets[at] = joined;
        }
        self.buckets.truncate(self.buckets.len().div_ceil(2));
        self.width *= 2;
    }

    /// The buckets with values, each with the x of its middle.
    #[expect(clippy::cast_precision_loss, reason = "steps and milliseconds, for drawing")]
    pub fn points(&self) -> impl Iterator<Item = (f64, Bucket)> + '_ {
        let (width, half) = (self.width as f64, (self.width - 1) as f64 / 2.0);
        let buckets = self.buckets.iter().enumerate().filter(|(_, bucket)| bucket.count > 0);
        buckets.map(move |(at, bucket)| (at as f64 * width + half, *bucket))
    }

    /// The last value added, and its x.
    pub fn last(&self) -> Option<(u64, f64)> {
        self.last
    }

    /// The least and the largest value.
    pub fn range(&self) -> Option<(f64, f64)> {
        let all = self.points().fold(Bucket::EMPTY, |mut all, (_, bucket)| {
            all.join(bucket);
            all
        });
        (all.count > 0).then_some((all.least, all.most))
    }

    /// The median of the buckets' means, which no outlier moves.
    pub fn median(&self) -> Option<f64> {
        median(self.points().map(|(_, bucket)| bucket.mean()))
    }

    /// The number of values that were not finite.
    pub fn not_finite(&self) -> u64 {
        self.not_finite
    }

    /// Whether a bucket holds more than one value, so that its least and largest differ from its mean.
    pub fn is_joined(&self) -> bool {
        self.buckets.iter().any(|bucket| bucket.count > 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_spike_in_a_million_values_survives_and_buckets_stay_few() {
        let mut series = Series::new(1);
        for x in 0..1_000_000 {
            series.note(x, if x == 777_777 { 1e9 } else { 1.0 });
        }
        assert!(series.points().count() <= MAX_BUCKETS);
        assert_eq!(series.range(), Some((1.0, 1e9)));
        let (x, _) = series.points().find(|(_, bucket)| bucket.most > 2.0).expect("the spike");
        assert!((x - 777_777.0).abs() < 2048.0, "{x}");
        assert_eq!(series.last(), Some((999_999, 1.0)));
    }

    #[test]
    fn values_that_are_not_finite_are_counted_and_not_drawn() {
        let mut series = Series::new(1);
        [f64::NAN, 2.0, f64::INFINITY].into_iter().enumerate().for_each(|(x, value)| series.note(x as u64, value));
        assert_eq!((series.not_finite(), series.points().count(), series.range()), (2, 1, Some((2.0, 2.0))));
    }

    proptest! {
        #[test]
        fn joined_buckets_hold_exactly_the_values_of_their_stretch(values in proptest::collection::vec(-1e6..1e6f64, 1..3000)) {
            let mut series = Series::new(1);
            for (x, value) in values.iter().enumerate() {
                series.note(x as u64, *value);
            }
            prop_assert_eq!(series.points().map(|(_, bucket)| bucket.count).sum::<u64>(), values.len() as u64);
            let width = series.width as usize;
            for (chunk, (_, bucket)) in values.chunks(width).zip(series.points()) {
                prop_assert_eq!(bucket.least, chunk.iter().copied().fold(f64::INFINITY, f64::min));
                prop_assert_eq!(bucket.most, chunk.iter().copied().fold(f64::NEG_INFINITY, f64::max));
                prop_assert_eq!(bucket.count, chunk.len() as u64);
            }
        }
    }
}
