//! Parameters that a card updates together: one launch for a whole group, whose blocks find their parameter in a table.
//!
//! The way a parameter is cut into blocks depends on its size alone. So its sums, and the bits of its update, do not depend on the other
//! parameters.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use std::ops::Range;

use candle_core::Result;
use cuda_device::pieces::STAGED_BYTES;

use crate::needs::{Calls, Needs};

/// Updates that are prepared on a card: only the launches and the scale of the gradients are missing. Until the updates are applied, and in
/// between, nothing else may change their tensors.
#[derive(Debug)]
pub struct ReadyUpdates(pub(crate) of_card::Ready);

impl ReadyUpdates {
    /// Applies the updates, each from its gradient times `gradient_scale`. The `gradient_scale` of each `hyper` is ignored.
    ///
    /// # Errors
    /// The driver's. Some parameters may have changed by then.
    pub fn make(self, gradient_scale: f64) -> Result<()> {
        self.0.make(gradient_scale)
    }
}

#[cfg(feature = "cuda")]
use cuda as of_card;

/// Without cards there are no such updates.
#[cfg(not(feature = "cuda"))]
mod of_card {
    #[derive(Debug)]
    pub enum Ready {}

    impl Ready {
        pub fn make(&self, _: f64) -> candle_core::Result<()> {
            match *self {}
        }
    }
}

/// The most bytes of a group besides operands and results, unless one parameter alone takes more.
const MAX_BYTES: u64 = 16 << 20;
/// The most parts of rows that are updated by a block each: enough for the largest card, and few enough that each block adds all their
/// sums.
pub(crate) const PARTS: usize = 1024;

/// Splits parameters that take these bytes into groups of neighbours.
pub(crate) fn groups(bytes: &[u64]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut sum = 0;
    for (i, bytes) in bytes.iter().enumerate() {
        sum += bytes;
        match groups.last_mut() {
            Some(group) if sum <= MAX_BYTES => group.end = i + 1,
            _ => {
                groups.push(i..i + 1);
                sum = *bytes;
            }
        }
    }
    groups
}

/// The needs of a card for a table. An entry has `entry` bytes in the table, and takes its bytes of `scratch` meanwhile. There are
/// `of_group` launches over each group of entries, and `of_all` launches over all entries.
pub(crate) fn needs_of_groups(scratch: &[u64], entry: u64, [of_group, of_all]: [u64; 2]) -> Needs {
    if scratch.is_empty() {
        return Needs::default();
    }
    let table = scratch.len() as u64 * entry;
    let launches = groups(scratch).len() as u64 * of_group + of_all;
    let uploads = table.div_ceil(STAGED_BYTES);
    Needs::bytes(most_of_a_group(scratch) + table).with_calls(Calls { launches, uploads, ..Calls::default() })
}

/// Bytes of the largest group.
pub(crate) fn most_of_a_group(bytes: &[u64]) -> u64 {
    groups(bytes).into_iter().map(|group| bytes[group].iter().sum()).max().unwrap_or(0)
}

/// The approximate number of elements that a block updates: finding its parameter then takes little of its time.
const ELEMENTS: usize = 24 << 10;
/// The most rows of a narrow parameter that a block updates, unless the parameter has very many rows.
const ROWS: usize = 64;

/// The number of rows that a block updates. Its threads have several of them in flight.
pub(crate) fn rows_of_block(rows: usize, width: usize) -> usize {
    let few = ELEMENTS.div_ceil(width.max(1)).min(ROWS);
    rows.div_ceil(PARTS).max(few).next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_uploaded_once_for_all_groups_and_in_pieces_that_nobody_waits_for() {
        let calls = |launches, uploads| Calls { launches, uploads, ..Calls::default() };
        // Tensors with the bytes of scratch memory of each.
        for (tensors, scratch, bytes, expected) in [
            (0, 0, 0, calls(0, 0)),
            (1, 7, 107, calls(4, 1)),
            (3, 8 << 20, (16 << 20) + 300, calls(7, 1)),
            (655, 0, 65_500, calls(4, 1)),
            (656, 0, 65_600, calls(4, 2)),
        ] {
            let needs = needs_of_groups(&vec![scratch; tensors], 100, [3, 1]);
            assert_eq!((needs.transient, needs.calls), (bytes, expected), "{tensors}");
        }
    }

    #[test]
    fn a_group_ends_where_the_next_parameter_has_no_room_in_it() {
        let mib = |sizes: &[u64]| sizes.iter().map(|size| size << 20).collect::<Vec<_>>();
        // Sizes with the ends of their groups.
        for (sizes, expected, most) in [
            (&[][..], &[][..], 0),
            (&[1, 2, 3], &[3], 6),
            (&[8, 8, 1], &[2, 3], 16),
            (&[20, 1, 20, 20], &[1, 2, 3, 4], 20),
            (&[1, 15, 1, 14, 1, 1], &[2, 5, 6], 16),
        ] {
            let groups = groups(&mib(sizes));
            assert_eq!(groups.iter().map(|group| group.end).collect::<Vec<_>>(), expected, "{sizes:?}");
            assert!(groups.windows(2).all(|pair| pair[0].end == pair[1].start), "{sizes:?}");
            assert_eq!(most_of_a_group(&mib(sizes)), most << 20, "{sizes:?}");
        }
    }
}
