//! The operations, a folder each: `mod` has its public functions and chooses a path, `cpu` has the kernels for the CPU, and `reference` the
//! same functions in plain candle operations. The bytes that an operation holds while it runs are stated beside its kernel.

pub(crate) mod activation;
pub(crate) mod adafactor;
pub(crate) mod adamw;
pub(crate) mod adamw_int8;
pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod decoding;
pub(crate) mod distillation;
pub(crate) mod dora;
pub(crate) mod dropout;
pub(crate) mod embedding;
pub(crate) mod linear;
pub(crate) mod lion;
pub(crate) mod logit_cross_entropy;
pub(crate) mod multi_tensor;
pub(crate) mod narrow_copies;
pub(crate) mod norm;
pub(crate) mod reduce;
pub(crate) mod relative_bias;
pub(crate) mod rope;
pub(crate) mod rounding;
pub(crate) mod soft_cap;
pub(crate) mod token_loss;
