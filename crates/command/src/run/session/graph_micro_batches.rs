//! Checks that micro-batches that a plan records are launched as graphs.

use serde_json::json;
use trainer::StepStats;

use super::Session;
use crate::failure::Outcome;

/// Steps in a row without a graph before the user is told. Repeating micro-batches are launched as graphs after four steps.
const STEPS: u32 = 16;

/// The steps so far of a plan that records micro-batches.
#[derive(Debug, Default)]
pub(super) struct GraphLaunchCheck {
    without: u32,
    is_said: bool,
}

impl GraphLaunchCheck {
    /// Adds a step, given the number of its micro-batches that were launched as graphs. Returns a message for the user, once. `records` is
    /// false if recording has been switched off, which has been reported already.
    pub(super) fn add(&mut self, graph_micro_batches: usize, records: bool) -> Option<String> {
        self.without = if graph_micro_batches == 0 && records { self.without + 1 } else { 0 };
        if self.without < STEPS || self.is_said {
            return None;
        }
        self.is_said = true;
        Some(format!(
            "the plan records micro-batches, but in {STEPS} steps none was launched as a graph: their sizes differ from step to step; `memory.recorded_micro_batches = \"none\"` frees the memory that is kept for graphs"
        ))
    }
}

impl Session {
    /// Warns once if micro-batches that could be recorded as graphs are not.
    pub(super) fn note_graphs(&mut self, stats: &StepStats) -> Outcome<()> {
        let records = self.plan.step.levers.repeats && self.trainer.model().records_micro_batches();
        let text = self.graph_micro_batches.add(stats.graph_micro_batches, records);
        text.map_or(Ok(()), |text| self.warn(&text, json!({"step": stats.step, "kind": "no_graphs"})))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_without_graphs_are_told_once_unless_somebody_has_said_so() {
        let mut steps = GraphLaunchCheck::default();
        let mut add = |count: u32, graph_micro_batches, records| {
            (0..count).filter_map(|_| steps.add(graph_micro_batches, records)).collect::<Vec<_>>().len()
        };
        assert_eq!(add(STEPS - 1, 0, true) + add(1, 2, true) + add(STEPS - 1, 0, true), 0);
        assert_eq!(add(3 * STEPS, 0, false), 0);
        assert_eq!(add(STEPS, 0, true) + add(3 * STEPS, 0, true), 1);
    }
}
