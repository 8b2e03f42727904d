//! Files of tensors, streamed: a reader and a writer that hold one piece of one tensor at a time.
//!
//! The format: eight bytes of header length, a JSON header with dtype, shape and byte range of every
//! tensor, then the tensors' bytes, little endian, without gaps.
//!
//! Invariants: everything that a header declares is checked against the file's real
//! length; the bytes written are a function of the tensors and the metadata alone;
//! [`Writer::finish`] returns after the bytes are on the disk.
//!
//! ```
//! # use candle_core::{Device, Tensor, DType};
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("state.safetensors");
//! let row = Tensor::arange(0f32, 6., &Device::Cpu)?;
//! t5::safetensors::write(&path, &[("step", &row)], &[("step", "7")])?;
//! let file = t5::safetensors::Reader::open(&path)?;
//! assert_eq!(file.metadata("step"), Some("7"));
//! assert_eq!(file.read("step", DType::F32, &Device::Cpu)?.to_vec1::<f32>()?, row.to_vec1::<f32>()?);
//! # Ok::<(), t5::Error>(())
//! ```

mod bytes_held;
mod values;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::{Map, Value, json};
use t5_ops::QuantisedPart;

use crate::error::{Error, Result};
use crate::stored_file::StoredFile;

pub use bytes_held::{StoredIn, writing_bytes};
use values::{are_finite, dtype_name, little_endian};

/// Bytes of a tensor that are in memory between file and tensor.
pub const PIECE_BYTES: usize = 1 << 20;

/// Elements of a stored tensor that are compared with another's at a time. A comparison makes several copies of them.
const COMPARED_ELEMENTS: usize = PIECE_BYTES / 64;

/// Bytes of a tensor in memory while its values are looked at, and nothing else is done with them.
const CHECKED_BYTES: usize = 64 << 10;

/// Values that are written at a time.
const WRITTEN_ELEMENTS: usize = PIECE_BYTES / 8;

/// Whether two stored tensors have the same shape and, in `dtype`, the same values. They are read some rows at a time.
///
/// # Errors
/// As [`Reader::read`].
pub(crate) fn are_equal([one, (reader, name)]: [(&Reader, &str); 2], dtype: DType) -> Result<bool> {
    let rows = |first, count| reader.read_rows(name, first, count, dtype);
    one.0.has_values(one.1, (&reader.extent(name)?.shape, dtype), rows)
}

/// A header longer than this is not a T5's: the largest published one has about 100 KB. Parsed, a header takes up to 15
/// times its length.
const LARGEST_HEADER_BYTES: u64 = 2 << 20;

/// An open file of tensors, whose header has been checked against its length.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: Mutex<File>,
    contents: Contents,
}

/// The tensors of a file, and their places.
#[derive(Debug)]
enum Contents {
    /// The header of a safetensors file, and where the bytes after it begin.
    Header { data_start: u64, header: Metadata },
    /// The tensors that were found in a file of another format.
    Table(BTreeMap<String, Extent>),
}

/// The place of a tensor's values in a file.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    /// The dtype of the values, or the file's word for one that is not supported.
    pub dtype: std::result::Result<DType, String>,
    /// The tensor's shape.
    pub shape: Vec<usize>,
    /// The first byte of the values in the file.
    pub start: u64,
    /// Bytes of the values.
    pub bytes: usize,
}

impl Reader {
    /// Opens a file and checks its header: sizes, overlaps, gaps, total length.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Safetensors`] for a damaged file.
    pub fn open(path: &Path) -> Result<Reader> {
        let damaged = |problem: String| Error::Safetensors { path: path.into(), problem };
        let mut file = regular_file::open(path).map_err(Error::io(path))?;
        let file_bytes = file.metadata().map_err(Error::io(path))?.len();
        refuse_pointer(path, &mut file)?;
        if file_bytes < 8 {
            return Err(damaged(format!("{file_bytes} bytes, expected at least 8")));
        }
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(Error::io(path))?;
        let header_bytes = u64::from_le_bytes(length);
        let max_bytes = LARGEST_HEADER_BYTES.min(file_bytes - 8);
        if header_bytes > max_bytes {
            return Err(damaged(format!("its header declares {header_bytes} bytes, expected at most {max_bytes}")));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(Error::io(path))?;
        // Deserializing checks shapes, dtypes, overflow, gaps and overlaps.
        let header: Metadata = serde_json::from_slice(&header).map_err(|e| damaged(e.to_string()))?;
        let data_start = 8 + header_bytes;
        if header.data_len() as u64 != file_bytes - data_start {
            let (declared, found) = (header.data_len(), file_bytes - data_start);
            return Err(damaged(format!("the header declares {declared} bytes of tensors, the file has {found}")));
        }
        let contents = Contents::Header { data_start, header };
        Ok(Reader { path: path.into(), file: Mutex::new(file), contents })
    }

    /// A file of another format. The caller found its tensors, whose bytes lie within the file's length.
    pub(crate) fn of_table(path: &Path, file: File, tensors: BTreeMap<String, Extent>) -> Reader {
        Reader { path: path.into(), file: Mutex::new(file), contents: Contents::Table(tensors) }
    }

    /// The same file, with other names for its tensors.
    pub(crate) fn renamed(self, name_of: &dyn Fn(&str) -> String) -> Result<Reader> {
        let renamed = |name: String| Ok((name_of(&name), self.extent(&name)?));
        let tensors = self.names().into_iter().map(renamed).collect::<Result<_>>()?;
        Ok(Reader { contents: Contents::Table(tensors), ..self })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors' names. For a safetensors file, they are in the file's order.
    pub fn names(&self) -> Vec<String> {
        match &self.contents {
            Contents::Header { header, .. } => header.offset_keys(),
            Contents::Table(tensors) => tensors.keys().cloned().collect(),
        }
    }

    /// The shape of a tensor, or `None` when the file does not have it.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        match &self.contents {
            Contents::Header { header, .. } => header.info(name).map(|info| info.shape.as_slice()),
            Contents::Table(tensors) => tensors.get(name).map(|extent| extent.shape.as_slice()),
        }
    }

    /// A value of the header's `__metadata__`.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let Contents::Header { header, .. } = &self.contents else { return None };
        header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// Reads one tensor into memory as `dtype`, piece by piece.
    ///
    /// # Errors
    /// [`Error::Safetensors`] when the file has no such tensor, [`Error::TensorMismatch`] when it is not
    /// stored in f32, f16, bf16 or f64 (u32 for u32), [`Error::Io`].
    pub fn read(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = Tensor::zeros(self.extent(name)?.shape.as_slice(), dtype, device)?;
        self.read_over(name, &tensor)?;
        Ok(tensor)
    }

    /// As [`Reader::read`], into a tensor of the same shape.
    pub(crate) fn read_over(&self, name: &str, tensor: &Tensor) -> Result<()> {
        let (extent, dtype) = (self.extent(name)?, tensor.dtype());
        let is_bytes = dtype == DType::U8 && extent.dtype == Ok(DType::U8);
        let stored = if is_bytes { DType::U8 } else { self.stored_dtype(name, &extent)? };
        if [DType::U32, DType::U8].iter().any(|of| (stored == *of) != (dtype == *of)) {
            return Err(Error::TensorMismatch {
                path: self.path.clone(),
                tensor: name.into(),
                expected: format!("values for {dtype:?}"),
                got: format!("{stored:?}"),
            });
        }
        if tensor.elem_count() == 0 {
            return Ok(());
        }
        let flat = tensor.flatten_all()?;
        let mut first = 0;
        self.pieces(&extent, PIECE_BYTES, |bytes| {
            self.expect_finite(name, bytes, stored)?;
            let count = bytes.len() / stored.size_in_bytes();
            let piece = Tensor::from_raw_buffer(bytes, stored, &[count], tensor.device())?.to_dtype(dtype)?;
            flat.slice_set(&piece, 0, first)?;
            first += count;
            Ok(())
        })
    }

    /// Reads some rows of a tensor as `dtype`: shape (count, ..), or (count,) for a vector.
    ///
    /// # Errors
    /// As [`Reader::read`].
    pub(crate) fn read_rows(&self, name: &str, first: usize, count: usize, dtype: DType) -> Result<Tensor> {
        let whole = self.extent(name)?;
        let stored = self.stored_dtype(name, &whole)?;
        let mut shape = whole.shape.clone();
        let row_bytes = shape[1..].iter().product::<usize>() * stored.size_in_bytes();
        assert!(first + count <= shape[0], "rows {first}.. of `{name}` with shape {shape:?}");
        shape[0] = count;
        let (start, bytes) = (whole.start + (first * row_bytes) as u64, count * row_bytes);
        let extent = Extent { start, bytes, shape: shape.clone(), dtype: whole.dtype };
        let mut pieces = Vec::new();
        self.pieces(&extent, PIECE_BYTES, |bytes| {
            self.expect_finite(name, bytes, stored)?;
            let values = bytes.len() / stored.size_in_bytes();
            pieces.push(Tensor::from_raw_buffer(bytes, stored, &[values], &Device::Cpu)?.to_dtype(dtype)?);
            Ok(())
        })?;
        Ok(Tensor::cat(&pieces, 0)?.reshape(shape)?)
    }

    /// Refuses a tensor that is used where it lies if not all of its values are finite. Nothing of it stays in memory.
    ///
    /// # Errors
    /// [`Error::NotFinite`], [`Error::Io`].
    pub(crate) fn check_finite(&self, name: &str) -> Result<()> {
        let extent = self.extent(name)?;
        let dtype = extent.dtype.clone().unwrap_or(DType::U8);
        self.pieces(&extent, CHECKED_BYTES, |bytes| self.expect_finite(name, bytes, dtype))
    }

    fn expect_finite(&self, name: &str, bytes: &[u8], dtype: DType) -> Result<()> {
        match are_finite(bytes, dtype) {
            true => Ok(()),
            false => Err(Error::NotFinite { path: self.path.clone(), tensor: name.into() }),
        }
    }

    /// Whether the stored tensor has exactly the values of `tensor`, in its dtype.
    pub(crate) fn equals(&self, name: &str, tensor: &Tensor) -> Result<bool> {
        self.has_values(name, (tensor.dims(), tensor.dtype()), |first, count| {
            Ok(cuda_device::copied_to(&tensor.narrow(0, first, count)?, &Device::Cpu)?)
        })
    }

    /// [`Reader::equals`] for a tensor of this shape and dtype. `rows` returns its rows, given the first row and a count.
    fn has_values(
        &self,
        name: &str,
        (shape, dtype): (&[usize], DType),
        rows: impl Fn(usize, usize) -> Result<Tensor>,
    ) -> Result<bool> {
        if self.extent(name)?.shape != shape {
            return Ok(false);
        }
        let count = shape.first().copied().unwrap_or(0);
        let most = (COMPARED_ELEMENTS / shape.iter().skip(1).product::<usize>().max(1)).max(1);
        for first in (0..count).step_by(most) {
            let count = most.min(count - first);
            let differ = self.read_rows(name, first, count, dtype)?.ne(&rows(first, count)?)?;
            if differ.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()? != 0.0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The dtype that a tensor is stored in. `None` for a dtype that is not supported, or if there is no such tensor.
    pub(crate) fn stored_as(&self, name: &str) -> Option<DType> {
        self.extent(name).ok()?.dtype.ok()
    }

    /// The supported dtypes that matrices are stored in. Vectors are negligible beside them.
    pub(crate) fn dtypes(&self) -> Vec<DType> {
        let is_matrix = |name: &&String| self.shape(name).is_some_and(|shape| shape.len() > 1);
        self.names().iter().filter(is_matrix).filter_map(|name| self.stored_as(name)).collect()
    }

    /// The offset of a tensor's bytes in the file, if they can be used there as values of `dtype`.
    pub(crate) fn place_of(&self, name: &str, dtype: DType) -> Option<usize> {
        let extent = self.extent(name).ok()?;
        let start = usize::try_from(extent.start).ok()?;
        let is_usable = extent.dtype == Ok(dtype) && start.is_multiple_of(dtype.size_in_bytes());
        (is_usable && tensor_storage::can_read_in_place(dtype)).then_some(start)
    }

    /// The file, mapped into memory.
    pub(crate) fn mapped(&self) -> Result<StoredFile> {
        let file = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        StoredFile::map(&file, &self.path)
    }

    /// Whether two names are names of the same bytes.
    pub(crate) fn are_one(&self, one: &str, other: &str) -> bool {
        let places = [one, other].map(|name| self.extent(name).ok().map(|extent| (extent.start, extent.shape)));
        places[0].is_some() && places[0] == places[1]
    }

    fn extent(&self, name: &str) -> Result<Extent> {
        let missing = || Error::Safetensors { path: self.path.clone(), problem: format!("it has no tensor `{name}`") };
        match &self.contents {
            Contents::Header { data_start, header } => {
                header.info(name).map(|info| extent_of(info, *data_start)).ok_or_else(missing)
            }
            Contents::Table(tensors) => tensors.get(name).cloned().ok_or_else(missing),
        }
    }

    fn stored_dtype(&self, name: &str, extent: &Extent) -> Result<DType> {
        let dtype = extent.dtype.clone().and_then(|dtype| match dtype {
            DType::U8 => Err("U8".to_owned()),
            dtype => Ok(dtype),
        });
        dtype.map_err(|got| Error::TensorMismatch {
            path: self.path.clone(),
            tensor: name.into(),
            expected: "values in F32, F16, BF16 or F64".into(),
            got,
        })
    }

    /// The offset of the first part of a quantised weight. The parts follow each other.
    ///
    /// # Errors
    /// [`Error::TensorMismatch`] naming the part that has another size or lies elsewhere; [`Error::Safetensors`] for a missing one.
    pub(crate) fn place_of_parts(&self, name: &str, parts: &[QuantisedPart]) -> Result<u64> {
        let (mut first, mut end) = (None, None);
        for part in parts {
            let name = part_name(name, part);
            let extent = self.extent(&name)?;
            if extent.dtype != Ok(part.dtype) || extent.shape != [part.count] {
                return Err(Error::TensorMismatch {
                    path: self.path.clone(),
                    tensor: name,
                    expected: format!("{} {:?}", part.dtype.as_str(), [part.count]),
                    got: format!(
                        "{} {:?}",
                        extent.dtype.map_or_else(|got| got, |got| got.as_str().into()),
                        extent.shape
                    ),
                });
            }
            if end.is_some_and(|end| extent.start != end) {
                let problem =
                    format!("`{name}` does not follow the part before it: expected all parts of a weight together");
                return Err(Error::Safetensors { path: self.path.clone(), problem });
            }
            first.get_or_insert(extent.start);
            end = Some(extent.start + extent.bytes as u64);
        }
        Ok(first.unwrap_or(0))
    }

    /// Some bytes of the file, as a vector of U8.
    pub(crate) fn read_bytes(&self, start: u64, bytes: usize) -> Result<Tensor> {
        let extent = Extent { dtype: Ok(DType::U8), shape: vec![bytes], start, bytes };
        let mut read = Ok(());
        let tensor = tensor_storage::from_bytes(&bytes.into(), DType::U8, |to| {
            let mut at = 0;
            read = self.pieces(&extent, PIECE_BYTES, |piece| {
                to[at..][..piece.len()].copy_from_slice(piece);
                at += piece.len();
                Ok(())
            });
        })?;
        read.map(|()| tensor)
    }

    /// Calls `f` with successive pieces of a tensor's bytes, as they are stored.
    ///
    /// # Errors
    /// As [`Reader::read`], and the errors of `f`.
    pub(crate) fn each_piece(&self, name: &str, f: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.pieces(&self.extent(name)?, PIECE_BYTES, f)
    }

    /// Calls `f` with successive pieces of a tensor's bytes, of `most` bytes each: a multiple of every dtype's size.
    fn pieces(&self, extent: &Extent, most: usize, mut f: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let mut file = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        file.seek(SeekFrom::Start(extent.start)).map_err(Error::io(&self.path))?;
        let mut buffer = vec![0; most.min(extent.bytes)];
        let mut left = extent.bytes;
        while left > 0 {
            let piece = &mut buffer[..left.min(most)];
            file.read_exact(piece).map_err(Error::io(&self.path))?;
            f(piece)?;
            left -= piece.len();
        }
        Ok(())
    }
}

/// The name of a part of a quantised weight.
pub(crate) fn part_name(weight: &str, part: &QuantisedPart) -> String {
    format!("{weight}.{}", part.name)
}

/// The place of a tensor in a safetensors file.
fn extent_of(info: &TensorInfo, data_start: u64) -> Extent {
    let dtype = match info.dtype {
        Dtype::F32 => Ok(DType::F32),
        Dtype::F16 => Ok(DType::F16),
        Dtype::BF16 => Ok(DType::BF16),
        Dtype::F64 => Ok(DType::F64),
        Dtype::U32 => Ok(DType::U32),
        Dtype::U8 => Ok(DType::U8),
        other => Err(format!("{other:?}")),
    };
    let (start, end) = info.data_offsets;
    Extent { dtype, shape: info.shape.clone(), start: data_start + start as u64, bytes: end - start }
}

/// Refuses a Git LFS pointer.
pub(crate) fn refuse_pointer(path: &Path, file: &mut File) -> Result<()> {
    let mut start = [0; 32];
    let read = file.read_exact(&mut start).map(|()| regular_file::is_lfs_pointer(&start));
    file.rewind().map_err(Error::io(path))?;
    match read {
        Ok(true) => Err(Error::Directory {
            path: path.into(),
            problem: "a pointer of Git LFS, not the file itself".into(),
            hint: "fetch the file: `git lfs pull` in the model's directory".into(),
        }),
        _ => Ok(()), // A shorter file is no pointer, and an error of the disk will come again.
    }
}

/// A tensor of a file, declared before the first value is written.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorHeader {
    /// The tensor's name.
    pub name: String,
    /// The dtype that the tensor is stored in: F32, BF16, F16, F64, U32 or U8.
    pub dtype: DType,
    /// The tensor's shape.
    pub shape: Vec<usize>,
}

/// A file being written: the header first, then tensor by tensor.
#[derive(Debug)]
pub struct Writer<W> {
    path: PathBuf,
    sink: W,
    declared: std::vec::IntoIter<TensorHeader>,
}

impl Writer<BufWriter<File>> {
    /// Creates (or truncates) the file and writes its header, as [`Writer::new`] does.
    pub fn create(path: &Path, tensors: Vec<TensorHeader>, metadata: &[(&str, &str)]) -> Result<Self> {
        let file = File::create(path).map_err(Error::io(path))?;
        Writer::new(path, BufWriter::with_capacity(PIECE_BYTES, file), tensors, metadata)
    }

    /// Flushes and syncs to the disk. Panics when a declared tensor was not written.
    pub fn finish(self) -> Result<()> {
        let path = self.path.clone();
        let mut file = self.into_sink();
        file.flush().and_then(|()| file.get_ref().sync_all()).map_err(Error::io(&path))
    }
}

impl<W: Write> Writer<W> {
    /// Writes the header to `sink`; `path` is for messages. Tensors must follow in the order given here.
    /// Wider dtypes must come before narrower ones, so that every tensor starts at a multiple of its
    /// element's size, as readers that map the file expect.
    pub fn new(path: &Path, sink: W, tensors: Vec<TensorHeader>, metadata: &[(&str, &str)]) -> Result<Self> {
        assert!(
            tensors.is_sorted_by_key(|t| std::cmp::Reverse(t.dtype.size_in_bytes())),
            "wider dtypes come first in {}",
            path.display()
        );
        Writer::in_order(path, sink, tensors, metadata)
    }

    /// [`Writer::new`] for tensors in any order. Each begins where the one before it ends.
    pub(crate) fn in_order(
        path: &Path,
        mut sink: W,
        tensors: Vec<TensorHeader>,
        metadata: &[(&str, &str)],
    ) -> Result<Self> {
        let mut header = Map::new();
        if !metadata.is_empty() {
            let metadata: Map<String, Value> = metadata.iter().map(|&(k, v)| (k.into(), v.into())).collect();
            header.insert("__metadata__".into(), metadata.into());
        }
        let mut start = 0;
        for TensorHeader { name, dtype, shape } in &tensors {
            let end = start + shape.iter().product::<usize>() * dtype.size_in_bytes();
            let entry = json!({ "dtype": dtype_name(*dtype)?, "shape": shape, "data_offsets": [start, end] });
            assert!(header.insert(name.clone(), entry).is_none(), "tensor `{name}` is declared twice");
            start = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        sink.write_all(&(header.len() as u64).to_le_bytes()).map_err(Error::io(path))?;
        sink.write_all(&header).map_err(Error::io(path))?;
        Ok(Writer { path: path.into(), sink, declared: tensors.into_iter() })
    }

    /// Writes the next tensor, converting to the declared dtype.
    pub fn write(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let TensorHeader { dtype, shape, .. } = self.next(name);
        assert_eq!(shape, tensor.dims(), "tensor `{name}` is written with another shape than declared");
        self.write_values(name, tensor, dtype)
    }

    /// [`Writer::write`] for a tensor that is made some rows at a time. `rows` is given the first row and a count.
    ///
    /// # Errors
    /// `rows` returns an error, or writing fails.
    pub fn write_by_rows(
        &mut self,
        name: &str,
        max_rows: usize,
        mut rows: impl FnMut(usize, usize) -> Result<Tensor>,
    ) -> Result<()> {
        let TensorHeader { dtype, shape, .. } = self.next(name);
        for first in (0..shape[0]).step_by(max_rows) {
            let count = max_rows.min(shape[0] - first);
            let piece = rows(first, count)?;
            let is_as_declared = piece.dims()[0] == count && piece.dims()[1..] == shape[1..];
            assert!(is_as_declared, "rows of `{name}` are written with another shape than declared");
            self.write_values(name, &piece, dtype)?;
        }
        Ok(())
    }

    /// Writes the bytes of the next tensors, which follow each other. They are made a piece at a time: `write` hands each to its argument.
    pub(crate) fn write_bytes(
        &mut self,
        names: &[String],
        write: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let bytes = |header: TensorHeader| header.shape.iter().product::<usize>() * header.dtype.size_in_bytes();
        let declared: usize = names.iter().map(|name| bytes(self.next(name))).sum();
        let mut written = 0;
        write(&mut |bytes| {
            written += bytes.len();
            self.sink.write_all(bytes).map_err(Error::io(&self.path))
        })?;
        assert_eq!(written, declared, "bytes of {names:?}");
        Ok(())
    }

    fn next(&mut self, name: &str) -> TensorHeader {
        let next = self.declared.next();
        next.filter(|next| next.name == name).unwrap_or_else(|| {
            panic!("tensor `{name}` is written out of the order declared for {}", self.path.display())
        })
    }

    fn write_values(&mut self, name: &str, tensor: &Tensor, dtype: DType) -> Result<()> {
        let flat = tensor.flatten_all()?;
        for first in (0..flat.elem_count()).step_by(WRITTEN_ELEMENTS) {
            let piece = flat.narrow(0, first, WRITTEN_ELEMENTS.min(flat.elem_count() - first))?;
            let bytes = little_endian(&cuda_device::copied_to(&piece, &Device::Cpu)?, dtype)?;
            if !are_finite(&bytes, dtype) {
                return Err(Error::NotFiniteToSave { path: self.path.clone(), tensor: name.into() });
            }
            self.sink.write_all(&bytes).map_err(Error::io(&self.path))?;
        }
        Ok(())
    }

    /// Returns the sink, neither flushed nor synced. Panics when a declared tensor was not written.
    pub fn into_sink(mut self) -> W {
        let missing = self.declared.next();
        assert!(missing.is_none(), "{}: {missing:?} was declared and not written", self.path.display());
        self.sink
    }
}

/// Writes tensors in their own dtypes, in the given order (wider dtypes moved to the front), and syncs.
pub fn write(path: &Path, tensors: &[(&str, &Tensor)], metadata: &[(&str, &str)]) -> Result<()> {
    let mut tensors = tensors.to_vec();
    tensors.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype().size_in_bytes()));
    let header = |&(name, tensor): &(&str, &Tensor)| TensorHeader {
        name: name.into(),
        dtype: tensor.dtype(),
        shape: tensor.dims().to_vec(),
    };
    let mut writer = Writer::create(path, tensors.iter().map(header).collect(), metadata)?;
    for (name, tensor) in tensors {
        writer.write(name, tensor)?;
    }
    writer.finish()
}

#[cfg(test)]
mod tests;
