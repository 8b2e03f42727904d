//! Sizes in which a card is given memory and tables. Bills of a card count them, also in builds without cards.

/// The most bytes of a table that are uploaded at once. By CUDA's programming guide, a copy of up to this many bytes of unpinned memory
/// does not wait for earlier launches.
pub const STAGED_BYTES: u64 = 64 << 10;

/// The bytes that a piece takes of scratch memory.
pub fn of_piece(bytes: u64) -> u64 {
    bytes.next_multiple_of(16)
}
