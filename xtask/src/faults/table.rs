//! The harness's table: a row for each fault, for readers and for programs.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::calendar;

/// The most failed tries that a row for readers names.
const NAMED: usize = 8;

/// The outcome of one fault.
#[derive(Debug, Default)]
pub struct Row {
    /// The fault, and where it was injected.
    pub fault: String,
    /// Number of runs with this fault.
    pub tries: usize,
    /// Names of the tries that broke promises, each with the broken promises.
    pub failed: Vec<(String, Vec<String>)>,
    /// Numbers and remarks: points, the slowest try, skipped tries and the reason.
    pub notes: Vec<String>,
    /// Wall time.
    pub seconds: f64,
}

/// Rows, and the command that made them.
pub struct Table {
    command: String,
    commit: String,
    began: Instant,
    part: String,
    rows: Vec<(String, Row)>,
}

impl Table {
    /// An empty table for this command in the repository at `root`.
    pub fn new(root: &Path, command: &str) -> Self {
        let commit = output(Command::new("git").current_dir(root).args(["describe", "--always", "--dirty"]));
        Self { command: command.to_string(), commit, began: Instant::now(), part: String::new(), rows: Vec::new() }
    }

    /// Begins a part, to which the following rows belong.
    pub fn begin(&mut self, part: &str) {
        self.part = part.to_string();
    }

    /// Adds a row, and prints it.
    pub fn add(&mut self, row: Row) {
        println!("{}", line(&self.part, &row));
        for (name, broken) in row.failed.iter().take(NAMED) {
            println!("    broke: {name}: {}", broken.join("; "));
        }
        if row.failed.len() > NAMED {
            println!("    and {} more, all of them in the file", row.failed.len() - NAMED);
        }
        self.rows.push((self.part.clone(), row));
    }

    /// Adds a row for a fault that cannot be tried here.
    pub fn skip(&mut self, fault: &str, why: &str) {
        self.add(Row { fault: fault.to_string(), notes: vec![format!("SKIPPED: {why}")], ..Row::default() });
    }

    /// Number of tries that broke a promise.
    pub fn failures(&self) -> usize {
        self.rows.iter().map(|(_, row)| row.failed.len()).sum()
    }

    /// The table for readers.
    pub fn text(&self) -> String {
        let mut text = String::from("| part | fault | tries | failures | notes |\n| --- | --- | --- | --- | --- |\n");
        for (part, row) in &self.rows {
            text += &line(part, row);
            text.push('\n');
        }
        let tries: usize = self.rows.iter().map(|(_, row)| row.tries).sum();
        let seconds = self.began.elapsed().as_secs_f64();
        let _ = writeln!(text, "{tries} tries, {} broke a promise; {seconds:.0} s", self.failures());
        text
    }

    /// Writes the table for programs.
    pub fn write(&self, path: &Path) -> Result<(), String> {
        let rows: Vec<Value> = self.rows.iter().map(|(part, row)| of_row(part, row)).collect();
        let seconds_since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs());
        let json = json!({
            "command": self.command, "commit": self.commit, "date": calendar::date_and_time(seconds_since_1970), "machine": machine(),
            "seconds": self.began.elapsed().as_secs_f64(), "failures": self.failures(), "rows": rows,
        });
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new("."))).map_err(failed)?;
        std::fs::write(path, format!("{json:#}\n")).map_err(failed)
    }
}

fn line(part: &str, row: &Row) -> String {
    let notes = row.notes.join("; ");
    format!("| {part} | {} | {} | {} | {notes} |", row.fault, row.tries, row.failed.len())
}

fn of_row(part: &str, row: &Row) -> Value {
    let failed: Vec<Value> = row.failed.iter().map(|(name, broken)| json!({"try": name, "broken": broken})).collect();
    json!({"part": part, "fault": row.fault, "tries": row.tries, "failures": row.failed.len(), "failed": failed,
           "notes": row.notes, "seconds": row.seconds})
}

fn output(command: &mut Command) -> String {
    let output = command.output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).trim().to_string()
}

fn machine() -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map_or_else(String::new, |(_, value)| value.trim().to_string())
    };
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    json!({"processor": field(&read("/proc/cpuinfo"), "model name"), "processors": processors,
           "memory": field(&read("/proc/meminfo"), "MemTotal"), "kernel": read("/proc/sys/kernel/osrelease").trim()})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_skipped_is_in_the_table_and_is_no_try() {
        let mut table = Table::new(Path::new("."), "faults");
        table.begin("memory");
        table.skip("groups", "no memory controller");
        assert!(table.text().contains("| memory | groups | 0 | 0 | SKIPPED: no memory controller |"));
        assert_eq!(table.failures(), 0);
    }
}
