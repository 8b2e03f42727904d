//! The vectors of a command that is not done yet: `OUTPUT.KEY.partial`, numbers of f32 one after the other, whatever the form of the output.
//!
//! The key follows from everything that vectors depend on, so the same command goes on with them after a kill, and another one does not.
//! Windows of texts are computed whole, in the same batches as without an interruption, so the bytes are the same.

use std::io::{BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};

use durable_files::GrowingFile;

use super::vector_file::{Form, VectorFile};
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::screen::stop::Stop;

/// Vectors that are read together.
const TOGETHER: usize = 16;

/// The growing file.
pub struct GrowingVectors {
    file: GrowingFile,
    width: usize,
    /// Vectors in the file.
    rows: u64,
}

impl GrowingVectors {
    /// Opens the file of a command whose vectors follow from `depends_on` and these files, or begins it. Whole windows of vectors stay in it.
    ///
    /// # Errors
    /// The file cannot be written, or another command writes it.
    pub fn open(
        output: &Path,
        (depends_on, files): (&str, &[PathBuf]),
        (width, window): (usize, usize),
        goes_on: bool,
    ) -> Outcome<Self> {
        outputs::make_directory_of(output)?;
        let file = GrowingFile::open(output, outputs::key((depends_on, width, window), files))?;
        let mut this = Self { file, width, rows: 0 };
        let bytes = this.file.file().metadata().map_err(|error| this.failed("read", &error))?.len();
        let of_window = (window * width * size_of::<f32>()) as u64;
        let windows = if goes_on { bytes / of_window } else { 0 };
        this.file.file().set_len(windows * of_window).map_err(|error| this.failed("shorten", &error))?;
        this.rows = windows * window as u64;
        Ok(this)
    }

    /// Where the vectors are until all are there.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The vectors that are there.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Adds the vectors of a window.
    pub fn add(&mut self, vectors: &[f32]) -> Outcome<()> {
        let bytes: Vec<u8> = vectors.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.file.file().write_all(&bytes).map_err(|error| self.failed("write", &error))?;
        self.rows += (vectors.len() / self.width) as u64;
        Ok(())
    }

    /// Writes the output, and removes this file. Returns the number of vectors.
    pub fn finish(self, form: Form, output: &Path, stop: &Stop) -> Outcome<u64> {
        let begin = || VectorFile::begin(form, output, self.width);
        let mut made = stop.remove_at_end(begin, VectorFile::leftover)?;
        let mut file = self.file.file();
        file.rewind().map_err(|error| self.failed("read", &error))?;
        let mut reader = BufReader::new(file);
        let mut bytes = vec![0; TOGETHER * self.width * size_of::<f32>()];
        let mut rest = self.rows;
        while rest > 0 {
            let rows = rest.min(TOGETHER as u64);
            let part = &mut bytes[..rows as usize * self.width * size_of::<f32>()];
            reader.read_exact(part).map_err(|error| self.failed("read", &error))?;
            let values: Vec<f32> = part.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
            made.add(&values)?;
            rest -= rows;
        }
        let rows = made.finish()?;
        self.file.remove()?;
        Ok(rows)
    }

    fn failed(&self, what: &'static str, error: &std::io::Error) -> Failure {
        Failure::io(what, self.file.path(), error)
    }
}
