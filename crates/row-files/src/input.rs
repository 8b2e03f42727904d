//! [`Input`]: the text of a file, decompressed as it is read, with the digest of its bytes.
//!
//! Invariants:
//! * Memory holds only buffers of a fixed size, whatever the file declares.
//! * A compressed file that unpacks to more than 500 times its size, and to more than 256 MiB, is an error.
//! * The digest covers all bytes of the file as stored on disk.

use std::cell::RefCell;
use std::fs::{File, Metadata};
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use flate2::read::MultiGzDecoder;
use sha2::{Digest, Sha256};

use crate::encoding::{Decoded, Encoding};
use crate::error::Error;
use crate::fasta_files;
use crate::options::ReadOptions;

/// Bytes of decompressed text that are read at a time.
const BUFFER_BYTES: usize = 64 << 10;
/// The largest window of a zstd frame: 32 MiB. `zstd` up to level 19 stays below.
const MAX_ZSTD_WINDOW_LOG: u32 = 25;
/// Decompressed bytes up to which the compression ratio is not checked.
const UNSUSPICIOUS_BYTES: u64 = 256 << 20;
/// No table of texts has so many bytes per compressed byte.
const MAX_RATIO: u64 = 500;

/// The compression of a file, from its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// No compression.
    None,
    /// gzip, one or more members.
    Gzip,
    /// Zstandard, one or more frames.
    Zstd,
}

impl Compression {
    /// Detects the compression by the magic bytes.
    pub fn detect(bytes: &[u8]) -> Self {
        match bytes {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => Self::None,
        }
    }
}

/// Length and SHA-256 of a file's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digested {
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

impl Digested {
    /// The digest of a file and of the labels beside it.
    pub(crate) fn with_labels(self, labels: Option<Digested>) -> Self {
        match labels {
            Some(labels) => Self { sha256: sha256(format!("{}{}", self.sha256, labels.sha256).as_bytes()), ..self },
            None => self,
        }
    }
}

/// The text of a file.
pub struct Input {
    path: PathBuf,
    reader: BufReader<Box<dyn Read>>,
    raw: Rc<RefCell<Raw>>,
    before: Metadata,
    compression: Compression,
    most_row_bytes: usize,
}

/// The file's stored bytes, counted and digested.
struct Raw {
    file: File,
    bytes: u64,
    hash: Option<Sha256>,
}

impl Read for Raw {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.bytes += read as u64;
        if let Some(hash) = &mut self.hash {
            hash.update(&buffer[..read]);
        }
        Ok(read)
    }
}

struct Shared(Rc<RefCell<Raw>>);

impl Read for Shared {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.borrow_mut().read(buffer)
    }
}

/// A decoder's output, with a limit on the compression ratio.
struct Unpacked<R> {
    decoder: R,
    raw: Rc<RefCell<Raw>>,
    bytes: u64,
}

impl<R: Read> Read for Unpacked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.decoder.read(buffer)?;
        self.bytes += read as u64;
        if self.bytes > UNSUSPICIOUS_BYTES && self.bytes / self.raw.borrow().bytes.max(1) > MAX_RATIO {
            let packed = self.raw.borrow().bytes;
            return Err(io::Error::other(format!(
                "{packed} bytes unpack to more than {} MiB: more than {MAX_RATIO} to 1",
                self.bytes >> 20
            )));
        }
        Ok(read)
    }
}

impl Input {
    /// Opens a file. With `digest`, its bytes are hashed as they are read.
    pub fn open(path: &Path, options: &ReadOptions, digest: bool) -> Result<Self, Error> {
        let failed = |source| Error::io(path, "open", source);
        let mut file = regular_file::open(path).map_err(failed)?;
        let before = file.metadata().map_err(failed)?;
        let mut magic = Vec::with_capacity(4);
        (&mut file).take(4).read_to_end(&mut magic).map_err(failed)?;
        file.rewind().map_err(failed)?;
        let raw = Rc::new(RefCell::new(Raw { file, bytes: 0, hash: digest.then(Sha256::new) }));
        let shared = || BufReader::with_capacity(BUFFER_BYTES, Shared(Rc::clone(&raw)));
        let unpacked = |decoder: Box<dyn Read>| Box::new(Unpacked { decoder, raw: Rc::clone(&raw), bytes: 0 });
        let compression = Compression::detect(&magic);
        let reader: Box<dyn Read> = match compression {
            Compression::None => Box::new(Shared(Rc::clone(&raw))),
            Compression::Gzip => unpacked(Box::new(MultiGzDecoder::new(shared()))),
            Compression::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(shared()).map_err(failed)?;
                decoder.window_log_max(MAX_ZSTD_WINDOW_LOG).map_err(failed)?;
                unpacked(Box::new(decoder))
            }
        };
        let reader: Box<dyn Read> = match options.encoding.filter(|encoding| !encoding.is_utf8()) {
            Some(encoding) => Box::new(Decoded::new(reader, encoding)),
            None => reader,
        };
        let reader = BufReader::with_capacity(BUFFER_BYTES, reader);
        let most_row_bytes = options.max_row_bytes;
        let mut input = Self { path: path.to_owned(), reader, raw, before, compression, most_row_bytes };
        // The byte order mark that Windows puts before UTF-8.
        if input.peek(3)?.starts_with(b"\xef\xbb\xbf") {
            input.consume(3);
        }
        Ok(input)
    }

    /// The file, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The share of the file's bytes that were read, between 0 and 1.
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    pub fn share_read(&self) -> f64 {
        (self.raw.borrow().bytes as f64 / self.before.len().max(1) as f64).min(1.)
    }

    /// Returns the next bytes; empty only at the end.
    pub fn buffer(&mut self) -> Result<&[u8], Error> {
        loop {
            match self.reader.fill_buf() {
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(self.reader.buffer())
    }

    /// Consumes bytes of [`Input::buffer`].
    pub fn consume(&mut self, bytes: usize) {
        self.reader.consume(bytes);
    }

    /// Returns the first bytes of the file, at most `wanted`, without consuming them. Call it before any reading.
    fn peek(&mut self, wanted: usize) -> Result<&[u8], Error> {
        // One read fills a fresh buffer. It may be short only for a decoder's first block.
        let bytes = self.buffer()?;
        Ok(&bytes[..bytes.len().min(wanted)])
    }

    fn failed(&self, error: io::Error) -> Error {
        // A plain file has no compression that could be damaged.
        if self.compression == Compression::None {
            return Error::Io { path: self.path.clone(), action: "read", source: error };
        }
        if error.to_string().contains("too much memory") {
            let reason = "its zstd frame needs a window of more than 32 MiB of memory";
            return Error::Compressed { path: self.path.clone(), reason: reason.to_owned() };
        }
        Error::io(&self.path, "read", error)
    }

    /// How the file is compressed.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// The longest row that may be held.
    pub fn most_row_bytes(&self) -> usize {
        self.most_row_bytes
    }

    /// Appends the rest of the line to `line`, without its end, up to the longest row. `None` at the end of the file.
    /// `Some(false)` if the line was longer; its rest was skipped.
    pub fn read_line(&mut self, line: &mut Vec<u8>) -> Result<Option<bool>, Error> {
        let most = self.most_row_bytes;
        let (mut is_whole, mut is_empty) = (true, true);
        loop {
            let buffer = self.buffer()?;
            if buffer.is_empty() {
                return Ok((!is_empty).then_some(is_whole));
            }
            is_empty = false;
            let end = memchr::memchr(b'\n', buffer);
            let part = &buffer[..end.unwrap_or(buffer.len())];
            if line.len() + part.len() <= most {
                append(line, part);
            } else {
                is_whole = false;
            }
            let used = end.map_or(buffer.len(), |end| end + 1);
            self.consume(used);
            if end.is_some() {
                return Ok(Some(is_whole));
            }
        }
    }

    /// Reads the remaining bytes and returns the digest of the whole file.
    ///
    /// # Errors
    /// I/O errors; [`Error::Changed`] if the file changed.
    pub fn finish(self) -> Result<Digested, Error> {
        let Self { path, reader, raw, before, .. } = self;
        drop(reader);
        let mut raw = raw.borrow_mut();
        let failed = |source| Error::Io { path: path.clone(), action: "read", source };
        let mut rest = vec![0; BUFFER_BYTES];
        while raw.read(&mut rest).map_err(failed)? > 0 {}
        let after = raw.file.metadata().map_err(failed)?;
        if after.len() != raw.bytes || after.modified().ok() != before.modified().ok() {
            return Err(Error::Changed { path });
        }
        let hash = raw.hash.take().unwrap_or_default().finalize();
        Ok(Digested { bytes: raw.bytes, sha256: hexadecimal(&hash) })
    }
}

/// Appends to a row. Its buffer grows by a quarter: while the allocator copies, the old and the new one exist at once.
pub(crate) fn append(row: &mut Vec<u8>, part: &[u8]) {
    if row.capacity() - row.len() < part.len() {
        row.reserve_exact(part.len().max(row.len() / 4).max(256));
    }
    row.extend_from_slice(part);
}

/// The encoding that a file of texts seems to have, if it is not UTF-8.
pub(crate) fn guess_encoding(path: &Path, options: &ReadOptions) -> Option<Encoding> {
    let mut input = Input::open(path, options, false).ok()?;
    let mut sample = Vec::new();
    while sample.len() < SAMPLE_BYTES {
        let buffer = input.buffer().ok()?;
        if buffer.is_empty() {
            break;
        }
        sample.extend_from_slice(buffer);
        let used = buffer.len();
        input.consume(used);
    }
    // The sample must not end within a letter.
    let whole = memchr::memrchr(b'\n', &sample).filter(|_| sample.len() >= SAMPLE_BYTES).unwrap_or(sample.len());
    Encoding::guess(&sample[..whole])
}

/// Bytes at the beginning of a file from which its encoding is guessed.
const SAMPLE_BYTES: usize = 1 << 20;

/// Computes the digest of a file's bytes, and of those of the labels beside it, if it has such.
///
/// # Errors
/// The file cannot be read.
pub fn digest(path: &Path) -> Result<Digested, Error> {
    let labels = fasta_files::labels_beside(path).map(|labels| digest_alone(&labels)).transpose()?;
    Ok(digest_alone(path)?.with_labels(labels))
}

fn digest_alone(path: &Path) -> Result<Digested, Error> {
    let failed = |source| Error::Io { path: path.to_owned(), action: "read", source };
    let file = regular_file::open(path).map_err(failed)?;
    let mut raw = Raw { file, bytes: 0, hash: Some(Sha256::new()) };
    let mut buffer = vec![0; 4 * BUFFER_BYTES];
    while raw.read(&mut buffer).map_err(failed)? > 0 {}
    let hash = raw.hash.take().unwrap_or_default().finalize();
    Ok(Digested { bytes: raw.bytes, sha256: hexadecimal(&hash) })
}

/// Whether a file is parquet that was compressed again as a whole.
///
/// # Errors
/// The file cannot be read.
pub fn is_compressed_parquet(path: &Path) -> Result<bool, Error> {
    let mut input = Input::open(path, &ReadOptions::default(), false)?;
    Ok(input.compression() != Compression::None && input.peek(4)? == b"PAR1")
}

/// Writes the decompressed content of a file.
///
/// # Errors
/// The file cannot be read; [`Error::Write`] if `out` fails.
pub fn unpack(path: &Path, out: &mut impl io::Write) -> Result<(), Error> {
    let mut input = Input::open(path, &ReadOptions::default(), false)?;
    loop {
        let buffer = input.buffer()?;
        if buffer.is_empty() {
            return out.flush().map_err(Error::Write);
        }
        out.write_all(buffer).map_err(Error::Write)?;
        let used = buffer.len();
        input.consume(used);
    }
}

/// The SHA-256 of bytes, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
