//! What products pack of their operands, as a row of the bill.

use candle_core::DType;

use super::Pass;
use crate::config::Config;

/// The row of what the threads keep from one product to the next.
pub(crate) const PACKED: &str = "packed operands";

/// What products pack of their operands, which the threads keep for the next product: for outputs and the gradients of inputs
/// a run of the weight each; for a weight's gradient both operands, activations along tokens.
pub(super) fn packed(config: &Config, pass: &Pass, trains: bool) -> u64 {
    let widest = config.d_ff.max(config.inner_dim()).max(config.d_model);
    let product = |k, n| t5_ops::product_bytes(k, n, pass.activations);
    let of_weights = product(config.d_model, widest).max(product(widest, config.d_model));
    let rows = pass.shape.samples * pass.shape.target_tokens;
    let of_loss = t5_ops::linear_cross_entropy_kept_bytes(
        rows,
        config.vocab_size,
        pass.activations,
        pass.loss_chunk_rows,
        trains,
    );
    if !trains {
        return (of_weights.max(product(config.d_model, config.vocab_size)) + of_loss) as u64;
    }
    (of_weights + of_loss) as u64 + packed_along_tokens(config, pass)
}

/// Of what products pack, that of the gradients of weights, which depends on the tokens of a pass.
pub(super) fn packed_along_tokens(config: &Config, pass: &Pass) -> u64 {
    let widest = config.d_ff.max(config.inner_dim()).max(config.d_model);
    let most = |elements: usize| (elements * pass.activations.size_in_bytes()).min(t5_ops::PACKED_BYTES);
    let tokens = pass.shape.samples * pass.shape.source_tokens.max(pass.shape.target_tokens);
    let chunk = pass.loss_chunk_rows.min(pass.shape.samples * pass.shape.target_tokens);
    let (left, right) = (most((tokens * widest).max(chunk * config.vocab_size)), most(tokens * widest));
    // A bf16 gradient is summed in f32 where its product is cut along the tokens.
    let is_summed_apart = pass.gradients == DType::BF16 && tokens > t5_ops::longest_sum(pass.activations);
    let sums = if is_summed_apart { widest * config.d_model * 4 } else { 0 };
    (left + right + sums) as u64
}
