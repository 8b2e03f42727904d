//! The command's parsers of external bytes as functions, for tools that test them on damaged input.

use std::path::Path;

use crate::config;
use crate::files::{metrics, run_dir};

/// Reads the text of a config file, resolves it and writes it as for `resolved.toml`.
pub fn config(text: &str) -> Result<(), String> {
    let mut values = config::Values::defaults();
    values.apply_file("config.toml", text).map_err(|failure| failure.to_string())?;
    config::Config::resolve(values).map(|_| ()).map_err(|failure| failure.to_string())
}

/// Reads one `KEY=VALUE` of `--set` and resolves it.
pub fn assignment(text: &str) -> Result<(), String> {
    let mut values = config::Values::defaults();
    values.apply_assignment("data.train=rows.parquet").map_err(|failure| failure.to_string())?;
    values.apply_assignment(text).map_err(|failure| failure.to_string())?;
    config::Config::resolve(values).map(|_| ()).map_err(|failure| failure.to_string())
}

/// Opens a `metrics.jsonl` for appending, which removes a torn last line, and appends a line.
pub fn metrics(path: &Path) -> Result<(), String> {
    let line = metrics::line("step", serde_json::json!({ "step": 1 }));
    metrics::Metrics::new(path).append(&line).map_or(Ok(()), Err)
}

/// Reads the `finished.json` of an output directory.
pub fn finished(output: &Path) -> Option<u64> {
    run_dir::RunDir::open_read_only(output).finished_step()
}
