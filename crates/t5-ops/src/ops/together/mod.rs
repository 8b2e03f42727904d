//! Parameters that a card updates together: a launch for all of a group, whose blocks find their parameter in a table.
//!
//! How a parameter is cut into blocks depends on its size alone. So its sums, and the bits of its update, do not depend on the others.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use std::ops::Range;

/// Bytes beside operands and results that a group takes, unless one parameter alone takes more.
const MOST_BYTES: u64 = 16 << 20;
/// Parts of rows that are updated by a block each, at most: enough for the largest card, and few enough that each adds all their sums.
pub(crate) const PARTS: usize = 1024;

/// Parameters that take so many bytes each, in groups of neighbours.
pub(crate) fn groups(bytes: &[u64]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut sum = 0;
    for (i, bytes) in bytes.iter().enumerate() {
        sum += bytes;
        match groups.last_mut() {
            Some(group) if sum <= MOST_BYTES => group.end = i + 1,
            _ => {
                groups.push(i..i + 1);
                sum = *bytes;
            }
        }
    }
    groups
}

/// Bytes of the largest group.
pub(crate) fn most_of_a_group(bytes: &[u64]) -> u64 {
    groups(bytes).into_iter().map(|group| bytes[group].iter().sum()).max().unwrap_or(0)
}

/// What a piece of scratch memory takes.
pub(crate) fn of_piece(bytes: u64) -> u64 {
    bytes.next_multiple_of(16)
}

/// Elements that a block updates, about: to find its parameter takes it little time then.
const ELEMENTS: usize = 24 << 10;
/// Rows that a block updates of a narrow parameter, at most if there are few.
const ROWS: usize = 64;

/// Rows that a block updates. Its threads have several of them in flight.
pub(crate) fn rows_of_block(rows: usize, width: usize) -> usize {
    let few = ELEMENTS.div_ceil(width.max(1)).min(ROWS);
    rows.div_ceil(PARTS).max(few).next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

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
