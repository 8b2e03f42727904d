//! The communication of a run's processes between two steps: they agree on the next step, and add up the counts of their rows.

use memory_policy::{Budgets, Change, MemorySnapshot};
use serde_json::{Value, json};

use super::{Replanned, Session, milliseconds};
use crate::failure::Outcome;
use crate::machine::processes::OptionalGroup;

/// The common decisions of all processes before a step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Agreed {
    /// Whether to stop.
    pub stop: bool,
    /// Whether to save after this step, because a save is due by time.
    pub save: bool,
}

impl Session {
    /// Before a step, all processes learn whether any of them has to stop or to follow another plan. Then all do the same.
    pub(super) fn agree(&mut self, now: &MemorySnapshot, replanned: &mut Replanned) -> Outcome<()> {
        let Some(group) = &self.group else { return Ok(()) };
        let votes = [
            self.stop.requested() || self.is_hopeless,
            replanned.is_hopeless,
            replanned.change.is_some(),
            group.is_first() && self.is_time_to_save(),
        ];
        let said = group.gather_numbers(&votes.map(u64::from))?;
        let [stop, is_hopeless, changes, save] = [0, 1, 2, 3].map(|vote| said.iter().any(|said| said[vote] != 0));
        self.agreed = Agreed { stop, save };
        replanned.is_hopeless = is_hopeless;
        if changes {
            self.share_plan(now, self.budgets, replanned)?;
        }
        Ok(())
    }

    /// Replaces a plan that this process would follow by one plan for all processes.
    pub(super) fn share_plan(&self, now: &MemorySnapshot, budgets: Budgets, replanned: &mut Replanned) -> Outcome<()> {
        let mine = replanned.plan.clone();
        let plan = OptionalGroup(self.group.as_ref()).agree_on_plan(mine, (now, &self.costs, budgets), true)?;
        if plan.step != replanned.plan.step {
            let (needed, available) = (plan.required(), now.ceiling());
            replanned.change.get_or_insert(Change::Shrunk { needed, available });
        }
        replanned.plan = plan;
        Ok(())
    }

    /// Adds the communication with other processes to the event of a step: bytes so far, and the time since the step before.
    pub(super) fn add_communication(&mut self, event: &mut Value) {
        let Some(group) = &self.group else { return };
        let spent = group.spent();
        let of_step = spent.since(std::mem::replace(&mut self.spent, spent));
        event["sent_bytes"] = json!(spent.sent_bytes);
        event["communication_ms"] = json!(milliseconds(of_step.communication));
        event["communication_wait_ms"] = json!(milliseconds(of_step.waited));
        event["communication_hidden"] = json!(of_step.hidden());
    }

    /// Whether this process writes the files of the run.
    pub fn writes(&self) -> bool {
        OptionalGroup(self.group.as_ref()).is_first()
    }

    /// The rows and counts of a whole batch. This process has read only its share.
    pub fn whole(&self, mut batch: dataloader::Batch) -> Outcome<dataloader::Batch> {
        let Some(group) = &self.group else { return Ok(batch) };
        let counts = [batch.bad_rows, batch.cut_sources, batch.cut_targets, batch.lossy.sources, batch.lossy.targets];
        let said = group.gather_numbers(&counts)?;
        let sum = |count: usize| said.iter().map(|said| said[count]).sum();
        (batch.bad_rows, batch.cut_sources, batch.cut_targets) = (sum(0), sum(1), sum(2));
        (batch.lossy.sources, batch.lossy.targets) = (sum(3), sum(4));
        let rows: Vec<u8> = batch.rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        let rows = group.gather(&rows)?.concat();
        batch.rows = rows.as_chunks().0.iter().map(|row| u64::from_le_bytes(*row)).collect();
        Ok(batch)
    }
}
