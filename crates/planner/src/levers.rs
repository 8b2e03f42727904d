//! The levers: one table of what a plan may choose for a step.
//!
//! A row says a lever's name, the values that a pin may have, its sentence in the list of config keys, its flag in
//! `bench`, how it is read from and written to [`t5::Levers`], which values are offered after the levers before it, and
//! its words in a plan. A new lever is a row here, a price in [`crate::Prices`], and its work in `t5`.

use memory_policy::Setting;
use serde::{Deserialize, Serialize};
use t5::{LayerMajor, Levers};

use crate::search::{self, Space};

/// A value of a lever, as a pin names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// How many.
    Count(usize),
    /// Which.
    Word(&'static str),
}

impl Value {
    /// The count; none where it is a word.
    pub fn count(self) -> Option<usize> {
        if let Self::Count(count) = self { Some(count) } else { None }
    }

    pub(crate) fn is(self, word: &str) -> bool {
        matches!(self, Self::Word(other) if other == word)
    }

    fn shown(self) -> String {
        match self {
            Self::Count(count) => count.to_string(),
            Self::Word(word) => word.to_owned(),
        }
    }
}

/// The values that a pin may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// A whole number from the first to the last.
    Count(usize, usize),
    /// A number of blocks, at most; more than there are means all.
    Blocks(usize),
    /// One of these.
    Words(&'static [&'static str]),
}

impl Values {
    /// The last of the words.
    pub fn last(self) -> Option<Value> {
        if let Self::Words(words) = self { words.last().map(|word| Value::Word(word)) } else { None }
    }

    /// The word of the list that is `text`.
    pub fn word(self, text: &str) -> Option<Value> {
        let Self::Words(words) = self else { return None };
        words.iter().find(|word| **word == text).map(|word| Value::Word(word))
    }
}

/// The flag of `bench` for a lever.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// `--LONG`
    pub long: &'static str,
    /// The argument after it.
    pub takes: Takes,
    /// Its line in the help.
    pub help: &'static str,
    /// Beside these pins, the value where no flag names one and no budget leaves it to the planner; `None`: the planner's
    /// choice.
    pub usual: fn(&Pins) -> Option<Value>,
}

/// The argument after a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// The value, which the help calls so.
    Value(&'static str),
    /// Nothing: the flag is the last of the lever's words.
    Nothing,
    /// A directory for the file that the last of the lever's words asks for.
    Directory,
}

/// A row of the table.
#[derive(Debug)]
pub struct Lever {
    /// `memory.NAME` pins it, and explanations call it so.
    pub name: &'static str,
    /// The values that a pin may have.
    pub values: Values,
    /// Its sentence in the list of config keys.
    pub meaning: &'static str,
    /// Its flag in `bench`, where it has one.
    pub flag: Option<Flag>,
    /// Whether it is a part of layer-major accumulation: values that say so, where others would not.
    pub layer_major: Option<fn(Value) -> bool>,
    /// Its value; none where it has no meaning under the others.
    get: fn(&Levers) -> Option<Value>,
    /// Sets it, where it has a meaning.
    set: fn(&mut Levers, Value),
    /// Values that are offered after those that the levers before it have; none: leave it.
    offered: fn(&Space<'_>, &Levers) -> Vec<Value>,
    /// Its value in a plan's last line; none: not worth a word.
    words: fn(&Levers) -> Option<String>,
    /// Whether the levers after it move with it.
    moves_the_next: bool,
}

impl Lever {
    /// Values that are offered after those that the levers before it have; none: leave it.
    pub(crate) fn offered(&self, space: &Space<'_>, so_far: &Levers) -> Vec<Value> {
        (self.offered)(space, so_far)
    }

    /// These levers with another value of this one.
    pub(crate) fn with(&self, levers: &Levers, value: Value) -> Levers {
        let mut levers = *levers;
        (self.set)(&mut levers, value);
        levers
    }

    /// Whether a plan with these levers writes a file because of this one.
    pub(crate) fn writes_a_file(&self, levers: &Levers) -> bool {
        (self.get)(levers).is_some_and(|value| value.is("disk"))
    }
}

const NONE_OR_DISK: Values = Values::Words(&["none", "disk"]);
const MOST_BLOCKS: usize = 100_000;

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

/// Samples of a micro-batch.
pub static MICRO_BATCH_SAMPLES: Lever = Lever {
    name: "micro_batch_samples",
    values: Values::Count(1, 1 << 20),
    meaning: "samples in a micro-batch",
    flag: Some(Flag {
        long: "micro-batch",
        takes: Takes::Value("N"),
        help: "Samples in a micro-batch [default: chosen by the planner]",
        usual: |_| None,
    }),
    layer_major: None,
    get: |levers| Some(Value::Count(levers.micro_batch_samples)),
    set: |levers, value| levers.micro_batch_samples = value.count().unwrap_or(1),
    offered: search::micro_batch_samples,
    words: |levers| Some(format!("micro-batches of {}", levers.micro_batch_samples)),
    moves_the_next: false,
};

/// Rows of logits at a time.
pub static LOSS_CHUNK_ROWS: Lever = Lever {
    name: "loss_chunk_rows",
    values: Values::Count(1, 1 << 30),
    meaning: "rows of logits in memory at a time; below 32 logits are recomputed instead of kept",
    flag: Some(Flag {
        long: "loss-chunk-rows",
        takes: Takes::Value("N"),
        help: "Rows of logits in memory at a time [default: 256]",
        usual: |_| Some(Value::Count(256)),
    }),
    layer_major: None,
    get: |levers| Some(Value::Count(levers.loss_chunk_rows)),
    set: |levers, value| levers.loss_chunk_rows = value.count().unwrap_or(1).max(1),
    offered: search::loss_chunk_rows,
    words: |_| None,
    moves_the_next: false,
};

/// Micro-batch after micro-batch, or layer after layer.
pub static ACCUMULATION: Lever = Lever {
    name: "accumulation",
    values: Values::Words(&["micro-batch-major", "layer-major"]),
    meaning: "order of a step: each micro-batch through all blocks, or each block with all micro-batches, so that one block's gradients exist at a time",
    flag: Some(Flag {
        long: "accumulation",
        takes: Takes::Value("ORDER"),
        help: "Order of a step: each micro-batch through all blocks, or each block with all micro-batches [default: micro-batch-major]",
        usual: |_| Some(Value::Word("micro-batch-major")),
    }),
    layer_major: None,
    get: |levers| Some(Value::Word(if levers.layer_major.is_some() { "layer-major" } else { "micro-batch-major" })),
    set: |levers, value| levers.layer_major = value.is("layer-major").then(LayerMajor::default),
    offered: search::accumulation,
    words: |levers| levers.layer_major.map(|_| "layer by layer".to_owned()),
    moves_the_next: true,
};

/// Blocks whose gradients stay between the two passes.
pub static KEPT_GRADIENT_BLOCKS: Lever = Lever {
    name: "kept_gradient_blocks",
    values: Values::Blocks(MOST_BLOCKS),
    meaning: "layer-major: blocks whose gradients stay in memory and need no second pass",
    flag: Some(Flag {
        long: "kept-gradient-blocks",
        takes: Takes::Value("K"),
        help: "Layer-major: blocks whose gradients stay in memory and need no second pass [default: 0]",
        usual: |_| Some(Value::Count(0)),
    }),
    layer_major: Some(|_| true),
    get: |levers| of_layers(levers, |layers| Value::Count(layers.kept_gradient_blocks)),
    set: |levers, value| layer_major(levers, |layers| layers.kept_gradient_blocks = value.count().unwrap_or(0)),
    offered: search::kept_gradient_blocks,
    words: |levers| {
        let kept = |layers: &LayerMajor| (layers.kept_gradient_blocks > 0).then_some(layers.kept_gradient_blocks);
        with_words(levers, |layers| kept(layers).map(|blocks| format!("gradients of {blocks} blocks kept")))
    },
    moves_the_next: false,
};

/// Saved activations in a file.
pub static ACTIVATION_OFFLOAD: Lever = Lever {
    name: "activation_offload",
    values: NONE_OR_DISK,
    meaning: "layer-major: keep saved activations in memory, or in a file in the output directory; auto: within disk_writes",
    flag: Some(Flag {
        long: "offload",
        takes: Takes::Directory,
        help: "Layer-major: keep saved activations in a file in this directory",
        usual: |_| Some(Value::Word("none")),
    }),
    layer_major: Some(is_disk),
    get: |levers| of_layers(levers, |layers| disk(layers.boundaries_on_disk)),
    set: |levers, value| layer_major(levers, |layers| layers.boundaries_on_disk = is_disk(value)),
    offered: search::activation_offload,
    words: |levers| {
        let what = if levers.recompute_blocks > 0 { "block inputs on disk" } else { "activations on disk" };
        with_words(levers, |layers| layers.boundaries_on_disk.then(|| what.to_owned()))
    },
    moves_the_next: false,
};

/// Gradients in a file between the two passes.
pub static GRADIENT_OFFLOAD: Lever = Lever {
    name: "gradient_offload",
    values: NONE_OR_DISK,
    meaning: "layer-major: compute other blocks' gradients in a second pass, or keep them in a file in the output directory; auto: within disk_writes",
    flag: Some(Flag {
        long: "offload-gradients",
        takes: Takes::Directory,
        help: "Layer-major: keep gradients in a file in this directory instead of computing them in a second pass",
        usual: |_| Some(Value::Word("none")),
    }),
    layer_major: Some(is_disk),
    get: |levers| of_layers(levers, |layers| disk(layers.gradients_on_disk)),
    set: |levers, value| layer_major(levers, |layers| layers.gradients_on_disk = is_disk(value)),
    offered: search::gradient_offload,
    words: |levers| with_words(levers, |layers| layers.gradients_on_disk.then(|| "gradients on disk".to_owned())),
    moves_the_next: false,
};

/// Weights in a file.
pub static WEIGHT_OFFLOAD: Lever = Lever {
    name: "weight_offload",
    values: NONE_OR_DISK,
    meaning: "layer-major: keep weights in memory, or in a file in the output directory with one block at a time in memory; auto: within disk_writes",
    flag: Some(Flag {
        long: "offload-weights",
        takes: Takes::Directory,
        help: "Layer-major: keep weights in a file in this directory, one block at a time in memory",
        usual: |_| Some(Value::Word("none")),
    }),
    layer_major: Some(is_disk),
    get: |levers| of_layers(levers, |layers| disk(layers.weights_on_disk)),
    set: |levers, value| layer_major(levers, |layers| layers.weights_on_disk = is_disk(value)),
    offered: search::weight_offload,
    words: |levers| with_words(levers, |layers| layers.weights_on_disk.then(|| "weights on disk".to_owned())),
    moves_the_next: false,
};

/// Attention outputs kept beside block inputs.
pub static ATTENTION_HEADS: Lever = Lever {
    name: "attention_heads",
    values: Values::Words(&["recompute", "keep"]),
    meaning: "layer-major: recompute attention outputs in backward, or keep them with the block inputs",
    flag: Some(Flag {
        long: "keep-heads",
        takes: Takes::Nothing,
        help: "Layer-major: keep attention outputs with the block inputs instead of recomputing them",
        usual: |_| Some(Value::Word("recompute")),
    }),
    layer_major: Some(|value| value.is("keep")),
    get: |levers| of_layers(levers, |layers| Value::Word(if layers.heads_kept { "keep" } else { "recompute" })),
    set: |levers, value| layer_major(levers, |layers| layers.heads_kept = value.is("keep")),
    offered: search::attention_heads,
    words: |levers| {
        let kept = levers.recompute_blocks > 0;
        with_words(levers, |layers| (layers.heads_kept && kept).then(|| "attention outputs kept".to_owned()))
    },
    moves_the_next: false,
};

/// Blocks that are computed again in backward.
pub static RECOMPUTE_BLOCKS: Lever = Lever {
    name: "recompute_blocks",
    values: Values::Blocks(MOST_BLOCKS),
    meaning: "blocks whose activations are recomputed in backward",
    flag: Some(Flag {
        long: "recompute",
        takes: Takes::Value("none|full|K"),
        help: "Blocks whose activations are recomputed in backward [default: none; full with --accumulation layer-major, where a number needs gradients kept or in a file]",
        usual: |pins| {
            let by_layer = pins.is(&ACCUMULATION, "layer-major") == Some(true);
            Some(Value::Count(if by_layer { usize::MAX } else { 0 }))
        },
    }),
    layer_major: None,
    get: |levers| Some(Value::Count(levers.recompute_blocks)),
    set: |levers, value| levers.recompute_blocks = value.count().unwrap_or(0),
    offered: search::recompute_blocks,
    words: |levers| (levers.recompute_blocks > 0).then(|| format!("{} blocks recomputed", levers.recompute_blocks)),
    moves_the_next: false,
};

/// Blocks whose activations stay in memory although those of others lie in a file.
pub static BLOCKS_IN_MEMORY: Lever = Lever {
    name: "blocks_in_memory",
    values: Values::Blocks(MOST_BLOCKS),
    meaning: "with activations on disk: of the blocks that backward visits first, how many keep their saved activations in memory",
    flag: Some(Flag {
        long: "blocks-in-memory",
        takes: Takes::Value("K"),
        help: "With --offload: of the blocks that backward visits first, how many keep their activations in memory [default: 0]",
        usual: |_| Some(Value::Count(0)),
    }),
    layer_major: Some(|_| true),
    get: |levers| {
        let in_file = levers.layer_major.filter(|layers| layers.boundaries_on_disk);
        in_file.map(|layers| Value::Count(layers.blocks_in_memory))
    },
    set: |levers, value| layer_major(levers, |layers| layers.blocks_in_memory = value.count().unwrap_or(0)),
    offered: search::blocks_in_memory,
    words: |levers| {
        let blocks = |layers: &LayerMajor| (layers.blocks_in_memory > 0).then_some(layers.blocks_in_memory);
        with_words(levers, |layers| blocks(layers).map(|blocks| format!("activations of {blocks} blocks in memory")))
    },
    moves_the_next: false,
};

/// Every lever of a step, in the order in which the search sets them: what a lever offers depends on those before it.
pub static LEVERS: [&Lever; 10] = [
    &MICRO_BATCH_SAMPLES,
    &LOSS_CHUNK_ROWS,
    &ACCUMULATION,
    &KEPT_GRADIENT_BLOCKS,
    &ACTIVATION_OFFLOAD,
    &GRADIENT_OFFLOAD,
    &WEIGHT_OFFLOAD,
    &ATTENTION_HEADS,
    &RECOMPUTE_BLOCKS,
    &BLOCKS_IN_MEMORY,
];

/// Levers of what feeds a step: pins alone, because they are offered together.
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

/// Values that are not the planner's to choose, by the names of their levers. The default pins nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins(Vec<(&'static str, Value)>);

/// Nothing pinned.
pub(crate) static NO_PINS: Pins = Pins(Vec::new());

impl Pins {
    /// These, and one more.
    #[must_use]
    pub fn with(mut self, lever: &'static str, value: Value) -> Self {
        self.0.retain(|(name, _)| *name != lever);
        self.0.push((lever, value));
        self
    }

    /// The pinned value of the lever of this name.
    pub fn of(&self, lever: &str) -> Option<Value> {
        self.0.iter().find(|(name, _)| *name == lever).map(|(_, value)| *value)
    }

    /// The pinned count of the lever of this name.
    pub fn count(&self, lever: &str) -> Option<usize> {
        self.of(lever).and_then(Value::count)
    }

    /// Whether the lever of this name is pinned to this word; none where it is not pinned.
    pub(crate) fn is(&self, lever: &Lever, word: &str) -> Option<bool> {
        self.of(lever.name).map(|value| value.is(word))
    }

    /// A pin that says layer-major accumulation while another says micro-batch-major.
    pub fn contradiction(&self) -> Option<&'static str> {
        self.is(&ACCUMULATION, "micro-batch-major").filter(|is| *is)?;
        let says_layers = |lever: &&&Lever| {
            lever.layer_major.zip(self.of(lever.name)).is_some_and(|(says_layers, value)| says_layers(value))
        };
        LEVERS.iter().find(says_layers).map(|lever| lever.name)
    }
}

/// The name, values and sentence of every pin, in the order of the list of config keys.
pub fn lever_of_a_pin() -> impl Iterator<Item = (&'static str, Values, &'static str)> {
    let levers = LEVERS.iter().map(|lever| (lever.name, lever.values, lever.meaning));
    levers.chain(FEEDING_LEVERS)
}

/// How a step is carried out, and how many samples an evaluation takes at a time beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The step's levers.
    #[serde(flatten)]
    pub levers: Levers,
    /// Samples evaluated or generated at a time. It follows from the levers.
    #[serde(default)]
    pub evaluation_samples: usize,
}

impl Setting for Step {
    fn in_words(&self) -> String {
        let words = LEVERS.iter().filter_map(|lever| (lever.words)(&self.levers));
        words.collect::<Vec<_>>().join(", ")
    }

    fn levers(&self) -> Vec<(&'static str, String)> {
        let value = |lever: &&Lever| {
            let value = (lever.get)(&self.levers)?;
            // The levers that move with it say what it comes with.
            Some((
                lever.name,
                if lever.moves_the_next { in_words_from(lever, &self.levers, value) } else { value.shown() },
            ))
        };
        LEVERS.iter().filter_map(value).collect()
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
}

fn in_words_from(lever: &Lever, levers: &Levers, value: Value) -> String {
    let next = LEVERS.iter().skip_while(|one| one.name != lever.name).skip(1);
    let words = std::iter::once(value.shown()).chain(next.filter_map(|next| (next.words)(levers)));
    words.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lever_reads_what_it_sets_and_names_are_unique() {
        let layers = Levers {
            layer_major: Some(LayerMajor { boundaries_on_disk: true, ..LayerMajor::default() }),
            ..Levers::default()
        };
        for (index, lever) in LEVERS.iter().enumerate() {
            assert!(LEVERS[..index].iter().all(|earlier| earlier.name != lever.name), "{} is there twice", lever.name);
            let values = match lever.values {
                Values::Count(least, _) => vec![Value::Count(least + 1), Value::Count(least + 5)],
                Values::Blocks(_) => vec![Value::Count(0), Value::Count(7)],
                Values::Words(words) => words.iter().map(|word| Value::Word(word)).collect(),
            };
            for value in values {
                assert_eq!((lever.get)(&lever.with(&layers, value)), Some(value), "{}", lever.name);
            }
        }
    }

    #[test]
    fn a_plan_says_its_levers_in_words() {
        let plain = Levers { micro_batch_samples: 4, loss_chunk_rows: 256, ..Levers::default() };
        let step = |levers| Step { levers, evaluation_samples: 1 };
        assert_eq!(step(plain).in_words(), "micro-batches of 4");
        let layers = LayerMajor {
            kept_gradient_blocks: 2,
            boundaries_on_disk: true,
            weights_on_disk: true,
            ..LayerMajor::default()
        };
        let by_layer = Levers { layer_major: Some(layers), recompute_blocks: 3, ..plain };
        let words = "micro-batches of 4, layer by layer, gradients of 2 blocks kept, block inputs on disk, weights on disk, 3 blocks recomputed";
        assert_eq!(step(by_layer).in_words(), words);
    }

    #[test]
    fn a_step_differs_only_in_accumulation_whatever_moves_with_it() {
        let plain = Step {
            levers: Levers { micro_batch_samples: 4, loss_chunk_rows: 256, ..Levers::default() },
            ..Step::default()
        };
        let layers = LayerMajor { kept_gradient_blocks: 2, gradients_on_disk: true, ..LayerMajor::default() };
        let by_layer =
            Step { levers: Levers { layer_major: Some(layers), recompute_blocks: 3, ..plain.levers }, ..plain };
        let smaller = Step { levers: Levers { micro_batch_samples: 2, ..by_layer.levers }, ..plain };
        for (one, other) in [(plain, by_layer), (by_layer, plain)] {
            assert!(one.differs_only_in(ACCUMULATION.name, &other));
            assert!(!one.differs_only_in(RECOMPUTE_BLOCKS.name, &other));
        }
        assert!(!plain.differs_only_in(ACCUMULATION.name, &smaller));
        assert!(by_layer.differs_only_in(MICRO_BATCH_SAMPLES.name, &smaller));
    }

    #[test]
    fn pins_that_contradict_each_other_are_named() {
        let pins = Pins::default().with("accumulation", Value::Word("micro-batch-major"));
        assert_eq!(pins.contradiction(), None);
        assert_eq!(pins.clone().with("gradient_offload", Value::Word("none")).contradiction(), None);
        assert_eq!(
            pins.clone().with("gradient_offload", Value::Word("disk")).contradiction(),
            Some("gradient_offload")
        );
        assert_eq!(pins.with("kept_gradient_blocks", Value::Count(0)).contradiction(), Some("kept_gradient_blocks"));
    }

    #[test]
    fn a_step_is_written_as_plain_numbers() {
        let step = Step {
            levers: Levers { micro_batch_samples: 4, loss_chunk_rows: 256, ..Levers::default() },
            evaluation_samples: 2,
        };
        let json = serde_json::to_value(step).unwrap();
        let expected = serde_json::json!({"micro_batch_samples": 4, "recompute_blocks": 0, "loss_chunk_rows": 256,
            "layer_major": null, "evaluation_samples": 2});
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_value::<Step>(json).unwrap(), step);
    }
}
