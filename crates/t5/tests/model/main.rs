//! Tests of whole models: against transformers' golden files, against candle's autograd and T5, of model
//! directories, and of properties that hold for every memory plan.

mod adapters;
mod autograd;
mod candle;
mod decoding;
mod directories;
mod gguf;
mod layer_major;
mod properties;
mod quantised;
mod support;
mod transformers;
