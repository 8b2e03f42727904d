//! A file that a model's weights lie in, so that memory holds only the weights in use.
//!
//! Layers and optimizers use these tensors like any others. A pass asks for a block's weights before it needs them and releases
//! them afterwards, layer by layer once for a whole optimizer batch. So the resident weights are those of the largest
//! block, or the table of the vocabulary. Code that gives no such hints is slower and holds more, but is correct. The file
//! has no name: a run keeps its checkpoints only. A model that is not trained can stay in the files that it is loaded from;
//! a file without a name then holds the weights that are stored in another dtype.
//!
//! On a device a pass works on copies of these weights ([`crate::host_copies`]). There the host's memory may take the place of the file.

use std::path::PathBuf;

use candle_core::{DType, Tensor};
use cuda_device::copies::{self, WriteBack};
use heap::{FileMemory, LARGE_BYTES};
use tensor_storage::WritePolicy;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::levers::LayerMajor;
use crate::ops::{Files, Ops};
use crate::parameters::{Parameter, ParameterSpec, Part};
use crate::stored_file::StoredFile;

/// The files, or the host memory, that hold the large weights of one model.
#[derive(Debug)]
pub(crate) struct WeightFile {
    /// The model's own files, to be read.
    stored: Vec<StoredFile>,
    /// `None` where every weight lies in the model's own files.
    memory: Option<FileMemory>,
    /// [`crate::LayerMajor::weight_blocks_in_memory`].
    blocks_in_memory: usize,
    /// [`Files::weights_by_matrix`].
    by_matrix: bool,
    /// [`Files::read_ahead_bytes`].
    read_ahead_bytes: u64,
    /// Whether the system has room for changed weights.
    writes: WritePolicy,
    /// Whether weights that lie in no file of the model are kept in the host's memory, beside a device.
    in_host_memory: bool,
    /// Named in messages.
    path: PathBuf,
}

impl WeightFile {
    /// Room for the parameters of a model, whose dtype is `dtype`.
    ///
    /// # Errors
    /// [`Error::Offload`], for example where the disk is full.
    pub fn create(files: &Files, config: &Config, dtype: DType) -> Result<WeightFile> {
        let specs = ParameterSpec::all(config);
        WeightFile::with_room(Vec::new(), files, &specs.iter().map(|spec| spec.bytes(dtype)).collect::<Vec<_>>())
    }

    /// The model's own files, and room beside them for weights of these sizes.
    ///
    /// # Errors
    /// [`Error::Offload`].
    pub fn beside(stored: Vec<StoredFile>, files: &Files, sizes: impl Iterator<Item = u64>) -> Result<WeightFile> {
        let sizes: Vec<u64> = sizes.collect();
        if sizes.is_empty() {
            return Ok(WeightFile::new(stored, None, files, WritePolicy::Later));
        }
        WeightFile::with_room(stored, files, &sizes)
    }

    fn with_room(stored: Vec<StoredFile>, files: &Files, sizes: &[u64]) -> Result<WeightFile> {
        if files.in_host_memory {
            return Ok(WeightFile::new(stored, None, files, WritePolicy::Later));
        }
        let memory = FileMemory::create(&files.directory, sizes.iter().map(|&bytes| bytes as usize));
        let has_room = sizes.iter().sum::<u64>() <= files.unwritten_bytes;
        let writes = if has_room { WritePolicy::Later } else { WritePolicy::Now };
        let memory = memory.map_err(Error::offload(&heap::shown_path(&files.directory)))?;
        Ok(WeightFile::new(stored, Some(memory), files, writes))
    }

    fn new(stored: Vec<StoredFile>, memory: Option<FileMemory>, files: &Files, writes: WritePolicy) -> WeightFile {
        let &Files { weight_blocks_in_memory: blocks_in_memory, weights_by_matrix: by_matrix, .. } = files;
        let &Files { read_ahead_bytes, in_host_memory, .. } = files;
        let path = heap::shown_path(&files.directory);
        WeightFile { stored, memory, blocks_in_memory, by_matrix, read_ahead_bytes, writes, in_host_memory, path }
    }

    /// Refuses weights in files that were changed since they were opened.
    pub fn check_unchanged(&self) -> Result<()> {
        self.stored.iter().try_for_each(StoredFile::check_unchanged)
    }

    /// Bytes of weights that the system has room for before they are used.
    pub fn read_ahead_bytes(&self) -> u64 {
        self.read_ahead_bytes
    }

    /// [`Files::weights_by_matrix`].
    pub fn is_by_matrix(&self) -> bool {
        self.by_matrix
    }

    /// This file, beside a number of blocks whose weights are in memory.
    pub fn beside_blocks_in_memory(self, blocks_in_memory: usize) -> WeightFile {
        WeightFile { blocks_in_memory, ..self }
    }

    /// Whether the weights are in the kind of memory that a plan asks for.
    pub fn is_as_in(&self, files: &Files) -> bool {
        let &Files { weight_blocks_in_memory, weights_by_matrix, in_host_memory, .. } = files;
        (self.blocks_in_memory, self.by_matrix, self.in_host_memory)
            == (weight_blocks_in_memory, weights_by_matrix, in_host_memory)
    }

    /// Whether a parameter stays on the CPU while others are on a device.
    pub fn stays_on_host(&self, parameter: &Parameter, config: &Config) -> bool {
        let Parameter { name, tensor, part, .. } = parameter;
        let trains = || config.lora.as_ref().is_some_and(|lora| lora.trains(name));
        let is_large = tensor.bytes() >= LARGE_BYTES as u64;
        let goes = || self.in_host_memory && is_large && !self.keeps(*part, config) && !trains();
        tensor_storage::is_in_file(tensor) || (parameter.is_asked_for() && goes())
    }

    /// Whether the weights of a part stay in the memory of the processor that computes with them.
    pub fn keeps(&self, part: Part, config: &Config) -> bool {
        LayerMajor::keeps_weights(self.blocks_in_memory, part, config)
    }

    /// Copies values to the host's memory, if weights are kept there, or else to the file if they are large enough.
    pub fn to_host_copy(&self, values: Tensor) -> Result<Tensor> {
        match self.in_host_memory {
            true => Ok(tensor_storage::copy_from_file(&values)?.unwrap_or(values)),
            false => WeightFile::place(Some(self), values),
        }
    }

    /// A weight in one of the model's own files. `None` where it cannot be used there.
    pub fn stored(&self, file: usize, offset: usize, shape: &[usize], dtype: DType) -> Result<Option<Tensor>> {
        Ok(tensor_storage::tensor_in_file(&self.stored[file].memory, offset, shape, dtype)?)
    }

    /// Converts an operation's error: an I/O error becomes an error of the file.
    pub fn error(&self, error: candle_core::Error) -> Error {
        match error {
            candle_core::Error::Io(source) => Error::offload(&self.path)(source),
            error => error.into(),
        }
    }

    /// Moves a tensor to the place where it is to lie. A large tensor goes to the file, if there is one, and leaves memory.
    pub fn place(file: Option<&WeightFile>, x: Tensor) -> Result<Tensor> {
        let Some((file, memory)) = file.and_then(|file| Some((file, file.memory.as_ref()?))) else { return Ok(x) };
        let placed = tensor_storage::copy_into_file(&x, memory, file.writes).map_err(|error| file.error(error))?;
        tensor_storage::page_out(&placed);
        Ok(placed)
    }

    /// Has `f` change a tensor. A tensor in the file is paged out, and `f` changes a copy that is then written back.
    pub fn change<R, E: From<Error>>(&self, x: &Tensor, f: impl FnOnce(&Tensor) -> Result<R, E>) -> Result<R, E> {
        tensor_storage::page_out(x);
        let Some(copy) = tensor_storage::copy_from_file(x).map_err(|error| self.error(error))? else { return f(x) };
        let result = f(&copy)?;
        self.overwrite(x, &copy)?;
        Ok(result)
    }

    /// Replaces a weight's values in the file or in the host's memory. The new values come from the host or from a device. The write-back
    /// of a device's values may be complete later.
    pub fn overwrite(&self, x: &Tensor, values: &Tensor) -> Result<Option<WriteBack>> {
        copies::write_back(values, x, self.writes).map_err(|error| self.error(error))
    }
}
