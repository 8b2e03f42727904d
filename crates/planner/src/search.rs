//! The search space: the offered combinations of levers that the pins allow.
//!
//! The search does not compare choices. Each omitted combination is dominated by an offered one, for a reason given in a comment. Each
//! lever of the table offers values that depend on the levers before it.

use t5::Levers;

use crate::lever::{Lever, Space};
use crate::levers::{LEVERS, LOSS_CHUNK_ROWS, MICRO_BATCH_SAMPLES};

impl Space<'_> {
    /// Every combination of some levers. The first lever varies slowest.
    pub fn combinations(&self, levers: &[&Lever], from: Levers) -> Vec<Levers> {
        levers.iter().fold(vec![from], |combinations, lever| {
            let with_lever = |so_far: Levers| {
                let mut values = lever.offered(self, &so_far);
                values.dedup();
                let set = values.iter().map(|value| lever.with(&so_far, *value)).collect::<Vec<_>>();
                if set.is_empty() { vec![so_far] } else { set }
            };
            combinations.into_iter().flat_map(with_lever).collect()
        })
    }

    /// Every way through a step's samples, and every cut of a step. A choice has one of each.
    pub fn schedules_and_sizes(&self) -> (Vec<Levers>, Vec<Levers>) {
        let is_of_the_cut = |lever: &&&Lever| [MICRO_BATCH_SAMPLES.name, LOSS_CHUNK_ROWS.name].contains(&lever.name);
        let (cuts, ways): (Vec<&Lever>, Vec<&Lever>) = LEVERS.iter().partition(|lever| is_of_the_cut(lever));
        (self.combinations(&ways, Levers::default()), self.combinations(&cuts, Levers::default()))
    }

    /// Whether pins ask for all files that these levers write.
    pub fn files_are_pinned(&self, levers: &Levers) -> bool {
        let files = LEVERS.iter().filter(|lever| lever.writes_a_file(levers));
        files.into_iter().all(|lever| self.pins.value(lever.name).is_some())
    }
}

/// `n`, half of it, and so on down to 1.
pub fn halvings(n: usize) -> Vec<usize> {
    let mut sizes = vec![n.max(1)];
    while let Some(&last) = sizes.last().filter(|last| **last > 1) {
        sizes.push(last.div_ceil(2));
    }
    sizes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use memory_policy::MemorySpace;
    use t5::LayerMajor;

    use super::*;
    use crate::lever::{FrozenBlocks, Pins, Value};
    use crate::levers::{ACCUMULATION, RECOMPUTE_BLOCKS, WEIGHT_BLOCKS_IN_MEMORY, WEIGHT_OFFLOAD};

    #[test]
    fn a_number_is_halved_down_to_one() {
        assert_eq!(halvings(12), [12, 6, 3, 2, 1]);
    }

    fn space(pins: &Pins) -> Space<'_> {
        let (place, has_large_moments, has_others) = (MemorySpace::Host, false, false);
        Space {
            pins,
            place,
            blocks: 3,
            batch_samples: 8,
            target_tokens: 16,
            has_large_moments,
            frozen: None,
            has_others,
            casts_weights: false,
            casts_adapter: false,
            graphs: None,
        }
    }

    fn ways(pins: &Pins) -> Vec<Levers> {
        space(pins).schedules_and_sizes().0
    }

    #[test]
    fn blocks_of_a_base_stay_in_memory_where_gradients_and_moments_do() {
        let offered = |pins: &Pins| -> Vec<LayerMajor> {
            let frozen = Some(FrozenBlocks { blocks: 5, max_counts: 8, has_larger_table: false });
            let ways = Space { has_large_moments: true, frozen, ..space(pins) }.schedules_and_sizes().0;
            ways.into_iter().filter_map(|way| way.layer_major).collect()
        };
        let kept = |layers: &LayerMajor| layers.weight_blocks_in_memory > 0;
        let pins = Pins::default();
        let with_blocks: Vec<LayerMajor> = offered(&pins).into_iter().filter(kept).collect();
        let holds_the_rest = |layers: &LayerMajor| layers.kept_gradient_blocks == 3 && !layers.optimizer_on_disk;
        assert!(with_blocks.iter().all(|layers| layers.weights_on_disk && holds_the_rest(layers)), "{with_blocks:?}");
        let counts: BTreeSet<usize> = with_blocks.iter().map(|layers| layers.weight_blocks_in_memory).collect();
        assert_eq!(counts, (1..=5).collect());
        let pinned = offered(&pins.clone().with(WEIGHT_BLOCKS_IN_MEMORY.name, Value::Count(2)));
        assert!(
            pinned.iter().all(|layers| layers.weight_blocks_in_memory == if layers.weights_on_disk { 2 } else { 0 })
        );
        // Trained weights in a file are never kept in memory.
        assert!(!ways(&pins).into_iter().filter_map(|way| way.layer_major).any(|layers| kept(&layers)));
    }

    #[test]
    fn memory_for_what_is_on_its_way_is_offered_where_there_are_others() {
        let pins = Pins::default();
        let overlaps = |has_others| {
            let ways = Space { has_others, ..space(&pins) }.schedules_and_sizes().0;
            ways.into_iter().filter_map(|way| way.layer_major).filter(|layers| layers.overlaps).count()
        };
        assert_eq!(overlaps(false), 0);
        let by_layer = ways(&pins).into_iter().filter(|way| way.layer_major.is_some()).count();
        assert_eq!(overlaps(true), by_layer);
    }

    #[test]
    fn blocks_need_not_be_computed_again_where_backward_goes_through_them_once() {
        let offered = |pins: &Pins, is_meant: &dyn Fn(&LayerMajor) -> bool| -> Vec<usize> {
            let ways = ways(pins).into_iter().filter(|way| !way.has_weights_on_disk());
            let ways = ways.filter(|way| way.layer_major.as_ref().is_some_and(is_meant));
            ways.map(|way| way.recompute_blocks).collect()
        };
        let pins = Pins::default();
        let twice = |layers: &LayerMajor| layers.kept_gradient_blocks == 1 && !layers.gradients_on_disk;
        assert_eq!(offered(&pins, &twice), [3, 3]);
        let in_files = |layers: &LayerMajor| {
            layers.kept_gradient_blocks == 1 && layers.boundaries_on_disk && layers.gradients_on_disk
        };
        // The activations of no block, of one block, and of two blocks in memory.
        assert_eq!(offered(&pins, &in_files), [3, 3, 0, 0, 0]);
        let partly = |layers: &LayerMajor| in_files(layers) && layers.blocks_in_memory == 2;
        assert_eq!(offered(&pins, &partly), [0]);
        let in_memory = |layers: &LayerMajor| {
            layers.kept_gradient_blocks == 0 && !layers.boundaries_on_disk && layers.gradients_on_disk
        };
        assert_eq!(offered(&pins, &in_memory), [3, 3, 2, 1, 0]);

        // Weights go to a file if backward goes through a block once, or if a pin asks for it.
        let weights = |pins: &Pins| -> Vec<LayerMajor> {
            let layers = ways(pins).into_iter().filter_map(|way| way.layer_major);
            layers.filter(|layers| layers.weights_on_disk).collect()
        };
        let goes_once = |layers: &LayerMajor| !layers.goes_twice(3);
        assert!(weights(&pins).iter().all(goes_once) && !weights(&pins).is_empty());
        let wanted = pins.clone().with(WEIGHT_OFFLOAD.name, Value::Word("disk"));
        assert!(!weights(&wanted).iter().all(goes_once));
        assert!(weights(&pins.clone().with(WEIGHT_OFFLOAD.name, Value::Word("none"))).is_empty());

        let by_layer = pins.with(ACCUMULATION.name, Value::Word("layer-major"));
        let pins = by_layer.with(RECOMPUTE_BLOCKS.name, Value::Count(2));
        assert!(offered(&pins, &twice).iter().all(|&blocks| blocks == 3));
        assert!(offered(&pins, &in_files).iter().all(|&blocks| blocks == 2));
    }
}
