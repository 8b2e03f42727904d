//! Files that are whole or absent, in directories whose unfinished files are known by their names.
//!
//! * [`Directory`]: an open directory, in which names are used through its descriptor. Everything else here is built on it.
//! * [`write_atomic`], [`AtomicFile`], [`NewDirectory`], [`NamedFiles`]: a file or a directory appears whole, and survives a power cut.
//! * [`GrowingFile`]: a file that a killed command goes on with, until it is whole.
//! * [`remove_leftovers`]: the removal of unfinished files that a killed process left, known by their names.
//! * [`Scratch`]: a directory that goes with its owner. [`RunLock`]: one writer per output directory.
//!
//! Architecture invariants: this crate knows names and owners of files, and nothing of their contents. The caller says which
//! names are its own ([`OwnFiles`]). No other crate makes, appends to, renames, locks or removes a file by its path.

mod atomic;
mod directories;
mod directory;
mod error;
mod growing_file;
mod identity;
mod leftovers;
mod locks;
mod named_files;
mod new_directory;
mod own_files;
mod run_lock;
mod scratch;
mod system;
mod temporary;

pub use atomic::{AtomicFile, write_atomic};
pub use directories::create_directories;
pub use directory::{Directory, append};
pub use error::{Error, Result, is_full};
pub use growing_file::GrowingFile;
pub use identity::Identity;
pub use leftovers::{Leftover, Others, foreign_names, remove_leftovers};
pub use locks::lock_within;
pub use named_files::{NamedFiles, write_whole};
pub use new_directory::{NewDirectory, retire_directory};
pub use own_files::OwnFiles;
pub use run_lock::{LOCK_FILE, RunLock};
pub use scratch::Scratch;
pub use system::{Entry, Kind};
pub use temporary::is_temporary_name;
