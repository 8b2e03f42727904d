//! Turns rows into token batches in a reproducible order, a bounded distance ahead.
//!
//! A [`DataLoader`] hands out whole optimizer batches of token ids. The rows of a batch are a pure function of seed,
//! epoch and position ([`Order`]). The [`Objective`] and the [`Tokenizer`] determine how a row becomes a sample.
//! [`LoaderLimits`] set when batches are made, and on how many threads; they never change the batches. See
//! [`DataLoader`] for the loop.
//!
//! Invariants:
//! - The stream of batches depends on (seed, data, tokenizer, options) alone, never on threads, depth or memory.
//! - Every row is met exactly once an epoch. A row that cannot be a sample is an error or is counted, never silently
//!   dropped.
//! - State is a [`Position`], counted in consumed samples: resuming is a seek, exact at any sample.
//! - Memory is bounded by [`costs`]: no buffer, cache or queue grows with the data.
//!
//! Deliberately absent: padding and tensors (the trainer cuts micro-batches and pads them), and the choice of limits
//! (the memory policy makes it).

mod batch;
mod bpe;
mod costs;
mod error;
mod loader;
mod mixture;
mod objective;
mod order;
mod permutation;
mod random;
mod row_text;
mod side;
#[cfg(test)]
mod testing;
mod texts;
mod tokenizer;
mod train_tokenizer;

pub use batch::{BadRows, Batch, KEPT_TEXT_BYTES, Position};
pub use costs::{CostRow, batch_bytes, costs};
pub use error::{BadRow, BadValue, Error};
pub use loader::{BatchShare, DataLoader, LoaderLimits, LoaderOptions};
pub use mixture::{MixedTask, Mixing, Mixture, samples_of};
pub use objective::{
    Denoiser, Noise, Objective, SampleLimits, SpanCorruption, labels_of_set, noise_mask, tokens_and_targets_length,
    words_and_labels,
};
pub use order::{EpochOrder, Order, OrderOptions};
pub use permutation::Permutation;
pub use random::{Key, Stream};
pub use side::Side;
pub use texts::TextFiles;
pub use tokenizer::{COMPANION_FILES, ChangedTokenizer, LossyText, LossyTexts, Tokenizer, TokenizerJson, Vocabulary};
pub use train_tokenizer::{
    TokenizerTraining, TrainedTokenizer, train_tokenizer, train_tokenizer_on, train_tokenizer_on_files,
};
