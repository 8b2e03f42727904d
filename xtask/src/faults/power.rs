//! Power cuts: simulates a disk that keeps all synced data, and as little other data as it may.
//!
//! A run is killed at an operation, with a record of each file's contents at each sync. From the operations before the cut, the
//! simulated disk is built, and the run resumes on it. Two kinds of disk are tried:
//!
//! * `strict`, by POSIX: a file has its contents at its last sync, and a directory has its names at its own last sync.
//! * `names first`: every name takes effect at once, and files have their contents at their last sync. Disks that write names
//!   before contents behave like this; a file that is renamed before it is synced is empty.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::Lab;
use super::lab::{self, Outcome, RUN};
use super::promises;
use super::scenario::{self, Point, Scenario};
use super::table::Table;

/// Flags of `open` and `renameat2`, as on Linux.
const O_CREAT: u64 = 0o100;
const RENAME_EXCHANGE: u64 = 2;

/// The names that a disk keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Synced,
    All,
}

/// Cuts before each operation that changes the disk, on both kinds of disk.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    for name in ["fresh", "resumed"] {
        if ["strict", "names first"].iter().all(|disk| !lab.is_asked_for(&row(disk, name))) {
            continue;
        }
        let scenario = Scenario::new(lab, name, true)?;
        cuts(lab, table, &scenario, 1)?;
    }
    Ok(())
}

fn row(disk: &str, scenario: &str) -> String {
    format!("power cut, {disk}, {scenario}")
}

/// Cuts before every n-th operation that changes the disk (n is `every`), on both kinds of disk.
pub fn cuts(lab: &Lab, table: &mut Table, scenario: &Scenario, every: usize) -> Result<(), String> {
    let changes: Vec<&Point> = scenario.points.iter().filter(|point| point.is_change()).collect();
    let tries: Vec<(String, u64)> = changes.iter().step_by(every).map(|point| (point.name(), point.number)).collect();
    for (disk, names) in [("strict", Names::Synced), ("names first", Names::All)] {
        let notes = vec![format!("{} operations that change something", changes.len())];
        lab.try_all(table, &row(disk, scenario.name), &tries, notes, |&number, directory| {
            cut(lab, scenario, directory, number, names)
        })?;
    }
    Ok(())
}

/// Runs up to an operation, builds the disk, and resumes on it.
fn cut(lab: &Lab, scenario: &Scenario, directory: &Path, number: u64, names: Names) -> Outcome {
    let [before, records] = ["before", "records"].map(|name| directory.join(name));
    for place in [&before, &records] {
        lab::empty(place)?;
    }
    scenario.prepare(&before)?;
    let mut disk = Disk::copy(&before)?;
    let newest = promises::whole_checkpoints(&before.join(RUN)).into_iter().max();
    let trace = directory.join("trace");
    let lines = format!("trace={}\nrecord={}\nfrom={number}\ndo=kill-before", trace.display(), records.display());
    let faults = lab.faults(format!("{}\n{lines}", scenario::counted(&before)));
    let ran = scenario::run(lab, &scenario.arguments, &before, Some(&faults))?;
    let newest = promises::acknowledged(&ran.out).max(newest);
    let text = fs::read_to_string(&trace).map_err(|error| format!("{}: {error}", trace.display()))?;
    for line in text.lines() {
        disk.follow(line, &before, &records)?;
    }
    let after = directory.join("after");
    lab::empty(&after)?;
    disk.write(&after, names)?;
    let mut broken = promises::nothing_lost(&after.join(RUN), newest);
    let resumed = scenario::run(lab, scenario.resume_arguments(&after), &after, None)?;
    broken.extend(scenario.whole.resumed(&resumed, &after));
    Ok(broken)
}

/// A disk: names and contents.
#[derive(Default)]
struct Disk {
    inodes: Vec<Inode>,
}

/// A file or a directory. A disk's first inode is its root.
#[derive(Clone, Debug)]
enum Inode {
    /// The contents at the last sync.
    File(Option<Vec<u8>>),
    /// The current names, and the names at the last sync.
    Directory(BTreeMap<String, usize>, BTreeMap<String, usize>),
}

impl Disk {
    /// A disk with everything in a directory, synced.
    fn copy(directory: &Path) -> Result<Self, String> {
        let mut disk = Disk::default();
        disk.read(directory)?;
        Ok(disk)
    }

    fn read(&mut self, path: &Path) -> Result<usize, String> {
        let named = |error: std::io::Error| format!("{}: {error}", path.display());
        let place = self.inodes.len();
        if !path.is_dir() {
            self.inodes.push(Inode::File(Some(fs::read(path).map_err(named)?)));
            return Ok(place);
        }
        self.inodes.push(Inode::Directory(BTreeMap::new(), BTreeMap::new()));
        let mut names = BTreeMap::new();
        for entry in fs::read_dir(path).map_err(named)? {
            let entry = entry.map_err(named)?;
            names.insert(entry.file_name().to_string_lossy().into_owned(), self.read(&entry.path())?);
        }
        self.inodes[place] = Inode::Directory(names.clone(), names);
        Ok(place)
    }

    /// Applies a line of a trace.
    fn follow(&mut self, line: &str, base: &Path, records: &Path) -> Result<(), String> {
        let words: Vec<&str> = line.split('\t').collect();
        let [number, call, first, second, detail, result, ..] = words[..] else {
            return Err(format!("not a line of a trace: {line}"));
        };
        if result.starts_with('-') || line.ends_with("killed before") {
            return Ok(());
        }
        let below = |path: &str| Path::new(path).strip_prefix(base).ok().map(Path::to_path_buf);
        let (Some(first), second) = (below(first), below(second)) else { return Ok(()) };
        #[expect(clippy::cast_sign_loss, reason = "flags are printed as they lie in the register")]
        let detail = detail.parse::<i64>().unwrap_or(0) as u64;
        match call {
            "open" | "openat" | "creat"
                if (call == "creat" || detail & O_CREAT != 0) && self.find(&first).is_none() =>
            {
                self.insert(&first, Inode::File(None));
            }
            "mkdir" | "mkdirat" => self.insert(&first, Inode::Directory(BTreeMap::new(), BTreeMap::new())),
            "unlink" | "unlinkat" | "rmdir" => {
                self.names_of(&first).map(|(names, name)| names.remove(&name));
            }
            "rename" | "renameat" | "renameat2" => {
                let second = second.ok_or_else(|| format!("renamed out of the directory: {line}"))?;
                let is_exchange = call == "renameat2" && detail & RENAME_EXCHANGE != 0;
                let (old, new) = (self.find(&first), self.find(&second));
                self.names_of(&first).map(|(names, name)| names.remove(&name));
                if let Some(old) = old {
                    self.names_of(&second).map(|(names, name)| names.insert(name, old));
                }
                if let Some(new) = new.filter(|_| is_exchange) {
                    self.names_of(&first).map(|(names, name)| names.insert(name, new));
                }
            }
            "link" | "linkat" => {
                if let (Some(old), Some(second)) = (self.find(&first), second) {
                    self.names_of(&second).map(|(names, name)| names.insert(name, old));
                }
            }
            "fsync" | "fdatasync" => self.sync(&first, &records.join(number))?,
            _ => {}
        }
        Ok(())
    }

    fn sync(&mut self, path: &Path, record: &Path) -> Result<(), String> {
        let Some(place) = self.find(path) else { return Ok(()) };
        match &mut self.inodes[place] {
            Inode::File(held) => {
                *held = Some(fs::read(record).map_err(|error| format!("{}: {error}", record.display()))?);
            }
            Inode::Directory(names, synced) => synced.clone_from(names),
        }
        Ok(())
    }

    fn insert(&mut self, path: &Path, inode: Inode) {
        let place = self.inodes.len();
        self.inodes.push(inode);
        self.names_of(path).map(|(names, name)| names.insert(name, place));
    }

    fn find(&self, path: &Path) -> Option<usize> {
        path.iter().try_fold(0, |place, name| match &self.inodes[place] {
            Inode::Directory(names, _) => names.get(name.to_str()?).copied(),
            Inode::File(_) => None,
        })
    }

    /// The names of the directory that contains a path, and the path's name there.
    fn names_of(&mut self, path: &Path) -> Option<(&mut BTreeMap<String, usize>, String)> {
        let parent = self.find(path.parent()?)?;
        let name = path.file_name()?.to_str()?.to_string();
        match &mut self.inodes[parent] {
            Inode::Directory(names, _) => Some((names, name)),
            Inode::File(_) => None,
        }
    }

    /// Writes the files that remain after the cut.
    fn write(&self, directory: &Path, kept: Names) -> Result<(), String> {
        let mut left: Vec<(usize, PathBuf)> = vec![(0, directory.to_path_buf())];
        while let Some((place, path)) = left.pop() {
            let written = match &self.inodes[place] {
                Inode::File(held) => fs::write(&path, held.as_deref().unwrap_or_default()),
                Inode::Directory(names, synced) => {
                    let names = if kept == Names::All { names } else { synced };
                    left.extend(names.iter().map(|(name, place)| (*place, path.join(name))));
                    fs::create_dir_all(&path)
                }
            };
            written.map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the names and contents that remain after these operations, which are written below `/d`.
    #[track_caller]
    fn check(operations: &[&str], kept: Names, expected: &[(&str, &str)]) {
        let here = std::env::current_exe().expect("this program's path");
        let thread = format!("{:?}", std::thread::current().id()).replace(['(', ')'], "");
        let directory = here.with_file_name(format!("power-{}-{thread}", std::process::id()));
        lab::empty(&directory).unwrap();
        fs::write(directory.join("record"), "synced").unwrap();
        let mut disk = Disk { inodes: vec![Inode::Directory(BTreeMap::new(), BTreeMap::new())] };
        for operation in operations {
            let line = operation.replace(' ', "\t");
            disk.follow(&line, Path::new("/d"), &directory).unwrap();
        }
        let after = directory.join("after");
        disk.write(&after, kept).unwrap();
        let found: Vec<(String, String)> = fs::read_dir(&after)
            .unwrap()
            .flatten()
            .map(|entry| {
                let text = fs::read_to_string(entry.path()).unwrap_or_else(|_| "directory".to_string());
                (entry.file_name().to_string_lossy().into_owned(), text)
            })
            .collect();
        let expected: Vec<(String, String)> =
            expected.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(found, expected, "{operations:?} {kept:?}");
    }

    const CREATE: &str = "1 openat /d/new  577 3 ";
    const SYNC: &str = "record fsync /d/new  0 0 ";
    const RENAME: &str = "3 rename /d/new /d/whole 0 0 ";
    const SYNC_DIRECTORY: &str = "record fsync /d  0 0 ";

    #[test]
    fn a_name_stays_where_its_directory_was_synced_and_nowhere_else() {
        check(&[CREATE, SYNC, RENAME], Names::Synced, &[]);
        check(&[CREATE, SYNC, RENAME, SYNC_DIRECTORY], Names::Synced, &[("whole", "synced")]);
        check(&[CREATE, SYNC, SYNC_DIRECTORY, RENAME], Names::Synced, &[("new", "synced")]);
        check(&["1 mkdir /d/a  511 0 "], Names::Synced, &[]);
        check(&["1 mkdir /d/a  511 0 ", SYNC_DIRECTORY], Names::Synced, &[("a", "directory")]);
    }

    #[test]
    fn a_file_that_is_renamed_before_it_is_synced_is_empty() {
        check(&[CREATE, RENAME], Names::All, &[("whole", "")]);
        check(&[CREATE, SYNC, RENAME], Names::All, &[("whole", "synced")]);
        check(&[CREATE, RENAME, SYNC_DIRECTORY], Names::Synced, &[("whole", "")]);
    }

    #[test]
    fn what_failed_did_not_happen_and_what_was_removed_comes_back_until_its_directory_is_synced() {
        check(&["1 openat /d/new  577 -2 "], Names::All, &[]);
        let removed = "5 unlink /d/whole  0 0 ";
        check(&[CREATE, SYNC, RENAME, SYNC_DIRECTORY, removed], Names::Synced, &[("whole", "synced")]);
        check(&[CREATE, SYNC, RENAME, SYNC_DIRECTORY, removed, SYNC_DIRECTORY], Names::Synced, &[]);
    }
}
