//! Mutated inputs for every parser of foreign bytes: no panic, no end of the process, no hang, and little memory.
//!
//! The program `try_inputs` of the crate `foreign-bytes` does the work, since xtask would otherwise depend on the whole
//! product. This module runs it, and converts each of its rows to a row of the table.

use std::process::Command;

use serde_json::Value;

use super::Lab;
use super::table::{Row, Table};

/// Tries thousands of inputs of each parser, and some of them on the command.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    try_inputs(lab, table, lab.options.tries.map(|tries| vec!["--tries".to_string(), tries.to_string()]))
}

/// Tries the first few inputs, which are the corpora. Takes a few seconds.
pub fn quick(lab: &Lab, table: &mut Table) -> Result<(), String> {
    try_inputs(lab, table, Some(vec!["--quick".to_string()]))
}

fn try_inputs(lab: &Lab, table: &mut Table, arguments: Option<Vec<String>>) -> Result<(), String> {
    const ROW: &str = "mutated inputs";
    if !lab.is_asked_for(ROW) {
        return Ok(());
    }
    let here = std::env::current_exe().map_err(|error| error.to_string())?;
    let program = here.with_file_name("try_inputs");
    if !program.is_file() {
        return Err(format!("{}: not built; `cargo build --release --workspace`", program.display()));
    }
    let report = crate::root().join("target/faults/mutated-inputs.json");
    // An old report must not be mistaken for this run's.
    let _ = std::fs::remove_file(&report);
    let mut command = Command::new(&program);
    command.args(arguments.unwrap_or_default()).args(["--seed", &lab.options.seed.to_string()]);
    command.arg("--report").arg(&report).current_dir(crate::root());
    let status = command.status().map_err(|error| format!("{}: {error}", program.display()))?;
    let text = std::fs::read(&report).map_err(|error| format!("{}: {error}; {status}", report.display()))?;
    let rows: Vec<Value> = serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", report.display()))?;
    rows.iter().for_each(|row| table.add(row_of(ROW, row)));
    if rows.is_empty() { Err(format!("{}: no parser was tried", report.display())) } else { Ok(()) }
}

fn row_of(name: &str, row: &Value) -> Row {
    let number = |key: &str| row[key].as_f64().unwrap_or_default();
    let failed = row["findings"].as_array().into_iter().flatten().map(|finding| {
        let broken = format!("{}: {}", text(&finding["kind"]), text(&finding["what"]));
        (format!("{} {}", text(&row["parser"]), finding["number"]), vec![broken])
    });
    Row {
        fault: format!("{name}, {}", text(&row["parser"])),
        tries: row["tries"].as_u64().unwrap_or_default() as usize,
        failed: failed.collect(),
        notes: vec![format!(
            "{} accepted; slowest {:.1} ms; at most {:.1} MiB above the base",
            row["accepted"],
            number("slowest_ms"),
            number("largest_excess_kib") / 1024.
        )],
        seconds: number("seconds"),
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_a_try_that_broke_a_promise() {
        let row = serde_json::json!({ "parser": "snappy", "tries": 150, "accepted": 3, "slowest_ms": 1.5,
            "largest_excess_kib": 2048, "seconds": 0.5,
            "findings": [{ "number": 7, "kind": "hang", "what": "more than 10 s", "input": null }] });
        let row = row_of("mutated inputs", &row);
        assert_eq!((row.fault.as_str(), row.tries), ("mutated inputs, snappy", 150));
        assert_eq!(row.failed, [("snappy 7".to_string(), vec!["hang: more than 10 s".to_string()])]);
        assert_eq!(row.notes, ["3 accepted; slowest 1.5 ms; at most 2.0 MiB above the base"]);
    }
}
