//! The file of `--access-log`: a line of JSON for each request.
//!
//! Invariant: a line goes into the file that has the name when it is written. A file that was renamed or removed by a rotation is left, and
//! a new one is made. So a rotation needs no signal, and loses no line.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use durable_files::Directory;

pub struct AccessLog {
    directory: Directory,
    name: OsString,
    file: File,
}

impl AccessLog {
    /// Opens the file to append to it, or makes one.
    pub fn open(path: &Path) -> io::Result<Self> {
        let (directory, name) = Directory::open_parent(path)?;
        let file = directory.append(&name)?;
        Ok(Self { directory, name, file })
    }

    /// Writes a line; false if it is lost.
    pub fn write(&mut self, line: &str) -> bool {
        if !self.directory.has(&self.name, &self.file).unwrap_or(true) {
            // A name that cannot be used is tried again with the next line; until then lines go into the old file.
            if let Ok(file) = self.directory.append(&self.name) {
                self.file = file;
            }
        }
        self.file.write_all(line.as_bytes()).is_ok()
    }
}
