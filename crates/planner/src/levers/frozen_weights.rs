//! The levers of weights that nobody changes and that stay in their files: which blocks have them in memory nevertheless, and how many of the
//! others are there at a time.

use memory_policy::Place;
use t5::{LayerMajor, Levers};

use super::{
    MOST_BLOCKS, counts, counts_or, in_blocks, keeps_every_gradient, layer_major, of_layers, with_words, words_or,
};
use crate::lever::{FrozenBlocks, Lever, Space, Value, Values};

const MATRIX: &str = "matrix";

/// Blocks whose weights stay in memory although those of others lie in files, where none of them is trained.
pub static WEIGHT_BLOCKS_IN_MEMORY: Lever = Lever {
    name: "weight_blocks_in_memory",
    values: Values::Blocks(MOST_BLOCKS),
    meaning: "evaluation, answers and adapters with weights on disk: blocks whose weights stay in memory, those of the decoder first",
    flag: None,
    layer_major: None,
    device_only: None,
    get: |levers| of_layers(levers, |layers| Value::Count(layers.weight_blocks_in_memory)),
    set: |levers, value| layer_major(levers, |layers| layers.weight_blocks_in_memory = value.count().unwrap_or(0)),
    offered: weight_blocks_in_memory,
    words: |levers| {
        let blocks =
            |layers: &LayerMajor| (layers.weight_blocks_in_memory > 0).then_some(layers.weight_blocks_in_memory);
        with_words(levers, |layers| blocks(layers).map(|blocks| format!("weights of {} in memory", in_blocks(blocks))))
    },
    moves_the_next: false,
};

fn weight_blocks_in_memory(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(FrozenBlocks { blocks, most_counts }) = space.frozen.filter(|_| levers.has_weights_on_disk()) else {
        return Vec::new();
    };
    let pin = space.pins.count(WEIGHT_BLOCKS_IN_MEMORY.name).map(|pin| pin.min(blocks));
    // An adapter's gradients are a small part of a block's weights, and a file costs each byte of theirs more: they stay first.
    let has_room = levers.layer_major.is_some_and(|layers| keeps_every_gradient(space, &layers));
    counts_or(pin, if has_room { counts(blocks, most_counts) } else { vec![0] })
}

/// A block of frozen weights at a time, or a matrix.
pub static WEIGHTS_AT_A_TIME: Lever = Lever {
    name: "weights_at_a_time",
    values: Values::Words(&["block", MATRIX]),
    meaning: "evaluation, answers and adapters with weights on disk: hold those of one block in memory, or of one matrix, which each micro-batch reads again",
    flag: None,
    layer_major: None,
    device_only: None,
    get: |levers| {
        let by_matrix = |layers: &LayerMajor| Value::Word(if layers.weights_by_matrix { MATRIX } else { "block" });
        levers.has_weights_on_disk().then(|| of_layers(levers, by_matrix)).flatten()
    },
    set: |levers, value| layer_major(levers, |layers| layers.weights_by_matrix = value.is(MATRIX)),
    offered: weights_at_a_time,
    words: |levers| levers.has_weights_by_matrix().then(|| "a matrix at a time".to_owned()),
    moves_the_next: false,
};

fn weights_at_a_time(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    if space.frozen.is_none() || space.place == Place::Device || !levers.has_weights_on_disk() {
        return Vec::new();
    }
    let offered: &[_] = match levers.weight_blocks_in_memory() {
        // A pass that trains nothing goes through a block once, and reads no matrix twice.
        _ if space.blocks == 0 => &[MATRIX],
        0 => &["block", MATRIX],
        // Memory for blocks that stay there spares more reads.
        _ => &["block"],
    };
    words_or(space, &WEIGHTS_AT_A_TIME, offered)
}

#[cfg(test)]
mod tests {
    use memory_policy::{Budget, Bytes, Name};
    use t5::{Config, Lora};
    use trainer::TrainerOptions;

    use super::*;
    use crate::job::{Job, Training};
    use crate::lever::Pins;
    use crate::{Plan, testing};

    /// A plan for an adapter beside t5-3b within this budget.
    fn plan(budget: Bytes, pins: &Pins) -> crate::error::Result<Plan> {
        let model = Config { lora: Some(Lora::default()), ..Config::preset("t5-3b").expect("a preset") };
        let options = TrainerOptions { total_steps: 10, ..TrainerOptions::default() };
        let training = Training { disk_writes: 1 << 42, base: Some(testing::STORED), ..testing::training(&options) };
        let job = Job { budgets: Budget::Explicit(budget).into(), ..testing::job(&model, training, pins) };
        Ok(crate::plan(&job, &testing::machine())?.plan)
    }

    #[test]
    fn a_matrix_at_a_time_fits_where_a_block_does_not() {
        let pinned = |word| Pins::default().with(WEIGHTS_AT_A_TIME.name, Value::Word(word));
        let fits = |mib: u64, pins: &Pins| plan(Bytes::mib(mib), pins).ok();
        // The first of the budgets that fits.
        let smallest = |pins: &Pins| {
            let budgets: Vec<u64> = (10..100).map(|tens| 10 * tens).collect();
            budgets[budgets.partition_point(|mib| fits(*mib, pins).is_none())]
        };
        let [block, matrix] = ["block", MATRIX].map(|word| smallest(&pinned(word)));
        // A block of the decoder has 256 MiB in f32, its largest matrix 64 and the table 126.
        assert!((130..=200).contains(&(block - matrix)), "{block} {matrix}");
        let tight = fits(matrix, &Pins::default()).expect("the planner finds what a pin names");
        assert!(tight.step.levers.has_weights_by_matrix(), "{}", tight.bill);
        let ample = fits(20 << 10, &Pins::default()).expect("it fits");
        assert!(!ample.step.levers.has_weights_by_matrix(), "{}", ample.bill);
        let parameters = tight.bill.rows.iter().find(|row| row.name == Name::new("parameters"));
        assert!(parameters.is_some_and(|row| row.note.ends_with("; one matrix at a time in memory")), "{}", tight.bill);
    }
}
