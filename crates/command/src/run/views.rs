//! Views of a run beside its metrics: `report.html`, and the event file of TensorBoard.
//!
//! Views are made of the events, so they hold nothing that `metrics.jsonl` lacks. They never stop a run: the first failed write is a
//! warning. Their memory does not grow with the run, and is taken before the plan measures the process.
//!
//! The event file of a resumed run is made again from the valid steps, so no step is in it twice.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use durable_files::AtomicFile;
use run_report::tensorboard::EventFile;
use run_report::{Line, Run};
use serde_json::Value;

use crate::failure::{Failure, Outcome};
use crate::files::metrics::{self, Metrics};
use crate::files::run_dir::{EVENTS, PAGE};

/// The views of a run.
#[derive(Debug)]
pub struct Views {
    root: PathBuf,
    run: Run,
    events: Option<EventFile>,
    has_warned: bool,
}

impl Views {
    /// The views of the run in this directory. Nothing is read or written yet.
    pub fn new(root: &Path) -> Self {
        let name = root.display().to_string();
        Self { root: root.to_owned(), run: Run::new(&name), events: None, has_warned: false }
    }

    /// Begins the views when the run begins to write. A run that resumes at a step includes the events up to it. Returns a warning if the
    /// views cannot be made.
    pub fn begin(&mut self, metrics: &Path, resumes_at: Option<u64>, config: &str) -> Option<String> {
        self.run.set_config(config);
        let begun = self.make_events(metrics, resumes_at);
        match begun {
            Ok(file) => self.events = Some(EventFile::append(file)),
            Err(failure) => return self.warning(EVENTS, &failure.message),
        }
        None
    }

    /// Makes the event file up to the step, and the state of the page. Returns the file, to append to it.
    fn make_events(&mut self, metrics: &Path, resumes_at: Option<u64>) -> Outcome<File> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let atomic = AtomicFile::create(&self.root.join(EVENTS))?;
        let failed = |error: &std::io::Error| Failure::io("write it", &self.root.join(EVENTS), error);
        let out = std::io::BufWriter::new(atomic.file());
        let began_ms = u64::try_from(now.as_millis()).unwrap_or(0);
        let mut events = EventFile::begin(out, began_ms).map_err(|error| failed(&error))?;
        let (run, mut result) = (&mut self.run, Ok(()));
        if resumes_at.is_some() {
            // A run can continue without its metrics; its views then begin here.
            let _ = run_report::read_lines(metrics, resumes_at, &mut |line| {
                run.note_line(line);
                if result.is_ok() {
                    result = events.note(line);
                }
            });
        }
        let flushed = result.and_then(|()| std::io::Write::flush(&mut events.into_inner()));
        flushed.map_err(|error| Failure::io("write it", &self.root.join(EVENTS), &error))?;
        Ok(atomic.commit_open()?)
    }

    /// Shows an event. Returns a warning on the first failed write.
    pub fn note(&mut self, line: &str) -> Option<String> {
        let line = Line::parse(line)?;
        self.run.note_line(&line);
        let error = self.events.as_mut()?.note(&line).err()?;
        // A part of a record may have been written, and records after it could not be read.
        self.events = None;
        self.warning(EVENTS, &format!("cannot append: {error}"))
    }

    /// Writes the page again. Returns a warning on the first failure.
    pub fn write_page(&mut self) -> Option<String> {
        let page = run_report::page::of_run(&self.run);
        let error = durable_files::write_atomic(&self.root.join(PAGE), page.as_bytes()).err()?;
        self.warning(PAGE, &error.to_string())
    }

    fn warning(&mut self, name: &str, error: &str) -> Option<String> {
        let is_first = !std::mem::replace(&mut self.has_warned, true);
        let path = self.root.join(name);
        is_first.then(|| format!("{}: {error}; the run continues", path.display()))
    }
}

/// The events of a run: in `metrics.jsonl`, and in the views.
#[derive(Debug)]
pub struct Log {
    /// `None` if another process writes for this one.
    of: Option<(Metrics, Views)>,
}

impl Log {
    /// A log that appends to these metrics, and shows the same events in these views.
    pub fn new(metrics: Metrics, views: Views) -> Self {
        Self { of: Some((metrics, views)) }
    }

    /// The log of a process whose events another process records.
    pub fn of_another() -> Self {
        Self { of: None }
    }

    /// Records an event. Returns warnings about failed writes, each once.
    pub fn record(&mut self, event: &str, fields: Value) -> impl Iterator<Item = String> {
        let warnings = self.of.as_mut().map_or([None, None], |(metrics, views)| {
            let line = metrics::line(event, fields);
            [metrics.append(&line), views.note(line.trim_end())]
        });
        warnings.into_iter().flatten()
    }

    /// Writes the page again. Returns a warning on the first failure.
    pub fn write_page(&mut self) -> Option<String> {
        self.of.as_mut().and_then(|(_, views)| views.write_page())
    }

    /// The warning at the end about lines that are missing in `metrics.jsonl`.
    pub fn missing(&self) -> Option<String> {
        self.of.as_ref().and_then(|(metrics, _)| metrics.missing())
    }
}
