//! A way to feed a step: batches made ahead, threads that make them, and the data that the dataset keeps in memory.

use std::fmt;

use memory_policy::{Bytes, Setting, plural};
use serde::{Deserialize, Serialize};

/// The data kept between reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatasetResidency {
    /// Every row, decoded.
    InMemory,
    /// The blocks read last, up to a number of bytes.
    RowGroupCache {
        /// The most that the cache may hold.
        bytes: Bytes,
    },
    /// Nothing but the files' metadata.
    #[default]
    UltraLowMem,
}

impl DatasetResidency {
    /// The word that pins this residency.
    pub fn name(&self) -> &'static str {
        match self {
            Self::InMemory => "in_memory",
            Self::RowGroupCache { .. } => "row_group_cache",
            Self::UltraLowMem => "ultra_low_mem",
        }
    }
}

impl fmt::Display for DatasetResidency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RowGroupCache { bytes } => write!(f, "{} of {bytes}", self.name()),
            Self::InMemory | Self::UltraLowMem => f.write_str(self.name()),
        }
    }
}

/// How a step is fed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Feeding {
    /// The data kept between reads.
    pub residency: DatasetResidency,
    /// Threads that decode and tokenize.
    pub decode_threads: usize,
    /// Optimizer batches that may be ready and not yet taken.
    pub prefetch_batches: usize,
}

impl Setting for Feeding {
    fn in_words(&self) -> String {
        let threads = plural(self.decode_threads as u64, "thread");
        format!("{}, {} ahead, {threads}", self.residency, self.prefetch_batches)
    }

    fn levers(&self) -> Vec<(&'static str, String)> {
        // Both settings are offered together.
        vec![("loader", self.in_words())]
    }

    fn differs_only_in(&self, _lever: &str, _other: &Self) -> bool {
        true
    }
}
