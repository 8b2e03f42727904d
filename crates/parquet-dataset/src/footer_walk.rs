//! Walks over a footer: reads its bytes in pieces, and passes the wanted fields to a [`Sink`].
//!
//! Footers of files with many columns have tens of megabytes. A reader of two columns needs a few kilobytes of them.
//! The walk holds at most [`PIECE_BYTES`] of a footer, one schema path and the wanted chunks of one row group.
//!
//! Invariants: no declared size is trusted beyond the bytes that exist; the number of row groups and the depth of the
//! schema have limits; every byte of the footer enters its hash, in order.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{Error, Fault, Location};
use crate::io::Handle;
use crate::schema::{Leaf, SchemaWalk};
use crate::thrift::{Compact, Source, kind};

const MAGIC: &[u8] = b"PAR1";
const ENCRYPTED_MAGIC: &[u8] = b"PARE";
/// Bytes of the first read of a footer, and of each later piece.
const PIECE_BYTES: u64 = 64 * 1024;
/// Longer footers are refused. A footer of 1000 row groups of 1000 columns is about 100 MiB.
const MAX_FOOTER_BYTES: u64 = 256 << 20;
/// Files with more row groups are refused; with row groups of 128 MiB such a file would have 8 TiB.
const MAX_ROW_GROUPS: usize = 1 << 16;
/// The most bytes of the writer's name.
const MAX_NAME_BYTES: usize = 4096;
/// The key under which Hugging Face's `datasets` describes the columns, and the most bytes of that description.
const FEATURES_KEY: &[u8] = b"huggingface";
const MAX_FEATURES_BYTES: usize = 1 << 20;

/// A column chunk as its footer declares it. No field has been checked yet.
#[derive(Debug, Clone, Default)]
pub(crate) struct RawChunk {
    /// The index among the leaves.
    pub(crate) column: usize,
    pub(crate) is_in_another_file: bool,
    pub(crate) has_metadata: bool,
    pub(crate) is_encrypted: bool,
    pub(crate) codec: i32,
    pub(crate) values: i64,
    pub(crate) compressed_bytes: i64,
    pub(crate) uncompressed_bytes: i64,
    pub(crate) data_page_offset: i64,
    pub(crate) dictionary_page_offset: Option<i64>,
    pub(crate) offset_index_offset: Option<i64>,
    pub(crate) offset_index_bytes: Option<i64>,
    /// Bytes of all values without their lengths.
    pub(crate) value_bytes: Option<i64>,
    /// Bit `i` stands for value `i` of the format's `Encoding`.
    pub(crate) encodings: u32,
}

/// Receives the contents of a footer. The schema comes before the row groups.
pub(crate) trait Sink {
    /// Takes the next leaf.
    fn leaf(&mut self, index: usize, leaf: &Leaf<'_>) -> Result<(), Error>;
    /// Called after the last leaf.
    fn end_of_schema(&mut self, leaves: usize) -> Result<(), Error>;
    /// Whether chunks of this leaf are wanted.
    fn wants(&self, column: usize) -> bool;
    /// Takes a row group with its wanted chunks, in the order of leaves. Pages end before `data_end`.
    fn row_group(&mut self, number: usize, rows: i64, chunks: &[RawChunk], data_end: u64) -> Result<(), Error>;
}

/// Fields of a footer that its [`Sink`] does not receive.
pub(crate) struct Walked {
    pub(crate) rows: i64,
    pub(crate) created_by: Option<String>,
    /// The description of the columns by Hugging Face's `datasets`, in JSON.
    pub(crate) features: Option<String>,
    /// SHA-256 of the footer's bytes.
    pub(crate) hash: [u8; 32],
}

/// The footer's bytes, in order.
struct FooterBytes<'a> {
    handle: &'a Handle,
    piece: Vec<u8>,
    at: usize,
    /// The start of the next piece, and the end of the footer.
    next: u64,
    end: u64,
    hash: Sha256,
}

impl Source for FooterBytes<'_> {
    #[inline]
    fn byte(&mut self) -> Result<u8, Fault> {
        if self.at == self.piece.len() {
            self.read_piece()?;
        }
        let byte = self.piece[self.at];
        self.at += 1;
        Ok(byte)
    }

    fn remaining(&self) -> u64 {
        (self.piece.len() - self.at) as u64 + self.end - self.next
    }

    fn take(&mut self, mut count: u64, mut to: Option<&mut Vec<u8>>) -> Result<(), Fault> {
        while count > 0 {
            if self.at == self.piece.len() {
                self.read_piece()?;
            }
            let step = count.min((self.piece.len() - self.at) as u64) as usize;
            if let Some(to) = &mut to {
                to.extend_from_slice(&self.piece[self.at..self.at + step]);
            }
            self.at += step;
            count -= step as u64;
        }
        Ok(())
    }
}

impl FooterBytes<'_> {
    #[cold]
    fn read_piece(&mut self) -> Result<(), Fault> {
        let count = (self.end - self.next).min(PIECE_BYTES);
        if count == 0 {
            return Fault::unexpected_eof("the metadata ends in the middle of a field");
        }
        self.piece.resize(count as usize, 0);
        self.handle.read_exact_at(&mut self.piece, self.next)?;
        self.hash.update(&self.piece);
        (self.at, self.next) = (0, self.next + count);
        Ok(())
    }

    /// Bytes after the metadata belong to the hash, too.
    fn finish(mut self) -> Result<[u8; 32], Fault> {
        while self.next < self.end {
            self.read_piece()?;
        }
        Ok(self.hash.finalize().into())
    }
}

/// Walks the footer of a file of `file_bytes` bytes.
pub(crate) fn walk(path: &Path, handle: &Handle, file_bytes: u64, sink: &mut dyn Sink) -> Result<Walked, Error> {
    let (bytes, data_end) = find(path, handle, file_bytes)?;
    let mut walk = Walk { path, input: Compact::from_source(bytes), data_end, sink };
    let walked = walk.file_metadata()?;
    let hash = walk.input.into_source().finish();
    Ok(Walked { hash: hash.map_err(|fault| footer_error(path, &fault))?, ..walked })
}

/// Finds the footer and the end of the data.
fn find<'a>(path: &Path, handle: &'a Handle, file_bytes: u64) -> Result<(FooterBytes<'a>, u64), Error> {
    let not_parquet = |reason: String| Error::NotParquet { path: path.to_owned(), reason };
    if file_bytes < 12 {
        return Err(not_parquet(format!("it is {file_bytes} bytes long, expected at least 12")));
    }
    let mut piece = vec![0; file_bytes.min(PIECE_BYTES) as usize];
    let tail = file_bytes - piece.len() as u64;
    handle
        .read_exact_at(&mut piece, tail)
        .map_err(|fault| fault.at(Location { path: path.to_owned(), ..Location::default() }))?;
    let ending = piece.split_off(piece.len() - 8);
    if &ending[4..] == ENCRYPTED_MAGIC {
        return Err(Error::Encrypted { path: path.to_owned() });
    }
    if &ending[4..] != MAGIC {
        return Err(not_parquet(format!("it ends with {:?}, expected PAR1", String::from_utf8_lossy(&ending[4..]))));
    }
    let bytes = u64::from(u32::from_le_bytes([ending[0], ending[1], ending[2], ending[3]]));
    if bytes > file_bytes - 12 || bytes > MAX_FOOTER_BYTES {
        let limit = (file_bytes - 12).min(MAX_FOOTER_BYTES);
        let reason = format!("it declares {bytes} bytes, expected at most {limit}");
        return Err(Error::Footer { path: path.to_owned(), reason });
    }
    let end = file_bytes - 8;
    let starts_at = end - bytes;
    let mut hash = Sha256::new();
    let (next, piece) = match starts_at.checked_sub(tail) {
        Some(start) => {
            piece.drain(..start as usize);
            hash.update(&piece);
            (end, piece)
        }
        None => (starts_at, Vec::new()),
    };
    Ok((FooterBytes { handle, piece, at: 0, next, end, hash }, starts_at))
}

fn footer_error(path: &Path, fault: &Fault) -> Error {
    Error::Footer { path: path.to_owned(), reason: fault.reason() }
}

struct Walk<'a> {
    path: &'a Path,
    input: Compact<FooterBytes<'a>>,
    data_end: u64,
    sink: &'a mut dyn Sink,
}

/// A fault of the footer's bytes, or the sink's error about their content.
enum Stop {
    Fault(Fault),
    Sink(Error),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Walk<'_> {
    /// The fields, without the hash.
    fn file_metadata(&mut self) -> Result<Walked, Error> {
        self.fields().map_err(|stop| match stop {
            Stop::Sink(error) => error,
            Stop::Fault(Fault::File(source)) => Error::io(self.path, "read", source),
            Stop::Fault(fault) => footer_error(self.path, &fault),
        })
    }

    fn fields(&mut self) -> Result<Walked, Stop> {
        let (mut rows, mut created_by, mut features, mut has_schema, mut last) = (None, None, None, false, 0);
        while let Some(field) = self.input.field(&mut last)? {
            match (field.id, field.kind) {
                (2, kind::LIST) if !has_schema => {
                    self.schema()?;
                    has_schema = true;
                }
                (3, kind::I64) => rows = Some(self.input.i64()?),
                (4, kind::LIST) if has_schema => self.row_groups()?,
                (4, _) => return Err(corrupt("its row groups come before its schema")),
                (5, kind::LIST) => features = self.features()?,
                (6, kind::BINARY) => {
                    let name = self.input.binary(MAX_NAME_BYTES)?;
                    created_by = Some(String::from_utf8_lossy(&name).into_owned());
                }
                (_, other) => self.input.skip(other)?,
            }
        }
        match rows {
            Some(rows) if has_schema => Ok(Walked { rows, created_by, features, hash: [0; 32] }),
            _ => Err(corrupt("it lacks its schema or its number of rows")),
        }
    }

    /// The value of [`FEATURES_KEY`] in the list of keys and values.
    fn features(&mut self) -> Result<Option<String>, Stop> {
        let (element, length) = self.input.list()?;
        if element != kind::STRUCT && length > 0 {
            return Err(corrupt("its keys and values are not a list of structs"));
        }
        let mut features = None;
        for _ in 0..length {
            let (mut is_wanted, mut last) = (false, 0);
            while let Some(field) = self.input.field(&mut last)? {
                match (field.id, field.kind) {
                    (1, kind::BINARY) => {
                        is_wanted = self.input.short_binary(FEATURES_KEY.len())?.as_deref() == Some(FEATURES_KEY);
                    }
                    (2, kind::BINARY) if is_wanted => features = self.input.short_binary(MAX_FEATURES_BYTES)?,
                    (_, other) => self.input.skip(other)?,
                }
            }
        }
        Ok(features.and_then(|bytes| String::from_utf8(bytes).ok()))
    }

    fn schema(&mut self) -> Result<(), Stop> {
        let (element, length) = self.input.list()?;
        if element != kind::STRUCT {
            return Err(corrupt("its schema is not a list of elements"));
        }
        let mut walk = SchemaWalk::default();
        for _ in 0..length {
            if let Some((index, leaf)) = walk.element(&mut self.input)? {
                self.sink.leaf(index, &leaf).map_err(Stop::Sink)?;
            }
        }
        let leaves = walk.finish()?;
        self.sink.end_of_schema(leaves).map_err(Stop::Sink)
    }

    fn row_groups(&mut self) -> Result<(), Stop> {
        let (element, length) = self.input.list()?;
        if element != kind::STRUCT && length > 0 {
            return Err(corrupt("its row groups are not a list of structs"));
        }
        if length > MAX_ROW_GROUPS {
            return Err(Fault::Corrupt(
                format!("it has {length} row groups, expected at most {MAX_ROW_GROUPS}").into(),
            )
            .into());
        }
        let mut chunks = Vec::new();
        for number in 0..length {
            chunks.clear();
            let (mut rows, mut last) = (None, 0);
            while let Some(field) = self.input.field(&mut last)? {
                match (field.id, field.kind) {
                    (1, kind::LIST) if chunks.is_empty() => self.chunks(&mut chunks)?,
                    (3, kind::I64) => rows = Some(self.input.i64()?),
                    (_, other) => self.input.skip(other)?,
                }
            }
            let Some(rows) = rows else { return Err(corrupt("a row group lacks its number of rows")) };
            self.sink.row_group(number, rows, &chunks, self.data_end).map_err(Stop::Sink)?;
        }
        Ok(())
    }

    fn chunks(&mut self, chunks: &mut Vec<RawChunk>) -> Result<(), Stop> {
        let (element, length) = self.input.list()?;
        if element != kind::STRUCT && length > 0 {
            return Err(corrupt("the columns of a row group are not a list of structs"));
        }
        for column in 0..length {
            match self.sink.wants(column) {
                true => chunks.push(column_chunk(&mut self.input, column)?),
                false => self.input.skip_struct()?,
            }
        }
        Ok(())
    }
}

fn corrupt(reason: &'static str) -> Stop {
    Stop::Fault(Fault::Corrupt(reason.into()))
}

fn column_chunk<S: Source>(input: &mut Compact<S>, column: usize) -> Result<RawChunk, Fault> {
    let mut chunk = RawChunk { column, ..RawChunk::default() };
    let mut last = 0;
    while let Some(field) = input.field(&mut last)? {
        match (field.id, field.kind) {
            (1, kind::BINARY) => chunk.is_in_another_file = input.skip_binary()? > 0,
            (3, kind::STRUCT) => chunk_metadata(input, &mut chunk)?,
            (4, kind::I64) => chunk.offset_index_offset = Some(input.i64()?),
            (5, kind::I32) => chunk.offset_index_bytes = Some(input.i64()?),
            // How the column is encrypted, or its encrypted metadata.
            (8 | 9, other) => {
                chunk.is_encrypted = true;
                input.skip(other)?;
            }
            (_, other) => input.skip(other)?,
        }
    }
    Ok(chunk)
}

fn chunk_metadata<S: Source>(input: &mut Compact<S>, chunk: &mut RawChunk) -> Result<(), Fault> {
    // Required: the codec, the number of values, both sizes and the first page's offset.
    let (mut found, mut last) = (0u8, 0);
    while let Some(field) = input.field(&mut last)? {
        match (field.id, field.kind) {
            (2, kind::LIST) => {
                let (_, length) = input.list()?;
                for _ in 0..length {
                    let encoding = input.i32()?;
                    chunk.encodings |= u32::try_from(encoding).ok().and_then(|bit| 1u32.checked_shl(bit)).unwrap_or(0);
                }
            }
            (4, kind::I32) => (chunk.codec, found) = (input.i32()?, found | 1),
            (5, kind::I64) => (chunk.values, found) = (input.i64()?, found | 2),
            (6, kind::I64) => (chunk.uncompressed_bytes, found) = (input.i64()?, found | 4),
            (7, kind::I64) => (chunk.compressed_bytes, found) = (input.i64()?, found | 8),
            (9, kind::I64) => (chunk.data_page_offset, found) = (input.i64()?, found | 16),
            (11, kind::I64) => chunk.dictionary_page_offset = Some(input.i64()?),
            (16, kind::STRUCT) => {
                let mut last = 0;
                while let Some(field) = input.field(&mut last)? {
                    match (field.id, field.kind) {
                        (1, kind::I64) => chunk.value_bytes = Some(input.i64()?),
                        (_, other) => input.skip(other)?,
                    }
                }
            }
            (_, other) => input.skip(other)?,
        }
    }
    if found != 31 {
        return Fault::corrupt("the metadata of a column lacks its codec, a size or its place");
    }
    chunk.has_metadata = true;
    Ok(())
}
