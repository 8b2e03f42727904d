//! Turns rows into token batches in a reproducible order, a bounded distance ahead.

mod error;
#[cfg(test)]
mod testing;
mod tokenizer;
mod train_tokenizer;

pub use error::{BadRow, BadValue, Error};
pub use tokenizer::{CACHED_WORDS, Tokenizer};
pub use train_tokenizer::{TokenizerTraining, TrainedTokenizer, train_tokenizer_on};
