//! The search space: the combinations of levers that are offered, those that the pins leave.
//!
//! Nothing is weighed here. What is left out is dominated by something that is offered, for a reason said beside it.
//! Each function offers the values of one lever of the table, given the levers before it.

use t5::{LayerMajor, Levers};

use crate::levers::{
    ACCUMULATION, ACTIVATION_OFFLOAD, ATTENTION_HEADS, BLOCKS_IN_MEMORY, GRADIENT_OFFLOAD, KEPT_GRADIENT_BLOCKS,
    LEVERS, LOSS_CHUNK_ROWS, Lever, MICRO_BATCH_SAMPLES, Pins, RECOMPUTE_BLOCKS, Value, WEIGHT_OFFLOAD,
};

/// Rows of logits at a time. The last: logits are computed again.
const CHUNKS: [usize; 4] = [1024, 256, 64, 1];

/// Into so many parts blocks are cut where some of them may stay in memory.
const PARTS: usize = 8;

/// As many values a lever over blocks has, at most: those of a deeper model are evenly spaced, and planning stays quick.
const MOST_COUNTS: usize = 64;

/// The facts that offers depend on, beside other levers.
#[derive(Clone, Copy, Debug)]
pub struct Space<'a> {
    /// Values that are not to be chosen.
    pub pins: &'a Pins,
    /// Blocks that backward enters.
    pub blocks: usize,
    /// Samples of an optimizer batch.
    pub batch_samples: usize,
    /// Tokens of the longest target.
    pub target_tokens: usize,
}

impl Space<'_> {
    /// Every combination of some levers, the first of them varying slowest.
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

    /// Every way through a step's samples, and every cut of a step: a choice has one of each.
    pub fn ways_and_cuts(&self) -> (Vec<Levers>, Vec<Levers>) {
        let is_of_the_cut = |lever: &&&Lever| [MICRO_BATCH_SAMPLES.name, LOSS_CHUNK_ROWS.name].contains(&lever.name);
        let (cuts, ways): (Vec<&Lever>, Vec<&Lever>) = LEVERS.iter().partition(|lever| is_of_the_cut(lever));
        (self.combinations(&ways, Levers::default()), self.combinations(&cuts, Levers::default()))
    }

    /// The pin of a lever over blocks.
    fn pinned_blocks(&self, lever: &Lever) -> Option<usize> {
        self.pins.count(lever.name).map(|pin| pin.min(self.blocks))
    }

    /// Whether every block keeps its gradient.
    fn keeps_every_gradient(&self, layers: &LayerMajor) -> bool {
        layers.kept_gradient_blocks == self.blocks
    }

    /// Whether the files that are written with these levers were asked for.
    pub fn files_are_pinned(&self, levers: &Levers) -> bool {
        let files = LEVERS.iter().filter(|lever| lever.writes_a_file(levers));
        files.into_iter().all(|lever| self.pins.of(lever.name).is_some())
    }
}

/// The counts of an offer that a pin leaves.
fn counts_or(pin: Option<usize>, offered: impl IntoIterator<Item = usize>) -> Vec<Value> {
    match pin {
        Some(pin) => vec![Value::Count(pin)],
        None => offered.into_iter().map(Value::Count).collect(),
    }
}

/// The words of an offer that a pin leaves.
fn words_or(space: &Space<'_>, lever: &Lever, offered: &[&'static str]) -> Vec<Value> {
    match space.pins.of(lever.name) {
        Some(pin) => vec![pin],
        None => offered.iter().map(|word| Value::Word(word)).collect(),
    }
}

pub fn micro_batch_samples(space: &Space<'_>, _: &Levers) -> Vec<Value> {
    let pin = space.pins.count(MICRO_BATCH_SAMPLES.name).map(|pin| pin.min(space.batch_samples));
    counts_or(pin, even_cuts(space.batch_samples))
}

pub fn loss_chunk_rows(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let rows = levers.micro_batch_samples * space.target_tokens;
    counts_or(space.pins.count(LOSS_CHUNK_ROWS.name), CHUNKS.map(|chunk| chunk.min(rows)))
}

pub fn accumulation(space: &Space<'_>, _: &Levers) -> Vec<Value> {
    // Layer by layer every block is computed again, unless files spare that: a number of them asks for the other way.
    let asks_for_blocks = space.pins.of(RECOMPUTE_BLOCKS.name).is_some();
    let offered: &[_] = if asks_for_blocks { &["micro-batch-major"] } else { &["micro-batch-major", "layer-major"] };
    words_or(space, &ACCUMULATION, offered)
}

pub fn kept_gradient_blocks(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(_) = levers.layer_major else { return Vec::new() };
    counts_or(space.pinned_blocks(&KEPT_GRADIENT_BLOCKS), counts(space.blocks).into_iter().rev())
}

pub fn activation_offload(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(_) = levers.layer_major else { return Vec::new() };
    words_or(space, &ACTIVATION_OFFLOAD, &["none", "disk"])
}

pub fn gradient_offload(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(layers) = levers.layer_major else { return Vec::new() };
    // Where every block keeps its gradient none waits in a file.
    let offered: &[_] = if space.keeps_every_gradient(&layers) { &["none"] } else { &["none", "disk"] };
    words_or(space, &GRADIENT_OFFLOAD, offered)
}

pub fn weight_offload(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(layers) = levers.layer_major else { return Vec::new() };
    // Weights are as large as gradients and needed three times as often, so gradients go to a file before them. Memory
    // that is left then keeps gradients.
    let goes_once = layers.gradients_on_disk || space.keeps_every_gradient(&layers);
    words_or(space, &WEIGHT_OFFLOAD, if goes_once { &["none", "disk"] } else { &["none"] })
}

pub fn attention_heads(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(layers) = levers.layer_major else { return Vec::new() };
    // Beside a second pass attention outputs are little.
    let goes_once = space.keeps_every_gradient(&layers) || layers.gradients_on_disk;
    words_or(space, &ATTENTION_HEADS, if goes_once { &["recompute", "keep"] } else { &["recompute"] })
}

pub fn recompute_blocks(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let (pin, blocks) = (space.pinned_blocks(&RECOMPUTE_BLOCKS), space.blocks);
    let Some(layers) = levers.layer_major else { return counts_or(pin, counts(blocks)) };
    // Blocks that backward visits twice are computed again, whatever the number.
    if layers.goes_twice(blocks) {
        return vec![Value::Count(blocks)];
    }
    // Where nothing is computed again, attention outputs are kept in any case: offered once.
    let is_alone = layers.heads_kept || space.pins.of(ATTENTION_HEADS.name).is_some();
    let least_kept = space.pins.count(KEPT_GRADIENT_BLOCKS.name).unwrap_or(0);
    let offered = match layers {
        _ if !is_alone => vec![blocks],
        // In a file all of it costs no memory.
        LayerMajor { boundaries_on_disk: true, .. } => vec![blocks, 0],
        // In memory it is worth more than gradients are, which can wait in a file.
        LayerMajor { gradients_on_disk: true, kept_gradient_blocks, .. } if kept_gradient_blocks == least_kept => {
            counts(blocks).into_iter().rev().collect()
        }
        _ => vec![blocks],
    };
    counts_or(pin, offered)
}

pub fn blocks_in_memory(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    if !levers.layer_major.is_some_and(|layers| layers.boundaries_on_disk) {
        return Vec::new();
    }
    // Inputs alone are little.
    let end = if levers.recompute_blocks == 0 { space.blocks.max(1) } else { 1 };
    let part = space.blocks.div_ceil(PARTS).max(1);
    counts_or(space.pinned_blocks(&BLOCKS_IN_MEMORY), (0..end).step_by(part))
}

/// Counts of blocks that are offered, from none to all.
fn counts(blocks: usize) -> Vec<usize> {
    let step = blocks.div_ceil(MOST_COUNTS).max(1);
    let mut counts: Vec<usize> = (0..=blocks).step_by(step).chain([blocks]).collect();
    counts.dedup();
    counts
}

/// The sizes of the largest part where `n` is cut into 1, 2, 3 and so on parts as even as can be, each once.
fn even_cuts(n: usize) -> Vec<usize> {
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

    fn ways(pins: &Pins) -> Vec<Levers> {
        Space { pins, blocks: 3, batch_samples: 8, target_tokens: 16 }.ways_and_cuts().0
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
        // Once with the activations of no block in memory, of one, and of two.
        assert_eq!(offered(&pins, &in_files), [3, 3, 0, 0, 0]);
        let partly = |layers: &LayerMajor| in_files(layers) && layers.blocks_in_memory == 2;
        assert_eq!(offered(&pins, &partly), [0]);
        let in_memory = |layers: &LayerMajor| {
            layers.kept_gradient_blocks == 0 && !layers.boundaries_on_disk && layers.gradients_on_disk
        };
        assert_eq!(offered(&pins, &in_memory), [3, 3, 2, 1, 0]);

        // Weights go to a file when backward goes through a block once, or where that was asked for.
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
