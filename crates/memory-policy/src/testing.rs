//! Settings that tests choose from.

use serde::{Deserialize, Serialize};

use crate::{Name, Setting};

pub(crate) const PARAMETERS: Name = Name::new("parameters");
pub(crate) const PROCESS: Name = Name::new("process");
pub(crate) const ACTIVATIONS: Name = Name::new("activations");
pub(crate) const LOADER: Name = Name::new("loader");

/// A way to cut a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cut {
    pub samples: usize,
    pub repeated: usize,
}

impl Setting for Cut {
    fn in_words(&self) -> String {
        let repeated = if self.repeated > 0 { format!(", {} repeated", self.repeated) } else { String::new() };
        format!("{} at a time{repeated}", self.samples)
    }

    fn levers(&self) -> Vec<(&'static str, String)> {
        vec![("samples", self.samples.to_string()), ("repeated", self.repeated.to_string())]
    }

    fn differs_only_in(&self, lever: &str, other: &Self) -> bool {
        if lever == "samples" { self.repeated == other.repeated } else { self.samples == other.samples }
    }
}

/// A way to feed a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ahead {
    pub batches: usize,
}

impl Setting for Ahead {
    fn in_words(&self) -> String {
        format!("{} batches ahead", self.batches)
    }

    fn levers(&self) -> Vec<(&'static str, String)> {
        vec![("batches", self.batches.to_string())]
    }

    fn differs_only_in(&self, _: &str, _: &Self) -> bool {
        true
    }
}
