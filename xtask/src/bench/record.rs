//! Pages of measured results: `bench/NAME.md` for readers, and `bench/NAME.json` for programs.
//!
//! Invariants: a page has a section for each kind of processor, and a new result replaces the section of its own. A section names the measured
//! commit, the day, the machine and the command. It contains no host name and no path of the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::calendar;

/// The processor features that determine the kernels.
const UNITS: [&str; 9] =
    ["avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "bf16"];

/// Instruction sets by their most telling unit, the best first.
const BEST: [(&str, &str); 5] =
    [("amx_tile", "AMX"), ("avx512_bf16", "AVX512-BF16"), ("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON")];

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
        Self { name: name.to_owned(), command, commit, date, machine }
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

    /// Writes a result into its page below `directory`, and returns the two files.
    ///
    /// # Errors
    ///
    /// A file cannot be read or written.
    pub fn write(&self, directory: &Path, markdown: &str, results: &Value) -> Result<[PathBuf; 2], String> {
        let failed = |path: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        fs::create_dir_all(directory).map_err(|error| failed(directory, &error))?;
        let paths = ["md", "json"].map(|extension| directory.join(format!("{}.{extension}", self.name)));
        let [page, numbers] = &paths;
        let processor = self.machine.kind();
        let (title, rest) = markdown.split_once('\n').unwrap_or((markdown, ""));
        let section = format!("{}\n{}", self.lines(), deeper(rest.trim_start()));
        let text = with_section(&fs::read_to_string(page).unwrap_or_default(), title, &processor, &section);
        fs::write(page, text).map_err(|error| failed(page, &error))?;
        let mut record: Map<String, Value> = match fs::read_to_string(numbers) {
            Ok(text) => serde_json::from_str(&text).map_err(|error| failed(numbers, &error))?,
            Err(_) => Map::new(),
        };
        let mut result = Map::from_iter([("run".to_owned(), self.json())]);
        result.extend(results.as_object().cloned().unwrap_or_default());
        record.insert(processor, Value::Object(result));
        fs::write(numbers, format!("{:#}\n", Value::Object(record))).map_err(|error| failed(numbers, &error))?;
        Ok(paths)
    }
}

/// The page with this section in place of the one of the same heading, or with one section more. A page without a text gets the title.
fn with_section(page: &str, title: &str, heading: &str, section: &str) -> String {
    let page = if page.is_empty() { format!("{title}\n") } else { page.to_owned() };
    let section = format!("## {heading}\n\n{}\n", section.trim_end());
    let mut parts: Vec<String> = page.split("\n## ").map(|part| part.trim_end().to_owned() + "\n").collect();
    for part in &mut parts[1..] {
        part.insert_str(0, "## ");
    }
    match parts[1..].iter_mut().find(|part| part.lines().next() == section.lines().next()) {
        Some(old) => *old = section,
        None => parts.push(section),
    }
    parts.join("\n")
}

/// Headings one level deeper.
fn deeper(markdown: &str) -> String {
    let deeper = |line: &str| if line.starts_with("##") { format!("#{line}\n") } else { format!("{line}\n") };
    markdown.lines().map(deeper).collect()
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

impl Machine {
    /// The processor's name and its best instruction set: the heading of its section.
    fn kind(&self) -> String {
        let best = BEST.iter().find(|(unit, _)| self.units.iter().any(|has| has == unit));
        best.map_or_else(|| brand(&self.processor), |(_, name)| format!("{}, {name}", brand(&self.processor)))
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

/// A processor's name without marks and clock rates.
fn brand(processor: &str) -> String {
    let name = processor.split('@').next().unwrap_or_default().replace("(R)", " ").replace("(TM)", " ");
    let words = name.split_whitespace().filter(|word| !["CPU", "Processor"].contains(word));
    words.collect::<Vec<_>>().join(" ")
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
        Origin { name, command, commit, date, machine }
    }

    #[test]
    fn a_result_replaces_that_of_the_same_processor_and_no_other() {
        let directory = std::env::temp_dir().join(format!("bench-pages-{}", std::process::id()));
        let write = |processor: &str, text: &str, cases: u32| {
            let mut origin = origin();
            origin.machine.processor = processor.to_owned();
            origin
                .write(&directory, &format!("# Title\n\n{text}\n\n## f32\n\nRow.\n"), &json!({"cases": cases}))
                .unwrap()
        };
        let [page, numbers] = write("AMD EPYC", "First.", 1);
        assert_eq!([&page, &numbers], [&directory.join("memory.md"), &directory.join("memory.json")]);
        // A sentence below the title stays.
        let text = fs::read_to_string(&page).unwrap();
        fs::write(&page, text.replacen("# Title\n", "# Title\n\nHow to read it.\n", 1)).unwrap();
        write("Intel(R) Xeon(R) Processor", "Other.", 2);
        write("AMD EPYC", "Second.", 3);
        let head = "- command: `cargo xtask bench memory`\n- commit: abc1234\n- date: 2026-11-23\n- machine:";
        let machine = |name: &str| format!("{head} {name} (avx2), 2 cores, 1024 MiB, Linux 6.1\n");
        let expected = format!(
            "# Title\n\nHow to read it.\n\n## AMD EPYC, AVX2\n\n{}\nSecond.\n\n### f32\n\nRow.\n\n## Intel Xeon, AVX2\n\n{}\nOther.\n\n### f32\n\nRow.\n",
            machine("AMD EPYC"),
            machine("Intel(R) Xeon(R) Processor")
        );
        assert_eq!(fs::read_to_string(&page).unwrap(), expected);
        let record: Value = serde_json::from_str(&fs::read_to_string(&numbers).unwrap()).unwrap();
        assert_eq!(record["AMD EPYC, AVX2"]["cases"], 3);
        assert_eq!(record["AMD EPYC, AVX2"]["run"]["commit"], "abc1234");
        assert_eq!(record["Intel Xeon, AVX2"]["cases"], 2);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_machine_is_named_by_its_processor_and_its_kernel_by_numbers_alone() {
        assert_eq!(brand("Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz"), "Intel Xeon Platinum 8488C");
        assert_eq!(brand("AMD EPYC 9R14 Processor"), "AMD EPYC 9R14");
        assert_eq!(version("6.18.2-provider.example"), "6.18.2");
        assert_eq!(field("a\t: 1\nmodel name\t: AMD EPYC\n", "model name"), Some("AMD EPYC"));
        assert_eq!(units("fpu avx2 avx512f avx512bw"), ["avx2", "avx512f"]);
    }
}
