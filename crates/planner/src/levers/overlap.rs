//! The lever of several processes.

use t5::Levers;

use super::{layer_major, of_layers, with_words, words_or};
use crate::lever::{Lever, Space, Value, Values};

/// Memory for a block's gradients and weights on their way between processes.
pub static COMMUNICATION_OVERLAP: Lever = Lever {
    name: "communication_overlap",
    values: Values::Words(&["none", "block"]),
    meaning: "layer-major, several processes: wait while gradients and weights are sent, or hold one more block so that sending overlaps with computing; auto: none with virtual shards",
    flag: None,
    layer_major: Some(|value| value.is("block")),
    device_only: None,
    get: |levers| of_layers(levers, |layers| Value::Word(if layers.overlaps { "block" } else { "none" })),
    set: |levers, value| layer_major(levers, |layers| layers.overlaps = value.is("block")),
    offered: communication_overlap,
    words: |levers| with_words(levers, |layers| layers.overlaps.then(|| "communication overlapped".to_owned())),
    moves_the_next: false,
};

fn communication_overlap(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    if levers.layer_major.is_none() {
        return Vec::new();
    }
    words_or(space, &COMMUNICATION_OVERLAP, if space.has_others { &["block", "none"] } else { &["none"] })
}
