//! Prices: the time of a step under each choice, relative to the fastest.
//!
//! A price is arithmetic times a measured factor. The arithmetic that a choice computes again is counted, product by product, because
//! models differ in it: the vocabulary is a quarter of a step of t5-small, and is never computed again.
//!
//! The factors are measured on the machine of the run ([`crate::Speed`]), or built in. `bench/levers.md` has the tables of levers that the
//! built-in factors come from, and the tables of budgets, which compare the prices of whole plans with measured steps.

use candle_core::DType;
use memory_policy::{Bytes, MemorySpace};
use serde::{Deserialize, Serialize};
use t5::Levers;
use t5::step::count::PassCalls;
use t5_ops::Calls;

use crate::counted::{Arithmetic, BlockArithmetic};
use crate::files::{StepIo, UNWRITTEN_PERCENT};
use crate::step_parts::Parts;

/// Micro-batches of this many tokens keep a processor busy; larger ones gain nothing.
const ENOUGH_TOKENS: f64 = 4096.0;

fn enough_tokens() -> f64 {
    ENOUGH_TOKENS
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_enough(tokens: &f64) -> bool {
    *tokens == ENOUGH_TOKENS
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_nothing(tokens: &f64) -> bool {
    *tokens == 0.0
}

/// Rows of a chunk whose logits are computed again.
const CHUNK_WITHOUT_LOGITS: f64 = 1024.0;

/// The time that levers cost on one machine, by the units that multiply. They are plain values, so a run makes the same plan from them
/// anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prices {
    /// Fixed cost of a micro-batch, in the time of so many tokens: packing weights, and reading and writing gradients.
    pub overhead_tokens: f64,
    /// The tokens of a micro-batch beyond which larger ones gain nothing.
    #[serde(default = "enough_tokens", skip_serializing_if = "is_enough")]
    pub enough_tokens: f64,
    /// Fixed cost of the operations that a micro-batch computes again, in tokens. The built-in prices include it in the prices of
    /// arithmetic.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub again_overhead_tokens: f64,
    /// The time of a multiply-add of a product that is computed again, relative to an average multiply-add of the step.
    pub again: f64,
    /// The relative time of a multiply-add of attention outputs that are computed again.
    pub heads: f64,
    /// The relative time of a multiply-add of a second backward pass.
    pub second: f64,
    /// The time of writing a byte to a file that stays in the page cache, and reading it, in average multiply-adds of the step.
    pub file_byte: f64,
    /// The time of copying a byte between the host and a device, in average multiply-adds of the step.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub bus_byte: f64,
    /// The same time for a byte in page-locked memory of the host; 0 if it was not measured.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub locked_bus_byte: f64,
    /// The time of casting an element of a weight to bf16 on a device, in average multiply-adds of the step.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub weight_cast: f64,
    /// The host's time to launch a kernel on a card, in average multiply-adds of the step; 0 if it was not measured.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub launch: f64,
    /// The host's time to launch a matrix product, in the same unit.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub product_launch: f64,
    /// The time of launching a graph on a card, without its nodes, in average multiply-adds of the step; 0 if it was not measured.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub graph_launch: f64,
    /// The time of each short node of a graph, in the same unit; 0 if it was not measured.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub graph_node: f64,
    /// Price of a byte that goes to the disk, relative to a byte that stays in the page cache.
    pub disk: f64,
    /// Price of a byte of weights, which is read three times, relative to a byte that is written and read once.
    pub weights: f64,
    /// Price of a byte of weights that goes to the disk, in the same unit.
    pub weights_to_disk: f64,
    /// Fixed cost of a chunk of the loss, in rows: the vocabulary is packed for each.
    pub overhead_rows: f64,
    /// Whether logits are always computed again, so that every price includes it.
    pub never_keeps_logits: bool,
    /// The time of an average multiply-add of the step in picoseconds, if measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiply_add_ps: Option<f64>,
    /// The time of the optimizer's update of a parameter in picoseconds, if measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameter_ps: Option<f64>,
}

impl Prices {
    /// Prices of f32, and of bf16 that is widened to f32 as it is packed, measured on t5-small.
    ///
    /// To the disk: steps of t5-small that write 788 MB, in control groups without memory for files and outside of them. Weights: t5-small
    /// over 2 x 48+96 tokens has 1.3 (687 ms, and 602 ms with the gradients in files instead), and over 8 x 256+256 2.5; chatlm-0.2b over 1
    /// x 320+320 has 1.8. Weights to the disk: a step of chatlm-0.2b over 4 x 256+256 tokens took 10.9 s in a group of 900 MiB. With its
    /// weights in a file, in a group of 260 MiB, it took 14.2 s.
    pub const fn vectors() -> Self {
        Self {
            overhead_tokens: 65.0,
            again_overhead_tokens: 0.0,
            enough_tokens: ENOUGH_TOKENS,
            again: 1.0,
            heads: 1.0,
            second: 1.05,
            file_byte: 55.0,
            bus_byte: 0.0,
            locked_bus_byte: 0.0,
            weight_cast: 0.0,
            launch: 0.0,
            product_launch: 0.0,
            graph_launch: 0.0,
            graph_node: 0.0,
            disk: 3.0,
            weights: 2.0,
            weights_to_disk: 9.0,
            overhead_rows: 32.0,
            never_keeps_logits: false,
            multiply_add_ps: None,
            parameter_ps: None,
        }
    }

    /// Prices of bf16 on tile registers. Only the products are faster; the operations between them are not.
    pub const fn tiles() -> Self {
        Self {
            overhead_tokens: 200.0,
            again: 0.85,
            heads: 2.8,
            second: 1.45,
            file_byte: 190.0,
            overhead_rows: 0.0,
            never_keeps_logits: true,
            ..Self::vectors()
        }
    }

    /// Whether every price is a number that the planner can use.
    pub fn are_sound(&self) -> bool {
        let Self {
            overhead_tokens,
            again_overhead_tokens,
            again,
            heads,
            second,
            file_byte,
            bus_byte,
            locked_bus_byte,
            weight_cast,
            launch,
            product_launch,
            graph_launch,
            graph_node,
            disk,
            weights,
            weights_to_disk,
            ..
        } = *self;
        let has_tokens = (1.0..1e12).contains(&self.enough_tokens);
        let given = [self.multiply_add_ps, self.parameter_ps].into_iter().flatten();
        let work = [overhead_tokens, again_overhead_tokens, again, heads, second, self.overhead_rows];
        let moved = [file_byte, bus_byte, locked_bus_byte, weight_cast, disk, weights, weights_to_disk];
        let are_in_range = |price: f64| (0.0..1e12).contains(&price);
        let launched = [launch, product_launch, graph_launch, graph_node];
        has_tokens && work.into_iter().chain(moved).chain(launched).chain(given).all(are_in_range)
    }

    /// Prices of a card beside any processor: not measured. A micro-batch of t5-base has about 12,000 launches of candle's kernels, of
    /// about 5 microseconds each. In that time a card would multiply one to five thousand tokens; tens of thousands keep its units busy.
    /// Scores are in memory, and each chunk of the loss waits for the device. At 4 * 10^13 multiply-adds a second, a byte on a bus of
    /// 10 GB/s costs four thousand of them. A byte in a file at 2 GB/s costs twenty thousand. A cast moves 6 bytes, at 2 TB/s.
    pub fn card() -> Self {
        Self {
            overhead_tokens: 2048.0,
            enough_tokens: 32_768.0,
            again: 1.0,
            heads: 4.0,
            second: 1.4,
            overhead_rows: 64.0,
            file_byte: 20_000.0,
            bus_byte: 4000.0,
            weight_cast: 120.0,
            never_keeps_logits: true,
            ..Self::vectors()
        }
    }

    /// The price of a byte that is copied between a device and the host, whose memory is page-locked or not.
    pub fn of_bus(&self, is_locked: bool) -> f64 {
        if is_locked && self.locked_bus_byte > 0.0 { self.locked_bus_byte } else { self.bus_byte }
    }

    /// The built-in prices for tensors at `place`.
    pub fn at(place: MemorySpace, activations: DType) -> Self {
        if place == MemorySpace::Device { Self::card() } else { Self::of_units(activations) }
    }

    /// The built-in prices of this process's units that multiply activations of this dtype.
    pub fn of_units(activations: DType) -> Self {
        #[cfg(test)]
        crate::testing::state_processor();
        if activations == DType::BF16 && t5_ops::processor().has_tiles() { Self::tiles() } else { Self::vectors() }
    }
}

/// Graphs of a recorded micro-batch: forward and backward.
const GRAPHS: f64 = 2.0;

impl Prices {
    /// The host's time for these requests, in multiply-adds; 0 if the launch of a kernel has no price.
    #[expect(clippy::cast_precision_loss, reason = "requests of a step")]
    pub(crate) fn launching(&self, calls: &Calls) -> f64 {
        self.launch * calls.launches as f64 + self.product_launch * calls.products as f64
    }

    /// The time of launching the same requests as the graphs of a micro-batch. Graphs without a price are launched as kernels.
    #[expect(clippy::cast_precision_loss, reason = "requests of a step")]
    pub(crate) fn launching_graphs(&self, calls: &Calls) -> f64 {
        if !self.knows_graphs() {
            return self.launching(calls);
        }
        GRAPHS * self.graph_launch + self.graph_node * (calls.launches + calls.products) as f64
    }

    /// Whether graphs have a price, and the launches that they replace do, too.
    pub(crate) fn knows_graphs(&self) -> bool {
        self.launch > 0.0 && self.graph_node > 0.0
    }
}

/// The time of reading a byte of a mapped file, relative to writing it to a file and reading it back: from the page cache, and from the
/// disk.
pub const READ: f64 = 0.1;
pub const READ_FROM_DISK: f64 = 1.0;

/// The time of a micro-batch beside its arithmetic, in multiply-adds: bytes that move, and launches.
#[derive(Clone, Copy, Debug, Default)]
pub struct MicroBatchOverhead {
    /// The time in which nothing is computed.
    pub exposed: f64,
    /// The time that overlaps with the computation of blocks.
    pub overlapped: f64,
    /// The time of weight casts that are saved. The prices of products include them.
    pub spared: Parts,
    /// The host's time for launches. A card does not wait for them while it computes as long.
    pub launching: Parts,
}

impl MicroBatchOverhead {
    /// The same micro-batch without the casts of these elements of weights.
    pub fn without_casts(self, prices: &Prices, elements: Parts) -> Self {
        Self { spared: elements.times(prices.weight_cast), ..self }
    }

    /// The same micro-batch with these launches. Those of blocks are launched as graphs if it `is_recorded`. If launches have no price,
    /// `calls` is not called.
    pub fn with_launches(self, prices: &Prices, calls: impl FnOnce() -> PassCalls, is_recorded: bool) -> Self {
        if prices.launch == 0.0 {
            return self;
        }
        let calls = calls();
        let blocks = if is_recorded { prices.launching_graphs(&calls.blocks) } else { prices.launching(&calls.blocks) };
        Self { launching: Parts { blocks, head: prices.launching(&calls.head) }, ..self }
    }

    /// A share of these times.
    pub fn times(self, share: f64) -> Self {
        let Self { exposed, overlapped, spared, launching } = self;
        let (spared, launching) = (spared.times(share), launching.times(share));
        Self { exposed: share * exposed, overlapped: share * overlapped, spared, launching }
    }
}

/// The time of moving the `written` bytes, with `memory` bytes of memory for files.
#[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
pub fn moving_time(prices: &Prices, written: StepIo, memory: Bytes) -> MicroBatchOverhead {
    let StepIo { bus_bytes, pinned_bytes, .. } = written;
    let bus = prices.of_bus(true) * pinned_bytes as f64 + prices.of_bus(false) * (bus_bytes - pinned_bytes) as f64;
    let of_bus =
        |bytes: u64, bidirectional: u64| bus * bytes.saturating_sub(bidirectional) as f64 / bus_bytes.max(1) as f64;
    let [both_ways_behind, both_ways_alone] = written.bidirectional;
    let overlapped = of_bus(written.overlapped, both_ways_behind);
    let bus_alone = of_bus(bus_bytes.saturating_sub(written.overlapped), both_ways_alone);
    let exposed = prices.file_byte * priced_bytes(prices, written, memory) + bus_alone;
    MicroBatchOverhead { exposed, overlapped, ..MicroBatchOverhead::default() }
}

/// The price of the `written` bytes, in bytes that stay in memory, with `memory` bytes of memory for files. Weights come last.
#[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
fn priced_bytes(prices: &Prices, written: StepIo, memory: Bytes) -> f64 {
    let StepIo { once, weights, frozen, read, .. } = written;
    let beyond = |bytes: u64, memory: u64| bytes.saturating_sub(memory) as f64;
    let to_the_disk = (prices.disk - 1.0) * beyond(once, memory.0);
    let weights_to_disk = (prices.weights_to_disk - prices.weights) * beyond(weights, memory.0.saturating_sub(once));
    // The system drops pages that are only read before others, and may keep them in all free memory.
    let is_kept = frozen <= memory.0.saturating_mul(100 / UNWRITTEN_PERCENT);
    let reading = (if is_kept { READ } else { READ_FROM_DISK }) * read as f64;
    once as f64 + to_the_disk + prices.weights * weights as f64 + weights_to_disk + reading
}

/// The time of a step whose micro-batches have `tokens` tokens, relative to a step that computes nothing again in micro-batches of enough
/// tokens. Copies in `beside` overlap with blocks; a step waits only for the time by which they take longer. Blocks take the longer of
/// their computation and the host's launches, and so does the head.
pub fn relative_time(
    prices: &Prices,
    levers: &Levers,
    tokens: usize,
    arithmetic: &Arithmetic,
    beside: MicroBatchOverhead,
) -> f64 {
    let share = |blocks: &[BlockArithmetic], of: fn(&BlockArithmetic) -> f64| {
        blocks.iter().map(of).sum::<f64>() / arithmetic.training
    };
    let blocks = arithmetic.blocks.as_slice();
    // Blocks that backward visits twice are also computed again in the first visit.
    let recomputed = match levers.layer_major {
        Some(layers) if layers.goes_twice(blocks.len()) => blocks,
        _ => &blocks[..levers.recompute_blocks.min(blocks.len())],
    };
    let heads = if levers.layer_major.is_some_and(|layers| layers.heads_kept) { 0.0 } else { prices.heads };
    let with_fixed_costs = 1.0 + cut(prices, prices.again_overhead_tokens, tokens);
    let again = prices.again * with_fixed_costs * share(recomputed, |block| block.again - block.heads)
        + heads * share(recomputed, |block| block.heads);
    let layer_by_layer = levers.layer_major.map_or(0.0, |layers| {
        // Backward ends with the first blocks, and they keep their gradients. The other blocks need forward and backward a second time, or
        // a file.
        let dropped = &blocks[layers.kept_gradient_blocks.min(blocks.len())..];
        let dropped = if layers.gradients_on_disk { &[] } else { dropped };
        prices.second * with_fixed_costs * share(dropped, |block| block.again + block.backward)
    });
    // Logits are computed again in large chunks, which repeats one of the head's three products. On vectors this happens with few rows, in
    // bf16 as in f32.
    let keeps = prices.never_keeps_logits || t5_ops::keeps_logits(DType::F32, levers.loss_chunk_rows);
    #[expect(clippy::cast_precision_loss, reason = "rows of a chunk")]
    let rows = if keeps { levers.loss_chunk_rows.max(1) as f64 } else { CHUNK_WITHOUT_LOGITS };
    // A micro-batch may have fewer rows: about half of its tokens are the target's.
    #[expect(clippy::cast_precision_loss, reason = "tokens of a micro-batch")]
    let rows = rows.min((tokens as f64 / 2.0).max(1.0));
    let head = arithmetic.head / arithmetic.training;
    let chunks = head * prices.overhead_rows / rows + if keeps { 0.0 } else { prices.again * head / 3.0 };
    let blocks = 1.0 - head + cut(prices, prices.overhead_tokens, tokens) + again + layer_by_layer;
    let beside = beside.times(1.0 / arithmetic.training);
    let blocks = (blocks - beside.spared.blocks).max(beside.launching.blocks);
    let head = (head + chunks - beside.spared.head).max(beside.launching.head);
    blocks + head + beside.exposed + (beside.overlapped - blocks).max(0.0)
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a micro-batch")]
fn cut(prices: &Prices, overhead_tokens: f64, tokens: usize) -> f64 {
    let enough = prices.enough_tokens;
    overhead_tokens * (1.0 / (tokens as f64).clamp(1.0, enough) - 1.0 / enough)
}

#[cfg(test)]
mod tests {
    use t5::LayerMajor;
    use trainer::TrainerOptions;

    use super::*;
    use crate::counted::StepCounter;
    use crate::processes::Processes;

    /// The price of a step of t5-small over 8 x 256+256 tokens.
    #[track_caller]
    fn check(prices: &Prices, (samples, blocks, rows): (usize, usize, usize), kept: Option<usize>, measured: f64) {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let counter = StepCounter::new(&model, &TrainerOptions::default(), 8, (256, 256), &Processes::default())
            .expect("it trains");
        let time = |levers: &Levers| {
            let samples = levers.micro_batch_samples;
            relative_time(prices, levers, samples * 512, &counter.arithmetic(samples), MicroBatchOverhead::default())
        };
        let layer_major = kept.map(|kept_gradient_blocks| LayerMajor { kept_gradient_blocks, ..LayerMajor::default() });
        let levers = Levers {
            micro_batch_samples: samples,
            recompute_blocks: blocks,
            loss_chunk_rows: rows,
            layer_major,
            ..Levers::default()
        };
        let all_at_once = Levers {
            micro_batch_samples: 8,
            recompute_blocks: 0,
            loss_chunk_rows: 256,
            layer_major: None,
            ..Levers::default()
        };
        let price = time(&levers) / time(&all_at_once);
        assert!((price / measured - 1.0).abs() < 0.06, "{price:.3}, {measured} was measured");
    }

    #[test]
    fn prices_are_those_that_were_measured() {
        for (cut, kept, measured) in [
            ((4, 0, 256), None, 1.01),
            ((1, 0, 256), None, 1.14),
            ((8, 6, 256), None, 1.07),
            ((8, 12, 256), None, 1.19),
            ((1, 12, 256), None, 1.30),
            ((8, 0, 64), None, 1.09),
            ((8, 0, 1), None, 1.03),
            ((1, 12, 256), Some(0), 2.06),
            ((1, 12, 256), Some(6), 1.75),
            ((1, 12, 256), Some(12), 1.30),
            ((4, 12, 256), Some(0), 1.90),
            // bf16 on AVX-512 without bf16 instructions.
            ((4, 0, 256), None, 1.01),
            ((1, 0, 256), None, 1.13),
            ((8, 12, 256), None, 1.16),
            ((1, 12, 256), None, 1.33),
            ((8, 0, 64), None, 1.12),
            ((4, 12, 256), Some(0), 1.86),
            ((4, 12, 256), Some(12), 1.18),
        ] {
            check(&Prices::vectors(), cut, kept, measured);
        }
        for (cut, kept, measured) in [
            ((4, 0, 256), None, 1.05),
            ((1, 0, 256), None, 1.37),
            ((8, 6, 256), None, 1.11),
            ((8, 12, 256), None, 1.23),
            ((1, 12, 256), None, 1.63),
            ((8, 0, 1), None, 1.00),
            ((1, 12, 256), Some(0), 2.46),
            ((1, 12, 256), Some(3), 2.27),
            ((1, 12, 256), Some(6), 2.19),
            ((1, 12, 256), Some(9), 1.83),
            ((1, 12, 256), Some(12), 1.58),
            ((4, 12, 256), Some(0), 2.35),
        ] {
            check(&Prices::tiles(), cut, kept, measured);
        }
    }

    #[test]
    fn a_step_waits_for_copies_beside_its_blocks_when_they_take_longer() {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let counter = StepCounter::new(&model, &TrainerOptions::default(), 8, (256, 256), &Processes::default())
            .expect("it trains");
        let arithmetic = counter.arithmetic(8);
        let levers = Levers { micro_batch_samples: 8, loss_chunk_rows: 256, ..Levers::default() };
        let time = |exposed: f64, overlapped: f64| {
            let beside =
                MicroBatchOverhead { exposed, overlapped, ..MicroBatchOverhead::default() }.times(arithmetic.training);
            relative_time(&Prices::card(), &levers, 4096, &arithmetic, beside)
        };
        let (computed, head) = (time(0.0, 0.0), arithmetic.head / arithmetic.training);
        assert!((time(0.5, 0.0) - computed - 0.5).abs() < 1e-9);
        assert_eq!(time(0.0, 0.9 * (1.0 - head)), computed);
        // The step waits only for the time by which copies take longer than the blocks.
        let [once, more] = [3.0, 5.0].map(|overlapped| time(0.0, overlapped));
        assert!((more - once - 2.0).abs() < 1e-9 && once < computed + 3.0 && once > 3.0, "{once} {more} {computed}");
    }

    #[test]
    fn a_file_that_memory_does_not_hold_costs_as_much_as_the_disk() {
        let priced = |once: u64, weights: u64| {
            let written = StepIo { once: once << 30, weights: weights << 30, ..StepIo::default() };
            priced_bytes(&Prices::vectors(), written, Bytes::gib(2)) / (1u64 << 30) as f64
        };
        assert_eq!((priced(2, 0), priced(3, 0)), (2.0, 5.0));
        // Memory holds half of the weights.
        assert_eq!((priced(1, 1), priced(1, 2)), (3.0, 12.0));
    }
}
