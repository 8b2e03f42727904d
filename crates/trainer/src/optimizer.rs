//! The optimizer of a trainer: its options, the number of updates made, and the moments of every trainable parameter.
//!
//! Invariants:
//! * A frozen parameter has no state.
//! * State is f32, or f64 for an f64 model. Its tensors have the names that torch and transformers give them.
//! * `updates` counts the updates that were made, as torch's `state["step"]`; a skipped step is not one.

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use t5::safetensors::TensorHeader;
use t5::{Files, Parameter};
use t5_ops::keys::{self, mix};
use t5_ops::{AdafactorUpdate, AdamwUpdate, ReadyUpdates, Rounding, SquareSums};

use crate::adafactor::{self, AdafactorOptions};
use crate::adamw::{self, AdamwOptions};
use crate::error::Result;
use crate::parallel::Parallel;
use crate::state_file::StateFile;

/// An optimizer and its options. In a checkpoint, the names of the options tell which optimizer it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OptimizerOptions {
    /// `torch.optim.AdamW`.
    Adamw(AdamwOptions),
    /// `transformers.optimization.Adafactor`.
    Adafactor(AdafactorOptions),
}

impl Default for OptimizerOptions {
    fn default() -> Self {
        Self::Adafactor(AdafactorOptions::default())
    }
}

impl From<AdafactorOptions> for OptimizerOptions {
    fn from(options: AdafactorOptions) -> Self {
        Self::Adafactor(options)
    }
}

impl From<AdamwOptions> for OptimizerOptions {
    fn from(options: AdamwOptions) -> Self {
        Self::Adamw(options)
    }
}

impl OptimizerOptions {
    /// Refuses the options that the original refuses.
    ///
    /// # Errors
    /// [`crate::Error::InvalidOption`] naming the option.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Adamw(options) => options.validate(),
            Self::Adafactor(options) => options.validate(),
        }
    }

    /// The configured learning rate. `None` where Adafactor has its own.
    pub fn configured_learning_rate(&self) -> Option<f64> {
        match self {
            Self::Adamw(options) => Some(options.learning_rate),
            Self::Adafactor(options) => options.learning_rate,
        }
    }

    /// The learning rate of the update after `updates` updates, before Adafactor's `scale_parameter`.
    pub fn resolved_learning_rate(&self, updates: u64, schedule_factor: f64) -> f64 {
        match self {
            Self::Adamw(options) => options.learning_rate * schedule_factor,
            Self::Adafactor(options) => options.resolved_learning_rate(updates, schedule_factor),
        }
    }

    /// Whether the optimizer has its own schedule of the learning rate.
    pub fn has_own_schedule(&self) -> bool {
        matches!(self, Self::Adafactor(options) if options.relative_step)
    }

    /// The optimizer's name, and the kind of its state, for people.
    pub fn in_words(&self) -> &'static str {
        match self {
            Self::Adamw(_) => "AdamW, two moments",
            Self::Adafactor(AdafactorOptions { beta1: Some(_), .. }) => "Adafactor, factored, and a first moment",
            Self::Adafactor(_) => "Adafactor, factored",
        }
    }

    /// Number of state values of one parameter of this shape, which [`Optimizer::new`] allocates.
    pub(crate) fn state_elements(&self, shape: &[usize]) -> u64 {
        match self {
            Self::Adamw(options) => options.state_elements(shape),
            Self::Adafactor(options) => options.state_elements(shape),
        }
    }
}

/// The optimizer.
pub struct Optimizer {
    options: OptimizerOptions,
    /// The seed of stochastic rounding, if parameters are rounded stochastically.
    rounding_seed: Option<u64>,
    updates: u64,
    moments: Vec<Option<Moments>>,
    /// The device of the parameters.
    device: Device,
    /// The file of the large moments, if they are not in memory.
    file: Option<StateFile>,
    /// Whether moments lie where [`Optimizer::move_moments`] puts them. At first AdamW's are zeros on the CPU that take no memory.
    is_placed: bool,
}

/// A parameter that an update changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change<'a> {
    /// The parameter's index in the model.
    pub index: usize,
    pub values: &'a Tensor,
    pub gradient: &'a Tensor,
    /// The sums of the gradient's squares.
    pub sums: &'a SquareSums,
}

const MADE_OF_OPTIONS: &str = "moments are made of the options";

struct Moments {
    /// The key of the parameter's name: the rounding noise of every parameter differs.
    key: u64,
    of: MomentsOf,
}

enum MomentsOf {
    Adamw(adamw::Moments),
    Adafactor(adafactor::Moments),
}

impl Optimizer {
    /// Zeroed moments for the parameters for which `trainable` has `true`. AdamW's are on the CPU: with parameters on a device,
    /// [`Optimizer::move_moments`] must come before the first update.
    ///
    /// # Errors
    /// Contradictory options; a failed allocation.
    pub fn new(options: impl Into<OptimizerOptions>, parameters: &[Parameter], trainable: &[bool]) -> Result<Self> {
        let options = options.into();
        options.validate()?;
        let moments = parameters
            .iter()
            .zip(trainable)
            .map(|(parameter, trains)| trains.then(|| Moments::zeros(&options, parameter)).transpose())
            .collect::<Result<_>>()?;
        let device = parameters.first().map_or(Device::Cpu, |parameter| parameter.tensor.device().clone());
        let is_placed = device.is_cpu();
        Ok(Optimizer { options, rounding_seed: None, updates: 0, moments, device, file: None, is_placed })
    }

    /// Rounds bf16 parameters stochastically. The noise is a function of this seed, the update, the parameter's
    /// name and the element, so it is the same for every plan and number of threads.
    pub fn round_stochastically(&mut self, seed: u64) {
        self.rounding_seed = Some(seed);
    }

    /// Moves AdamW's moments into a file, or to the parameters' device, one by one. Does nothing where they lie there already.
    /// Adafactor's are small and stay where they are.
    ///
    /// # Errors
    /// The disk has no room: then the optimizer is unchanged. A copy fails: then the optimizer is unusable.
    pub fn move_moments(&mut self, files: Option<&Files>) -> Result<()> {
        let is_adamw = matches!(self.options, OptimizerOptions::Adamw(_));
        let lies_there = match (files, &self.file) {
            (Some(files), Some(file)) => file.is_as_in(files),
            (files, file) => files.is_none() && file.is_none(),
        };
        if (lies_there && self.is_placed) || !is_adamw {
            return Ok(());
        }
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        let named = self.moments.iter().flatten().flat_map(Moments::named);
        let sizes: Vec<usize> = named.map(|(_, tensor)| bytes(tensor)).collect();
        let file = files.map(|files| StateFile::create(files, &sizes, &self.device)).transpose()?;
        for (_, tensor) in self.moments.iter_mut().flatten().flat_map(Moments::named_mut) {
            *tensor = match &file {
                Some(file) => file.place(tensor)?,
                None if self.device.is_cpu() => tensor.copy()?,
                None => tensor.to_device(&self.device)?,
            };
        }
        (self.file, self.is_placed) = (file, true);
        // The old places of the moments are free now.
        heap::release_unused();
        Ok(())
    }

    /// Frees the state of parameters for which `is_held` returns false: another process updates them.
    pub(crate) fn keep(&mut self, is_held: impl Fn(usize) -> bool) {
        let others = self.moments.iter_mut().enumerate().filter(|(index, _)| !is_held(*index));
        others.for_each(|(_, moments)| *moments = None);
    }

    /// The number of updates that were made.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Makes the part of an update that changes parameter `index`. [`Optimizer::finish_update`] ends the update.
    ///
    /// # Errors
    /// A tensor has another shape or dtype than the parameter.
    pub fn update_one(
        &self,
        index: usize,
        values: &Tensor,
        gradient: &Tensor,
        sums: &SquareSums,
        learning_rate: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        self.update_each(&[Change { index, values, gradient, sums }], learning_rate, gradient_scale)
    }

    /// As [`Optimizer::update_one`], for several parameters, which a card updates together.
    ///
    /// # Errors
    /// As [`Optimizer::update_one`]. Some parameters may then be changed, and others not.
    pub(crate) fn update_each<'a>(
        &'a self,
        changes: &[Change<'a>],
        learning_rate: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        match &self.options {
            OptimizerOptions::Adamw(options) => {
                let mut together = Vec::new();
                for update in self.adamw(options, changes, learning_rate, gradient_scale) {
                    let AdamwUpdate { param, grad, first, second, hyper } = update;
                    match &self.file {
                        Some(file) if file.holds(first) => file.update(param, grad, [first, second], &hyper)?,
                        _ => together.push(update),
                    }
                }
                Ok(t5_ops::adamw_of_each(&together)?)
            }
            OptimizerOptions::Adafactor(options) => {
                let updates = self.adafactor(options, changes, learning_rate, gradient_scale);
                Ok(t5_ops::adafactor_of_each(&updates.collect::<Vec<_>>())?)
            }
        }
    }

    /// Makes [`Optimizer::update_each`] ready on a card, without the scale of the gradients, which the host learns last. `None` where
    /// nothing can be made ready: on the CPU, or where moments lie in a file.
    ///
    /// # Errors
    /// As [`Optimizer::update_one`]. No parameter is changed.
    pub(crate) fn ready_each<'a>(&'a self, changes: &[Change<'a>], learning_rate: f64) -> Result<Option<ReadyUpdates>> {
        Ok(match &self.options {
            _ if self.file.is_some() => None,
            OptimizerOptions::Adamw(options) => {
                t5_ops::adamw_ready(&self.adamw(options, changes, learning_rate, 1.0).collect::<Vec<_>>())?
            }
            OptimizerOptions::Adafactor(options) => {
                t5_ops::adafactor_ready(&self.adafactor(options, changes, learning_rate, 1.0).collect::<Vec<_>>())?
            }
        })
    }

    /// The changes of parameters that train, with their moments.
    fn trained<'a>(&'a self, changes: &[Change<'a>]) -> impl Iterator<Item = (Change<'a>, &'a Moments)> {
        changes.iter().filter_map(move |&change| Some((change, self.moments[change.index].as_ref()?)))
    }

    fn adamw<'a>(
        &'a self,
        options: &AdamwOptions,
        changes: &[Change<'a>],
        learning_rate: f64,
        gradient_scale: f64,
    ) -> impl Iterator<Item = AdamwUpdate<'a>> {
        self.trained(changes).map(move |(Change { values: param, gradient: grad, .. }, of)| {
            let MomentsOf::Adamw(adamw::Moments { first, second }) = &of.of else { unreachable!("{MADE_OF_OPTIONS}") };
            let hyper = options.hyper(self.updates, learning_rate, gradient_scale, self.rounding(of.key));
            AdamwUpdate { param, grad, first, second, hyper }
        })
    }

    fn adafactor<'a>(
        &'a self,
        options: &AdafactorOptions,
        changes: &[Change<'a>],
        learning_rate: f64,
        gradient_scale: f64,
    ) -> impl Iterator<Item = AdafactorUpdate<'a>> {
        self.trained(changes).map(move |(Change { values: param, gradient: grad, sums, .. }, of)| {
            let MomentsOf::Adafactor(adafactor::Moments { second, first }) = &of.of else {
                unreachable!("{MADE_OF_OPTIONS}")
            };
            let hyper = options.hyper(self.updates, learning_rate, gradient_scale, self.rounding(of.key));
            AdafactorUpdate { param, grad, sums, second, first: first.as_ref(), hyper }
        })
    }

    /// The rounding of the parameter with this key in this update.
    fn rounding(&self, key: u64) -> Rounding {
        match self.rounding_seed {
            Some(seed) => Rounding::Stochastic { key: mix(mix(mix(seed) ^ self.updates) ^ key) },
            None => Rounding::Nearest,
        }
    }

    /// Counts an update, all parts of which were made.
    pub fn finish_update(&mut self) {
        self.updates += 1;
    }

    /// Every tensor of the state with its name (`<parameter>.exp_avg_sq_row`, ...), in the parameters' order.
    pub fn named_state<'a>(&'a self, parameters: &'a [Parameter]) -> impl Iterator<Item = (String, &'a Tensor)> {
        self.moments.iter().zip(parameters).flat_map(|(moments, parameter)| {
            moments
                .iter()
                .flat_map(Moments::named)
                .map(|(suffix, tensor)| (format!("{}.{suffix}", parameter.name), tensor))
        })
    }

    /// Names and shapes of the state of one trained parameter.
    ///
    /// # Errors
    /// A failed allocation.
    pub(crate) fn headers(options: &OptimizerOptions, parameter: &Parameter) -> Result<Vec<TensorHeader>> {
        let moments = Moments::zeros(options, parameter)?;
        let header = |(suffix, tensor): (&str, &Tensor)| TensorHeader {
            name: format!("{}.{suffix}", parameter.name),
            dtype: tensor.dtype(),
            shape: tensor.dims().to_vec(),
        };
        Ok(moments.named().into_iter().map(header).collect())
    }

    /// The state of one trained parameter. If owners hold it, the owner's state: then every process has to ask.
    ///
    /// # Errors
    /// A failed allocation; another process has ended.
    pub(crate) fn state_of(
        &self,
        index: usize,
        parameter: &Parameter,
        parallel: &Parallel,
    ) -> Result<Vec<(String, Tensor)>> {
        let of_another;
        let moments = match &self.moments[index] {
            Some(moments) => moments,
            None => {
                of_another = Moments::zeros(&self.options, parameter)?;
                &of_another
            }
        };
        let named = moments.named().into_iter().map(|(suffix, tensor)| {
            parallel.owner(index).map_or(Ok(()), |owner| parallel.broadcast(owner, tensor))?;
            Ok((format!("{}.{suffix}", parameter.name), tensor.clone()))
        });
        named.collect()
    }

    /// Replaces the zeros by saved tensors. `read` is called with the name of each tensor of [`Optimizer::named_state`], in
    /// order, and returns a tensor of the same shape and dtype.
    ///
    /// # Errors
    /// `read` returns an error.
    pub(crate) fn restore(
        &mut self,
        parameters: &[Parameter],
        updates: u64,
        mut read: impl FnMut(&str, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        self.updates = updates;
        for (moments, parameter) in self.moments.iter_mut().zip(parameters) {
            for (suffix, tensor) in moments.iter_mut().flat_map(Moments::named_mut) {
                let saved = read(&format!("{}.{suffix}", parameter.name), tensor)?;
                match &self.file {
                    Some(file) if file.holds(tensor) => file.write(tensor, &saved)?,
                    _ => *tensor = saved,
                }
            }
        }
        Ok(())
    }
}

impl Moments {
    fn zeros(options: &OptimizerOptions, parameter: &Parameter) -> Result<Self> {
        let (dtype, device) = (state_dtype(parameter.tensor.dtype()), parameter.tensor.device());
        let zeros = |device: &Device, shape: &[usize]| Tensor::zeros(shape, dtype, device);
        let dims = parameter.tensor.dims();
        let of = match options {
            // A plan decides where these moments lie, and a device may have no room for them.
            OptimizerOptions::Adamw(options) => {
                MomentsOf::Adamw(options.moments(dims, |dims| zeros(&Device::Cpu, dims))?)
            }
            OptimizerOptions::Adafactor(options) => {
                MomentsOf::Adafactor(options.moments(dims, |dims| zeros(device, dims))?)
            }
        };
        Ok(Moments { key: keys::of_name(&parameter.name), of })
    }

    fn named(&self) -> Vec<(&'static str, &Tensor)> {
        match &self.of {
            MomentsOf::Adamw(moments) => moments.named(),
            MomentsOf::Adafactor(moments) => moments.named(),
        }
    }

    fn named_mut(&mut self) -> Vec<(&'static str, &mut Tensor)> {
        match &mut self.of {
            MomentsOf::Adamw(moments) => moments.named_mut(),
            MomentsOf::Adafactor(moments) => moments.named_mut(),
        }
    }
}

/// Moments of low-precision parameters are kept in f32.
pub(crate) fn state_dtype(parameter: DType) -> DType {
    if parameter == DType::F64 { DType::F64 } else { DType::F32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_device::device;

    #[test]
    fn the_stated_number_of_state_values_is_what_is_allocated() {
        let adafactor = [None, Some(0.9)].map(|beta1| AdafactorOptions { beta1, ..AdafactorOptions::default() }.into());
        for options in adafactor.into_iter().chain([AdamwOptions::default().into()]) {
            for shape in [&[7][..], &[3, 5], &[2, 3, 5], &[]] {
                let tensor = Tensor::zeros(shape, DType::F32, &device()).unwrap();
                let parameter = Parameter { name: "p".into(), tensor, part: t5::Part::Shared, quantisation: None };
                let moments = Moments::zeros(&options, &parameter).unwrap();
                let elements: usize = moments.named().iter().map(|(_, tensor)| tensor.elem_count()).sum();
                assert_eq!(elements as u64, options.state_elements(shape), "{shape:?}");
            }
        }
    }

    #[test]
    fn a_checkpoint_tells_one_optimizer_from_the_other() {
        for options in [OptimizerOptions::default(), AdamwOptions::default().into()] {
            let text = serde_json::to_string(&options).unwrap();
            assert_eq!(serde_json::from_str::<OptimizerOptions>(&text).unwrap(), options, "{text}");
        }
    }
}
