//! The linear map `y = x Wᵀ` without a bias, and its two gradients. A frozen weight may be narrower than what is computed
//! with: f16, or quantised.
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
use crate::needs::{Needs, cast, elements};
use crate::quantised::Weight;

/// `x Wᵀ`: (.., K) times the transpose of (N, K) gives (.., N), in the dtype of `x`, which is also the
/// precision of the product: a weight in another dtype, or in codes, has the values that it has in that one.
pub fn linear<'a>(x: &Tensor, w: impl Into<Weight<'a>>) -> Result<Tensor> {
    let w = w.into();
    let (n, width) = w.dims2()?;
    let _span = tracing::debug_span!("linear", flops = 2 * x.elem_count() * n).entered();
    let (_, k) = rows_and_width("linear", "x", x)?;
    check_weight("linear", (n, k), (n, width))?;
    match w.path_beside(x) {
        Path::Cpu => cpu::linear(x, w),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes(x, w) => cuda::linear(x, w.tensor(), None),
        Path::Reference | Path::Device => reference::linear(x, w),
    }
}

/// What [`linear`] needs for `rows` rows and a weight (N, K): the dtypes of x and w, U8 where that is quantised.
pub fn linear_needs(path: Path, rows: usize, (n, k): (usize, usize), dtypes: [DType; 2]) -> Needs {
    match path {
        Path::Cpu => cpu::product_needs(rows, (k, n), dtypes[0]),
        Path::Reference => reference::product_needs(rows, (k, n), dtypes, false),
        Path::Device => product_needs_on_device(rows, (k, n), dtypes),
    }
}

/// `sum + x Wᵀ`, in the memory of `sum`, which has the dtype of `x`: no other handle to it may be read afterwards.
pub fn linear_add(x: &Tensor, w: &Tensor, sum: Tensor) -> Result<Tensor> {
    let _span = tracing::debug_span!("linear_add", flops = 2 * x.elem_count() * w.dim(0)?).entered();
    let (_, k) = rows_and_width("linear_add", "x", x)?;
    let (n, _) = w.dims2()?;
    check_shape("linear_add", "weight", w, &[n, k])?;
    check_sum("linear_add", &sum, x, n)?;
    match Path::of(&[x, w]) {
        Path::Cpu => cpu::linear_add(x, w, sum),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes(x, w.into()) => cuda::linear(x, w, Some(sum)),
        Path::Reference | Path::Device => reference::linear_add(x, w, &sum),
    }
}

/// What [`linear_add`] needs for `rows` rows and a weight (N, K): the dtypes of x and w.
pub fn linear_add_needs(path: Path, rows: usize, (n, k): (usize, usize), dtypes: [DType; 2]) -> Needs {
    match path {
        Path::Cpu => cpu::product_needs(rows, (k, n), dtypes[0]),
        Path::Reference => reference::product_needs(rows, (k, n), dtypes, true),
        Path::Device => product_needs_on_device(rows, (k, n), dtypes),
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
/// dy (.., N), w (N, K), result (.., K) in the dtype of `dy`. `accumulate` is given up by the caller: its
/// memory may be overwritten with the result, so no other handle to it may be read afterwards.
pub fn linear_backward_input<'a>(dy: &Tensor, w: impl Into<Weight<'a>>, accumulate: Option<Tensor>) -> Result<Tensor> {
    let w = w.into();
    let (height, k) = w.dims2()?;
    let _span = tracing::debug_span!("linear_backward_input", flops = 2 * dy.elem_count() * k).entered();
    let (_, n) = rows_and_width("linear_backward_input", "dy", dy)?;
    check_weight("linear_backward_input", (n, k), (height, k))?;
    if let Some(accumulate) = &accumulate {
        check_sum("linear_backward_input", accumulate, dy, k)?;
    }
    match w.path_beside(dy) {
        Path::Cpu => cpu::linear_backward_input(dy, w, accumulate),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes(dy, w) => cuda::linear_backward_input(dy, w.tensor(), accumulate),
        Path::Reference | Path::Device => reference::linear_backward_input(dy, w, accumulate),
    }
}

/// What [`linear_backward_input`] needs, as [`linear_needs`]: the dtypes of dy and w.
pub fn linear_backward_input_needs(
    path: Path,
    rows: usize,
    (n, k): (usize, usize),
    dtypes: [DType; 2],
    accumulates: bool,
) -> Needs {
    match path {
        Path::Cpu => cpu::product_needs(rows, (n, k), dtypes[0]),
        Path::Reference => reference::product_needs(rows, (n, k), dtypes, accumulates),
        Path::Device => product_needs_on_device(rows, (n, k), dtypes),
    }
}

/// The gradient with respect to the weight, in place: `dw += dyᵀ x` with `accumulate`, else `dw = dyᵀ x`,
/// whatever `dw` held.
///
/// dy (.., N), x (.., K), dw (N, K). The sum over rows is in f32; where `dw` is bf16 it is rounded to nearest once a call.
pub fn linear_backward_weight(dy: &Tensor, x: &Tensor, dw: &Tensor, accumulate: bool) -> Result<()> {
    let _span = tracing::debug_span!("linear_backward_weight", flops = 2 * dy.elem_count() * dw.dim(1)?).entered();
    let (rows, n) = rows_and_width("linear_backward_weight", "dy", dy)?;
    let (x_rows, k) = rows_and_width("linear_backward_weight", "x", x)?;
    if rows != x_rows {
        bail!("linear_backward_weight: expected as many rows in dy as in x, got {rows} and {x_rows}")
    }
    check_accumulator("linear_backward_weight", "dw", dw, &[n, k])?;
    match Path::of(&[dy, x, dw]) {
        Path::Cpu => cpu::linear_backward_weight(dy, x, dw, accumulate),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes_gradient(dy, x, dw) => cuda::linear_backward_weight(dy, x, dw, accumulate),
        Path::Reference | Path::Device => reference::linear_backward_weight(dy, x, dw, accumulate),
    }
}

/// What [`linear_backward_weight`] needs for `rows` rows and a weight (N, K): the dtypes of dy and x, and of dw.
pub fn linear_backward_weight_needs(path: Path, rows: usize, (n, k): (usize, usize), dtypes: [DType; 2]) -> Needs {
    match path {
        Path::Cpu => cpu::backward_weight_needs(rows, (n, k), dtypes),
        Path::Reference => reference::backward_weight_needs(rows, (n, k), dtypes),
        Path::Device => Needs::default().with_products(1, (rows, n, k)),
    }
}

/// A product on a card: the weight in the dtype of x.
fn product_needs_on_device(rows: usize, (k, n): (usize, usize), [x, w]: [DType; 2]) -> Needs {
    Needs::bytes(cast(elements([k, n]), w, x)).with_products(1, (rows, k, n))
}

fn check_weight(op: &str, expected: (usize, usize), got: (usize, usize)) -> Result<()> {
    if expected != got {
        bail!("{op}: weight: expected shape [{}, {}], got [{}, {}]", expected.0, expected.1, got.0, got.1)
    }
    Ok(())
}
