//! Files of measured results: `bench/runs/DATE-PROCESSOR/NAME.{md,json}`.
//!
//! Invariants: a record names the measured commit, the day, the machine and the command. A record is never overwritten:
//! a second record of the same name gets a number. A record contains no host name and no path of the machine.

use std::cell::OnceCell;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::calendar;

/// The processor features that determine the kernels.
const UNITS: [&str; 9] =
    ["avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "bf16"];

/// The origin of a result.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The benchmark: `memory`, `levers` and so on.
    pub name: String,
    /// The command line that measures it again.
    pub command: String,
    commit: String,
    date: String,
    machine: Machine,
    /// The files of this result, set once the first part is written.
    paths: OnceCell<[PathBuf; 2]>,
}

#[derive(Clone, Debug)]
struct Machine {
    processor: String,
    units: Vec<String>,
    cores: usize,
    memory_bytes: u64,
    kernel: String,
}

impl Origin {
    /// The origin of a result that is measured now, in the checkout at `root`.
    pub fn here(root: &Path, name: &str, command: String) -> Self {
        let (commit, date, machine) = (commit(root), today(), Machine::here());
        Self { name: name.to_owned(), command, commit, date, machine, paths: OnceCell::new() }
    }

    fn json(&self) -> Value {
        let Machine { processor, units, cores, memory_bytes, kernel } = &self.machine;
        json!({
            "commit": self.commit, "date": self.date, "command": self.command,
            "machine": {"processor": processor, "units": units, "cores": cores, "memory_bytes": memory_bytes, "kernel": kernel},
        })
    }

    fn lines(&self) -> String {
        let Machine { processor, units, cores, memory_bytes, kernel } = &self.machine;
        let units = units.join(", ");
        format!(
            "- command: `{}`\n- commit: {}\n- date: {}\n- machine: {processor} ({units}), {cores} cores, {:.0} MiB, Linux {kernel}\n",
            self.command,
            self.commit,
            self.date,
            super::mib(*memory_bytes)
        )
    }

    /// Writes a result below `runs`, and returns the two files.
    ///
    /// # Errors
    ///
    /// A file cannot be written.
    pub fn write(&self, runs: &Path, markdown: &str, results: &Value) -> Result<[PathBuf; 2], String> {
        let directory = runs.join(format!("{}-{}", self.date, slug(&self.machine.processor)));
        fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let (title, rest) = markdown.split_once('\n').unwrap_or((markdown, ""));
        let markdown = format!("{title}\n\n{}{rest}", self.lines());
        let mut record = json!({"run": self.json()});
        if let (Some(record), Some(results)) = (record.as_object_mut(), results.as_object()) {
            record.extend(results.clone());
        }
        // A benchmark that writes after each part replaces only its own files.
        let is_first = self.paths.get().is_none();
        let paths = self.paths.get_or_init(|| free_paths(&directory, &self.name));
        for (path, text) in paths.iter().zip([markdown, format!("{record:#}\n")]) {
            let file = OpenOptions::new().write(true).create_new(is_first).truncate(!is_first).open(path);
            file.and_then(|mut file| file.write_all(text.as_bytes()))
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(paths.clone())
    }
}

/// `NAME.md` and `NAME.json`, with the first number that makes both names free, if needed.
fn free_paths(directory: &Path, name: &str) -> [PathBuf; 2] {
    let paths = |name: &str| ["md", "json"].map(|extension| directory.join(format!("{name}.{extension}")));
    let (mut free, mut number) = (paths(name), 2);
    while free.iter().any(|path| path.exists()) {
        free = paths(&format!("{name}-{number}"));
        number += 1;
    }
    free
}

impl Machine {
    fn here() -> Self {
        let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            processor: field(&processor, "model name").unwrap_or("unknown").to_owned(),
            units: units(field(&processor, "flags").or(field(&processor, "Features")).unwrap_or_default()),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: field(&memory, "MemTotal")
                .and_then(|text| text.strip_suffix(" kB")?.trim().parse::<u64>().ok())
                .unwrap_or(0)
                << 10,
            kernel: version(&kernel),
        }
    }
}

/// The value of the first line `name : value`.
fn field<'text>(text: &'text str, name: &str) -> Option<&'text str> {
    let values = text.lines().filter_map(|line| line.split_once(':'));
    values.into_iter().find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
}

fn units(flags: &str) -> Vec<String> {
    let has = |unit: &&str| flags.split_whitespace().any(|flag| flag == *unit);
    UNITS.iter().filter(|unit| has(unit)).map(|unit| (*unit).to_owned()).collect()
}

/// The leading numbers of a kernel's release; the rest may name a provider.
fn version(release: &str) -> String {
    let numbers: String = release.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    if numbers.is_empty() { "unknown".to_owned() } else { numbers }
}

/// A processor's name, in a form for a directory's name.
fn slug(processor: &str) -> String {
    let name = processor.split('@').next().unwrap_or_default().replace("(R)", " ").replace("(TM)", " ");
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let words = words.filter(|word| !["CPU", "Processor"].contains(word));
    words.map(str::to_lowercase).collect::<Vec<_>>().join("-")
}

/// The checked-out commit, with `, changed` if the tree differs from it.
pub fn commit(root: &Path) -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    match git(&["rev-parse", "--short", "HEAD"]) {
        None => "unknown".to_owned(),
        Some(commit) if changed => format!("{commit}, changed"),
        Some(commit) => commit,
    }
}

/// Today, in UTC.
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    calendar::date(seconds / calendar::DAY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin() -> Origin {
        let machine = Machine {
            processor: "AMD EPYC".to_owned(),
            units: vec!["avx2".to_owned()],
            cores: 2,
            memory_bytes: 1 << 30,
            kernel: "6.1".to_owned(),
        };
        let [name, command, commit, date] =
            ["memory", "cargo xtask bench memory", "abc1234", "2026-11-23"].map(str::to_owned);
        Origin { name, command, commit, date, machine, paths: OnceCell::new() }
    }

    #[test]
    fn a_second_result_of_a_day_does_not_overwrite_the_first() {
        let runs = std::env::temp_dir().join(format!("bench-records-{}", std::process::id()));
        let first = origin().write(&runs, "# Title\n\nFirst.\n", &json!({"cases": 1})).unwrap();
        let second = origin().write(&runs, "# Title\n\nSecond.\n", &json!({"cases": 2})).unwrap();
        let directory = runs.join("2026-11-23-amd-epyc");
        assert_eq!(first, [directory.join("memory.md"), directory.join("memory.json")]);
        let third = origin();
        third.write(&runs, "# Title\n\nA part.\n", &json!({"cases": 3})).unwrap();
        let paths = third.write(&runs, "# Title\n\nWhole.\n", &json!({"cases": 4})).unwrap();
        assert_eq!(paths[0], directory.join("memory-3.md"), "a result that grows stays one result");
        assert!(fs::read_to_string(&paths[0]).unwrap().ends_with("Whole.\n"));
        assert_eq!(second, [directory.join("memory-2.md"), directory.join("memory-2.json")]);
        let record: Value = serde_json::from_str(&fs::read_to_string(&first[1]).unwrap()).unwrap();
        assert_eq!(record["cases"], 1);
        assert_eq!(record["run"]["commit"], "abc1234");
        assert_eq!(record["run"]["machine"]["processor"], "AMD EPYC");
        let markdown = fs::read_to_string(&first[0]).unwrap();
        assert!(
            markdown.starts_with("# Title\n\n- command: `cargo xtask bench memory`\n- commit: abc1234\n"),
            "{markdown}"
        );
        assert!(markdown.ends_with("\n\nFirst.\n"), "{markdown}");
        fs::remove_dir_all(&runs).unwrap();
    }

    #[test]
    fn a_machine_is_named_by_its_processor_and_its_kernel_by_numbers_alone() {
        assert_eq!(slug("Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz"), "intel-xeon-platinum-8488c");
        assert_eq!(slug("AMD EPYC 9R14 Processor"), "amd-epyc-9r14");
        assert_eq!(version("6.18.2-provider.example"), "6.18.2");
        assert_eq!(field("a\t: 1\nmodel name\t: AMD EPYC\n", "model name"), Some("AMD EPYC"));
        assert_eq!(units("fpu avx2 avx512f avx512bw"), ["avx2", "avx512f"]);
    }
}
