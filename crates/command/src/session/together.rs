//! What a run does together with other processes between two steps: it agrees on the next, and counts what all of them read.

use memory_policy::{Budgets, Change, MemorySnapshot};
use serde_json::{Value, json};

use super::{Replanned, Session, milliseconds};
use crate::failure::Outcome;
use crate::processes::Together;

/// What all processes of a run decided together before a step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Agreed {
    /// To stop.
    pub stop: bool,
    /// To save after this step, because it is time by the clock.
    pub save: bool,
}

impl Session {
    /// Before a step, all processes learn whether one of them is to stop or has to follow another plan, and do the same.
    pub(super) fn agree(&mut self, now: &MemorySnapshot, replanned: &mut Replanned) -> Outcome<()> {
        let Some(group) = &self.group else { return Ok(()) };
        let wishes = [
            self.stop.requested() || self.is_hopeless,
            replanned.is_hopeless,
            replanned.change.is_some(),
            group.is_first() && self.is_time_to_save(),
        ];
        let said = group.gather_numbers(&wishes.map(u64::from))?;
        let [stop, is_hopeless, changes, save] = [0, 1, 2, 3].map(|wish| said.iter().any(|said| said[wish] != 0));
        self.agreed = Agreed { stop, save };
        replanned.is_hopeless = is_hopeless;
        if changes {
            self.share_plan(now, self.budgets, replanned)?;
        }
        Ok(())
    }

    /// Has a plan that this process would follow be the one that all of them follow.
    pub(super) fn share_plan(&self, now: &MemorySnapshot, budgets: Budgets, replanned: &mut Replanned) -> Outcome<()> {
        let mine = replanned.plan.clone();
        let plan = Together(self.group.as_ref()).one_plan(mine, (now, &self.costs, budgets), true)?;
        if plan.step != replanned.plan.step {
            let (needed, available) = (plan.required(), now.ceiling());
            replanned.change.get_or_insert(Change::Shrunk { needed, available });
        }
        replanned.plan = plan;
        Ok(())
    }

    /// Adds what was spent on other processes to the event of a step: bytes so far, and the time since the step before.
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
        Together(self.group.as_ref()).is_first()
    }

    /// The rows and counts of a whole batch, of which this process read its share.
    pub fn whole(&self, mut batch: dataloader::Batch) -> Outcome<dataloader::Batch> {
        let Some(group) = &self.group else { return Ok(batch) };
        let counts = [batch.bad_rows, batch.cut_sources, batch.cut_targets];
        let said = group.gather_numbers(&counts)?;
        let sum = |count: usize| said.iter().map(|said| said[count]).sum();
        (batch.bad_rows, batch.cut_sources, batch.cut_targets) = (sum(0), sum(1), sum(2));
        let rows: Vec<u8> = batch.rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        let rows = group.gather(&rows)?.concat();
        batch.rows = rows.as_chunks().0.iter().map(|row| u64::from_le_bytes(*row)).collect();
        Ok(batch)
    }
}
