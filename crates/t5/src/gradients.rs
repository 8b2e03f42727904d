//! Gradient accumulators: one per trainable parameter, updated in place, and none for a frozen one.
//!
//! Invariants: a frozen parameter never has memory here; a trainable one has none until its first
//! contribution; an accumulator has its parameter's shape and is f32, or f64 for an f64 parameter, or bf16 if
//! [`Gradients::new`] was asked for it.
//! Micro-batches add to the same accumulators, so a gradient is complete when the last micro-batch is done. A
//! spare accumulator is used again for the next parameter of its shape.
//!
//! Emptying an accumulator touches no memory: its old elements count as nothing, and the next
//! contribution overwrites them where the operation can. So a large weight's gradient is neither set to zero
//! nor read before it is written.

use candle_core::{DType, Tensor};
use collective::Extent;

use crate::error::Result;
use crate::ops::Ops;
use crate::parameters::{Parameter, Weight, gradient_dtype};

/// The gradient of the loss by parameter index.
#[derive(Clone, Debug)]
pub struct Gradients<T = Tensor> {
    slots: Vec<Slot<T>>,
    /// Spare accumulators.
    spare: Vec<T>,
}

#[derive(Clone, Debug)]
struct Slot<T> {
    trainable: bool,
    dtype: DType,
    accumulator: Option<T>,
    /// Nothing has been added since the accumulator was emptied: its elements have no meaning.
    empty: bool,
    /// Sums of shards that are complete, in their order.
    closed: Vec<(Extent, T)>,
    /// The sum of all shards of an earlier contribution, which [`Gradients::keep_first`] adds.
    before: Option<T>,
}

impl<T> Slot<T> {
    fn gradient(&self) -> Option<&T> {
        self.accumulator.as_ref().filter(|_| !self.empty)
    }
}

impl<T: Ops> Gradients<T> {
    /// Accumulators for the parameters for which `trainable` returns true. Allocates nothing yet.
    ///
    /// `products` is the dtype of the accumulators of the blocks' matrices, F32 or BF16; in BF16 a sum over micro-batches is rounded
    /// to nearest after each. All others are F32; in an F64 model every accumulator is F64.
    pub fn new(parameters: &[Parameter<T>], products: DType, trainable: &dyn Fn(&Parameter<T>) -> bool) -> Self {
        let slot = |parameter: &Parameter<T>| {
            let products = if parameter.tensor.dtype() == DType::F64 { DType::F64 } else { products };
            let dtype = gradient_dtype(&parameter.name, parameter.part, parameter.tensor.dims().len(), products);
            Slot {
                trainable: trainable(parameter),
                dtype,
                accumulator: None,
                empty: true,
                closed: Vec::new(),
                before: None,
            }
        };
        Gradients { slots: parameters.iter().map(slot).collect(), spare: Vec::new() }
    }

    /// No accumulators, for a pass that has no backward.
    pub(crate) fn none() -> Self {
        Gradients { slots: Vec::new(), spare: Vec::new() }
    }

    /// Whether parameter `index` is trained.
    pub fn is_trainable(&self, index: usize) -> bool {
        self.slots[index].trainable
    }

    /// The dtype of the gradient of parameter `index`.
    pub fn dtype(&self, index: usize) -> DType {
        self.slots[index].dtype
    }

    /// The gradient of parameter `index`; `None` when it is frozen or nothing has been added yet.
    pub fn get(&self, index: usize) -> Option<&T> {
        self.slots.get(index)?.gradient()
    }

    /// The gradients that exist, with their parameters' indices, in the model's order.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| Some((index, slot.gradient()?)))
    }

    /// The accumulators that exist.
    pub(crate) fn accumulators(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.accumulator.as_ref())
    }

    /// Gives each trained parameter its accumulator. A new accumulator is empty.
    pub(crate) fn materialize(&mut self, parameters: &[Parameter<T>]) -> Result<()> {
        for (index, parameter) in parameters.iter().enumerate() {
            if self.slots[index].trainable && self.slots[index].accumulator.is_none() {
                self.taken(index, &parameter.tensor)?;
                self.slots[index].empty = true;
            }
        }
        Ok(())
    }

    /// For each parameter, whether its accumulator is empty, in the model's order.
    pub(crate) fn are_empty(&self) -> Vec<bool> {
        self.slots.iter().map(|slot| slot.empty).collect()
    }

    /// Sets for each parameter whether its accumulator is empty, in the model's order.
    pub(crate) fn set_empty(&mut self, empty: &[bool]) {
        self.slots.iter_mut().zip(empty).for_each(|(slot, empty)| slot.empty = *empty);
    }

    /// Empties every accumulator and keeps its memory for the next optimizer batch.
    pub fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.empty = true;
            slot.closed.clear();
            slot.before = None;
        }
    }

    /// Marks a shard of a gradient as complete: later contributions belong to the next shard. The sums of two shards that are the halves
    /// of one node of the tree of shards are added up. A shard that was complete already does not change.
    pub(crate) fn close(&mut self, shard: usize, index: usize, weight: &T) -> Result<()> {
        let is_closed = |(closed, _): &(Extent, T)| shard < closed.first + closed.count;
        if !self.slots[index].trainable || self.slots[index].closed.last().is_some_and(is_closed) {
            return Ok(());
        }
        self.set_apart(shard, index, weight)?;
        let slot = &mut self.slots[index];
        while let [.., (left, _), (right, _)] = slot.closed.as_slice()
            && let Some(both) = left.with(*right)
            && let (Some((_, right)), Some((extent, left))) = (slot.closed.pop(), slot.closed.last_mut())
        {
            left.add_in_place(&right)?;
            *extent = both;
            self.spare.push(right);
        }
        Ok(())
    }

    /// Sets the sum of a shard apart, without adding it to another.
    pub(crate) fn set_apart(&mut self, shard: usize, index: usize, weight: &T) -> Result<()> {
        let sum = self.complete(index, weight)?;
        let slot = &mut self.slots[index];
        (slot.accumulator, slot.empty) = (None, true);
        slot.closed.push((Extent::single(shard), sum));
        Ok(())
    }

    /// The sums that make up the gradient of a trained parameter, in the order of the shards. There is at least one, of zeros where
    /// nothing was added.
    pub(crate) fn parts(&mut self, index: usize, weight: &T) -> Result<Vec<T>> {
        if self.slots[index].closed.is_empty() {
            return Ok(vec![self.complete(index, weight)?]);
        }
        Ok(self.slots[index].closed.iter().map(|(_, sum)| sum.clone()).collect())
    }

    /// The first of [`Gradients::parts`] is now the whole sum and becomes the gradient. Adds the sum from [`Gradients::keep_for_later`].
    pub(crate) fn keep_first(&mut self, index: usize) -> Result<()> {
        let slot = &mut self.slots[index];
        let mut closed = slot.closed.drain(..).map(|(_, sum)| sum);
        if let Some(first) = closed.next() {
            (slot.accumulator, slot.empty) = (Some(first), false);
        }
        self.spare.extend(closed);
        if let (Some(before), Some(sum)) = (slot.before.take(), &slot.accumulator) {
            sum.add_in_place(&before)?;
            self.spare.push(before);
        }
        Ok(())
    }

    /// Keeps a whole sum until the gradient's other sums are complete.
    pub(crate) fn keep_for_later(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.before = slot.accumulator.take().filter(|_| !std::mem::replace(&mut slot.empty, true));
    }

    /// The accumulator of a trained parameter; set to zeros where nothing was added.
    pub(crate) fn complete(&mut self, index: usize, weight: &T) -> Result<T> {
        let (sum, accumulate) = self.taken(index, weight)?;
        if !accumulate {
            sum.clear()?;
        }
        Ok(sum)
    }

    /// Takes one gradient out and frees its slot, for an optimizer that consumes them one by one.
    pub fn take(&mut self, index: usize) -> Option<T> {
        let slot = &mut self.slots[index];
        slot.accumulator.take().filter(|_| !slot.empty)
    }

    /// Puts back a gradient that was taken out.
    pub(crate) fn put_back(&mut self, index: usize, gradient: T) {
        let slot = &mut self.slots[index];
        (slot.accumulator, slot.empty) = (Some(gradient), false);
    }

    /// Empties one slot and keeps the accumulator for the next parameter of the same shape.
    pub(crate) fn recycle(&mut self, index: usize) {
        self.spare.extend(self.slots[index].accumulator.take());
    }

    /// Frees the spare accumulators.
    pub(crate) fn release_spare(&mut self) {
        self.spare.clear();
    }

    /// Frees every accumulator.
    pub fn release(&mut self) {
        self.release_spare();
        for slot in &mut self.slots {
            (slot.accumulator, slot.before) = (None, None);
            slot.closed.clear();
        }
    }

    /// Bytes of all accumulators, including the spare ones.
    pub fn bytes(&self) -> u64 {
        let closed = self.slots.iter().flat_map(|slot| slot.closed.iter().map(|(_, sum)| sum).chain(&slot.before));
        let tensors = self.slots.iter().filter_map(|slot| slot.accumulator.as_ref()).chain(&self.spare).chain(closed);
        tensors.map(T::bytes).sum()
    }

    pub(crate) fn trains(&self, weight: &Weight<T>) -> bool {
        self.slots[weight.index].trainable
    }

    /// The accumulator to add to; set to zeros at its first use. `None` for a frozen parameter.
    pub(crate) fn accumulator(&mut self, weight: &Weight<T>) -> Result<Option<T>> {
        let Some((accumulator, accumulate)) = self.accumulator_or_empty(weight)? else { return Ok(None) };
        if !accumulate {
            accumulator.clear()?;
        }
        Ok(Some(accumulator))
    }

    /// The accumulator, and whether to add to it. If not, this is its first use, and the caller must overwrite every element.
    /// `None` for a frozen parameter.
    /// Whether a parameter has a gradient.
    pub(crate) fn is_trained(&self, weight: &Weight<T>) -> bool {
        self.slots[weight.index].trainable
    }

    pub(crate) fn accumulator_or_empty(&mut self, weight: &Weight<T>) -> Result<Option<(T, bool)>> {
        if !self.slots[weight.index].trainable {
            return Ok(None);
        }
        self.taken(weight.index, &weight.tensor).map(Some)
    }

    /// The accumulator of a trained parameter, and whether it was written before. It counts as written from now on.
    fn taken(&mut self, index: usize, weight: &T) -> Result<(T, bool)> {
        let slot = &mut self.slots[index];
        let accumulator = match slot.accumulator.take() {
            Some(accumulator) => accumulator,
            None => {
                slot.empty = true;
                let is_fit = |spare: &T| spare.dims() == weight.dims() && spare.dtype() == slot.dtype;
                match self.spare.iter().position(is_fit) {
                    Some(spare) => self.spare.swap_remove(spare),
                    None => weight.zeros(weight.dims(), slot.dtype)?,
                }
            }
        };
        let accumulate = !std::mem::replace(&mut slot.empty, false);
        Ok((slot.accumulator.insert(accumulator).clone(), accumulate))
    }
}
