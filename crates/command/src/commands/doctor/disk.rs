//! The disk below a directory: whether it can be written, its free space, its kind and its rate.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Instant;

use memory_policy::Bytes;

use super::finding::Finding;
use super::program::read;
use crate::files::disk::{existing_ancestor, free_bytes};

/// Bytes that are written and read to measure a rate.
const MEASURED_BYTES: usize = 64 << 20;
const PIECE_BYTES: usize = 1 << 20;
/// Room for the demo and a few checkpoints of a small model.
const LITTLE_ROOM: Bytes = Bytes(1 << 30);
/// Below this rate, weights on disk determine the time of a step.
const SLOW_BYTES_A_SECOND: f64 = 100e6;
/// File systems in memory: their files count against the machine's memory.
const IN_MEMORY: [&str; 2] = ["tmpfs", "ramfs"];
/// File systems of other machines.
const REMOTE: [&str; 6] = ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"];

/// The facts about a disk.
#[derive(Clone, Debug, Default)]
struct Facts {
    directory: String,
    kind: Option<String>,
    free: Option<Bytes>,
    /// Bytes a second, written and synced, and read back; or the error of writing.
    rate: Option<Result<(f64, f64), String>>,
}

/// Findings about the disk of a directory.
pub fn findings(directory: &Path, is_quick: bool) -> Vec<Finding> {
    let existing = existing_ancestor(directory);
    let rate = (!is_quick).then(|| rate(&existing).map_err(|error| error.to_string()));
    let writable = match is_quick {
        true => heap::anonymous_file(&existing).err().map(|error| Err(error.to_string())),
        false => rate,
    };
    let facts = Facts {
        directory: existing.display().to_string(),
        kind: kind(&existing),
        free: free_bytes(&existing),
        rate: writable,
    };
    diagnose(&facts)
}

/// Writes a file without a name, syncs it, drops it from memory and reads it.
fn rate(directory: &Path) -> io::Result<(f64, f64)> {
    let mut file = heap::anonymous_file(directory)?;
    // Zeros could be stored without being written.
    let mut piece: Vec<u8> = (0..PIECE_BYTES as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let began = Instant::now();
    for _ in 0..MEASURED_BYTES / PIECE_BYTES {
        file.write_all(&piece)?;
    }
    file.sync_all()?;
    let written = began.elapsed().as_secs_f64();
    drop_from_memory(&file);
    file.seek(SeekFrom::Start(0))?;
    let began = Instant::now();
    for _ in 0..MEASURED_BYTES / PIECE_BYTES {
        file.read_exact(&mut piece)?;
    }
    let read = began.elapsed().as_secs_f64();
    Ok((MEASURED_BYTES as f64 / written.max(1e-9), MEASURED_BYTES as f64 / read.max(1e-9)))
}

fn drop_from_memory(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// The kind of a directory's file system: that of the longest mount point above it.
fn kind(directory: &Path) -> Option<String> {
    kind_in(&read("/proc/self/mounts")?, &regular_file::real_path(directory).ok()?)
}

fn kind_in(mounts: &str, directory: &Path) -> Option<String> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        // Mount tables write spaces in paths as octal numbers.
        Some((words.next()?.replace("\\040", " "), words.next()?))
    });
    let above = mounts.filter(|(path, _)| directory.starts_with(path));
    // A later mount at the same point covers an earlier one.
    above.max_by_key(|(path, _)| path.len()).map(|(_, kind)| kind.to_owned())
}

fn diagnose(facts: &Facts) -> Vec<Finding> {
    let Facts { directory, kind, free, rate } = facts;
    let shown_kind = kind.as_ref().map_or(String::new(), |kind| format!(" ({kind})"));
    let found = match free {
        Some(free) => format!("{directory}{shown_kind}: {free} free"),
        None => format!("{directory}{shown_kind}"),
    };
    let is = |kinds: &[&str]| kind.as_ref().is_some_and(|kind| kinds.contains(&kind.as_str()));
    let room = if let Some(Err(problem)) = rate {
        Finding::failure("disk", format!("{found}; cannot be written: {problem}"))
            .remedy("choose a writable directory: `--output DIR`")
    } else if is(&IN_MEMORY) {
        Finding::warning("disk", format!("{found}; it is in memory, so files there save no memory"))
            .remedy("choose a directory on a disk: `--output DIR`")
    } else if free.is_some_and(|free| free < LITTLE_ROOM) {
        Finding::warning("disk", format!("{found}: little room for checkpoints"))
            .remedy("free some space, or choose another disk: `--output DIR`")
    } else if is(&REMOTE) {
        Finding::note("disk", format!("{found}; it is on another machine: locks there may not work"))
    } else {
        Finding::ok("disk", found)
    };
    let room = room
        .fact("directory", directory.as_str())
        .fact("kind", kind.clone())
        .fact("free_bytes", free.map(|free| free.0));
    let Some(Ok((written, read))) = rate else { return vec![room] };
    let found = format!("{:.0} MB/s written and synced, {:.0} MB/s read", written / 1e6, read / 1e6);
    let rate = match read.min(*written) < SLOW_BYTES_A_SECOND {
        true => Finding::warning("disk rate", format!("{found}: weights that stay on disk will be slow"))
            .remedy("use a faster disk with `--output DIR`, or a larger `--memory-budget`"),
        false => Finding::ok("disk rate", found),
    };
    vec![room, rate.fact("written_bytes_per_second", *written).fact("read_bytes_per_second", *read)]
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    #[track_caller]
    fn check(facts: &Facts, expected: &[Severity]) {
        let found: Vec<Severity> = diagnose(facts).iter().map(|finding| finding.severity).collect();
        assert_eq!(found, expected, "{:?}", diagnose(facts));
    }

    #[test]
    fn a_disk_that_is_full_slow_in_memory_or_not_writable_is_said_to_be() {
        use Severity::{Failure, Note, Ok as Fine, Warning};
        let good = Facts {
            free: Some(Bytes(50 << 30)),
            kind: Some("ext4".into()),
            rate: Some(Ok((1e9, 2e9))),
            ..Facts::default()
        };
        check(&good, &[Fine, Fine]);
        check(&Facts { rate: None, ..good.clone() }, &[Fine]);
        check(&Facts { rate: Some(Ok((5e7, 2e9))), ..good.clone() }, &[Fine, Warning]);
        check(&Facts { free: Some(Bytes(9)), ..good.clone() }, &[Warning, Fine]);
        check(&Facts { kind: Some("tmpfs".into()), ..good.clone() }, &[Warning, Fine]);
        check(&Facts { kind: Some("nfs4".into()), ..good.clone() }, &[Note, Fine]);
        check(&Facts { rate: Some(Err("read-only".into())), ..good }, &[Failure]);
    }

    #[test]
    fn the_longest_mount_above_a_directory_has_it() {
        let mounts =
            "/dev/a / ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\n/dev/b /my\\040disk xfs rw 0 0\n/dev/c / btrfs rw 0 0\n";
        for (path, kind) in [("/home/a", "btrfs"), ("/run/x", "tmpfs"), ("/my disk/x", "xfs"), ("/runx", "btrfs")] {
            assert_eq!(kind_in(mounts, Path::new(path)).as_deref(), Some(kind), "{path}");
        }
    }

    #[test]
    fn measuring_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(findings(directory.path(), true).len(), 1);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
