//! A linear layer without a bias: one weight (out, in), and its product in three directions; beside it an adapter, where it has
//! one.
//!
//! An adapter keeps nothing between forward and backward. The product of its input with A is as narrow as its rank and is
//! computed again, as is, with DoRA, the output that magnitudes are multiplied with.

use crate::adapter::LinearLora;
use crate::context::Noise;
use crate::error::Result;
use crate::ops::Ops;
use crate::parameters::Weight;
use crate::step::gradients::Gradients;

/// `y = x Wᵀ`, plus what the adapter adds.
#[derive(Clone, Debug)]
pub(crate) struct Linear<T> {
    pub weight: Weight<T>,
    pub adapter: Option<Adapter<T>>,
}

/// LoRA: `scale · dropout(x) Aᵀ Bᵀ`. With a magnitude it is DoRA: `g (dropout(x) Wᵀ + scale · dropout(x) Aᵀ Bᵀ)` takes the place
/// of `dropout(x) Wᵀ`, where `g` is the magnitude over the lengths of the rows of `W + scale · B A`. As in the paper and PEFT those
/// lengths are constants to the gradient.
#[derive(Clone, Debug)]
pub(crate) struct Adapter<T> {
    /// (rank, in).
    pub a: Weight<T>,
    /// (out, rank).
    pub b: Weight<T>,
    /// (out).
    pub magnitude: Option<Weight<T>>,
    pub lora: LinearLora,
    /// Its dropout's place.
    pub site: u32,
}

impl<T: Ops> Linear<T> {
    /// x (.., in) to (.., out).
    pub fn forward(&self, x: &T, noise: &Noise) -> Result<T> {
        let y = T::linear(x, &self.weight)?;
        let Some(adapter) = &self.adapter else { return Ok(y) };
        let input = adapter.input(x, noise)?;
        let Some(gain) = adapter.gain(&self.weight)? else { return adapter.add(&input, y) };
        if noise.adapter_dropout(adapter.site).is_none() {
            return adapter.add(&input, y)?.scale_columns(&gain);
        }
        // `y + (g - 1) dropout(x) Wᵀ + g · scale · dropout(x) Aᵀ Bᵀ`
        let dropped = T::linear(&input, &self.weight)?;
        let adapted = adapter.add(&input, dropped.copied()?)?.scale_columns(&gain)?;
        T::dropout_add(&y, &adapted.minus(&dropped)?, None)
    }

    /// The gradient of the input, (.., in), plus `sum`, whose memory it takes.
    pub fn backward_input(&self, dy: &T, sum: Option<T>, noise: &Noise) -> Result<T> {
        let Some(adapter) = &self.adapter else { return T::linear_backward_input(dy, &self.weight, sum) };
        let dropout = noise.adapter_dropout(adapter.site);
        let gain = adapter.gain(&self.weight)?;
        let Some(dropout) = dropout else {
            let dz = adapter.through_gain(dy, gain.as_ref())?;
            let dx = T::linear_backward_input(&dz, &self.weight, sum)?;
            return adapter.backward_input(&dz, Some(dx));
        };
        let dx = T::linear_backward_input(dy, &self.weight, sum)?;
        let dz = adapter.through_gain(dy, gain.as_ref())?;
        let dropped = match gain {
            Some(_) => Some(T::linear_backward_input(&dz.minus(dy)?, &self.weight, None)?),
            None => None,
        };
        let dropped = adapter.backward_input(&dz, dropped)?;
        T::dropout_add(&dx, &dropped, Some(&dropout))
    }

    /// Adds `dyᵀ x` to the weight's gradient, and the adapter's to its own, where they are trained.
    pub fn backward_weight(&self, dy: &T, x: &T, noise: &Noise, grads: &mut Gradients<T>) -> Result<()> {
        if let Some((dweight, accumulate)) = grads.accumulator_or_empty(&self.weight)? {
            T::linear_backward_weight(dy, x, &dweight, accumulate)?;
        }
        let Some(adapter) = &self.adapter else { return Ok(()) };
        let input = adapter.input(x, noise)?;
        let lengths = adapter.lengths(&self.weight)?;
        let mut dz = dy.clone();
        if let (Some(lengths), Some(magnitude)) = (&lengths, &adapter.magnitude) {
            if let Some(dmagnitude) = grads.accumulator(magnitude)? {
                let z = adapter.add(&input, T::linear(&input, &self.weight)?)?;
                T::magnitude_backward(dy, &z, lengths, &dmagnitude)?;
            }
            dz = adapter.through_gain(dy, Some(&T::ratio(&magnitude.tensor, lengths)?))?;
        }
        adapter.backward(&dz, &input, grads)
    }

    pub fn is_trained(&self, grads: &Gradients<T>) -> bool {
        let of_adapter = |adapter: &Adapter<T>| grads.trains(&adapter.a) || grads.trains(&adapter.b);
        grads.trains(&self.weight) || self.adapter.as_ref().is_some_and(of_adapter)
    }
}

impl<T: Ops> Adapter<T> {
    fn input(&self, x: &T, noise: &Noise) -> Result<T> {
        T::dropout(x, noise.adapter_dropout(self.site).as_ref())
    }

    /// `scale · x Aᵀ`, (.., rank).
    fn down(&self, x: &T) -> Result<T> {
        T::linear(x, &self.a.tensor)?.scaled(self.lora.scale)
    }

    /// `y + scale · x Aᵀ Bᵀ`, in the memory of `y`.
    fn add(&self, x: &T, y: T) -> Result<T> {
        T::linear_add(&self.down(x)?, &self.b.tensor, y)
    }

    /// The lengths of the rows of `W + scale · B A`, (out), where there is a magnitude.
    fn lengths(&self, weight: &Weight<T>) -> Result<Option<T>> {
        let of = |_: &Weight<T>| T::adapted_lengths(weight.into(), &self.a.tensor, &self.b.tensor, self.lora.scale);
        self.magnitude.as_ref().map(of).transpose()
    }

    /// The factors of the output with DoRA, (out).
    fn gain(&self, weight: &Weight<T>) -> Result<Option<T>> {
        let (Some(lengths), Some(magnitude)) = (self.lengths(weight)?, &self.magnitude) else { return Ok(None) };
        Ok(Some(T::ratio(&magnitude.tensor, &lengths)?))
    }

    /// The gradient of the output before it was multiplied.
    fn through_gain(&self, dy: &T, gain: Option<&T>) -> Result<T> {
        gain.map_or_else(|| Ok(dy.clone()), |gain| dy.copied()?.scale_columns(gain))
    }

    /// `sum + scale · dz B A`.
    fn backward_input(&self, dz: &T, sum: Option<T>) -> Result<T> {
        let du = T::linear_backward_input(dz, &self.b.tensor, None)?.scaled(self.lora.scale)?;
        T::linear_backward_input(&du, &self.a.tensor, sum)
    }

    /// Adds the gradients of A and B; `input` is what A was multiplied with.
    fn backward(&self, dz: &T, input: &T, grads: &mut Gradients<T>) -> Result<()> {
        if let Some((db, accumulate)) = grads.accumulator_or_empty(&self.b)? {
            T::linear_backward_weight(dz, &self.down(input)?, &db, accumulate)?;
        }
        if let Some((da, accumulate)) = grads.accumulator_or_empty(&self.a)? {
            let du = T::linear_backward_input(dz, &self.b.tensor, None)?.scaled(self.lora.scale)?;
            T::linear_backward_weight(&du, input, &da, accumulate)?;
        }
        Ok(())
    }
}
