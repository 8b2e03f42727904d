//! Adafactor (Shazeer and Stern 2018): one parameter's update, in place.
//!
//! The formula is that of `transformers.optimization.Adafactor`, with `lr` the learning rate after
//! `scale_parameter`, RMS(x) = sqrt(mean(x²)), g the gradient times `gradient_scale`:
//!
//! ```text
//! lr  = learning_rate * max(eps2, RMS(p))                      (learning_rate without scale_parameter)
//! row = beta2 * row + (1 - beta2) * mean over columns of (g² + eps1)     two or more dimensions
//! col = beta2 * col + (1 - beta2) * mean over rows of (g² + eps1)
//! u   = g / sqrt(row / mean(row)) / sqrt(col)
//! v   = beta2 * v + (1 - beta2) * (g² + eps1);  u = g / sqrt(v)          one dimension
//! u   = lr * u / max(1, RMS(u) / clip_threshold)
//! m   = beta1 * m + (1 - beta1) * u;  u = m                              with a first moment
//! p   = p - weight_decay * lr * p - u
//! ```
//!
//! Shapes: parameter and gradient (.., N, K); row (.., N); col (.., K).

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::{Path, check_accumulator, check_shape};
use crate::needs::{Needs, elements};
use crate::ops::reduce::square_sum;
use crate::ops::rounding::Rounding;

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdafactorHyper {
    /// The step's learning rate: the relative step already resolved, `scale_parameter` not yet applied.
    pub learning_rate: f64,
    /// Decay of the second moment at this step: `1 - step^decay_rate`.
    pub beta2: f64,
    /// Added to the squared gradient.
    pub eps1: f64,
    /// The least RMS of a parameter that `scale_parameter` reckons with.
    pub eps2: f64,
    /// The update's RMS is clipped to this, before the learning rate.
    pub clip_threshold: f64,
    /// Multiplies the learning rate by the parameter's RMS.
    pub scale_parameter: bool,
    /// Decay of the first moment, if there is one.
    pub beta1: Option<f64>,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
    /// Multiplies the gradient: the clipping factor of the global norm.
    pub gradient_scale: f64,
    /// How a parameter in bf16 is rounded; everything before that is in f32.
    pub rounding: Rounding,
}

/// The constants of transformers, learning rate 1e-3, at the first step: no running mean has begun.
impl Default for AdafactorHyper {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta2: 0.0,
            eps1: 1e-30,
            eps2: 1e-3,
            clip_threshold: 1.0,
            scale_parameter: true,
            beta1: None,
            weight_decay: 0.0,
            gradient_scale: 1.0,
            rounding: Rounding::Nearest,
        }
    }
}

/// The running second moment of the gradient.
#[derive(Clone, Debug)]
pub enum SecondMoment {
    /// Of a parameter of two or more dimensions (.., N, K).
    Factored {
        /// Means over columns: (.., N).
        row: Tensor,
        /// Means over rows: (.., K).
        col: Tensor,
    },
    /// Of a parameter of one dimension: the parameter's shape.
    Full(Tensor),
}

/// The sums of the squares of a gradient: all that a global norm and a factored second moment ask of it, in one pass.
#[derive(Clone, Debug)]
pub struct SquareSums {
    total: f64,
    /// By row (N) and by column (K), of a matrix (N, K) for which there is a kernel.
    factored: Option<(Vec<f32>, Vec<f32>)>,
    /// The same on a card, where the total is, too.
    #[cfg(feature = "cuda")]
    on_device: Option<cuda::DeviceSums>,
}

impl SquareSums {
    /// The sums of `grad`, which is not scaled.
    pub fn of(grad: &Tensor) -> Result<Self> {
        let _span = tracing::debug_span!("square_sums").entered();
        match Path::of(&[grad]).provided(grad.rank() == 2 && grad.elem_count() > 0) {
            Path::Cpu => cpu::square_sums_of(grad),
            #[cfg(feature = "cuda")]
            Path::Device if grad.elem_count() > 0 && crate::cuda::takes([grad]) => {
                Ok(Self { on_device: Some(cuda::square_sums_of(grad)?), ..Self::new(0.0, None) })
            }
            Path::Reference | Path::Device => Ok(Self::new(square_sum(grad)?, None)),
        }
    }

    fn new(total: f64, factored: Option<(Vec<f32>, Vec<f32>)>) -> Self {
        Self {
            total,
            factored,
            #[cfg(feature = "cuda")]
            on_device: None,
        }
    }

    /// Of all elements. A card is waited for.
    ///
    /// # Errors
    /// The device's.
    pub fn total(&self) -> Result<f64> {
        Ok(Self::totals([self])?[0])
    }

    /// The totals of some gradients. A card is waited for once.
    ///
    /// # Errors
    /// The device's.
    pub fn totals<'a>(all: impl IntoIterator<Item = &'a Self>) -> Result<Vec<f64>> {
        let all: Vec<&Self> = all.into_iter().collect();
        #[cfg(feature = "cuda")]
        let mut read = cuda::totals(all.iter().filter_map(|sums| sums.on_device.as_ref()))?.into_iter();
        let total = |sums: &Self| {
            #[cfg(feature = "cuda")]
            if sums.on_device.is_some() {
                return read.next().unwrap_or(f64::NAN);
            }
            sums.total
        };
        Ok(all.into_iter().map(total).collect())
    }

    /// Bytes that the sums of a gradient of this shape hold.
    pub fn bytes(shape: &[usize]) -> u64 {
        match *shape {
            [rows, columns] => ((rows + columns) * size_of::<f32>()) as u64,
            _ => 0,
        }
    }
}

/// Updates `param`, `second` and `first` in place from `grad`, which is not changed. On the CPU parameter and gradient
/// may each be in bf16; they are read as f32, and moments are f32.
pub fn adafactor(
    param: &Tensor,
    grad: &Tensor,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    adafactor_with_sums(param, grad, &SquareSums::of(grad)?, second, first, h)
}

/// [`adafactor`] from a gradient whose sums of squares are known.
pub fn adafactor_with_sums(
    param: &Tensor,
    grad: &Tensor,
    sums: &SquareSums,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    let _span = tracing::debug_span!("adafactor").entered();
    check(param, grad, second, first, h)?;
    let moments: Vec<&Tensor> = match second {
        SecondMoment::Factored { row, col } => [row, col].into_iter().chain(first).collect(),
        SecondMoment::Full(v) => [v].into_iter().chain(first).collect(),
    };
    let is_full = matches!(second, SecondMoment::Full(_));
    let are_taken =
        moments.iter().all(|t| t.dtype() == DType::F32) && (is_full || param.rank() == 2) && param.elem_count() > 0;
    let takes = are_taken && moments.iter().all(|t| t.device().is_cpu());
    #[cfg(feature = "cuda")]
    if let Some(sums) = &sums.on_device
        && are_taken
        && crate::cuda::takes([param, grad].into_iter().chain(moments))
    {
        return cuda::adafactor(param, grad, sums, second, first, h);
    }
    match Path::of(&[param, grad]).provided(takes) {
        Path::Cpu => cpu::adafactor(param, grad, sums, second, first, h),
        Path::Reference | Path::Device => reference::adafactor(param, grad, second, first, h),
    }
}

/// Columns that one block of a card's kernel works on, as there.
const COLUMNS: usize = 1024;
/// Parts in which a card adds the squares of rows, at most.
const PARTS: usize = 512;
/// Rows whose squares it adds in f32.
const BLOCK_ROWS: usize = 32;

/// How a card cuts the rows of a gradient: rows of a part.
fn rows_of_part(rows: usize) -> usize {
    rows.div_ceil(PARTS).next_multiple_of(BLOCK_ROWS)
}

/// What [`SquareSums::of`] a gradient (N, K) needs, a vector being one row.
pub fn square_sums_needs(path: Path, (rows, width): (usize, usize)) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Reference => reference::square_sums_needs(elements([rows, width])),
        Path::Device => {
            let (tiles, parts) = (width.div_ceil(COLUMNS), rows.div_ceil(rows_of_part(rows).max(1)));
            let by_row = elements([rows, tiles, size_of::<f32>()]);
            Needs::bytes(by_row + elements([parts, width, size_of::<f64>()]))
        }
    }
}

/// What [`adafactor`] needs for a parameter (N, K), a vector being one row.
pub fn adafactor_needs(path: Path, (rows, width): (usize, usize), param: DType) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Reference => reference::needs(elements([rows, width]), param),
        // A factor for each row and column, and two sums for each block.
        Path::Device => Needs::bytes(
            elements([rows + width, size_of::<f32>()]) + 2 * elements([rows.min(2 * PARTS), size_of::<f64>()]),
        ),
    }
}

fn check(
    param: &Tensor,
    grad: &Tensor,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    let shape = param.dims();
    check_accumulator("adafactor", "param", param, shape)?;
    check_shape("adafactor", "grad", grad, shape)?;
    match (second, shape) {
        (SecondMoment::Full(v), _) => check_accumulator("adafactor", "second moment", v, shape)?,
        (SecondMoment::Factored { row, col }, [outer @ .., n, k]) => {
            check_accumulator("adafactor", "row", row, &[outer, &[*n]].concat())?;
            check_accumulator("adafactor", "col", col, &[outer, &[*k]].concat())?;
        }
        (SecondMoment::Factored { .. }, _) => {
            bail!("adafactor: expected a full second moment for a parameter of shape {shape:?}, got a factored one")
        }
    }
    if h.beta1.is_some() != first.is_some() {
        bail!("adafactor: expected a first moment exactly when beta1 is set, got beta1 {:?}", h.beta1)
    }
    first.map_or(Ok(()), |m| check_accumulator("adafactor", "first moment", m, shape))
}
