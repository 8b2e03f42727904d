//! Text that is printed while its tokens are generated.

use std::cell::RefCell;

use dataloader::Tokenizer;

use crate::failure::{Failure, Outcome};
use crate::screen::report;

/// The part of an answer that was printed.
#[derive(Debug, Default)]
pub struct Streamed {
    text: String,
    failed: Option<Failure>,
}

impl Streamed {
    /// Prints the part of the answer's text that is new. Bytes of an incomplete character wait for the rest.
    pub fn show(streamed: &RefCell<Self>, tokenizer: &Tokenizer, ids: &[u32]) {
        let mut streamed = streamed.borrow_mut();
        if streamed.failed.is_none()
            && let Err(failure) = streamed.print(tokenizer, ids)
        {
            streamed.failed = Some(failure);
        }
    }

    fn print(&mut self, tokenizer: &Tokenizer, ids: &[u32]) -> Outcome<()> {
        let text = tokenizer.decode(ids)?;
        let more = text.strip_prefix(&self.text).map(|more| more.trim_end_matches('\u{fffd}'));
        if let Some(more) = more.filter(|more| !more.is_empty()) {
            report::answer(more)?;
            self.text.push_str(more);
        }
        Ok(())
    }

    /// Prints the rest of the answer and ends the line.
    ///
    /// # Errors
    /// Printing failed earlier.
    pub fn finish(self, answer: &str) -> Outcome<()> {
        if let Some(failure) = self.failed {
            return Err(failure);
        }
        report::answer(&format!("{}\n", answer.strip_prefix(&self.text).unwrap_or_default()))
    }
}
