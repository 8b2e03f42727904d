//! The passes of a model that have a backward: over one micro-batch, and over the micro-batches of a whole step.

use candle_core::Tensor;

use super::T5;
use crate::context::StepContext;
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::levers::LayerMajor;
use crate::micro_batch::MicroBatch;
use crate::ops::Files;
use crate::reach::Reach;
use crate::step::observer::{Interrupts, Observer};
use crate::step::requests::{CollectiveRequest, collective_requests};
use crate::step::run::{Offload, Step};
use crate::step::schedule::{Event, Outline};

impl T5 {
    /// Adds one micro-batch's gradient to `grads` and returns the sum of its token losses. The gradient is that of the sum
    /// divided by `cx.target_tokens`. Over the micro-batches of an optimizer batch this adds up to
    /// the gradient of the mean token loss, however the batch is cut.
    pub fn forward_backward(&self, batch: &MicroBatch, cx: &StepContext, grads: &mut Gradients) -> Result<f64> {
        Ok(self.forward_backward_unless(batch, cx, grads, &|| false)?.expect("nobody interrupts"))
    }

    /// [`T5::forward_backward`] that ends early, with `None`. `interrupted` is asked before every block, forward and backward;
    /// true ends the pass. `grads` then hold a part of a gradient, which must be discarded.
    ///
    /// # Errors
    /// As [`T5::forward_backward`].
    pub fn forward_backward_unless(
        &self,
        batch: &MicroBatch,
        cx: &StepContext,
        grads: &mut Gradients,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<f64>> {
        let tables = self.trained_tables(grads);
        let events = self.outline(grads, &tables, cx, None).accumulation(0..1);
        let batches = std::slice::from_ref(batch);
        let mut step = Step::new(&self.network, &self.parameters, cx, batches, None)?;
        let is_done = step.run(&events, grads, &mut Interrupts(interrupted))?;
        Ok(is_done.then(|| step.loss_sum()))
    }

    /// A whole step over the micro-batches of an optimizer batch. Every gradient is handed to `observer` to be measured
    /// and then, if the observer decides so, to be applied. Files of activations and gradients lie in `files`, if `layer_major` wants
    /// any. With `layer_major` `None`, one micro-batch follows the other, and the gradients stay in `grads`.
    ///
    /// Returns false when the observer interrupted the step or decided against the update.
    ///
    /// # Errors
    /// An operation fails, a file cannot be written or read, or the observer returns an error. After the decision, some
    /// parameters may then have changed, and others not.
    pub fn step<E: From<Error>>(
        &self,
        batches: &[MicroBatch],
        cx: &StepContext,
        layer_major: Option<&LayerMajor>,
        files: &Files,
        grads: &mut Gradients,
        observer: &mut dyn Observer<Tensor, E>,
    ) -> Result<bool, E> {
        let events = self.events(batches.len(), cx, layer_major, grads, observer);
        let copies_overlap = self.copies_overlap(layer_major);
        let offload = layer_major.map(|layers| Offload {
            files,
            activations: layers.boundaries_on_disk,
            gradients: layers.gradients_on_disk,
            copies_overlap,
        });
        let mut step = Step::new(&self.network, &self.parameters, cx, batches, offload)?;
        if self.repeats && layer_major.is_none() && !self.has_paged_weights() && !self.device().is_cpu() {
            step = step.repeating(&self.micro_batches);
        }
        step.run(&events, grads, observer)
    }

    /// Sets whether steps on a card record the launches of micro-batches that repeat. `false` also releases existing recordings.
    pub fn repeat_micro_batches(&mut self, repeats: bool) {
        self.repeats = repeats;
        if !repeats {
            self.release_micro_batches();
        }
    }

    /// Gives back the memory of recorded micro-batches. Later steps record them again.
    pub fn release_micro_batches(&self) {
        self.micro_batches.borrow_mut().release();
    }

    /// Bytes of the card's memory that recorded micro-batches take.
    pub fn recorded_bytes(&self) -> u64 {
        self.micro_batches.borrow().bytes()
    }

    /// The number of micro-batches launched as graphs so far. Those launched while they were recorded are not counted.
    pub fn micro_batches_as_graphs(&self) -> u64 {
        self.micro_batches.borrow().launched()
    }

    /// Whether micro-batches are recorded once they repeat. A driver that has refused a recording is not asked again.
    pub fn records_micro_batches(&self) -> bool {
        self.repeats && !self.device().is_cpu() && self.micro_batches.borrow().may_record()
    }

    /// Gives back the memory of recorded micro-batches, and never records again. Returns false where there was no such memory.
    pub fn stop_repeating(&self) -> bool {
        self.micro_batches.borrow_mut().stop()
    }

    /// The requests of [`T5::step`] over so many micro-batches to other processes, in order, until `observer` decides.
    pub fn collective_requests<E: From<Error>>(
        &self,
        micro_batches: usize,
        cx: &StepContext,
        layer_major: Option<&LayerMajor>,
        grads: &Gradients,
        observer: &mut dyn Observer<Tensor, E>,
    ) -> Vec<CollectiveRequest> {
        let events = self.events(micro_batches, cx, layer_major, grads, observer);
        collective_requests(&self.network, &self.parameters, &events, &|index| grads.is_trainable(index))
    }

    fn events<E: From<Error>>(
        &self,
        micro_batches: usize,
        cx: &StepContext,
        layer_major: Option<&LayerMajor>,
        grads: &Gradients,
        observer: &mut dyn Observer<Tensor, E>,
    ) -> Vec<Event> {
        let tables = self.trained_tables(grads);
        let outline = self.outline(grads, &tables, cx, layer_major);
        let idle = observer.max_micro_batches().saturating_sub(micro_batches);
        let shards = if observer.closes_shards() { observer.shards() } else { Vec::new() };
        let overlaps = observer.overlaps() && layer_major.is_none_or(|layers| layers.overlaps);
        let outline = Outline { overlaps, copies_overlap: self.copies_overlap(layer_major), ..outline };
        outline.training_of_shards(micro_batches, &shards, idle)
    }

    /// Whether copies overlap with a device's computation.
    fn copies_overlap(&self, layer_major: Option<&LayerMajor>) -> bool {
        !self.device().is_cpu() && layer_major.is_some_and(|layers| layers.copies_overlap)
    }

    /// Whether the position tables of the encoder and of the decoder are trained.
    fn trained_tables(&self, grads: &Gradients) -> [Vec<bool>; 2] {
        [false, true].map(|decoder| self.network.stack(decoder).trained_tables(grads))
    }

    fn outline<'a>(
        &self,
        grads: &Gradients,
        tables: &'a [Vec<bool>; 2],
        cx: &StepContext,
        layer_major: Option<&'a LayerMajor>,
    ) -> Outline<'a> {
        let trained = self.parameters.iter().enumerate().filter(|&(i, _)| grads.is_trainable(i));
        let reach = Reach::to(&self.config, trained.map(|(_, parameter)| parameter.part));
        let trains_tables = tables.each_ref().map(Vec::as_slice);
        let recompute_blocks = cx.recompute_blocks;
        let has_paged_weights = self.has_paged_weights();
        let (overlaps, copies_overlap) = (false, false);
        Outline { reach, trains_tables, recompute_blocks, layer_major, has_paged_weights, overlaps, copies_overlap }
    }
}
