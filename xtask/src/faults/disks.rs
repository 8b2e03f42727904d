//! Disks that are full, read-only, slow to complete a call, or broken from some point on.

use std::path::Path;
use std::process::Command;

use super::Lab;
use super::lab::{Outcome, RUN};
use super::process;
use super::promises;
use super::scenario::{self, Scenario};
use super::table::Table;

/// Errors that persist, with their numbers on Linux.
const STICKY: [(&str, i64); 5] = [("ENOSPC", 28), ("EIO", 5), ("EDQUOT", 122), ("EROFS", 30), ("ENOMEM", 12)];
/// Calls that change data on the disk.
const CHANGING: &str = "write,pwrite,fsync,fdatasync,ftruncate,fallocate,mkdir,mkdirat,rename,renameat,renameat2";
/// Calls that a signal may interrupt. Opening a directory to list it cannot be interrupted on a local disk, and the standard
/// library does not repeat it.
const INTERRUPTED: &str = "read,pread,write,pwrite,fsync,fdatasync,ftruncate,flock";
/// Number of operations at which a persistent error begins.
const STICKY_POINTS: u64 = 12;
/// Sizes of a full disk, in KiB; a run fits into the last one.
const DISKS_KIB: [u64; 12] = [64, 256, 512, 600, 700, 800, 1024, 1536, 2048, 3072, 6144, 12_288];
/// File size limits, in blocks of 512 bytes.
const FILE_BLOCKS: [u64; 8] = [0, 1, 8, 64, 256, 512, 1024, 2048];
const SCENARIOS: [&str; 3] = ["fresh", "resumed", "on disk"];

/// Runs all of these, with the smaller model: the disks fit its size.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    for name in SCENARIOS {
        let scenario = Scenario::new(lab, name, true)?;
        parts_of_calls(lab, table, &scenario)?;
        sticky(lab, table, &scenario)?;
    }
    let fresh = Scenario::new(lab, "fresh", true)?;
    full(lab, table, &fresh)?;
    limited(lab, table, &fresh)
}

/// Every read and write does a third of its bytes, and every second call is interrupted: the run must not notice.
pub fn parts_of_calls(lab: &Lab, table: &mut Table, scenario: &Scenario) -> Result<(), String> {
    let tries: Vec<(String, String)> = vec![
        ("a third of every read and write".into(), "from=1\nto=end\ndo=short".into()),
        ("every other call EINTR".into(), format!("calls={INTERRUPTED}\nfrom=1\nto=end\nevery=2\ndo=errno:4")),
    ];
    let row = format!("short reads and writes, interrupted calls, {}", scenario.name);
    lab.try_all(table, &row, &tries, Vec::new(), |faults, directory| {
        scenario.prepare(directory)?;
        let faults = lab.faults(format!("under={}\n{faults}", directory.display()));
        let ran = scenario::run(lab, &scenario.arguments, directory, Some(&faults))?;
        Ok(scenario.whole.resumed(&ran, directory))
    })
}

/// Every change fails from some change on.
fn sticky(lab: &Lab, table: &mut Table, scenario: &Scenario) -> Result<(), String> {
    let changes =
        scenario.points.iter().filter(|point| CHANGING.split(',').any(|call| call == point.call)).count() as u64;
    let points = (0..STICKY_POINTS).map(|at| 1 + at * changes / STICKY_POINTS);
    let tries: Vec<(String, String)> = points
        .flat_map(|from| {
            STICKY.map(|(error, number)| {
                let faults = format!("calls={CHANGING}\nfrom={from}\nto=end\ndo=errno:{number}");
                (format!("{error} from change {from}"), faults)
            })
        })
        .collect();
    let row = format!("an error that stays, {}", scenario.name);
    let notes = vec![format!("{changes} changes in all")];
    lab.try_all(table, &row, &tries, notes, |faults, directory| scenario.try_once(lab, directory, faults))
}

/// A disk that is too small at first, and then grows.
fn full(lab: &Lab, table: &mut Table, scenario: &Scenario) -> Result<(), String> {
    let row = "a full disk that grows, fresh";
    let probe = lab.directory("mounted")?;
    if let Err(why) = Disk::mount(&probe, 64) {
        table.skip(row, &why);
        return Ok(());
    }
    let tries = DISKS_KIB.map(|kib| (format!("{kib} KiB"), kib));
    lab.try_all(table, row, &tries, Vec::new(), |kib, directory| {
        let disk = Disk::mount(directory, *kib)?;
        let ran = scenario::run(lab, &scenario.arguments, directory, None)?;
        disk.remount("size=64m")?;
        scenario.judge(lab, directory, &ran, &[], false)
    })?;
    let tries = [("read-only from the start".to_string(), ())];
    lab.try_all(table, "a read-only disk, fresh", &tries, Vec::new(), |(), directory| {
        let disk = Disk::mount(directory, 65_536)?;
        disk.remount("ro")?;
        let ran = scenario::run(lab, &scenario.arguments, directory, None)?;
        disk.remount("rw")?;
        scenario.judge(lab, directory, &ran, &[], false)
    })
}

/// Files cannot grow beyond a limit (RLIMIT_FSIZE).
fn limited(lab: &Lab, table: &mut Table, scenario: &Scenario) -> Result<(), String> {
    let tries = FILE_BLOCKS.map(|blocks| (format!("ulimit -f {blocks}"), blocks));
    lab.try_all(table, "a limit on the length of files, fresh", &tries, Vec::new(), |blocks, directory| -> Outcome {
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -f \"$0\" && exec \"$@\"", &blocks.to_string()]).arg(&lab.program);
        shell.args(&scenario.arguments).current_dir(directory).env("RAYON_NUM_THREADS", "1");
        shell.env("LOW_MEM_T5_PRICES", "built-in");
        let ran = process::start_command(shell)?.end()?;
        let mut broken = scenario.judge(lab, directory, &ran, &[], false)?;
        broken.extend(promises::nothing_lost(&directory.join(RUN), promises::acknowledged(&ran.out)));
        Ok(broken)
    })
}

/// A disk in memory of a given size; unmounted when dropped.
struct Disk<'a> {
    place: &'a Path,
}

impl<'a> Disk<'a> {
    fn mount(place: &'a Path, kib: u64) -> Result<Self, String> {
        let size = format!("size={kib}k");
        succeed(Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(place))?;
        Ok(Self { place })
    }

    fn remount(&self, option: &str) -> Result<(), String> {
        succeed(Command::new("mount").args(["-o", &format!("remount,{option}")]).arg(self.place))
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        let _ = succeed(Command::new("umount").arg(self.place));
    }
}

fn succeed(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().display().to_string();
    let output = command.output().map_err(|error| format!("{name}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
    if output.status.success() { Ok(()) } else { Err(format!("{name}: {said} (needs to be root)")) }
}
