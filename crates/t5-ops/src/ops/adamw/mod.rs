//! AdamW (Loshchilov and Hutter, 2019, arXiv 1711.05101): one parameter's update, in place.
//!
//! The formula is the one of `torch.optim.AdamW` without `amsgrad`, at update t = 1, 2, .., with g the gradient times `gradient_scale`:
//!
//! ```text
//! p = p * (1 - learning_rate * weight_decay)
//! m = beta1 * m + (1 - beta1) * g
//! v = beta2 * v + (1 - beta2) * g²
//! p = p - step_scale * learning_rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```
//!
//! Shapes: parameter, gradient and both moments are the same.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::dispatch::{Path, check_accumulator, check_shape};
use crate::needs::Needs;
#[cfg(feature = "cuda")]
use crate::ops::multi_tensor::cuda::each_scale;
use crate::ops::multi_tensor::{ReadyUpdates, needs_of_groups};
use crate::ops::rounding::Rounding;

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdamwHyper {
    /// The step's learning rate.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
    /// Multiplies the step, but not the decay: the size of the parameter, where steps are scaled by it.
    pub step_scale: f64,
    /// Number of this update, from 1: the moments began at zero, and are corrected for it.
    pub update: u64,
    /// Multiplies the gradient: the clipping factor of the global norm.
    pub gradient_scale: f64,
    /// How a parameter in bf16 is rounded; everything before that is in f32.
    pub rounding: Rounding,
    /// The number of the first row here in the whole parameter, if a parameter is updated some rows at a time: noise depends on the row.
    pub first_row: usize,
}

/// torch's constants, at the first update.
impl Default for AdamwHyper {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            step_scale: 1.0,
            update: 1,
            gradient_scale: 1.0,
            rounding: Rounding::Nearest,
            first_row: 0,
        }
    }
}

impl AdamwHyper {
    /// `1 - beta^t` of both moments.
    fn corrections(&self) -> (f64, f64) {
        let power = |beta: f64| 1.0 - beta.powf(self.update as f64);
        (power(self.beta1), power(self.beta2))
    }
}

/// The factors of one update, as kernels take them, except the scale of its gradient.
#[repr(C)]
#[derive(Clone, Copy)]
struct Factors {
    beta1: f32,
    beta2: f32,
    /// `1 - beta`, rounded once.
    new1: f32,
    new2: f32,
    /// The learning rate over the first moment's correction.
    rate: f32,
    /// The root of the second moment's correction.
    root: f32,
    eps: f32,
    /// The factor of weight decay.
    keep: f32,
}

impl Factors {
    fn new(h: &AdamwHyper) -> Self {
        let (correction1, correction2) = h.corrections();
        Self {
            beta1: h.beta1 as f32,
            beta2: h.beta2 as f32,
            new1: (1.0 - h.beta1) as f32,
            new2: (1.0 - h.beta2) as f32,
            rate: (h.learning_rate * h.step_scale / correction1) as f32,
            root: correction2.sqrt() as f32,
            eps: h.eps as f32,
            keep: (1.0 - h.learning_rate * h.weight_decay) as f32,
        }
    }
}

/// The entry of a parameter in a card's table.
const TABLE_BYTES: u64 = 104;

/// Returns the needs of [`adamw_of_each`] for parameters of these numbers of elements and dtypes.
pub fn adamw_needs(path: Path, parameters: &[(u64, DType)]) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        // The kernel needs no scratch memory, so there is one group.
        Path::Device => needs_of_groups(&vec![0; parameters.len()], TABLE_BYTES, [1, 0]),
        Path::Reference => Needs::most(parameters.iter().map(|&(elements, dtype)| reference::needs(elements, dtype))),
    }
}

/// Updates `param`, `first` and `second` in place from `grad`, which is not changed. On the CPU parameter and gradient may
/// each be in bf16; they are read as f32, and moments are f32.
///
/// # Errors
/// Shapes or dtypes that do not fit each other; tensors that share memory.
pub fn adamw(param: &Tensor, grad: &Tensor, first: &Tensor, second: &Tensor, h: &AdamwHyper) -> Result<()> {
    adamw_of_each(&[AdamwUpdate { param, grad, first, second, hyper: *h }])
}

/// The update of one of several parameters: the arguments of [`adamw`].
#[derive(Clone, Copy, Debug)]
pub struct AdamwUpdate<'a> {
    /// The parameter.
    pub param: &'a Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// The first moment.
    pub first: &'a Tensor,
    /// The second moment.
    pub second: &'a Tensor,
    /// The numbers of this parameter's update.
    pub hyper: AdamwHyper,
}

/// Applies [`adamw`] to each parameter. A card works on all of them together; no two may share memory.
///
/// # Errors
/// Those of [`adamw`]. Some parameters may have changed by then.
pub fn adamw_of_each(updates: &[AdamwUpdate]) -> Result<()> {
    let _span = tracing::debug_span!("adamw").entered();
    updates.iter().try_for_each(AdamwUpdate::check)?;
    #[cfg(feature = "cuda")]
    if are_for_card(updates) {
        return on_card(updates);
    }
    updates.iter().try_for_each(AdamwUpdate::make)
}

/// Prepares [`adamw_of_each`], except the scale of the gradients: the `gradient_scale` of each `hyper` is ignored. Returns `None` if no
/// card has kernels for all parameters.
///
/// # Errors
/// Those of [`adamw_of_each`]. No parameter is changed.
pub fn adamw_ready(updates: &[AdamwUpdate]) -> Result<Option<ReadyUpdates>> {
    updates.iter().try_for_each(AdamwUpdate::check)?;
    #[cfg(feature = "cuda")]
    if are_for_card(updates) {
        let _span = tracing::debug_span!("adamw").entered();
        return cuda::ready(updates).map(|ready| Some(ReadyUpdates(ready)));
    }
    Ok(None)
}

/// Updates the parameters that a card takes.
#[cfg(feature = "cuda")]
fn on_card(updates: &[AdamwUpdate]) -> Result<()> {
    each_scale(updates, |update| update.hyper.gradient_scale, cuda::ready)
}

/// Whether kernels for a card take all parameters together.
#[cfg(feature = "cuda")]
fn are_for_card(updates: &[AdamwUpdate]) -> bool {
    updates.iter().all(AdamwUpdate::fits_kernels)
        && cuda_device::launch::takes(
            updates.iter().flat_map(|update| [update.param, update.grad, update.first, update.second]),
        )
}

impl AdamwUpdate<'_> {
    fn check(&self) -> Result<()> {
        let shape = self.param.dims();
        check_accumulator("adamw", "param", self.param, shape)?;
        check_shape("adamw", "grad", self.grad, shape)?;
        check_accumulator("adamw", "first moment", self.first, shape)?;
        check_accumulator("adamw", "second moment", self.second, shape)
    }

    /// Whether kernels take these shapes and dtypes.
    fn fits_kernels(&self) -> bool {
        [self.first, self.second].iter().all(|t| t.dtype() == DType::F32) && self.param.elem_count() > 0
    }

    fn make(&self) -> Result<()> {
        let Self { param, grad, first, second, hyper } = *self;
        #[cfg(feature = "cuda")]
        if are_for_card(&[*self]) {
            return on_card(&[*self]);
        }
        let takes = self.fits_kernels() && first.device().is_cpu() && second.device().is_cpu();
        match Path::choose(&[param, grad]).provided(takes) {
            Path::Cpu => cpu::adamw(param, grad, first, second, &hyper),
            Path::Reference | Path::Device => reference::adamw(param, grad, first, second, &hyper),
        }
    }
}
