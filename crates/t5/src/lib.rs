//! T5 for training: layers with explicit forward and backward, Hugging Face names, generation, and the
//! bytes that everything costs.
//!
//! A training step is [`T5::forward_backward`] over the [`MicroBatch`]es of one optimizer batch, which adds
//! to [`Gradients`]; an optimizer then changes [`T5::parameters`] in place. The layers' `Saved` types show the tensors
//! that are kept between forward and backward, and [`costs`] predicts their bytes.
//!
//! ```
//! use candle_core::{DType, Device};
//! use t5::{Config, Gradients, MicroBatch, StepContext, T5};
//!
//! let config = Config { vocab_size: 50, d_model: 16, d_ff: 32, d_kv: 4, num_heads: 4, ..Config::default() };
//! let model = T5::init(&config, 1, DType::F32, &Device::Cpu)?;
//! let mut grads = Gradients::new(model.parameters(), DType::F32, &|_| true);
//! let batch = MicroBatch::new(&[&[7, 8, 9, 1]], &[&[9, 8, 1]], &[0], &config, model.device())?;
//! let cx = StepContext {
//!     seed: 1,
//!     step: 1,
//!     dropout: 0.1,
//!     adapter_dropout: 0.0,
//!     activations: DType::F32,
//!     recompute_blocks: 0,
//!     loss_chunk_rows: 256,
//!     target_tokens: 3,
//!     token_loss: t5_ops::TokenLoss::default(),
//! };
//! let loss_sum = model.forward_backward(&batch, &cx, &mut grads)?;
//! assert!(loss_sum > 0.0);
//! assert_eq!(grads.iter().count(), model.parameters().len());
//! # Ok::<(), t5::Error>(())
//! ```
//!
//! Invariants: memory never changes the mathematics (the cut into micro-batches, recompute and chunk sizes
//! change summation order at most); a frozen parameter costs no gradient and no activation below it; no
//! file's content makes this crate panic.

mod adapted_config;
mod adapter;
mod config;
mod context;
pub mod costs;
mod description;
mod error;
mod family;
mod generate;
mod gradients;
mod head;
mod hf;
mod host_copies;
mod init;
mod label_loss;
mod layers;
mod levers;
mod micro_batch;
mod model;
mod network;
mod ops;
mod pager;
mod parameters;
mod pooling;
mod presets;
mod reach;
pub mod step;
mod stored_dtypes;
mod stored_file;
#[cfg(test)]
#[path = "../../cuda-device/tests/support/device.rs"]
mod test_device;
mod weight_file;

pub use adapter::{LinearLora, Lora, LoraInit, Targets, is_of_adapter};
pub use config::gemma::{Gemma, StackConfig};
pub use config::{Config, Rest};
pub use context::{EvalContext, StepContext};
pub use costs::CostRow;
pub use error::{Error, Result, without_backtrace};
pub use family::Family;
pub use generate::beams::{Beams, EarlyStopping};
pub use generate::processors::Processors;
pub use generate::sampling::Sampling;
pub use generate::{
    Answer, AnswerShape, ContinuousBatch, Encoded, GenerateOptions, Grown, Search, TokenScore, Told, Watch,
};
pub use gradients::Gradients;
pub use head::{Head, Labels, Problem, counted_labels};
pub use hf::{
    AveragedModels, ChangedRows, MergedAdapter, ModelDirectory, QuantisedWeights, StoredModel, StoredWeights,
    average_with, merge_adapter_with, peft, quantise_with, safetensors, weight_files, with_rows,
};
pub use levers::{LayerMajor, Levers};
pub use micro_batch::MicroBatch;
pub use model::T5;
pub use ops::Files;
pub use pager::Pager;
pub use parameters::{Initial, Parameter, ParameterSpec, Part, is_matrix};
pub use pooling::Pooling;
pub use step::observer::{Observer, OwnShards};
pub use step::requests::CollectiveRequest;
pub use stored_dtypes::StoredDtypes;
pub use t5_ops::Precision;
