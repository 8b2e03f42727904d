//! Hugging Face model directories: `config.json`, `generation_config.json`, `model.safetensors` or `pytorch_model.bin`
//! (sharded too).
//!
//! Loading and saving go tensor by tensor, in pieces of [`crate::safetensors::PIECE_BYTES`]: neither
//! needs a second copy of anything.

mod average;
mod carried;
mod load;
mod merge;
mod model_directory;
pub mod peft;
mod pickle;
mod pytorch;
mod quantise;
pub mod safetensors;
mod save;
mod stored_model;
mod vocabulary;
mod zip;

pub use average::{AveragedModels, average_with};
pub(crate) use carried::Carried;
pub(crate) use load::{Keeps, WeightStorage, copying_bytes, load};
pub use load::{StoredWeights, weight_files};
pub use merge::{MergedAdapter, merge_adapter_with};
pub(crate) use model_directory::Loaded;
pub use model_directory::ModelDirectory;
pub use quantise::{QuantisedWeights, quantise_with};
pub(crate) use save::{save, save_with, serve_weights};
pub use stored_model::StoredModel;
pub use vocabulary::{ChangedRows, with_rows};
