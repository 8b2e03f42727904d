//! [`Unpacked`]: compressed parquet files, which are unpacked into a temporary directory to be read.

use std::path::{Path, PathBuf};

use durable_files::AtomicFile;

use crate::failure::{Failure, Outcome};
use crate::files::run_dir::{UNPACKED, is_own_name};

/// A temporary directory for files that a command reads. Dropping the result removes it.
pub fn scratch() -> Outcome<durable_files::Scratch> {
    let temporary = std::env::temp_dir();
    durable_files::Scratch::remove_abandoned(&temporary, is_own_name);
    Ok(durable_files::Scratch::create_in(&temporary, is_own_name)?)
}

/// Compressed parquet files, unpacked while they are read.
#[derive(Default)]
pub struct Unpacked {
    scratch: Option<durable_files::Scratch>,
    count: usize,
}

impl Unpacked {
    /// The files, with an unpacked file in place of each compressed parquet file.
    pub fn files(&mut self, files: &[PathBuf], say: fn(&str)) -> Outcome<Vec<PathBuf>> {
        files.iter().map(|path| self.file(path, say)).collect()
    }

    fn file(&mut self, path: &Path, say: fn(&str)) -> Outcome<PathBuf> {
        if !row_files::is_compressed_parquet(path)? {
            return Ok(path.to_path_buf());
        }
        let Some(name) = UNPACKED.get(self.count) else {
            return Err(Failure::unusable(format!("more than {} compressed parquet files", UNPACKED.len()))
                .hint("unpack them first: `gunzip FILE` or `zstd -d FILE`. Parquet is compressed inside"));
        };
        if self.scratch.is_none() {
            self.scratch = Some(scratch()?);
        }
        let directory = self.scratch.as_ref().map(durable_files::Scratch::path).unwrap_or(Path::new("."));
        let file = AtomicFile::create(&directory.join(name))?;
        row_files::unpack(path, &mut file.file()).map_err(|error| match error {
            row_files::Error::Write(error) => Failure::io("unpack into", directory, &error),
            error => error.into(),
        })?;
        file.commit()?;
        self.count += 1;
        say(&format!("{}: unpacked to be read", path.display()));
        Ok(directory.join(name))
    }
}
