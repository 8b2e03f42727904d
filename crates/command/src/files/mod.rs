//! The files that a command writes, by name: the output directory, its metrics, and the space for them.

pub mod assets;
pub mod disk;
pub mod metrics;
pub mod outputs;
pub mod run_dir;
pub mod sentence_transformers;
