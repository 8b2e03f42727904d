//! The errors of this crate. Each says what went wrong, where, expected and got, and gives a hint.

use std::path::{Path, PathBuf};

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every failure of this crate. `Display` is one line; [`Error::hint`] gives advice.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused to open, read, write or sync a file.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file that stands in for memory cannot be made, read or written.
    #[error("{}: {source}", .path.display())]
    Offload {
        /// The file's directory. The file itself has no name.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file whose weights are used where they lie was changed or replaced meanwhile.
    #[error("{}: the file was changed or replaced while its weights were in use", .path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Weights that another process holds cannot be fetched.
    #[error("weights of another process: {0}")]
    Elsewhere(String),
    /// A model directory lacks something that it needs.
    #[error("{}: {problem}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The missing thing.
        problem: String,
        /// Advice.
        hint: String,
    },
    /// A JSON file does not hold JSON, or not an object.
    #[error("{}: {problem}", .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's words.
        problem: String,
    },
    /// A configuration value is invalid for every T5.
    #[error("{origin}: `{key}` is {got}, expected {expected}")]
    Config {
        /// The file, or the name of the preset.
        origin: String,
        /// The key at fault.
        key: String,
        /// The value found.
        got: String,
        /// The accepted values.
        expected: String,
    },
    /// The model is no T5, or one with other layers.
    #[error(
        "{origin}: the model is `{got}`, expected one of the T5 family (`model_type` t5, mt5, umt5, t5gemma or t5gemma2)"
    )]
    Family {
        /// The file.
        origin: String,
        /// The `model_type` or architecture found.
        got: String,
    },
    /// The header of a safetensors file is damaged, truncated or hostile.
    #[error("{}: not a usable safetensors file: {problem}", .path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The problem with it.
        problem: String,
    },
    /// A `pytorch_model.bin` is damaged, has an old format, or holds anything but tensors.
    #[error("{}: not a usable PyTorch file: {problem}", .path.display())]
    Pytorch {
        /// The file.
        path: PathBuf,
        /// The problem with it.
        problem: String,
    },
    /// The model needs a tensor that no file has.
    #[error("{}: tensor `{tensor}` is missing, expected shape {expected:?}", .path.display())]
    MissingTensor {
        /// The model directory.
        path: PathBuf,
        /// The Hugging Face name.
        tensor: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
    },
    /// The configuration has no place for a tensor.
    #[error("{}: tensor `{tensor}` has no place in this model", .path.display())]
    UnexpectedTensor {
        /// The file that has it.
        path: PathBuf,
        /// Its name.
        tensor: String,
    },
    /// A tensor has another shape, dtype or content than the model needs.
    #[error("{}: tensor `{tensor}`: expected {expected}, got {got}", .path.display())]
    TensorMismatch {
        /// The file that has it.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// The value that the configuration implies.
        expected: String,
        /// The value in the file.
        got: String,
    },
    /// A stored tensor has infinities, or values that are no numbers. A model with them answers nothing.
    #[error("{}: tensor `{tensor}` has values that are not finite", .path.display())]
    NotFinite {
        /// The file that has it.
        path: PathBuf,
        /// Its name.
        tensor: String,
    },
    /// A tensor that is to be saved has infinities, or values that are no numbers.
    #[error("{}: not saved, because tensor `{tensor}` has values that are not finite", .path.display())]
    NotFiniteToSave {
        /// The file that was to have it.
        path: PathBuf,
        /// Its name.
        tensor: String,
    },
    /// An `adapter_config.json` has a setting that this crate does not support.
    #[error("{}: `{key}` is {got}, expected {expected}", .path.display())]
    AdapterConfig {
        /// The file.
        path: PathBuf,
        /// The key at fault.
        key: String,
        /// The value found.
        got: String,
        /// The accepted values.
        expected: String,
        /// Advice.
        hint: &'static str,
    },
    /// An adapter has a tensor that its configuration and the model do not imply, or lacks one that they do.
    #[error("{}: tensor `{tensor}`: expected {expected}, got {got}", .path.display())]
    AdapterTensor {
        /// The file of the adapter's tensors.
        path: PathBuf,
        /// PEFT's name.
        tensor: String,
        /// The shape or values that were expected.
        expected: String,
        /// The shape or values in the file.
        got: String,
    },
    /// A micro-batch or a list of sources is invalid for every model.
    #[error("{what}: expected {expected}, got {got}")]
    Batch {
        /// Which sample or list.
        what: String,
        /// The expected value.
        expected: String,
        /// The found value.
        got: String,
        /// Advice for the user.
        hint: &'static str,
    },
    /// A tensor operation failed: our bug, or the device ran out of memory.
    #[error("tensor operation: {0}")]
    Tensor(#[source] candle_core::Error),
}

impl Error {
    /// Advice for the user, where known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Io { .. } | Error::Tensor(_) | Error::NotFiniteToSave { .. } => None,
            Error::NotFinite { .. } => {
                Some("fetch the file again; if training wrote it, take an earlier checkpoint of the run".into())
            }
            Error::Offload { .. } | Error::Elsewhere(_) => {
                Some("checkpoints are intact: go on from the newest with `--keep-training`".into())
            }
            Error::Changed { .. } => Some(
                "with the file as it was, run the command again; a run goes on from its newest checkpoint with `--keep-training`".into(),
            ),
            Error::Directory { hint, .. } => Some(hint.clone()),
            Error::AdapterConfig { hint, .. } => Some((*hint).into()),
            Error::AdapterTensor { .. } => Some(
                "adapter_config.json and the tensors beside it must belong together, and to this model".into(),
            ),
            Error::Json { problem, .. } => Some(
                match problem {
                    // What is read is there, and is something else.
                    problem if problem.contains(": expected ") => "fetch or save the file again: it is not what its name says",
                    problem if problem.starts_with("expected value at") => {
                        "JSON has no NaN, no Infinity and no byte order mark: write the value as a number or null, and the file as plain UTF-8"
                    }
                    _ => "the file must hold one JSON object; was it cut short?",
                }
                .into(),
            ),
            // Settings of an adapter are not in that file.
            Error::Config { key, .. } if key.starts_with("lora.") => Some(format!("set `{key}`")),
            Error::Config { key, origin, .. } if origin == "generation_config.json" => {
                Some(format!("set `{key}` in the model's {origin}, or remove it there"))
            }
            Error::Config { key, got, .. } if *key == "architectures" && got.contains("Encoder") => {
                Some("an encoder has vectors: `train_low_mem embed --model DIR --input FILE --output vectors.npy`".to_owned())
            }
            Error::Config { key, .. } => Some(format!("set `{key}` in the model's config.json")),
            Error::Family { got, .. } if got.starts_with("t5gemma2_") || got == "t5_gemma_module" => Some(
                "this is a part of a T5Gemma: save the whole model from transformers; `train_low_mem embed` reads its encoder alone".into(),
            ),
            Error::Family { .. } => Some(
                "T5, T5 v1.1, flan-T5, mT5, mT0, UMT5, ByT5, CodeT5, MADLAD-400, UL2, T5Gemma and T5Gemma 2 are read; docs/models.md lists \
                 them"
                    .into(),
            ),
            Error::Safetensors { .. } => {
                Some("fetch or save the file again: its bytes are not what its header says".into())
            }
            Error::Pytorch { path, .. } => {
                Some(format!("if Python reads the file, have it write safetensors: {}", conversion(path)))
            }
            Error::MissingTensor { .. } | Error::UnexpectedTensor { .. } | Error::TensorMismatch { .. } => {
                Some("config.json and the weights beside it must describe the same model".into())
            }
            Error::Batch { hint, .. } => Some((*hint).into()),
        }
    }

    pub(crate) fn offload(path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
        let path = path.to_owned();
        move |source| Error::Offload { path, source }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
        let path = path.to_owned();
        move |source| Error::Io { path, source }
    }
}

/// The command that converts the weights beside a file to `model.safetensors`, as transformers does.
fn conversion(file: &Path) -> String {
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = directory.display().to_string();
    let is_plain = directory.chars().all(|letter| letter.is_alphanumeric() || "/._-".contains(letter));
    let directory = if is_plain { directory } else { format!("'{}'", directory.replace('\'', "'\\''")) };
    let import = "import sys; from transformers import AutoModelForSeq2SeqLM as M; d = sys.argv[1]";
    format!("python3 -c \"{import}; M.from_pretrained(d).save_pretrained(d)\" {directory}")
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Error::Tensor(without_backtrace(error))
    }
}

/// The error without the backtrace that it has if `RUST_BACKTRACE` is set. Its text would take megabytes, and name the program's inside.
pub fn without_backtrace(error: candle_core::Error) -> candle_core::Error {
    use candle_core::Error::{WithBacktrace, WithPath};
    match error {
        WithBacktrace { inner, .. } => without_backtrace(*inner),
        WithPath { inner, path } => WithPath { inner: Box::new(without_backtrace(*inner)), path },
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_tensor_has_no_backtrace_whatever_the_environment_says() {
        let inner = Box::new(candle_core::Error::Msg("no such shape".into()));
        let backtrace = Box::new(std::backtrace::Backtrace::force_capture());
        let traced = candle_core::Error::WithBacktrace { inner, backtrace }.with_path("adapter.safetensors");
        let text = Error::from(traced).to_string();
        assert!(text.ends_with("no such shape") && text.contains("adapter.safetensors"), "{text}");
    }
}
