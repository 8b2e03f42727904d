//! Rules about Rust files.

use super::code::{before_tests, is_test_file, lines_with_word, without_words};
use super::{Finding, Tree};

/// The crates that `unsafe` is left to. The last is a tool, which no crate depends on.
const UNSAFE_CRATES: [&str; 3] = ["crates/heap/", "crates/t5-ops/", "crates/fault-points/"];

/// Lines above an `unsafe` in which its explanation may begin.
const SAFETY_WITHIN_LINES: usize = 8;

/// A file that is longer is about more than one thing.
const MOST_LINES: usize = 600;

/// Files that may be longer, each with the reason. Empty is best.
const LONGER: &[(&str, &str)] = &[];

/// Names that say nothing about what a file holds.
const EMPTY_NAMES: [&str; 7] = ["utils", "util", "common", "manager", "helper", "helpers", "misc"];

/// Files that may create a file in place, each with the reason.
const RAW_WRITES: &[(&str, &str)] = &[
    ("crates/foreign-bytes/src/scratch.rs", "writes inputs of one try into a temporary directory"),
    ("crates/t5/src/hf/safetensors.rs", "streams tensors into a directory that the caller renames when it is whole"),
    ("crates/t5/src/hf/save.rs", "writes into a directory that the caller renames when it is whole"),
    ("crates/trainer/src/checkpoint/save.rs", "streams into a directory that is renamed after its manifest"),
];

/// `unsafe` lives in `heap`, in `t5-ops` and in a tool, and every block and impl says why it is sound.
///
/// The declaration of an unsafe function passes its obligation on; clippy asks public ones to name it.
pub fn unsafe_lives_in_its_crates_and_is_explained(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, source) in tree.rust_files() {
        let (lines, code) = (source.lines().collect::<Vec<_>>(), without_words(source));
        let code: Vec<&str> = code.lines().collect();
        for line in lines_with_word(&code.join("\n"), "unsafe") {
            let above = &lines[line.saturating_sub(1 + SAFETY_WITHIN_LINES)..line];
            let is_explained = above.iter().any(|line| line.contains("SAFETY:"));
            let is_declaration = ["unsafe fn", "unsafe extern"].iter().any(|word| code[line - 1].contains(word));
            if !UNSAFE_CRATES.iter().any(|home| path.starts_with(home)) {
                let what = format!("`unsafe` outside of {}", UNSAFE_CRATES.join(", "));
                findings.push(Finding::new(path, line, what));
            } else if !is_explained && !is_declaration {
                findings.push(Finding::new(path, line, "`unsafe` without a `// SAFETY:` line above it"));
            }
        }
    }
    findings
}

/// A file opens with `//!`: what it is about. Files of tests alone are about what lies beside them.
pub fn every_module_opens_with_its_documentation(tree: &Tree) -> Vec<Finding> {
    let undocumented = |(_, source): &(&str, &str)| !source.trim_start().starts_with("//!");
    let finding = |(path, _): (&str, &str)| Finding::new(path, 1, "expected the module's documentation, `//! ...`");
    let sources = tree.rust_files().filter(|(path, _)| !is_test_file(path));
    sources.filter(undocumented).map(finding).collect()
}

/// A file is short enough to be about one thing.
pub fn files_fit_the_length_limit(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, source) in tree.rust_files() {
        let lines = source.lines().count();
        if lines > MOST_LINES && !LONGER.iter().any(|(longer, _)| *longer == path) {
            findings.push(Finding::new(path, 0, format!("expected at most {MOST_LINES} lines, got {lines}")));
        }
    }
    findings
}

/// A file's name says what it holds.
pub fn files_are_named_for_what_they_hold(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, _) in tree.files() {
        let mut words = path.split(|c: char| !c.is_alphanumeric());
        if let Some(word) = words.find(|word| EMPTY_NAMES.contains(word)) {
            findings.push(Finding::new(path, 0, format!("`{word}` does not say what is in it")));
        }
    }
    findings
}

/// No source but `write_atomic` creates a file in place: a crash would leave half of it.
///
/// `xtask` may: what it writes is checked in, and can be made again.
pub fn writes_go_through_write_atomic(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_excepted = |path: &str| RAW_WRITES.iter().any(|(excepted, _)| *excepted == path);
    let sources = tree
        .rust_files()
        .filter(|(path, _)| path.starts_with("crates/") && path.contains("/src/") && !is_test_file(path));
    for (path, source) in sources.filter(|(path, _)| !is_excepted(path)) {
        let code = without_words(before_tests(source));
        for raw in ["fs::write", "File::create", "File::create_new"] {
            for line in lines_with_word(&code, raw) {
                let what = format!("`{raw}`: a crash would leave half a file; use `write_atomic`");
                findings.push(Finding::new(path, line, what));
            }
        }
    }
    findings
}

/// Tests wait for events, not for time, and all of them run. Benchmarks are no tests: they look at a process again
/// and again while it runs.
pub fn tests_neither_sleep_nor_hide(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, source) in tree.rust_files() {
        let code = without_words(source);
        let banned = [("#[ignore", "a test that does not run"), ("thread::sleep", "waiting for time")];
        for (word, why) in banned {
            if path.starts_with("xtask/src/bench/") && word == "thread::sleep" {
                continue;
            }
            for line in lines_with_word(&code, word) {
                findings.push(Finding::new(path, line, format!("`{word}`: {why}")));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(rule: super::super::Rule, path: &str, source: &str, expected: &[&str]) {
        let findings: Vec<String> = rule(&Tree::of(&[(path, source)])).iter().map(Finding::to_string).collect();
        assert_eq!(findings, expected, "{path}: {source}");
    }

    #[test]
    fn unsafe_is_found_outside_of_its_crate_and_without_its_reason() {
        let rule = unsafe_lives_in_its_crates_and_is_explained;
        check(rule, "crates/t5/src/lib.rs", "// unsafe\nlet s = \"unsafe\";", &[]);
        let outside =
            ["crates/t5/src/lib.rs:2: `unsafe` outside of crates/heap/, crates/t5-ops/, crates/fault-points/"];
        check(rule, "crates/t5/src/lib.rs", "// SAFETY: no\nunsafe {}", &outside);
        check(rule, "crates/t5-ops/src/lib.rs", "// SAFETY: in bounds\nunsafe {}", &[]);
        check(rule, "crates/t5-ops/src/lib.rs", "pub unsafe fn f() {}\nunsafe extern \"C\" {}", &[]);
        let unexplained = ["crates/t5-ops/src/lib.rs:1: `unsafe` without a `// SAFETY:` line above it"];
        check(rule, "crates/t5-ops/src/lib.rs", "unsafe {}", &unexplained);
    }

    #[test]
    fn a_module_without_documentation_is_found() {
        let rule = every_module_opens_with_its_documentation;
        check(rule, "a.rs", "//! A noun.\nfn f() {}", &[]);
        check(rule, "a.rs", "fn f() {}", &["a.rs:1: expected the module's documentation, `//! ...`"]);
        check(rule, "src/noun/tests.rs", "use super::*;", &[]);
        check(rule, "a.py", "pass", &[]);
    }

    #[test]
    fn a_long_file_is_found() {
        check(files_fit_the_length_limit, "a.rs", &"\n".repeat(600), &[]);
        check(files_fit_the_length_limit, "a.rs", &"\n".repeat(601), &["a.rs: expected at most 600 lines, got 601"]);
    }

    #[test]
    fn an_empty_name_is_found_in_directories_and_compounds() {
        let rule = files_are_named_for_what_they_hold;
        check(rule, "crates/t5/src/commonly.rs", "", &[]);
        check(rule, "src/string_utils.rs", "", &["src/string_utils.rs: `utils` does not say what is in it"]);
        check(rule, "tests/common/mod.rs", "", &["tests/common/mod.rs: `common` does not say what is in it"]);
    }

    #[test]
    fn a_raw_write_is_found_in_sources_and_not_in_tests() {
        let rule = writes_go_through_write_atomic;
        let path = "crates/a/src/lib.rs";
        let found = ["crates/a/src/lib.rs:1: `fs::write`: a crash would leave half a file; use `write_atomic`"];
        check(rule, path, "std::fs::write(path, text)?;", &found);
        check(rule, path, "fs::write_atomic(path, text)?;", &[]);
        check(rule, path, "\n#[cfg(test)]\nmod tests { fn f() { std::fs::write(a, b); } }", &[]);
        check(rule, "crates/a/src/tests.rs", "std::fs::write(path, text)?;", &[]);
        check(rule, "crates/a/tests/all.rs", "std::fs::write(path, text)?;", &[]);
        assert_eq!(rule(&Tree::of(&[(path, "File::create(p); File::create_new(p)")])).len(), 2);
    }

    #[test]
    fn a_sleeping_or_hidden_test_is_found() {
        let rule = tests_neither_sleep_nor_hide;
        check(rule, "a.rs", "#[ignore = \"slow\"]\nfn f() {}", &["a.rs:1: `#[ignore`: a test that does not run"]);
        check(rule, "a.rs", "std::thread::sleep(d);", &["a.rs:1: `thread::sleep`: waiting for time"]);
        check(rule, "a.rs", "// no thread::sleep here\nsleepy();", &[]);
        check(rule, "xtask/src/bench/child.rs", "std::thread::sleep(d);", &[]);
    }
}
