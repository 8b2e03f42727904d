//! The lever of a card that multiplies bf16 and keeps weights in f32.

use t5::Levers;

use super::words_or;
use crate::lever::{Lever, Space, Value, Values};

/// Weights in bf16 beside those in f32.
pub static WEIGHT_COPIES: Lever = Lever {
    name: "weight_copies",
    values: Values::Words(&["none", "bf16"]),
    meaning: "on a GPU, bf16 with f32 weights: cast a weight for each product, or keep a bf16 copy that is made anew after each update",
    flag: None,
    layer_major: None,
    device_only: Some(|value| value.is("bf16")),
    get: |levers| Some(Value::Word(if levers.weight_copies { "bf16" } else { "none" })),
    set: |levers, value| levers.weight_copies = value.is("bf16"),
    offered: weight_copies,
    words: |levers: &Levers| levers.weight_copies.then(|| "weights held in bf16, too".to_owned()),
    moves_the_next: false,
};

fn weight_copies(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    // A weight that comes only for its part of a pass would bring its copy along, or be cast again.
    let offered: &[&str] = match levers.has_weights_on_disk() {
        false if space.casts_weights => &["bf16", "none"],
        // Copies of an adapter are small beside the other bytes of its weights.
        false if space.casts_adapter => &["bf16"],
        _ => &["none"],
    };
    words_or(space, &WEIGHT_COPIES, offered)
}
