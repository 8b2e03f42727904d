//! The bytes of reading, whoever reads.

/// The bytes that the rows of an evaluation take: it reads some, and then computes with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// While they are read and tokenized.
    pub rows: u64,
    /// While the batch that was made of them is computed with. The small blocks of tokenizing were given back.
    pub batch: u64,
}
