//! The linear map `y = x Wᵀ` without a bias, and its two gradients. A frozen weight may be narrower than the dtype of the computation: f16,
//! or quantised.
//!
//! Shapes: x (.., K), w (N, K), y (.., N). The leading dimensions are rows: R is their product.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::{Path, check_accumulator, check_shape, rows_and_width};
use crate::needs::{Calls, Needs, cast, elements};
use crate::ops::reduce::scaled;
use crate::quantised::{MAX_SMALL_M, Weight, in_panels, panel_bytes};

/// A product that is added to another one in the same precision, such as an adapter's narrow product.
#[derive(Clone, Copy, Debug)]
pub struct AddedProduct<'a> {
    /// (.., R), as many rows as the other product has.
    pub x: &'a Tensor,
    /// (N, R) for [`linear`], (R, K) for [`linear_backward_input`].
    pub w: &'a Tensor,
}

/// `x Wᵀ`: (.., K) times the transpose of (N, K) gives (.., N). The result and the product have the dtype of `x`: a weight in another
/// dtype, or in codes, is converted to it.
pub fn linear<'a>(x: &Tensor, w: impl Into<Weight<'a>>) -> Result<Tensor> {
    linear_plus_product(x, w, None)
}

/// `scale · x Wᵀ`, equal to [`scaled`] of [`linear`]. A card scales while it multiplies, so in bf16 it rounds once and not twice.
pub fn linear_scaled(x: &Tensor, w: &Tensor, scale: f64) -> Result<Tensor> {
    output(x, w.into(), scale, None)
}

/// [`linear`], plus the added product.
pub fn linear_plus_product<'a>(x: &Tensor, w: impl Into<Weight<'a>>, added: Option<AddedProduct>) -> Result<Tensor> {
    output(x, w.into(), 1.0, added)
}

/// [`linear`], either scaled or with an added product.
fn output(x: &Tensor, w: Weight, scale: f64, added: Option<AddedProduct>) -> Result<Tensor> {
    let (n, width) = w.dims2()?;
    let _span = tracing::debug_span!("linear", flops = flops(x, n, added)).entered();
    let (rows, k) = rows_and_width("linear", "x", x)?;
    check_weight("linear", (n, k), (n, width))?;
    check_added("linear", added, x, rows, |rank| [n, rank])?;
    match w.path_with(x).provided(are_on_cpu(added)) {
        Path::Cpu => times(cpu::linear(x, w, added)?, scale),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes(x, w, added) => cuda::linear(x, w, scale, added),
        Path::Reference | Path::Device => times(reference::linear_plus_product(x, w, added)?, scale),
    }
}

/// Returns the needs of [`linear`] for `rows` rows and a weight (N, K), and for an added product with a weight (N, `added`) unless that
/// is zero. `dtypes`: of x and w, with U8 for a quantised w.
pub fn linear_needs(path: Path, rows: usize, (n, k): (usize, usize), dtypes: [DType; 2], added: usize) -> Needs {
    let size = (k, added, n);
    match path {
        Path::Cpu => cpu::product_needs(rows, size, dtypes[0]),
        Path::Reference => reference::product_needs(rows, size, dtypes, false),
        Path::Device if rows <= MAX_SMALL_M && dtypes[1] == DType::U8 => small_m_needs_on_device(rows, size, dtypes[0]),
        // The rows of the weight that are numbers at a time give whole columns of the result.
        Path::Device => product_needs_on_device(rows, size, dtypes),
    }
}

/// An error unless `sum` has the shape of `x` with another width, and its dtype.
fn check_sum(op: &str, sum: &Tensor, x: &Tensor, width: usize) -> Result<()> {
    let mut expected = x.dims().to_vec();
    expected.pop();
    expected.push(width);
    check_shape(op, "sum", sum, &expected)?;
    if sum.dtype() != x.dtype() {
        bail!("{op}: sum: expected {:?}, got {:?}", x.dtype(), sum.dtype())
    }
    Ok(())
}

/// The gradient with respect to the input: `dy W`, plus `accumulate` if given.
///
/// dy (.., N), w (N, K), result (.., K) in the dtype of `dy`. The caller gives up `accumulate`: its
/// memory may be overwritten with the result, so no other handle to it may be read afterwards.
pub fn linear_backward_input<'a>(dy: &Tensor, w: impl Into<Weight<'a>>, accumulate: Option<Tensor>) -> Result<Tensor> {
    linear_backward_input_plus_product(dy, w, None, accumulate)
}

/// `scale · dy W`, as [`linear_scaled`].
pub fn linear_backward_input_scaled(dy: &Tensor, w: &Tensor, scale: f64) -> Result<Tensor> {
    gradient_of_input(dy, w.into(), scale, None, None)
}

/// [`linear_backward_input`], plus the added product.
pub fn linear_backward_input_plus_product<'a>(
    dy: &Tensor,
    w: impl Into<Weight<'a>>,
    added: Option<AddedProduct>,
    accumulate: Option<Tensor>,
) -> Result<Tensor> {
    gradient_of_input(dy, w.into(), 1.0, added, accumulate)
}

/// [`linear_backward_input`], either scaled, or with an added product and the accumulated tensor.
fn gradient_of_input(
    dy: &Tensor,
    w: Weight,
    scale: f64,
    added: Option<AddedProduct>,
    accumulate: Option<Tensor>,
) -> Result<Tensor> {
    let (height, k) = w.dims2()?;
    let _span = tracing::debug_span!("linear_backward_input", flops = flops(dy, k, added)).entered();
    let (rows, n) = rows_and_width("linear_backward_input", "dy", dy)?;
    check_weight("linear_backward_input", (n, k), (height, k))?;
    check_added("linear_backward_input", added, dy, rows, |rank| [rank, k])?;
    if let Some(accumulate) = &accumulate {
        check_sum("linear_backward_input", accumulate, dy, k)?;
    }
    match w.path_with(dy).provided(are_on_cpu(added)) {
        Path::Cpu => times(cpu::linear_backward_input(dy, w, added, accumulate)?, scale),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes(dy, w, added) => cuda::linear_backward_input(dy, w, scale, added, accumulate),
        Path::Reference | Path::Device => {
            times(reference::linear_backward_input_plus_product(dy, w, added, accumulate)?, scale)
        }
    }
}

/// [`scaled`], in the same memory if the scale is 1.
fn times(x: Tensor, scale: f64) -> Result<Tensor> {
    if scale == 1.0 { Ok(x) } else { scaled(&x, scale) }
}

/// Returns the needs of [`linear_backward_input`], as [`linear_needs`]. `dtypes`: of dy and w.
pub fn linear_backward_input_needs(
    path: Path,
    rows: usize,
    (n, k): (usize, usize),
    dtypes: [DType; 2],
    added: usize,
    accumulates: bool,
) -> Needs {
    let size = (n, added, k);
    match path {
        Path::Cpu => cpu::product_needs(rows, size, dtypes[0]),
        Path::Reference => reference::product_needs(rows, size, dtypes, accumulates),
        Path::Device => product_needs_on_device(rows, size, dtypes),
    }
}

/// Operations of a product of `x` with `width` columns, and of the added product.
fn flops(x: &Tensor, width: usize, added: Option<AddedProduct>) -> usize {
    2 * (x.elem_count() + added.map_or(0, |added| added.x.elem_count())) * width
}

/// An error unless the added product has as many rows as `x`, the dtype of `x`, and a weight of the size that `size` gives for its
/// rank.
fn check_added(
    op: &str,
    added: Option<AddedProduct>,
    x: &Tensor,
    rows: usize,
    size: impl Fn(usize) -> [usize; 2],
) -> Result<()> {
    let Some(added) = added else { return Ok(()) };
    let (added_rows, rank) = rows_and_width(op, "x beside", added.x)?;
    if added_rows != rows || added.x.dtype() != x.dtype() {
        let (expected, got) = (x.dtype(), added.x.dtype());
        bail!("{op}: x beside: expected {rows} rows of {expected:?}, got {added_rows} of {got:?}")
    }
    check_shape(op, "weight beside", added.w, &size(rank))
}

fn are_on_cpu(added: Option<AddedProduct>) -> bool {
    added.is_none_or(|AddedProduct { x, w }| Path::choose(&[x, w]) == Path::Cpu)
}

/// The gradient with respect to the weight, in place: `dw += dyᵀ x` with `accumulate`, otherwise `dw = dyᵀ x`.
///
/// dy (.., N), x (.., K), dw (N, K). The sum over rows is in f32; a bf16 `dw` is rounded to nearest once per call.
pub fn linear_backward_weight(dy: &Tensor, x: &Tensor, dw: &Tensor, accumulate: bool) -> Result<()> {
    let _span = tracing::debug_span!("linear_backward_weight", flops = 2 * dy.elem_count() * dw.dim(1)?).entered();
    let (rows, n) = rows_and_width("linear_backward_weight", "dy", dy)?;
    let (x_rows, k) = rows_and_width("linear_backward_weight", "x", x)?;
    if rows != x_rows {
        bail!("linear_backward_weight: expected as many rows in dy as in x, got {rows} and {x_rows}")
    }
    check_accumulator("linear_backward_weight", "dw", dw, &[n, k])?;
    match Path::choose(&[dy, x, dw]) {
        Path::Cpu => cpu::linear_backward_weight(dy, x, dw, accumulate),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes_gradient(dy, x, dw) => cuda::linear_backward_weight(dy, x, dw, accumulate),
        Path::Reference | Path::Device => reference::linear_backward_weight(dy, x, dw, accumulate),
    }
}

/// Returns the needs of [`linear_backward_weight`] for `rows` rows and a weight (N, K). `dtypes`: of dy and x, and of dw.
pub fn linear_backward_weight_needs(path: Path, rows: usize, (n, k): (usize, usize), dtypes: [DType; 2]) -> Needs {
    match path {
        Path::Cpu => cpu::backward_weight_needs(rows, (n, k), dtypes),
        Path::Reference => reference::backward_weight_needs(rows, (n, k), dtypes),
        Path::Device => Needs::default().with_products(1, (rows, n, k)).with_calls(products(1)),
    }
}

/// A product on a card: the weight in the dtype of x, or one panel of it at a time if it is in codes. The weight of an added product is
/// then of f32.
fn product_needs_on_device(rows: usize, (k, added, n): (usize, usize, usize), [x, w]: [DType; 2]) -> Needs {
    let size = x.size_in_bytes();
    let (transient, calls) = match w {
        DType::U8 => {
            let panels = in_panels(n, k, size).count() as u64;
            // Each panel is converted to numbers.
            let calls = Calls { launches: panels, ..products(panels) };
            (panel_bytes(n, k, size).max(cast(elements([added, n]), DType::F32, x)), calls)
        }
        _ => (cast(elements([k.max(added), n]), w, x), products(1) + casts(w, x)),
    };
    // The weight of an added product is an adapter's, which may have another dtype: the adapter's owner counts the cast.
    let calls = calls + products(u64::from(added > 0));
    Needs::bytes(transient).with_products(1, (rows, k + added, n)).with_calls(calls)
}

/// A product of few rows with codes on a card, in one launch; an added product has a weight of f32.
fn small_m_needs_on_device(rows: usize, (k, added, n): (usize, usize, usize), x: DType) -> Needs {
    let calls = Calls { launches: 1, ..products(u64::from(added > 0)) };
    let transient = cast(elements([added, n]), DType::F32, x);
    Needs::bytes(transient).with_products(1, (rows, k + added, n)).with_calls(calls)
}

/// This many products on a card.
fn products(products: u64) -> Calls {
    Calls { products, ..Calls::default() }
}

/// The cast of a weight to the dtype of its product, on a card.
pub(crate) fn casts(from: DType, to: DType) -> Calls {
    Calls { launches: u64::from(from != to), ..Calls::default() }
}

fn check_weight(op: &str, expected: (usize, usize), got: (usize, usize)) -> Result<()> {
    if expected != got {
        bail!("{op}: weight: expected shape [{}, {}], got [{}, {}]", expected.0, expected.1, got.0, got.1)
    }
    Ok(())
}
