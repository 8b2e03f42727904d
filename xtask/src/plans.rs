//! `cargo xtask plans`: the planner's tests for every processor that the program knows, at 1 to 64 threads.
//!
//! A plan is for a processor, which need not be this one. The tests of the whole workspace plan for one processor; this is the sweep over the
//! others. `--sample N` takes one number of threads for each instruction set, chosen by N: `.ci/run` passes a number that differs from commit
//! to commit, and prints it.

use std::path::{Path, PathBuf};
use std::process::Command;

const USAGE: &str = "usage: cargo xtask plans [--sample NUMBER]";

/// The processor whose plans use every unit. All tests run for it but one.
const WHOLE: &str = "amx:64";
const INSTRUCTION_SETS: [&str; 5] = ["avx2", "avx512", "avx512bf16", "amx", "neon"];
const THREADS: [u64; 4] = [1, 4, 16, 64];

/// Tests that the tests of the workspace run once: they take long, and hardly depend on the processor.
const ONCE: &[&str] = &["each_card_beside_each_host"];
/// Tests that the other processors leave out: plans for cards, and the longest of frozen weights.
const OF_ONE: &[&str] = &["place::", "a_matrix_at_a_time"];

/// Runs the tests for all processors, or for a sample of them.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    let sample = match arguments {
        [] => None,
        [flag, number] if flag == "--sample" => {
            Some(number.parse().map_err(|_| format!("--sample: expected a whole number, got `{number}`\n{USAGE}"))?)
        }
        _ => return Err(USAGE.to_string()),
    };
    let tests = test_program(root)?;
    for (processor, left_out) in processors(sample) {
        println!("for {processor}");
        let skipped = left_out.iter().flat_map(|name| ["--skip", name]);
        let status = Command::new(&tests)
            .arg("--quiet")
            .args(skipped)
            .env("LOW_MEM_T5_TEST_PROCESSOR", &processor)
            .current_dir(root.join("crates/planner"))
            .status()
            .map_err(|error| format!("{}: {error}", tests.display()))?;
        if !status.success() {
            let again = format!("LOW_MEM_T5_TEST_PROCESSOR={processor} cargo test --release --workspace --lib");
            return Err(format!("plans for {processor} fail\nhint: `{again}` repeats them"));
        }
    }
    Ok(())
}

/// The processors to plan for, each with the tests that are left out.
fn processors(sample: Option<u64>) -> Vec<(String, Vec<&'static str>)> {
    let others = [ONCE, OF_ONE].concat();
    let mut processors = vec![(WHOLE.to_owned(), ONCE.to_vec())];
    for (set, place) in INSTRUCTION_SETS.into_iter().zip(0..) {
        for (threads, number) in THREADS.into_iter().zip(0..) {
            // The sets have different numbers of threads, so that each sample has every number.
            let is_chosen = sample.is_none_or(|sample| (sample % 4 + place) % 4 == number);
            if is_chosen {
                processors.push((format!("{set}:{threads}"), others.clone()));
            }
        }
    }
    processors
}

/// The program with the planner's unit tests. It has the features of the whole workspace, so that after other tests nothing is compiled.
fn test_program(root: &Path) -> Result<PathBuf, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["test", "--locked", "--release", "--workspace", "--lib", "--no-run"];
    let output = Command::new(cargo).args(arguments).current_dir(root).output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("the tests cannot be built\n{said}"));
    }
    executable(&said).map(|path| root.join(path)).ok_or_else(|| format!("cargo names no test of the planner\n{said}"))
}

/// The planner's tests among the executables that cargo names.
fn executable(said: &str) -> Option<&str> {
    let paths =
        said.lines().filter_map(|line| line.trim().strip_prefix("Executable ")?.split_once(" (")?.1.strip_suffix(')'));
    paths.into_iter().find(|path| path.rsplit(['/', '\\']).next().is_some_and(|name| name.starts_with("planner-")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_samples_in_turn_are_the_whole_sweep() {
        let all = processors(None);
        assert_eq!(all.len(), 1 + INSTRUCTION_SETS.len() * THREADS.len());
        let mut sampled: Vec<_> = (7..11).flat_map(|sample| processors(Some(sample))).collect();
        assert_eq!(sampled.len(), 4 * (1 + INSTRUCTION_SETS.len()));
        sampled.sort();
        sampled.dedup();
        let mut all = all;
        all.sort();
        assert_eq!(sampled, all);
        assert!(all.contains(&("amx:64".to_owned(), vec!["each_card_beside_each_host"])));
    }

    #[test]
    fn the_tests_of_the_planner_are_found_among_others() {
        let said = "  Executable unittests src/lib.rs (target/release/deps/run_plan-12)\n  \
                    Executable unittests src/lib.rs (/a/release/deps/planner-ab)\n";
        assert_eq!(executable(said), Some("/a/release/deps/planner-ab"));
        assert_eq!(executable("    Finished `release` profile\n"), None);
    }
}
