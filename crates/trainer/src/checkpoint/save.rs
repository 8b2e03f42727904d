//! Writing a checkpoint: temporary directory, files, manifest, rename, and only then pruning.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use t5::safetensors::{TensorHeader, Writer};

use super::{
    Checkpoints, MANIFEST_FILE, MODEL_FILES, Manifest, ManifestEntry, OPTIMIZER_FILE, STATE_FILE, Saved,
    TOKENIZER_FILE, prune,
};
use crate::error::{Error, Result};
use crate::files;
use crate::trainer::Trainer;

impl Checkpoints {
    /// Saves the trainer as it is. When this returns the checkpoint is on the disk and would survive a power cut.
    ///
    /// `caller` is given back by [`Checkpoints::newest_valid`]; `tokenizer` is copied. A checkpoint of the same step is
    /// replaced in one step. What an earlier process left unfinished is removed first.
    ///
    /// # Errors
    /// [`Error::DiskFull`] and other I/O errors. Older checkpoints are then untouched, and nothing is left of the new one.
    pub fn save(&self, trainer: &Trainer, caller: &serde_json::Value, tokenizer: Option<&Path>) -> Result<Saved> {
        fs::create_dir_all(&self.directory).map_err(|e| Error::io("create", &self.directory, e))?;
        files::remove_leftovers(&self.directory)?;
        let target = self.path_of(trainer.step_count());
        let temporary = files::temporary_directory(&target)?;
        let bytes = write(&temporary, &target, trainer, caller, tokenizer)?;
        let mut saved = Saved { path: target, bytes, pruned: Vec::new(), notes: Vec::new() };
        prune::prune(self, trainer.step_count(), &mut saved);
        Ok(saved)
    }
}

/// Writes a checkpoint into `temporary`, which becomes `target`.
pub(super) fn write(
    temporary: &Path,
    target: &Path,
    trainer: &Trainer,
    caller: &serde_json::Value,
    tokenizer: Option<&Path>,
) -> Result<u64> {
    commit_or_remove(temporary, target, || fill(temporary, trainer, caller, tokenizer))
}

/// Fills a temporary directory and gives it its name; on any error removes it, so that a full disk is not kept full.
pub(super) fn commit_or_remove<T>(temporary: &Path, target: &Path, fill: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = fill().and_then(|value| files::commit_directory(temporary, target).map(|()| value));
    if result.is_err() {
        let _ = files::remove_directory(temporary);
    }
    result
}

/// Writes all files of a checkpoint, the manifest last. Returns their length together.
fn fill(directory: &Path, trainer: &Trainer, caller: &serde_json::Value, tokenizer: Option<&Path>) -> Result<u64> {
    let mut entries = write_model(directory, trainer.model(), tokenizer)?;
    entries.push(write_optimizer(directory, trainer)?);
    entries.push(write_json(directory, STATE_FILE, &trainer.state(caller.clone()))?);
    let manifest = Manifest::new(entries);
    let last = write_json(directory, MANIFEST_FILE, &manifest)?;
    Ok(manifest.total_bytes() + last.bytes)
}

/// The files that make the directory a Hugging Face model.
pub(super) fn write_model(directory: &Path, model: &t5::T5, tokenizer: Option<&Path>) -> Result<Vec<ManifestEntry>> {
    model.save(directory)?;
    let mut entries = MODEL_FILES.iter().map(|name| sum(directory, name)).collect::<Result<Vec<_>>>()?;
    if let Some(tokenizer) = tokenizer {
        entries.push(copy(tokenizer, directory, TOKENIZER_FILE)?);
    }
    Ok(entries)
}

/// Adafactor's moments, tensor by tensor.
fn write_optimizer(directory: &Path, trainer: &Trainer) -> Result<ManifestEntry> {
    let parameters = trainer.model().parameters();
    let state = || trainer.adafactor.named_state(parameters);
    let headers = state()
        .map(|(name, tensor)| TensorHeader { name, dtype: tensor.dtype(), shape: tensor.dims().to_vec() })
        .collect();
    let mut writer = Writer::create(&directory.join(OPTIMIZER_FILE), headers, &[])?;
    for (name, tensor) in state() {
        writer.write(&name, tensor)?;
    }
    writer.finish()?;
    sum(directory, OPTIMIZER_FILE)
}

fn write_json(directory: &Path, name: &str, value: &impl serde::Serialize) -> Result<ManifestEntry> {
    write_file(directory, name, |file| {
        serde_json::to_writer_pretty(&mut *file, value)?;
        file.write_all(b"\n")
    })
}

/// Copies a file, summing it on the way.
pub(super) fn copy(from: &Path, directory: &Path, name: &str) -> Result<ManifestEntry> {
    let mut source = File::open(from).map_err(|e| Error::io("open", from, e))?;
    write_file(directory, name, |file| io::copy(&mut source, file).map(drop))
}

/// Writes one file through a checksum and syncs it.
fn write_file(
    directory: &Path,
    name: &str,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<ManifestEntry> {
    let path = directory.join(name);
    let written = (|| {
        let mut file = files::HashingWriter::new(BufWriter::with_capacity(1 << 18, File::create(&path)?));
        write(&mut file)?;
        let (buffer, bytes, sha256) = file.finish();
        buffer.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        Ok((bytes, sha256))
    })();
    let (bytes, sha256) = written.map_err(|e| Error::io("write", &path, e))?;
    Ok(ManifestEntry { name: name.to_owned(), bytes, sha256 })
}

/// The manifest entry of a file that is already written.
fn sum(directory: &Path, name: &str) -> Result<ManifestEntry> {
    let path = directory.join(name);
    let (bytes, sha256) = files::checksum(&path).map_err(|e| Error::io("read back", &path, e))?;
    Ok(ManifestEntry { name: name.to_owned(), bytes, sha256 })
}
