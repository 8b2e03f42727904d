//! [`Side`]: the side of a source that is cut.

/// The side of a source that loses tokens if it has too many, as transformers' `truncation_side` names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The end.
    #[default]
    Right,
    /// The beginning, after the prefix.
    Left,
}

impl Side {
    /// The side with this name.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "right" => Some(Self::Right),
            "left" => Some(Self::Left),
            _ => None,
        }
    }

    /// The side's name.
    pub fn name(self) -> &'static str {
        if self == Self::Left { "left" } else { "right" }
    }
}
