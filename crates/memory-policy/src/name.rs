//! The name of a row or a phase of the bill. Each part declares its names as constants, so that code finds rows by constants and not by
//! text.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The name of a holder of bytes, or of a phase of a run.
///
/// ```
/// use memory_policy::Name;
/// const PARAMETERS: Name = Name::new("parameters");
/// assert_eq!(PARAMETERS.to_string(), "parameters");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Name(Cow<'static, str>);

impl Name {
    /// A name as the bill shows it.
    pub const fn new(shown: &'static str) -> Self {
        Self(Cow::Borrowed(shown))
    }

    /// The name as the bill shows it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}
