//! Finding the newest whole checkpoint, and going on from it.

use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use t5::safetensors::Reader;
use t5::{Files, T5};

use super::{Checkpoints, Found, MODEL_FILES, Manifest, OPTIMIZER_FILE, STATE_FILE, TrainerState, list};
use crate::error::{Error, Result};
use crate::options::TrainerOptions;
use crate::trainer::Trainer;

impl Checkpoints {
    /// The newest checkpoint in `directory` whose every byte agrees with its manifest; `None` where there are none.
    ///
    /// # Errors
    /// [`Error::NoValidCheckpoint`] where there are some and none is whole; I/O errors on the directory itself.
    pub fn newest_valid(directory: &Path) -> Result<Option<Found>> {
        let listed = list(directory)?;
        if listed.is_empty() {
            return Ok(None);
        }
        let mut notes = Vec::new();
        for (step, path) in listed {
            match verify(&path, step) {
                Ok(state) => return Ok(Some(Found { path, state, notes })),
                Err(error) => notes.push(error.to_string()),
            }
        }
        Err(Error::NoValidCheckpoint { directory: directory.to_owned(), notes })
    }

    /// The whole checkpoint with the best score, if any was scored; damaged ones are passed over.
    ///
    /// # Errors
    /// I/O errors on the directory itself.
    pub fn best_valid(directory: &Path) -> Result<Option<Found>> {
        let mut scored: Vec<_> = list(directory)?
            .into_iter()
            .filter_map(|(step, path)| Some((read_state(&path).ok()?.score?, step, path)))
            .collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut notes = Vec::new();
        for (_, step, path) in scored {
            match verify(&path, step) {
                Ok(state) => return Ok(Some(Found { path, state, notes })),
                Err(error) => notes.push(error.to_string()),
            }
        }
        Ok(None)
    }
}

/// Checks every byte of a checkpoint and reads its state.
fn verify(path: &Path, step: u64) -> Result<TrainerState> {
    let manifest = Manifest::read(path)?;
    for name in MODEL_FILES.iter().chain(&[OPTIMIZER_FILE, STATE_FILE]) {
        if !manifest.files.iter().any(|file| file.name == *name) {
            return Err(Error::checkpoint(path, format!("its manifest does not list {name}")));
        }
    }
    manifest.verify(path)?;
    let state = read_state(path)?;
    if state.step != step {
        return Err(Error::checkpoint(
            path,
            format!("expected the state of step {step}, got that of step {}", state.step),
        ));
    }
    Ok(state)
}

fn read_state(path: &Path) -> Result<TrainerState> {
    let path = path.join(STATE_FILE);
    let text = fs::read(&path).map_err(|e| Error::checkpoint(&path, format!("unreadable ({e})")))?;
    let state: TrainerState = serde_json::from_slice(&text)
        .map_err(|e| Error::checkpoint(&path, format!("not the state of a trainer ({e})")))?;
    if state.format != TrainerState::FORMAT {
        let reason = format!("expected state format {}, got {}", TrainerState::FORMAT, state.format);
        return Err(Error::checkpoint(&path, reason));
    }
    Ok(state)
}

impl Trainer {
    /// A trainer that goes on where `found` was saved, to the same bits.
    ///
    /// `options` are usually `found.state.options`; others are taken as given, as long as the same parameters train with
    /// the same moments. Whether a changed option is what the user wants is the caller's to ask.
    ///
    /// # Errors
    /// What the model or the options refuse; [`Error::Checkpoint`] where the optimizer's state is not that of this model and
    /// these options.
    pub fn resume(found: &Found, options: TrainerOptions, dtype: DType, device: &Device) -> Result<Self> {
        Trainer::resume_in(found, options, dtype, device, None)
    }

    /// [`Trainer::resume`] with the model's weights in a file, where one is asked for; see [`T5::load_in`].
    ///
    /// # Errors
    /// Those of both.
    pub fn resume_in(
        found: &Found,
        options: TrainerOptions,
        dtype: DType,
        device: &Device,
        weights: Option<&Files>,
    ) -> Result<Self> {
        let mut trainer = Trainer::new(T5::load_in(&found.path, dtype, device, weights)?, options)?;
        trainer.set_state(&found.state);
        let path = found.path.join(OPTIMIZER_FILE);
        let reader = Reader::open(&path)?;
        let mut read = 0;
        trainer.adafactor.restore(trainer.model.parameters(), found.state.updates, |name, zeros| {
            read += 1;
            restore_tensor(&reader, name, zeros)
        })?;
        let stored = reader.names().len();
        if stored != read {
            let reason =
                format!("expected the {read} tensors of what trains now, got {stored}: was `train.freeze` changed?");
            return Err(Error::checkpoint(&path, reason));
        }
        Ok(trainer)
    }
}

fn restore_tensor(reader: &Reader, name: &str, zeros: &Tensor) -> Result<Tensor> {
    match reader.shape(name) {
        Some(shape) if shape == zeros.dims() => Ok(reader.read(name, zeros.dtype(), zeros.device())?),
        shape => {
            let got = shape.map_or("none".to_owned(), |shape| format!("shape {shape:?}"));
            let reason = format!("tensor `{name}`: expected shape {:?}, got {got}", zeros.dims());
            Err(Error::checkpoint(reader.path(), reason))
        }
    }
}
