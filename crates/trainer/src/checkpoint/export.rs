//! The model a run leaves behind: `OUTPUT/model/`, whole or not there.

use std::path::Path;

use super::{Manifest, OPTIMIZER_FILE, STATE_FILE, TokenizerFiles, save, save::Place};
use crate::error::Result;
use crate::temporary;

/// Writes a Hugging Face directory, replacing one of the same name in one step.
///
/// # Errors
/// [`crate::Error::DiskFull`] and other I/O errors; what was there before is then untouched.
pub fn export_model(model: &t5::T5, target: &Path, tokenizer: Option<TokenizerFiles>) -> Result<()> {
    let place = Place::new(temporary::create_directory(target)?);
    save::commit_or_remove(&place.path, target, || save::write_model(&place, model, tokenizer).map(drop))
}

/// Copies the model of a checkpoint, such as the best one, without loading it, as [`export_model`] would have written it.
///
/// # Errors
/// [`crate::Error::Torn`] where it does not agree with its manifest, [`crate::Error::Unreadable`] where it cannot be read; as
/// [`export_model`].
pub fn export_checkpoint(checkpoint: &Path, target: &Path) -> Result<()> {
    let manifest = Manifest::read(checkpoint)?;
    manifest.verify_lengths(checkpoint)?;
    let place = Place::new(temporary::create_directory(target)?);
    save::commit_or_remove(&place.path, target, || {
        for entry in &manifest.files {
            let name = entry.name.as_str();
            // Everything but what a run goes on from belongs to the model.
            if ![OPTIMIZER_FILE, STATE_FILE].contains(&name) {
                let copied = save::copy(&checkpoint.join(name), &place, name)?;
                manifest.check(checkpoint, &copied)?;
            }
        }
        Ok(())
    })
}
