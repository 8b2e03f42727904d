//! What a pass costs in arithmetic: multiply-adds of matrix products, from which prices in time follow.

use super::{Shape, Trained};
use crate::config::Config;

/// Multiply-adds of a training pass over a micro-batch, and what its parts are of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Arithmetic {
    /// Each block that backward enters, in the order in which `recompute_blocks` counts them.
    pub blocks: Vec<BlockArithmetic>,
    /// The output projection and the loss, forward and backward.
    pub head: f64,
    /// Forward and backward of everything, nothing computed again.
    pub training: f64,
}

/// Multiply-adds of one block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockArithmetic {
    /// Forward once more, for backward: all but the feed-forward's last product.
    pub again: f64,
    /// What the attentions' heads are of that: scores and weighted values.
    pub heads: f64,
    /// Backward.
    pub backward: f64,
}

/// The arithmetic of a pass over `shape`, for a model of which `trained` trains.
pub fn arithmetic(config: &Config, shape: &Shape, trained: &Trained) -> Arithmetic {
    let entered = trained.blocks();
    let layers = config.num_layers + config.num_decoder_layers;
    let is_decoder = |block: usize| block >= config.num_layers;
    let forward: f64 = (0..layers).map(|block| block_forward(config, shape, is_decoder(block))).sum();
    // Backward begins at the end: the blocks that it does not enter are the first ones.
    let blocks: Vec<BlockArithmetic> = (layers - entered..layers)
        .map(|block| {
            let forward = block_forward(config, shape, is_decoder(block));
            let last = product(block_tokens(shape, is_decoder(block)), config.d_ff, config.d_model);
            // Two products for each of forward's.
            let heads = block_heads(shape, is_decoder(block), config.inner_dim());
            BlockArithmetic { again: forward - last, heads, backward: 2.0 * forward }
        })
        .collect();
    let head = 3.0 * product(shape.samples * shape.target_tokens, config.d_model, config.vocab_size);
    let training = forward + blocks.iter().map(|block| block.backward).sum::<f64>() + head;
    Arithmetic { blocks, head, training }
}

fn block_tokens(shape: &Shape, is_decoder: bool) -> usize {
    shape.samples * if is_decoder { shape.target_tokens } else { shape.source_tokens }
}

/// Scores, and sums of values.
fn block_heads(shape: &Shape, is_decoder: bool, inner: usize) -> f64 {
    let Shape { samples, source_tokens, target_tokens } = *shape;
    match is_decoder {
        true => 2.0 * product(samples * target_tokens, target_tokens + source_tokens, inner),
        false => 2.0 * product(samples * source_tokens, source_tokens, inner),
    }
}

fn block_forward(config: &Config, shape: &Shape, is_decoder: bool) -> f64 {
    let Shape { samples, source_tokens, target_tokens } = *shape;
    let (d, inner) = (config.d_model, config.inner_dim());
    let tokens = if is_decoder { target_tokens } else { source_tokens };
    let projections = if config.is_gated_act { 3 } else { 2 };
    let attention = |tokens: usize, keys: usize| {
        2.0 * product(samples * tokens, d, inner) // q, out
            + 2.0 * product(samples * keys, d, inner) // k, v
    };
    let cross = if is_decoder { attention(tokens, source_tokens) } else { 0.0 };
    attention(tokens, tokens)
        + cross
        + block_heads(shape, is_decoder, inner)
        + f64::from(projections) * product(samples * tokens, d, config.d_ff)
}

#[expect(clippy::cast_precision_loss, reason = "sizes of matrices")]
fn product(m: usize, k: usize, n: usize) -> f64 {
    m as f64 * k as f64 * n as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::ParameterSpec;

    #[test]
    fn a_pass_takes_about_three_multiply_adds_a_token_for_each_weight_it_goes_through() {
        let config = Config::preset("t5-small").unwrap();
        let shape = Shape { samples: 2, source_tokens: 16, target_tokens: 16 };
        let all = arithmetic(&config, &shape, &Trained::all(&config));
        let weights = ParameterSpec::all(&config).iter().map(ParameterSpec::elements).sum::<u64>();
        // The table is a weight of the decoder's tokens only; cross-attention goes through half of its for the source.
        let encoder = 6.0 * (4.0 * 512.0 * 512.0 + 2.0 * 512.0 * 2048.0);
        let decoder = weights as f64 - encoder;
        let expected = 3.0 * 32.0 * (encoder + decoder);
        assert!((all.training / expected - 1.0).abs() < 0.02, "{} and {expected}", all.training);
        assert!(all.blocks[0].again < all.blocks[11].again, "a block of the decoder has cross-attention as well");
    }

    #[test]
    fn blocks_that_backward_does_not_enter_are_never_computed_again() {
        let config = Config::preset("t5-small").unwrap();
        let shape = Shape { samples: 1, source_tokens: 8, target_tokens: 8 };
        let all = arithmetic(&config, &shape, &Trained::all(&config));
        let decoder = arithmetic(&config, &shape, &Trained::new(&config, &|spec| spec.part.is_decoder()));
        assert_eq!(decoder.blocks, all.blocks[6..]);
        let spared: f64 = all.blocks[..6].iter().map(|block| block.backward).sum();
        assert!((all.training - spared - decoder.training).abs() < 1.0);
    }
}
