//! Calls of operations, added up.

use t5_ops::{Calls, Dropout, Needs, Path};

use super::Counted;
use super::ledger::Work;
use crate::ops::AttentionSettings;

impl Counted {
    /// Adds up a call whose results take the memory of operands on the CPU. A device has no kernel for it, and holds both.
    pub(super) fn replaces(&self, needs: Needs, results: u64) {
        let beside = if self.path() == Path::Device { results } else { 0 };
        self.calls(Needs { transient: needs.transient + beside, ..needs });
    }

    /// Adds up a call whose results have been made.
    pub(super) fn calls(&self, needs: Needs) {
        let sums = self.sums();
        sums.note_transient(needs.transient);
        sums.kept.set(sums.kept.get().max(needs.kept));
        sums.on_host.set(sums.on_host.get().max(needs.on_host));
        sums.calls.set(sums.calls.get() + needs.calls);
        let work = sums.work.get();
        sums.work.set(Work { all: work.all + needs.multiply_adds, ..work });
    }

    /// Adds up the upload of a list of numbers at its first use. An empty list stands for one that is not known.
    pub(super) fn uses_list(&self, list: impl Iterator<Item = u32>) {
        let (sums, list) = (self.sums(), list.collect::<Vec<_>>());
        if !list.is_empty() && self.path() == Path::Device && sums.lists.borrow_mut().insert(list) {
            sums.calls.set(sums.calls.get() + Calls { uploads: 1, ..Calls::default() });
        }
    }

    /// Adds up the upload of a dropout's samples.
    pub(super) fn drops(&self, dropout: Option<&Dropout>) {
        self.uses_list(dropout.into_iter().flat_map(|dropout| dropout.samples.iter().copied()));
    }

    /// Adds up the upload of attention's lists.
    pub(super) fn attends_by(&self, settings: &AttentionSettings<Counted>) {
        self.uses_list(settings.key_lengths.iter().map(|&length| length as u32));
        self.drops(settings.dropout.as_ref());
    }

    /// Adds up a call of attention whose results have been made.
    pub(super) fn attends(&self, needs: Needs) {
        self.calls(needs);
        let work = self.sums().work.get();
        self.sums().work.set(Work { attention: work.attention + needs.multiply_adds, ..work });
    }

    /// Adds up a call of a loss whose results have been made.
    pub(super) fn loses(&self, needs: Needs) {
        self.calls(needs);
        self.sums().loss.set(self.sums().loss.get().max(needs.transient));
    }
}
