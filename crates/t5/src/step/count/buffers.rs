//! The gradients of a counted step: the step itself carries out the events that take, hand over, write and free them, on counted tensors.

use std::path::Path;

use super::Counter;
use super::rehearsal::Rehearsal;
use crate::costs::Trained;
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::levers::Levers;
use crate::ops::{Counted, Files, Ops};
use crate::parameters::Part;
use crate::step::observer::{Observer, OwnShards};
use crate::step::run::{Offload, Step};
use crate::step::schedule::Event;

/// A step without micro-batches, and its gradients.
pub(super) struct Buffers<'a> {
    counter: &'a Counter,
    rehearsal: &'a Rehearsal,
    pub step: Step<'a, Counted>,
    gradients: Gradients<Counted>,
    /// Bytes of counted tensors beside this step's gradients.
    before: u64,
}

impl<'a> Buffers<'a> {
    pub fn new(counter: &'a Counter, rehearsal: &'a Rehearsal, levers: &Levers) -> Self {
        let files = Files::in_directory(Path::new(""));
        let offload = levers.layer_major.map(|layers| Offload {
            files: &files,
            activations: false,
            gradients: layers.gradients_on_disk,
            copies_overlap: layers.copies_overlap,
        });
        let step = Step::new(rehearsal.network(), rehearsal.parameters(), rehearsal.cx(), &[], offload);
        let (step, gradients) = (step.expect("counting cannot fail"), rehearsal.no_gradients());
        Buffers { counter, rehearsal, step, gradients, before: rehearsal.ledger().live() }
    }

    /// Bytes of the gradients that exist now, in accumulators or on their way to the host.
    pub fn bytes(&self) -> u64 {
        self.rehearsal.ledger().live() - self.before
    }

    /// Gives the trained parameters of a part accumulators, if they have none: one for each sum that is kept apart.
    pub fn take_accumulators(&mut self, part: Part) -> Result<()> {
        for &index in self.counter.trained.indices(part) {
            let weight = &self.rehearsal.parameters()[index].tensor;
            match self.counter.sums {
                1 => drop(self.gradients.complete(index, weight)?),
                sums => (0..sums).try_for_each(|shard| self.gradients.set_apart(shard, index, weight))?,
            }
        }
        Ok(())
    }

    pub fn run(&mut self, event: &Event) -> Result<()> {
        let mut trainer = Trainer { trained: &self.counter.trained, has_sums: self.counter.sums > 1 };
        self.step.run(std::slice::from_ref(event), &mut self.gradients, &mut trainer).map(|_| ())
    }

    /// The parts whose gradients wait for the update, in files or in other processes.
    pub fn waiting_parts(&self) -> Vec<Part> {
        let mut parts: Vec<Part> = self.step.waiting().map(|index| self.rehearsal.parameters()[index].part).collect();
        parts.dedup();
        parts
    }

    /// Bytes of the largest of these gradients.
    pub fn largest_waiting(&self) -> u64 {
        let bytes = |index: usize| {
            let elements = self.rehearsal.parameters()[index].tensor.dims().iter().product::<usize>();
            (elements * self.gradients.dtype(index).size_in_bytes()) as u64
        };
        self.step.waiting().map(bytes).max().unwrap_or(0)
    }
}

/// The trainer, which holds the gradients of some parameters.
struct Trainer<'a> {
    trained: &'a Trained,
    /// Whether a gradient is a sum over several shards.
    has_sums: bool,
}

impl Observer<Counted, Error> for Trainer<'_> {
    fn shards(&self) -> OwnShards {
        if self.has_sums { vec![(0, 0..0)] } else { Vec::new() }
    }

    fn holds(&self, index: usize) -> bool {
        self.trained.is_held(index)
    }
}
