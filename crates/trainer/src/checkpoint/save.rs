//! Writing a checkpoint: temporary directory, files, manifest, rename, and only then pruning.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use durable_files::{NewDirectory, Others, remove_leftovers};
use t5::safetensors::{TensorHeader, Writer};

use super::{
    ADAPTER_FILES, COMPANION_FILES, Checkpoints, MANIFEST_FILE, Manifest, ManifestEntry, OPTIMIZER_FILE, OWN_FILES,
    STATE_FILE, Saved, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TokenizerFiles, TokenizerJson,
    prune::{self, Before},
};
use crate::error::{Error, Result};
use crate::optimizer::Optimizer;
use crate::parallel::Parallel;
use crate::trainer::Trainer;
use crate::{files, state_file};

impl Checkpoints {
    /// Saves the trainer's current state. When this returns, the checkpoint is on the disk and would survive a power cut.
    ///
    /// [`Checkpoints::newest_valid`] returns `caller` again; `tokenizer` is copied beside the model. A checkpoint of the same step is
    /// replaced in one step; one that could not be read is moved aside instead. Unfinished files of an earlier process are
    /// removed first. Once `interrupted` returns true, no more old checkpoints are read to the end, so more of them stay.
    ///
    /// # Errors
    /// [`durable_files::Error::DiskFull`] and other I/O errors. Older checkpoints are then unchanged, and nothing is left of the new one.
    pub fn save(
        &mut self,
        trainer: &Trainer,
        caller: &serde_json::Value,
        tokenizer: Option<TokenizerFiles>,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Saved> {
        durable_files::create_directories(&self.directory)?;
        remove_leftovers(&self.directory, &OWN_FILES, Others::None)?;
        trainer.scored_by().clone_into(&mut self.scored_by);
        let target = self.path_of(trainer.step_count());
        let place = SaveTarget::new(NewDirectory::create(&target)?);
        let (bytes, notes) = write(&place, &target, trainer, caller, tokenizer)?;
        let mut saved = Saved { path: target, bytes, pruned: Vec::new(), notes };
        self.remember(&saved.path);
        prune::prune(self, trainer.step_count(), &mut saved, interrupted);
        Ok(saved)
    }
}

/// A directory to write into, and the function that creates its files.
pub(super) struct SaveTarget<'a> {
    pub(super) directory: NewDirectory,
    /// Creates an empty file in it. A test simulates a full disk.
    pub(super) create: &'a dyn Fn(&NewDirectory, &OsStr) -> io::Result<File>,
}

impl SaveTarget<'_> {
    pub(super) fn new(directory: NewDirectory) -> Self {
        SaveTarget { directory, create: &NewDirectory::create_file }
    }

    /// The path of the unfinished directory, for messages.
    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Writes a checkpoint into a temporary directory, which becomes `target`. Returns its length, and what happened to the entry that
/// had its name.
pub(super) fn write(
    temporary: &SaveTarget,
    target: &Path,
    trainer: &Trainer,
    caller: &serde_json::Value,
    tokenizer: Option<TokenizerFiles>,
) -> Result<(u64, Vec<String>)> {
    let mut before = Before::default();
    let written = commit_or_remove(temporary, || {
        let bytes = fill(temporary, trainer, caller, tokenizer)?;
        before = prune::make_way(target, trainer.step_count())?;
        Ok(bytes)
    });
    match (&written, before.aside) {
        (Ok(_), _) | (Err(_), None) => {}
        // There is no new checkpoint in its place.
        (Err(_), Some(aside)) => drop(prune::rename_to_free(&aside, target)),
    }
    Ok((written?, before.note.into_iter().collect()))
}

/// Fills a temporary directory and gives it its name. On any error it removes the directory, so that a full disk does not stay full.
pub(super) fn commit_or_remove<T>(place: &SaveTarget, fill: impl FnOnce() -> Result<T>) -> Result<T> {
    let filled = fill();
    if filled.is_err() {
        let _ = place.directory.remove(&OWN_FILES);
    }
    let value = filled?;
    place.directory.commit(&OWN_FILES)?;
    Ok(value)
}

/// Writes all files of a checkpoint, the manifest last. Returns their total length.
fn fill(
    place: &SaveTarget,
    trainer: &Trainer,
    caller: &serde_json::Value,
    tokenizer: Option<TokenizerFiles>,
) -> Result<u64> {
    let mut entries = write_model(place, trainer.model(), tokenizer)?;
    entries.push(write_optimizer(place, trainer)?);
    entries.push(write_json(place, STATE_FILE, &trainer.state(caller.clone()))?);
    let manifest = Manifest::new(entries);
    let last = write_json(place, MANIFEST_FILE, &manifest)?;
    Ok(manifest.total_bytes() + last.bytes)
}

/// Writes the files that make the directory a Hugging Face model, or an adapter of one.
pub(super) fn write_model(
    place: &SaveTarget,
    model: &t5::T5,
    tokenizer: Option<TokenizerFiles>,
) -> Result<Vec<ManifestEntry>> {
    let mut entries = Vec::new();
    let mut file = |name: &str, write: &dyn Fn(&mut dyn Write) -> t5::Result<()>| -> Result<()> {
        entries.push(write_file(place, name, |file| Ok(write(file)?))?);
        Ok(())
    };
    match model.config().lora {
        None => model.save_with(place.path(), &mut file)?,
        // Without a card: an existing one is the user's.
        Some(_) => model.save_adapter_with(place.path(), |name, write| match ADAPTER_FILES.contains(&name) {
            true => file(name, write),
            false => Ok(()),
        })?,
    }
    if let Some(tokenizer) = tokenizer {
        match tokenizer.json {
            TokenizerJson::File(path) => entries.push(copy(path, place, TOKENIZER_FILE)?),
            TokenizerJson::Text(text) => entries.push(write_bytes(place, TOKENIZER_FILE, text.as_bytes())?),
            TokenizerJson::None => {}
        }
        entries.push(write_bytes(place, TOKENIZER_CONFIG_FILE, tokenizer.config.as_bytes())?);
        for path in tokenizer.companions.iter().filter(|path| path.is_file()) {
            let name = path.file_name().and_then(|name| name.to_str());
            // A file of another name would not be removed with the checkpoint.
            if let Some(name) = name.filter(|name| COMPANION_FILES.contains(name)) {
                entries.push(copy(path, place, name)?);
            }
        }
    }
    Ok(entries)
}

/// The optimizer's moments, tensor by tensor.
fn write_optimizer(place: &SaveTarget, trainer: &Trainer) -> Result<ManifestEntry> {
    if let Some(parallel) = trainer.sharded_optimizer() {
        return write_sharded(place, trainer, parallel);
    }
    let parameters = trainer.model().parameters();
    let mut state: Vec<_> = trainer.optimizer.named_state(parameters).collect();
    state.sort_by_key(|(_, tensor)| Reverse(tensor.dtype().size_in_bytes()));
    let headers = state
        .iter()
        .cloned()
        .map(|(name, tensor)| TensorHeader { name, dtype: tensor.dtype(), shape: tensor.dims().to_vec() })
        .collect();
    write_file(place, OPTIMIZER_FILE, |file| {
        let mut writer = Writer::new(&place.path().join(OPTIMIZER_FILE), file, headers, &[])?;
        for (name, tensor) in state {
            if !tensor_storage::is_in_file(tensor) {
                writer.write(&name, tensor)?;
                continue;
            }
            // At most a piece is in memory.
            writer.write_by_rows(&name, state_file::saved_rows(tensor.dims()), |first, count| {
                let piece = tensor.narrow(0, first, count)?;
                Ok(tensor_storage::copy_from_file(&piece)?.unwrap_or(piece))
            })?;
        }
        writer.into_sink();
        Ok(())
    })
}

/// The moments that several processes hold, parameter by parameter.
fn write_sharded(place: &SaveTarget, trainer: &Trainer, parallel: &Parallel) -> Result<ManifestEntry> {
    let mut headers = Vec::new();
    let optimizer = trainer.options().optimizer;
    for (index, parameter) in trainer.model().parameters().iter().enumerate() {
        if trainer.gradients().is_trainable(index) {
            headers.extend(Optimizer::headers(&optimizer, parameter));
        }
    }
    headers.sort_by_key(|header| Reverse(header.dtype.size_in_bytes()));
    write_file(place, OPTIMIZER_FILE, |file| {
        let mut writer = Writer::new(&place.path().join(OPTIMIZER_FILE), file, headers, &[])?;
        trainer.each_state(parallel, |state| {
            state.iter().try_for_each(|(name, tensor)| Ok(writer.write(name, tensor)?))
        })?;
        writer.into_sink();
        Ok(())
    })
}

fn write_json(place: &SaveTarget, name: &str, value: &impl serde::Serialize) -> Result<ManifestEntry> {
    let path = place.path().join(name);
    write_file(place, name, |file| {
        serde_json::to_writer_pretty(&mut *file, value)
            .map_err(io::Error::from)
            .and_then(|()| file.write_all(b"\n"))
            .map_err(|e| Error::io("write", &path, e))
    })
}

/// Writes a file with these contents.
pub(super) fn write_bytes(place: &SaveTarget, name: &str, bytes: &[u8]) -> Result<ManifestEntry> {
    let path = place.path().join(name);
    write_file(place, name, |file| file.write_all(bytes).map_err(|e| Error::io("write", &path, e)))
}

/// Copies a file and computes its checksum meanwhile.
pub(super) fn copy(from: &Path, place: &SaveTarget, name: &str) -> Result<ManifestEntry> {
    let mut source = regular_file::open(from).map_err(|e| Error::io("open", from, e))?;
    let path = place.path().join(name);
    write_file(place, name, |file| io::copy(&mut source, file).map(drop).map_err(|e| Error::io("write", &path, e)))
}

/// Writes one file through a checksum and syncs it, so that it need not be read again for its checksum.
pub(super) fn write_file(
    place: &SaveTarget,
    name: &str,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<ManifestEntry> {
    let path = place.path().join(name);
    let io_error = |e| Error::io("write", &path, e);
    let file = (place.create)(&place.directory, name.as_ref()).map_err(io_error)?;
    let mut sink = files::HashingWriter::new(BufWriter::with_capacity(files::BUFFER_BYTES, file));
    write(&mut sink)?;
    let (buffer, bytes, sha256) = sink.finish();
    let file = buffer.into_inner().map_err(|e| io_error(e.into_error()))?;
    file.sync_all().map_err(io_error)?;
    Ok(ManifestEntry { name: name.to_owned(), bytes, sha256 })
}
