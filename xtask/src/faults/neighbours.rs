//! Another user of the machine: plants links, pipes and hard links, exchanges directories, and holds locks, wherever a command of root
//! works. A file of root in a private directory must stay what it is, and no command may wait for the other user.
//!
//! The other user is `nobody`, so root is needed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::Lab;
use super::lab::Outcome;
use super::process::{self, Ran};
use super::promises;
use super::table::Table;

/// The other user.
const OTHER: u32 = 65534;
/// A run of one small step.
const RUN: &str = "--max-steps 1 --output SHARED/run --set train.batch_size=2 --set train.eval_samples=0 \
                   --set model.overrides={num_layers=1,num_decoder_layers=1,d_model=16,d_ff=32,d_kv=8,num_heads=2}";
/// A plan that converts rows in the directory for temporary files.
const PLAN: &str = "plan --set data.train=ROWS --set model.config=tiny --set data.tokenizer=TOKENIZER";
const CONVERT: &str = "convert ROWS --force --output SHARED/x.parquet";
const REPORT: &str = "report SHARED/run --output SHARED/x.html";
/// A leftover's name.
const LEFT: &str = ".train_low_mem-tmp-0123456789abcdef";
/// Exchanges a directory for a link, again and again, until it is killed.
const EXCHANGES: &str = "while :; do mv -T A B 2>/dev/null && ln -s VICTIM A; rm -f A; mv -T B A 2>/dev/null; done";

/// An attack, and the command that it is made on.
struct Attack {
    name: String,
    /// What the other user does first, in the shared directory.
    before: String,
    /// What the other user does meanwhile.
    meanwhile: Option<String>,
    command: &'static str,
    /// Permissions of the shared directory.
    mode: u32,
    /// Whether the shared directory belongs to the other user.
    is_theirs: bool,
    expected: Expected,
}

/// The end of a command that is attacked.
#[derive(Clone, Copy)]
enum Expected {
    /// Any documented one.
    Any,
    /// A refusal with these words.
    Refused(&'static str),
}

impl Attack {
    fn new(name: impl Into<String>, before: impl Into<String>, command: &'static str) -> Self {
        let (name, before) = (name.into(), before.into());
        Self { name, before, meanwhile: None, command, mode: 0o1777, is_theirs: false, expected: Expected::Any }
    }

    fn meanwhile(self, script: impl Into<String>) -> Self {
        Self { meanwhile: Some(script.into()), ..self }
    }

    fn in_their_directory(self) -> Self {
        Self { is_theirs: true, mode: 0o777, ..self }
    }

    fn refused(self, words: &'static str) -> Self {
        Self { expected: Expected::Refused(words), ..self }
    }
}

/// The attacks on the files of other users, by what they are made on.
fn attacks() -> Vec<(&'static str, Vec<Attack>)> {
    let ledger = "mkdir train_low_mem-0 && cd train_low_mem-0";
    let of_another = "expected a directory of this user alone";
    let ledgers = vec![
        Attack::new("a link for the lock", format!("{ledger} && ln -s VICTIM/new lock"), "jobs").refused(of_another),
        Attack::new("a pipe for the lock", format!("{ledger} && mkfifo lock"), "jobs").refused(of_another),
        Attack::new("a lock that is held", format!("{ledger} && touch lock"), "jobs")
            .meanwhile("exec flock train_low_mem-0/lock sleep 60")
            .refused(of_another),
        Attack::new("a link to a directory of root", "ln -s VICTIM train_low_mem-0", "jobs").refused(of_another),
    ];
    let exchange = |a: &str, b: &str| EXCHANGES.replace('A', a).replace('B', b);
    let inside = format!("mkdir -p {LEFT}-run/checkpoints");
    let temporary = vec![
        Attack::new("a link for an abandoned directory", format!("ln -s VICTIM {LEFT}-run"), PLAN),
        Attack::new(
            "an abandoned directory with a link",
            format!("mkdir {LEFT}-run && ln -s VICTIM {LEFT}-run/model"),
            PLAN,
        ),
        Attack::new("an abandoned directory that is exchanged", inside, PLAN)
            .meanwhile(exchange(&format!("{LEFT}-run/checkpoints"), &format!("{LEFT}-run/y"))),
        Attack::new("a directory that everyone may change", "true", PLAN)
            .in_their_directory()
            .refused("other users could exchange temporary files"),
        Attack::new("private rows", "true", PLAN).meanwhile(
            "while :; do cat .train_low_mem-tmp-*/data/*.parquet 2>/dev/null | grep -q . && touch was-read; done",
        ),
    ];
    let mut outputs = Vec::new();
    for name in [
        "metrics.jsonl",
        "report.html",
        "resolved.toml",
        "finished.json",
        "page-map.bin",
        "checkpoints",
        "model",
        ".lock",
    ] {
        let (link, pipe) = (format!("ln -s VICTIM/precious run/{name}"), format!("mkfifo run/{name}"));
        outputs.push(Attack::new(format!("a link for {name}"), format!("mkdir -m 777 run && {link}"), RUN));
        outputs.push(Attack::new(format!("a pipe for {name}"), format!("mkdir -m 777 run && {pipe}"), RUN));
    }
    outputs.push(
        Attack::new("an output that is exchanged", "true", RUN).in_their_directory().meanwhile(exchange("run", "y")),
    );
    let link = "is a symbolic link of user 65534";
    outputs.push(Attack::new("a link to a directory of root", "ln -s VICTIM/step-00000001 run", RUN).refused(link));
    let named = |name: &str| format!("ln -s VICTIM/precious {name}; ln -s VICTIM {LEFT}-part-model; mkfifo {LEFT}");
    let files = vec![
        Attack::new("convert: links and pipes", named("x.parquet"), CONVERT),
        Attack::new("convert: a link on the way", "ln -s VICTIM way", "convert ROWS --output SHARED/way/new")
            .refused(link),
        Attack::new("report: links and pipes", named("x.html"), REPORT),
        Attack::new("jobs add: a link on the way", "ln -s VICTIM way", "jobs add SHARED/way/new --output x")
            .refused(link),
    ];
    vec![("ledger", ledgers), ("temporary files", temporary), ("outputs", outputs), ("files", files)]
}

/// Makes every attack once.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    let is_root = fs::metadata("/proc/self").is_ok_and(|of| std::os::unix::fs::MetadataExt::uid(&of) == 0);
    if !is_root {
        table.skip("another user", "only root can be another user, too");
        return Ok(());
    }
    for (on, attacks) in attacks() {
        let tries: Vec<(String, Attack)> = attacks.into_iter().map(|attack| (attack.name.clone(), attack)).collect();
        lab.try_all(table, &format!("another user: {on}"), &tries, Vec::new(), |attack, directory| {
            attacked(lab, attack, directory)
        })?;
    }
    Ok(())
}

fn attacked(lab: &Lab, attack: &Attack, directory: &Path) -> Outcome {
    let named = |error: std::io::Error| format!("{}: {error}", directory.display());
    let (shared, victim) = (directory.join("shared"), directory.join("victim"));
    fs::create_dir(&shared).map_err(named)?;
    fs::set_permissions(&shared, fs::Permissions::from_mode(attack.mode)).map_err(named)?;
    if attack.is_theirs {
        chown(&shared, Some(OTHER), Some(OTHER)).map_err(named)?;
    }
    // The names that a command looks for when it removes files.
    for name in ["step-00000001", "model", "checkpoints/step-00000001"] {
        fs::create_dir_all(victim.join(name)).map_err(named)?;
        fs::write(victim.join(name).join("model.safetensors"), "my only copy").map_err(named)?;
    }
    fs::write(victim.join("precious"), "my only copy").map_err(named)?;
    fs::set_permissions(&victim, fs::Permissions::from_mode(0o700)).map_err(named)?;
    let rows = directory.join("rows.jsonl");
    let row =
        |at: u32| format!("{{\"prompt\": \"{}\", \"response\": \"r\"}}\n", "secret ".repeat(at as usize % 50 + 1));
    fs::write(&rows, (0..2_000).map(row).collect::<String>()).map_err(named)?;
    fs::set_permissions(&rows, fs::Permissions::from_mode(0o600)).map_err(named)?;
    let before = files(&victim)?;

    let script = |text: &str| text.replace("VICTIM", &victim.display().to_string());
    let planted = other(&shared, &script(&attack.before)).and_then(|mut child| child.wait()).map_err(named)?;
    if !planted.success() {
        return Err(format!("{}: the other user could not prepare it: {planted}", attack.name));
    }
    let meanwhile = attack.meanwhile.as_ref().map(|text| other(&shared, &script(text))).transpose().map_err(named)?;
    let words = attack.command.split_whitespace().map(|word| {
        word.replace("SHARED", &shared.display().to_string())
            .replace("ROWS", &rows.display().to_string())
            .replace("TOKENIZER", &lab.tokenizer().display().to_string())
    });
    let mut command = Command::new(&lab.program);
    command.args(words).current_dir(directory).env("TMPDIR", &shared).env_remove("XDG_RUNTIME_DIR");
    command.env("LOW_MEM_T5_PRICES", "built-in").env("RAYON_NUM_THREADS", "1");
    let ran = process::start_command(command)?.end();
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
    let mut broken = promises::ended_well(ran, false);
    if before != after {
        broken.push(format!("files of root changed: {} before, {} after", before.len(), after.len()));
    }
    if shared.join("was-read").exists() {
        broken.push("the other user read private rows".to_string());
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
