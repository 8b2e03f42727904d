//! The ways in which an export fails.

/// A model, tokenizer or option that a format cannot represent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{format} cannot hold this model: {what} is {got}, expected {expected}")]
pub struct Unsupported {
    /// The format.
    pub format: &'static str,
    /// The part of the model.
    pub what: String,
    /// The values that the format can hold.
    pub expected: String,
    /// The model's value.
    pub got: String,
    /// Advice.
    pub hint: String,
}

/// Writing failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value that the file's dtype cannot hold.
    #[error("`{tensor}` has a value that {dtype} cannot hold: {value}")]
    Value {
        /// The tensor in the file.
        tensor: String,
        /// The dtype.
        dtype: &'static str,
        /// The value.
        value: f32,
    },
    /// The file could not be written.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl Error {
    /// Advice for the user, where known.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Error::Value { value, .. } if !value.is_finite() => {
                Some("the model has diverged: export an earlier checkpoint")
            }
            Error::Value { .. } => Some("use `--dtype bf16` or `--dtype f32`"),
            Error::Io(_) => None,
        }
    }
}
