//! `metrics.jsonl`: one JSON object a line, append only, one write a line.
//!
//! A killed run leaves lines after its last checkpoint. The resumed run appends a `resume` event with the checkpoint's step, and then
//! writes those steps again. Of two lines with the same step the later one is valid; with the same plan and kernels both are equal. Only a
//! torn last line, which a crash of the system can leave, is ever removed.
//!
//! A line that cannot be written never stops the run. At most [`MAX_WAITING_BYTES`] of such lines wait, and are written with a later event
//! as soon as possible.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use run_report::figures::timestamp;
use run_report::visible;
use serde_json::{Map, Value, json};

/// Bytes of lines that may wait for the file.
const MAX_WAITING_BYTES: usize = 256 << 10;

/// `metrics.jsonl`, opened with the first event.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: Option<File>,
    /// Bytes that could not be written yet. The first line may be partly written.
    waiting: Vec<u8>,
    /// Lines that were lost because too many bytes were waiting.
    lost_lines: u64,
    has_warned: bool,
}

impl Metrics {
    /// The events of a run whose file is at `path`.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), file: None, waiting: Vec::new(), lost_lines: 0, has_warned: false }
    }

    /// Appends a line of [`line()`] after the waiting bytes. Returns a warning on the first failure.
    pub fn append(&mut self, line: &str) -> Option<String> {
        let has_room = |waiting: &[u8]| waiting.is_empty() || waiting.len() + line.len() <= MAX_WAITING_BYTES;
        if has_room(&self.waiting) || (self.write_waiting().is_ok() && has_room(&self.waiting)) {
            self.waiting.extend_from_slice(line.as_bytes());
        } else {
            self.lost_lines += 1;
        }
        let error = self.write_waiting().err()?;
        if std::mem::replace(&mut self.has_warned, true) {
            return None;
        }
        Some(format!(
            "{}: cannot append: {error}; the run continues and tries again at every event",
            self.path.display()
        ))
    }

    /// The warning at the end about lines that are missing in the file.
    pub fn missing(&self) -> Option<String> {
        let waiting = self.waiting.iter().filter(|byte| **byte == b'\n').count() as u64;
        let lines = self.lost_lines + waiting;
        (lines > 0).then(|| format!("{}: {lines} lines could not be written", self.path.display()))
    }

    fn write_waiting(&mut self) -> std::io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(open(&self.path)?),
        };
        while !self.waiting.is_empty() {
            match file.write(&self.waiting) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.waiting.drain(..written)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The line of an event: `{"event": event, "time": now, ..fields}`.
pub fn line(event: &str, fields: Value) -> String {
    let mut line = Map::new();
    line.insert("event".to_string(), json!(event));
    line.insert("time".to_string(), json!(timestamp(SystemTime::now())));
    if let Value::Object(fields) = fields {
        line.extend(fields);
    }
    visible::lines(&format!("{}\n", Value::Object(line))).into_owned()
}

/// Opens the file to append, and removes a torn last line.
fn open(path: &Path) -> std::io::Result<File> {
    let mut file = durable_files::append(path)?;
    let whole_lines = length_of_whole_lines(&mut file)?;
    if file.metadata()?.len() > whole_lines {
        file.set_len(whole_lines)?;
    }
    Ok(file)
}

/// A number as JSON. Numbers that JSON does not have become the strings `NaN`, `inf` or `-inf`.
pub fn number(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { json!(value.to_string()) }
}

/// The position after the last line break. Reads backwards, a block at a time.
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

/// A short digest of the rows of a step, in order. It differs if the rows or their order differ.
pub fn rows_digest(rows: &[u64]) -> String {
    let key = rows.iter().fold(dataloader::Key::new(rows.len() as u64), |key, &row| key.derive(row));
    format!("{:016x}", key.stream().bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(path: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| line["step"].as_u64().unwrap()).collect()
    }

    #[test]
    fn lines_are_appended_and_only_a_torn_one_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let torn = format!("{{\"event\":\"step\",\"note\":\"{}", "x".repeat(10_000));
        std::fs::write(&path, format!("{{\"event\":\"step\",\"step\":1}}\n{torn}")).unwrap();
        for step in [2, 3] {
            let mut metrics = Metrics::new(&path);
            assert_eq!(metrics.append(&line("step", json!({"step": step, "loss": number(f64::NAN)}))), None);
        }
        assert_eq!(steps(&path), [1, 2, 3]);
        let text = std::fs::read_to_string(&path).unwrap();
        let line: Value = serde_json::from_str(text.lines().nth(1).expect("a second line")).expect("JSON");
        assert_eq!((&line["event"], &line["step"], &line["loss"]), (&json!("step"), &json!(2), &json!("NaN")));
        assert!(line["time"].as_str().is_some_and(|time| time.ends_with('Z')), "{line}");
    }

    #[test]
    fn lines_that_cannot_be_written_wait_with_one_warning_and_are_written_later() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        std::fs::create_dir(&path).unwrap();
        let mut metrics = Metrics::new(&path);
        let warning = metrics.append(&line("step", json!({"step": 1}))).expect("a directory is in the way");
        assert!(warning.contains("metrics.jsonl: cannot append: "), "{warning}");
        assert_eq!(metrics.append(&line("step", json!({"step": 2}))), None, "it was said");
        assert!(metrics.missing().is_some_and(|missing| missing.contains("2 lines could not be written")));
        std::fs::remove_dir(&path).unwrap();
        assert_eq!(metrics.append(&line("step", json!({"step": 3}))), None);
        assert_eq!((steps(&path), metrics.missing()), (vec![1, 2, 3], None));
    }

    #[test]
    fn lines_that_wait_are_bounded_and_what_is_lost_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        std::fs::create_dir(&path).unwrap();
        let mut metrics = Metrics::new(&path);
        for step in 0..10 {
            metrics.append(&line("step", json!({"step": step, "text": "x".repeat(MAX_WAITING_BYTES / 5)})));
        }
        assert!(metrics.waiting.len() <= MAX_WAITING_BYTES);
        assert!(metrics.missing().is_some_and(|missing| missing.contains("10 lines could not be written")));
        std::fs::remove_dir(&path).unwrap();
        metrics.append(&line("step", json!({"step": 10})));
        assert_eq!(steps(&path), [0, 1, 2, 3, 10]);
        assert!(metrics.missing().is_some_and(|missing| missing.contains("6 lines could not be written")));
    }
}
