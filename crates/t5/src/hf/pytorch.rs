//! `pytorch_model.bin`: tensors in the archive that PyTorch has written since version 1.6, read in place.
//!
//! The archive is a zip whose members are stored without compression: a pickle of the names, shapes and places, and one member for each
//! tensor's values. So the values are ranges of the file's bytes, as in a safetensors file, and [`Reader`] reads both.
//!
//! Invariants: no code of the file is executed ([`super::pickle`]); every extent lies within its member.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use candle_core::DType;

use super::pickle::{self, PickledTensor};
use super::safetensors::{Extent, Reader, refuse_pointer};
use super::zip::{self, Archive, Fault};
use crate::error::{Error, Result};

/// A pickle has about 150 bytes a tensor, and the deepest model that is accepted has 3,000 tensors.
const LARGEST_PICKLE_BYTES: u64 = 2 << 20;

/// The name of the pickle in an archive, and the prefix of the members with values, below the archive's own name.
const PICKLE: &str = "data.pkl";
const VALUES: &str = "data/";
const BYTE_ORDER: &str = "byteorder";

/// Opens a file and reads which tensors it has.
///
/// # Errors
/// [`Error::Io`], or [`Error::Pytorch`] for a damaged file, one of another kind, or one that holds anything but tensors.
pub(crate) fn open(path: &Path) -> Result<Reader> {
    let mut file = regular_file::open(path).map_err(Error::io(path))?;
    refuse_pointer(path, &mut file)?;
    match tensors(&mut file) {
        Ok(tensors) => Ok(Reader::of_table(path, file, tensors)),
        Err(Fault::Io(source)) => Err(Error::Io { path: path.into(), source }),
        Err(Fault::Format(problem)) => Err(Error::Pytorch { path: path.into(), problem }),
    }
}

fn tensors(file: &mut File) -> Result<BTreeMap<String, Extent>, Fault> {
    let mut start = [0; 4];
    file.read_exact(&mut start)?;
    if start[..2] == [0x80, 2] {
        return Err("it has the format that PyTorch wrote before version 1.6".into());
    }
    if start != zip::FIRST_BYTES {
        return Err("it is no archive of PyTorch's".into());
    }
    let archive = Archive::read(file)?;
    let pickle = archive.names().find(|name| name.rsplit('/').next() == Some(PICKLE));
    let pickle = pickle.ok_or("it is an archive without a `data.pkl`")?.to_owned();
    let root = &pickle[..pickle.len() - PICKLE.len()];
    if archive.names().any(|name| name == format!("{root}{BYTE_ORDER}"))
        && read(file, &archive, &format!("{root}{BYTE_ORDER}"), 16)? != b"little"
    {
        return Err("its values are not little-endian".into());
    }
    let bytes = read(file, &archive, &pickle, LARGEST_PICKLE_BYTES)?;
    let pickled = pickle::tensors(&bytes).map_err(|problem| Fault::Format(format!("its pickle: {problem}")))?;
    let (mut members, mut tensors) = (HashMap::new(), BTreeMap::new());
    for tensor in pickled {
        let member = match members.get(&tensor.key) {
            Some(member) => *member,
            None => {
                let member = archive.place_of(file, &format!("{root}{VALUES}{}", tensor.key))?;
                members.insert(tensor.key.clone(), member);
                member
            }
        };
        let extent = extent(&tensor, member)?;
        tensors.insert(tensor.name, extent);
    }
    Ok(tensors)
}

/// A whole member.
fn read(file: &mut File, archive: &Archive, name: &str, max_bytes: u64) -> Result<Vec<u8>, Fault> {
    let (start, length) = archive.place_of(file, name)?;
    if length > max_bytes {
        return Err(Fault::Format(format!("its `{name}` has {length} bytes, expected at most {max_bytes}")));
    }
    let mut bytes = vec![0; length as usize];
    file.seek(std::io::SeekFrom::Start(start))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The place of a tensor's values in the file. The member begins at byte `start` and has `member_bytes` bytes.
fn extent(tensor: &PickledTensor, (start, member_bytes): (u64, u64)) -> Result<Extent, Fault> {
    let PickledTensor { name, storage, first, shape, is_contiguous, .. } = tensor;
    let (dtype, width) = match storage.as_str() {
        "FloatStorage" => (Ok(DType::F32), 4),
        "HalfStorage" => (Ok(DType::F16), 2),
        "BFloat16Storage" => (Ok(DType::BF16), 2),
        "DoubleStorage" => (Ok(DType::F64), 8),
        // An entry that is not asked for may be anything: it is never read.
        other => (Err(other.to_owned()), 0),
    };
    if !is_contiguous {
        return Err(Fault::Format(format!("its tensor `{name}` is a view whose values do not follow each other")));
    }
    let count = shape.iter().try_fold(1_u64, |count, &size| count.checked_mul(size as u64));
    let bytes = |values: u64| values.checked_mul(width);
    let place = count
        .and_then(bytes)
        .zip(bytes(*first))
        .filter(|(length, before)| before.checked_add(*length).is_some_and(|end| end <= member_bytes));
    let (length, before) =
        place.ok_or_else(|| Fault::Format(format!("its tensor `{name}` of shape {shape:?} goes beyond its values")))?;
    Ok(Extent { dtype, shape: shape.clone(), start: start + before, bytes: length as usize })
}
