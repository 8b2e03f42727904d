//! Finding the newest whole checkpoint, and resuming from it.

use std::io::ErrorKind;
use std::mem::take;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use t5::safetensors::Reader;
use t5::{Files, ParameterSpec, T5};

use super::manifest::{expect_format, read_bounded};
use super::{
    ADAPTER_FILES, Checkpoints, Found, MODEL_FILES, Manifest, ManifestEntry, OPTIMIZER_FILE, STATE_FILE, TrainerState,
    list,
};
use crate::error::{Error, Result};
use crate::files;
use crate::options::TrainerOptions;
use crate::trainer::Trainer;

/// A state longer than this is damage: it holds numbers, settings and a few sentences.
const MAX_STATE_BYTES: u64 = 64 << 20;

impl Checkpoints {
    /// The newest checkpoint in `directory` whose every byte agrees with its manifest; `None` where there are none.
    ///
    /// # Errors
    /// [`Error::NoValidCheckpoint`] if there are checkpoints and none is whole and readable; [`Error::LaterFormat`] if a newer
    /// version wrote a newer one; I/O errors on the directory itself.
    pub fn newest_valid(directory: &Path) -> Result<Option<Found>> {
        let listed = list(directory)?;
        if listed.is_empty() {
            return Ok(None);
        }
        match first_valid(listed)? {
            (Some(found), _) => Ok(Some(found)),
            (None, notes) => Err(Error::NoValidCheckpoint { directory: directory.to_owned(), notes }),
        }
    }

    /// The newest whole checkpoint of a step before `step`.
    ///
    /// # Errors
    /// [`Error::LaterFormat`]; I/O errors on the directory itself.
    pub fn newest_valid_before(directory: &Path, step: u64) -> Result<Option<Found>> {
        Ok(first_valid(list(directory)?.into_iter().filter(|(found, _)| *found < step))?.0)
    }

    /// The steps of the checkpoints in `directory`, whole or not, newest first.
    ///
    /// # Errors
    /// I/O errors on the directory itself.
    pub fn steps(directory: &Path) -> Result<Vec<u64>> {
        Ok(list(directory)?.into_iter().map(|(step, _)| step).collect())
    }

    /// The whole checkpoint with the best score, if any was scored. Its notes have the problems of better ones, and of those
    /// whose score could not be read.
    ///
    /// # Errors
    /// [`Error::LaterFormat`]; I/O errors on the directory itself.
    pub fn best_valid(directory: &Path, measure: &str) -> Result<Option<Found>> {
        let mut scored = Vec::new();
        let mut unknown = Vec::new();
        for (step, path) in list(directory)? {
            match manifest_of(&path).and_then(|manifest| read_state(&path, step, &manifest)) {
                Ok(state) => scored.extend(state.score_by(measure).map(|score| (score, step, path))),
                Err(error @ Error::LaterFormat { .. }) => return Err(error),
                Err(error) => unknown.push(error.to_string()),
            }
        }
        // Of equal scores the earliest is the best, as `Trainer::record_score` counts.
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let (found, _) = first_valid(scored.into_iter().map(|(_, step, path)| (step, path)))?;
        Ok(found.map(|mut found| {
            found.notes.extend(unknown);
            found
        }))
    }

    /// The checkpoint of `step`, if it is whole.
    ///
    /// # Errors
    /// [`Error::Unreadable`] and [`Error::LaterFormat`]: there may be one.
    pub fn valid_at(&self, step: u64) -> Result<Option<Found>> {
        let path = self.path_of(step);
        match verify(&path, step, &|| false) {
            Ok(state) => Ok(state.map(|state| Found { path, state, notes: Vec::new() })),
            Err(Error::Torn { .. } | Error::Checkpoint { .. }) => Ok(None),
            Err(Error::Unreadable { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The first whole checkpoint in this order, and the problems of those before it.
fn first_valid(candidates: impl IntoIterator<Item = (u64, PathBuf)>) -> Result<(Option<Found>, Vec<String>)> {
    let mut notes = Vec::new();
    for (step, path) in candidates {
        match verify(&path, step, &|| false) {
            Ok(state) => return Ok((state.map(|state| Found { path, state, notes: take(&mut notes) }), notes)),
            Err(error @ Error::LaterFormat { .. }) => return Err(error),
            Err(error) => notes.push(error.to_string()),
        }
    }
    Ok((None, notes))
}

/// The manifest of a checkpoint, which must list all required files.
pub(super) fn manifest_of(path: &Path) -> Result<Manifest> {
    let manifest = Manifest::read(path)?;
    let is_listed = |name: &str| manifest.files.iter().any(|file| file.name == name);
    let of_model: &[&str] = if is_listed(ADAPTER_FILES[0]) { &ADAPTER_FILES } else { &MODEL_FILES };
    for name in of_model.iter().chain(&[OPTIMIZER_FILE, STATE_FILE]) {
        if !is_listed(name) {
            return Err(Error::torn(path, format!("its manifest does not list {name}")));
        }
    }
    Ok(manifest)
}

/// Checks every byte of a checkpoint and reads its state. `None` when interrupted.
pub(super) fn verify(path: &Path, step: u64, interrupted: &dyn Fn() -> bool) -> Result<Option<TrainerState>> {
    let manifest = manifest_of(path)?;
    let is_whole = manifest.verify(path, interrupted)?;
    is_whole.then(|| read_state(path, step, &manifest)).transpose()
}

/// Reads the state, whose checksum must be the manifest's.
pub(super) fn read_state(directory: &Path, step: u64, manifest: &Manifest) -> Result<TrainerState> {
    let path = directory.join(STATE_FILE);
    let text = read_bounded(directory, STATE_FILE, MAX_STATE_BYTES)?;
    let read = ManifestEntry { name: STATE_FILE.to_owned(), bytes: text.len() as u64, sha256: files::sha256(&text) };
    manifest.check(directory, &read)?;
    // The bytes are those that were written. So a state that cannot be read is of another version, or under another name.
    expect_format(&path, &text, TrainerState::FORMAT)?;
    let state: TrainerState = serde_json::from_slice(&text)
        .map_err(|e| Error::checkpoint(&path, format!("not the state of a trainer ({e})")))?;
    if state.step != step {
        let reason = format!("expected the state of step {step}, got that of step {}", state.step);
        return Err(Error::checkpoint(directory, reason));
    }
    Ok(state)
}

impl Trainer {
    /// A trainer that resumes from `found`; with the same plan and kernels, to the same bits.
    ///
    /// `options` are usually `found.state.options`. Other options are accepted as long as the same parameters train with
    /// the same moments. The caller asks whether the user wants a changed option.
    ///
    /// # Errors
    /// Errors of the model and the options; [`Error::Checkpoint`] if the optimizer's state does not belong to this model and
    /// these options.
    pub fn resume(found: &Found, options: TrainerOptions, dtype: DType, device: &Device) -> Result<Self> {
        Trainer::resume_in(found, options, dtype, device, None)
    }

    /// [`Trainer::resume`] with the model's weights in a file, if `weights` is given; see [`T5::load_in`].
    ///
    /// # Errors
    /// As [`Trainer::resume`] and [`T5::load_in`].
    pub fn resume_in(
        found: &Found,
        options: TrainerOptions,
        dtype: DType,
        device: &Device,
        weights: Option<&Files>,
    ) -> Result<Self> {
        Trainer::resume_from_files(found, options, dtype, device, [weights, None])
    }

    /// [`Trainer::resume_in`] with the optimizer's moments in a file, too, if `moments` is given. Each is in memory only until it is
    /// in the file.
    ///
    /// # Errors
    /// As [`Trainer::resume_in`].
    pub fn resume_from_files(
        found: &Found,
        options: TrainerOptions,
        dtype: DType,
        device: &Device,
        [weights, moments]: [Option<&Files>; 2],
    ) -> Result<Self> {
        Trainer::resume_with(found, T5::load_in(&found.path, dtype, device, weights)?, options, moments)
    }

    /// [`Trainer::resume`] that keeps the values of the parameters for which `keeps` returns true; see [`T5::load_share`].
    ///
    /// # Errors
    /// As [`Trainer::resume`].
    pub fn resume_share(
        found: &Found,
        options: TrainerOptions,
        dtype: DType,
        device: &Device,
        keeps: &dyn Fn(&ParameterSpec) -> bool,
    ) -> Result<Self> {
        Trainer::resume_with(found, T5::load_share(&found.path, dtype, device, keeps)?, options, None)
    }

    /// [`Trainer::resume`] of a checkpoint that has an adapter and not its base. `model` is the base with an adapter of the same
    /// settings, and takes the saved values. Moments are in a file if `moments` is given.
    ///
    /// # Errors
    /// As [`Trainer::resume`] and [`t5::peft::AdapterDirectory::open`].
    pub fn resume_adapter(found: &Found, model: T5, options: TrainerOptions, moments: Option<&Files>) -> Result<Self> {
        let adapter = t5::peft::AdapterDirectory::open(&found.path, model.config())?;
        adapter.fill(model.parameters())?;
        Trainer::resume_with(found, model, options, moments)
    }

    fn resume_with(found: &Found, model: T5, options: TrainerOptions, moments: Option<&Files>) -> Result<Self> {
        let mut trainer = Trainer::new(model, options)?;
        trainer.optimizer.move_moments(moments)?;
        trainer.set_state(&found.state);
        let path = found.path.join(OPTIMIZER_FILE);
        let reader = Reader::open(&path)?;
        let mut read = 0;
        trainer.optimizer.restore(trainer.model.parameters(), found.state.updates, |name, zeros| {
            read += 1;
            restore_tensor(&reader, name, zeros)
        })?;
        let stored = reader.names().len();
        if stored != read {
            let reason = format!(
                "expected {read} tensors for the trained parameters, got {stored}: was `train.freeze` changed?"
            );
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
