//! Files that are whole or absent, in directories whose unfinished files are known by their names.
//!
//! * [`write_atomic`], [`AtomicFile`], [`NamedFiles`]: a file or a directory appears whole, and survives a power cut.
//! * [`temporary`]: the names of unfinished files, and the removal of those that a killed process left.
//! * [`Scratch`]: a directory that goes with its owner. [`RunLock`]: one writer per output directory.
//!
//! Architecture invariant: this crate knows names and owners of files, and nothing of their contents. The caller says which
//! names are its own ([`OwnFiles`]).

mod atomic;
mod directories;
mod error;
mod identity;
mod named_files;
mod own_files;
mod run_lock;
mod scratch;
pub mod temporary;

pub use atomic::{AtomicFile, write_atomic};
pub use directories::create_directories;
pub use error::{Error, Result, is_full};
pub use identity::Identity;
pub use named_files::{NamedFiles, write_whole};
pub use own_files::OwnFiles;
pub use run_lock::{LOCK_FILE, RunLock};
pub use scratch::Scratch;
pub use temporary::is_temporary_name;
