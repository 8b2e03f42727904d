//! The number of rows that are evaluated, and the number of them that are answered.

/// The rows of an evaluation: the first rows of a dataset are evaluated, and the first of these are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCounts {
    /// Rows that are evaluated.
    pub evaluated: u64,
    /// Evaluated rows that are also answered.
    pub answered: u64,
}

impl RowCounts {
    /// Any number, all answered.
    pub const ANY: Self = Self { evaluated: u64::MAX, answered: u64::MAX };

    /// Counts for a dataset of `rows` rows, if known: the first `samples` are evaluated, and the first `generate_samples` of them answered.
    /// 0: all.
    pub fn new(samples: u64, generate_samples: u64, rows: Option<u64>) -> Self {
        let wanted = |count: u64| if count == 0 { u64::MAX } else { count };
        let evaluated = wanted(samples).min(rows.unwrap_or(u64::MAX));
        Self { evaluated, answered: wanted(generate_samples).min(evaluated) }
    }

    /// The most rows of a batch of `samples` rows that are evaluated, and answered.
    pub fn in_a_batch(&self, samples: usize) -> [usize; 2] {
        // A batch is smaller if the rows never fill it. Even without rows there is a plan.
        [self.evaluated, self.answered].map(|rows| samples.min(usize::try_from(rows).unwrap_or(usize::MAX)).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_no_more_rows_and_answers_than_there_are() {
        let in_a_batch =
            |samples, generate_samples, rows| RowCounts::new(samples, generate_samples, rows).in_a_batch(16);
        assert_eq!(in_a_batch(256, 64, Some(1000)), [16, 16]);
        assert_eq!(in_a_batch(256, 4, None), [16, 4]);
        assert_eq!(in_a_batch(0, 4, Some(9)), [9, 4]);
        assert_eq!(in_a_batch(3, 4, Some(9)), [3, 3]);
        assert_eq!(in_a_batch(3, 0, None), [3, 3]);
        assert_eq!(in_a_batch(0, 0, None), RowCounts::ANY.in_a_batch(16));
        assert_eq!(in_a_batch(0, 0, Some(0)), [1, 1]);
    }
}
