//! Conversion of parts of a quantised weight to numbers, and products of few rows with its codes, on a card.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use cuda_device::launch::{Kernel, Module, address, card_number, suffix, takes, unwritten};

use super::{MAX_SMALL_M, Precision, Quantised, Weight};

/// Threads of a block, and the units, of eight elements or of one, for each thread.
const THREADS: usize = 256;
const UNITS_EACH: usize = 4;
/// Bytes of the values of NF4's codes and of the codes of its scales.
const TABLES_BYTES: usize = (16 + 256) * size_of::<f32>();
/// For a product of few rows: warps of a block, and columns of the rows that are in shared memory at a time.
const WARPS: usize = THREADS / 32;
const AT_ONCE: usize = 512;
/// The kernels of that product: the rows of a block.
const INSTANCES: [usize; 2] = [4, 8];

/// Whether there are kernels for this operand and a weight in numbers or in codes.
pub(crate) fn takes_weight(operand: &Tensor, weight: Weight) -> bool {
    match weight {
        Weight::Dense(weight) | Weight::ByRows(weight) => takes([operand, weight]),
        Weight::Quantised(weight) => takes([operand]) && are_on_one_card(operand, weight.bytes()),
    }
}

fn are_on_one_card(a: &Tensor, b: &Tensor) -> bool {
    card_number(a.device()) == card_number(b.device())
}

impl Quantised {
    /// Converts rows and columns of the weight to F32 or BF16, on its card.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn part_on_card(&self, rows: Range<usize>, columns: Range<usize>, dtype: DType) -> Result<Tensor> {
        let (height, width) = self.quantisation.shape();
        assert!(rows.end <= height && columns.end <= width, "{rows:?} and {columns:?} of {height} x {width}");
        let part = unwritten((rows.len(), columns.len()), dtype, self.bytes.device())?;
        let precision = self.quantisation.precision();
        let name = format!("dequantise_{}_{}", precision.name(), suffix(dtype));
        let mut kernel = self.kernel(Module::Dequantise, name)?;
        kernel = kernel.tensor(&part)?.size(width)?.size(rows.start)?.size(columns.start)?;
        kernel = kernel.size(rows.len())?.size(columns.len())?;
        let unit = if (width | columns.start | columns.len()).is_multiple_of(8) { 8 } else { 1 };
        let units = rows.len() * columns.len() / unit;
        // SAFETY: the parts of the weight follow each other, and rows and columns are within it; the result has room for each.
        unsafe { kernel.launch([units.div_ceil(THREADS * UNITS_EACH), 1, 1], THREADS as u32, self.table_bytes())? };
        Ok(part)
    }

    /// `y = x Wᵀ` for at most [`MAX_SMALL_M`] rows x (R, in), contiguous, into y (R, out): codes are converted as they are read.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn multiply_few(&self, x: &Tensor, y: &Tensor, rows: usize) -> Result<()> {
        let (outputs, width) = self.quantisation.shape();
        let sizes = (rows * width, rows * outputs);
        assert!(
            rows <= MAX_SMALL_M && (x.elem_count(), y.elem_count()) == sizes,
            "{rows} rows of {width} and {outputs}"
        );
        let each = if rows <= INSTANCES[0] { INSTANCES[0] } else { INSTANCES[1] };
        let name = format!("small_m_{each}_{}_{}", self.quantisation.precision().name(), suffix(x.dtype()));
        let kernel = self.kernel(Module::SmallM, name)?.tensor(x)?.tensor(y)?;
        let kernel = kernel.size(rows)?.size(width)?.size(outputs)?;
        let shared = self.table_bytes() + each * AT_ONCE * size_of::<f32>();
        // SAFETY: the parts of the weight follow each other; x and y have this many rows, of its widths.
        unsafe { kernel.launch([outputs.div_ceil(WARPS), rows.div_ceil(each), 1], THREADS as u32, shared) }
    }

    /// A kernel whose first arguments are the parts of this weight.
    fn kernel(&self, module: Module, name: String) -> Result<Kernel<'_>> {
        let mut kernel = Kernel::new(self.bytes.device(), module, name)?;
        let mut at = address(&self.bytes)?;
        for part in self.quantisation.parts() {
            kernel = kernel.value(at);
            at += part.bytes() as u64;
        }
        Ok(kernel)
    }

    fn table_bytes(&self) -> usize {
        if self.quantisation.precision() == Precision::Nf4 { TABLES_BYTES } else { 0 }
    }
}
