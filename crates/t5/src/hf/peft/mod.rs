//! Adapters in PEFT's directories: `adapter_config.json`, and the adapter's tensors in f32.
//!
//! ```text
//! base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight       (rank, in)
//! base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_B.weight       (out, rank)
//! base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_magnitude_vector (out)   with DoRA
//! base_model.model.lm_head.weight                                              a module that is saved whole
//! ```
//!
//! A classifier's stacks are in its module `transformer`. The classifier itself is a module that is saved whole.
//!
//! The semantics are PEFT 0.21's. An adapter with anything unsupported is refused, with the key or tensor at fault.

mod config;
mod entries;
mod head;
mod modules;
mod patterns;
mod save;
mod weights;

pub use config::{AdaptedLinear, AdapterConfig, CONFIG_FILE, Layout};
pub use save::{ADAPTER_FILES, save_with};
pub use weights::AdapterDirectory;

/// The prefix of the model's names in PEFT's files.
const PREFIX: &str = "base_model.model.";
