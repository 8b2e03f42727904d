//! Length and SHA-256 of a file.

use std::io::{self, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

/// Bytes of a file that are buffered before they are written. Those of a large tensor come in larger pieces, and are not buffered.
pub(crate) const BUFFER_BYTES: usize = 128 << 10;

/// A writer that knows the length and the SHA-256 of the bytes written through it, so that they need not be read again.
pub(crate) struct HashingWriter<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> HashingWriter<W> {
    pub(crate) fn new(inner: W) -> Self {
        HashingWriter { inner, hash: Sha256::new(), bytes: 0 }
    }

    /// Returns the writer, the number of bytes and their SHA-256 in hexadecimal.
    pub(crate) fn finish(self) -> (W, u64, String) {
        (self.inner, self.bytes, hexadecimal(&self.hash.finalize()))
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// The length and the SHA-256 of a file of `bytes` bytes, read in small pieces. Of a longer file, one byte more than `bytes` is read.
/// `None` when `interrupted` returns true before the end.
///
/// # Errors
/// I/O errors; the file is not a regular one.
pub(crate) fn checksum(path: &Path, bytes: u64, interrupted: &dyn Fn() -> bool) -> io::Result<Option<(u64, String)>> {
    const PIECE_BYTES: usize = 1 << 18;
    let mut file = regular_file::open(path)?.take(bytes.saturating_add(1));
    let mut writer = HashingWriter::new(io::sink());
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        if interrupted() {
            return Ok(None);
        }
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => writer.write_all(&piece[..read])?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let (_, bytes, sha256) = writer.finish();
    Ok(Some((bytes, sha256)))
}

/// The SHA-256 of bytes, in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn the_checksum_taken_while_writing_is_that_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut writer = HashingWriter::new(File::create(&path).unwrap());
        writer.write_all(b"abc").unwrap();
        let (_, bytes, sha256) = writer.finish();
        assert_eq!(sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(checksum(&path, 3, &|| false).unwrap(), Some((bytes, sha256)));
        assert_eq!(checksum(&path, 1, &|| false).unwrap().unwrap().0, 2, "longer than it should be");
        assert_eq!(checksum(&path, 3, &|| true).unwrap(), None);
    }
}
