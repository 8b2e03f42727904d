//! Bytes that reading and comparing stored tensors hold, beside what is read.

use candle_core::DType;

use super::{COMPARED_ELEMENTS, PIECE_BYTES};

/// Bytes of a value in the dtypes that parameters are stored in.
const STORED_SIZES: [u64; 3] = [2, 4, 8];

/// What [`super::Reader::read`] holds at most beside the tensor of `elements` values that it returns, whatever it is stored in: a
/// piece as bytes and as values, and once more where they are converted.
pub(crate) fn reading_bytes(elements: u64, dtype: DType) -> u64 {
    of_pieces(elements, |stored| 2 * stored + converted_bytes(stored, dtype))
}

/// What a device holds meanwhile beside the tensor, where that is on one: a piece as values, and once more where they are converted.
pub(crate) fn reading_bytes_on_device(elements: u64, dtype: DType) -> u64 {
    of_pieces(elements, |stored| stored + converted_bytes(stored, dtype))
}

/// The most bytes of a piece, whatever dtype it is stored in: `of_value` says how many a value of that size takes.
fn of_pieces(elements: u64, of_value: impl Fn(u64) -> u64) -> u64 {
    let bytes = |stored: u64| elements.min(PIECE_BYTES as u64 / stored) * of_value(stored);
    STORED_SIZES.into_iter().map(bytes).max().unwrap_or(0)
}

/// Bytes of the converted copy of a value that takes `stored` bytes in its file: none where it is not converted.
fn converted_bytes(stored: u64, dtype: DType) -> u64 {
    if stored == 4 && dtype == DType::F32 { 0 } else { dtype.size_in_bytes() as u64 }
}

/// The most bytes that [`super::are_equal`] holds for two tensors of `elements` elements, for the largest dtype that they may be stored in: pieces
/// as bytes, as values and as values of `dtype`, and the places where they differ as bytes and as numbers.
pub(crate) fn comparing_bytes(elements: u64, dtype: DType) -> u64 {
    let width = dtype.size_in_bytes() as u64;
    let bytes = |stored: u64| elements.min(COMPARED_ELEMENTS as u64) * (4 * stored + 2 * width + 5);
    STORED_SIZES.into_iter().map(bytes).max().unwrap_or(0)
}
