//! Adafactor (Shazeer and Stern 2018): one parameter's update, in place.
//!
//! The formula is the one of `transformers.optimization.Adafactor`, with `lr` the learning rate after
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
use cuda_device::pieces::of_piece;

use crate::dispatch::{Path, check_accumulator, check_shape};
use crate::needs::{Calls, Needs, elements};
#[cfg(feature = "cuda")]
use crate::ops::multi_tensor::cuda::each_scale;
use crate::ops::multi_tensor::{ReadyUpdates, needs_of_groups, rows_of_block};
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
    /// The lower limit of a parameter's RMS in `scale_parameter`.
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

/// The constants of transformers, learning rate 1e-3, at the first step, before any running mean.
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
    /// For a parameter of two or more dimensions (.., N, K).
    Factored {
        /// Means over columns: (.., N).
        row: Tensor,
        /// Means over rows: (.., K).
        col: Tensor,
    },
    /// For a parameter of one dimension: the parameter's shape.
    Full(Tensor),
}

/// The sums of the squares of a gradient, from one pass: a global norm and a factored second moment need nothing else of it.
#[derive(Clone, Debug)]
pub struct SquareSums {
    total: f64,
    /// Sums by row (N) and by column (K), for a matrix (N, K) for which there is a kernel.
    factored: Option<(Vec<f32>, Vec<f32>)>,
    /// The same sums on a card, with the total.
    #[cfg(feature = "cuda")]
    on_device: Option<cuda::DeviceSums>,
}

impl SquareSums {
    /// Computes the sums of `grad`, which is not scaled.
    pub fn compute(grad: &Tensor) -> Result<Self> {
        let _span = tracing::debug_span!("square_sums").entered();
        match Path::choose(&[grad]).provided(grad.rank() == 2 && grad.elem_count() > 0) {
            Path::Cpu => cpu::square_sums_of(grad),
            #[cfg(feature = "cuda")]
            Path::Device if grad.elem_count() > 0 && cuda_device::launch::takes([grad]) => {
                let sums = cuda::square_sums_of(&[grad])?.pop();
                Ok(Self { on_device: sums, ..Self::new(0.0, None) })
            }
            Path::Reference | Path::Device => Ok(Self::new(square_sum(grad)?, None)),
        }
    }

    /// Computes the sums of each gradient, in their order. A card works on all of them together.
    ///
    /// # Errors
    /// The device's.
    pub fn of_each(gradients: &[&Tensor]) -> Result<Vec<Self>> {
        #[cfg(feature = "cuda")]
        if !gradients.is_empty()
            && gradients.iter().all(|g| g.elem_count() > 0)
            && cuda_device::launch::takes(gradients.iter().copied())
        {
            let _span = tracing::debug_span!("square_sums").entered();
            let on_device = cuda::square_sums_of(gradients)?.into_iter();
            return Ok(on_device.map(|sums| Self { on_device: Some(sums), ..Self::new(0.0, None) }).collect());
        }
        gradients.iter().map(|gradient| Self::compute(gradient)).collect()
    }

    fn new(total: f64, factored: Option<(Vec<f32>, Vec<f32>)>) -> Self {
        Self {
            total,
            factored,
            #[cfg(feature = "cuda")]
            on_device: None,
        }
    }

    /// Returns the sum over all elements. Waits for a card.
    ///
    /// # Errors
    /// The device's.
    pub fn total(&self) -> Result<f64> {
        Ok(Self::totals([self])?[0])
    }

    /// Returns the totals of some gradients. Waits for a card once.
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

    /// Returns the needs of [`SquareSums::totals`] for this many gradients.
    pub fn totals_needs(path: Path, gradients: usize) -> Needs {
        let downloads = gradients.div_ceil(TOTALS) as u64;
        if path == Path::Device {
            Needs::default().with_calls(Calls { downloads, ..Calls::default() })
        } else {
            Needs::default()
        }
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
    adafactor_with_sums(param, grad, &SquareSums::compute(grad)?, second, first, h)
}

/// Computes [`adafactor`] from a gradient whose sums of squares are known.
pub fn adafactor_with_sums(
    param: &Tensor,
    grad: &Tensor,
    sums: &SquareSums,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    adafactor_of_each(&[AdafactorUpdate { param, grad, sums, second, first, hyper: *h }])
}

/// The update of one of several parameters: the arguments of [`adafactor_with_sums`].
#[derive(Clone, Copy, Debug)]
pub struct AdafactorUpdate<'a> {
    /// The parameter.
    pub param: &'a Tensor,
    /// Its gradient, of the same shape.
    pub grad: &'a Tensor,
    /// The sums of the gradient's squares.
    pub sums: &'a SquareSums,
    /// The second moment.
    pub second: &'a SecondMoment,
    /// The first moment, present exactly if `beta1` is set.
    pub first: Option<&'a Tensor>,
    /// The numbers of this parameter's update.
    pub hyper: AdafactorHyper,
}

/// Applies [`adafactor_with_sums`] to each parameter. A card works on all of them together; no two may share memory.
///
/// # Errors
/// Shapes or dtypes that do not fit each other. Some parameters may have changed by then.
pub fn adafactor_of_each(updates: &[AdafactorUpdate]) -> Result<()> {
    let _span = tracing::debug_span!("adafactor").entered();
    updates.iter().try_for_each(AdafactorUpdate::check)?;
    #[cfg(feature = "cuda")]
    if are_for_card(updates) {
        return on_card(updates);
    }
    updates.iter().try_for_each(AdafactorUpdate::make)
}

/// Prepares [`adafactor_of_each`], except the scale of the gradients: the `gradient_scale` of each `hyper` is ignored. Returns `None` if no
/// card has kernels for all parameters.
///
/// # Errors
/// Those of [`adafactor_of_each`]. No parameter is changed.
pub fn adafactor_ready(updates: &[AdafactorUpdate]) -> Result<Option<ReadyUpdates>> {
    updates.iter().try_for_each(AdafactorUpdate::check)?;
    #[cfg(feature = "cuda")]
    if are_for_card(updates) {
        let _span = tracing::debug_span!("adafactor").entered();
        return cuda::ready(updates).map(|ready| Some(ReadyUpdates(ready)));
    }
    Ok(None)
}

/// Updates the parameters that a card takes.
#[cfg(feature = "cuda")]
fn on_card(updates: &[AdafactorUpdate]) -> Result<()> {
    each_scale(updates, |update| update.hyper.gradient_scale, cuda::ready)
}

/// Whether kernels for a card take all parameters together.
#[cfg(feature = "cuda")]
fn are_for_card(updates: &[AdafactorUpdate]) -> bool {
    let tensors = || updates.iter().flat_map(|update| [update.param, update.grad].into_iter().chain(update.moments()));
    updates.iter().all(AdafactorUpdate::is_for_card) && cuda_device::launch::takes(tensors())
}

impl AdafactorUpdate<'_> {
    fn moments(&self) -> Vec<&Tensor> {
        match self.second {
            SecondMoment::Factored { row, col } => [row, col].into_iter().chain(self.first).collect(),
            SecondMoment::Full(v) => [v].into_iter().chain(self.first).collect(),
        }
    }

    /// Whether kernels take these shapes and dtypes.
    fn fits_kernels(&self) -> bool {
        let is_full = matches!(self.second, SecondMoment::Full(_));
        let are_f32 = self.moments().iter().all(|t| t.dtype() == DType::F32);
        are_f32 && (is_full || self.param.rank() == 2) && self.param.elem_count() > 0
    }

    #[cfg(feature = "cuda")]
    fn is_for_card(&self) -> bool {
        self.fits_kernels() && self.sums.on_device.is_some()
    }

    fn make(&self) -> Result<()> {
        let Self { param, grad, sums, second, first, hyper } = *self;
        #[cfg(feature = "cuda")]
        if are_for_card(&[*self]) {
            return on_card(&[*self]);
        }
        let takes = self.fits_kernels() && self.moments().iter().all(|t| t.device().is_cpu());
        match Path::choose(&[param, grad]).provided(takes) {
            Path::Cpu => cpu::adafactor(param, grad, sums, second, first, &hyper),
            Path::Reference | Path::Device => reference::adafactor(param, grad, second, first, &hyper),
        }
    }

    fn check(&self) -> Result<()> {
        check(self.param, self.grad, self.second, self.first, &self.hyper)
    }
}

/// Totals of a list on a card, which are read at once: enough for a step of a large model.
const TOTALS: usize = 1024;
/// Columns that one block of a card's kernel works on, as in the kernel.
const COLUMNS: usize = 1024;
/// The most parts in which a card adds the squares of rows.
const PARTS: usize = 256;
/// The fewest rows of a part: twice the rows that are added in f32, because the parts' sums are written and read in f64.
const PART_ROWS: usize = 64;
/// Bytes of a gradient's entry in a card's table.
const GRADIENT_BYTES: u64 = 80;
/// Bytes of a parameter's entry.
const PARAMETER_BYTES: u64 = 192;

/// The rows of a part of a gradient on a card.
fn rows_of_part(rows: usize) -> usize {
    rows.div_ceil(PARTS).next_multiple_of(PART_ROWS)
}

/// The number of parts that a card cuts the rows into.
fn parts_of_columns(rows: usize) -> usize {
    rows.div_ceil(rows_of_part(rows).max(1))
}

/// Bytes of a card's intermediate sums of a gradient (N, K).
fn scratch_of_gradient((rows, width): (usize, usize)) -> u64 {
    of_piece(elements([rows, width.div_ceil(COLUMNS), size_of::<f32>()]))
        + of_piece(elements([parts_of_columns(rows), width, size_of::<f64>()]))
}

/// Bytes of a factor for each row and column of a parameter (N, K), and of two sums for each block.
fn scratch_of_parameter((rows, width): (usize, usize)) -> u64 {
    let parts = rows.div_ceil(rows_of_block(rows, width));
    let floats = |count| of_piece(elements([count, size_of::<f32>()]));
    floats(rows) + floats(width) + of_piece(2 * elements([parts, size_of::<f64>()]))
}

/// Returns the needs of [`SquareSums::of_each`] for gradients (N, K), a vector being one row.
pub fn square_sums_needs(path: Path, sizes: &[(usize, usize)]) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Reference => {
            let needs = sizes.iter().map(|&(rows, width)| reference::square_sums_needs(elements([rows, width])));
            Needs::most(needs)
        }
        Path::Device => {
            let scratch: Vec<u64> = sizes.iter().map(|&size| scratch_of_gradient(size)).collect();
            needs_of_groups(&scratch, GRADIENT_BYTES, [2, 1])
        }
    }
}

/// Returns the needs of [`adafactor_of_each`] for parameters (N, K) with their dtypes, a vector being one row.
pub fn adafactor_needs(path: Path, parameters: &[((usize, usize), DType)]) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Reference => {
            let one =
                |&((rows, width), dtype): &((usize, usize), DType)| reference::needs(elements([rows, width]), dtype);
            Needs::most(parameters.iter().map(one))
        }
        Path::Device => {
            let scratch: Vec<u64> = parameters.iter().map(|&(size, _)| scratch_of_parameter(size)).collect();
            needs_of_groups(&scratch, PARAMETER_BYTES, [3, 0])
        }
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
