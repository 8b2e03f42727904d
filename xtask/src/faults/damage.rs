//! Damages checkpoints: files are truncated, changed, exchanged, removed, replaced by other kinds of files, or get a later format.
//!
//! There are two intact checkpoints; the newer one is damaged. The run has to report that, resume from the older one, and end with
//! the same bytes.

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Lab;
use super::lab::{self, Outcome, RUN};
use super::promises::ReferenceRun;
use super::scenario::{self, Scenario};
use super::table::Table;
use crate::sample_data::random::Random;

/// Number of lengths at which each file is cut.
const CUTS: u64 = 20;
/// Bits that are changed in each file, by default.
const FLIPS: u32 = 35;

/// The damage to a file of the newest checkpoint.
#[derive(Clone, Debug)]
enum Damage {
    Cut(u64),
    Append,
    Remove,
    Flip(u32, u8),
    Replace(Kind),
    /// The file of the older checkpoint.
    Older,
    /// Another file of the same checkpoint.
    Other(String),
    /// A text in the file, and its replacement.
    Edit(&'static str, &'static str),
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Fifo,
    Link(&'static str),
    Directory,
    Socket,
}

/// A try: its name, the file and the damage.
type NamedTry = (String, (String, Damage));

/// Tries every damage on every file.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    some(lab, table, usize::MAX)
}

/// Tries at most `most` damages of each kind.
pub fn some(lab: &Lab, table: &mut Table, most: usize) -> Result<(), String> {
    let scene = Scene::new(lab)?;
    for (row, damages) in scene.rows(lab)? {
        let damages: Vec<_> = lab::spread(&damages, Some(most)).into_iter().cloned().collect();
        lab.try_all(table, &row, &damages, Vec::new(), |(file, damage), directory| {
            scene.damaged(lab, directory, file, damage)
        })?;
    }
    let later = [("a later format".to_string(), ())];
    lab.try_all(table, "a checkpoint of a later format stays", &later, Vec::new(), |(), directory| {
        scene.later_format(lab, directory)
    })
}

/// Two checkpoints of a killed run, and the same run undisturbed.
struct Scene {
    template: PathBuf,
    resume_arguments: Vec<String>,
    whole: ReferenceRun,
}

const NEWEST: &str = "step-00000002";
const OLDER: &str = "step-00000001";

impl Scene {
    fn new(lab: &Lab) -> Result<Self, String> {
        let mut scenario = Scenario::new(lab, "fresh", true)?;
        for argument in scenario.arguments.iter_mut().chain(&mut scenario.resume_arguments) {
            if argument.starts_with("checkpoint.keep_last=") {
                "checkpoint.keep_last=2".clone_into(argument);
            }
        }
        let directory = lab.directory("whole-damage")?;
        let ran = scenario::run(lab, &scenario.arguments, &directory, None)?;
        if ran.code != Some(0) {
            return Err(format!("the undisturbed run ended with {}\n{}", ran.ending(), ran.err));
        }
        let whole = ReferenceRun::read(&directory)?;
        let template = lab.directory("template-damage")?;
        let kill = "calls=rename,renameat,renameat2\nonly=step-00000003\nfrom=1\ndo=kill-before";
        let faults = lab.faults(format!("under={}\n{kill}", template.display()));
        scenario::run(lab, &scenario.arguments, &template, Some(&faults))?;
        let scene = Self { template, resume_arguments: scenario.resume_arguments, whole };
        for checkpoint in [OLDER, NEWEST] {
            if !scene.template.join(RUN).join("checkpoints").join(checkpoint).is_dir() {
                return Err(format!("expected a run with {checkpoint}"));
            }
        }
        Ok(scene)
    }

    fn files(&self) -> Result<Vec<String>, String> {
        let path = self.template.join(RUN).join("checkpoints").join(NEWEST);
        let entries = fs::read_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut names: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into()).collect();
        names.sort();
        Ok(names)
    }

    /// Whether the damaged file differs: for example, the configs of both checkpoints are equal.
    fn is_other(&self, file: &str, damage: &Damage) -> bool {
        let checkpoints = self.template.join(RUN).join("checkpoints");
        let bytes = |checkpoint: &str, file: &str| fs::read(checkpoints.join(checkpoint).join(file)).ok();
        match damage {
            Damage::Older => bytes(OLDER, file) != bytes(NEWEST, file),
            Damage::Other(other) => bytes(NEWEST, other) != bytes(NEWEST, file),
            _ => true,
        }
    }

    /// The damages, grouped by table row.
    fn rows(&self, lab: &Lab) -> Result<Vec<(String, Vec<NamedTry>)>, String> {
        let files = self.files()?;
        let of_each = |make: &dyn Fn(&String) -> Vec<Damage>| -> Vec<NamedTry> {
            let pairs = files.iter().flat_map(|file| make(file).into_iter().map(move |damage| (file.clone(), damage)));
            let pairs = pairs.filter(|(file, damage)| self.is_other(file, damage));
            pairs.map(|(file, damage)| (format!("{file}: {damage:?}"), (file, damage))).collect()
        };
        let cut = of_each(&|_| (0..CUTS).map(Damage::Cut).chain([Damage::Append, Damage::Remove]).collect());
        let seed = lab.options.seed;
        let flips = of_each(&|file| {
            let mut random = Random::named(&format!("{file} {seed}"));
            (0..FLIPS).map(|_| Damage::Flip(random.below(u32::MAX), random.below(8) as u8)).collect()
        });
        let other_files = of_each(&|file| {
            let others = files.iter().filter(|other| *other != file).map(|other| Damage::Other(other.clone()));
            others.chain([Damage::Older]).collect()
        });
        let no_files = of_each(&|_| {
            let links = ["/dev/zero", "/dev/null", "/dev/full", "itself", "nowhere"].map(Kind::Link);
            links.into_iter().chain([Kind::Fifo, Kind::Directory, Kind::Socket]).map(Damage::Replace).collect()
        });
        let manifest = "manifest.json".to_string();
        let edits = [
            Damage::Edit("\"model.safetensors\"", "\"../step-00000001/model.safetensors\""),
            Damage::Edit("\"model.safetensors\"", "\"/etc/passwd\""),
            Damage::Edit("\"bytes\": ", "\"bytes\": 9"),
            Damage::Edit("\"bytes\": ", "\"bytes\": -"),
            Damage::Edit("\"sha256\": \"", "\"sha256\": \"0"),
            Damage::Edit("\"files\": [", "\"files\": [[["),
            Damage::Edit("\"format\": 1", "\"format\": \"1\""),
        ];
        let edits = edits.map(|damage| (format!("{manifest}: {damage:?}"), (manifest.clone(), damage))).to_vec();
        Ok(vec![
            ("cut at every twentieth, a byte more, removed".to_string(), cut),
            ("one bit changed".to_string(), flips),
            ("another file in its place".to_string(), other_files),
            ("no file: FIFOs, devices, links, directories".to_string(), no_files),
            ("edited manifests".to_string(), edits),
        ])
    }

    fn damaged(&self, lab: &Lab, directory: &Path, file: &str, damage: &Damage) -> Outcome {
        lab::copy(&self.template, directory)?;
        let checkpoints = directory.join(RUN).join("checkpoints");
        apply(damage, &checkpoints, file)?;
        let ran = scenario::run(lab, &self.resume_arguments, directory, None)?;
        let mut broken = self.whole.resumed(&ran, directory);
        if !ran.err.lines().any(|line| line.starts_with("warning: ") && line.contains(NEWEST)) {
            broken.push("the damage was not named".to_string());
        }
        Ok(broken)
    }

    /// A checkpoint of a later version: this version cannot use it, and must not remove it.
    fn later_format(&self, lab: &Lab, directory: &Path) -> Outcome {
        lab::copy(&self.template, directory)?;
        let newest = directory.join(RUN).join("checkpoints").join(NEWEST);
        apply(&Damage::Edit("\"format\": 1", "\"format\": 99"), newest.parent().unwrap_or(&newest), "manifest.json")?;
        let ran = scenario::run(lab, &self.resume_arguments, directory, None)?;
        let mut broken = super::promises::ended_well(&ran, false);
        let manifest = fs::read_to_string(newest.join("manifest.json")).unwrap_or_default();
        if !manifest.contains("99") && ran.code != Some(4) {
            broken.push(format!("{}, and the checkpoint of a later format is gone", ran.ending()));
        }
        Ok(broken)
    }
}

/// Damages a file of the newest checkpoint.
fn apply(damage: &Damage, checkpoints: &Path, file: &str) -> Result<(), String> {
    let path = checkpoints.join(NEWEST).join(file);
    let named = |error: std::io::Error| format!("{}: {error}", path.display());
    let before = fs::read(&path).map_err(named)?;
    let replace = |bytes: &[u8]| {
        if bytes == before {
            return Err(format!("{}: {damage:?} changes nothing", path.display()));
        }
        fs::write(&path, bytes).map_err(named)
    };
    match damage {
        Damage::Cut(part) => replace(&before[..(before.len() as u64 * part / CUTS) as usize]),
        Damage::Append => replace(&[&before[..], b"x"].concat()),
        Damage::Remove => fs::remove_file(&path).map_err(named),
        Damage::Flip(place, bit) => {
            let place = u64::from(*place) % before.len() as u64;
            let mut open = fs::OpenOptions::new().write(true).open(&path).map_err(named)?;
            open.seek(SeekFrom::Start(place)).map_err(named)?;
            open.write_all(&[before[place as usize] ^ (1 << bit)]).map_err(named)
        }
        Damage::Older => replace(&fs::read(checkpoints.join(OLDER).join(file)).map_err(named)?),
        Damage::Other(other) => replace(&fs::read(checkpoints.join(NEWEST).join(other)).map_err(named)?),
        Damage::Edit(from, to) => replace(String::from_utf8_lossy(&before).replacen(from, to, 1).as_bytes()),
        Damage::Replace(kind) => {
            fs::remove_file(&path).map_err(named)?;
            match kind {
                Kind::Fifo => {
                    let status = Command::new("mkfifo").arg(&path).status().map_err(named)?;
                    if !status.success() {
                        return Err(format!("mkfifo {}: {status}", path.display()));
                    }
                    Ok(())
                }
                Kind::Link("itself") => symlink(&path, &path).map_err(named),
                Kind::Link(target) => symlink(target, &path).map_err(named),
                Kind::Directory => fs::create_dir(&path).map_err(named),
                Kind::Socket => std::os::unix::net::UnixListener::bind(&path).map(drop).map_err(named),
            }
        }
    }
}
