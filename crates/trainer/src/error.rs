//! Errors of training, one variant for each cause on which a caller can act.

use std::io;
use std::path::{Path, PathBuf};

use crate::stats::StepStats;

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the trainer. `Display` says what, where, expected and got; [`Error::hint`] gives advice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option has an invalid value, or contradicts another.
    #[error("`{name}`: expected {expected}, got {got}")]
    InvalidOption {
        /// The option, by its name in the configuration.
        name: &'static str,
        /// The accepted values.
        expected: String,
        /// The given value.
        got: String,
    },
    /// An item of `train.freeze` is neither a part nor a prefix or glob of any parameter's name.
    #[error("`train.freeze`: `{item}` names no parameter; expected one of {} or a prefix or glob of a parameter's name", known.join(", "))]
    UnknownFreezeItem {
        /// The item.
        item: String,
        /// The parts that this model has.
        known: Vec<String>,
    },
    /// An item of a group of parameters is neither a part nor a prefix or glob of any parameter's name.
    #[error("`optimizer.groups`: group {group}: `{item}` names no parameter")]
    UnknownGroupItem {
        /// The number of the group, from 1.
        group: usize,
        /// The item.
        item: String,
        /// The components of the model's names, in their order.
        known: Vec<String>,
    },
    /// No trained parameter belongs to a group.
    #[error("`optimizer.groups`: group {group} ({parameters}): no parameter that trains belongs to it")]
    EmptyGroup {
        /// The number of the group, from 1.
        group: usize,
        /// Its items.
        parameters: String,
    },
    /// Another process has ended.
    #[error(transparent)]
    Processes(#[from] collective::Error),
    /// The device had no memory for a step. Parameters and state are as they were before it.
    #[error("the device has no memory left for a step: {0}")]
    DeviceMemory(#[source] Box<Error>),
    /// The device of another process had no memory for a step. Parameters and state are as they were before it.
    #[error("the device of another process has no memory left for a step")]
    DeviceMemoryElsewhere,
    /// Everything is frozen.
    #[error("`train.freeze`: every parameter is frozen; there is nothing to train")]
    NothingToTrain,
    /// A batch with different numbers of sources and targets.
    #[error("batch: expected as many targets as sources, got {targets} targets for {sources} sources")]
    BatchShape {
        /// Number of sources.
        sources: usize,
        /// Number of targets (or of references).
        targets: usize,
    },
    /// Macro-F1 is asked for, but the texts are not labels.
    #[error("macro-F1: {0}")]
    NoLabels(#[from] text_metrics::labels::NoLabels),
    /// Loss or gradient was not finite too often in a row. Parameters are those of the last
    /// finite step.
    #[error(
        "step {}: loss {} and gradient norm {} are not finite, for {in_a_row} steps in a row; training diverged",
        stats.step, stats.loss, stats.grad_norm
    )]
    Diverged {
        /// How many steps in a row.
        in_a_row: u32,
        /// The stats of the last step.
        stats: Box<StepStats>,
    },
    /// A file or directory could not be written, read or locked.
    #[error(transparent)]
    Files(#[from] durable_files::Error),
    /// A checkpoint was read and does not agree with its manifest, or has none. Only such a checkpoint may be removed
    /// early.
    #[error("{}: {reason}", path.display())]
    Torn {
        /// The checkpoint's directory or file.
        path: PathBuf,
        /// The problem, with the expected and the found value.
        reason: String,
    },
    /// The system could not read a checkpoint. It may be whole.
    #[error("{}: could not be read: {source}", path.display())]
    Unreadable {
        /// The checkpoint's directory or file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A newer version of this program wrote the checkpoint.
    #[error("{}: a newer version of train_low_mem wrote it: format {format}, this version reads {known}", path.display())]
    LaterFormat {
        /// The file with the later format.
        path: PathBuf,
        /// Its format.
        format: u64,
        /// The latest format that this version reads.
        known: u32,
    },
    /// A checkpoint is not of this model, or does not fit its name.
    #[error("{}: {reason}", path.display())]
    Checkpoint {
        /// The checkpoint's directory or file.
        path: PathBuf,
        /// The problem, with the expected and the found value.
        reason: String,
    },
    /// There are checkpoints, but none is whole and readable.
    #[error("{}: none of its {} checkpoints can be used: {}", directory.display(), notes.len(), notes.join("; "))]
    NoValidCheckpoint {
        /// The `checkpoints` directory.
        directory: PathBuf,
        /// The problem of each.
        notes: Vec<String>,
    },
    /// The model returned an error.
    #[error(transparent)]
    Model(t5::Error),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(candle_core::Error),
}

impl Error {
    /// Advice for the user.
    pub fn hint(&self) -> Option<String> {
        if let Error::Model(error) = self {
            return error.hint();
        }
        self.own_hint().map(str::to_owned)
    }

    fn own_hint(&self) -> Option<&'static str> {
        Some(match self {
            Error::Files(error) => return error.hint(),
            Error::UnknownFreezeItem { .. } => {
                "use a part (`encoder`, `shared`), a block (`decoder.block.0`) or a glob (`*.layer_norm.weight`)"
            }
            Error::UnknownGroupItem { .. } => {
                "use a part, a glob (`*.q.weight`), or one of the words `norms` and `biases`"
            }
            Error::EmptyGroup { .. } => {
                "the first group that names a parameter has it; frozen parameters belong to none"
            }
            Error::NothingToTrain => "remove at least one part from `train.freeze`",
            Error::Diverged { .. } => "lower `optimizer.learning_rate` or raise `schedule.warmup_steps`",
            Error::NoLabels(_) => "leave out `macro_f1`: it is for references that are a few labels",
            Error::LaterFormat { .. } => "resume with that version, or start again in another `--output`",
            Error::Unreadable { .. } => {
                "nothing was changed; make the file readable or check the disk, then run the same command again"
            }
            Error::NoValidCheckpoint { .. } => {
                "start again in another `--output`, or restore a checkpoint from a backup"
            }
            _ => return None,
        })
    }

    /// Converts an error before anything has changed. If a device had no memory, the caller can make room and try again.
    pub(crate) fn before_any_change(self) -> Self {
        match self {
            Error::DeviceMemory(_) => self,
            error if error.is_of_device_memory() => Error::DeviceMemory(Box::new(error)),
            error => error,
        }
    }

    /// Whether a device had no memory left.
    pub(crate) fn is_of_device_memory(&self) -> bool {
        cuda_device::is_out_of_device_memory(&self.to_string())
    }

    pub(crate) fn invalid_option(name: &'static str, expected: &str, got: impl ToString) -> Self {
        Error::InvalidOption { name, expected: expected.to_owned(), got: got.to_string() }
    }

    /// An I/O error on `path`.
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Error::Files(durable_files::Error::io(action, path, source))
    }

    pub(crate) fn torn(path: &Path, reason: impl Into<String>) -> Self {
        Error::Torn { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn unreadable(path: &Path, source: io::Error) -> Self {
        Error::Unreadable { path: path.to_owned(), source }
    }

    pub(crate) fn checkpoint(path: &Path, reason: impl Into<String>) -> Self {
        Error::Checkpoint { path: path.to_owned(), reason: reason.into() }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Error::Tensor(t5::without_backtrace(error))
    }
}

impl From<t5::Error> for Error {
    /// A full disk becomes [`durable_files::Error::DiskFull`] here, too.
    fn from(error: t5::Error) -> Self {
        match error {
            t5::Error::Io { path, source } => Error::io("read or write", &path, source),
            t5::Error::Offload { path, source } if durable_files::is_full(&source) => {
                durable_files::Error::DiskFull { path, source }.into()
            }
            error => Error::Model(error),
        }
    }
}
