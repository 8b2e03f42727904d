//! [`Order`]: the row at each position of each epoch. A pure function, in O(1) memory.
//!
//! A whole-file shuffle that reads rows one by one is slow, because reading one row of a parquet file costs a whole
//! page. The order is therefore random on two levels. Neighbouring rows form *blocks*, which are cheap to read; each
//! epoch permutes all blocks of all files. Every `window_blocks` consecutive blocks of that permutation form a
//! *window*, and the rows of a window are permuted within it. A batch mixes rows from `window_blocks` random places; a
//! reader needs the blocks of one window at a time.
//!
//! Invariants:
//! - every epoch is a permutation of all rows of all files, also when the sizes do not divide evenly;
//! - the order depends on (seed, epoch, rows, `block_rows`, `window_blocks`) and on nothing else, never on memory;
//! - no table is built: any position of any epoch is computed in O(1).

use std::ops::Range;

use crate::Error;
use crate::permutation::Permutation;
use crate::random::Key;

/// The options that, with the number of rows, determine the order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OrderOptions {
    /// The run's seed.
    pub seed: u64,
    /// False: file order, every epoch.
    pub shuffle: bool,
    /// Neighbouring rows that stay in one window.
    pub block_rows: u64,
    /// Blocks whose rows are mixed.
    pub window_blocks: u64,
}

impl Default for OrderOptions {
    /// Windows of 65,536 rows out of 16 random places.
    fn default() -> Self {
        Self { seed: 0, shuffle: true, block_rows: 4096, window_blocks: 16 }
    }
}

/// The order of the rows in every epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    rows: u64,
    options: OrderOptions,
}

impl Order {
    /// The order of `rows` rows.
    ///
    /// # Errors
    /// [`Error::Options`] for blocks or windows without rows.
    pub fn new(rows: u64, options: OrderOptions) -> Result<Self, Error> {
        let window_rows = options.block_rows.checked_mul(options.window_blocks);
        if window_rows.is_none_or(|window_rows| window_rows == 0 || window_rows > 1 << 62) {
            return Err(Error::Options(format!(
                "a shuffle window of {} blocks of {} rows: expected at least one row and at most 2^62",
                options.window_blocks, options.block_rows
            )));
        }
        Ok(Self { rows, options })
    }

    /// Rows of an epoch.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The order within one epoch.
    pub fn epoch(&self, epoch: u64) -> EpochOrder {
        if !self.options.shuffle || self.rows == 0 {
            return EpochOrder { rows: self.rows, shuffled: None };
        }
        let OrderOptions { block_rows, window_blocks, .. } = self.options;
        let key = Key::new(self.options.seed).derive(epoch);
        let block_count = self.rows.div_ceil(block_rows);
        let blocks = Permutation::new(block_count, key.derive(BLOCKS));
        let short_slot = blocks.index_of(block_count - 1);
        let missing_rows = block_count * block_rows - self.rows;
        let shuffled = Shuffled { block_rows, window_blocks, blocks, short_slot, missing_rows, key: key.derive(ROWS) };
        EpochOrder { rows: self.rows, shuffled: Some(shuffled) }
    }
}

/// Separate the two uses of an epoch's key.
const BLOCKS: u64 = 0;
const ROWS: u64 = 1;

/// The order within one epoch.
#[derive(Clone, Debug)]
pub struct EpochOrder {
    rows: u64,
    shuffled: Option<Shuffled>,
}

#[derive(Clone, Debug)]
struct Shuffled {
    block_rows: u64,
    window_blocks: u64,
    /// Maps a slot in the epoch to a block of the data.
    blocks: Permutation,
    /// The slot of the data's last block, which may be short.
    short_slot: u64,
    /// Rows that the last block lacks.
    missing_rows: u64,
    key: Key,
}

/// Consecutive positions whose rows are permuted among themselves.
struct Window {
    first_position: u64,
    rows: u64,
    first_slot: u64,
    permutation: Permutation,
}

impl EpochOrder {
    /// The row at `position`.
    ///
    /// # Panics
    /// If `position` is not below the number of rows.
    pub fn row(&self, position: u64) -> u64 {
        self.rows_at(position..position + 1)[0]
    }

    /// The rows at `positions`, in order.
    ///
    /// # Panics
    /// If `positions` reaches beyond the number of rows.
    pub fn rows_at(&self, positions: Range<u64>) -> Vec<u64> {
        assert!(positions.end <= self.rows, "positions {positions:?} of {} rows", self.rows);
        let Some(shuffled) = &self.shuffled else {
            return positions.collect();
        };
        let mut rows = Vec::with_capacity((positions.end.saturating_sub(positions.start)) as usize);
        let mut position = positions.start;
        while position < positions.end {
            let window = shuffled.window(position, self.rows);
            let end = positions.end.min(window.first_position + window.rows);
            rows.extend((position..end).map(|position| shuffled.row(&window, position)));
            position = end;
        }
        rows
    }
}

impl Shuffled {
    /// The window that holds `position`. Only the window with the short block has fewer rows than the others (the last
    /// window may also have fewer blocks), so one comparison finds it.
    fn window(&self, position: u64, rows: u64) -> Window {
        let window_rows = self.block_rows * self.window_blocks;
        let short_window = self.short_slot / self.window_blocks;
        let is_after = position >= (short_window + 1).saturating_mul(window_rows) - self.missing_rows;
        let number = (position + if is_after { self.missing_rows } else { 0 }) / window_rows;
        let start_of = |number: u64| {
            let missing = if number > short_window { self.missing_rows } else { 0 };
            number.saturating_mul(window_rows) - missing
        };
        let first_position = start_of(number);
        let rows = start_of(number + 1).min(rows) - first_position;
        let permutation = Permutation::new(rows, self.key.derive(number));
        Window { first_position, rows, first_slot: number * self.window_blocks, permutation }
    }

    fn row(&self, window: &Window, position: u64) -> u64 {
        let mut index = window.permutation.at(position - window.first_position);
        // Rows are counted slot by slot; after the short slot, the count includes its missing rows.
        let short_end = (self.short_slot.wrapping_sub(window.first_slot))
            .checked_add(1)
            .and_then(|slots| slots.checked_mul(self.block_rows))
            .map(|rows| rows - self.missing_rows);
        if short_end.is_some_and(|end| index >= end) {
            index += self.missing_rows;
        }
        let slot = window.first_slot + index / self.block_rows;
        self.blocks.at(slot) * self.block_rows + index % self.block_rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order(rows: u64, seed: u64, block_rows: u64, window_blocks: u64) -> Order {
        Order::new(rows, OrderOptions { seed, shuffle: true, block_rows, window_blocks }).unwrap()
    }

    fn is_permutation(rows: &[u64]) -> bool {
        let mut sorted = rows.to_vec();
        sorted.sort_unstable();
        sorted.into_iter().eq(0..rows.len() as u64)
    }

    #[test]
    fn without_shuffling_every_epoch_is_file_order() {
        let order = Order::new(10, OrderOptions { shuffle: false, ..OrderOptions::default() }).unwrap();
        assert_eq!(order.epoch(3).rows_at(2..7), [2, 3, 4, 5, 6]);
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own() {
        let rows = |seed, epoch| order(1000, seed, 16, 4).epoch(epoch).rows_at(0..1000);
        assert_ne!(rows(1, 0), rows(1, 1));
        assert_ne!(rows(1, 0), rows(2, 0));
        assert_eq!(rows(1, 5), rows(1, 5));
    }

    /// If the order changes, every saved position means other rows. Such a change needs a new checkpoint version.
    #[test]
    fn the_order_is_what_it_always_was() {
        assert_eq!(order(20, 42, 3, 2).epoch(1).rows_at(0..20), GOLDEN_ORDER);
        assert_eq!(order(1_000_000_007, 42, 4096, 16).epoch(0).rows_at(999_999_999..1_000_000_003), GOLDEN_ROWS);
    }
    const GOLDEN_ORDER: [u64; 20] = [14, 19, 12, 13, 18, 0, 2, 10, 9, 1, 11, 3, 4, 8, 7, 5, 6, 15, 17, 16];
    const GOLDEN_ROWS: [u64; 4] = [833_472_562, 608_448_808, 158_397_946, 549_489_923];

    #[test]
    fn a_window_draws_from_window_blocks_blocks_and_no_more() {
        let (block_rows, window_blocks) = (64, 8);
        let epoch = order(64 * 100, 9, block_rows, window_blocks).epoch(0);
        for window in 0..12 {
            let rows = epoch.rows_at(window * 512..(window + 1) * 512);
            let blocks: std::collections::HashSet<u64> = rows.iter().map(|row| row / block_rows).collect();
            assert_eq!(blocks.len() as u64, window_blocks);
        }
    }

    #[test]
    fn a_batch_mixes_rows_from_far_apart() {
        let rows = order(1_000_000, 1, 4096, 16).epoch(0).rows_at(0..128);
        let blocks: std::collections::HashSet<u64> = rows.iter().map(|row| row / 4096).collect();
        assert!(blocks.len() >= 14, "{} of 16 blocks", blocks.len());
        assert!(rows.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count() <= 2);
    }

    #[test]
    fn blocks_of_nothing_are_refused() {
        for (block_rows, window_blocks) in [(0, 1), (1, 0), (u64::MAX, 2)] {
            let options = OrderOptions { block_rows, window_blocks, ..OrderOptions::default() };
            assert!(Order::new(10, options).is_err());
        }
    }

    #[test]
    fn data_without_rows_has_an_empty_order() {
        assert!(order(0, 1, 8, 8).epoch(0).rows_at(0..0).is_empty());
    }

    proptest! {
        #[test]
        fn every_epoch_is_a_permutation_of_the_rows(
            rows in 1_u64..3000, seed: u64, epoch: u64, block_rows in 1_u64..200, window_blocks in 1_u64..30,
        ) {
            let epoch = order(rows, seed, block_rows, window_blocks).epoch(epoch);
            prop_assert!(is_permutation(&epoch.rows_at(0..rows)));
        }

        #[test]
        fn any_piece_of_an_epoch_is_that_piece_of_the_whole(
            rows in 1_u64..2000, seed: u64, block_rows in 1_u64..100, window_blocks in 1_u64..10, a: u64, b: u64,
        ) {
            let epoch = order(rows, seed, block_rows, window_blocks).epoch(0);
            let (a, b) = (a % (rows + 1), b % (rows + 1));
            let piece = a.min(b)..a.max(b);
            let whole = epoch.rows_at(0..rows);
            prop_assert_eq!(&epoch.rows_at(piece.clone()), &whole[piece.start as usize..piece.end as usize]);
            prop_assert_eq!(epoch.row(a.min(rows - 1)), whole[a.min(rows - 1) as usize]);
        }
    }
}
