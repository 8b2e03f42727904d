//! The rule that tests of plans, bills and prices state the processor that they plan for. One that reads this machine's passes on some machines
//! only.

use super::sources::is_test_file;
use super::{Finding, Tree};

/// Calls that count bytes and times for a processor, outside the planner.
const PLANNING: [&str; 3] = ["planner::plan(", "planner::costs(", "planner::pace("];
/// Calls that state the processor.
const STATING: [&str; 2] = ["set_target_processor(", "with_target_processor("];

/// Where the planner reads the processor.
const READING: [&str; 2] = ["t5_ops::processor()", "count::Counter::new("];
/// What its tests state first there.
const STATED: &str = "crate::testing::state_processor();";

/// A test that plans states a processor. In the planner itself, each file that reads the processor states one for tests. A whole-command test
/// that starts the program itself takes the environment of the others, `STATED`.
pub fn tests_of_plans_state_their_processor(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, source) in tree.rust_files().filter(|(path, _)| !path.starts_with("xtask/")) {
        let of_tests = source.find("\n#[cfg(test)]\nmod tests {").unwrap_or(source.len());
        let (sources, tests) = source.split_at(if is_test_file(path) { 0 } else { of_tests });
        let mut find = |text: &str, at: usize, what: &str| {
            findings.push(Finding::new(path, source[..at + source.len() - text.len()].lines().count().max(1), what));
        };
        let first = |text: &str, calls: &[&str]| calls.iter().filter_map(|call| text.find(call)).min();
        if path.starts_with("crates/planner/src/") {
            if let Some(at) = first(sources, &READING).filter(|_| !sources.contains(STATED)) {
                find(
                    source,
                    at,
                    "the processor is read, and tests do not state it: `#[cfg(test)] crate::testing::state_processor();`",
                );
            }
        } else if let Some(at) = first(tests, &PLANNING).filter(|_| first(tests, &STATING).is_none()) {
            find(tests, at, "a test plans for this machine's processor: state one with `t5_ops::set_target_processor`");
        }
        if path.starts_with("tests/") {
            let mut rest = source;
            while let Some((function, after)) = rest.split_once("\n}\n") {
                let starts = function.contains("CARGO_BIN_EXE_train_low_mem") && function.contains("Command::new(");
                if starts && !function.contains("STATED") {
                    find(rest, 0, "the program starts with this machine's threads and prices: add `.envs(STATED)`");
                }
                rest = after;
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(path: &str, source: &str, expected: usize) {
        let findings = tests_of_plans_state_their_processor(&Tree::from_files(&[(path, source)]));
        assert_eq!(findings.len(), expected, "{path}: {source}: {findings:?}");
    }

    #[test]
    fn a_test_that_plans_without_a_stated_processor_is_found() {
        let plans = "fn f() {\n    planner::plan(&job, &now);\n}\n";
        let stated = "fn f() {\n    t5_ops::set_target_processor(amx());\n    planner::plan(&job, &now);\n}\n";
        check("crates/planner/tests/a.rs", plans, 1);
        check("crates/planner/tests/a.rs", stated, 0);
        check("crates/command/src/a.rs", plans, 0);
        check("crates/command/src/a.rs", &format!("\n#[cfg(test)]\nmod tests {{\n{plans}}}\n"), 1);
    }

    #[test]
    fn the_planner_states_a_processor_for_its_tests_where_it_reads_one() {
        let reads = "fn f() {\n    t5_ops::processor().threads\n}\n";
        check("crates/planner/src/a.rs", reads, 1);
        check("crates/planner/src/a.rs", &format!("fn g() {{\n    #[cfg(test)]\n    {STATED}\n}}\n{reads}"), 0);
    }

    #[test]
    fn a_whole_command_test_states_the_machine() {
        let starts = "fn f() {\n    Command::new(env!(\"CARGO_BIN_EXE_train_low_mem\")).spawn();\n}\n";
        check("tests/a.rs", starts, 1);
        check("tests/a.rs", &starts.replace(".spawn", ".envs(STATED).spawn"), 0);
    }
}
