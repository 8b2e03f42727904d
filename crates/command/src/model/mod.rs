//! Directories of models and tokenizers, found by the names that users have for them.

pub mod base;
pub mod base_digests;
pub mod frozen;
pub mod model_directory;
pub mod model_files;
pub mod sources;
