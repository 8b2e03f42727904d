//! The parts of an optimizer batch. Each is summed separately, whichever process computes it.

use std::ops::Range;

/// Consecutive shards whose gradients have been added up: `count` of them from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first shard.
    pub first: usize,
    /// The number of shards.
    pub count: usize,
}

impl Extent {
    /// One shard.
    pub fn single(shard: usize) -> Self {
        Self { first: shard, count: 1 }
    }

    /// Both extents together, if `next` follows this one and they are the two halves of one node of the tree.
    pub fn with(self, next: Extent) -> Option<Extent> {
        let is_left_half = self.first.is_multiple_of(2 * self.count);
        let are_halves = self.count == next.count && self.first + self.count == next.first;
        (is_left_half && are_halves).then_some(Extent { first: self.first, count: 2 * self.count })
    }
}

/// How an optimizer batch is divided among processes: into `count` shards by position. Each process has some consecutive
/// shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shards {
    /// The number of shards of a batch.
    pub count: usize,
    /// The number of processes.
    pub processes: usize,
}

impl Shards {
    /// The shards of process `rank`.
    pub fn owned_by(&self, rank: usize) -> Range<usize> {
        rank * self.count / self.processes..(rank + 1) * self.count / self.processes
    }

    /// The positions of shard `shard` in a batch of `batch` samples.
    pub fn positions(&self, shard: usize, batch: usize) -> Range<usize> {
        shard * batch / self.count..(shard + 1) * batch / self.count
    }

    /// The most positions of a shard.
    pub fn most_positions(&self, batch: usize) -> usize {
        batch.div_ceil(self.count)
    }

    /// The sums that remain for process `rank`: the nodes of the tree over its shards alone.
    pub fn extents(&self, rank: usize) -> Vec<Extent> {
        let mut extents = Vec::new();
        for shard in self.owned_by(rank) {
            push(&mut extents, Extent::single(shard));
        }
        extents
    }

    /// The most sums that process `rank` has at a time, including that of the shard that is being computed.
    pub fn max_sums(&self, rank: usize) -> usize {
        let (mut extents, mut most) = (Vec::new(), 0);
        for shard in self.owned_by(rank) {
            most = most.max(extents.len() + 1);
            push(&mut extents, Extent::single(shard));
        }
        most
    }
}

/// Appends an extent, and joins extents that are the two halves of a node.
fn push(extents: &mut Vec<Extent>, next: Extent) {
    extents.push(next);
    while let [.., left, right] = extents[..]
        && let Some(both) = left.with(right)
    {
        extents.truncate(extents.len() - 2);
        extents.push(both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_dealt_out_in_order_and_none_is_left() {
        for (count, processes) in [(1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (7, 3)] {
            let shards = Shards { count, processes };
            let dealt: Vec<usize> = (0..processes).flat_map(|rank| shards.owned_by(rank)).collect();
            assert_eq!(dealt, (0..count).collect::<Vec<_>>());
            let positions: Vec<usize> = (0..count).flat_map(|shard| shards.positions(shard, 13)).collect();
            assert_eq!(positions, (0..13).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_process_is_left_with_nodes_of_the_tree_over_all_shards() {
        let shards = Shards { count: 6, processes: 2 };
        assert_eq!(shards.extents(0), [Extent { first: 0, count: 2 }, Extent::single(2)]);
        assert_eq!(shards.extents(1), [Extent::single(3), Extent { first: 4, count: 2 }]);
        assert_eq!(Shards { count: 8, processes: 1 }.extents(0), [Extent { first: 0, count: 8 }]);
        assert_eq!(Shards { count: 8, processes: 1 }.max_sums(0), 4);
        assert_eq!(Shards { count: 8, processes: 8 }.max_sums(3), 1);
    }
}
