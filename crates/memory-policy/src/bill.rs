//! The bill: the memory of a plan, row by row, printed before the plan allocates anything.
//!
//! ```text
//! Memory plan       predicted peak 2.25 GiB of 4.00 GiB (--memory-budget);
//!                   6.21 GiB available (cgroup)
//!   activations       1.55 GiB  69 %  ██████    8 of 20 blocks recomputed
//!   parameters        0.70 GiB  31 %  ██        188 M x f32
//!   total             2.25 GiB
//!   safety margin     0.18 GiB                  5 % of the predicted peak
//! Step              128 samples a step in micro-batches of 16
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::layout::{self, Unit};
use crate::{Bytes, CostRow, DeviceBill, Name, Phase};

/// The predicted memory of a plan, row by row. `Display` prints it for people, `Serialize` for `--json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bill {
    /// The most that the process may hold.
    pub budget: Bytes,
    /// Who set the budget: `--memory-budget`.
    pub budget_source: String,
    /// Memory available to the process when the bill was made, regardless of the budget.
    pub available: Bytes,
    /// The source of the limit in `available`: `host` or `cgroup`.
    pub available_set_by: String,
    /// The rows of the peak: fixed rows, then the step's, then the loader's.
    pub rows: Vec<CostRow>,
    /// Memory kept free for needs that no row predicts.
    pub headroom: Bytes,
    /// The source of the headroom's size.
    pub headroom_note: String,
    /// The sum of the rows: the predicted peak as the operating system counts it.
    pub predicted_peak: Bytes,
    /// The peak of every phase, fixed rows and loader included.
    #[serde(default)]
    pub phases: Vec<CostRow>,
    /// The rows of every phase, including fixed rows and the loader's, in the process's own memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phase_rows: Vec<Phase>,
    /// The phase with the highest peak: `rows` and `predicted_peak` describe it.
    #[serde(default)]
    pub binding: Name,
    /// The gain of a larger budget, in words.
    #[serde(default)]
    pub next: String,
    /// The device's part of the bill, if there is a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceBill>,
    /// How the budget is used, in words: `128 samples a step, micro-batches of 16`.
    pub conclusion: String,
}

impl fmt::Display for Bill {
    /// The rows above a small share; smaller ones together.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(false))
    }
}

impl Bill {
    /// Every row, and the peak of every phase.
    pub fn in_full(&self) -> String {
        self.text(true)
    }

    fn text(&self, is_full: bool) -> String {
        let unit = Unit::for_largest(self.predicted_peak);
        let of = |bytes: Bytes| Unit::for_largest(bytes).show(bytes);
        let only = if self.available < self.budget { "only " } else { "" };
        let mut text = layout::labelled(
            "Memory plan",
            &format!(
                "predicted peak {} of {} ({}); {only}{} available ({})",
                unit.show(self.predicted_peak),
                of(self.budget),
                self.budget_source,
                of(self.available),
                self.available_set_by
            ),
        );
        text += &layout::rows(&self.rows, unit, is_full);
        text += &layout::sum("total", self.predicted_peak, unit, &self.largest_phase(unit, is_full));
        text += &layout::sum("safety margin", self.headroom, unit, &self.headroom_note);
        if let Some(device) = &self.device {
            text += &device.text(is_full);
        }
        text += &layout::labelled("Step", &self.conclusion);
        if !self.next.is_empty() {
            text += &layout::labelled("Speed", &self.next);
        }
        text
    }

    /// The phase that the rows describe; in full, also the peaks of the other phases.
    fn largest_phase(&self, unit: Unit, is_full: bool) -> String {
        if self.phases.len() < 2 {
            return String::new();
        }
        let others = self.phases.iter().filter(|phase| phase.name != self.binding);
        let others: Vec<String> = others.map(|phase| format!("{} {}", phase.name, unit.show(phase.bytes))).collect();
        match is_full {
            true => format!("largest phase: {} ({})", self.binding, others.join(", ")),
            false => format!("largest phase: {}", self.binding),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bill(budget: Bytes, rows: Vec<CostRow>) -> Bill {
        Bill {
            budget,
            budget_source: "--memory-budget".into(),
            available: Bytes(6_667_936_727),
            available_set_by: "cgroup".into(),
            predicted_peak: crate::costs::sum(&rows),
            rows,
            headroom: budget.percent(5),
            headroom_note: String::new(),
            phases: Vec::new(),
            phase_rows: Vec::new(),
            binding: Name::default(),
            next: String::new(),
            device: None,
            conclusion: "128 samples a step in micro-batches of 16".into(),
        }
    }

    #[test]
    fn a_bill_of_gibibytes_reads_like_the_style_guide() {
        let rows = vec![
            CostRow::new(Name::new("parameters"), 751_619_277, "188 M x f32"),
            CostRow::new(Name::new("optimizer state"), 1_468_006, "Adafactor, factored"),
            CostRow::new(Name::new("activations"), 1_664_299_827, "8 of 20 blocks recomputed"),
        ];
        let expected = "\
Memory plan       predicted peak 2.25 GiB of 4.00 GiB (--memory-budget); 6.21
                  GiB available (cgroup)
  activations       1.55 GiB  69 %  ██████    8 of 20 blocks recomputed
  parameters        0.70 GiB  31 %  ██        188 M x f32
  optimizer state  <0.01 GiB   0 %            Adafactor, factored
  total             2.25 GiB
  safety margin     0.20 GiB
Step              128 samples a step in micro-batches of 16
";
        assert_eq!(bill(Bytes::gib(4), rows).to_string(), expected);
    }

    #[test]
    fn a_bill_says_when_less_than_the_budget_is_there() {
        let bill = Bill { available: Bytes::mib(330), ..bill(Bytes::gib(4), Vec::new()) };
        let text = bill.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains("(--memory-budget); only 330.0 MiB available (cgroup)"), "{text}");
    }

    #[test]
    fn a_small_bill_counts_in_mebibytes_and_small_rows_are_one_unless_all_are_asked_for() {
        let rows = vec![
            CostRow::new(Name::new("norms"), 2048, ""),
            CostRow::new(Name::new("process"), 31 << 20, "measured"),
            CostRow::new(Name::new("nothing"), 0, ""),
        ];
        let bill = Bill {
            phases: vec![
                CostRow::new(Name::new("training"), 31 << 20, ""),
                CostRow::new(Name::new("saving"), 9 << 20, ""),
            ],
            binding: Name::new("training"),
            ..bill(Bytes::mib(200), rows)
        };
        let expected = "\
Memory plan       predicted peak 31.0 MiB of 200.0 MiB (--memory-budget); 6.21
                  GiB available (cgroup)
  process           31.0 MiB 100 %  ████████  measured
  everything else   <0.1 MiB   0 %            2 rows: `plan --explain`
  total             31.0 MiB                  largest phase: training
  safety margin     10.0 MiB
Step              128 samples a step in micro-batches of 16
";
        assert_eq!(bill.to_string(), expected);
        let full = bill.in_full();
        assert!(
            full.contains("  norms ") && full.contains("  nothing ") && full.contains("training (saving"),
            "{full}"
        );
    }
}
