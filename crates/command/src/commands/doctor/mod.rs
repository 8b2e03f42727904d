//! `train_low_mem doctor`: reports what this machine has, what the program uses of it, and the command that installs what is missing.
//!
//! Each module reads facts from the system and judges them in a pure function. Nothing is changed: the disk's rate is measured with a file
//! without a name, which disappears when it is closed.

mod cards;
mod disk;
mod finding;
mod memory;
mod processes;
mod processor;
mod program;
mod server;

use memory_policy::plural;
use serde_json::{Value, json};

use crate::cli::view_flags::DoctorArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::screen::report;
use finding::{Finding, Severity};

/// Examines the machine. Exits with 0 if there is no problem, with 6 if there are warnings, and with 7 if training, or the server, does
/// not work.
pub fn doctor(flags: &DoctorArgs) -> Outcome<()> {
    let findings = match flags.server {
        Some(address) => server::findings(address),
        None => [
            program::findings(),
            processor::findings(),
            memory::findings(),
            disk::findings(&flags.output, flags.quick),
            cards::findings(),
            processes::findings(),
        ]
        .concat(),
    };
    let worst = findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok);
    let text = match flags.json {
        true => format!("{:#}\n", as_json(&findings, worst)),
        false => findings.iter().map(Finding::to_string).collect(),
    };
    report::result(&text)?;
    let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count() as u64;
    let verdict = || {
        let counts = [(count(Severity::Failure), "failure"), (count(Severity::Warning), "warning")];
        let counts = counts.into_iter().filter(|(count, _)| *count > 0);
        counts.map(|(count, word)| plural(count, word)).collect::<Vec<_>>().join(", ")
    };
    match worst {
        Severity::Ok | Severity::Note => Ok(()),
        Severity::Warning => Err(Failure::new(Exit::Warnings, verdict())),
        Severity::Failure => Err(Failure::new(Exit::Unfit, verdict())),
    }
}

/// The program, the processor and the memory of this machine, in words.
pub fn machine() -> Vec<(&'static str, String)> {
    let findings = [program::findings(), processor::findings(), memory::findings()].concat();
    findings.into_iter().map(|finding| (finding.name, finding.found)).collect()
}

fn as_json(findings: &[Finding], worst: Severity) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "severity": worst.name(),
        "findings": findings.iter().map(Finding::to_json).collect::<Vec<_>>(),
    })
}
