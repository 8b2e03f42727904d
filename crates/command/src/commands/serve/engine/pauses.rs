//! Pauses of a pass: between two blocks of the model it stands still, and others have a turn.
//!
//! The pass over a long text takes many times as long as a token of an answer or a short text. It can be divided only between blocks. So while it
//! goes on, whoever else has work has as much time as the pass for each of their shares. That costs nothing when nobody waits, and the results are
//! the same: passes share weights alone. Meanwhile no other long pass begins, so the memory is that of what was admitted.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use super::Engine;

/// A pass that can stand still.
#[derive(Debug)]
pub struct Pass {
    /// The model, which must stay in memory.
    model: usize,
    /// The bytes that it holds.
    pub bytes: u64,
    /// The tokens of its longest text.
    tokens: usize,
    begun: Instant,
    stood_still: Duration,
}

impl Pass {
    pub fn new(model: usize, bytes: u64, tokens: usize) -> Self {
        Pass { model, bytes, tokens, begun: Instant::now(), stood_still: Duration::ZERO }
    }
}

impl Engine<'_> {
    /// Computes a pass, which calls its argument between two blocks.
    pub(super) fn pausing<T>(&mut self, pass: Pass, compute: impl FnOnce(&dyn Fn()) -> T) -> T {
        if self.paused.is_some() || !self.loaded.can_pause() {
            return compute(&|| ());
        }
        let engine = RefCell::new((self, pass));
        compute(&|| {
            let (engine, pass) = &mut *engine.borrow_mut();
            engine.pause(pass);
        })
    }

    /// Lets others have as much time for each of their shares as the pass had so far.
    fn pause(&mut self, pass: &mut Pass) {
        let begun = Instant::now();
        let had = begun.duration_since(pass.begun).saturating_sub(pass.stood_still);
        self.loaded.pin(Some(pass.model));
        self.paused = Some(Pass { ..*pass });
        loop {
            let others = self.shares_of_texts().len() + self.shares_of_answers().len();
            let most = had * u32::try_from(others.max(1)).unwrap_or(u32::MAX);
            if pass.stood_still + begun.elapsed() >= most || !self.turn() {
                break;
            }
        }
        self.paused = None;
        self.loaded.pin(None);
        let stood_still = begun.elapsed();
        pass.stood_still += stood_still;
        self.stood_still += stood_still;
    }

    /// Whether a text with this number of tokens can be computed now. While a long text is paused, only short ones can; while anything else
    /// is, none.
    pub(super) fn may_compute(&self, tokens: usize) -> bool {
        let most = self.loaded.batch_tokens();
        self.paused.as_ref().is_none_or(|pass| pass.tokens > most && tokens <= most)
    }
}
