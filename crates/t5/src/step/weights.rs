//! A file that a model's weights lie in, so that memory holds those that are worked on and no others.
//!
//! Layers and optimizers see tensors like any others. Passes ask for a block's weights before they need them and let them
//! go after (layer by layer once for a whole optimizer batch), so that what is resident is the largest
//! block, or the table of the vocabulary; whoever does not hint at all is slower and holds more, nothing else. The file
//! has no name: what a run keeps are its checkpoints. A model that nobody trains can stay in the files that it is loaded from;
//! a file without a name then has those weights that are stored in another dtype.

use std::path::PathBuf;

use candle_core::{DType, Tensor};
use heap::FileMemory;
use t5_ops::Writes;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::ops::Files;
use crate::parameters::ParameterSpec;

/// Room for the large weights of one model.
#[derive(Debug)]
pub(crate) struct WeightFile {
    /// The model's own files, to be read.
    stored: Vec<FileMemory>,
    /// None where every weight lies in those.
    memory: Option<FileMemory>,
    /// [`crate::LayerMajor::weight_blocks_in_memory`].
    blocks_in_memory: usize,
    /// [`Files::read_ahead_bytes`].
    read_ahead_bytes: u64,
    /// Whether the system has room for changed weights.
    writes: Writes,
    /// For messages.
    path: PathBuf,
}

impl WeightFile {
    /// Room for the parameters of a model of `dtype`.
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
    pub fn beside(stored: Vec<FileMemory>, files: &Files, sizes: impl Iterator<Item = u64>) -> Result<WeightFile> {
        let sizes: Vec<u64> = sizes.collect();
        if sizes.is_empty() {
            return Ok(WeightFile::of(stored, None, files, Writes::Later));
        }
        WeightFile::with_room(stored, files, &sizes)
    }

    fn with_room(stored: Vec<FileMemory>, files: &Files, sizes: &[u64]) -> Result<WeightFile> {
        let memory = FileMemory::create(&files.directory, sizes.iter().map(|&bytes| bytes as usize));
        let has_room = sizes.iter().sum::<u64>() <= files.unwritten_bytes;
        let writes = if has_room { Writes::Later } else { Writes::Now };
        let memory = memory.map_err(Error::offload(&heap::shown_path(&files.directory)))?;
        Ok(WeightFile::of(stored, Some(memory), files, writes))
    }

    fn of(stored: Vec<FileMemory>, memory: Option<FileMemory>, files: &Files, writes: Writes) -> WeightFile {
        let (path, blocks_in_memory) = (heap::shown_path(&files.directory), files.weight_blocks_in_memory);
        WeightFile { stored, memory, blocks_in_memory, read_ahead_bytes: files.read_ahead_bytes, writes, path }
    }

    /// Bytes of weights that the system has room for before they are used.
    pub fn read_ahead_bytes(&self) -> u64 {
        self.read_ahead_bytes
    }

    /// This file, beside a number of blocks whose weights are in memory.
    pub fn beside_blocks_in_memory(self, blocks_in_memory: usize) -> WeightFile {
        WeightFile { blocks_in_memory, ..self }
    }

    /// How many blocks keep their weights in memory.
    pub fn blocks_in_memory(&self) -> usize {
        self.blocks_in_memory
    }

    /// A weight where one of the model's own files has it. `None` where it cannot be used there.
    pub fn stored(&self, file: usize, offset: usize, shape: &[usize], dtype: DType) -> Result<Option<Tensor>> {
        Ok(t5_ops::tensor_in_file(&self.stored[file], offset, shape, dtype)?)
    }

    /// An error of the file is told apart from those of tensors.
    fn error(&self, error: candle_core::Error) -> Error {
        match error {
            candle_core::Error::Io(source) => Error::offload(&self.path)(source),
            error => error.into(),
        }
    }

    /// The tensor where it is to lie: in the file, if there is one and it is large enough, and then out of memory.
    pub fn place(file: Option<&WeightFile>, x: Tensor) -> Result<Tensor> {
        let Some((file, memory)) = file.and_then(|file| Some((file, file.memory.as_ref()?))) else { return Ok(x) };
        let placed = t5_ops::copy_into_file(&x, memory, file.writes).map_err(|error| file.error(error))?;
        t5_ops::page_out(&placed);
        Ok(placed)
    }

    /// Has `f` change a tensor, which is out of memory then if it lies in the file.
    pub fn change<E: From<Error>>(&self, x: &Tensor, f: impl FnOnce(&Tensor) -> Result<(), E>) -> Result<(), E> {
        t5_ops::page_out(x);
        let Some(copy) = t5_ops::copy_from_file(x).map_err(|error| self.error(error))? else { return f(x) };
        f(&copy)?;
        Ok(t5_ops::overwrite_in_file(x, &copy, self.writes).map_err(|error| self.error(error))?)
    }
}
