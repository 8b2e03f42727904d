//! Bytes that reading, comparing and writing tensors hold, beside the tensors.

use candle_core::DType;

use super::{COMPARED_ELEMENTS, PIECE_BYTES, WRITTEN_ELEMENTS};

/// The dtypes that parameters may be stored in.
const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// A block of the host's memory is whole pages.
const PAGE_BYTES: u64 = 4 << 10;

/// The dtypes of the matrices in some files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredIn([bool; FLOATS.len()]);

impl StoredIn {
    /// The dtypes of files that were not examined: any.
    pub const ANY: Self = Self([true; FLOATS.len()]);

    /// A set of these dtypes.
    pub fn from_dtypes(dtypes: impl IntoIterator<Item = DType>) -> Self {
        let mut found = [false; FLOATS.len()];
        dtypes
            .into_iter()
            .filter_map(|dtype| FLOATS.iter().position(|float| *float == dtype))
            .for_each(|at| found[at] = true);
        Self(found)
    }

    /// This set, together with another.
    #[must_use]
    pub fn and(self, others: Self) -> Self {
        Self::from_dtypes(self.dtypes().chain(others.dtypes()))
    }

    fn dtypes(self) -> impl Iterator<Item = DType> {
        FLOATS.into_iter().zip(self.0).filter_map(|(dtype, is_there)| is_there.then_some(dtype))
    }

    /// The most bytes that [`super::Reader::read`] holds beside the tensor of `elements` values of `dtype` that it returns: a piece as bytes
    /// and as values, and a second time where the values are converted.
    pub(crate) fn reading_bytes(self, elements: u64, dtype: DType) -> u64 {
        let block = |bytes: u64| bytes.next_multiple_of(PAGE_BYTES);
        self.of_pieces(elements, |stored, values| {
            2 * block(values * size(stored)) + block(values * converted_bytes(stored, dtype))
        })
    }

    /// The most bytes that a device holds meanwhile, if the tensor is on one: a piece as values, and a second time where they are converted.
    pub(crate) fn reading_bytes_on_device(self, elements: u64, dtype: DType) -> u64 {
        self.of_pieces(elements, |stored, values| values * (size(stored) + converted_bytes(stored, dtype)))
    }

    /// The most bytes of a piece. `of_piece` returns the bytes for a stored dtype and a number of values.
    fn of_pieces(self, elements: u64, of_piece: impl Fn(DType, u64) -> u64) -> u64 {
        let bytes = |stored: DType| of_piece(stored, elements.min(PIECE_BYTES as u64 / size(stored)));
        self.dtypes().map(bytes).max().unwrap_or(0)
    }

    /// The most bytes that [`super::are_equal`] holds for two tensors of `elements` elements: pieces as bytes, as values and as values of
    /// `dtype`, and the places where they differ as bytes and as numbers.
    pub(crate) fn comparing_bytes(self, elements: u64, dtype: DType) -> u64 {
        let bytes = |stored: DType| elements.min(COMPARED_ELEMENTS as u64) * (4 * size(stored) + 2 * size(dtype) + 5);
        self.dtypes().map(bytes).max().unwrap_or(0)
    }
}

/// The most bytes of large blocks that [`super::Writer::write`] holds beside a tensor of `elements` values of `dtype` that it writes
/// as `stored`. A piece is there as values, as bytes, and again where it is converted or copied from a device. bf16 values go
/// through f32: two such pieces exist before the bytes do.
pub fn writing_bytes(elements: u64, dtype: DType, stored: DType, is_on_device: bool) -> u64 {
    let values = elements.min(WRITTEN_ELEMENTS as u64);
    let block = |size: u64| (values * size).next_multiple_of(PAGE_BYTES);
    let copied = if is_on_device { size(dtype) } else { 0 };
    let through = if stored == DType::BF16 { DType::F32 } else { stored };
    block(copied) + block(converted_bytes(dtype, stored)) + 2 * block(size(through))
}

/// Bytes of the converted copy of a value: none where it is not converted.
fn converted_bytes(stored: DType, dtype: DType) -> u64 {
    if stored == dtype { 0 } else { size(dtype) }
}

fn size(dtype: DType) -> u64 {
    dtype.size_in_bytes() as u64
}
