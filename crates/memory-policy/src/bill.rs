//! The bill: what a plan will hold, row by row, printed before anything of it is allocated.
//!
//! ```text
//! memory budget        4.00 GiB   --memory-budget; 6.21 GiB available (cgroup)
//!   parameters         0.70 GiB   188 M x f32
//!   optimizer state    1.4 MiB    Adafactor, factored
//!   headroom           0.18 GiB   5 % of the predicted peak
//! => 128 samples a step in micro-batches of 16; predicted peak 3.51 GiB
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, CostRow, DeviceBill, Name};

/// The predicted memory of a plan, row by row. `Display` prints it for people, `Serialize` for `--json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bill {
    /// The most that the process may hold.
    pub budget: Bytes,
    /// Who set the budget: `--memory-budget`.
    pub budget_source: String,
    /// Memory available to the process when the bill was made, whatever the budget.
    pub available: Bytes,
    /// Whose limit `available` is: `host` or `cgroup`.
    pub available_set_by: String,
    /// The rows of the peak: fixed rows, then the step's, then the loader's.
    pub rows: Vec<CostRow>,
    /// Kept free for what the rows do not know.
    pub headroom: Bytes,
    /// Where the headroom's size comes from.
    pub headroom_note: String,
    /// The sum of the rows: what the operating system's own peak is predicted to be.
    pub predicted_peak: Bytes,
    /// The peak of every phase, fixed rows and loader included.
    #[serde(default)]
    pub phases: Vec<CostRow>,
    /// The phase that `rows` and `predicted_peak` are about: the one with the highest peak.
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

/// Column of the values where all names are short, as most are.
const NAME_WIDTH: usize = 19;

impl fmt::Display for Bill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = Unit::of(self.budget.max(self.predicted_peak));
        let longest = self.rows.iter().map(|row| row.name.as_str().chars().count()).max().unwrap_or(0);
        let width = NAME_WIDTH.max(longest + 2);
        let only = if self.available < self.budget { "only " } else { "" };
        let budget_note = format!(
            "{}; {only}{} available ({})",
            self.budget_source,
            Unit::of(self.available).show(self.available),
            self.available_set_by
        );
        let line = |f: &mut fmt::Formatter<'_>, indent: &str, name: &str, bytes: Bytes, note: &str| {
            let width = width + 2 - indent.len();
            let text = format!("{indent}{name:<width$}{:<11}{note}", unit.show(bytes));
            writeln!(f, "{}", text.trim_end())
        };
        line(f, "", "memory budget", self.budget, &budget_note)?;
        for row in &self.rows {
            line(f, "  ", row.name.as_str(), row.bytes, &row.note)?;
        }
        line(f, "  ", "headroom", self.headroom, &self.headroom_note)?;
        if let Some(device) = &self.device {
            write!(f, "{device}")?;
        }
        if self.phases.len() > 1 {
            let shown: Vec<String> =
                self.phases.iter().map(|phase| format!("{} {}", phase.name, unit.show(phase.bytes))).collect();
            let width = width + 2;
            writeln!(f, "{:<width$}{}; largest: {}", "peak of each phase", shown.join(", "), self.binding)?;
        }
        if !self.next.is_empty() {
            let width = width + 2;
            writeln!(f, "{:<width$}{}", "speed", self.next)?;
        }
        writeln!(f, "=> {}; predicted peak {}", self.conclusion, unit.show(self.predicted_peak))
    }
}

/// One unit for the whole bill, so that rows compare at a glance.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Unit {
    Gib,
    Mib,
}

impl Unit {
    pub(crate) fn of(largest: Bytes) -> Self {
        if largest >= Bytes::gib(1) { Self::Gib } else { Self::Mib }
    }

    /// `bytes` in this unit, or in the one below where it would show as nothing.
    pub(crate) fn show(self, bytes: Bytes) -> String {
        let scaled = |bits: u32| bytes.0 as f64 / (1u64 << bits) as f64;
        match self {
            Self::Gib if scaled(30) >= 0.01 || bytes == Bytes::ZERO => {
                format!("{:.2} GiB", scaled(30))
            }
            Self::Gib | Self::Mib if scaled(20) >= 0.1 || bytes == Bytes::ZERO => {
                format!("{:.1} MiB", scaled(20))
            }
            Self::Gib | Self::Mib => format!("{:.1} KiB", scaled(10)),
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
memory budget        4.00 GiB   --memory-budget; 6.21 GiB available (cgroup)
  parameters         0.70 GiB   188 M x f32
  optimizer state    1.4 MiB    Adafactor, factored
  activations        1.55 GiB   8 of 20 blocks recomputed
  headroom           0.20 GiB
=> 128 samples a step in micro-batches of 16; predicted peak 2.25 GiB
";
        assert_eq!(bill(Bytes::gib(4), rows).to_string(), expected);
    }

    #[test]
    fn a_bill_says_when_less_than_the_budget_is_there() {
        let bill = Bill { available: Bytes::mib(330), ..bill(Bytes::gib(4), Vec::new()) };
        let first = bill.to_string().lines().next().unwrap().to_string();
        assert!(first.ends_with("--memory-budget; only 330.0 MiB available (cgroup)"), "{first}");
    }

    #[test]
    fn a_small_bill_counts_in_mebibytes_and_long_names_widen_the_column() {
        let rows = vec![
            CostRow::new(Name::new("process, threads, allocator"), 31 << 20, "measured"),
            CostRow::new(Name::new("norms"), 2048, ""),
            CostRow::new(Name::new("nothing"), 0, ""),
        ];
        let expected = "\
memory budget                  200.0 MiB  --memory-budget; 6.21 GiB available (cgroup)
  process, threads, allocator  31.0 MiB   measured
  norms                        2.0 KiB
  nothing                      0.0 MiB
  headroom                     10.0 MiB
=> 128 samples a step in micro-batches of 16; predicted peak 31.0 MiB
";
        assert_eq!(bill(Bytes::mib(200), rows).to_string(), expected);
    }
}
