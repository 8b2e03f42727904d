//! Another user of the machine: plants links, pipes and hard links, exchanges directories, and holds locks, wherever a command of root
//! works. A file of root in a private directory must stay what it is, and no command may wait for the other user.
//!
//! The other user is `nobody`, so root is needed.

mod attacks;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use self::attacks::{Attack, Expected};
use super::Lab;
use super::lab::Outcome;
use super::process::{self, Ran};
use super::promises;
use super::table::Table;
use crate::release::man;

/// The other user.
const OTHER: u32 = 65534;
/// The exit code of `doctor` after a warning.
const WARNS: i32 = 6;
/// The exit code where a row cannot be read.
const BAD_ROW: i32 = 4;
/// Text of root's private files, which must stay there.
const PRIVATE: &str = "my only copy";

/// Finished runs of root, for commands that need a model.
struct Runs {
    model: PathBuf,
    adapter: PathBuf,
}

/// Makes every attack once.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    let attacks = attacks::all();
    let tried: BTreeSet<&str> = attacks.iter().flat_map(|(_, rows)| rows).map(Attack::subcommand).collect();
    let is_tried = |command: &String| tried.contains(&**command) || attacks::WITHOUT_FILES.contains(&&**command);
    if let Some(command) = commands(&lab.program)?.iter().find(|command| !is_tried(command)) {
        return Err(format!("no attack of another user on `{command}`: add a row in faults/neighbours/attacks.rs"));
    }
    if let Some(flag) = untried_path(&lab.program, &attacks)? {
        return Err(format!("no attack of another user on `{flag}`: add a row in faults/neighbours/attacks.rs"));
    }
    let is_root = fs::metadata("/proc/self").is_ok_and(|of| std::os::unix::fs::MetadataExt::uid(&of) == 0);
    if !is_root {
        table.skip("another user", "only root can be another user, too");
        return Ok(());
    }
    let runs = Runs::train(lab)?;
    for (on, attacks) in attacks {
        let tries: Vec<(String, Attack)> = attacks.into_iter().map(|attack| (attack.name.clone(), attack)).collect();
        lab.try_all(table, &format!("another user: {on}"), &tries, Vec::new(), |attack, directory| {
            attacked(lab, &runs, attack, directory)
        })?;
    }
    Ok(())
}

/// A flag of a command that names a path, and that no attack gives a path of another user.
fn untried_path(program: &Path, attacks: &[(&str, Vec<Attack>)]) -> Result<Option<String>, String> {
    let is_tried = |command: &str, flag: &str| {
        attacks.iter().flat_map(|(_, rows)| rows).any(|attack| {
            let words: Vec<&str> = attacks::variables(&attack.command).1.collect();
            let gives = |two: &[&str]| (two[0], two[1].contains("SHARED")) == (flag, true);
            attack.subcommand() == command && words.windows(2).any(gives)
        })
    };
    for command in commands(program)? {
        let help = Command::new(program).args([&command, "--help"]).output().map_err(|error| error.to_string())?;
        let flags = path_flags(&String::from_utf8_lossy(&help.stdout));
        if let Some(flag) = flags.iter().find(|flag| !is_tried(&command, flag)) {
            return Ok(Some(format!("{command} {flag}")));
        }
    }
    Ok(None)
}

/// The flags in a help text whose value is a path.
fn path_flags(help: &str) -> Vec<String> {
    let flag = |line: &str| {
        let (flag, value) = line.trim_start().split_once("--")?.1.split_once(' ')?;
        let is_path = ["FILE", "DIR", "MODEL", "PATH"]
            .iter()
            .any(|name| value.split('>').next().is_some_and(|value| value.contains(name)));
        (line.trim_start().starts_with('-') && value.starts_with('<') && is_path).then(|| format!("--{flag}"))
    };
    help.lines().filter_map(flag).collect()
}

/// The commands that the program's help lists.
fn commands(program: &Path) -> Result<Vec<String>, String> {
    let help =
        Command::new(program).arg("--help").output().map_err(|error| format!("{}: {error}", program.display()))?;
    let help = String::from_utf8_lossy(&help.stdout);
    Ok(man::commands(&help).into_iter().map(str::to_owned).collect())
}

impl Runs {
    fn train(lab: &Lab) -> Result<Self, String> {
        let directory = lab.directory("runs-of-root")?;
        let (model, adapter) = (directory.join("model-run"), directory.join("adapter-run"));
        let few = "--max-steps 1 --set train.batch_size=2 --set train.eval_samples=0 --output";
        let of_model =
            "--set model.overrides={num_layers=1,num_decoder_layers=1,d_model=16,d_ff=32,d_kv=8,num_heads=2}";
        let of_adapter = "--set lora.rank=2 --set data.train=ROWS --model MODEL";
        let rows = write_rows(&directory)?;
        for (output, more) in [(&model, of_model), (&adapter, of_adapter)] {
            let words = format!("{few} {} {more}", output.display());
            let words =
                words.replace("ROWS", &rows.display().to_string()).replace("MODEL", &model.display().to_string());
            let mut command = Command::new(&lab.program);
            command.args(words.split_whitespace()).env("LOW_MEM_T5_PRICES", "built-in").env("RAYON_NUM_THREADS", "1");
            let ran = process::start_command(command)?.end()?;
            if ran.code != Some(0) {
                return Err(format!("a run of root: {}: {}", ran.ending(), ran.first_error_line()));
            }
        }
        Ok(Self { model, adapter })
    }
}

/// Writes private rows of root.
fn write_rows(directory: &Path) -> Result<PathBuf, String> {
    let named = |error: std::io::Error| format!("{}: {error}", directory.display());
    let rows = directory.join("rows.jsonl");
    let row =
        |at: u32| format!("{{\"prompt\": \"{}\", \"response\": \"r\"}}\n", "secret ".repeat(at as usize % 50 + 1));
    fs::write(&rows, (0..2_000).map(row).collect::<String>()).map_err(named)?;
    fs::set_permissions(&rows, fs::Permissions::from_mode(0o600)).map_err(named)?;
    Ok(rows)
}

/// Makes root's private directory, with names that a command looks for when it removes files, and files that one could publish.
fn write_victim(victim: &Path, runs: &Runs) -> Result<(), String> {
    let named = |error: std::io::Error| format!("{}: {error}", victim.display());
    for name in ["step-00000001", "model", "checkpoints/step-00000001", "copy"] {
        fs::create_dir_all(victim.join(name)).map_err(named)?;
        fs::write(victim.join(name).join("model.safetensors"), PRIVATE).map_err(named)?;
    }
    for (from, file) in [
        (&runs.model, "model/config.json"),
        (&runs.model, "model/model.safetensors"),
        (&runs.model, "model/tokenizer.json"),
        (&runs.adapter, "adapter/adapter_model.safetensors"),
    ] {
        let name = file.rsplit('/').next().unwrap_or(file);
        fs::copy(from.join(file), victim.join("copy").join(name)).map_err(named)?;
    }
    fs::write(victim.join("precious"), PRIVATE).map_err(named)?;
    fs::write(victim.join("rows.jsonl"), format!("{{\"prompt\": \"{PRIVATE}\", \"response\": \"{PRIVATE}\"}}\n"))
        .map_err(named)?;
    let event = format!("{{\"event\": \"step\", \"step\": 1, \"loss\": 1.0, \"note\": \"{PRIVATE}\"}}\n");
    fs::write(victim.join("metrics.jsonl"), event).map_err(named)?;
    fs::set_permissions(victim, fs::Permissions::from_mode(0o700)).map_err(named)
}

/// Writes root's preferences, a list of runs in the shared directory, and rows of which the last is broken.
fn write_inputs(directory: &Path, shared: &Path) -> std::io::Result<[PathBuf; 3]> {
    let paths = ["preferences.jsonl", "list.toml", "broken.jsonl"].map(|name| directory.join(name));
    fs::write(&paths[0], "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n".repeat(8))?;
    let list = format!("[[run]]\noutput = \"{}/run\"\nflags = [\"--max-steps\", \"1\"]\n", shared.display());
    fs::write(&paths[1], list)?;
    let row = |at: u32| format!("{{\"prompt\": \"{at}\", \"response\": \"r\"}}\n");
    fs::write(&paths[2], (0..20).map(row).collect::<String>() + "{\"prompt\"")?;
    Ok(paths)
}

fn attacked(lab: &Lab, runs: &Runs, attack: &Attack, directory: &Path) -> Outcome {
    let named = |error: std::io::Error| format!("{}: {error}", directory.display());
    let (shared, victim) = (directory.join("shared"), directory.join("victim"));
    fs::create_dir(&shared).map_err(named)?;
    fs::set_permissions(&shared, fs::Permissions::from_mode(attack.mode)).map_err(named)?;
    if attack.is_theirs {
        chown(&shared, Some(OTHER), Some(OTHER)).map_err(named)?;
    }
    write_victim(&victim, runs)?;
    let rows = write_rows(directory)?;
    let [preferences, list, broken_rows] = write_inputs(directory, &shared).map_err(named)?;
    let places = [
        ("SHARED", &shared),
        ("VICTIM", &victim),
        ("MODEL", &runs.model),
        ("ADAPTER", &runs.adapter),
        ("ROWS", &rows),
        ("BROKEN", &broken_rows),
        ("PREFERENCES", &preferences),
        ("LIST", &list),
        ("TOKENIZER", &lab.tokenizer()),
    ];
    let placed = |text: &str| {
        places.iter().fold(text.to_owned(), |text, (word, path)| text.replace(word, &path.display().to_string()))
    };
    let as_root = |text: &str| {
        let mut command = Command::new(&lab.program);
        command.env("TMPDIR", &shared).env_remove("XDG_RUNTIME_DIR").current_dir(directory);
        command.env("LOW_MEM_T5_PRICES", "built-in").env("RAYON_NUM_THREADS", "1");
        let (variables, words) = attacks::variables(text);
        command.args(words.map(placed)).envs(variables.map(|(name, value)| (name, placed(value))));
        process::start_command(command)
    };
    if let Some(ahead) = attack.ahead {
        let ran = as_root(ahead)?.end()?;
        let is_as_meant = if ahead.contains("BROKEN") { ran.code == Some(BAD_ROW) } else { ran.code == Some(0) };
        let run = shared.join("run");
        let opens = run.exists().then(|| Command::new("chmod").args(["-R", "a+rwX"]).arg(run).status());
        if !is_as_meant || !opens.transpose().map_err(named)?.is_none_or(|opened| opened.success()) {
            return Err(format!("{}: the run before it: {}: {}", attack.name, ran.ending(), ran.first_error_line()));
        }
    }
    let before = files(&victim)?;
    let planted = other(&shared, &placed(&attack.before)).and_then(|mut child| child.wait()).map_err(named)?;
    if !planted.success() {
        return Err(format!("{}: the other user could not prepare it: {planted}", attack.name));
    }
    let meanwhile = attack.meanwhile.as_ref().map(|text| other(&shared, &placed(text))).transpose().map_err(named)?;
    let ran = as_root(&attack.command)?.end();
    if let Some(mut child) = meanwhile {
        // The child leads a group of its own, and its shell may have started another program.
        let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status();
        let _ = child.wait();
    }
    Ok(broken(attack, &ran?, &before, &files(&victim)?, &shared))
}

/// The promises that a command broke.
fn broken(
    attack: &Attack,
    ran: &Ran,
    before: &BTreeMap<PathBuf, Vec<u8>>,
    after: &BTreeMap<PathBuf, Vec<u8>>,
    shared: &Path,
) -> Vec<String> {
    let is_report = matches!(attack.expected, Expected::Findings) && ran.code == Some(WARNS);
    let mut broken = if is_report { Vec::new() } else { promises::ended_well(ran, false) };
    if before != after {
        broken.push(format!("files of root changed: {} before, {} after", before.len(), after.len()));
    }
    if shared.join("was-read").exists() {
        broken.push("the other user read private rows".to_string());
    }
    if let Some(path) = published(shared) {
        broken.push(format!("{}: has text of a private file of root", path.display()));
    }
    if let Expected::Refused(words) = attack.expected
        && (ran.code == Some(0) || !ran.err.contains(words))
    {
        broken.push(format!("expected a refusal with `{words}`: {}: {}", ran.ending(), ran.first_error_line()));
    }
    broken
}

/// Starts a script of the other user.
fn other(directory: &Path, script: &str) -> std::io::Result<Child> {
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).current_dir(directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    shell.process_group(0).uid(OTHER).gid(OTHER).spawn()
}

/// A file that everyone can reach and that has text of a private file. Links are not followed.
fn published(directory: &Path) -> Option<PathBuf> {
    let has_text = |bytes: Vec<u8>| bytes.windows(PRIVATE.len()).any(|window| window == PRIVATE.as_bytes());
    fs::read_dir(directory).ok()?.flatten().find_map(|entry| match entry.file_type().ok()? {
        kind if kind.is_dir() => published(&entry.path()),
        kind if kind.is_file() => {
            fs::read(entry.path()).ok().filter(|bytes| has_text(bytes.clone())).map(|_| entry.path())
        }
        _ => None,
    })
}

/// Every file below a directory, with its contents.
fn files(directory: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>, String> {
    let named = |error: std::io::Error| format!("{}: {error}", directory.display());
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).map_err(named)? {
        let path = entry.map_err(named)?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            let contents = fs::read(&path).map_err(named)?;
            found.insert(path, contents);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_paths_are_found_in_a_help_text() {
        let help = "  -o, --output <DIR>\n      A directory --input <FILE>\n      --model <DIR|ID>   Its name\n      --seed <N>\n      --json\n";
        assert_eq!(path_flags(help), ["--output", "--model"]);
    }
}
