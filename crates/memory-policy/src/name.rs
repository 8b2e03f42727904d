//! The name of a row or a phase of the bill. Each part declares its names as constants, so that code finds rows by constants and not by
//! text.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

/// The name of a holder of bytes, or of a phase of a run.
///
/// ```
/// use memory_policy::Name;
/// const PARAMETERS: Name = Name::new("parameters");
/// assert_eq!(PARAMETERS.to_string(), "parameters");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
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

/// Names that older versions wrote into plans, with those of today.
const RENAMED: [(&str, Name); 1] = [("packed operands", Name::new("matmul buffers"))];

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let renamed = RENAMED.into_iter().find(|(old, _)| *old == name);
        Ok(renamed.map_or(Self(Cow::Owned(name)), |(_, new)| new))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_of_an_older_version_has_the_names_of_today() {
        let read = |name: &str| serde_json::from_str::<Name>(name).expect("a name");
        assert_eq!(read("\"packed operands\""), Name::new("matmul buffers"));
        assert_eq!(read("\"parameters\""), Name::new("parameters"));
    }
}
