//! `metrics.jsonl`: one JSON object a line, append only, one write a line.
//!
//! A killed run leaves lines after its last checkpoint. The run that goes on appends a `resume` event with
//! the checkpoint's step and then writes those steps again: of two lines with the same step the later one
//! counts (on the same machine and plan they are equal). Only a torn last line, which a crash of the
//! system can leave, is ever removed.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::failure::{Failure, Outcome};

/// An open `metrics.jsonl`.
#[derive(Debug)]
pub struct Metrics {
    file: File,
    path: PathBuf,
}

impl Metrics {
    /// Opens the file to append, and removes a torn last line.
    pub fn open(path: &Path) -> Outcome<Self> {
        let failed = |error: std::io::Error| Failure::io("open it to append", path, &error);
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(failed)?;
        let whole_lines = length_of_whole_lines(&mut file).map_err(failed)?;
        file.set_len(whole_lines).map_err(failed)?;
        Ok(Self { file, path: path.to_path_buf() })
    }

    /// Appends `{"event": event, ..fields}`.
    pub fn record(&mut self, event: &str, fields: Value) -> Outcome<()> {
        let mut line = Map::new();
        line.insert("event".to_string(), json!(event));
        if let Value::Object(fields) = fields {
            line.extend(fields);
        }
        let mut bytes = serde_json::to_vec(&line).map_err(|error| Failure::internal(format!("metrics: {error}")))?;
        bytes.push(b'\n');
        self.file.write_all(&bytes).map_err(|error| Failure::io("append a line", &self.path, &error))
    }
}

/// A number as JSON: what JSON has no number for is the string `NaN`, `inf` or `-inf`.
pub fn number(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { json!(value.to_string()) }
}

/// Where the last line that ends in a line break ends. Reads backwards, a block at a time.
fn length_of_whole_lines(file: &mut File) -> std::io::Result<u64> {
    const BLOCK: u64 = 4096;
    let mut end = file.seek(SeekFrom::End(0))?;
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        let mut block = Vec::new();
        file.seek(SeekFrom::Start(start))?;
        file.take(end - start).read_to_end(&mut block)?;
        if let Some(position) = block.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + position as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_appended_and_only_a_torn_one_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let torn = format!("{{\"event\":\"step\",\"note\":\"{}", "x".repeat(10_000));
        std::fs::write(&path, format!("{{\"event\":\"step\",\"step\":1}}\n{torn}")).unwrap();
        for step in [2, 3] {
            let mut metrics = Metrics::open(&path).unwrap();
            metrics.record("step", json!({"step": step, "loss": number(f64::NAN)})).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(text.lines().nth(1), Some("{\"event\":\"step\",\"step\":2,\"loss\":\"NaN\"}"));
    }
}
