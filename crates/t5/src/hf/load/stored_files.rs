//! [`StoredFiles`]: the weights of a directory, for reading a few rows at a time.

use std::io::Write;
use std::path::Path;

use candle_core::{DType, Tensor};

use super::{Files, IGNORED, check_shape, is_carried, is_of_another_head};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::hf::carried;
use crate::hf::safetensors::{Reader, TensorHeader, Writer};
use crate::parameters::ParameterSpec;

/// The weights of a directory, for reading a few rows at a time.
#[derive(Debug)]
pub(crate) struct StoredFiles(Files);

impl StoredFiles {
    pub(crate) fn open(directory: &Path, config: &Config) -> Result<StoredFiles> {
        Files::open(directory, config).map(StoredFiles)
    }

    /// [`Files::is_tied`], for values in f32.
    pub(crate) fn is_tied(&self, config: &Config) -> Result<bool> {
        self.0.is_tied(config, DType::F32)
    }

    /// Refuses files that lack a parameter of the model, have one of another shape, or have tensors that the model lacks. Parameters for
    /// which `is_elsewhere` returns true may have other shapes, or be absent.
    pub(crate) fn check_names(
        &self,
        directory: &Path,
        config: &Config,
        is_elsewhere: &dyn Fn(&str) -> bool,
    ) -> Result<()> {
        let files = &self.0;
        let specs = ParameterSpec::all(config);
        for spec in specs.iter().filter(|spec| !is_elsewhere(&spec.name)) {
            let name = files.name_of(&spec.name);
            let reader = files.reader(name).ok_or_else(|| files.missing(directory, spec))?;
            check_shape(reader, name, spec)?;
        }
        for (name, &shard) in &files.holder {
            let is_table = files.tables.has(name) || name.ends_with(IGNORED);
            let is_known = is_table || is_of_another_head(name, config) || is_carried(name, config);
            if !is_known && !specs.iter().any(|spec| spec.name == *name) {
                return Err(Error::UnexpectedTensor { path: files.readers[shard].path().into(), tensor: name.clone() });
            }
        }
        Ok(())
    }

    /// Tensors that no text uses ([`crate::hf::Carried`]).
    pub(crate) fn carried(&self, config: &Config) -> Result<Vec<TensorHeader>> {
        let names = self.0.holder.keys().filter(|name| is_carried(name, config));
        names.map(|name| carried::header(self.holder(name), name)).collect()
    }

    /// Writes the bytes of one of them as the next tensor of a file.
    pub(crate) fn write_carried<W: Write>(&self, name: &str, writer: &mut Writer<W>) -> Result<()> {
        carried::copy(self.holder(name), name, writer)
    }

    /// The name under which a parameter is stored.
    pub(crate) fn name_of<'a>(&self, name: &'a str) -> &'a str {
        self.0.name_of(name)
    }

    /// Some rows of a stored tensor in f32.
    pub(crate) fn rows(&self, name: &str, first: usize, count: usize) -> Result<Tensor> {
        self.holder(name).read_rows(name, first, count, DType::F32)
    }

    /// The dtype that a tensor is stored in.
    pub(crate) fn stored_as(&self, name: &str) -> Result<DType> {
        let reader = self.holder(name);
        reader.stored_as(name).filter(DType::is_float).ok_or_else(|| Error::TensorMismatch {
            path: reader.path().into(),
            tensor: name.into(),
            expected: "values in F32, F16, BF16 or F64".into(),
            got: "others".into(),
        })
    }

    /// The error for a stored tensor whose values cannot be used.
    pub(crate) fn mismatch(&self, name: &str, expected: &str, got: &dyn std::fmt::Display) -> Error {
        let path = self.holder(self.name_of(name)).path().into();
        Error::TensorMismatch { path, tensor: name.into(), expected: expected.into(), got: got.to_string() }
    }

    fn holder(&self, name: &str) -> &Reader {
        self.0.reader(name).unwrap_or_else(|| panic!("`{name}` was found when the names were checked"))
    }
}
