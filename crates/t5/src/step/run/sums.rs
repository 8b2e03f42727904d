//! Complete gradients: summed over shards and processes, handed over, and kept where they wait.

use super::{PendingEmbeddingGradient, Step, indices};
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::ops::Ops;
use crate::parameters::Part;
use crate::step::disposition::{Accumulator, GradientDisposition};
use crate::step::observer::{Observer, OwnShards};
use crate::step::schedule::Stage;
use crate::step::store::Stored;

impl<T: Ops> Step<'_, T> {
    pub(super) fn hand_over<E: From<Error>>(
        &mut self,
        part: Option<Part>,
        stage: Stage,
        disposition: GradientDisposition,
        grads: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<(), E> {
        // A gradient that is applied at the end was summed when it was measured.
        let is_new = stage == Stage::Measure || part.is_some();
        let is_summed = is_new && !observer.shards().is_empty();
        let mut to_recycle = Vec::new();
        let mut handed_over = indices(self.parameters, |other| part.is_none_or(|part| part == other)).into_iter();
        while let Some(index) = handed_over.next() {
            if is_summed {
                self.begin_sum(index, grads, observer)?;
                self.end_sum(index, grads, observer)?;
            }
            let is_held = observer.holds(index);
            match (stage, grads.get(index)) {
                (Stage::Measure, Some(gradient)) if is_held => observer.measure(index, gradient)?,
                (Stage::Apply, Some(gradient)) if is_held => {
                    let next = handed_over.as_slice().iter().find(|next| grads.get(**next).is_some());
                    self.prefetch_next_for_update(index, next)?;
                    observer.apply(index, gradient)?;
                }
                (Stage::Apply, _) if !is_held && grads.is_trainable(index) => self.receive(index, observer)?,
                _ => {}
            }
            if disposition == GradientDisposition::Write
                && let (Some(files), Some(gradient)) = (&mut self.gradients, grads.get(index))
            {
                let stored = is_held.then(|| files.put(gradient.clone())).transpose()?;
                self.waiting.push((index, stored));
            }
            match disposition.accumulator(is_held, self.copies_overlap) {
                Accumulator::Stays => {}
                Accumulator::IsSpare => to_recycle.push(index),
                Accumulator::Leaves | Accumulator::IsFreed => drop(grads.take(index)),
            }
        }
        observer.handed_over()?;
        // The observer may look at all gradients until here, so no accumulator is reused for another parameter earlier.
        to_recycle.into_iter().for_each(|index| grads.recycle(index));
        Ok(())
    }

    /// A shard's sums of a part are complete, or of all. A tied head's parameter is the table.
    pub(super) fn close<E>(
        &mut self,
        shard: usize,
        part: Option<Part>,
        grads: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<()> {
        let head = self.network.head.weight.index;
        let is_in = |part: Part, index: usize, of: Part| of == part || (part == Part::LmHead && index == head);
        for (index, parameter) in self.parameters.iter().enumerate() {
            if part.is_none_or(|part| is_in(part, index, parameter.part)) {
                grads.close(shard, index, &parameter.tensor)?;
            }
        }
        if part.is_none_or(Part::is_table) {
            observer.close(std::mem::take(&mut self.losses));
        }
        Ok(())
    }

    /// Ends [`Event::SumHead`](crate::step::schedule::Event::SumHead), and keeps the sum for the table's gradient.
    pub(super) fn end_head<E: From<Error>>(
        &mut self,
        grads: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<(), E> {
        let index = self.network.head.weight.index;
        if self.in_flight.contains(&index) {
            self.end_sum(index, grads, observer)?;
            match observer.holds(index) {
                true => grads.keep_for_later(index),
                false => grads.recycle(index),
            }
        }
        Ok(())
    }

    /// Closes shards of a part's gradients, and begins to sum these.
    pub(super) fn send<E: From<Error>>(
        &mut self,
        part: Part,
        closes: &[usize],
        grads: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<(), E> {
        if !observer.shards().is_empty() {
            for index in indices(self.parameters, |other| part == other) {
                let weight = &self.parameters[index].tensor;
                closes.iter().try_for_each(|shard| grads.close(*shard, index, weight))?;
                self.begin_sum(index, grads, observer)?;
            }
        }
        Ok(())
    }

    pub(super) fn write_tables(&mut self, grads: &mut Gradients<T>) -> Result<()> {
        let Some(files) = &mut self.gradients else { return Ok(()) };
        for index in indices(self.parameters, Part::is_table) {
            if let Some(gradient) = grads.take(index) {
                self.tables.push((index, files.put(gradient)?));
            }
        }
        Ok(())
    }

    /// Begins to sum a gradient over all shards, unless that sum has begun.
    pub(super) fn begin_sum<E: From<Error>>(
        &mut self,
        index: usize,
        grads: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<(), E> {
        if grads.is_trainable(index) && self.in_flight.insert(index) {
            let parts = grads.parts(index, &self.parameters[index].tensor)?;
            observer.begin_sum(index, &parts)?;
        }
        Ok(())
    }

    pub(super) fn end_sum<E: From<Error>>(
        &mut self,
        index: usize,
        grads: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<(), E> {
        if self.in_flight.remove(&index) {
            observer.end_sum(index)?;
            grads.keep_first(index)?;
        }
        Ok(())
    }

    pub(super) fn run_embedding_backward(&mut self, shards: Option<OwnShards>, grads: &mut Gradients<T>) -> Result<()> {
        // Nothing is computed meanwhile, and the tables need room.
        self.copy()?;
        if let Some(files) = &mut self.gradients {
            for (index, stored) in std::mem::take(&mut self.tables) {
                grads.put_back(index, files.get(stored, None)?);
            }
        }
        let mut pending_embedding_gradients = std::mem::take(&mut self.pending_embedding_gradients);
        let Some(shards) = shards else { return self.enter(pending_embedding_gradients, grads) };
        let tables = [Some(&self.network.shared), self.network.own_decoder_table()];
        let tables: Vec<usize> = tables.into_iter().flatten().map(|table| table.index).collect();
        for (shard, of) in shards {
            let (of_shard, rest) =
                pending_embedding_gradients.into_iter().partition(|pending| of.contains(&pending.number));
            pending_embedding_gradients = rest;
            self.enter(of_shard, grads)?;
            tables.iter().try_for_each(|&index| grads.close(shard, index, &self.parameters[index].tensor))?;
        }
        Ok(())
    }

    fn enter(
        &mut self,
        pending_embedding_gradients: Vec<PendingEmbeddingGradient<T>>,
        grads: &mut Gradients<T>,
    ) -> Result<()> {
        let mut pending_embedding_gradients = pending_embedding_gradients.into_iter().peekable();
        while let Some(PendingEmbeddingGradient { number, decoder, dx }) = pending_embedding_gradients.next() {
            let dx = self.activations.get(dx, pending_embedding_gradients.peek().map(|next| &next.dx))?;
            let (stack, noise) = (self.network.stack(decoder), self.noise(number));
            stack.embed_backward(self.batches[number].ids(decoder), self.network.table(decoder), dx, &noise, grads)?;
        }
        Ok(())
    }

    pub(super) fn read_back<E: From<Error>>(&mut self, observer: &mut dyn Observer<T, E>) -> Result<(), E> {
        let mut waiting = std::mem::take(&mut self.waiting).into_iter().peekable();
        while let Some((index, stored)) = waiting.next() {
            self.prefetch_for_update(waiting.peek())?;
            let (Some(files), Some(stored)) = (&mut self.gradients, stored) else {
                self.receive(index, observer)?;
                continue;
            };
            let gradient = files.get(stored, waiting.peek().and_then(|(_, next)| next.as_ref()))?;
            observer.apply(index, &gradient)?;
            // Gradients are read one by one. Two are in memory only while the next is read ahead.
            observer.handed_over()?;
        }
        Ok(())
    }

    /// Where copies overlap with computation, prefetches the gradient that is read back next, and its parameter. Both are copied while the
    /// parameter before is changed and written back.
    fn prefetch_for_update(&mut self, next: Option<&(usize, Option<Stored<T>>)>) -> Result<()> {
        let (Some(files), Some((index, Some(stored)))) = (&mut self.gradients, next) else { return Ok(()) };
        if !self.copies_overlap {
            return Ok(());
        }
        files.prefetch(stored)?;
        files.copy()?;
        self.network.prefetch_for_update(*index, &self.parameters[*index].tensor)
    }

    /// As [`Step::prefetch_for_update`], for a parameter whose gradient is in memory. A table is not prefetched beside another parameter.
    fn prefetch_next_for_update(&self, index: usize, next: Option<&usize>) -> Result<()> {
        let Some(&next) = next.filter(|_| self.copies_overlap) else { return Ok(()) };
        if [index, next].into_iter().any(|index| self.parameters[index].part.is_table()) {
            return Ok(());
        }
        self.network.prefetch_for_update(next, &self.parameters[next].tensor)
    }

    /// Receives another process's update of a parameter, once.
    fn receive<E>(&mut self, index: usize, observer: &mut dyn Observer<T, E>) -> Result<(), E> {
        if self.received.insert(index) { observer.receive(index) } else { Ok(()) }
    }
}
