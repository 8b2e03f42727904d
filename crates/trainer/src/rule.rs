//! What one optimizer is: the names and shapes of its state, its update, and what that needs.

use candle_core::{DType, Tensor};
use t5_ops::{Needs, ReadyUpdates, Rounding, SquareSums};

use crate::error::{Error, Result};
use crate::groups::OfParameter;

/// A tensor of a parameter's state.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StateTensor {
    pub name: &'static str,
    pub shape: Vec<usize>,
    /// `None`: f32, or f64 for an f64 model.
    dtype: Option<DType>,
}

impl StateTensor {
    pub fn new(name: &'static str, shape: &[usize]) -> Self {
        Self { name, shape: shape.to_vec(), dtype: None }
    }

    /// A tensor of this dtype for every model.
    pub fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Its dtype for a parameter of this dtype. Moments of low-precision parameters are kept in f32.
    pub fn dtype(&self, parameter: DType) -> DType {
        self.dtype.unwrap_or(if parameter == DType::F64 { DType::F64 } else { DType::F32 })
    }

    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    /// Its bytes for a parameter of this dtype.
    pub fn bytes(&self, parameter: DType) -> u64 {
        self.elements() * self.dtype(parameter).size_in_bytes() as u64
    }
}

/// The numbers of one update that are the same for all parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At {
    /// The number of updates before this one.
    pub updates: u64,
    /// The step's learning rate.
    pub learning_rate: f64,
    /// Multiplies each gradient.
    pub gradient_scale: f64,
}

/// A parameter, or some of its rows, that an update changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Changed<'a> {
    pub values: &'a Tensor,
    pub gradient: &'a Tensor,
    /// The sums of the whole gradient's squares.
    pub sums: &'a SquareSums,
    /// The tensors of [`Rule::state`].
    pub state: &'a [Tensor],
    pub rounding: Rounding,
    /// The number of the first row here in the whole parameter.
    pub first_row: usize,
    /// See [`Rule::least_step_scale`]; 1 otherwise.
    pub step_scale: f64,
    /// The numbers of the parameter's group.
    pub of_group: OfParameter,
}

impl Changed<'_> {
    /// The learning rate of this parameter in a step at this rate.
    pub fn rate(&self, at: &At) -> f64 {
        at.learning_rate * self.of_group.learning_rate_factor
    }

    /// The weight decay of this parameter, where the optimizer's is `usual`.
    pub fn decay(&self, usual: f64) -> f64 {
        self.of_group.weight_decay.unwrap_or(usual)
    }
}

/// What one optimizer is.
pub(crate) trait Rule {
    /// The optimizer's name, and the kind of its state, for people.
    fn in_words(&self) -> &'static str;

    /// Refuses the options that the original refuses.
    fn validate(&self) -> Result<()>;

    /// The configured learning rate. `None` where the optimizer has its own.
    fn configured_learning_rate(&self) -> Option<f64>;

    /// The learning rate of the update after `updates` updates.
    fn resolved_learning_rate(&self, _updates: u64, schedule_factor: f64) -> f64 {
        self.configured_learning_rate().unwrap_or(0.0) * schedule_factor
    }

    /// Whether the optimizer has its own schedule of the learning rate.
    fn has_own_schedule(&self) -> bool {
        false
    }

    /// The state of a parameter of this shape.
    fn state(&self, shape: &[usize]) -> Vec<StateTensor>;

    /// Whether each tensor of state has its parameter's shape and the usual dtype, and rows are updated each by itself. Then large state may be in a file, or in
    /// the host's memory beside a card.
    fn has_state_by_element(&self) -> bool {
        false
    }

    /// Where an update itself multiplies each parameter's step by the root mean square of the parameter: the least factor.
    fn least_step_scale(&self) -> Option<f64> {
        None
    }

    /// Updates these parameters.
    fn update(&self, changes: &[Changed], at: At) -> Result<()>;

    /// Makes [`Rule::update`] ready on a card, without the scale of the gradients. `None` where nothing can be made ready.
    fn ready(&self, _changes: &[Changed], _at: At) -> Result<Option<ReadyUpdates>> {
        Ok(None)
    }

    /// The needs of [`Rule::update`] on a card, for parameters of these rows and columns.
    fn needs(&self, parameters: &[((usize, usize), DType)]) -> Needs;
}

/// Refuses options that are not finite numbers from 0 up.
pub(crate) fn check_from_zero(numbers: &[(&'static str, f64)]) -> Result<()> {
    match numbers.iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
        Some(&(name, value)) => Err(Error::invalid_option(name, "a finite number from 0 up", value)),
        None => Ok(()),
    }
}

/// Refuses decays of moments outside of 0 to 1.
pub(crate) fn check_betas(betas: &[(&'static str, f64)]) -> Result<()> {
    match betas.iter().find(|(_, beta)| !(0.0..1.0).contains(beta)) {
        Some(&(name, beta)) => Err(Error::invalid_option(name, "a number from 0 up and below 1", beta)),
        None => Ok(()),
    }
}

/// The elements of parameters of these rows and columns.
pub(crate) fn elements(parameters: &[((usize, usize), DType)]) -> Vec<(u64, DType)> {
    parameters.iter().map(|&((rows, width), dtype)| (rows as u64 * width as u64, dtype)).collect()
}
