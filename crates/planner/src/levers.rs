//! The levers: one table of the settings that a plan may choose for a step.
//!
//! A row has a lever's name, the values that a pin accepts, its sentence in the list of config keys, and its flag in `bench`. It also has
//! functions that read and write the value in [`t5::Levers`], offer values given the levers before it, and word it in a plan. A new lever
//! needs a row here, a price in [`crate::Prices`], and its work in `t5`.

use memory_policy::{MemorySpace, Setting};
use serde::{Deserialize, Serialize};
use t5::{LayerMajor, Levers};

use crate::lever::{Flag, Lever, Pins, Space, Takes, Value, Values};

/// Rows of logits at a time. With the last value, logits are computed again.
const CHUNKS: [usize; 4] = [1024, 256, 64, 1];

/// The number of parts into which blocks are divided if some of them may stay in memory.
pub(crate) const PARTS: usize = 8;

/// The most values of a lever over blocks. For a deeper model the values are evenly spaced, so that planning stays quick.
pub(crate) const MAX_COUNTS: usize = 64;

const NONE_OR_DISK: Values = Values::Words(&["none", "disk"]);
const MAX_BLOCKS: usize = 100_000;

fn layer_major(levers: &mut Levers, change: impl FnOnce(&mut LayerMajor)) {
    if let Some(layers) = &mut levers.layer_major {
        change(layers);
    }
}

fn of_layers(levers: &Levers, of: impl FnOnce(&LayerMajor) -> Value) -> Option<Value> {
    levers.layer_major.as_ref().map(of)
}

fn disk(is_on_disk: bool) -> Value {
    Value::Word(if is_on_disk { "disk" } else { "none" })
}

fn is_disk(value: Value) -> bool {
    value.is("disk")
}

fn with_words(levers: &Levers, words: impl FnOnce(&LayerMajor) -> Option<String>) -> Option<String> {
    levers.layer_major.as_ref().and_then(words)
}

/// `1 block`, `2 blocks`.
pub(crate) fn in_blocks(count: usize) -> String {
    memory_policy::plural(count as u64, "block")
}

/// The pin of a lever over blocks.
fn pinned_blocks(space: &Space<'_>, lever: &Lever) -> Option<usize> {
    space.pins.count(lever.name).map(|pin| pin.min(space.blocks))
}

/// Whether every block keeps its gradient.
fn keeps_every_gradient(space: &Space<'_>, layers: &LayerMajor) -> bool {
    layers.kept_gradient_blocks == space.blocks
}

/// The pinned count, or else all offered counts.
fn counts_or(pin: Option<usize>, offered: impl IntoIterator<Item = usize>) -> Vec<Value> {
    match pin {
        Some(pin) => vec![Value::Count(pin)],
        None => offered.into_iter().map(Value::Count).collect(),
    }
}

/// The pinned word, or else all offered words.
fn words_or(space: &Space<'_>, lever: &Lever, offered: &[&'static str]) -> Vec<Value> {
    match space.pins.value(lever.name) {
        Some(pin) => vec![pin],
        None => offered.iter().map(|word| Value::Word(word)).collect(),
    }
}

/// Counts of blocks to offer, from none to all, in at most `max_counts` steps.
fn counts(blocks: usize, max_counts: usize) -> Vec<usize> {
    let step = blocks.div_ceil(max_counts).max(1);
    let mut counts: Vec<usize> = (0..=blocks).step_by(step).chain([blocks]).collect();
    counts.dedup();
    counts
}

/// The sizes of the largest part if `n` is cut evenly into 1, 2, 3 ... parts, each size once.
fn even_cuts(n: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (1..=n.max(1)).map(|parts| n.div_ceil(parts).max(1)).collect();
    sizes.dedup();
    sizes
}

/// Samples of a micro-batch.
pub static MICRO_BATCH_SAMPLES: Lever = Lever {
    name: "micro_batch_samples",
    values: Values::Count(1, 1 << 20),
    meaning: "samples in a micro-batch",
    flag: Some(Flag {
        long: "micro-batch",
        takes: Takes::Value("N"),
        help: "Samples in a micro-batch [default: chosen by the planner]",
        usual: |_, _| None,
    }),
    layer_major: None,
    device_only: None,
    get: |levers| Some(Value::Count(levers.micro_batch_samples)),
    set: |levers, value| levers.micro_batch_samples = value.count().unwrap_or(1),
    offered: micro_batch_samples,
    words: |levers| Some(format!("micro-batches of {}", levers.micro_batch_samples)),
    moves_the_next: false,
};

fn micro_batch_samples(space: &Space<'_>, _: &Levers) -> Vec<Value> {
    let pin = space.pins.count(MICRO_BATCH_SAMPLES.name).map(|pin| pin.min(space.batch_samples));
    counts_or(pin, even_cuts(space.batch_samples))
}

/// Rows of logits at a time.
pub static LOSS_CHUNK_ROWS: Lever = Lever {
    name: "loss_chunk_rows",
    values: Values::Count(1, 1 << 30),
    meaning: "rows of logits in memory at a time; below 32 logits are recomputed instead of kept",
    flag: Some(Flag {
        long: "loss-chunk-rows",
        takes: Takes::Value("N"),
        help: "Rows of logits in memory at a time [default: 256, on a GPU 1024]",
        // On an H200 a step of t5-base took 7 % less with 1,024 rows than with 256, and no less with more.
        usual: |_, place| Some(Value::Count(if place == MemorySpace::Device { 1024 } else { 256 })),
    }),
    layer_major: None,
    device_only: None,
    get: |levers| Some(Value::Count(levers.loss_chunk_rows)),
    set: |levers, value| levers.loss_chunk_rows = value.count().unwrap_or(1).max(1),
    offered: loss_chunk_rows,
    words: |_| None,
    moves_the_next: false,
};

fn loss_chunk_rows(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let rows = levers.micro_batch_samples * space.target_tokens;
    counts_or(space.pins.count(LOSS_CHUNK_ROWS.name), CHUNKS.map(|chunk| chunk.min(rows)))
}

/// Micro-batch after micro-batch, or layer after layer.
pub static ACCUMULATION: Lever = Lever {
    name: "accumulation",
    values: Values::Words(&["micro-batch-major", "layer-major"]),
    meaning: "order of a step: each micro-batch through all blocks, or each block with all micro-batches, so that one block's gradients exist at a time",
    flag: Some(Flag {
        long: "accumulation",
        takes: Takes::Value("ORDER"),
        help: "Order of a step: each micro-batch through all blocks, or each block with all micro-batches [default: micro-batch-major]",
        usual: |_, _| Some(Value::Word("micro-batch-major")),
    }),
    layer_major: None,
    device_only: None,
    get: |levers| Some(Value::Word(if levers.layer_major.is_some() { "layer-major" } else { "micro-batch-major" })),
    set: |levers, value| levers.layer_major = value.is("layer-major").then(LayerMajor::default),
    offered: accumulation,
    words: |levers| levers.layer_major.map(|_| "layer by layer".to_owned()),
    moves_the_next: true,
};

fn accumulation(space: &Space<'_>, _: &Levers) -> Vec<Value> {
    // Layer by layer, every block is computed again unless files make that unnecessary. So a pinned number of blocks asks for the other
    // order.
    let asks_for_blocks = space.pins.value(RECOMPUTE_BLOCKS.name).is_some();
    // A pin that exists only layer by layer asks for that order.
    let is_of_layers = |lever: &&Lever| {
        let says_so = |value| lever.layer_major.is_some_and(|says_so| says_so(value));
        space.pins.value(lever.name).is_some_and(says_so)
    };
    let offered: &[_] = match (LEVERS.iter().copied().any(|lever| is_of_layers(&lever)), asks_for_blocks) {
        (true, _) => &["layer-major"],
        (false, true) => &["micro-batch-major"],
        (false, false) => &["micro-batch-major", "layer-major"],
    };
    words_or(space, &ACCUMULATION, offered)
}

/// Blocks whose gradients stay between the two passes.
pub static KEPT_GRADIENT_BLOCKS: Lever = Lever {
    name: "kept_gradient_blocks",
    values: Values::Blocks(MAX_BLOCKS),
    meaning: "layer-major: blocks whose gradients stay in memory and need no second pass",
    flag: Some(Flag {
        long: "kept-gradient-blocks",
        takes: Takes::Value("K"),
        help: "Layer-major: blocks whose gradients stay in memory and need no second pass [default: 0]",
        usual: |_, _| Some(Value::Count(0)),
    }),
    layer_major: Some(|_| true),
    device_only: None,
    get: |levers| of_layers(levers, |layers| Value::Count(layers.kept_gradient_blocks)),
    set: |levers, value| layer_major(levers, |layers| layers.kept_gradient_blocks = value.count().unwrap_or(0)),
    offered: kept_gradient_blocks,
    words: |levers| {
        let kept = |layers: &LayerMajor| (layers.kept_gradient_blocks > 0).then_some(layers.kept_gradient_blocks);
        with_words(levers, |layers| kept(layers).map(|blocks| format!("gradients of {} kept", in_blocks(blocks))))
    },
    moves_the_next: false,
};

fn kept_gradient_blocks(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(_) = levers.layer_major else { return Vec::new() };
    counts_or(pinned_blocks(space, &KEPT_GRADIENT_BLOCKS), counts(space.blocks, MAX_COUNTS).into_iter().rev())
}

/// Saved activations in a file.
pub static ACTIVATION_OFFLOAD: Lever = Lever {
    name: "activation_offload",
    values: NONE_OR_DISK,
    meaning: "layer-major: keep saved activations in memory, or in a file in the output directory; auto: within disk_writes",
    flag: Some(Flag {
        long: "offload",
        takes: Takes::Directory,
        help: "Layer-major: keep saved activations in a file in this directory",
        usual: |_, _| Some(Value::Word("none")),
    }),
    layer_major: Some(is_disk),
    device_only: None,
    get: |levers| of_layers(levers, |layers| disk(layers.boundaries_on_disk)),
    set: |levers, value| layer_major(levers, |layers| layers.boundaries_on_disk = is_disk(value)),
    offered: activation_offload,
    words: |levers| {
        let what = if levers.recompute_blocks > 0 { "block inputs" } else { "activations" };
        with_words(levers, |layers| off(what, layers.boundaries_on_disk, layers))
    },
    moves_the_next: false,
};

fn activation_offload(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(_) = levers.layer_major else { return Vec::new() };
    words_or(space, &ACTIVATION_OFFLOAD, &["none", "disk"])
}

/// Gradients in a file between the two passes.
pub static GRADIENT_OFFLOAD: Lever = Lever {
    name: "gradient_offload",
    values: NONE_OR_DISK,
    meaning: "layer-major: compute other blocks' gradients in a second pass, or keep them in a file in the output directory; auto: within disk_writes",
    flag: Some(Flag {
        long: "offload-gradients",
        takes: Takes::Directory,
        help: "Layer-major: keep gradients in a file in this directory instead of computing them in a second pass",
        usual: |_, _| Some(Value::Word("none")),
    }),
    layer_major: Some(is_disk),
    device_only: None,
    get: |levers| of_layers(levers, |layers| disk(layers.gradients_on_disk)),
    set: |levers, value| layer_major(levers, |layers| layers.gradients_on_disk = is_disk(value)),
    offered: gradient_offload,
    words: |levers| with_words(levers, |layers| off("gradients", layers.gradients_on_disk, layers)),
    moves_the_next: false,
};

fn gradient_offload(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(layers) = levers.layer_major else { return Vec::new() };
    // If every block keeps its gradient, no gradient is in a file.
    let offered: &[_] = if keeps_every_gradient(space, &layers) { &["none"] } else { &["none", "disk"] };
    words_or(space, &GRADIENT_OFFLOAD, offered)
}

/// Weights in a file.
pub static WEIGHT_OFFLOAD: Lever = Lever {
    name: "weight_offload",
    values: NONE_OR_DISK,
    meaning: "layer-major: keep weights in memory, or in a file in the output directory with one block at a time in memory; auto: within disk_writes",
    flag: Some(Flag {
        long: "offload-weights",
        takes: Takes::Directory,
        help: "Layer-major: keep weights in a file in this directory, one block at a time in memory",
        usual: |_, _| Some(Value::Word("none")),
    }),
    layer_major: Some(is_disk),
    device_only: None,
    get: |levers| of_layers(levers, |layers| disk(layers.weights_on_disk)),
    set: |levers, value| layer_major(levers, |layers| layers.weights_on_disk = is_disk(value)),
    offered: weight_offload,
    words: |levers| with_words(levers, |layers| off("weights", layers.weights_on_disk, layers)),
    moves_the_next: false,
};

fn weight_offload(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(layers) = levers.layer_major else { return Vec::new() };
    // Weights are as large as gradients and needed three times as often, so gradients go to a file first. The remaining memory then keeps
    // gradients. Beside a card, the host may have room for weights but not for gradients, which are f32.
    let goes_once = layers.gradients_on_disk || keeps_every_gradient(space, &layers);
    let is_offered = goes_once || space.place == MemorySpace::Device;
    words_or(space, &WEIGHT_OFFLOAD, if is_offered { &["none", "disk"] } else { &["none"] })
}

/// The optimizer's moments in a file.
pub static OPTIMIZER_OFFLOAD: Lever = Lever {
    name: "optimizer_offload",
    values: NONE_OR_DISK,
    meaning: "layer-major: keep AdamW's moments in memory, or in a file in the output directory with some rows at a time in memory; auto: within disk_writes",
    flag: Some(Flag {
        long: "offload-optimizer",
        takes: Takes::Directory,
        help: "Layer-major: keep AdamW's moments in a file in this directory, some rows at a time in memory",
        usual: |_, _| Some(Value::Word("none")),
    }),
    layer_major: Some(is_disk),
    device_only: None,
    get: |levers| of_layers(levers, |layers| disk(layers.optimizer_on_disk)),
    set: |levers, value| layer_major(levers, |layers| layers.optimizer_on_disk = is_disk(value)),
    offered: optimizer_offload,
    words: |levers| with_words(levers, |layers| off("moments", layers.optimizer_on_disk, layers)),
    moves_the_next: false,
};

fn optimizer_offload(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(layers) = levers.layer_major else { return Vec::new() };
    // A byte of moments in a file costs as much as a byte of gradients.
    let goes_once = layers.gradients_on_disk || keeps_every_gradient(space, &layers);
    // An adapter's moments are smaller than a block's weights, too.
    let is_worth_it = space.has_large_moments && goes_once && layers.weight_blocks_in_memory == 0;
    words_or(space, &OPTIMIZER_OFFLOAD, if is_worth_it { &["none", "disk"] } else { &["none"] })
}

/// Attention outputs kept beside block inputs.
pub static ATTENTION_HEADS: Lever = Lever {
    name: "attention_heads",
    values: Values::Words(&["recompute", "keep"]),
    meaning: "layer-major: recompute attention outputs in backward, or keep them with the block inputs",
    flag: Some(Flag {
        long: "keep-heads",
        takes: Takes::Nothing,
        help: "Layer-major: keep attention outputs with the block inputs instead of recomputing them",
        usual: |_, _| Some(Value::Word("recompute")),
    }),
    layer_major: Some(|value| value.is("keep")),
    device_only: None,
    get: |levers| of_layers(levers, |layers| Value::Word(if layers.heads_kept { "keep" } else { "recompute" })),
    set: |levers, value| layer_major(levers, |layers| layers.heads_kept = value.is("keep")),
    offered: attention_heads,
    words: |levers| {
        let kept = levers.recompute_blocks > 0;
        with_words(levers, |layers| (layers.heads_kept && kept).then(|| "attention outputs kept".to_owned()))
    },
    moves_the_next: false,
};

fn attention_heads(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(layers) = levers.layer_major else { return Vec::new() };
    // Beside a second pass, attention outputs cost little.
    let goes_once = keeps_every_gradient(space, &layers) || layers.gradients_on_disk;
    words_or(space, &ATTENTION_HEADS, if goes_once { &["recompute", "keep"] } else { &["recompute"] })
}

/// Blocks that are computed again in backward.
pub static RECOMPUTE_BLOCKS: Lever = Lever {
    name: "recompute_blocks",
    values: Values::Blocks(MAX_BLOCKS),
    meaning: "blocks whose activations are recomputed in backward",
    flag: Some(Flag {
        long: "recompute",
        takes: Takes::Value("none|full|K"),
        help: "Blocks whose activations are recomputed in backward [default: none; full with --accumulation layer-major, where a number needs gradients kept or in a file]",
        usual: |pins, _| {
            let by_layer = pins.is(&ACCUMULATION, "layer-major") == Some(true);
            Some(Value::Count(if by_layer { usize::MAX } else { 0 }))
        },
    }),
    layer_major: None,
    device_only: None,
    get: |levers| Some(Value::Count(levers.recompute_blocks)),
    set: |levers, value| levers.recompute_blocks = value.count().unwrap_or(0),
    offered: recompute_blocks,
    words: |levers| (levers.recompute_blocks > 0).then(|| format!("{} recomputed", in_blocks(levers.recompute_blocks))),
    moves_the_next: false,
};

fn recompute_blocks(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let (pin, blocks) = (pinned_blocks(space, &RECOMPUTE_BLOCKS), space.blocks);
    let Some(layers) = levers.layer_major else { return counts_or(pin, counts(blocks, MAX_COUNTS)) };
    // Blocks that backward visits twice are always computed again.
    if layers.goes_twice(blocks) {
        return vec![Value::Count(blocks)];
    }
    // If nothing is computed again, attention outputs are always kept, so this choice is offered once.
    let is_alone = layers.heads_kept || space.pins.value(ATTENTION_HEADS.name).is_some();
    let least_kept = space.pins.count(KEPT_GRADIENT_BLOCKS.name).unwrap_or(0);
    let offered = match layers {
        _ if !is_alone => vec![blocks],
        // In a file, all activations cost no memory.
        LayerMajor { boundaries_on_disk: true, .. } => vec![blocks, 0],
        // In memory, activations are worth more than gradients, which can be in a file.
        LayerMajor { gradients_on_disk: true, kept_gradient_blocks, .. } if kept_gradient_blocks == least_kept => {
            counts(blocks, MAX_COUNTS).into_iter().rev().collect()
        }
        _ => vec![blocks],
    };
    counts_or(pin, offered)
}

/// Blocks whose activations stay in memory although those of others are in a file.
pub static BLOCKS_IN_MEMORY: Lever = Lever {
    name: "blocks_in_memory",
    values: Values::Blocks(MAX_BLOCKS),
    meaning: "with activations on disk: of the blocks that backward visits first, how many keep their saved activations in memory",
    flag: Some(Flag {
        long: "blocks-in-memory",
        takes: Takes::Value("K"),
        help: "With --offload: of the blocks that backward visits first, how many keep their activations in memory [default: 0]",
        usual: |_, _| Some(Value::Count(0)),
    }),
    layer_major: Some(|_| true),
    device_only: None,
    get: |levers| {
        let in_file = levers.layer_major.filter(|layers| layers.boundaries_on_disk);
        in_file.map(|layers| Value::Count(layers.blocks_in_memory))
    },
    set: |levers, value| layer_major(levers, |layers| layers.blocks_in_memory = value.count().unwrap_or(0)),
    offered: blocks_in_memory,
    words: |levers| {
        let blocks = |layers: &LayerMajor| (layers.blocks_in_memory > 0).then_some(layers.blocks_in_memory);
        with_words(levers, |layers| {
            blocks(layers).map(|blocks| format!("activations of {} in memory", in_blocks(blocks)))
        })
    },
    moves_the_next: false,
};

fn blocks_in_memory(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    if !levers.layer_major.is_some_and(|layers| layers.boundaries_on_disk) {
        return Vec::new();
    }
    // Block inputs alone are small.
    let end = if levers.recompute_blocks == 0 { space.blocks.max(1) } else { 1 };
    let part = space.blocks.div_ceil(PARTS).max(1);
    counts_or(pinned_blocks(space, &BLOCKS_IN_MEMORY), (0..end).step_by(part))
}

/// Every lever of a step, in the order in which the search sets them: the values that a lever offers depend on the levers before it.
pub static LEVERS: [&Lever; 18] = [
    &MICRO_BATCH_SAMPLES,
    &LOSS_CHUNK_ROWS,
    &ACCUMULATION,
    &KEPT_GRADIENT_BLOCKS,
    &ACTIVATION_OFFLOAD,
    &GRADIENT_OFFLOAD,
    &WEIGHT_OFFLOAD,
    &WEIGHT_BLOCKS_IN_MEMORY,
    &WEIGHTS_AT_A_TIME,
    &OPTIMIZER_OFFLOAD,
    &ATTENTION_HEADS,
    &RECOMPUTE_BLOCKS,
    &BLOCKS_IN_MEMORY,
    &OFFLOAD_TO,
    &COPY_OVERLAP,
    &COMMUNICATION_OVERLAP,
    &WEIGHT_COPIES,
    &RECORDED_MICRO_BATCHES,
];

/// Levers of feeding a step. They are only pins, because all three are offered together.
pub static FEEDING_LEVERS: [(&str, Values, &str); 3] = [
    (PREFETCH_BATCHES, Values::Count(1, 1 << 20), "optimizer batches that the loader prepares ahead"),
    (DECODE_THREADS, Values::Count(1, 1024), "threads that read and tokenize"),
    (
        DATASET_RESIDENCY,
        Values::Words(&["in_memory", "row_group_cache", "ultra_low_mem"]),
        "form in which rows stay in memory",
    ),
];

pub(crate) const PREFETCH_BATCHES: &str = "prefetch_batches";
pub(crate) const DECODE_THREADS: &str = "decode_threads";
pub(crate) const DATASET_RESIDENCY: &str = "dataset_residency";

impl Pins {
    /// The name of a pin that needs layer-major accumulation while another pin asks for micro-batch-major.
    pub fn contradiction(&self) -> Option<&'static str> {
        self.is(&ACCUMULATION, "micro-batch-major").filter(|is| *is)?;
        let says_layers = |lever: &&&Lever| {
            lever.layer_major.zip(self.value(lever.name)).is_some_and(|(says_layers, value)| says_layers(value))
        };
        LEVERS.iter().find(says_layers).map(|lever| lever.name)
    }

    /// The first pin that cannot be carried out at `place`: its lever and its value.
    pub fn that_fails_at(&self, place: MemorySpace) -> Option<(&'static Lever, Value)> {
        let pinned = LEVERS.iter().filter_map(|lever| Some((*lever, self.value(lever.name)?)));
        pinned.into_iter().find(|(lever, value)| !lever.works_at(place, *value))
    }
}

/// The name, values and sentence of every pin, in the order of the list of config keys.
pub fn lever_of_a_pin() -> impl Iterator<Item = (&'static str, Values, &'static str)> {
    let levers = LEVERS.iter().map(|lever| (lever.name, lever.values, lever.meaning));
    levers.chain(FEEDING_LEVERS)
}

/// The levers of a step, and the number of samples that an evaluation computes at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The step's levers.
    #[serde(flatten)]
    pub levers: Levers,
    /// Samples evaluated or generated at a time. It follows from the levers.
    #[serde(default)]
    pub evaluation_samples: usize,
    /// Whether nothing is trained.
    #[serde(skip)]
    pub is_inference: bool,
}

/// Levers of inference. It holds one matrix of frozen weights at a time unless a pin says otherwise, so plans do not mention that lever.
static OF_INFERENCE: [&Lever; 5] =
    [&MICRO_BATCH_SAMPLES, &LOSS_CHUNK_ROWS, &WEIGHT_OFFLOAD, &WEIGHT_BLOCKS_IN_MEMORY, &OFFLOAD_TO];

impl Step {
    /// The rows of the table that have a meaning here.
    fn table(&self) -> &'static [&'static Lever] {
        if self.is_inference { &OF_INFERENCE } else { &LEVERS }
    }
}

impl Setting for Step {
    fn in_words(&self) -> String {
        let words = self.table().iter().filter_map(|lever| (lever.words)(&self.levers));
        words.collect::<Vec<_>>().join(", ")
    }

    fn levers(&self) -> Vec<(&'static str, String)> {
        let value = |lever: &&Lever| {
            // For a lever that exists only on cards, a value that every place has is not shown.
            let is_worth_it = |value: &Value| lever.device_only.is_none_or(|is_device_only| is_device_only(*value));
            let value = (lever.get)(&self.levers).filter(is_worth_it)?;
            // A lever that moves the levers after it is shown with their values.
            Some((
                lever.name,
                if lever.moves_the_next { in_words_from(lever, &self.levers, value) } else { value.shown() },
            ))
        };
        self.table().iter().filter_map(value).collect()
    }

    fn differs_only_in(&self, lever: &str, other: &Self) -> bool {
        let Some(place) = LEVERS.iter().position(|one| one.name == lever) else { return false };
        let end = if LEVERS[place].moves_the_next { LEVERS.len() } else { place + 1 };
        let moved = LEVERS[place..end].iter().fold(self.levers, |levers, lever| match (lever.get)(&other.levers) {
            Some(value) => lever.with(&levers, value),
            None => levers,
        });
        moved == other.levers
    }

    fn does_the_same_as(&self, other: &Self) -> bool {
        self.levers == other.levers
    }

    fn uses_files(&self) -> bool {
        self.levers.uses_files()
    }
}

fn in_words_from(lever: &Lever, levers: &Levers, value: Value) -> String {
    let next = LEVERS.iter().skip_while(|one| one.name != lever.name).skip(1);
    let words = std::iter::once(value.shown()).chain(next.filter_map(|next| (next.words)(levers)));
    words.collect::<Vec<_>>().join(", ")
}

mod frozen_weights;
mod offloaded_to_host;
mod overlap;
mod recorded_micro_batches;
mod weight_copies;
pub use frozen_weights::{WEIGHT_BLOCKS_IN_MEMORY, WEIGHTS_AT_A_TIME};
use offloaded_to_host::off;
pub use offloaded_to_host::{COPY_OVERLAP, OFFLOAD_TO};
pub use overlap::COMMUNICATION_OVERLAP;
pub use recorded_micro_batches::RECORDED_MICRO_BATCHES;
pub use weight_copies::WEIGHT_COPIES;

#[cfg(test)]
mod tests;
