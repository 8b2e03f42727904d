//! The numeric operations that training T5 needs, each with a forward, a backward and a reference.
//!
//! An operation is one public function. It has a *reference*, written in plain candle operations (any device, any floating dtype). The
//! reference is the oracle of the tests and the fallback. Fused kernels for the CPU run when every operand lies on the CPU in `F32` or
//! `BF16`.
//!
//! ```
//! use candle_core::{DType, Device, Result, Tensor};
//!
//! fn main() -> Result<()> {
//!     let x = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?; // (B, T, D)
//!     let w = Tensor::ones((5, 4), DType::F32, &Device::Cpu)?; // (out, in)
//!     let dw = Tensor::zeros((5, 4), DType::F32, &Device::Cpu)?;
//!     let y = t5_ops::linear(&x, &w)?; // (B, T, 5)
//!     t5_ops::linear_backward_weight(&y, &x, &dw, true)?; // dw += dyᵀ x, in place
//!     assert_eq!(dw.sum_all()?.to_scalar::<f32>()?, 480.0);
//!     Ok(())
//! }
//! ```
//!
//! Invariants
//!
//! - Weights are laid out as Hugging Face's: `(out, in)`.
//! - Activations may be `BF16` while weights and gradients are `F32`; the output has the dtype of `x`;
//!   reductions are in `F32` or wider.
//! - Arguments named `dw`, `dweight`, `dtable`, `dbias` are accumulators: contiguous tensors that the
//!   operation adds to in place, so that micro-batches need no second buffer.
//! - With one instruction set ([`instruction_set`]) the same inputs give the same bits on any number of threads: sums are cut into
//!   parts that depend on sizes only, and partial sums are added in a fixed order.
//! - Dropout masks are a function of an element's identity (seed, step, place, sample, position, channel),
//!   never of how the batch was cut or padded. See [`Dropout`].
//! - Nothing here knows the structure of T5, or asks a driver: an operation's file `cuda` launches kernels through `cuda-device`.
//!
//! Shapes: B batch, T query or target length, S key or source length, H heads, K head size, D model size,
//! V vocabulary, R rows.

// Unsafe code is allowed here: kernels write disjoint parts of one buffer from several threads,
// call strided matrix products, and use instructions beyond the baseline.
#![allow(unsafe_code)]

mod by_rows;
mod cache;
mod dispatch;
mod isa;
pub mod keys;
mod matmul;
mod narrow;
mod needs;
mod ops;
mod parallel;
mod peak;
mod processor;
mod quantised;
mod random_mask;
mod simd;
mod storage;
#[cfg(test)]
extern crate self as t5_ops;
#[cfg(test)]
mod testing;
mod vector;

pub use by_rows::window_bytes;
pub use cache::evict_from_caches;
pub use dispatch::Path;
pub use isa::{has_instruction_set, instruction_set};
pub use matmul::release_kept;
pub use needs::{Calls, Kept, Needs};
pub use ops::activation::{
    Activation, feed_forward_activation, feed_forward_activation_backward, feed_forward_activation_backward_needs,
    feed_forward_activation_needs,
};
pub use ops::adafactor::{
    AdafactorHyper, AdafactorUpdate, SecondMoment, SquareSums, adafactor, adafactor_needs, adafactor_of_each,
    adafactor_ready, adafactor_with_sums, square_sums_needs,
};
pub use ops::adamw::{AdamwHyper, AdamwUpdate, adamw, adamw_needs, adamw_of_each, adamw_ready};
pub use ops::adamw_int8::{AdamwInt8Update, QuantisedMoment, adamw_int8_needs, adamw_int8_of_each, moment_blocks};
pub use ops::attention::{
    Attended, Attention, MAX_HEAD_ON_DEVICE, Mask, Sizes as AttentionSizes, attention, attention_at,
    attention_backward, attention_backward_needs, attention_needs, merge_attention, merge_attention_needs,
};
pub use ops::cross_entropy::{
    CrossEntropy, IGNORED_LABEL, keeps_logits, linear_cross_entropies, linear_cross_entropy,
    linear_cross_entropy_backward, linear_cross_entropy_backward_needs, linear_cross_entropy_needs,
    linear_cross_entropy_passes, weighted_linear_cross_entropy_backward,
};
pub use ops::decoding::{
    Position, append, candidates, candidates_needs, copy_rows, join, largest, largest_needs, scores, scores_needs,
};
pub use ops::distillation::{
    Distillation, TopLogits, distillation_backward, distillation_needs, top_distillation_backward,
};
pub use ops::dora::{adapted_row_norms, adapted_row_norms_needs, magnitude_backward, scale_columns};
pub use ops::dropout::{Dropout, dropout, dropout_add, dropout_add_needs, dropout_key, dropout_needs};
pub use ops::embedding::{embedding, embedding_backward, embedding_backward_needs, embedding_by_rows, embedding_needs};
pub use ops::linear::{
    AddedProduct, linear, linear_backward_input, linear_backward_input_needs, linear_backward_input_plus_product,
    linear_backward_input_scaled, linear_backward_weight, linear_backward_weight_needs, linear_needs,
    linear_plus_product, linear_scaled,
};
pub use ops::lion::{LionHyper, lion, lion_needs};
pub use ops::logit_cross_entropy::{logit_cross_entropy, logit_cross_entropy_backward, logit_cross_entropy_needs};
pub use ops::multi_tensor::ReadyUpdates;
pub use ops::narrow_copies::{narrow_each, narrow_each_needs};
pub use ops::norm::{NormWeight, rms_norm, rms_norm_backward, rms_norm_backward_needs, rms_norm_needs};
pub use ops::reduce::{add_in_place, in_place_needs, scaled, scaled_needs, zero, zeros};
pub use ops::relative_bias::{RelativePosition, relative_bias, relative_bias_backward, relative_bias_needs};
pub use ops::rope::{Rope, rope, rope_backward, rope_needs};
pub use ops::rounding::Rounding;
pub use ops::soft_cap::{soft_cap, soft_cap_backward, soft_cap_needs};
pub use ops::token_loss::{LossSums, TokenLoss};
pub use parallel::{PoolThreads, for_each_part, join_threads, threads, with_temporary_threads};
pub use peak::peak_gflops;
pub use processor::{InstructionSet, Processor, processor, set_target_processor, with_target_processor};
pub use quantised::{Precision, Quantisation, Quantised, QuantisedPart, Quantiser, Weight};

/// The version of the kernels. It is raised by every change that gives other bits for the same inputs on the same instruction set.
/// A checkpoint records it.
pub const KERNELS_VERSION: u32 = 11;

/// The same operations in plain candle operations: the oracle of the tests, and the path for devices and
/// dtypes that have no kernel. Signatures and meaning are those of the crate's functions.
pub mod reference {
    pub use crate::ops::activation::reference::*;
    pub use crate::ops::adafactor::reference::*;
    pub use crate::ops::adamw::reference::*;
    pub use crate::ops::adamw_int8::reference::*;
    pub use crate::ops::attention::reference::*;
    pub use crate::ops::cross_entropy::reference::*;
    pub use crate::ops::decoding::reference::*;
    pub use crate::ops::dora::reference::*;
    pub use crate::ops::dropout::reference::*;
    pub use crate::ops::embedding::reference::*;
    pub use crate::ops::linear::reference::*;
    pub use crate::ops::lion::reference::*;
    pub use crate::ops::logit_cross_entropy::reference::*;
    pub use crate::ops::norm::reference::*;
    pub use crate::ops::reduce::reference::*;
    pub use crate::ops::relative_bias::reference::*;
    pub use crate::ops::rope::reference::*;
    pub use crate::ops::rounding::reference::*;
    pub use crate::ops::soft_cap::reference::*;
}
