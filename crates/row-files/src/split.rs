//! [`Split`]: chooses the rows for validation, as a function of seed, rows and share alone.
//!
//! Each row has a random number; the numbers of a seed are all different. The rows with the smallest numbers are for
//! validation, exactly as many as requested. Finding the border needs no memory per row: the search first finds one of
//! 65,536 classes of numbers, then the border within that class.

/// The number of rows for validation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Share {
    /// This fraction of the rows, between 0 and 1; at least one row.
    Of(f64),
    /// This number of rows.
    Rows(u64),
}

impl Share {
    /// The number of rows for validation out of `rows`. Always less than all of them.
    #[expect(clippy::cast_precision_loss, clippy::cast_sign_loss, reason = "a share of rows, which are below 2^53")]
    pub fn rows(self, rows: u64) -> u64 {
        let wanted = match self {
            Self::Of(share) => ((rows as f64 * share).round() as u64).max(1),
            Self::Rows(wanted) => wanted,
        };
        wanted.min(rows.saturating_sub(1))
    }
}

/// The border between validation and training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    seed: u64,
    /// Rows whose numbers are at most this are for validation; `None`: no rows are.
    below: Option<u64>,
}

impl Split {
    /// Splits `rows` rows so that `wanted` of them are for validation.
    pub fn new(seed: u64, rows: u64, wanted: u64) -> Self {
        if wanted == 0 || rows == 0 {
            return Self { seed, below: None };
        }
        let mut classes = vec![0_u64; 1 << 16];
        (0..rows).for_each(|row| classes[(number(seed, row) >> 48) as usize] += 1);
        let (mut before, mut class) = (0, 0);
        while before + classes[class] < wanted {
            before += classes[class];
            class += 1;
        }
        let mut numbers: Vec<u64> =
            (0..rows).map(|row| number(seed, row)).filter(|number| (number >> 48) as usize == class).collect();
        numbers.sort_unstable();
        Self { seed, below: Some(numbers[(wanted - before - 1) as usize]) }
    }

    /// Whether a row is for validation.
    pub fn is_validation(&self, row: u64) -> bool {
        self.below.is_some_and(|below| number(self.seed, row) <= below)
    }
}

/// A row's number: SplitMix64 of the row. All rows of a seed have different numbers.
fn number(seed: u64, row: u64) -> u64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    mix(mix(seed ^ 0x5a17_0000_da7a).wrapping_add(row.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_has_exactly_the_rows_that_were_asked_for_and_is_the_same_for_a_seed() {
        for (rows, wanted) in [(1, 0), (10, 1), (10, 9), (1000, 100), (200_000, 7)] {
            let chosen = |seed| -> Vec<u64> {
                let split = Split::new(seed, rows, wanted);
                (0..rows).filter(|row| split.is_validation(*row)).collect()
            };
            assert_eq!(chosen(1).len() as u64, wanted, "{rows} rows");
            assert_eq!(chosen(1), chosen(1));
            assert!(wanted != 100 || chosen(1) != chosen(2), "another seed, other rows");
        }
    }

    #[test]
    fn a_share_is_at_least_one_row_and_never_all() {
        for (share, rows, expected) in [
            (Share::Of(0.05), 1000, 50),
            (Share::Of(0.01), 10, 1),
            (Share::Of(0.99), 10, 9),
            (Share::Of(0.5), 1, 0),
            (Share::Rows(500), 2000, 500),
            (Share::Rows(500), 100, 99),
        ] {
            assert_eq!(share.rows(rows), expected, "{share:?} of {rows}");
        }
    }
}
