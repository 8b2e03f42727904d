//! How often a step moves the tensors of a part: its gradients, to be summed over processes, and its weights, where they lie in files or
//! each process holds a share of them.

use std::collections::{HashMap, HashSet};

use super::{Counter, Shape};
use crate::levers::Levers;
use crate::parameters::Part;
use crate::step::schedule::{Backward, Event, Stage, Unit};

/// The moves of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// How often the gradients of all parts are summed together.
    sums_of_all: u64,
    sums: HashMap<Part, u64>,
    gathers: HashMap<Part, u64>,
    looked_up: u64,
    overlapped_copies: HashMap<Part, u64>,
}

impl Moves {
    /// How often the gradients of a part are summed.
    pub fn sums(&self, part: Part) -> u64 {
        self.sums_of_all + self.sums.get(&part).copied().unwrap_or(0)
    }

    /// How often the weights of a part are gathered from the process that holds them.
    pub fn gathers(&self, part: Part) -> u64 {
        self.gathers.get(&part).copied().unwrap_or(0)
    }

    /// How often all weights of a part are gathered. An embedding needs only a few rows of the shared table.
    fn paged_in(&self, part: Part) -> u64 {
        self.gathers(part) - if part == Part::Shared { self.looked_up } else { 0 }
    }
}

/// Bytes of weights that a step reads from their files. Rows that an embedding looks up are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightsRead {
    /// Weights that the step changes.
    pub trained: u64,
    /// Weights that the step does not change. Their bytes do not depend on the number of micro-batches.
    pub frozen: u64,
    /// Unchanged weights that are read matrix by matrix: the bytes that each micro-batch reads. They do not depend on its samples.
    pub by_micro_batch: u64,
    /// A table that is read by rows: the bytes that each micro-batch reads, which are twice the table for each chunk of the loss.
    pub of_table: u64,
}

impl WeightsRead {
    /// Bytes that a step of `count` micro-batches reads.
    pub fn in_micro_batches(&self, count: usize) -> u64 {
        self.trained + self.frozen + (self.by_micro_batch + self.of_table) * count as u64
    }
}

impl Counter {
    /// The weights that a layer-major step over a batch of this shape reads from files.
    pub fn weights_read(&self, batch: Shape, levers: &Levers) -> WeightsRead {
        let mut read = WeightsRead::default();
        if !levers.has_weights_on_disk() {
            return read;
        }
        let (weights, moves) = (self.weights_on_disk(levers), self.moves(1, levers));
        if levers.has_weights_by_matrix() {
            read.by_micro_batch = self.tally(batch, levers).paged_in;
            read.of_table = self.table_read(batch, levers);
        }
        for part in weights.parts().filter(|part| !weights.is_paged_by_matrix(*part)) {
            let trained = weights.written_of(part, &self.trained);
            // A table is copied to a device as a whole, whichever rows are looked up.
            let is_copied = self.rehearsal.ledger().is_on_device();
            let times = if is_copied { moves.gathers(part) } else { moves.paged_in(part) };
            // Weights that are changed are read once more.
            read.trained += (times + 1) * trained;
            read.frozen += times * (weights.part(part) - trained);
        }
        read
    }

    /// [`WeightsRead::of_table`] alone, in bytes.
    pub fn table_read(&self, batch: Shape, levers: &Levers) -> u64 {
        let is_by_rows = levers.has_weights_by_matrix()
            && self.weights_on_disk(levers).is_paged_by_matrix(Part::of_head(&self.config));
        if is_by_rows { self.head(batch, levers).paged_in } else { 0 }
    }

    /// Bytes of weights that a step copies to a device while it computes a block. They do not depend on the number of micro-batches.
    pub fn weights_copied_behind(&self, levers: &Levers) -> u64 {
        if !levers.has_weights_on_disk() {
            return 0;
        }
        let (weights, moves) = (self.weights_on_disk(levers), self.moves(1, levers));
        moves.overlapped_copies.iter().map(|(part, times)| times * weights.part(*part)).sum()
    }

    /// The moves of a step.
    pub fn moves(&self, micro_batches: usize, levers: &Levers) -> Moves {
        let outline = self.outline(levers.recompute_blocks, levers.layer_major.as_ref());
        let (mut moves, mut here, mut is_block) = (Moves::default(), HashSet::new(), false);
        let held = |part| if part == Part::LmHead { Part::of_head(&self.config) } else { part };
        for event in outline.training(micro_batches) {
            match event {
                Event::HandOver { part: Some(part), .. } => *moves.sums.entry(part).or_default() += 1,
                Event::HandOver { part: None, stage: Stage::Measure, .. } => moves.sums_of_all += 1,
                Event::Embed { .. } | Event::PageIn(_) => {
                    let part = if let Event::PageIn(part) = event { held(part) } else { Part::Shared };
                    if here.insert(part) {
                        *moves.gathers.entry(part).or_default() += 1;
                        moves.looked_up += u64::from(matches!(event, Event::Embed { .. }));
                    }
                }
                Event::PageOut(part) => {
                    here.remove(&held(part));
                }
                Event::Forward { unit, .. } | Event::Backward(Backward { unit, .. }) => {
                    is_block = matches!(unit, Unit::Block { .. });
                }
                Event::Copy(part) if is_block => *moves.overlapped_copies.entry(held(part)).or_default() += 1,
                _ => {}
            }
        }
        moves
    }
}
