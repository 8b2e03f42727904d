//! Answers of a trained model, for the commands that give them.

pub mod batches;
pub mod encoder;
pub mod fasta;
pub mod inference;
pub mod predictions;
pub mod prompts;
pub mod ranker;
pub mod vectors;
