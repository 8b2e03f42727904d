//! Recovery from a step for which a device had no memory: all processes free memory, follow one smaller plan from there on, and repeat the
//! step.

use memory_policy::{Budget, Budgets, Bytes};
use serde_json::json;

use super::{Replanned, Session};
use crate::failure::Outcome;
use crate::machine::processes::OptionalGroup;

/// The part of the failed plan's tensors that the next plan may hold.
const ROOM_PERCENT: u64 = 90;

/// Rows of a device that are the same in every plan.
const FIXED: [memory_policy::Name; 2] = [planner::names::CONTEXT, planner::names::POOL];

impl Session {
    /// After a step for which a device had no memory: frees memory, and follows a smaller plan from here on, the same in all processes.
    /// Returns false for other errors, or if no plan is smaller. Then one of the processes with a full device ends all of them.
    pub fn recover_from_oom(&mut self, error: &trainer::Error) -> Outcome<bool> {
        let is_mine = match error {
            trainer::Error::DeviceMemory(_) => true,
            trainer::Error::DeviceMemoryElsewhere => false,
            _ => return Ok(false),
        };
        let group = self.group.clone();
        let together = OptionalGroup(group.as_ref());
        let whose = together.ranks_where(is_mine)?;
        self.trainer.release_gradients();
        self.trainer.release_unused_of_device()?;
        let (replanned, budgets, is_smaller) = self.smaller_plan()?;
        if !together.ranks_where(!is_smaller)?.is_empty() {
            together.wait_for_abort_by(whose[0])?;
            return Ok(false);
        }
        // Otherwise the failed plan would be followed again after a calm period.
        self.budgets = budgets;
        let step = self.trainer.step_count();
        let of = if group.is_some() { format!(" of process {}", whose[0]) } else { String::new() };
        let text = format!(
            "the device{of} had no memory left in step {}; the step is made again with a smaller plan",
            step + 1
        );
        self.warn(&text, json!({"step": step, "kind": "device_memory"}))?;
        self.follow(replanned)?;
        Ok(true)
    }

    /// The plan of all processes if each has less memory on its device than the failed plan needs. Also returns the budgets, and whether
    /// the plan needs less of this process' device.
    fn smaller_plan(&self) -> Outcome<(Replanned, Budgets, bool)> {
        let failed = self.plan.predicted_device_peak;
        let fixed = self.plan.bill.device.iter().flat_map(|bill| &bill.rows).filter(|row| FIXED.contains(&row.name));
        let fixed: Bytes = fixed.map(|row| row.bytes).sum();
        let most = fixed + failed.saturating_sub(fixed).percent(ROOM_PERCENT);
        let mut now = self.machine.snapshot()?;
        if let Some(device) = &mut now.device {
            device.free = device.free.min(most.saturating_sub(device.used));
        }
        let budgets = Budgets { device: Budget::Explicit(most), ..self.budgets };
        let mut replanned = memory_policy::replan(&now, &self.costs, budgets, &self.plan);
        self.share_plan(&now, budgets, &mut replanned)?;
        let is_smaller = now.device.is_some() && replanned.plan.predicted_device_peak < failed;
        Ok((replanned, budgets, is_smaller))
    }
}
