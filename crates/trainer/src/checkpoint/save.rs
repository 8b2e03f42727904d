//! Writing a checkpoint: temporary directory, files, manifest, rename, and only then pruning.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use t5::safetensors::{PIECE_BYTES, TensorHeader, Writer};

use super::{
    Checkpoints, MANIFEST_FILE, Manifest, ManifestEntry, OPTIMIZER_FILE, STATE_FILE, Saved, TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE, TokenizerFiles, prune,
};
use crate::error::{Error, Result};
use crate::files;
use crate::trainer::Trainer;

impl Checkpoints {
    /// Saves the trainer as it is. When this returns the checkpoint is on the disk and would survive a power cut.
    ///
    /// `caller` is given back by [`Checkpoints::newest_valid`]; `tokenizer` goes beside the model. A checkpoint of the same step is
    /// replaced in one step. What an earlier process left unfinished is removed first.
    ///
    /// # Errors
    /// [`Error::DiskFull`] and other I/O errors. Older checkpoints are then untouched, and nothing is left of the new one.
    pub fn save(
        &self,
        trainer: &Trainer,
        caller: &serde_json::Value,
        tokenizer: Option<TokenizerFiles>,
    ) -> Result<Saved> {
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
    tokenizer: Option<TokenizerFiles>,
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
fn fill(
    directory: &Path,
    trainer: &Trainer,
    caller: &serde_json::Value,
    tokenizer: Option<TokenizerFiles>,
) -> Result<u64> {
    let mut entries = write_model(directory, trainer.model(), tokenizer)?;
    entries.push(write_optimizer(directory, trainer)?);
    entries.push(write_json(directory, STATE_FILE, &trainer.state(caller.clone()))?);
    let manifest = Manifest::new(entries);
    let last = write_json(directory, MANIFEST_FILE, &manifest)?;
    Ok(manifest.total_bytes() + last.bytes)
}

/// The files that make the directory a Hugging Face model.
pub(super) fn write_model(
    directory: &Path,
    model: &t5::T5,
    tokenizer: Option<TokenizerFiles>,
) -> Result<Vec<ManifestEntry>> {
    let mut entries = Vec::new();
    model.save_with(directory, |name, write| -> Result<()> {
        entries.push(write_file(directory, name, |file| Ok(write(file)?))?);
        Ok(())
    })?;
    if let Some(tokenizer) = tokenizer {
        entries.push(copy(tokenizer.json, directory, TOKENIZER_FILE)?);
        entries.push(write_text(directory, TOKENIZER_CONFIG_FILE, tokenizer.config)?);
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
    write_file(directory, OPTIMIZER_FILE, |file| {
        let mut writer = Writer::new(&directory.join(OPTIMIZER_FILE), file, headers, &[])?;
        for (name, tensor) in state() {
            writer.write(&name, tensor)?;
        }
        writer.into_sink();
        Ok(())
    })
}

fn write_json(directory: &Path, name: &str, value: &impl serde::Serialize) -> Result<ManifestEntry> {
    let path = directory.join(name);
    write_file(directory, name, |file| {
        serde_json::to_writer_pretty(&mut *file, value)
            .map_err(io::Error::from)
            .and_then(|()| file.write_all(b"\n"))
            .map_err(|e| Error::io("write", &path, e))
    })
}

fn write_text(directory: &Path, name: &str, text: &str) -> Result<ManifestEntry> {
    let path = directory.join(name);
    write_file(directory, name, |file| file.write_all(text.as_bytes()).map_err(|e| Error::io("write", &path, e)))
}

/// Copies a file, summing it on the way.
pub(super) fn copy(from: &Path, directory: &Path, name: &str) -> Result<ManifestEntry> {
    let mut source = File::open(from).map_err(|e| Error::io("open", from, e))?;
    let path = directory.join(name);
    write_file(directory, name, |file| io::copy(&mut source, file).map(drop).map_err(|e| Error::io("write", &path, e)))
}

/// Writes one file through a checksum and syncs it, so that it need not be read again to be summed.
fn write_file(directory: &Path, name: &str, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<ManifestEntry> {
    let path = directory.join(name);
    let io_error = |e| Error::io("write", &path, e);
    let file = File::create(&path).map_err(io_error)?;
    let mut sink = files::HashingWriter::new(BufWriter::with_capacity(PIECE_BYTES, file));
    write(&mut sink)?;
    let (buffer, bytes, sha256) = sink.finish();
    let file = buffer.into_inner().map_err(|e| io_error(e.into_error()))?;
    file.sync_all().map_err(io_error)?;
    Ok(ManifestEntry { name: name.to_owned(), bytes, sha256 })
}
