//! A linear layer without a bias: one weight (out, in), and its product in three directions. It may have an adapter
//! beside the weight.
//!
//! An adapter keeps the product of its input with A for backward: that product is as narrow as the rank. Its dropped input
//! is recomputed. With DoRA, so is the output that the magnitudes are multiplied with.

use crate::adapter::LinearLora;
use crate::context::Noise;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::ops::Ops;
use crate::parameters::Weight;

/// `y = x Wᵀ`, plus the adapter's output.
#[derive(Clone, Debug)]
pub(crate) struct Linear<T> {
    pub weight: Weight<T>,
    pub adapter: Option<Adapter<T>>,
}

/// LoRA: `scale · dropout(x) Aᵀ Bᵀ`. With a magnitude it is DoRA: `g (dropout(x) Wᵀ + scale · dropout(x) Aᵀ Bᵀ)` takes the place
/// of `dropout(x) Wᵀ`, where `g` is the magnitude over the norms of the rows of `W + scale · B A`. As in the paper and PEFT those
/// norms are constants to the gradient.
#[derive(Clone, Debug)]
pub(crate) struct Adapter<T> {
    /// (rank, in).
    pub a: Weight<T>,
    /// (out, rank).
    pub b: Weight<T>,
    /// (out).
    pub magnitude: Option<Weight<T>>,
    pub lora: LinearLora,
    /// The number of the adapter's dropout place.
    pub site: u32,
}

impl<T: Ops> Linear<T> {
    /// Maps x (.., in) to (.., out).
    pub fn forward(&self, x: &T, noise: &Noise) -> Result<T> {
        Ok(self.forward_keeping(x, noise)?.0)
    }

    /// As [`Linear::forward`]. Also returns the adapter's narrow product (.., rank), if any, for [`Linear::backward_weight`].
    pub fn forward_keeping(&self, x: &T, noise: &Noise) -> Result<(T, Option<T>)> {
        let Some(adapter) = self.adapter.as_ref().filter(|_| !noise.skips_adapter) else {
            return Ok((self.weight.here(|weight| T::linear(x, weight))?, None));
        };
        let input = adapter.input(x, noise)?;
        let gain = adapter.gain(&self.weight)?;
        let down = adapter.down(&input)?;
        let y = match gain {
            None => adapter.plus_product(x, &down, &self.weight)?,
            Some(gain) if noise.adapter_dropout(adapter.site).is_none() => {
                adapter.plus_product(x, &down, &self.weight)?.scale_columns(&gain.factors)?
            }
            Some(gain) => {
                // `y + g (dropout(x) Wᵀ + scale · dropout(x) Aᵀ Bᵀ) - dropout(x) Wᵀ`
                let y = self.weight.here(|weight| T::linear(x, weight))?;
                let dropped = self.weight.here(|weight| T::linear(&input, weight))?;
                let adapted = T::dropout_add(&dropped, &T::linear(&down, &adapter.b)?, None)?;
                T::dropout_add(&y, &adapted.scale_columns(&gain.factors)?.minus(&dropped)?, None)?
            }
        };
        Ok((y, Some(down)))
    }

    /// Begins backward: the gradient of the output, (.., out), and the adapter's tensors that both directions need.
    pub fn backward(&self, dy: T) -> Result<OutputGradient<T>> {
        let through = self.adapter.as_ref().map(|adapter| adapter.backward(&dy, &self.weight)).transpose()?;
        Ok(OutputGradient { dy, through })
    }

    /// The gradient of the input, (.., in), plus `sum`. The result takes `sum`'s memory.
    pub fn backward_input(&self, of: &OutputGradient<T>, sum: Option<T>, noise: &Noise) -> Result<T> {
        let dy = &of.dy;
        let (Some(adapter), Some(through)) = (&self.adapter, &of.through) else {
            return self.weight.here(|weight| T::linear_backward_input(dy, weight, sum));
        };
        let (du, a) = (&through.du, adapter.a.of_products());
        let Some(dropout) = noise.adapter_dropout(adapter.site) else {
            return self.with_adapter(&through.dz(dy)?, (du, a), sum);
        };
        let dx = self.weight.here(|weight| T::linear_backward_input(dy, weight, sum))?;
        let dropped = match through.gain {
            Some(_) => self.with_adapter(&through.dz(dy)?.minus(dy)?, (du, a), None)?,
            None => T::linear_backward_input(du, &adapter.a, None)?,
        };
        T::dropout_add(&dx, &dropped, Some(&dropout))
    }

    /// `dz W + du A + sum`.
    fn with_adapter(&self, dz: &T, added: (&T, &T), sum: Option<T>) -> Result<T> {
        self.weight.here(|weight| T::linear_backward_input_plus_product(dz, weight, Some(added), sum))
    }

    /// Adds `dyᵀ x` to the weight's gradient, and the adapter's gradients to its own, where they are trained. Forward's narrow product is
    /// computed again if it was not kept.
    pub fn backward_weight(
        &self,
        of: &OutputGradient<T>,
        (x, narrow): (&T, Option<T>),
        noise: &Noise,
        grads: &mut Gradients<T>,
    ) -> Result<()> {
        if let Some((dweight, accumulate)) = grads.accumulator_or_empty(&self.weight)? {
            T::linear_backward_weight(&of.dy, x, &dweight, accumulate)?;
        }
        let (Some(adapter), Some(through)) = (&self.adapter, &of.through) else { return Ok(()) };
        let input = adapter.input(x, noise)?;
        let down = || narrow.clone().map_or_else(|| adapter.down(&input), Ok);
        if let (Some(gain), Some(magnitude)) = (&through.gain, &adapter.magnitude)
            && let Some(dmagnitude) = grads.accumulator(magnitude)?
        {
            let z = adapter.plus_product(&input, &down()?, &self.weight)?;
            T::magnitude_backward(&of.dy, &z, &gain.lengths, &dmagnitude)?;
        }
        if let Some((da, accumulate)) = grads.accumulator_or_empty(&adapter.a)? {
            T::linear_backward_weight(&through.du, &input, &da, accumulate)?;
        }
        if let Some((db, accumulate)) = grads.accumulator_or_empty(&adapter.b)? {
            T::linear_backward_weight(&through.dz(&of.dy)?, &down()?, &db, accumulate)?;
        }
        Ok(())
    }

    pub fn is_trained(&self, grads: &Gradients<T>) -> bool {
        let of_adapter = |adapter: &Adapter<T>| grads.trains(&adapter.a) || grads.trains(&adapter.b);
        grads.trains(&self.weight) || self.adapter.as_ref().is_some_and(of_adapter)
    }
}

/// The gradient of a layer's output, (.., out), for both directions of backward.
#[derive(Clone, Debug)]
pub(crate) struct OutputGradient<T> {
    dy: T,
    through: Option<ThroughAdapter<T>>,
}

/// Applies `f` to each of the narrow products of some layers, as [`Linear::forward_keeping`] returns them.
pub(crate) fn try_map_narrow<T, U, const N: usize>(
    narrow: [Option<T>; N],
    f: &mut dyn FnMut(T) -> Result<U>,
) -> Result<[Option<U>; N]> {
    let mut mapped = [const { None }; N];
    for (to, from) in mapped.iter_mut().zip(narrow) {
        *to = from.map(&mut *f).transpose()?;
    }
    Ok(mapped)
}

/// The tensors that an adapter computes from the gradient of its layer's output.
#[derive(Clone, Debug)]
struct ThroughAdapter<T> {
    gain: Option<Gain<T>>,
    /// `scale · dz B`, (.., rank).
    du: T,
}

/// DoRA's vectors, each (out).
#[derive(Clone, Debug)]
struct Gain<T> {
    /// The norms of the rows of `W + scale · B A`.
    lengths: T,
    /// The factors of the output.
    factors: T,
}

impl<T: Ops> ThroughAdapter<T> {
    /// The gradient of the output before the output was multiplied by the gain.
    fn dz(&self, dy: &T) -> Result<T> {
        through_gain(dy, self.gain.as_ref())
    }
}

fn through_gain<T: Ops>(dy: &T, gain: Option<&Gain<T>>) -> Result<T> {
    gain.map_or_else(|| Ok(dy.clone()), |gain| dy.copied()?.scale_columns(&gain.factors))
}

impl<T: Ops> Adapter<T> {
    fn input(&self, x: &T, noise: &Noise) -> Result<T> {
        T::dropout(x, noise.adapter_dropout(self.site).as_ref())
    }

    /// `scale · x Aᵀ`, (.., rank).
    fn down(&self, x: &T) -> Result<T> {
        T::linear_scaled(x, self.a.of_products(), self.lora.scale)
    }

    /// `x Wᵀ + down Bᵀ`.
    fn plus_product(&self, x: &T, down: &T, weight: &Weight<T>) -> Result<T> {
        weight.here(|weight| T::linear_plus_product(x, weight, Some((down, self.b.of_products()))))
    }

    /// The factors of the output, if there is a magnitude.
    fn gain(&self, weight: &Weight<T>) -> Result<Option<Gain<T>>> {
        let Some(magnitude) = &self.magnitude else { return Ok(None) };
        let (a, b) = (&self.a.tensor, &self.b.tensor);
        let lengths = weight.here(|weight| T::adapted_row_norms(weight.whole(), a, b, self.lora.scale))?;
        let factors = T::ratio(&magnitude.tensor, &lengths)?;
        Ok(Some(Gain { lengths, factors }))
    }

    fn backward(&self, dy: &T, weight: &Weight<T>) -> Result<ThroughAdapter<T>> {
        let gain = self.gain(weight)?;
        let dz = through_gain(dy, gain.as_ref())?;
        let du = T::linear_backward_input_scaled(&dz, self.b.of_products(), self.lora.scale)?;
        Ok(ThroughAdapter { gain, du })
    }
}
