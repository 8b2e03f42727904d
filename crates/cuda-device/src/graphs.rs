//! Settings of a card's graphs: whether to record any, and which values change from one round to the next ([`crate::GraphRounds`]).

use std::sync::OnceLock;

use candle_core::Tensor;

/// The variable that chooses the launches to record.
const VARIABLE: &str = "LOW_MEM_T5_GRAPHS";

/// Which launches are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recorded {
    Nothing,
    /// Tokens of answers, and micro-batches of training where a plan says so.
    AsPlanned,
    /// Tokens of answers.
    Tokens,
    /// Tokens of answers, and micro-batches of training.
    All,
}

/// Whether repeated launches on a card are recorded at all: yes, unless `LOW_MEM_T5_GRAPHS` is `none`. Fixed for the process.
pub fn records_launches() -> bool {
    recorded() != Recorded::Nothing
}

/// Whether `LOW_MEM_T5_GRAPHS` has micro-batches of training recorded. `None` if a plan may choose. Fixed for the process.
pub fn records_micro_batches() -> Option<bool> {
    match recorded() {
        Recorded::AsPlanned => None,
        Recorded::All => Some(true),
        Recorded::Nothing | Recorded::Tokens => Some(false),
    }
}

fn recorded() -> Recorded {
    static WANTED: OnceLock<Recorded> = OnceLock::new();
    *WANTED.get_or_init(|| match std::env::var(VARIABLE).ok().as_deref() {
        None => Recorded::AsPlanned,
        Some("tokens") => Recorded::Tokens,
        Some("all") => Recorded::All,
        Some("none") => Recorded::Nothing,
        Some(other) => {
            tracing::warn!("{VARIABLE}: expected \"none\", \"tokens\" or \"all\", got {other:?}; it has no effect");
            Recorded::AsPlanned
        }
    })
}

/// The values that differ between rounds of one kind.
#[derive(Clone, Copy, Debug)]
pub struct GraphInputs<'a> {
    /// Tensors that kernels read: contiguous, each with memory of its own.
    pub tensors: &'a [&'a Tensor],
    /// Valid positions of each sequence. Operations must be given these same slices: a recording finds them by their address.
    pub lengths: [&'a [usize]; 2],
    /// The samples of dropout, found by address as well.
    pub samples: &'a [u32],
    /// The key of all masks of dropout at this step.
    pub key: u64,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl GraphInputs<'_> {
    /// The numbers to upload: the key of dropout in two halves of 32 bits, then the lists.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        let lengths = self.lengths.iter().flat_map(|list| list.iter().map(|&length| length as u32));
        [self.key as u32, (self.key >> 32) as u32]
            .into_iter()
            .chain(lengths)
            .chain(self.samples.iter().copied())
            .collect()
    }

    /// The position of the first list in [`GraphInputs::numbers`].
    pub(crate) fn first_list(&self) -> usize {
        2
    }

    /// The address of each list in the host's memory, and the number of its elements.
    pub(crate) fn lists(&self) -> impl Iterator<Item = (usize, usize)> {
        let lengths = self.lengths.map(|list| (list.as_ptr().addr(), list.len()));
        lengths.into_iter().chain([(self.samples.as_ptr().addr(), self.samples.len())])
    }
}

/// A request to a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Run.
    Work,
    /// Drop every tensor that the phase has made, and undo its changes, so that it can run again.
    Undo,
}
