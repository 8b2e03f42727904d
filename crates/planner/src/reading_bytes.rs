//! The bytes of reading, for every kind of rows.

/// The bytes that the rows of an evaluation or the prompts of answers take. A command alternates between reading them and computing with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Bytes while rows are read and tokenized.
    pub rows: u64,
    /// Bytes of the batch during computation. By then, the tokenizer's small blocks have been freed.
    pub batch: u64,
}
