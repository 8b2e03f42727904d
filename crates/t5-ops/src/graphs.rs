//! What graphs of a card are told: whether there are any, and what changes from one round of recorded work to the next.

use std::sync::OnceLock;

use candle_core::Tensor;

use crate::ops::dropout::key_of_step;

/// The variable that says what is recorded.
const VARIABLE: &str = "LOW_MEM_T5_GRAPHS";

/// Work that is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recorded {
    Nothing,
    /// Tokens of answers.
    Tokens,
    /// Micro-batches of training, too.
    All,
}

/// Whether work that repeats on a card is recorded at all: not where `LOW_MEM_T5_GRAPHS` is `none`. Fixed for the process.
pub fn records_launches() -> bool {
    recorded() != Recorded::Nothing
}

/// Whether micro-batches of training are recorded: where `LOW_MEM_T5_GRAPHS` is `all`. No card has shown the gain, and they hold more
/// memory. Fixed for the process.
pub fn records_micro_batches() -> bool {
    recorded() == Recorded::All
}

fn recorded() -> Recorded {
    static WANTED: OnceLock<Recorded> = OnceLock::new();
    *WANTED.get_or_init(|| match std::env::var(VARIABLE).ok().as_deref() {
        None | Some("tokens") => Recorded::Tokens,
        Some("all") => Recorded::All,
        Some("none") => Recorded::Nothing,
        Some(other) => {
            tracing::warn!("{VARIABLE}: expected \"none\", \"tokens\" or \"all\", got {other:?}; taken as \"tokens\"");
            Recorded::Tokens
        }
    })
}

/// What is different in each round of a kind.
#[derive(Clone, Copy, Debug)]
pub struct Changing<'a> {
    /// Tensors that kernels read: contiguous, each with memory of its own.
    pub tensors: &'a [&'a Tensor],
    /// Valid positions of sequences. Operations have to be given these very slices.
    pub lengths: [&'a [usize]; 2],
    /// The samples of dropout. As above.
    pub samples: &'a [u32],
    /// The seed of dropout.
    pub seed: u64,
    /// The optimizer step.
    pub step: u64,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Changing<'_> {
    /// The key of dropout, and then the lists.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        let key = key_of_step(self.seed, self.step);
        let lengths = self.lengths.iter().flat_map(|list| list.iter().map(|&length| length as u32));
        [key as u32, (key >> 32) as u32].into_iter().chain(lengths).chain(self.samples.iter().copied()).collect()
    }

    /// The number with which lists begin.
    pub(crate) fn first_list(&self) -> usize {
        2
    }

    /// Where each list is in the host's memory, and its elements.
    pub(crate) fn lists(&self) -> impl Iterator<Item = (usize, usize)> {
        let lengths = self.lengths.map(|list| (list.as_ptr().addr(), list.len()));
        lengths.into_iter().chain([(self.samples.as_ptr().addr(), self.samples.len())])
    }
}

/// What a phase is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// To be done.
    Work,
    /// To let go of everything that it has made, and to be ready to do it once more.
    Undo,
}
