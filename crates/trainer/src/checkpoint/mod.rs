//! A checkpoint: a directory from which a run resumes, with the same plan and kernels to the same bits. It is also a Hugging Face model.
//!
//! ```text
//! OUTPUT/checkpoints/step-00000100/
//!   config.json  generation_config.json  model.safetensors    loads with `from_pretrained`
//!   tokenizer.json  tokenizer_config.json    load with `AutoTokenizer.from_pretrained`
//!   spiece.model ...        other files of the tokenizer
//!   optimizer.safetensors   the optimizer's moments, named as torch and transformers name them
//!   trainer_state.json      step, counters, scores, the trainer's options, and the caller's own state
//!   manifest.json           lengths and SHA-256 of all of these; written last
//! ```
//!
//! If an adapter is trained, its files take the place of the model's, as PEFT loads them: `adapter_config.json`,
//! `adapter_model.safetensors`. The base is never copied.
//!
//! Invariants:
//! * A directory has its final name only when everything in it is on the disk; its manifest proves that. Older checkpoints
//!   are removed only after that.
//! * A run resumes only from a checkpoint that agrees with its manifest to the last byte. A torn or unreadable checkpoint
//!   is skipped, with a note, for the newest whole one. It stays where it is.
//! * A checkpoint that a newer version wrote is neither resumed nor skipped, replaced or removed.
//! * Saving holds one piece of one tensor at a time.
//! * One process writes (see [`durable_files::RunLock`]).
//!
//! ```no_run
//! # fn example(trainer: &trainer::Trainer) -> Result<(), trainer::Error> {
//! use trainer::checkpoint::Checkpoints;
//! let directory = std::path::Path::new("runs/tiny/checkpoints");
//! let position = serde_json::json!({ "epoch": 1, "sample": 512 });
//! Checkpoints::new(directory, 2, 1).save(trainer, &position, None, &|| false)?;
//! if let Some(found) = Checkpoints::newest_valid(directory)? {
//!     assert_eq!(found.state.caller, position);
//! }
//! # Ok(())
//! # }
//! ```

mod base;
mod export;
mod load;
mod manifest;
mod prune;
mod save;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use durable_files::{Directory, Identity, OwnFiles};

pub use base::keep_quantised;
pub use export::{export_average, export_checkpoint, export_merged, export_model, export_quantised, export_with_rows};
pub use manifest::{MANIFEST_FILE, Manifest, ManifestEntry};

use crate::error::{Error, Result};
use crate::state::TrainerState;

/// The directory of a run's checkpoints, inside its output directory.
pub const CHECKPOINTS_DIRECTORY: &str = "checkpoints";
/// The optimizer's moments.
pub const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// [`TrainerState`].
pub const STATE_FILE: &str = "trainer_state.json";
/// The tokenizer, copied unchanged.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// The settings of the tokenizer that transformers needs to read it.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
/// Further files of tokenizers, which are copied if the tokenizer came with them.
pub const COMPANION_FILES: [&str; 8] = [
    "spiece.model",
    "vocab.json",
    "tokenizer.model",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];
/// The files that [`t5::T5::save`] writes.
pub const MODEL_FILES: [&str; 3] = ["config.json", "generation_config.json", "model.safetensors"];

/// The files of [`t5::peft::ADAPTER_FILES`] that every adapter has.
pub(crate) const ADAPTER_FILES: [&str; 2] = [t5::peft::ADAPTER_FILES[0], t5::peft::ADAPTER_FILES[1]];

/// The tokenizer that is saved beside a model. The trainer copies it and does not read it.
#[derive(Clone, Copy, Debug)]
pub struct TokenizerFiles<'a> {
    /// The `tokenizer.json`.
    pub json: TokenizerJson<'a>,
    /// The text of its `tokenizer_config.json`.
    pub config: &'a str,
    /// Further files of the tokenizer, each with one of the names of [`COMPANION_FILES`], copied unchanged. A file that was removed
    /// meanwhile is left out.
    pub companions: &'a [PathBuf],
}

/// A `tokenizer.json`.
#[derive(Clone, Copy, Debug)]
pub enum TokenizerJson<'a> {
    /// A file, which is copied unchanged.
    File(&'a Path),
    /// The text of a tokenizer that is in no file.
    Text(&'a str),
    /// None: the tokenizer's class alone identifies it.
    None,
}

/// The checkpoints of one run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    directory: PathBuf,
    keep_last: usize,
    keep_best: usize,
    /// The measure of the scores that are compared.
    scored_by: String,
    /// Checkpoints that this process wrote, or read to the last byte.
    verified: BTreeMap<PathBuf, Identity>,
    /// Checkpoints for which it was reported why they stay.
    noted: BTreeSet<PathBuf>,
}

/// A checkpoint that was just written.
#[derive(Clone, Debug)]
pub struct Saved {
    /// Its directory.
    pub path: PathBuf,
    /// The total length of its files.
    pub bytes: u64,
    /// Older checkpoints that were removed, torn ones included.
    pub pruned: Vec<PathBuf>,
    /// Further notes: old checkpoints that were torn and removed, checkpoints that stay because they could not be read, and
    /// errors that do not affect the new one.
    pub notes: Vec<String>,
}

/// A checkpoint that agrees with its manifest in every byte.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its directory.
    pub path: PathBuf,
    /// Its state.
    pub state: TrainerState,
    /// The problems of newer checkpoints that were skipped, one sentence each. Those checkpoints are still there.
    pub notes: Vec<String>,
}

impl Checkpoints {
    /// The checkpoints in `directory` (made at the first save). The newest `keep_last` (at least one) and the
    /// `keep_best` with the best scores are kept.
    pub fn new(directory: &Path, keep_last: usize, keep_best: usize) -> Self {
        Checkpoints {
            directory: directory.to_owned(),
            keep_last: keep_last.max(1),
            keep_best,
            scored_by: crate::state::loss(),
            verified: BTreeMap::new(),
            noted: BTreeSet::new(),
        }
    }

    /// Notes that this checkpoint is whole to the last byte: [`Checkpoints::newest_valid`] returned it, or this process wrote
    /// it. Pruning then does not read it again.
    pub fn remember(&mut self, checkpoint: &Path) {
        if let Ok(identity) = Identity::at(checkpoint) {
            self.verified.insert(checkpoint.to_owned(), identity);
        }
    }

    fn remembers(&self, checkpoint: &Path) -> bool {
        let known = self.verified.get(checkpoint);
        known.is_some_and(|known| Identity::at(checkpoint).is_ok_and(|now| now == *known))
    }

    fn forget(&mut self, checkpoint: &Path) {
        self.verified.remove(checkpoint);
        self.noted.remove(checkpoint);
    }

    /// The directory of the checkpoints.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The directory of the checkpoint of `step`, there or not.
    pub fn path_of(&self, step: u64) -> PathBuf {
        self.directory.join(name_of(step))
    }
}

/// The checkpoints in a directory, whole or not, newest first. Other names than a run's are ignored.
fn list(directory: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let failed = |e| Error::io("list", directory, e);
    let opened = match Directory::open(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened.map_err(failed)?,
    };
    let mut found = Vec::new();
    for name in opened.names().map_err(failed)? {
        let Some(step) = step_of(&name) else { continue };
        // An entry of unknown kind may be a checkpoint.
        if !matches!(opened.entry(&name), Ok(Some(entry)) if entry.kind == durable_files::Kind::File) {
            found.push((step, directory.join(name)));
        }
    }
    found.sort_by_key(|&(step, _)| std::cmp::Reverse(step));
    Ok(found)
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of the checkpoint with this name.
pub fn step_of(name: &OsStr) -> Option<u64> {
    let name = name.to_str()?;
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (name_of(step) == name).then_some(step)
}

/// The files of checkpoints and models.
pub const OWN_FILES: OwnFiles = OwnFiles { is_own: is_own_name, listed: listed_names, list: MANIFEST_FILE };

/// Whether this is the name of a file that a run writes for a checkpoint or a model.
pub fn is_own_name(name: &OsStr) -> bool {
    let others = [OPTIMIZER_FILE, STATE_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, MANIFEST_FILE];
    let of_model = MODEL_FILES.iter().chain(&ADAPTER_FILES);
    of_model.chain(&others).chain(&COMPANION_FILES).any(|own| name == *own)
}

/// The names that the manifest in `directory` lists. Empty without a readable manifest.
fn listed_names(directory: &Directory) -> Vec<String> {
    Manifest::read_in(directory)
        .map(|manifest| manifest.files.into_iter().map(|file| file.name).collect())
        .unwrap_or_default()
}
