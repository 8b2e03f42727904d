//! [`Lengths`]: statistics of text lengths, in a few kilobytes for any number of texts.
//!
//! Lengths below 1,024 are counted individually. Longer lengths are counted in classes that are 1/64 of their size wide, so
//! a percentile is within 1.6 %. The sum, the longest length and the number of texts above the limit are exact.

/// Lengths below this have a class of their own.
const EXACT: u64 = 1 << 10;
/// Classes between one power of two and the next.
const CLASSES: u64 = 64;

/// Lengths of texts, in characters or tokens.
#[derive(Clone, Debug)]
pub struct Lengths {
    counts: Vec<u64>,
    /// Texts that were counted.
    pub texts: u64,
    /// Sum of the lengths.
    pub sum: u64,
    /// The longest length.
    pub most: u64,
    /// The longest length that is not cut.
    pub limit: u64,
    /// Texts above the limit.
    pub cut: u64,
}

impl Lengths {
    /// Makes empty statistics; lengths above `limit` are counted as cut.
    pub fn new(limit: u64) -> Self {
        Self { counts: Vec::new(), texts: 0, sum: 0, most: 0, limit, cut: 0 }
    }

    /// Counts a text.
    pub fn add(&mut self, length: u64) {
        let class = class(length);
        if self.counts.len() <= class {
            self.counts.resize(class + 1, 0);
        }
        self.counts[class] += 1;
        self.texts += 1;
        self.sum += length;
        self.most = self.most.max(length);
        self.cut += u64::from(length > self.limit);
    }

    /// The mean length.
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.texts.max(1) as f64
    }

    /// The length that the fraction `share` of the texts does not exceed.
    #[expect(clippy::cast_precision_loss, clippy::cast_sign_loss, reason = "a share of texts")]
    pub fn percentile(&self, share: f64) -> u64 {
        let wanted = ((self.texts as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (class, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return longest_of(class).min(self.most);
            }
        }
        self.most
    }

    /// Texts by length: `bars` ranges of the same width up to the 99th percentile. The last range also has all longer texts.
    /// Each range is its longest length and its count.
    pub fn histogram(&self, bars: u64) -> Vec<(u64, u64)> {
        let width = self.percentile(0.99).div_ceil(bars).max(1);
        let mut histogram: Vec<(u64, u64)> = (1..=bars).map(|bar| (bar * width, 0)).collect();
        for (class, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let bar = longest_of(class).saturating_sub(1) / width;
            histogram[bar.min(bars - 1) as usize].1 += count;
        }
        if let Some(last) = histogram.last_mut() {
            last.0 = last.0.max(self.most);
        }
        histogram
    }
}

fn class(length: u64) -> usize {
    if length < EXACT {
        return length as usize;
    }
    let octave = u64::from(length.ilog2());
    let within = (length >> (octave - 6)) - CLASSES;
    (EXACT + (octave - 10) * CLASSES + within) as usize
}

/// The longest length of a class.
fn longest_of(class: usize) -> u64 {
    let class = class as u64;
    if class < EXACT {
        return class;
    }
    let (octave, within) = (10 + (class - EXACT) / CLASSES, (class - EXACT) % CLASSES);
    ((CLASSES + within + 1) << (octave - 6)) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_to_two_percent_and_cuts_are_exact() {
        let mut lengths = Lengths::new(256);
        (1..=100_000_u64).for_each(|length| lengths.add(length));
        for (share, expected) in [(0.001, 100), (0.5, 50_000), (0.99, 99_000), (1.0, 100_000)] {
            let found = lengths.percentile(share);
            assert!(found.abs_diff(expected) * 50 <= expected, "{share}: {found}, expected {expected}");
        }
        assert_eq!((lengths.texts, lengths.most, lengths.cut), (100_000, 100_000, 99_744));
        assert_eq!(lengths.mean(), 50_000.5);
        assert_eq!(Lengths::new(1).percentile(0.5), 0);
    }

    #[test]
    fn every_length_is_in_the_class_whose_longest_is_not_shorter() {
        for length in (0..5000).chain([1 << 20, (1 << 20) + 1, u64::from(u32::MAX), u64::MAX >> 8]) {
            let class = class(length);
            assert!(longest_of(class) >= length, "{length}");
            assert!(class == 0 || longest_of(class - 1) < length, "{length}");
        }
    }

    #[test]
    fn a_histogram_counts_every_text_once() {
        let mut lengths = Lengths::new(0);
        (0..1000_u64).for_each(|length| lengths.add(length % 100));
        lengths.add(5000);
        let histogram = lengths.histogram(10);
        assert_eq!(histogram.iter().map(|(_, count)| count).sum::<u64>(), 1001);
        assert_eq!(histogram.last().unwrap().0, 5000);
    }
}
