//! Failures, in the one form that users and scripts see.
//!
//! A [`Failure`] is an exit code, a message and hints. The message says what, where, expected and got; the hints suggest what to do next.
//! Every library error becomes a failure in this module, so the same mistake has the same exit code in every subcommand:
//!
//! ```text
//! error: train.parquet: row group 3: column `response` is INT64, expected a string column
//! hint: set `data.response_column` to one of: prompt, answer, source
//! ```

use std::fmt;
use std::path::Path;
use std::process::ExitCode;

use crate::near_names::near_names;

/// The exit codes of the public interface. A script may branch on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A bug of this program, or a failure of the system without an exit code of its own (a full disk).
    Internal = 1,
    /// The command line or the config is wrong; nothing was started.
    Usage = 2,
    /// The smallest plan does not fit the memory budget.
    DoesNotFit = 3,
    /// Data, tokenizer, model or checkpoint cannot be used.
    Unusable = 4,
    /// Too many non-finite steps in a row.
    Diverged = 5,
    /// `doctor` found a problem that makes training slower, or the largest model smaller, than the machine allows.
    Warnings = 6,
    /// `doctor` found a problem that makes training impossible.
    Unfit = 7,
    /// A signal stopped the run after it saved, or before there was anything to save; `--keep-training` resumes it. A second signal ends
    /// the process with 128 and the signal's number instead.
    Interrupted = 75,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// An error that the user will see.
#[derive(Debug)]
pub struct Failure {
    /// The process's exit code.
    pub exit: Exit,
    /// What, where, expected, got: one sentence or a few lines, without `error: `.
    pub message: String,
    /// Advice, one line each, without `hint: `.
    pub hints: Vec<String>,
}

/// The result of functions that can fail for reasons outside the program.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// A failure with this exit code and message, and without hints.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), hints: Vec::new() }
    }

    /// Exit 1: a failure of the system without an exit code of its own.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Exit::Internal, message)
    }

    /// Exit 2: the command line or the config is wrong.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// Exit 4: data, tokenizer, model or checkpoint cannot be used.
    pub fn unusable(message: impl Into<String>) -> Self {
        Self::new(Exit::Unusable, message)
    }

    /// Adds a `hint:` line.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Combines this failure and another one of the same kind.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.message = format!("{}\n{}", self.message, other.message);
        self.hints.extend(other.hints);
        self
    }

    /// Whether this is an error. A stopped run is none, and neither is a finding of `doctor`.
    pub fn is_error(&self) -> bool {
        ![Exit::Interrupted, Exit::Warnings, Exit::Unfit].contains(&self.exit)
    }

    /// Adds a `hint:` line if there is one.
    pub fn with_hint(self, hint: Option<impl Into<String>>) -> Self {
        match hint {
            Some(hint) => self.hint(hint),
            None => self,
        }
    }

    /// Reading or writing `path` failed. A full disk and a missing permission have their own hints.
    pub fn io(doing: &str, path: &Path, error: &std::io::Error) -> Self {
        use std::io::ErrorKind;
        let failure = Self::internal(format!("{}: cannot {doing}: {error}", path.display()));
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => failure.hint(
                "free some disk space, then run the same command with `--keep-training`; older checkpoints are intact",
            ),
            ErrorKind::FileTooLarge => failure.hint(
                "raise the file size limit (`ulimit -f`), then run the same command again; older checkpoints are intact",
            ),
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                failure.hint("choose a writable directory with `--output DIR`")
            }
            _ => failure,
        }
    }
}

impl fmt::Display for Failure {
    /// Writes the `error:` line and the `hint:` lines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_error() { "error: " } else { "" };
        write!(f, "{kind}{}", self.message)?;
        for hint in &self.hints {
            write!(f, "\nhint: {hint}")?;
        }
        Ok(())
    }
}

#[cfg(feature = "datasets")]
impl From<parquet_dataset::Error> for Failure {
    fn from(error: parquet_dataset::Error) -> Self {
        let hint =
            error.hint().unwrap_or_else(|| "`train_low_mem inspect FILE` shows the contents of a file".to_string());
        Self::unusable(error.to_string()).hint(hint)
    }
}

#[cfg(feature = "datasets")]
impl From<dataloader::Error> for Failure {
    fn from(error: dataloader::Error) -> Self {
        // The loader's errors use the same words for rows in a batch as for files that are opened.
        let error = match error {
            dataloader::Error::Dataset(error) => return error.into(),
            dataloader::Error::Rows(error) => return error.into(),
            error => error,
        };
        let exit = match &error {
            dataloader::Error::Options(_) => Exit::Usage,
            dataloader::Error::Thread(_) => Exit::Internal,
            _ => Exit::Unusable,
        };
        Self::new(exit, error.to_string()).with_hint(error.hint())
    }
}

#[cfg(feature = "datasets")]
impl From<row_files::Error> for Failure {
    fn from(error: row_files::Error) -> Self {
        use row_files::Error as E;
        let meanings = error.meanings();
        let meanings = meanings.iter().map(|meaning| format!("{}: `{}`", meaning.words, meaning.assignments()));
        let error = match error {
            E::Parquet(error) => return error.into(),
            E::Question { path, meanings: several } => {
                let words = format!("{}: its columns can be read in {} ways", path.display(), several.len());
                return Self { hints: meanings.collect(), ..Self::usage(words) };
            }
            error => error,
        };
        let header = error
            .header_command()
            .map(|command| format!("its first line looks like a row; name the columns: `{command}`"));
        let hint = error.hint();
        let exit = match &error {
            E::Write(_) => Exit::Internal,
            E::Duplicates { .. } => Exit::DoesNotFit,
            // A budget left less for a page than the most that is ever decoded.
            E::PartTooLarge { limit, .. } if *limit < row_files::ReadOptions::default().max_page_bytes => {
                Exit::DoesNotFit
            }
            E::Stopped => Exit::Interrupted,
            E::Setting { .. } => Exit::Usage,
            _ => Exit::Unusable,
        };
        let with_header = error.header_meanings();
        let hint = hint.filter(|_| with_header.is_empty());
        let failure = Self::new(exit, error.to_string()).with_hint(header);
        let failure = with_header.into_iter().fold(failure, Self::hint).with_hint(hint);
        meanings.fold(failure, Self::hint)
    }
}

/// Exit 3: a device had no memory for a tensor, and no smaller plan could be followed.
fn out_of_device_memory(error: &str) -> Option<Failure> {
    let failure = || {
        Failure::new(Exit::DoesNotFit, "the device has no memory left")
            .hint("free memory of the device, or give the run less of it: `--device-memory-budget`, a smaller batch")
            .hint("checkpoints are intact: resume from the newest with `--keep-training`")
    };
    cuda_device::is_out_of_device_memory(error).then(failure)
}

impl From<t5::Error> for Failure {
    fn from(error: t5::Error) -> Self {
        if let Some(failure) = out_of_device_memory(&error.to_string()) {
            return failure;
        }
        let exit = match &error {
            t5::Error::Tensor(_) | t5::Error::Offload { .. } => Exit::Internal,
            t5::Error::NotFiniteToSave { .. } => Exit::Diverged,
            _ => Exit::Unusable,
        };
        Self::new(exit, error.to_string()).with_hint(error.hint())
    }
}

#[cfg(feature = "datasets")]
impl From<model_formats::Unsupported> for Failure {
    fn from(refusal: model_formats::Unsupported) -> Self {
        let exit = if refusal.what == "`--dtype`" { Exit::Usage } else { Exit::Unusable };
        let hint = refusal.hint.clone();
        Self::new(exit, refusal.to_string()).hint(hint)
    }
}

#[cfg(feature = "datasets")]
impl From<model_formats::Error> for Failure {
    fn from(error: model_formats::Error) -> Self {
        use model_formats::Error as E;
        let hint = error.hint();
        match error {
            E::Value { .. } => Self::unusable(error.to_string()).with_hint(hint),
            E::Io(error) => Self::internal(format!("cannot write the export: {error}"))
                .hint("free some disk space, or choose another place with `--output`"),
        }
    }
}

impl From<trainer::Error> for Failure {
    fn from(error: trainer::Error) -> Self {
        use trainer::Error as E;
        if let Some(failure) = out_of_device_memory(&error.to_string()) {
            return failure;
        }
        let exit = match &error {
            E::InvalidOption { .. }
            | E::UnknownFreezeItem { .. }
            | E::NothingToTrain
            | E::UnknownGroupItem { .. }
            | E::EmptyGroup { .. } => Exit::Usage,
            E::Diverged { .. } => Exit::Diverged,
            E::Checkpoint { .. }
            | E::NoValidCheckpoint { .. }
            | E::Torn { .. }
            | E::Unreadable { .. }
            | E::LaterFormat { .. }
            | E::NoLabels(_) => Exit::Unusable,
            _ => Exit::Internal,
        };
        let hint = error.hint();
        match error {
            E::Model(error) => error.into(),
            E::Files(error) => error.into(),
            error => Self::new(exit, error.to_string()).with_hint(meant(&error)).with_hint(hint),
        }
    }
}

/// The names that an item of a group may have meant.
fn meant(error: &trainer::Error) -> Option<String> {
    let trainer::Error::UnknownGroupItem { item, known, .. } = error else { return None };
    let near = near_names(item, known);
    (!near.is_empty()).then(|| format!("names with a similar part have {}", near.join(", ")))
}

impl From<durable_files::Error> for Failure {
    fn from(error: durable_files::Error) -> Self {
        use durable_files::Error as E;
        let exit = match &error {
            E::Locked { .. } | E::ForeignLock { .. } | E::NotOurs { .. } | E::Exchangeable { .. } => Exit::Usage,
            _ => Exit::Internal,
        };
        let hint = error.hint().map(str::to_owned);
        Self::new(exit, error.to_string()).with_hint(hint)
    }
}

impl From<collective::Error> for Failure {
    fn from(error: collective::Error) -> Self {
        Self::internal(error.to_string()).hint("checkpoints are intact: resume from the newest with `--keep-training`")
    }
}

impl From<planner::Error> for Failure {
    fn from(error: planner::Error) -> Self {
        match error {
            planner::Error::DoesNotFit(refusal) => (*refusal).into(),
            planner::Error::Trainer(error) => error.into(),
            planner::Error::Model(error) => error.into(),
            planner::Error::Probe(error) => error.into(),
            error @ planner::Error::OnADeviceAlone { .. } => {
                Self::usage(error.to_string()).hint("leave it out, or compute with `--device cuda`")
            }
        }
    }
}

impl From<planner::DoesNotFit> for Failure {
    fn from(refusal: planner::DoesNotFit) -> Self {
        Self::new(Exit::DoesNotFit, refusal.to_string()).hint(refusal.hint())
    }
}

impl From<memory_policy::ProbeError> for Failure {
    fn from(error: memory_policy::ProbeError) -> Self {
        Self::internal(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_comes_first_and_each_hint_has_its_line() {
        let failure =
            Failure::usage("`--epochs`: expected an integer, got `x`").hint("write `--epochs 3`").hint("see `--help`");
        assert_eq!(
            failure.to_string(),
            "error: `--epochs`: expected an integer, got `x`\nhint: write `--epochs 3`\nhint: see `--help`"
        );
    }

    #[test]
    fn a_device_without_memory_is_no_internal_error() {
        let error = candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into());
        let failure = Failure::from(t5::Error::Tensor(error));
        assert_eq!((failure.exit, failure.message.as_str()), (Exit::DoesNotFit, "the device has no memory left"));
        assert!(failure.hints[0].contains("--device-memory-budget"), "{failure}");
    }

    #[test]
    fn a_full_disk_says_that_older_checkpoints_are_intact() {
        let error = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let failure = Failure::io("write", Path::new("runs/a/model"), &error);
        assert!(failure.hints[0].contains("older checkpoints are intact"), "{failure}");
    }
}
