//! The driver finds parsers that panic, abort, hang, allocate or overflow their stack, and only those.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use foreign_bytes::{Kind, Limits, Run, Tally, parser, try_parser};

/// Runs a planted parser in a repository whose corpus has one good and one bad input.
fn tally(name: &str, limits: Limits) -> Tally {
    let root = tempfile::tempdir().unwrap();
    let corpus = root.path().join("fuzz/corpus").join(name);
    fs::create_dir_all(&corpus).unwrap();
    for (file, bytes) in [("a", b"even".as_slice()), ("b", b"odd"), ("c", b"even")] {
        fs::write(corpus.join(file), bytes).unwrap();
    }
    let run = Run {
        root: root.path().to_owned(),
        program: PathBuf::from(env!("CARGO_BIN_EXE_try_inputs")),
        seed: 1,
        tries: 3,
        limits,
        findings: Some(root.path().join("findings")),
    };
    let tally = try_parser(&run, parser(name).unwrap()).unwrap();
    for finding in &tally.findings {
        assert_eq!(fs::read(finding.saved.as_ref().unwrap()).unwrap(), b"odd");
    }
    tally
}

#[track_caller]
fn check(name: &str, limits: Limits, expected: Option<(Kind, &str)>) {
    let tally = tally(name, limits);
    assert_eq!(tally.tries, 3, "{name}: what follows a broken input is tried as well");
    let found: Vec<_> = tally.findings.iter().map(|finding| (finding.number, finding.kind)).collect();
    assert_eq!(found, expected.map(|(kind, _)| (1, kind)).into_iter().collect::<Vec<_>>(), "{name}");
    if let Some((_, said)) = expected {
        assert!(tally.findings[0].what.contains(said), "{name}: {}", tally.findings[0].what);
    }
}

#[test]
fn a_parser_that_keeps_its_promise_has_no_findings() {
    check("planted_sound", Limits::default(), None);
    assert_eq!(tally("planted_sound", Limits::default()).accepted, 2);
}

#[test]
fn a_panic_is_found() {
    check("planted_panic", Limits::default(), Some((Kind::Panic, "an odd number of bytes")));
}

#[test]
fn an_abort_is_found() {
    check("planted_abort", Limits::default(), Some((Kind::Died, "signal: 6")));
}

#[test]
fn a_stack_that_overflows_is_found() {
    check("planted_overflow", Limits::default(), Some((Kind::Died, "overflowed its stack")));
}

#[test]
fn a_hang_is_found() {
    // The bad input never ends; the good ones end at once.
    let limits = Limits { time: Duration::from_secs(2), ..Limits::default() };
    check("planted_hang", limits, Some((Kind::Hang, "more than 2 s")));
}

#[test]
fn memory_above_the_limit_is_found_and_below_it_is_not() {
    if !Path::new("/proc/self/clear_refs").exists() {
        return; // Only Linux reports the peak memory of a process since a given moment.
    }
    check("planted_allocation", Limits::default(), Some((Kind::OverLimit, "KiB above the base")));
    check("planted_allocation", Limits { excess_kib: 128 << 10, ..Limits::default() }, None);
}
