//! Gradient accumulators: one per trainable parameter, updated in place, and none for a frozen one.
//!
//! Invariants: a frozen parameter never has memory here; a trainable one has none until its first
//! contribution; an accumulator has its parameter's shape and is f32, or f64 for an f64 parameter, or bf16 where that
//! was asked for ([`Gradients::new`]).
//! Micro-batches add to the same accumulators, so a gradient is complete when the last one is through. An
//! accumulator that was put aside is used again for the next parameter of its shape.
//!
//! Emptying an accumulator touches no memory: what it holds counts as nothing from then on, and the next
//! contribution overwrites it where the operation can, so that a large weight's gradient is neither set to zero
//! nor read before it is written.

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::model::T5;
use crate::parameters::{Parameter, Weight, gradient_dtype};

/// The gradient of the loss by parameter index.
#[derive(Debug)]
pub struct Gradients {
    slots: Vec<Slot>,
    /// Accumulators that were put aside.
    spare: Vec<Tensor>,
}

#[derive(Debug)]
struct Slot {
    trainable: bool,
    dtype: DType,
    accumulator: Option<Tensor>,
    /// Nothing has been added since the accumulator was emptied: its elements mean nothing.
    empty: bool,
}

impl Slot {
    fn gradient(&self) -> Option<&Tensor> {
        self.accumulator.as_ref().filter(|_| !self.empty)
    }
}

impl Gradients {
    /// Accumulators for the parameters that `trainable` says yes to. Allocates nothing yet.
    ///
    /// `products` is the dtype of those of the blocks' matrices, F32 or BF16; in BF16 a sum over micro-batches is rounded
    /// to nearest after each. All others are F32; in an F64 model every one is F64.
    pub fn new(model: &T5, products: DType, trainable: &dyn Fn(&Parameter) -> bool) -> Gradients {
        let slot = |parameter: &Parameter| {
            let products = if parameter.tensor.dtype() == DType::F64 { DType::F64 } else { products };
            let dtype = gradient_dtype(&parameter.name, parameter.part, parameter.tensor.rank(), products);
            Slot { trainable: trainable(parameter), dtype, accumulator: None, empty: true }
        };
        Gradients { slots: model.parameters().iter().map(slot).collect(), spare: Vec::new() }
    }

    /// Whether parameter `index` is trained.
    pub fn is_trainable(&self, index: usize) -> bool {
        self.slots[index].trainable
    }

    /// The gradient of parameter `index`; `None` when it is frozen or nothing has been added yet.
    pub fn get(&self, index: usize) -> Option<&Tensor> {
        self.slots.get(index)?.gradient()
    }

    /// The gradients that exist, with their parameters' indices, in the model's order.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| Some((index, slot.gradient()?)))
    }

    /// Empties every accumulator and keeps its memory for the next optimizer batch.
    pub fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.empty = true;
        }
    }

    /// Takes one gradient out and frees its slot, for an optimizer that consumes them one by one.
    pub fn take(&mut self, index: usize) -> Option<Tensor> {
        let slot = &mut self.slots[index];
        slot.accumulator.take().filter(|_| !slot.empty)
    }

    /// Gives one gradient back that was taken out or put aside.
    pub(crate) fn put_back(&mut self, index: usize, gradient: Tensor) {
        let slot = &mut self.slots[index];
        (slot.accumulator, slot.empty) = (Some(gradient), false);
    }

    /// Empties one slot and keeps the accumulator for the next parameter of the same shape.
    pub(crate) fn put_aside(&mut self, index: usize) {
        self.spare.extend(self.slots[index].accumulator.take());
    }

    /// Frees what was put aside.
    pub(crate) fn release_spare(&mut self) {
        self.spare.clear();
    }

    /// Frees every accumulator.
    pub fn release(&mut self) {
        self.release_spare();
        for slot in &mut self.slots {
            slot.accumulator = None;
        }
    }

    /// Bytes of the accumulators that exist, those put aside included.
    pub fn bytes(&self) -> u64 {
        let tensors = self.slots.iter().filter_map(|slot| slot.accumulator.as_ref()).chain(&self.spare);
        tensors.map(|t| (t.elem_count() * t.dtype().size_in_bytes()) as u64).sum()
    }

    pub(crate) fn trains(&self, weight: &Weight) -> bool {
        self.slots[weight.index].trainable
    }

    /// The accumulator to add to, of zeros at its first use. `None` for a frozen parameter.
    pub(crate) fn accumulator(&mut self, weight: &Weight) -> Result<Option<Tensor>> {
        let Some((accumulator, accumulate)) = self.accumulator_or_empty(weight)? else { return Ok(None) };
        if !accumulate {
            t5_ops::zero(&accumulator)?;
        }
        Ok(Some(accumulator))
    }

    /// The accumulator, and whether to add to it or, at its first use, to write every element of it whatever it
    /// was. `None` for a frozen parameter.
    pub(crate) fn accumulator_or_empty(&mut self, weight: &Weight) -> Result<Option<(Tensor, bool)>> {
        let slot = &mut self.slots[weight.index];
        if !slot.trainable {
            return Ok(None);
        }
        let accumulator = match slot.accumulator.take() {
            Some(accumulator) => accumulator,
            None => {
                slot.empty = true;
                let is_fit = |spare: &Tensor| spare.dims() == weight.tensor.dims() && spare.dtype() == slot.dtype;
                match self.spare.iter().position(is_fit) {
                    Some(spare) => self.spare.swap_remove(spare),
                    None => Tensor::zeros(weight.tensor.shape(), slot.dtype, weight.tensor.device())?,
                }
            }
        };
        let accumulate = !std::mem::replace(&mut slot.empty, false);
        Ok(Some((slot.accumulator.insert(accumulator).clone(), accumulate)))
    }
}
