//! Texts whose characters the tokenizer loses: counted in every row that is read, with a warning where the start found none.

use serde_json::json;

use crate::data::survival;
use crate::failure::Outcome;
use crate::run::session::Session;

impl Session {
    /// Counts the texts of a batch that have characters which the tokenizer loses. Warns of the first one, unless the sample of the first
    /// screen had some.
    pub fn note_lossy_texts(&mut self, batch: &dataloader::Batch) -> Outcome<()> {
        let found = [batch.lossy.sources, batch.lossy.targets];
        let sampled = self.opened.reading.survival.as_ref().map_or([0; 2], |(survival, _)| survival.changed);
        let counted = self.history_mut().lossy;
        self.history_mut().lossy = [counted[0] + found[0], counted[1] + found[1]];
        for (side, what) in ["source", "target"].into_iter().enumerate() {
            if found[side] == 0 || counted[side] + sampled[side] > 0 {
                continue;
            }
            // Another process may have read the row.
            let place = batch.lossy.first[side]
                .as_ref()
                .map_or_else(String::new, |text| format!("row {}: {}: ", text.row, survival::shown(&text.characters)));
            let config = &self.config;
            let hint = survival::hint(config.model.init_from.as_deref(), &self.opened.reading.train.originals);
            let text = format!(
                "{place}the tokenizer loses characters of a {what}, which no sampled row has (later rows are only counted); {hint}"
            );
            let step = self.trainer.step_count();
            self.warn(
                &text,
                json!({"step": step, "kind": "lossy_text", "side": what, "row": place.trim_end_matches(": ")}),
            )?;
        }
        Ok(())
    }
}
