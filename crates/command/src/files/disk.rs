//! Space on the disk, checked before anything is written, and the use that a process makes of its files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use memory_policy::Bytes;
use run_plan::pace::DiskNeed;

use crate::failure::{Exit, Failure, Outcome};

/// Refuses a run whose directory has less free space than it needs. A file system that does not report its space passes.
///
/// # Errors
/// Exit 1, as for a disk that fills up later.
pub fn check(need: &DiskNeed, directory: &Path) -> Outcome<()> {
    match free_bytes(directory) {
        Some(free) if free < need.total() => Err(refusal(need, directory, free)),
        _ => Ok(()),
    }
}

fn refusal(need: &DiskNeed, directory: &Path, free: Bytes) -> Failure {
    let [files, checkpoints, model] = [need.files, need.checkpoints, need.model].map(Bytes);
    let files = if need.files > 0 { format!("{files} for files in place of memory, ") } else { String::new() };
    let failure = Failure::new(
        Exit::Internal,
        format!(
            "{}: expected {} of free disk space, got {free} ({files}{checkpoints} for checkpoints, {model} for the model)",
            directory.display(),
            need.total()
        ),
    );
    let failure = failure.hint("use another disk with `--output DIR`, or free some space");
    match need.checkpoints > 3 * need.model {
        true => failure.hint("keep fewer checkpoints: `--set checkpoint.keep_last=1 --set checkpoint.keep_best=0`"),
        false => failure,
    }
}

/// The use of files in place of memory by this process.
#[derive(Clone, Copy, Debug)]
pub struct FileUse {
    /// Time spent on reading and writing these files, and on waiting for their disk.
    pub waited: Duration,
    /// Bytes of these and all other files that came from a disk and not from the page cache; `None` if the system does not count them.
    pub disk_read_bytes: Option<u64>,
}

impl FileUse {
    /// The use since the process began.
    pub fn so_far() -> Self {
        Self { waited: heap::waited(), disk_read_bytes: disk_read_bytes() }
    }

    /// The use since this value was taken.
    pub fn until_now(self) -> Self {
        let now = Self::so_far();
        let read = now.disk_read_bytes.zip(self.disk_read_bytes);
        Self { waited: now.waited - self.waited, disk_read_bytes: read.map(|(now, then)| now.saturating_sub(then)) }
    }
}

/// The count in `/proc/self/io`, on Linux.
fn disk_read_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("read_bytes: "))?.parse().ok()
}

/// The space that this user may still fill where `directory` is, or would be created.
pub fn free_bytes(directory: &Path) -> Option<Bytes> {
    let system = rustix::fs::statvfs(existing_ancestor(directory)).ok()?;
    // Some file systems without a size report zero for both numbers.
    (system.f_blocks > 0).then(|| Bytes(system.f_bavail.saturating_mul(system.f_frsize)))
}

/// The nearest existing directory: `path` or one of its parents.
pub fn existing_ancestor(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    absolute.ancestors().find(|ancestor| ancestor.is_dir()).map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_needs_more_than_there_is_is_refused_with_what_needs_it() {
        let here = std::env::temp_dir();
        check(&DiskNeed::default(), &here).expect("nothing is needed");
        let need = DiskNeed { files: 1 << 50, checkpoints: 4 << 50, model: 1 << 50 };
        let refused = check(&need, &here.join("not/there/yet")).expect_err("no disk has six pebibytes");
        assert_eq!(refused.exit, Exit::Internal);
        assert!(refused.message.contains("expected 6144 TiB of free disk space, got "), "{refused}");
        assert!(refused.message.contains("4096 TiB for checkpoints") && refused.hints.len() == 2, "{refused}");
    }
}
