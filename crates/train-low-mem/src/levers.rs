//! The levers of a step: the combinations that are offered, those that the pins leave.
//!
//! Nothing is weighed here. What is left out is dominated by something that is offered, for a reason said beside it.

use memory_policy::LayerMajor;

use crate::config::{AccumulationPin, Config, Memory, Values};
use crate::failure::Outcome;

/// Rows of logits at a time. The last: logits are computed again.
pub const LOSS_CHUNK_ROWS: [usize; 4] = [1024, 256, 64, 1];

/// A way to go through a step's samples: how gradients are summed, and how many blocks are computed again for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Way {
    /// Layer after layer, or micro-batch after micro-batch.
    pub layers: Option<LayerMajor>,
    /// Blocks, counted from the first, that are computed again.
    pub recompute_blocks: usize,
}

impl Way {
    /// Whether the weights lie in a file.
    pub fn has_weights_on_disk(&self) -> bool {
        self.layers.is_some_and(|layers| layers.weights_on_disk)
    }

    /// Whether the files that it writes were asked for.
    pub fn files_are_pinned(&self, pins: &Memory) -> bool {
        self.layers.is_none_or(|layers| {
            (!layers.boundaries_on_disk || pins.activation_offload.is_some())
                && (!layers.gradients_on_disk || pins.gradient_offload.is_some())
                && (!layers.weights_on_disk || pins.weight_offload.is_some())
        })
    }
}

/// The ways through a model of which backward enters `blocks` blocks.
pub fn ways(pins: &Memory, blocks: usize) -> Vec<Way> {
    let of = |layers| {
        recomputed(layers, pins, blocks).into_iter().map(move |recompute_blocks| Way { layers, recompute_blocks })
    };
    let ways = accumulations(pins, blocks).into_iter().flat_map(of);
    ways.flat_map(|way| partly_in_memory(way, pins, blocks)).collect()
}

/// Into so many parts blocks are cut where some of them may stay in memory.
const PARTS: usize = 8;

/// The blocks of a part.
fn part(blocks: usize) -> usize {
    blocks.div_ceil(PARTS).max(1)
}

/// A way whose activations go to a file, with those of more or fewer blocks in memory.
fn partly_in_memory(way: Way, pins: &Memory, blocks: usize) -> Vec<Way> {
    let Some(layers) = way.layers.filter(|layers| layers.boundaries_on_disk) else { return vec![way] };
    // Inputs alone are little.
    let end = if way.recompute_blocks == 0 { blocks.max(1) } else { 1 };
    let counts = (0..end).step_by(part(blocks)).collect();
    let counts = pinned(pins.blocks_in_memory.map(|pin| pin.min(blocks)), counts).into_iter();
    counts.map(|blocks_in_memory| Way { layers: Some(LayerMajor { blocks_in_memory, ..layers }), ..way }).collect()
}

/// As many values a lever over blocks has, at most: those of a deeper model are evenly spaced, and planning stays quick.
const MOST_COUNTS: usize = 64;

/// Counts of blocks that are offered, from none to all.
fn counts(blocks: usize) -> Vec<usize> {
    let step = blocks.div_ceil(MOST_COUNTS).max(1);
    let mut counts: Vec<usize> = (0..=blocks).step_by(step).chain([blocks]).collect();
    counts.dedup();
    counts
}

/// Micro-batch after micro-batch, or layer after layer with more or fewer gradients kept, as the pins leave.
fn accumulations(pins: &Memory, blocks: usize) -> Vec<Option<LayerMajor>> {
    let kept = pinned(pins.kept_gradient_blocks.map(|pin| pin.min(blocks)), counts(blocks).into_iter().rev().collect());
    let boundaries = pinned(pins.activation_offload, vec![false, true]);
    let by_layer = kept.iter().flat_map(|&kept_gradient_blocks| {
        let is_every_block_kept = kept_gradient_blocks == blocks;
        // Where every block keeps its gradient none waits in a file.
        let gradients: &[bool] = if is_every_block_kept { &[false] } else { &[false, true] };
        let gradients = pinned(pins.gradient_offload, gradients.to_vec());
        let mut ways = Vec::new();
        for &boundaries_on_disk in &boundaries {
            for &gradients_on_disk in &gradients {
                // Beside a second pass what heads put out is little.
                let heads: &[bool] = if is_every_block_kept || gradients_on_disk { &[false, true] } else { &[false] };
                // Weights are as large as gradients, and needed three times as often: these go first. What memory is left then keeps
                // gradients.
                let goes_once = gradients_on_disk || is_every_block_kept;
                let weights: &[bool] = if goes_once { &[false, true] } else { &[false] };
                for weights_on_disk in pinned(pins.weight_offload, weights.to_vec()) {
                    ways.extend(pinned(pins.heads_kept, heads.to_vec()).into_iter().map(|heads_kept| {
                        let layers = LayerMajor {
                            kept_gradient_blocks,
                            heads_kept,
                            boundaries_on_disk,
                            blocks_in_memory: 0,
                            gradients_on_disk,
                            weights_on_disk,
                        };
                        Some(layers)
                    }));
                }
            }
        }
        ways
    });
    match pins.accumulation {
        Some(AccumulationPin::MicroBatchMajor) => vec![None],
        Some(AccumulationPin::LayerMajor) => by_layer.collect(),
        // Layer by layer every block is computed again, unless files spare that: a number of them asks for the other way.
        None if pins.recompute_blocks.is_some() => vec![None],
        None => std::iter::once(None).chain(by_layer).collect(),
    }
}

/// How many blocks may be computed again in a way to accumulate, as the pins leave.
fn recomputed(layers: Option<LayerMajor>, pins: &Memory, blocks: usize) -> Vec<usize> {
    let pin = pins.recompute_blocks.map(|pin| pin.min(blocks));
    let Some(layers) = layers else { return pinned(pin, counts(blocks)) };
    // What backward goes through twice is computed again, whatever the number.
    if layers.goes_twice(blocks) {
        return vec![blocks];
    }
    // Where nothing is computed again, what heads put out is kept in any case: offered once.
    let is_alone = layers.heads_kept || pins.heads_kept.is_some();
    let offered = match layers {
        _ if !is_alone => vec![blocks],
        // In a file all of it costs no memory.
        LayerMajor { boundaries_on_disk: true, .. } => vec![blocks, 0],
        // In memory it is worth more than gradients are, which can wait in a file.
        LayerMajor { gradients_on_disk: true, kept_gradient_blocks, .. }
            if kept_gradient_blocks == pins.kept_gradient_blocks.unwrap_or(0) =>
        {
            counts(blocks).into_iter().rev().collect()
        }
        _ => vec![blocks],
    };
    pinned(pin, offered)
}

/// The sizes of the largest part where `n` is cut into 1, 2, 3 and so on parts as even as can be, each once.
pub fn even_cuts(n: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (1..=n.max(1)).map(|parts| n.div_ceil(parts).max(1)).collect();
    sizes.dedup();
    sizes
}

/// `n`, half of it, and so on down to 1.
pub fn halvings(n: usize) -> Vec<usize> {
    let mut sizes = vec![n.max(1)];
    while let Some(&last) = sizes.last().filter(|last| **last > 1) {
        sizes.push(last.div_ceil(2));
    }
    sizes
}

/// Nothing pinned.
pub fn no_pins() -> Outcome<Memory> {
    let mut values = Values::defaults();
    values.apply_assignment("data.train=none.parquet")?;
    values.apply_assignment("model.config=tiny")?;
    Ok(Config::resolve(values)?.memory)
}

/// What a pin leaves of an offer.
pub fn pinned<T: Copy + PartialEq>(pin: Option<T>, mut offered: Vec<T>) -> Vec<T> {
    offered.dedup();
    pin.map_or(offered, |pin| vec![pin])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_cut_into_parts_as_even_as_can_be() {
        assert_eq!(even_cuts(12), [12, 6, 4, 3, 2, 1]);
        assert_eq!(even_cuts(7), [7, 4, 3, 2, 1]);
        assert_eq!(even_cuts(1), [1]);
        assert_eq!(halvings(12), [12, 6, 3, 2, 1]);
    }

    #[test]
    fn a_deep_model_has_no_more_values_of_a_lever_and_still_all_and_none() {
        assert_eq!(counts(3), [0, 1, 2, 3]);
        for blocks in [64, 65, 127, 200, 256] {
            let counts = counts(blocks);
            assert!(counts.is_sorted() && counts.len() <= MOST_COUNTS + 1, "{counts:?}");
            assert_eq!((counts[0], counts.last()), (0, Some(&blocks)));
        }
    }

    #[test]
    fn blocks_need_not_be_computed_again_where_backward_goes_through_them_once() {
        let offered = |pins: &Memory, is_meant: &dyn Fn(&LayerMajor) -> bool| -> Vec<usize> {
            let ways = ways(pins, 3).into_iter().filter(|way| !way.has_weights_on_disk());
            let ways = ways.filter(|way| way.layers.as_ref().is_some_and(is_meant));
            ways.map(|way| way.recompute_blocks).collect()
        };
        let pins = no_pins().expect("pins");
        let twice = |layers: &LayerMajor| layers.kept_gradient_blocks == 1 && !layers.gradients_on_disk;
        assert_eq!(offered(&pins, &twice), [3, 3]);
        let in_files = |layers: &LayerMajor| {
            layers.kept_gradient_blocks == 1 && layers.boundaries_on_disk && layers.gradients_on_disk
        };
        // Once with the activations of no block in memory, of one, and of two.
        assert_eq!(offered(&pins, &in_files), [3, 3, 0, 0, 0]);
        let partly = |layers: &LayerMajor| in_files(layers) && layers.blocks_in_memory == 2;
        assert_eq!(offered(&pins, &partly), [0]);
        let in_memory = |layers: &LayerMajor| {
            layers.kept_gradient_blocks == 0 && !layers.boundaries_on_disk && layers.gradients_on_disk
        };
        assert_eq!(offered(&pins, &in_memory), [3, 3, 2, 1, 0]);

        // Weights go to a file when backward goes through a block once, or where that was asked for.
        let weights = |pins: &Memory| -> Vec<LayerMajor> {
            let layers = ways(pins, 3).into_iter().filter_map(|way| way.layers);
            layers.filter(|layers| layers.weights_on_disk).collect()
        };
        let goes_once = |layers: &LayerMajor| !layers.goes_twice(3);
        assert!(weights(&pins).iter().all(goes_once) && !weights(&pins).is_empty());
        let wanted = Memory { weight_offload: Some(true), ..pins.clone() };
        assert!(!weights(&wanted).iter().all(goes_once));
        assert!(weights(&Memory { weight_offload: Some(false), ..pins.clone() }).is_empty());

        let pins = Memory { accumulation: Some(AccumulationPin::LayerMajor), recompute_blocks: Some(2), ..pins };
        assert!(offered(&pins, &twice).iter().all(|&blocks| blocks == 3));
        assert!(offered(&pins, &in_files).iter().all(|&blocks| blocks == 2));
    }
}
