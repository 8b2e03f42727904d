//! `preference.reference` and `distill.teacher`: a model beside the trained one, which is only read from its files.

use std::path::PathBuf;

use super::{Values, paths};

/// The frozen model that a run asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// The key that names it.
    pub key: &'static str,
    /// What it is, in messages and in the bill.
    pub called: &'static str,
    /// The name of its directory, run or hub id.
    pub named: PathBuf,
}

impl Frozen {
    /// The model that these values name.
    pub fn from_values(values: &Values) -> Option<Self> {
        let has_reference = super::preference::from_values(values).is_some_and(|of| of.has_reference_model);
        let (key, called) = match has_reference {
            true => ("preference.reference", "reference"),
            false => ("distill.teacher", "teacher"),
        };
        Some(Self { key, called, named: paths::from_text(&values.text(key)?) })
    }
}
