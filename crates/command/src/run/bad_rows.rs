//! Skipped rows: the first is named, a large share causes a warning, and a run without any usable row ends.

use serde_json::json;

use crate::failure::{Failure, Outcome};
use crate::run::saved::History;
use crate::run::session::Session;

/// The share of skipped rows, in percent, above which the run warns.
const LARGE_SHARE_PERCENT: u64 = 10;
/// With fewer rows, the share is not significant.
const MIN_ROWS: u64 = 200;

impl Session {
    /// Counts the skipped rows of a batch. Warns the first time, and again if the share becomes large.
    ///
    /// # Errors
    /// At the end of an epoch or of the run, if no row could be used.
    pub fn note_bad_rows(&mut self, batch: &dataloader::Batch) -> Outcome<()> {
        let step = self.trainer.step_count();
        let is_at_end = batch.position_after.epoch > batch.epoch || self.trainer.is_done();
        let history = self.history_mut();
        history.read_rows += batch.rows.len() as u64 + batch.bad_rows;
        history.bad_rows += batch.bad_rows;
        history.cut = (history.cut.0 + batch.cut_sources, history.cut.1 + batch.cut_targets);
        if let (None, Some(row)) = (&history.first_bad_row, &batch.first_bad_row) {
            let row = row.to_string();
            history.first_bad_row = Some(row.clone());
            self.warn(
                &format!("skipped a row: {row} (later skips are only counted)"),
                json!({"step": step, "kind": "bad_row", "row": row}),
            )?;
        }
        let history = self.history_mut();
        if is_at_end && history.bad_rows == history.read_rows {
            return Err(no_row(history));
        }
        if history.warned_of_bad_rows || !has_many(history, is_at_end) {
            return Ok(());
        }
        history.warned_of_bad_rows = true;
        let (bad, read) = (history.bad_rows, history.read_rows);
        let row = history.first_bad_row.clone().unwrap_or_default();
        self.warn(
            &format!(
                "{bad} of the first {read} rows were skipped ({} %): null, empty or not UTF-8 in a column that the run reads; \
                 the first: {row}",
                100 * bad / read
            ),
            json!({"step": step, "kind": "bad_rows", "bad_rows": bad, "read_rows": read, "row": row,
                "rule": "null, empty or not UTF-8 in a column that the run reads"}),
        )
    }
}

fn has_many(history: &History, is_at_end: bool) -> bool {
    let is_telling = history.read_rows >= MIN_ROWS || is_at_end;
    is_telling && history.bad_rows * 100 > history.read_rows * LARGE_SHARE_PERCENT
}

fn no_row(history: &History) -> Failure {
    let first = history.first_bad_row.as_deref().unwrap_or_default();
    Failure::unusable(format!(
        "no usable row in the training data: all {} are null, empty or not UTF-8; the first: {first}",
        history.read_rows
    ))
    .hint("`train_low_mem inspect FILE` lists the columns; set `data.prompt_column` and `data.response_column` to two of them")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_share_is_warned_of_once_enough_rows_were_read() {
        let check = |bad_rows, read_rows, is_at_end, expected| {
            let history = History { bad_rows, read_rows, ..History::default() };
            assert_eq!(has_many(&history, is_at_end), expected, "{bad_rows} of {read_rows}, at the end: {is_at_end}");
        };
        check(1, 1, false, false);
        check(30, 199, false, false);
        check(30, 199, true, true);
        check(20, 200, false, false);
        check(21, 200, false, true);
        check(0, 500, true, false);
    }
}
