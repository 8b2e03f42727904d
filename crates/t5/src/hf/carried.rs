//! [`Carried`]: tensors of a model's files that no text uses, such as the vision tower of a T5Gemma 2. A saved model has them again, byte for
//! byte: they go from file to file and are never in memory as a whole.
//!
//! The files stay open, so a saved model is whole even if its source was removed meanwhile.

use std::io::Write;

use super::safetensors::{Reader, TensorHeader, Writer};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::Family;

/// The files with such tensors, and the tensors of each.
#[derive(Debug)]
pub(crate) struct Carried {
    files: Vec<(Reader, Vec<TensorHeader>)>,
}

/// Whether a tensor of this model's files is one that no text uses.
pub(super) fn is_carried(name: &str, config: &Config) -> bool {
    let of_images = ["vision_tower", "multi_modal_projector", "eoi_embedding"];
    config.family == Family::T5Gemma2 && name.split('.').any(|part| of_images.contains(&part))
}

impl Carried {
    /// The tensors of these files that no text uses; `None` if there are none.
    ///
    /// # Errors
    /// A dtype that is not supported.
    pub fn read(files: Vec<Reader>, config: &Config) -> Result<Option<Carried>> {
        let of = |reader: Reader| {
            let names = reader.names().into_iter().filter(|name| is_carried(name, config));
            let tensors = names.map(|name| header(&reader, &name)).collect::<Result<Vec<_>>>()?;
            Ok((reader, tensors))
        };
        let mut files = files.into_iter().map(of).collect::<Result<Vec<_>>>()?;
        files.retain(|(_, tensors)| !tensors.is_empty());
        Ok((!files.is_empty()).then_some(Carried { files }))
    }

    /// The tensors.
    pub fn headers(&self) -> impl Iterator<Item = &TensorHeader> {
        self.files.iter().flat_map(|(_, tensors)| tensors)
    }

    /// Writes the bytes of one of them as the next tensor of a file.
    pub fn write<W: Write>(&self, name: &str, writer: &mut Writer<W>) -> Result<()> {
        let has = |tensors: &[TensorHeader]| tensors.iter().any(|tensor| tensor.name == name);
        let (reader, _) = self.files.iter().find(|(_, tensors)| has(tensors)).expect("a tensor of these files");
        copy(reader, name, writer)
    }
}

/// The header of a tensor that stays as it is.
pub(super) fn header(reader: &Reader, name: &str) -> Result<TensorHeader> {
    let dtype = reader.stored_as(name).ok_or_else(|| Error::TensorMismatch {
        path: reader.path().into(),
        tensor: name.into(),
        expected: "values in F32, F16, BF16 or F64".into(),
        got: "others".into(),
    })?;
    Ok(TensorHeader { name: name.into(), dtype, shape: reader.shape(name).unwrap_or_default().to_vec() })
}

/// Writes the bytes of a tensor as the next one of a file.
pub(super) fn copy<W: Write>(reader: &Reader, name: &str, writer: &mut Writer<W>) -> Result<()> {
    writer.write_bytes(&[name.to_owned()], |write| reader.each_piece(name, |bytes| write(bytes)))
}
