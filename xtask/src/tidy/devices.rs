//! The rule that tests of computations run on the CPU and on a card.

use super::sources::is_test_file;
use super::{Finding, Tree};

/// The crates whose code runs on a card, and whose tests CI runs a second time on an emulated card.
const COMPUTING: [&str; 4] = ["crates/cuda-device/", "crates/t5-ops/", "crates/t5/", "crates/trainer/"];

/// The beginning of a comment with the reason why a test, or a file of tests, runs on the host alone.
const REASON: &str = "The host alone:";

/// A test of a computation takes its device from `device()`, so that it runs on both devices. A test that names the CPU gives a reason in
/// a comment: above that line, before or inside its function, or at the head of the file. Files for builds with cards are exempt, because
/// they compare devices.
pub fn tests_name_the_cpu_with_a_reason(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, source) in tree.rust_files().filter(|(path, _)| COMPUTING.iter().any(|crate_| path.starts_with(crate_)))
    {
        if source.contains("#![cfg(feature = \"cuda\")]") || has_reason(source.lines().take_while(is_head)) {
            continue;
        }
        let sources = source.find("\n#[cfg(test)]\nmod tests {").map_or(source, |end| &source[..end]);
        let first = if is_test_file(path) { 0 } else { sources.lines().count() };
        let lines: Vec<&str> = source.lines().collect();
        for (at, line) in lines.iter().enumerate().skip(first) {
            let names = line.contains("Device::Cpu") && !line.trim_start().starts_with("//");
            // A tensor that is made on the host and then moved to the device needs no reason.
            if names && !line.contains(".to_device(&device())") && !has_reason(of_function(&lines[..=at])) {
                let what = format!("a test names the CPU: take `device()`, or say why in a comment, `// {REASON} ...`");
                findings.push(Finding::new(path, at + 1, what));
            }
        }
    }
    findings
}

/// Whether a line belongs to the head of a file: its documentation, attributes before it, and empty lines.
fn is_head(line: &&str) -> bool {
    line.starts_with("//!") || line.starts_with("#!") || line.is_empty()
}

fn has_reason<'a>(mut lines: impl Iterator<Item = &'a str>) -> bool {
    lines.any(|line| line.contains(REASON))
}

/// The lines of the last line's function, including comments and attributes before it, in reverse order.
fn of_function<'a>(lines: &'a [&'a str]) -> impl Iterator<Item = &'a str> {
    lines.iter().rev().copied().take_while(|line| !["}", "    }"].contains(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(path: &str, source: &str, expected: &[usize]) {
        let findings = tests_name_the_cpu_with_a_reason(&Tree::from_files(&[(path, source)]));
        assert_eq!(findings.iter().map(|finding| finding.line).collect::<Vec<_>>(), expected, "{path}: {source}");
    }

    #[test]
    fn a_test_that_names_the_cpu_without_a_reason_is_found() {
        let test = "#[test]\nfn f() {\n    g(&Device::Cpu);\n}\n";
        check("crates/t5/tests/model/a.rs", test, &[3]);
        check("crates/trainer/src/a.rs", &format!("\n#[cfg(test)]\nmod tests {{\n{test}}}\n"), &[6]);
        // Sources, other crates, and tensors that are moved to the device.
        check("crates/t5/src/a.rs", test, &[]);
        check("crates/planner/tests/a.rs", test, &[]);
        check("crates/t5/tests/a.rs", "fn f() {\n    x(&Device::Cpu).to_device(&device())\n}", &[]);
        check("crates/t5-ops/tests/a.rs", &format!("//! On a card.\n#![cfg(feature = \"cuda\")]\n{test}"), &[]);
    }

    #[test]
    fn a_reason_holds_for_its_function_or_for_the_file() {
        let reason = "// The host alone: files.\n";
        let test = "fn f() {\n    g(&Device::Cpu);\n}\n";
        check("crates/t5/tests/a.rs", &format!("{reason}{test}"), &[]);
        check("crates/t5/tests/a.rs", &format!("{reason}{test}\n{test}"), &[7]);
        check("crates/t5/tests/a.rs", &format!("//! {}\n{test}\n{test}", &reason[3..]), &[]);
    }
}
