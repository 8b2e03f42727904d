//! A finding: the subject, the result, its severity, and the command that fixes a problem.

use std::fmt;

use serde_json::{Map, Value, json};

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// No problem.
    Ok,
    /// Something is missing that may not be needed.
    Note,
    /// Training works, but without the machine's full speed or memory.
    Warning,
    /// Training cannot work.
    Failure,
}

impl Severity {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Ok => "ok",
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Failure => "failure",
        }
    }
}

/// A finding.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The subject.
    pub name: &'static str,
    /// The severity.
    pub severity: Severity,
    /// The result, for people.
    pub found: String,
    /// Commands that fix the problem or install what is missing.
    pub remedies: Vec<String>,
    /// The result, for programs.
    pub facts: Map<String, Value>,
}

/// Width of the column of severities.
const SEVERITIES: usize = 9;
/// Width of the column of names.
const NAMES: usize = 15;

impl Finding {
    /// A finding without a problem.
    pub fn ok(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { name, severity: Severity::Ok, found: found.into(), remedies: Vec::new(), facts: Map::new() }
    }

    /// A finding that something is missing, which may not be needed.
    pub fn note(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { severity: Severity::Note, ..Finding::ok(name, found) }
    }

    /// A finding that training works, but without the machine's full speed or memory.
    pub fn warning(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { severity: Severity::Warning, ..Finding::ok(name, found) }
    }

    /// A finding that training cannot work.
    pub fn failure(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { severity: Severity::Failure, ..Finding::ok(name, found) }
    }

    /// Adds a command that fixes the problem.
    #[must_use]
    pub fn remedy(mut self, line: impl Into<String>) -> Finding {
        self.remedies.push(line.into());
        self
    }

    /// Adds a fact for programs.
    #[must_use]
    pub fn fact(mut self, name: &str, value: impl Into<Value>) -> Finding {
        self.facts.insert(name.into(), value.into());
        self
    }

    /// The finding as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "severity": self.severity.name(),
            "found": self.found,
            "remedies": self.remedies,
            "facts": self.facts,
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { name, severity, found, remedies, .. } = self;
        writeln!(f, "{:SEVERITIES$}{name:NAMES$}{found}", severity.name())?;
        let indent = SEVERITIES + NAMES;
        remedies.iter().try_for_each(|line| writeln!(f, "{:indent$}=> {line}", ""))
    }
}
