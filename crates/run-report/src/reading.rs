//! Reads `metrics.jsonl` as a stream: in two passes, with one line in memory at a time.
//!
//! A run that was killed and resumed writes the steps after its checkpoint again. The first pass finds where the run
//! resumed; the second leaves out lines that were written again. A torn last line is not an error, and neither is a line
//! that is not an event.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::line::Line;
use crate::run::Run;

/// Longer lines are not ours, and are skipped.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// The most resumes that are distinguished.
const MAX_RESUMES: usize = 1 << 16;

/// `metrics.jsonl` cannot be read.
#[derive(Debug)]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// The system's error.
    pub error: io::Error,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: cannot read the run's events: {}", self.path.display(), self.error)
    }
}

impl std::error::Error for ReadError {}

/// Reads the run of a `metrics.jsonl`.
///
/// # Errors
/// The file cannot be read.
pub fn read(path: &Path, name: &str) -> Result<Run, ReadError> {
    let mut run = Run::new(name);
    read_lines(path, None, &mut |line| run.note_line(line))?;
    Ok(run)
}

/// Passes every line that counts to `note`, in order. Returns the end of the last complete line. If a run is about to
/// resume after step `resumes_at`, lines of later steps do not count, either.
///
/// # Errors
/// The file cannot be read.
pub fn read_lines(path: &Path, resumes_at: Option<u64>, note: &mut dyn FnMut(&Line)) -> Result<u64, ReadError> {
    let failed = |error| ReadError { path: path.to_owned(), error };
    let file = regular_file::open(path).map_err(failed)?;
    let mut limits = Limits::default();
    let end = each_line(&file, 0, &mut |number, text| {
        // An event's name comes first; the first pass parses no other lines.
        let is_start = text.starts_with(r#"{"event":"start""#);
        if (is_start || text.starts_with(r#"{"event":"resume""#))
            && let Some(step) = Line::parse(text).and_then(|line| line.step())
        {
            // A run that starts again invalidates everything that a killed run wrote before its first checkpoint.
            limits.resumed(number, if is_start { 0 } else { step.saturating_add(1) });
        }
    })
    .map_err(failed)?;
    if let Some(step) = resumes_at {
        limits.resumed(u64::MAX, step.saturating_add(1));
    }
    let mut segment = 0;
    each_line(&file, 0, &mut |number, text| {
        while limits.0.get(segment).is_some_and(|(end, _)| number >= *end) {
            segment += 1;
        }
        // After the last resume, everything counts.
        let limit = limits.0.get(segment).map_or(u64::MAX, |(_, limit)| *limit);
        if let Some(line) = Line::parse(text)
            && line.step().is_none_or(|step| step < limit)
        {
            note(&line);
        }
    })
    .map_err(failed)?;
    Ok(end)
}

/// Pairs of a line and a step, in line order. Before that line, only lines of steps below that step count. Steps only
/// grow.
#[derive(Debug, Default)]
struct Limits(Vec<(u64, u64)>);

impl Limits {
    fn resumed(&mut self, line: u64, step: u64) {
        // Later steps of earlier stretches were written again, too.
        while self.0.last().is_some_and(|(_, limit)| *limit >= step) {
            self.0.pop();
        }
        if self.0.len() == MAX_RESUMES {
            self.0.remove(0);
        }
        self.0.push((line, step));
    }
}

/// Passes every complete line from `start` on to `note` with its number, and returns the end of the last one. Lines that are
/// too long or not UTF-8 are counted but not passed on.
fn each_line(file: &File, start: u64, note: &mut dyn FnMut(u64, &str)) -> io::Result<u64> {
    let mut file = file;
    file.seek(SeekFrom::Start(start))?;
    let mut reader = BufReader::with_capacity(64 << 10, file);
    let (mut end, mut number, mut line) = (start, 0, Vec::new());
    loop {
        line.clear();
        let mut length = (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line)? as u64;
        let is_too_long = length == MAX_LINE_BYTES && line.last() != Some(&b'\n');
        if is_too_long {
            length += reader.skip_until(b'\n')? as u64;
        } else if line.last() != Some(&b'\n') {
            return Ok(end);
        }
        end += length;
        if !is_too_long && let Ok(text) = std::str::from_utf8(&line) {
            note(number, text.trim_end());
        }
        number += 1;
    }
}

/// A run's events, followed while they are written.
#[derive(Debug)]
pub struct MetricsTail {
    path: PathBuf,
    name: String,
    run: Run,
    /// The start of the next line, and the file to which it belongs.
    read: Option<(u64, FileId)>,
}

type FileId = (u64, u64);

impl MetricsTail {
    /// Follows the events in `path`, which need not exist yet.
    pub fn new(path: &Path, name: &str) -> Self {
        Self { path: path.to_owned(), name: name.to_owned(), run: Run::new(name), read: None }
    }

    /// Reads new lines, and returns whether there were any. If the file was replaced or cut, or the run resumed, reads from the start.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn poll(&mut self) -> Result<bool, ReadError> {
        let failed = |error| ReadError { path: self.path.clone(), error };
        let file = regular_file::open(&self.path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let id = id_of(&metadata);
        match self.read {
            Some((offset, known)) if known == id && metadata.len() >= offset => {
                if metadata.len() == offset {
                    return Ok(false);
                }
                let (run, mut resumed) = (&mut self.run, false);
                let end = each_line(&file, offset, &mut |_, text| {
                    let line = Line::parse(text);
                    resumed |=
                        matches!(&line, Some(Line::Other { event, .. }) if event == "resume" || event == "start");
                    if let Some(line) = line.filter(|_| !resumed) {
                        run.note_line(&line);
                    }
                })
                .map_err(failed)?;
                self.read = Some((end, id));
                if !resumed {
                    return Ok(end > offset);
                }
            }
            _ => {}
        }
        let mut run = Run::new(&self.name);
        let end = read_lines(&self.path, None, &mut |line| run.note_line(line))?;
        self.run = run;
        self.read = Some((end, id));
        Ok(true)
    }

    /// The run, as far as it was read.
    pub fn run(&self) -> &Run {
        &self.run
    }
}

#[cfg(unix)]
fn id_of(metadata: &std::fs::Metadata) -> FileId {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(not(unix))]
fn id_of(_: &std::fs::Metadata) -> FileId {
    (0, 0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn step(step: u64, loss: f64) -> String {
        format!(
            "{{\"event\":\"step\",\"time\":\"1970-01-01T00:00:{:02}Z\",\"step\":{step},\"loss\":{loss}}}\n",
            step % 60
        )
    }

    fn resume(step: u64) -> String {
        format!("{{\"event\":\"resume\",\"time\":\"1970-01-01T00:00:00Z\",\"step\":{step}}}\n")
    }

    fn losses(path: &Path, resumes_at: Option<u64>) -> Vec<(u64, f64)> {
        let mut found = Vec::new();
        read_lines(path, resumes_at, &mut |line| {
            if let Line::Step(step) = line {
                found.push((step.step, step.loss.expect("a loss")));
            }
        })
        .expect("it is there");
        found
    }

    #[test]
    fn steps_that_were_written_again_count_once_and_a_torn_line_not_at_all() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.jsonl");
        let text = [
            step(1, 1.0),
            step(2, 2.0),
            step(3, 3.0),
            resume(2),
            step(3, 3.5),
            step(4, 4.5),
            // The run resumed a second time, from an earlier checkpoint.
            resume(1),
            step(2, 2.5),
            "not json\n".to_owned(),
            format!("{}\n", "x".repeat(2 << 20)),
            step(3, 3.75),
            step(4, 4.75).trim_end().to_owned(),
        ];
        std::fs::write(&path, text.concat()).expect("it is written");
        assert_eq!(losses(&path, None), [(1, 1.0), (2, 2.5), (3, 3.75)]);
        assert_eq!(losses(&path, Some(2)), [(1, 1.0), (2, 2.5)]);
        let anew = ["{\"event\":\"start\",\"step\":0}\n".to_owned(), step(1, 7.0)].concat();
        std::fs::write(&path, text.concat() + "\n" + &anew).expect("it is written");
        assert_eq!(losses(&path, None), [(1, 7.0)]);
    }

    #[test]
    fn a_run_is_followed_as_it_is_written_goes_on_and_begins_anew() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.jsonl");
        let mut followed = MetricsTail::new(&path, "a");
        assert!(followed.poll().is_err(), "nothing there yet");
        let mut file = File::create(&path).expect("it is made");
        let mut check = |text: &str, last: u64, steps: u64| {
            file.write_all(text.as_bytes()).expect("it is written");
            followed.poll().expect("it is there");
            assert_eq!((followed.run().step(), followed.run().totals().steps), (last, steps), "{text}");
        };
        check(&(step(1, 1.0) + &step(2, 1.0)), 2, 2);
        check(&step(3, 1.0)[..20], 2, 2);
        check(&step(3, 1.0)[20..], 3, 3);
        check(&resume(1), 1, 1);
        check(&step(2, 1.0), 2, 2);
        std::fs::remove_file(&path).expect("it was there");
        std::fs::write(&path, step(1, 9.0)).expect("it is written");
        followed.poll().expect("it is there");
        assert_eq!(followed.run().totals().steps, 1);
    }

    #[test]
    fn a_pipe_or_directory_is_an_error_and_no_wait() {
        let directory = tempfile::tempdir().expect("a directory");
        let error = read(directory.path(), "a").expect_err("a directory");
        assert!(error.to_string().contains("expected a regular file"), "{error}");
    }
}
