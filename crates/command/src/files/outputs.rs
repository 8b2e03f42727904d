//! Files and directories that a command writes beside runs: what a killed command left there goes before a new one is written.

use std::hash::{DefaultHasher, Hash, Hasher};
#[cfg(unix)]
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use durable_files::{Others, OwnFiles};
use model_formats::ctranslate2;
use trainer::checkpoint;

use crate::failure::Outcome;

/// The files of models in every format.
const OWN_FILES: OwnFiles = OwnFiles {
    is_own: |name| {
        let is_gguf = || name.to_str().is_some_and(|name| name.starts_with("model-") && name.ends_with(".gguf"));
        checkpoint::is_own_name(name) || ctranslate2::FILES.iter().any(|own| name == *own) || is_gguf()
    },
    ..checkpoint::OWN_FILES
};

/// Makes the directory that an output will be in, and removes unfinished files of killed commands there.
pub fn make_directory_of(output: &Path) -> Outcome<()> {
    if let Some(parent) = output.parent() {
        durable_files::create_directories(parent)?;
    }
    remove_leftovers_beside(output);
    Ok(())
}

/// The key of a file that grows ([`durable_files::GrowingFile`]): of what its contents follow from, and of these files as they are now.
pub fn key(depends_on: impl Hash, files: &[PathBuf]) -> u64 {
    let mut key = DefaultHasher::new();
    depends_on.hash(&mut key);
    for file in files {
        let metadata = regular_file::metadata(file).ok();
        (file, metadata.as_ref().map(std::fs::Metadata::len)).hash(&mut key);
        // No program can set the time of the last change of a file's metadata back.
        #[cfg(unix)]
        metadata.as_ref().map(|of| (MetadataExt::ctime(of), MetadataExt::ctime_nsec(of))).hash(&mut key);
        metadata.and_then(|metadata| metadata.modified().ok()).hash(&mut key);
    }
    key.finish()
}

/// Removes unfinished files of killed commands from the directory that an output will be in. Those of living ones stay.
pub fn remove_leftovers_beside(output: &Path) {
    let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The output itself will report a directory that cannot be used.
    let _ = durable_files::remove_leftovers(parent, &OWN_FILES, Others::Possible);
}
