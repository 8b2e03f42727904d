//! The operations of weight-decomposed adapters (DoRA, Liu et al. 2024) besides the linear map: the norms of the rows of an adapted
//! weight, factors on columns, and the gradient of magnitudes.
//!
//! Shapes: weight (N, K), a (r, K), b (N, r), x and y (.., N), vectors (N).

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor, bail};

use crate::dispatch::{Path, check_accumulator, check_shape, rows_and_width};
use crate::needs::{Needs, elements};
use crate::quantised::{Weight, panel_bytes};

/// Returns the norms of the rows of `W + scale · B A`, which never exists whole: (N) in F32, or in F64 for F64.
pub fn adapted_row_norms<'a>(weight: impl Into<Weight<'a>>, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    let weight = weight.into();
    let (n, k) = weight.dims2()?;
    let (rank, _) = a.dims2()?;
    check_shape("adapted_row_norms", "a", a, &[rank, k])?;
    check_shape("adapted_row_norms", "b", b, &[n, rank])?;
    match weight.path_with(a).provided(Path::choose(&[b]) == Path::Cpu) {
        Path::Cpu => cpu::adapted_row_norms(weight, a, b, scale),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes(weight, a, b) => cuda::adapted_row_norms(weight, a, b, scale),
        Path::Reference | Path::Device => reference::adapted_row_norms(weight, a, b, scale),
    }
}

/// Returns the needs of [`adapted_row_norms`] for a weight (N, K) and this rank.
pub fn adapted_row_norms_needs(path: Path, (n, k): (usize, usize), rank: usize) -> Needs {
    match path {
        // The products of A with W and with itself.
        Path::Cpu => Needs::bytes(elements([rank, n + rank, size_of::<f32>()])).with_products(1, (rank, k, n)),
        Path::Reference => Needs::bytes(elements([3, n, k, size_of::<f64>()])).with_products(1, (n, rank, k)),
        // Rows of the weight in f32, to which the rows of the product are added.
        Path::Device => Needs::bytes(panel_bytes(n, k, size_of::<f32>())).with_products(1, (n, rank, k)),
    }
}

/// Multiplies column `j` of `y` by `factors[j]`, in place: no other handle to `y` may be read afterwards.
pub fn scale_columns(y: Tensor, factors: &Tensor) -> Result<Tensor> {
    let (_, width) = rows_and_width("scale_columns", "y", &y)?;
    check_shape("scale_columns", "factors", factors, &[width])?;
    match Path::choose(&[&y, factors]).provided(y.is_contiguous()) {
        Path::Cpu => cpu::scale_columns(y, factors),
        Path::Reference | Path::Device => reference::scale_columns(&y, factors),
    }
}

/// Adds to `dmagnitude` the sums over rows of `dy z / lengths`. All sums are in F32 or wider.
pub fn magnitude_backward(dy: &Tensor, z: &Tensor, lengths: &Tensor, dmagnitude: &Tensor) -> Result<()> {
    let (_, width) = rows_and_width("magnitude_backward", "dy", dy)?;
    if dy.dims() != z.dims() || dy.dtype() != z.dtype() {
        bail!("magnitude_backward: expected dy and z of one shape, got {:?} and {:?}", dy.dims(), z.dims())
    }
    check_shape("magnitude_backward", "lengths", lengths, &[width])?;
    check_accumulator("magnitude_backward", "dmagnitude", dmagnitude, &[width])?;
    match Path::choose(&[dy, z, lengths, dmagnitude]) {
        Path::Cpu => cpu::magnitude_backward(dy, z, lengths, dmagnitude),
        Path::Reference | Path::Device => reference::magnitude_backward(dy, z, lengths, dmagnitude),
    }
}
