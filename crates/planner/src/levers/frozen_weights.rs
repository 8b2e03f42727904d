//! The levers of frozen weights that stay in their files: the blocks whose weights still stay in memory, and the weights of other
//! blocks that are in memory at a time.

use memory_policy::MemorySpace;
use t5::{LayerMajor, Levers};

use super::{
    MAX_BLOCKS, counts, counts_or, in_blocks, keeps_every_gradient, layer_major, of_layers, with_words, words_or,
};
use crate::lever::{FrozenBlocks, Lever, Space, Value, Values};

const MATRIX: &str = "matrix";

/// Blocks whose weights stay in memory although other blocks' weights are in files, where none of them is trained.
pub static WEIGHT_BLOCKS_IN_MEMORY: Lever = Lever {
    name: "weight_blocks_in_memory",
    values: Values::Blocks(MAX_BLOCKS),
    meaning: "evaluation, answers and adapters with weights on disk: blocks whose weights stay in memory, decoder blocks first",
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
    let Some(FrozenBlocks { blocks, max_counts, .. }) = space.frozen.filter(|_| levers.has_weights_on_disk()) else {
        return Vec::new();
    };
    let pin = space.pins.count(WEIGHT_BLOCKS_IN_MEMORY.name).map(|pin| pin.min(blocks));
    // An adapter's gradients are a small part of a block's weights, and each of their bytes costs more in a file. So gradients stay in
    // memory first.
    let has_room = levers.layer_major.is_some_and(|layers| keeps_every_gradient(space, &layers));
    counts_or(pin, if has_room { counts(blocks, max_counts) } else { vec![0] })
}

/// Whether memory holds a block of frozen weights and a whole table at a time, or a matrix and some rows of a table.
pub static WEIGHTS_AT_A_TIME: Lever = Lever {
    name: "weights_at_a_time",
    values: Values::Words(&["block", MATRIX]),
    meaning: "evaluation, answers and adapters with weights on disk: read a block or table at a time, or a matrix or some rows of a table, again for each micro-batch",
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
    let Some(FrozenBlocks { has_larger_table, .. }) = space.frozen.filter(|_| levers.has_weights_on_disk()) else {
        return Vec::new();
    };
    if space.place == MemorySpace::Device {
        return Vec::new();
    }
    let offered: &[_] = match levers.weight_blocks_in_memory() {
        // A pass that trains nothing goes through a block once, and reads no matrix twice.
        _ if space.blocks == 0 => &[MATRIX],
        0 => &["block", MATRIX],
        _ if has_larger_table => &["block", MATRIX],
        // Keeping whole blocks in memory saves more reads.
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

    /// A plan for an adapter beside a model within this budget.
    fn plan(model: &Config, budget: Bytes, pins: &Pins) -> crate::error::Result<Plan> {
        let model = Config { lora: Some(Lora::default()), ..model.clone() };
        let options = TrainerOptions { total_steps: 10, ..TrainerOptions::default() };
        let training = Training { disk_writes: 1 << 42, base: Some(testing::STORED), ..testing::training(&options) };
        let job = Job { budgets: Budget::Explicit(budget).into(), ..testing::job(&model, training, pins) };
        Ok(crate::plan(&job, &testing::machine())?.plan)
    }

    /// The smallest budgets with a block at a time and with a matrix at a time, in MiB, rounded up to a multiple of ten.
    fn smallest(model: &Config) -> [u64; 2] {
        ["block", MATRIX].map(|word| {
            let pins = Pins::default().with(WEIGHTS_AT_A_TIME.name, Value::Word(word));
            let budgets: Vec<u64> = (10..100).map(|tens| 10 * tens).collect();
            budgets[budgets.partition_point(|mib| plan(model, Bytes::mib(*mib), &pins).is_err())]
        })
    }

    #[test]
    fn a_table_comes_by_rows_where_it_is_the_most_and_blocks_may_stay_in_memory_beside_it() {
        // 488 MiB of table in f32, beside blocks of at most 16.
        let model = Config { vocab_size: 250_112, ..Config::preset("t5-small").expect("a preset") };
        let [block, matrix] = smallest(&model);
        assert!(block - matrix > 420, "{block} {matrix}");
        let pins = Pins::default().with(WEIGHT_BLOCKS_IN_MEMORY.name, Value::Count(5));
        let plan = plan(&model, Bytes::mib(matrix + 160), &pins).expect("it fits");
        assert!(plan.step.levers.has_weights_by_matrix(), "{}", plan.bill);
        assert_eq!(plan.step.levers.weight_blocks_in_memory(), 5, "{}", plan.bill);
    }

    #[test]
    fn a_matrix_at_a_time_fits_where_a_block_does_not() {
        let model = Config::preset("t5-3b").expect("a preset");
        let fits = |mib: u64, pins: &Pins| plan(&model, Bytes::mib(mib), pins).ok();
        let [block, matrix] = smallest(&model);
        // A block of the decoder has 256 MiB in f32, its largest matrix 64, and only a few rows of the table are in memory.
        assert!((180..=200).contains(&(block - matrix)), "{block} {matrix}");
        let tight = fits(matrix, &Pins::default()).expect("the planner finds what a pin names");
        assert!(tight.step.levers.has_weights_by_matrix(), "{}", tight.bill);
        let ample = fits(20 << 10, &Pins::default()).expect("it fits");
        assert!(!ample.step.levers.has_weights_by_matrix(), "{}", ample.bill);
        let parameters = tight.bill.rows.iter().find(|row| row.name == Name::new("parameters"));
        assert!(parameters.is_some_and(|row| row.note.ends_with("; one matrix at a time in memory")), "{}", tight.bill);
    }
}
