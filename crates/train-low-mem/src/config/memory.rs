//! `memory.*`: the budgets, and what the policy may not choose.

use super::pin;
use super::values::{self, Values};
use crate::failure::{Failure, Outcome};

/// `memory.accumulation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccumulationPin {
    /// One micro-batch through all blocks, then the next.
    MicroBatchMajor,
    /// All micro-batches through one block, then the next.
    LayerMajor,
}

/// `memory.*`. `None` is `auto`: the policy decides.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Bytes that the process may hold.
    pub budget: Option<u64>,
    /// Bytes of device memory.
    pub device_budget: Option<u64>,
    /// Pin.
    pub micro_batch_samples: Option<usize>,
    /// Pin.
    pub recompute_blocks: Option<usize>,
    /// Pin.
    pub accumulation: Option<AccumulationPin>,
    /// Pin, of layer-major accumulation.
    pub kept_gradient_blocks: Option<usize>,
    /// Pin, of layer-major accumulation: whether what attention heads put out is kept.
    pub heads_kept: Option<bool>,
    /// Pin, of layer-major accumulation: whether what forward keeps of blocks lies in a file.
    pub activation_offload: Option<bool>,
    /// Pin, of activations in a file: blocks of which they stay in memory.
    pub blocks_in_memory: Option<usize>,
    /// Pin, of layer-major accumulation: whether gradients wait in a file.
    pub gradient_offload: Option<bool>,
    /// Pin, of layer-major accumulation: whether weights lie in a file.
    pub weight_offload: Option<bool>,
    /// Bytes that the run may write to files in place of memory, where no pin says so.
    pub disk_writes: u64,
    /// Pin.
    pub loss_chunk_rows: Option<usize>,
    /// Pin.
    pub prefetch_batches: Option<usize>,
    /// Pin.
    pub decode_threads: Option<usize>,
    /// Pin: `in_memory`, `row_group_cache`, `ultra_low_mem`.
    pub dataset_residency: Option<String>,
    /// Pin; 0: never.
    pub clear_cache_every_steps: Option<u64>,
}

impl Memory {
    /// As the values say.
    pub fn of(values: &Values) -> Memory {
        let bytes = |name: &str| values.text(name).and_then(|text| values::parse_size(&text));
        Memory {
            budget: bytes("memory.budget"),
            device_budget: bytes("memory.device_budget"),
            micro_batch_samples: pin(values, "memory.micro_batch_samples"),
            recompute_blocks: pin(values, "memory.recompute_blocks"),
            accumulation: values.text("memory.accumulation").map(|text| match text.as_str() {
                "layer-major" => AccumulationPin::LayerMajor,
                _ => AccumulationPin::MicroBatchMajor,
            }),
            kept_gradient_blocks: pin(values, "memory.kept_gradient_blocks"),
            heads_kept: values.text("memory.attention_heads").map(|text| text == "keep"),
            gradient_offload: values.text("memory.gradient_offload").map(|text| text == "disk"),
            weight_offload: values.text("memory.weight_offload").map(|text| text == "disk"),
            blocks_in_memory: pin(values, "memory.blocks_in_memory"),
            activation_offload: values.text("memory.activation_offload").map(|text| text == "disk"),
            disk_writes: bytes("memory.disk_writes").unwrap_or(0),
            loss_chunk_rows: pin(values, "memory.loss_chunk_rows"),
            prefetch_batches: pin(values, "memory.prefetch_batches"),
            decode_threads: pin(values, "memory.decode_threads"),
            dataset_residency: values.text("memory.dataset_residency"),
            clear_cache_every_steps: values.integer("memory.clear_cache_every_steps"),
        }
    }

    /// Refuses pins that contradict each other.
    pub fn check(&self, values: &Values) -> Outcome<()> {
        let of_layer_major = [
            ("memory.kept_gradient_blocks", self.kept_gradient_blocks.is_some()),
            ("memory.attention_heads", self.heads_kept == Some(true)),
            ("memory.activation_offload", self.activation_offload == Some(true)),
            ("memory.gradient_offload", self.gradient_offload == Some(true)),
            ("memory.weight_offload", self.weight_offload == Some(true)),
            ("memory.blocks_in_memory", self.blocks_in_memory.is_some()),
        ];
        let contradiction = of_layer_major.into_iter().find(|&(_, is_pinned)| is_pinned);
        if let (Some((name, _)), Some(AccumulationPin::MicroBatchMajor)) = (contradiction, self.accumulation) {
            return Err(Failure::usage(format!(
                "`{name}` ({}) works with layer-major accumulation only, but `memory.accumulation` is \"micro-batch-major\"",
                values.origin(name)
            ))
            .hint("use `--set memory.accumulation=layer-major`, or remove one of the two"));
        }
        Ok(())
    }
}
