//! A file of vectors: NumPy's `.npy`, parquet with a list in each row, or a JSON object per line. It appears complete or not at all.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use durable_files::{AtomicFile, Leftover};
use row_files::VectorWriter;

use crate::failure::{Failure, Outcome};
use crate::files::outputs;

/// Bytes that are written together.
const PIECE_BYTES: usize = 1 << 16;
/// Bytes of the header of a `.npy` file, which is written again with the number of rows.
const HEADER_BYTES: usize = 128;

/// The form of a file, by its extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Npy,
    Parquet,
    Jsonl,
}

impl Form {
    pub fn from_path(path: &Path) -> Outcome<Form> {
        match path.extension().and_then(OsStr::to_str) {
            Some("npy") => Ok(Form::Npy),
            Some("parquet") => Ok(Form::Parquet),
            Some("jsonl") => Ok(Form::Jsonl),
            _ => Err(Failure::usage(format!(
                "--output {}: expected a file with the ending .npy, .parquet or .jsonl",
                path.display()
            ))
            .hint("use `--output vectors.npy`")),
        }
    }

    /// Bytes for writing vectors of this width.
    pub fn bytes(self, width: usize) -> u64 {
        match self {
            Form::Npy => PIECE_BYTES as u64,
            Form::Parquet => row_files::VECTOR_GROUP_BYTES * 3 + 8 * width as u64,
            // A number has up to sixteen letters.
            Form::Jsonl => (PIECE_BYTES + 32 * width) as u64,
        }
    }
}

/// A file of vectors that is being written. Dropping it before [`VectorFile::finish`] leaves nothing.
pub struct VectorFile {
    file: AtomicFile,
    path: PathBuf,
    width: usize,
    rows: u64,
    writer: Writer,
}

enum Writer {
    Npy(BufWriter<File>),
    Parquet(VectorWriter<File>),
    Jsonl(BufWriter<File>),
}

impl VectorFile {
    /// Begins a file that will become `path`. An existing file of that name is replaced at the end.
    pub fn begin(form: Form, path: &Path, width: usize) -> Outcome<Self> {
        outputs::make_directory_of(path)?;
        let file = AtomicFile::create(path)?;
        let failed = |error| Failure::io("write the vectors", path, &error);
        let open = file.file().try_clone().map_err(failed)?;
        let buffered = |file| BufWriter::with_capacity(PIECE_BYTES, file);
        let writer = match form {
            Form::Npy => {
                let mut npy = buffered(open);
                npy.write_all(&header(0, width)).map_err(failed)?;
                Writer::Npy(npy)
            }
            Form::Parquet => Writer::Parquet(VectorWriter::new(open, "embedding", width).map_err(failed)?),
            Form::Jsonl => Writer::Jsonl(buffered(open)),
        };
        Ok(Self { file, path: path.to_owned(), width, rows: 0, writer })
    }

    /// The incomplete file, for a signal that ends the process.
    pub fn leftover(&self) -> Leftover {
        self.file.leftover()
    }

    /// Adds vectors, one after the other.
    pub fn add(&mut self, vectors: &[f32]) -> Outcome<()> {
        let written = match &mut self.writer {
            Writer::Npy(file) => vectors.iter().try_for_each(|value| file.write_all(&value.to_le_bytes())),
            Writer::Parquet(writer) => vectors.chunks(self.width).try_for_each(|vector| writer.write(vector)),
            Writer::Jsonl(file) => (self.rows..).zip(vectors.chunks(self.width)).try_for_each(|(row, vector)| {
                let vector = serde_json::to_string(vector).map_err(std::io::Error::other)?;
                writeln!(file, "{{\"row\":{row},\"embedding\":{vector}}}")
            }),
        };
        self.rows += (vectors.len() / self.width) as u64;
        written.map_err(|error| Failure::io("write the vectors", &self.path, &error))
    }

    /// Renames the file into place. Returns the number of vectors.
    pub fn finish(self) -> Outcome<u64> {
        let Self { file, path, width, rows, writer } = self;
        let written = match writer {
            Writer::Npy(mut npy) => npy
                .seek(SeekFrom::Start(0))
                .and_then(|_| npy.write_all(&header(rows, width)))
                .and_then(|()| npy.flush()),
            Writer::Parquet(writer) => writer.finish(),
            Writer::Jsonl(mut file) => file.flush(),
        };
        written.map_err(|error| Failure::io("write the vectors", &path, &error))?;
        file.commit()?;
        Ok(rows)
    }
}

/// The header of NumPy's format 1.0, padded with spaces.
fn header(rows: u64, width: usize) -> Vec<u8> {
    let dictionary = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    let room = HEADER_BYTES - 10;
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((room as u16).to_le_bytes());
    bytes.extend(format!("{dictionary:<width$}\n", width = room - 1).into_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_same_length_for_any_number_of_rows() {
        let text = |rows| String::from_utf8_lossy(&header(rows, 1024)[10..]).into_owned();
        assert_eq!(header(0, 1).len(), HEADER_BYTES);
        assert_eq!(header(u64::MAX, 1 << 24).len(), HEADER_BYTES);
        assert!(text(3).starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 1024), }"), "{}", text(3));
    }
}
