//! Micro-batches that repeat on a card: the launches of forward become one, and so do those of backward.
//!
//! A micro-batch is a *round* of two *phases*, forward and backward: [`cuda_device::GraphRounds`] has these words. The head runs between them
//! and is not recorded: the rows that have a label differ each time, and its loss is read.

use std::cell::RefCell;
use std::fmt::Debug;

use candle_core::{DType, Tensor};
use cuda_device::{GraphInputs, GraphRounds, Turn};

use super::{Slot, Step};
use crate::context::StepContext;
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::micro_batch::MicroBatch;
use crate::ops::Ops;
use crate::parameters::Parameter;
use crate::step::observer::{Interrupts, Observer};
use crate::step::schedule::Event;

/// A kind of micro-batch. Micro-batches of one kind have the same launches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kind {
    /// The number of samples, and the tokens of the longest source and of the longest target.
    sizes: [usize; 3],
    activations: DType,
    /// Probabilities of dropout in the model and in adapters, as their bits.
    dropouts: [u64; 2],
    recompute_blocks: usize,
    events: usize,
    /// For each parameter, whether nothing has been added to its gradient.
    empty: Vec<bool>,
}

/// Recorded micro-batches. For each recording, the host remembers which gradients are empty after it.
pub(crate) type MicroBatches = RefCell<GraphRounds<Kind, Vec<bool>>>;

/// A micro-batch that goes forward and backward, with everything that its kind depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round<'r, T> {
    batch: &'r MicroBatch<T>,
    cx: &'r StepContext,
    parameters: &'r [Parameter<T>],
    gradients: &'r Gradients<T>,
    events: usize,
}

/// Runs micro-batches as graphs that repeat: on a card, or counted. The methods are those of [`cuda_device::GraphRounds`].
pub(crate) trait GraphRunner<T>: Debug {
    /// Returns false where the micro-batch runs event by event, without phases.
    fn begin(&self, round: &Round<T>) -> Result<bool>;
    fn phase(&self, work: &mut dyn FnMut(Turn) -> Result<()>) -> Result<bool>;
    fn uncaptured(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()>;
    fn leave(&self, x: Option<T>) -> Result<Option<T>>;
    fn enter(&self, x: T) -> Result<T>;
    fn is_recorded_now(&self) -> bool;
    fn recorded_host_state(&self) -> Option<Vec<bool>>;
    fn end(&self, host_state: Option<Vec<bool>>);
}

impl Kind {
    fn new(round: &Round<Tensor>) -> Self {
        let Round { batch, cx, gradients, events, .. } = *round;
        let [samples, source_tokens] = [0, 1].map(|side| batch.ids(false).dims()[side]);
        Self {
            sizes: [samples, source_tokens, batch.ids(true).dims()[1]],
            activations: cx.activations,
            dropouts: [cx.dropout.to_bits(), cx.adapter_dropout.to_bits()],
            recompute_blocks: cx.recompute_blocks,
            events,
            empty: gradients.are_empty(),
        }
    }
}

impl GraphRunner<Tensor> for MicroBatches {
    fn begin(&self, round: &Round<Tensor>) -> Result<bool> {
        let Round { batch, cx, .. } = *round;
        let lengths = [batch.lengths(false), batch.lengths(true)];
        let (tensors, samples) = ([batch.ids(false), batch.ids(true)], batch.samples.as_slice());
        let key = t5_ops::dropout_key(cx.seed, cx.step);
        let changing = GraphInputs { tensors: &tensors, lengths, samples, key };
        let weights = round.parameters.iter().map(|parameter| &parameter.tensor);
        let external = weights.chain(round.gradients.accumulators()).map(Tensor::id).collect();
        Ok(self.borrow_mut().begin(Kind::new(round), external, &changing)?)
    }

    fn phase(&self, work: &mut dyn FnMut(Turn) -> Result<()>) -> Result<bool> {
        self.borrow_mut().phase(work)
    }

    fn uncaptured(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.borrow_mut().uncaptured(work)
    }

    fn leave(&self, x: Option<Tensor>) -> Result<Option<Tensor>> {
        Ok(self.borrow_mut().leave(x)?)
    }

    fn enter(&self, x: Tensor) -> Result<Tensor> {
        Ok(self.borrow_mut().enter(x)?)
    }

    fn is_recorded_now(&self) -> bool {
        self.borrow().is_recorded_now()
    }

    fn recorded_host_state(&self) -> Option<Vec<bool>> {
        self.borrow().recorded_host_state().cloned()
    }

    fn end(&self, host_state: Option<Vec<bool>>) {
        self.borrow_mut().end(host_state);
    }
}

/// The events of one micro-batch from the first embedding to the end of its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    micro_batch: usize,
    head: usize,
    /// The number of events.
    pub(super) events: usize,
}

/// The span of the micro-batch whose events come first, if no other event lies between them.
pub(super) fn span(events: &[Event]) -> Option<Span> {
    let Some(Event::Embed { decoder: false, of }) = events.first() else { return None };
    let goes_up = |event: &Event| match event {
        Event::Embed { of: other, .. } | Event::Forward { of: other, in_memory: true, .. } => other == of,
        _ => false,
    };
    let goes_down = |event: &Event| match event {
        Event::Begin { of: other, is_last_use: true, .. } => other == of,
        Event::Backward(way) => way.of == *of,
        _ => false,
    };
    let head = events.iter().position(|event| !goes_up(event))?;
    let behind = events[head + 1..].iter().position(|event| !goes_down(event))?;
    let is_head = matches!(&events[head], Event::Head { of: other } if other == of);
    let is_end = matches!(&events[head + 1 + behind], Event::Finish { of: other } if other == of);
    let is_one = of.len() == 1 && is_head && is_end;
    is_one.then_some(Span { micro_batch: of.start, head, events: head + behind + 2 })
}

impl<T: Ops> Step<'_, T> {
    /// Carries out the events of a micro-batch, in phases or event by event. Returns false where the observer interrupted it.
    pub(super) fn run_micro_batch<E: From<Error>>(
        &mut self,
        repeats: &dyn GraphRunner<T>,
        (span, events): (Span, &[Event]),
        gradients: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<bool, E> {
        let (batch, cx, parameters) = (&self.batches[span.micro_batch], &self.cx, self.parameters);
        // A round's own memory is used for other tensors after the round, and gradients outlive the round.
        gradients.materialize(parameters)?;
        if !repeats.begin(&Round { batch, cx, parameters, gradients, events: events.len() })? {
            return self.execute_each(events, gradients, observer);
        }
        let result = self.in_phases(repeats, (span, events), gradients, observer);
        let host_state = matches!(result, Ok(true)).then(|| gradients.are_empty());
        repeats.end(host_state);
        result
    }

    fn in_phases<E: From<Error>>(
        &mut self,
        repeats: &dyn GraphRunner<T>,
        (span, events): (Span, &[Event]),
        gradients: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<bool, E> {
        let (i, up, down) = (span.micro_batch, &events[..span.head], &events[span.head + 1..]);
        if observer.interrupted() {
            return Ok(false);
        }
        repeats.phase(&mut |turn| {
            self.slots[i] = Slot::new(self.network);
            self.execute_all(if turn == Turn::Work { up } else { &[] }, gradients)
        })?;
        self.slots[i].x = repeats.leave(self.slots[i].x.take())?;
        if observer.interrupted() {
            return Ok(false);
        }
        repeats.uncaptured(&mut || self.head(i, gradients))?;
        let dz = self.slots[i].dz.take().map(|dz| repeats.enter(dz)).transpose()?;
        if observer.interrupted() {
            return Ok(false);
        }
        // Backward may have to run twice, but only while it is recorded.
        let before = repeats.is_recorded_now().then(|| gradients.are_empty());
        let (mut dz, mut is_undone) = (dz, false);
        self.slots[i].dz = dz.clone();
        let was_done = repeats.phase(&mut |turn| {
            if let (Turn::Undo, Some(empty)) = (turn, &before) {
                self.slots[i] = Slot::new(self.network);
                gradients.set_empty(empty);
                is_undone = true;
                return Ok(());
            }
            if is_undone {
                // An operation of backward that cannot be recorded may read tensors without being seen. Recorded launches of forward may
                // therefore have used their memory again, so forward runs once more.
                self.execute_all(up, gradients)?;
                self.slots[i].x = None;
                // A tensor outside the arena, so that the arena can be given back.
                self.slots[i].dz = dz.take().map(|dz| dz.copied()).transpose()?;
            }
            self.execute_all(down, gradients)
        })?;
        if let Some(empty) = repeats.recorded_host_state().filter(|_| !was_done) {
            self.slots[i] = Slot::new(self.network);
            gradients.set_empty(&empty);
        }
        Ok(true)
    }

    /// Carries out events of forward or backward. They are not interrupted, as a graph has all of them.
    fn execute_all(&mut self, events: &[Event], gradients: &mut Gradients<T>) -> Result<()> {
        self.execute_each(events, gradients, &mut Interrupts(&|| false)).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reach::Keep;
    use crate::step::schedule::Unit;

    fn micro_batch(i: usize) -> Vec<Event> {
        let of = i..i + 1;
        let unit = Unit::Norm { decoder: true };
        vec![
            Event::Embed { decoder: false, of: of.clone() },
            Event::Embed { decoder: true, of: of.clone() },
            Event::Forward { unit, of: of.clone(), keep: Keep::Input, in_memory: true },
            Event::Head { of: of.clone() },
            Event::Begin { of: of.clone(), is_last_use: true, wants_source: true },
            Event::Finish { of },
        ]
    }

    #[test]
    fn a_micro_batch_is_found_where_it_is_alone_and_whole() {
        let both = [micro_batch(2), micro_batch(3)].concat();
        assert_eq!(span(&both), Some(Span { micro_batch: 2, head: 3, events: 6 }));
        assert_eq!(span(&both[6..]), Some(Span { micro_batch: 3, head: 3, events: 6 }));
        for (change, name) in [
            (both[1..].to_vec(), "another beginning"),
            (both[..5].to_vec(), "no end"),
            ([&both[..2], &[Event::ReleaseSpare], &both[2..]].concat(), "something between"),
            ([&both[..5], &both[7..8], &both[5..]].concat(), "another micro-batch between"),
            (vec![Event::Embed { decoder: false, of: 0..2 }], "two at once"),
            (Vec::new(), "nothing"),
        ] {
            assert_eq!(span(&change), None, "{name}");
        }
    }
}
