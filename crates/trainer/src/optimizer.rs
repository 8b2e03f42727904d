//! The optimizer of a trainer: its options, the number of updates made, and the state of every trainable parameter.
//!
//! An optimizer is a `Rule`. The rest is the same for all: where state is, how it is saved, who holds it.
//!
//! Invariants:
//! * A frozen parameter has no state.
//! * Unless its rule says otherwise, state is f32, or f64 for an f64 model. Its tensors have the names that torch and transformers give them.
//! * `updates` counts the updates that were made, as torch's `state["step"]`; a skipped step is not one.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use t5::safetensors::TensorHeader;
use t5::{Files, Parameter};
use t5_ops::keys::{self, mix};
use t5_ops::{ReadyUpdates, Rounding, SquareSums};

use crate::adafactor::AdafactorOptions;
use crate::adamw::AdamwOptions;
use crate::error::Result;
use crate::groups::OfParameter;
use crate::lion::LionOptions;
use crate::parallel::Parallel;
use crate::rule::{At, Changed, Rule, StateTensor};
use crate::state_file::StateFile;

/// An optimizer and its options. In a checkpoint, the names of the options tell which optimizer it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OptimizerOptions {
    /// `torch.optim.AdamW`.
    Adamw(AdamwOptions),
    /// Lion.
    Lion(LionOptions),
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

impl From<LionOptions> for OptimizerOptions {
    fn from(options: LionOptions) -> Self {
        Self::Lion(options)
    }
}

impl OptimizerOptions {
    pub(crate) fn rule(&self) -> &dyn Rule {
        match self {
            Self::Adamw(options) => options,
            Self::Lion(options) => options,
            Self::Adafactor(options) => options,
        }
    }

    /// Refuses the options that the original refuses.
    ///
    /// # Errors
    /// [`crate::Error::InvalidOption`] naming the option.
    pub fn validate(&self) -> Result<()> {
        self.rule().validate()
    }

    /// The configured learning rate. `None` where Adafactor has its own.
    pub fn configured_learning_rate(&self) -> Option<f64> {
        self.rule().configured_learning_rate()
    }

    /// The learning rate of the update after `updates` updates, before `scale_parameter`.
    ///
    /// `schedule_factor` multiplies a configured rate; a relative step follows its own schedule.
    pub fn resolved_learning_rate(&self, updates: u64, schedule_factor: f64) -> f64 {
        self.rule().resolved_learning_rate(updates, schedule_factor)
    }

    /// Whether the optimizer has its own schedule of the learning rate.
    pub fn has_own_schedule(&self) -> bool {
        self.rule().has_own_schedule()
    }

    /// The optimizer's name, and the kind of its state, for people.
    pub fn in_words(&self) -> &'static str {
        self.rule().in_words()
    }

    /// Bytes of the state of one parameter of this shape and dtype, which [`Optimizer::new`] allocates.
    pub(crate) fn state_bytes(&self, shape: &[usize], parameter: DType) -> u64 {
        self.rule().state(shape).iter().map(|tensor| tensor.bytes(parameter)).sum()
    }
}

/// The optimizer.
pub struct Optimizer {
    options: OptimizerOptions,
    /// The seed of stochastic rounding, if parameters are rounded stochastically.
    rounding_seed: Option<u64>,
    updates: u64,
    states: Vec<Option<State>>,
    /// The device of the parameters.
    device: Device,
    /// The file of large state, if it is not in memory.
    file: Option<StateFile>,
    /// Whether state is where [`Optimizer::move_moments`] puts it. At first state by element is zeros on the CPU that take no memory.
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

/// The state of one parameter.
struct State {
    /// The key of the parameter's name: the rounding noise of every parameter differs.
    key: u64,
    of_group: OfParameter,
    names: Vec<&'static str>,
    tensors: Vec<Tensor>,
}

impl Optimizer {
    /// Zeroed state for the parameters for which `trainable` has `true`. State by element is on the CPU: with parameters on a device,
    /// [`Optimizer::move_moments`] must come before the first update.
    ///
    /// # Errors
    /// Contradictory options; a failed allocation.
    pub fn new(options: impl Into<OptimizerOptions>, parameters: &[Parameter], trainable: &[bool]) -> Result<Self> {
        let options = options.into();
        options.validate()?;
        let states = parameters
            .iter()
            .zip(trainable)
            .map(|(parameter, trains)| trains.then(|| State::zeros(&options, parameter)).transpose())
            .collect::<Result<_>>()?;
        let device = parameters.first().map_or(Device::Cpu, |parameter| parameter.tensor.device().clone());
        let is_placed = device.is_cpu();
        Ok(Optimizer { options, rounding_seed: None, updates: 0, states, device, file: None, is_placed })
    }

    /// Rounds bf16 parameters stochastically. The noise is a function of this seed, the update, the parameter's
    /// name and the element, so it is the same for every plan and number of threads.
    pub fn round_stochastically(&mut self, seed: u64) {
        self.rounding_seed = Some(seed);
    }

    /// Sets the numbers of each parameter's group, in the parameters' order.
    pub(crate) fn set_groups(&mut self, of_each: Vec<OfParameter>) {
        let states = self.states.iter_mut().zip(of_each);
        states.for_each(|(state, of_group)| state.iter_mut().for_each(|state| state.of_group = of_group));
    }

    /// Moves state by element into a file, or to the parameters' device, one by one. Does nothing where it is there already.
    /// Adafactor's is small and stays where it is.
    ///
    /// # Errors
    /// The disk has no room: then the optimizer is unchanged. A copy fails: then the optimizer is unusable.
    pub fn move_moments(&mut self, files: Option<&Files>) -> Result<()> {
        let lies_there = match (files, &self.file) {
            (Some(files), Some(file)) => file.is_as_in(files),
            (files, file) => files.is_none() && file.is_none(),
        };
        if (lies_there && self.is_placed) || !self.options.rule().has_state_by_element() {
            return Ok(());
        }
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        let sizes: Vec<usize> =
            self.states.iter().flatten().flat_map(|state| state.tensors.iter().map(bytes)).collect();
        let file = files.map(|files| StateFile::create(files, &sizes, &self.device)).transpose()?;
        for tensor in self.states.iter_mut().flatten().flat_map(|state| &mut state.tensors) {
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
        let others = self.states.iter_mut().enumerate().filter(|(index, _)| !is_held(*index));
        others.for_each(|(_, state)| *state = None);
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
        let (rule, at) = (self.options.rule(), At { updates: self.updates, learning_rate, gradient_scale });
        let mut changes = self.changed(changes);
        if let Some(least) = rule.least_step_scale() {
            let values: Vec<&Tensor> = changes.iter().map(|changed| changed.values).collect();
            let totals = SquareSums::totals(&SquareSums::of_each(&values)?)?;
            for (changed, total) in changes.iter_mut().zip(totals) {
                changed.step_scale = (total / changed.values.elem_count().max(1) as f64).sqrt().max(least);
            }
        }
        let Some(file) = &self.file else { return rule.update(&changes, at) };
        let (in_file, together): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|changed| changed.state.first().is_some_and(|state| file.holds(state)));
        in_file.iter().try_for_each(|changed| file.update(changed, |part| rule.update(&[part], at)))?;
        rule.update(&together, at)
    }

    /// Makes [`Optimizer::update_each`] ready on a card, without the scale of the gradients, which the host learns last. Returns `None` on
    /// the CPU, for state in a file, and for steps that are scaled by the size of their parameters.
    ///
    /// # Errors
    /// As [`Optimizer::update_one`]. No parameter is changed.
    pub(crate) fn ready_each<'a>(&'a self, changes: &[Change<'a>], learning_rate: f64) -> Result<Option<ReadyUpdates>> {
        let rule = self.options.rule();
        if self.file.is_some() || rule.least_step_scale().is_some() {
            return Ok(None);
        }
        let at = At { updates: self.updates, learning_rate, gradient_scale: 1.0 };
        rule.ready(&self.changed(changes), at)
    }

    /// The changes of parameters that train, with their state.
    fn changed<'a>(&'a self, changes: &[Change<'a>]) -> Vec<Changed<'a>> {
        let changed = |&Change { index, values, gradient, sums }: &Change<'a>| {
            let &State { key, of_group, tensors: ref state, .. } = self.states[index].as_ref()?;
            Some(Changed {
                values,
                gradient,
                sums,
                state,
                rounding: self.rounding(key),
                first_row: 0,
                step_scale: 1.0,
                of_group,
            })
        };
        changes.iter().filter_map(changed).collect()
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
        self.states.iter().zip(parameters).flat_map(|(state, parameter)| {
            state.iter().flat_map(State::named).map(|(suffix, tensor)| (format!("{}.{suffix}", parameter.name), tensor))
        })
    }

    /// Names and shapes of the state of one trained parameter.
    pub(crate) fn headers(options: &OptimizerOptions, parameter: &Parameter) -> Vec<TensorHeader> {
        let header = |state: StateTensor| TensorHeader {
            name: format!("{}.{}", parameter.name, state.name),
            dtype: state.dtype(parameter.tensor.dtype()),
            shape: state.shape,
        };
        options.rule().state(parameter.tensor.dims()).into_iter().map(header).collect()
    }

    /// The bytes of the values in the state of these parameters, from the most down.
    pub(crate) fn widths<'a>(&self, trained: impl Iterator<Item = &'a Parameter>) -> Vec<usize> {
        let headers = trained.flat_map(|parameter| Self::headers(&self.options, parameter));
        let widths: BTreeSet<usize> = headers.map(|header| header.dtype.size_in_bytes()).collect();
        widths.into_iter().rev().collect()
    }

    /// The state of one trained parameter whose values have so many bytes. If owners hold it, the owner's state: then every process has to ask.
    ///
    /// # Errors
    /// A failed allocation; another process has ended.
    pub(crate) fn state_of(
        &self,
        index: usize,
        parameter: &Parameter,
        width: usize,
        parallel: &Parallel,
    ) -> Result<Vec<(String, Tensor)>> {
        let of_another;
        let state = match &self.states[index] {
            Some(state) => state,
            None => {
                of_another = State::zeros(&self.options, parameter)?;
                &of_another
            }
        };
        let named = state.named().filter(|(_, tensor)| tensor.dtype().size_in_bytes() == width);
        let named = named.map(|(suffix, tensor)| {
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
        for (state, parameter) in self.states.iter_mut().zip(parameters) {
            for (suffix, tensor) in state.iter_mut().flat_map(|state| state.names.iter().zip(&mut state.tensors)) {
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

impl State {
    fn zeros(options: &OptimizerOptions, parameter: &Parameter) -> Result<Self> {
        let rule = options.rule();
        // A plan decides where state by element is, and a device may have no room for it.
        let device = if rule.has_state_by_element() { &Device::Cpu } else { parameter.tensor.device() };
        let state = rule.state(parameter.tensor.dims());
        let zeros = |of: &StateTensor| Tensor::zeros(of.shape.as_slice(), of.dtype(parameter.tensor.dtype()), device);
        let tensors = state.iter().map(zeros).collect::<candle_core::Result<_>>()?;
        let names = state.iter().map(|of| of.name).collect();
        Ok(State { key: keys::of_name(&parameter.name), of_group: OfParameter::default(), names, tensors })
    }

    fn named(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.names.iter().copied().zip(&self.tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adamw::StatePrecision;
    use crate::test_device::device;

    #[test]
    fn the_stated_bytes_of_state_are_what_is_allocated() {
        let adafactor = [None, Some(0.9)].map(|beta1| AdafactorOptions { beta1, ..AdafactorOptions::default() }.into());
        let int8 = AdamwOptions { state_precision: StatePrecision::Int8, ..AdamwOptions::default() };
        let others: [OptimizerOptions; 3] =
            [AdamwOptions::default().into(), int8.into(), LionOptions::default().into()];
        for options in adafactor.into_iter().chain(others) {
            for shape in [&[7][..], &[3, 5], &[2, 3, 5], &[], &[130, 67]] {
                let tensor = Tensor::zeros(shape, DType::F32, &device()).unwrap();
                let parameter = Parameter { name: "p".into(), tensor, part: t5::Part::Shared, quantisation: None };
                let state = State::zeros(&options, &parameter).unwrap();
                let bytes = |x: &Tensor| x.elem_count() * x.dtype().size_in_bytes();
                let bytes: usize = state.tensors.iter().map(bytes).sum();
                assert_eq!(bytes as u64, options.state_bytes(shape, DType::F32), "{shape:?}");
            }
        }
        // 8,710 values in 35 blocks: two bytes each, and two numbers for each block.
        assert_eq!(OptimizerOptions::from(int8).state_bytes(&[130, 67], DType::F32), 2 * (8710 + 35 * 4));
        assert_eq!(OptimizerOptions::from(int8).state_bytes(&[4095], DType::F32), 8 * 4095);
    }

    #[test]
    fn a_checkpoint_tells_one_optimizer_from_the_other() {
        let scaled = AdamwOptions { scale_parameter: Some(1e-3), ..AdamwOptions::default() };
        let int8 = AdamwOptions { state_precision: StatePrecision::Int8, ..AdamwOptions::default() };
        let others = [AdamwOptions::default().into(), scaled.into(), int8.into(), LionOptions::default().into()];
        for options in others.into_iter().chain([OptimizerOptions::default()]) {
            let text = serde_json::to_string(&options).unwrap();
            assert_eq!(serde_json::from_str::<OptimizerOptions>(&text).unwrap(), options, "{text}");
        }
    }

    #[test]
    fn a_scaled_step_of_adamw_is_that_of_adamw_times_the_size_of_its_parameter_and_the_decay_is_not_scaled() {
        let of = |values: &[f64]| Tensor::new(values, &device()).unwrap();
        let step = |values: &[f64], scale_parameter| {
            let options =
                AdamwOptions { learning_rate: 0.1, weight_decay: 0.5, scale_parameter, ..AdamwOptions::default() };
            let (tensor, gradient) = (of(values), of(&[0.3, -0.2]));
            let parameter = Parameter { name: "p".into(), tensor, part: t5::Part::Shared, quantisation: None };
            let mut optimizer = Optimizer::new(options, std::slice::from_ref(&parameter), &[true]).unwrap();
            optimizer.move_moments(None).unwrap();
            let sums = SquareSums::compute(&gradient).unwrap();
            optimizer.update_one(0, &parameter.tensor, &gradient, &sums, 0.1, 1.0).unwrap();
            parameter.tensor.to_vec1::<f64>().unwrap()
        };
        // The size of (3, 4) is the root of 12.5. That of (1e-6, 0) is below the least.
        for (values, size) in [([3.0, 4.0], 12.5f64.sqrt()), ([1e-6, 0.0], 1e-3)] {
            let (plain, scaled) = (step(&values, None), step(&values, Some(1e-3)));
            for ((value, plain), scaled) in values.iter().zip(plain).zip(scaled) {
                let kept = value * (1.0 - 0.1 * 0.5);
                assert!((scaled - (kept + size * (plain - kept))).abs() < 1e-12, "{value}: {plain} {scaled}");
            }
        }
    }
}
