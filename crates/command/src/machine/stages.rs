//! The memory of everything before a plan is made: the phase `reading` of the bill.
//!
//! It is over when the bill is made, so it is measured. The system keeps one number, the largest resident set so far. It is noted after each
//! stage, such as loading a tokenizer, so that the bill can name the stage of the peak. Beside the bytes of rows that were converted stands
//! the bound that was predicted before.

use memory_policy::{Bytes, CostRow, MemorySnapshot, Name, Probe, SystemProbe};
use planner::names::PROCESS;

use crate::failure::Outcome;

/// The tokenizer, and that of a model beside it.
pub const TOKENIZER: Name = Name::new("tokenizer");
/// Lists of files, their columns, and rows that are converted to parquet.
pub const FILES: Name = Name::new("files of rows");
/// Footers of parquet files and the positions of their pages.
pub const FOOTERS: Name = Name::new("footers");
/// The measurement of the machine's speed.
pub const SPEED: Name = Name::new("machine speed");
/// The rehearsal, after which the process is measured.
const REHEARSAL: Name = Name::new("rehearsal");

/// The stages so far.
#[derive(Clone, Debug, Default)]
pub struct Stages {
    stages: Vec<Stage>,
}

/// The memory of the process at the end of a stage.
#[derive(Clone, Debug)]
struct Stage {
    what: Name,
    rss: Bytes,
    peak: Bytes,
    /// The most that the stage was predicted to take, if it was.
    bound: Option<Bytes>,
}

impl Stages {
    /// The memory of the program before it reads anything.
    pub fn begin() -> Outcome<Self> {
        let mut stages = Self::default();
        stages.ends(PROCESS)?;
        Ok(stages)
    }

    /// Ends a stage.
    pub fn ends(&mut self, what: Name) -> Outcome<()> {
        self.ends_within(what, None)
    }

    /// Ends a stage that was predicted to take at most this.
    pub fn ends_within(&mut self, what: Name, bound: Option<Bytes>) -> Outcome<()> {
        let stage = Stage::measure(what, &SystemProbe::new().snapshot()?);
        self.stages.push(Stage { bound, ..stage });
        Ok(())
    }

    /// The rows of the peak so far; none if no stage was noted. `now` was taken after the rehearsal.
    pub fn rows(&self, now: &MemorySnapshot) -> Vec<CostRow> {
        if self.stages.is_empty() {
            return Vec::new();
        }
        let stages: Vec<Stage> = self.stages.iter().cloned().chain([Stage::measure(REHEARSAL, now)]).collect();
        rows(&stages)
    }
}

impl Stage {
    fn measure(what: Name, now: &MemorySnapshot) -> Self {
        // The system counts the two at different times.
        Self { what, rss: now.rss.min(now.peak_rss), peak: now.peak_rss, bound: None }
    }
}

/// The memory at the peak of these stages: what earlier stages left, and what the stage of the peak took. The sum is the peak.
fn rows(stages: &[Stage]) -> Vec<CostRow> {
    let Some(peak) = stages.iter().map(|stage| stage.peak).max() else { return Vec::new() };
    // The peak never falls, so the first stage that ends with it had it.
    let of_peak = stages.iter().position(|stage| stage.peak == peak).unwrap_or(0);
    let mut left = peak;
    let mut row = |stage: &Stage, bytes: Bytes, note: &str| {
        let bytes = bytes.min(left);
        left = left.saturating_sub(bytes);
        let bound = stage.bound.map(|bound| format!("; at most {bound} were predicted")).unwrap_or_default();
        CostRow::new(stage.what.clone(), bytes.0, format!("{note}{bound}"))
    };
    let mut found = Vec::new();
    if of_peak > 0 {
        let before = stages[of_peak - 1].rss.min(peak);
        found.push(row(&stages[of_peak], peak.saturating_sub(before), "at its peak: measured"));
    }
    for of in stages[..of_peak].windows(2).rev() {
        found.push(row(&of[1], of[1].rss.saturating_sub(of[0].rss), "kept: measured"));
    }
    found.push(row(&Stage { what: PROCESS, bound: None, ..stages[0] }, peak, "measured: program"));
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(stages: &[(Name, u64, u64)], expected: &[(Name, u64)]) {
        let stage = |(what, rss, peak): &(Name, u64, u64)| Stage {
            what: what.clone(),
            rss: Bytes(*rss),
            peak: Bytes(*peak),
            bound: None,
        };
        let stages: Vec<Stage> = stages.iter().map(stage).collect();
        let found = rows(&stages);
        let found: Vec<(Name, u64)> = found.into_iter().map(|row| (row.name, row.bytes.0)).collect();
        assert_eq!(found, expected);
        assert_eq!(found.iter().map(|row| row.1).sum::<u64>(), stages.last().map_or(0, |stage| stage.peak.0));
    }

    #[test]
    fn the_rows_of_the_peak_are_what_earlier_stages_left_and_what_its_own_took() {
        check(&[], &[]);
        check(&[(PROCESS, 10, 12)], &[(PROCESS, 12)]);
        let begun = [(PROCESS, 10, 12), (TOKENIZER, 50, 90), (FILES, 55, 90), (FOOTERS, 56, 90)];
        // The tokenizer's stage has the peak, and later ones do not matter.
        check(&begun, &[(PROCESS, 10), (TOKENIZER, 80)]);
        let higher = [begun.as_slice(), &[(SPEED, 57, 120), (REHEARSAL, 58, 120)]].concat();
        check(&higher, &[(PROCESS, 10), (TOKENIZER, 40), (FILES, 5), (FOOTERS, 1), (SPEED, 64)]);
        // A stage that gives memory back has no row of its own to be counted twice.
        check(
            &[(PROCESS, 40, 40), (TOKENIZER, 30, 60), (FILES, 35, 70)],
            &[(PROCESS, 30), (TOKENIZER, 0), (FILES, 40)],
        );
    }

    #[test]
    fn the_peak_of_a_snapshot_after_all_stages_is_the_sum() {
        let mut stages = Stages::begin().unwrap();
        stages.ends(TOKENIZER).unwrap();
        let now = MemorySnapshot { rss: Bytes::gib(8), peak_rss: Bytes::gib(9), ..MemorySnapshot::default() };
        assert_eq!(stages.rows(&now).iter().map(|row| row.bytes).sum::<Bytes>(), Bytes::gib(9));
    }
}
