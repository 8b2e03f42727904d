//! The levers of a card that is too small for the tensors of a step.

use memory_policy::MemorySpace;
use t5::{LayerMajor, Levers};

use super::{layer_major, of_layers, with_words, words_or};
use crate::lever::{Flag, Lever, Space, Takes, Value, Values};

/// Memory on a device for copies to and from it that overlap computation.
pub static COPY_OVERLAP: Lever = Lever {
    name: "copy_overlap",
    values: Values::Words(&["none", "block"]),
    meaning: "on a GPU: wait for copies between host and GPU, or hold one more block on the GPU so that copies overlap with computing",
    flag: Some(Flag {
        long: "copy-overlap",
        takes: Takes::Value("none|block"),
        help: "On a GPU: wait for copies between host and GPU (none), or hold one more block on the GPU so that copies overlap with computing (block) [default: none]",
        usual: |_, _| Some(Value::Word("none")),
    }),
    layer_major: Some(|value| value.is("block")),
    device_only: Some(|value| value.is("block")),
    get: |levers| of_layers(levers, |layers| Value::Word(if layers.copies_overlap { "block" } else { "none" })),
    set: |levers, value| layer_major(levers, |layers| layers.copies_overlap = value.is("block")),
    offered: copy_overlap,
    words: |levers| with_words(levers, |layers| layers.copies_overlap.then(|| "copies overlapped".to_owned())),
    moves_the_next: false,
};

fn copy_overlap(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    // Moments are copied while nothing is computed.
    let is_copied =
        |layers: &LayerMajor| layers.weights_on_disk || layers.gradients_on_disk || layers.boundaries_on_disk;
    match levers.layer_major.as_ref() {
        None => Vec::new(),
        Some(layers) if is_copied(layers) => words_or(space, &COPY_OVERLAP, &["block", "none"]),
        Some(_) => words_or(space, &COPY_OVERLAP, &["none"]),
    }
}

/// The place of tensors that are offloaded from a device.
pub static OFFLOAD_TO: Lever = Lever {
    name: "offload_to",
    values: Values::Words(&["disk", "host"]),
    meaning: "on a GPU: keep offloaded tensors in files in the output directory, or in the host's memory",
    flag: Some(Flag {
        long: "offload-to",
        takes: Takes::Value("PLACE"),
        help: "On a GPU: keep offloaded tensors in files or in the host's memory: disk, host [default: disk]",
        usual: |_, _| Some(Value::Word("disk")),
    }),
    layer_major: Some(|value| value.is("host")),
    device_only: Some(|value| value.is("host")),
    get: |levers| {
        let in_files = levers.layer_major.filter(|_| levers.keeps_anything_elsewhere());
        in_files.map(|layers| Value::Word(if layers.in_host_memory { "host" } else { "disk" }))
    },
    set: |levers, value| layer_major(levers, |layers| layers.in_host_memory = value.is("host")),
    offered: offload_to,
    words: |levers| with_words(levers, |layers| layers.in_host_memory.then(|| "in the host's memory".to_owned())),
    moves_the_next: false,
};

fn offload_to(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    if !levers.keeps_anything_elsewhere() {
        return Vec::new();
    }
    let offered: &[_] = if space.place == MemorySpace::Device { &["host", "disk"] } else { &["disk"] };
    words_or(space, &OFFLOAD_TO, offered)
}

/// Words for tensors that are in files, or beside the device.
pub(super) fn off(what: &str, is_off: bool, layers: &LayerMajor) -> Option<String> {
    is_off.then(|| if layers.in_host_memory { format!("{what} off the GPU") } else { format!("{what} on disk") })
}
