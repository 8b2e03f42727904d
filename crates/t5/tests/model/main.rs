//! Tests of whole models: against transformers' golden files, against candle's autograd, and of what must
//! hold whatever memory decides.

mod autograd;
mod properties;
mod support;
mod transformers;
