//! A finding: what was looked at, what was found, how bad it is, and the line that mends it.

use std::fmt;

use serde_json::{Map, Value, json};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Something that is not there and may not be wanted.
    Note,
    /// Training works, with less than the machine has.
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
    /// What was looked at.
    pub name: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What was found, for people.
    pub found: String,
    /// The lines that mend it or get what is missing.
    pub remedies: Vec<String>,
    /// What was found, for programs.
    pub facts: Map<String, Value>,
}

/// Width of the column of severities.
const SEVERITIES: usize = 9;
/// Width of the column of names.
const NAMES: usize = 15;

impl Finding {
    /// One that is as it should be.
    pub fn ok(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { name, severity: Severity::Ok, found: found.into(), remedies: Vec::new(), facts: Map::new() }
    }

    /// Something that is not there and may not be wanted.
    pub fn note(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { severity: Severity::Note, ..Finding::ok(name, found) }
    }

    /// Training works, with less than the machine has.
    pub fn warning(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { severity: Severity::Warning, ..Finding::ok(name, found) }
    }

    /// Training cannot work.
    pub fn failure(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { severity: Severity::Failure, ..Finding::ok(name, found) }
    }

    /// With a line that mends it.
    #[must_use]
    pub fn remedy(mut self, line: impl Into<String>) -> Finding {
        self.remedies.push(line.into());
        self
    }

    /// With a fact for programs.
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
