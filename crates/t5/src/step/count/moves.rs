//! How often a step moves what belongs to a part between processes: its gradients to be summed, and its weights where each process holds
//! its own.

use std::collections::{HashMap, HashSet};

use super::Counter;
use crate::levers::Levers;
use crate::parameters::Part;
use crate::step::schedule::{Event, Stage};

/// The moves of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// How often the gradients of all parts are summed together.
    sums_of_all: u64,
    sums: HashMap<Part, u64>,
    brought: HashMap<Part, u64>,
}

impl Moves {
    /// How often the gradients of a part are summed.
    pub fn sums(&self, part: Part) -> u64 {
        self.sums_of_all + self.sums.get(&part).copied().unwrap_or(0)
    }

    /// How often the weights of a part are brought from the process that holds them.
    pub fn brought(&self, part: Part) -> u64 {
        self.brought.get(&part).copied().unwrap_or(0)
    }
}

impl Counter {
    /// The moves of a step.
    pub fn moves(&self, micro_batches: usize, levers: &Levers) -> Moves {
        let outline = self.outline(levers.recompute_blocks, levers.layer_major.as_ref());
        let (mut moves, mut here) = (Moves::default(), HashSet::new());
        // A tied head is the shared table.
        let held = |part| if part == Part::LmHead && self.config.tie_word_embeddings { Part::Shared } else { part };
        for event in outline.training(micro_batches) {
            match event {
                Event::HandOver { part: Some(part), .. } => *moves.sums.entry(part).or_default() += 1,
                Event::HandOver { part: None, stage: Stage::Measure, .. } => moves.sums_of_all += 1,
                Event::Embed { .. } | Event::PageIn(_) => {
                    let part = if let Event::PageIn(part) = event { held(part) } else { Part::Shared };
                    if here.insert(part) {
                        *moves.brought.entry(part).or_default() += 1;
                    }
                }
                Event::PageOut(part) => {
                    here.remove(&held(part));
                }
                _ => {}
            }
        }
        moves
    }
}
