//! The norms of the rows of an adapted weight on a card: some rows of the weight exist at a time, in f32.

use candle_core::{DType, Result, Tensor};
use cuda_device::launch::{Factor, Kernel, Module, address, multiply, unwritten};

use crate::quantised::cuda::takes_weight;
use crate::quantised::{Weight, in_panels};

/// Whether all operands are on one card, with the adapter in f32.
pub(super) fn takes(weight: Weight, a: &Tensor, b: &Tensor) -> bool {
    let are_wide = [a, b].iter().all(|t| t.dtype() == DType::F32);
    are_wide && cuda_device::launch::takes([a, b]) && takes_weight(a, weight)
}

/// Rows of a block: a warp each.
const ROWS: usize = 8;

pub(super) fn adapted_row_norms(weight: Weight, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    let (n, k) = weight.dims2()?;
    let rank = a.dim(0)?;
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    let lengths = unwritten(n, DType::F32, a.device())?;
    for panel in in_panels(n, k, size_of::<f32>()) {
        let (first, count) = (panel.start, panel.len());
        let rows = match weight {
            // A copy, because the product is added to it.
            Weight::Dense(w) | Weight::ByRows(w) if w.dtype() == DType::F32 => {
                w.narrow(0, first, count)?.force_contiguous()?
            }
            Weight::Dense(w) | Weight::ByRows(w) => w.narrow(0, first, count)?.to_dtype(DType::F32)?.contiguous()?,
            Weight::Quantised(w) => w.part_on_card(panel, 0..k, DType::F32)?,
        };
        let of_b = b.narrow(0, first, count)?;
        multiply(Factor::plain(&of_b), Factor::plain(&a), &rows, (count, rank, k), scale as f32, 1.0)?;
        let to = address(&lengths)? + (first * size_of::<f32>()) as u64;
        let kernel = Kernel::new(a.device(), Module::Norm, "row_lengths")?.tensor(&rows)?.value(to);
        // SAFETY: rows of this width, and a norm for each from `to` on.
        unsafe { kernel.size(count)?.size(k)?.launch([count.div_ceil(ROWS), 1, 1], 32 * ROWS as u32, 0)? };
    }
    Ok(lengths)
}
