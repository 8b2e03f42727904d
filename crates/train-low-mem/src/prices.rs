//! Prices: the time of a step under each choice, over the time of the fastest.
//!
//! A price is arithmetic times a measured factor. How much a choice computes again is counted, product by product
//! ([`t5::costs::arithmetic`]), because models differ in it: a quarter of a step of t5-small is its vocabulary, which
//! is never computed again. The factors were measured on t5-small; `docs/memory-levers.md` has the table they
//! come from, and `docs/memory-budgets.md` holds the prices of whole plans against measured steps.

use candle_core::DType;
use memory_policy::{Bytes, LayerMajor};
use t5::costs::{Arithmetic, BlockArithmetic, Pass};

use crate::offload::Written;

/// Micro-batches of this many tokens keep the matrix units busy; larger ones gain nothing.
const ENOUGH_TOKENS: f64 = 4096.0;

/// Rows of a chunk whose logits are computed again.
const CHUNK_WITHOUT_LOGITS: f64 = 1024.0;

/// What was measured on one kind of units that multiply.
struct Factors {
    /// What a micro-batch costs beside its arithmetic, in the time of so many tokens: weights packed, gradients
    /// touched.
    overhead_tokens: f64,
    /// The time of a multiply-add of a product that is computed again, over that of an average one of the step.
    again: f64,
    /// The same of what attention heads put out.
    heads: f64,
    /// The same for a second backward pass.
    second: f64,
    /// The time of writing a byte to a file and reading it, in multiply-adds of an average one of the step.
    disk: f64,
    /// What a chunk of the loss costs beside its arithmetic, in rows: the vocabulary is packed for each.
    overhead_rows: f64,
    /// Whether logits are computed again whatever the chunk, so that every price has it in it.
    never_keeps_logits: bool,
}

/// f32, and bf16 where that is widened to f32 as it is packed.
const VECTORS: Factors = Factors {
    overhead_tokens: 65.0,
    again: 1.0,
    heads: 1.0,
    second: 1.05,
    disk: 55.0,
    overhead_rows: 32.0,
    never_keeps_logits: false,
};
/// bf16 on tile registers. The products are faster, what lies between them is not.
const TILES: Factors = Factors {
    overhead_tokens: 200.0,
    again: 0.85,
    heads: 2.8,
    second: 1.45,
    disk: 190.0,
    overhead_rows: 0.0,
    never_keeps_logits: true,
};

/// What a byte costs that goes to the disk, over one that stays in the system's page cache. Steps of t5-small that write 788 (f32)
/// and 465 MB (bf16), in control groups without room for files and outside of them: 3.0 and 3.6.
const TO_THE_DISK: f64 = 3.0;

/// The percentage of free memory that files may fill before Linux makes those who write them wait: `vm.dirty_ratio` as it comes.
const UNWRITTEN_PERCENT: u64 = 20;

/// Bytes of files that stay in memory where so much is free beside the run.
pub fn file_room(free: Bytes) -> Bytes {
    free.percent(UNWRITTEN_PERCENT)
}

/// What a byte of weights costs, which is read three times, over one that is written and read once. Steps in f32: t5-small over
/// 2 x 48+96 tokens 1.3 (687 ms, and 602 with the gradients in files instead), over 8 x 256+256 2.5; chatlm-0.2b over 1 x 320+320 1.8.
const WEIGHTS: f64 = 2.0;

/// The same where it goes to the disk: a step of chatlm-0.2b over 4 x 256+256 tokens in f32 took 10.9 s in a group of 900 MiB, and
/// 14.2 s with its weights in a file in one of 260 MiB.
const WEIGHTS_TO_THE_DISK: f64 = 9.0;

/// What is `written` to files as so many bytes that stay in memory, where there is `room` for them; weights come last.
#[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
pub fn priced_bytes(written: Written, room: Bytes) -> f64 {
    let Written { once, weights } = written;
    let beyond = |bytes: u64, room: u64| bytes.saturating_sub(room) as f64;
    let to_the_disk = (TO_THE_DISK - 1.0) * beyond(once, room.0);
    let weights_to_the_disk = (WEIGHTS_TO_THE_DISK - WEIGHTS) * beyond(weights, room.0.saturating_sub(once));
    once as f64 + to_the_disk + WEIGHTS * weights as f64 + weights_to_the_disk
}

/// The time of a step whose micro-batches are `pass`, over that of one that computes nothing again in micro-batches of
/// enough tokens, on this machine. For each micro-batch `written` bytes go to files.
pub fn relative_time(pass: &Pass, arithmetic: &Arithmetic, layer_major: Option<LayerMajor>, written: f64) -> f64 {
    let factors = if pass.activations == DType::BF16 && t5_ops::has_tiles() { &TILES } else { &VECTORS };
    relative_time_by(factors, pass, arithmetic, layer_major, written)
}

fn relative_time_by(
    factors: &Factors,
    pass: &Pass,
    arithmetic: &Arithmetic,
    layer_major: Option<LayerMajor>,
    written: f64,
) -> f64 {
    let share = |blocks: &[BlockArithmetic], of: fn(&BlockArithmetic) -> f64| {
        blocks.iter().map(of).sum::<f64>() / arithmetic.training
    };
    let blocks = arithmetic.blocks.as_slice();
    // What backward goes through twice is computed again in the first pass, too.
    let recomputed = match layer_major {
        Some(layers) if layers.goes_twice(blocks.len()) => blocks,
        _ => &blocks[..pass.recompute_blocks.min(blocks.len())],
    };
    let heads = if layer_major.is_some_and(|layers| layers.heads_kept) { 0.0 } else { factors.heads };
    let again = factors.again * share(recomputed, |block| block.again - block.heads)
        + heads * share(recomputed, |block| block.heads);
    let layer_by_layer = layer_major.map_or(0.0, |layers| {
        // Backward ends with the first blocks. They keep their gradients; what comes before takes forward and backward
        // a second time, or a file.
        let dropped = &blocks[layers.kept_gradient_blocks.min(blocks.len())..];
        let dropped = if layers.gradients_on_disk { &[] } else { dropped };
        factors.second * share(dropped, |block| block.again + block.backward)
    });
    let disk = factors.disk * written / arithmetic.training;
    // Logits that are computed again are so in large chunks: one product of the head's three. On vectors that is where few
    // rows are asked for, in bf16 as in f32.
    let keeps = factors.never_keeps_logits || t5_ops::keeps_logits(DType::F32, pass.loss_chunk_rows);
    let rows = if keeps { pass.loss_chunk_rows.max(1) as f64 } else { CHUNK_WITHOUT_LOGITS };
    let head = arithmetic.head / arithmetic.training;
    let chunks = head * factors.overhead_rows / rows + if keeps { 0.0 } else { factors.again * head / 3.0 };
    1.0 + cut(pass, factors) + again + layer_by_layer + disk + chunks
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a micro-batch")]
fn cut(pass: &Pass, factors: &Factors) -> f64 {
    let tokens = (pass.shape.samples * (pass.shape.source_tokens + pass.shape.target_tokens)) as f64;
    factors.overhead_tokens * (1.0 / tokens.clamp(1.0, ENOUGH_TOKENS) - 1.0 / ENOUGH_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use t5::costs::{Shape, Trained, arithmetic};

    /// The price of a step of t5-small over 8 x 256+256 tokens.
    #[track_caller]
    fn check(factors: &Factors, (samples, blocks, rows): (usize, usize, usize), kept: Option<usize>, measured: f64) {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let shape = Shape { samples, source_tokens: 256, target_tokens: 256 };
        let pass = Pass {
            shape,
            activations: DType::F32,
            gradients: DType::F32,
            recompute_blocks: blocks,
            loss_chunk_rows: rows,
            dropout: true,
        };
        let layers = kept.map(|kept_gradient_blocks| LayerMajor { kept_gradient_blocks, ..LayerMajor::default() });
        let time = |pass: &Pass, layers| {
            relative_time_by(factors, pass, &arithmetic(&model, &pass.shape, &Trained::all(&model)), layers, 0.0)
        };
        let all_at_once =
            Pass { shape: Shape { samples: 8, ..shape }, recompute_blocks: 0, loss_chunk_rows: 256, ..pass };
        let price = time(&pass, layers) / time(&all_at_once, None);
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
            // In bf16, on AVX-512 without instructions for it.
            ((4, 0, 256), None, 1.01),
            ((1, 0, 256), None, 1.13),
            ((8, 12, 256), None, 1.16),
            ((1, 12, 256), None, 1.33),
            ((8, 0, 64), None, 1.12),
            ((4, 12, 256), Some(0), 1.86),
            ((4, 12, 256), Some(12), 1.18),
        ] {
            check(&VECTORS, cut, kept, measured);
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
            check(&TILES, cut, kept, measured);
        }
    }

    #[test]
    fn what_has_no_room_in_memory_costs_as_much_as_the_disk() {
        let room = file_room(Bytes::gib(10));
        assert_eq!(room, Bytes::gib(2));
        let priced = |once: u64, weights: u64| {
            priced_bytes(Written { once: once << 30, weights: weights << 30 }, room) / (1u64 << 30) as f64
        };
        assert_eq!((priced(2, 0), priced(3, 0)), (2.0, 5.0));
        // A half of the weights finds room.
        assert_eq!((priced(1, 1), priced(1, 2)), (3.0, 12.0));
    }
}
