//! Parts of a weight in codes as numbers, on a card.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};

use super::{Precision, Quantised};
use crate::cuda::{Kernel, Module, address, suffix, unwritten};

/// Threads of a block, and the units of eight elements or of one that each has.
const THREADS: usize = 256;
const UNITS_EACH: usize = 4;
/// The values of NF4's codes, and of those of its scales.
const TABLES_BYTES: usize = (16 + 256) * size_of::<f32>();

impl Quantised {
    /// Rows and columns of it in F32 or BF16, on its card.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn part_on_card(&self, rows: Range<usize>, columns: Range<usize>, dtype: DType) -> Result<Tensor> {
        let (height, width) = self.quantisation.shape();
        assert!(rows.end <= height && columns.end <= width, "{rows:?} and {columns:?} of {height} x {width}");
        let part = unwritten((rows.len(), columns.len()), dtype, self.bytes.device())?;
        let precision = self.quantisation.precision();
        let name = format!("dequantise_{}_{}", precision.name(), suffix(dtype));
        let mut kernel = Kernel::new(self.bytes.device(), Module::Dequantise, name)?;
        let mut at = address(&self.bytes)?;
        for part in self.quantisation.parts() {
            kernel = kernel.value(at);
            at += part.bytes() as u64;
        }
        kernel = kernel.tensor(&part)?.size(width)?.size(rows.start)?.size(columns.start)?;
        kernel = kernel.size(rows.len())?.size(columns.len())?;
        let unit = if (width | columns.start | columns.len()).is_multiple_of(8) { 8 } else { 1 };
        let units = rows.len() * columns.len() / unit;
        let shared = if precision == Precision::Nf4 { TABLES_BYTES } else { 0 };
        // SAFETY: the parts of the weight follow each other, and rows and columns are within it; the part has a place for each.
        unsafe { kernel.launch([units.div_ceil(THREADS * UNITS_EACH), 1, 1], THREADS as u32, shared)? };
        Ok(part)
    }
}
