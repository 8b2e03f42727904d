//! The likely cause of a peak above its prediction.

use memory_policy::{Bytes, CostRow, Name};

use crate::Plan;
use crate::names::{EXACT, NOT_TENSORS, PROCESS};

/// Names the row that most likely was too small when the process held `peak` bytes in `phase`, of them `tensors` bytes in tensors.
///
/// If the tensors exceed their rows, returns the largest row of that phase whose bytes are not exact. Otherwise memory outside tensors
/// grew, and the measured or estimated rows were too small.
pub fn wrong_row(plan: &Plan, phase: &Name, peak: Bytes, tensors: Bytes) -> String {
    let rows = &plan.bill.rows;
    let is_tensor = |row: &&CostRow| !NOT_TENSORS.contains(&row.name);
    let predicted: Bytes = rows.iter().filter(is_tensor).map(|row| row.bytes).sum();
    if tensors > predicted {
        let from_shapes = rows.iter().filter(|row| is_tensor(row) && !EXACT.contains(&row.name));
        return match plan.bill.binding == *phase {
            true => from_shapes.max_by_key(|row| row.bytes).map_or(phase, |row| &row.name).to_string(),
            false => phase.to_string(),
        };
    }
    let others = peak.saturating_sub(tensors);
    let said: Bytes = rows.iter().filter(|row| row.name == PROCESS).map(|row| row.bytes).sum();
    if others > said { "process, loader or allocator".to_owned() } else { phase.to_string() }
}
