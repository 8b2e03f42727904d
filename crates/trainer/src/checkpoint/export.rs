//! The model that a run leaves behind: `OUTPUT/model/`, whole or absent.

use std::path::{Path, PathBuf};

use durable_files::NewDirectory;

use super::{
    COMPANION_FILES, Manifest, OPTIMIZER_FILE, STATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TokenizerFiles, save,
    save::SaveTarget,
};
use crate::error::Result;

/// Writes a Hugging Face directory, replacing one of the same name in one step.
///
/// # Errors
/// [`durable_files::Error::DiskFull`] and other I/O errors. An existing directory is then unchanged.
pub fn export_model(model: &t5::T5, target: &Path, tokenizer: Option<TokenizerFiles>) -> Result<()> {
    let place = SaveTarget::new(NewDirectory::create(target)?);
    save::commit_or_remove(&place, || save::write_model(&place, model, tokenizer).map(drop))
}

/// Copies the model of a checkpoint, such as the best one, without loading it. The files are those that [`export_model`] would write.
///
/// # Errors
/// [`crate::Error::Torn`] if the checkpoint does not agree with its manifest, [`crate::Error::Unreadable`] if it cannot be read; as
/// [`export_model`].
pub fn export_checkpoint(checkpoint: &Path, target: &Path) -> Result<()> {
    let manifest = Manifest::read(checkpoint)?;
    manifest.verify_lengths(checkpoint)?;
    let place = SaveTarget::new(NewDirectory::create(target)?);
    save::commit_or_remove(&place, || {
        for entry in &manifest.files {
            let name = entry.name.as_str();
            // Every file belongs to the model, except those that only a resumed run needs.
            if ![OPTIMIZER_FILE, STATE_FILE].contains(&name) {
                let copied = save::copy(&checkpoint.join(name), &place, name)?;
                manifest.check(checkpoint, &copied)?;
            }
        }
        Ok(())
    })
}

/// Merges an adapter into the model of a directory, like [`t5::merge_adapter_with`]. The base's tokenizer files are copied beside
/// the new weights.
///
/// # Errors
/// As [`t5::merge_adapter_with`] and [`export_model`].
pub fn export_merged(
    base: &Path,
    adapter: &Path,
    dtype: Option<candle_core::DType>,
    target: &Path,
) -> Result<t5::MergedAdapter> {
    export_from(base, target, |place| {
        let merged = t5::merge_adapter_with(base, adapter, dtype, place.path(), |name, write| -> Result<()> {
            save::write_file(place, name, |file| Ok(write(file)?)).map(drop)
        })?;
        Ok(merged)
    })
}

/// Averages the weights of models, like [`t5::average_with`]. The first one's tokenizer files are copied beside the new weights.
///
/// # Errors
/// As [`t5::average_with`] and [`export_model`].
///
/// # Panics
/// There is no model.
pub fn export_average(models: &[PathBuf], target: &Path) -> Result<t5::AveragedModels> {
    export_from(&models[0], target, |place| {
        t5::average_with(models, place.path(), |name, write| -> Result<()> {
            save::write_file(place, name, |file| Ok(write(file)?)).map(drop)
        })
    })
}

/// Quantises the weights of the model of a directory, like [`t5::quantise_with`]. The source's tokenizer files are copied
/// beside them.
///
/// # Errors
/// As [`t5::quantise_with`] and [`export_model`].
pub fn export_quantised(source: &Path, precision: t5::Precision, target: &Path) -> Result<t5::QuantisedWeights> {
    export_quantised_as(source, precision, target, &[])
}

/// [`export_quantised`] with additional entries in the header of the weights' file.
pub(super) fn export_quantised_as(
    source: &Path,
    precision: t5::Precision,
    target: &Path,
    metadata: &[(&str, &str)],
) -> Result<t5::QuantisedWeights> {
    export_from(source, target, |place| {
        t5::quantise_with(source, precision, place.path(), metadata, |name, write| -> Result<()> {
            save::write_file(place, name, |file| Ok(write(file)?)).map(drop)
        })
    })
}

/// Changes the rows of a model's table, like [`t5::with_rows`]. `tokenizer` has the names and the contents of the files beside the new
/// weights.
///
/// # Errors
/// As [`t5::with_rows`] and [`export_model`].
pub fn export_with_rows(
    source: &Path,
    rows: &[Option<u32>],
    tokenizer: &[(String, Vec<u8>)],
    target: &Path,
) -> Result<t5::ChangedRows> {
    let place = SaveTarget::new(NewDirectory::create(target)?);
    save::commit_or_remove(&place, || {
        let changed = t5::with_rows(source, rows, place.path(), |name, write| -> Result<()> {
            save::write_file(&place, name, |file| Ok(write(file)?)).map(drop)
        })?;
        for (name, bytes) in tokenizer {
            save::write_bytes(&place, name, bytes)?;
        }
        Ok(changed)
    })
}

/// Makes a model directory with the tokenizer files of another.
fn export_from<R>(source: &Path, target: &Path, write: impl FnOnce(&SaveTarget) -> Result<R>) -> Result<R> {
    let place = SaveTarget::new(NewDirectory::create(target)?);
    save::commit_or_remove(&place, || {
        let written = write(&place)?;
        for name in [TOKENIZER_FILE, TOKENIZER_CONFIG_FILE].into_iter().chain(COMPANION_FILES) {
            let path = source.join(name);
            if path.exists() {
                save::copy(&path, &place, name)?;
            }
        }
        Ok(written)
    })
}
