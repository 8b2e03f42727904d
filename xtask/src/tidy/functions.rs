//! Rules about functions.

use super::sources::{before_tests, is_test_file};
use super::{Finding, Tree};

/// A longer function has parts.
const MAX_FUNCTION_LINES: usize = 60;

/// Longer functions, each with its reason. A new one is a reason to look for its parts first.
const LONGER_FUNCTIONS: &[(&str, &str, &str)] = &[
    (
        "crates/command/src/commands/bench_serve.rs",
        "bench_serve",
        "a command from flags to its last line, read from top to bottom",
    ),
    (
        "crates/command/src/commands/convert.rs",
        "convert",
        "a command from flags to its last line, read from top to bottom",
    ),
    (
        "crates/command/src/commands/embed/mod.rs",
        "embed",
        "a command from flags to its last line, read from top to bottom",
    ),
    ("crates/command/src/commands/eval.rs", "config", "the keys that flags of `eval` stand for, one after the other"),
    ("crates/command/src/commands/eval.rs", "eval", "a command from flags to its last line, read from top to bottom"),
    (
        "crates/command/src/commands/generate/mod.rs",
        "generate",
        "a command from flags to its last line, read from top to bottom",
    ),
    ("crates/command/src/commands/inspect.rs", "as_text", "a page, line by line"),
    (
        "crates/command/src/commands/serve/mod.rs",
        "serve",
        "a command from flags to its last line, read from top to bottom",
    ),
    ("crates/command/src/data/reading.rs", "resolve", "one question after another about the rows"),
    ("crates/command/src/data/row_data.rs", "parquet_of", "one row group at a time, with what is held of it"),
    ("crates/command/src/data/row_data.rs", "write", "one decision after another about one file"),
    ("crates/command/src/machine/ledger.rs", "admit", "the entries are locked from its first line to its last"),
    ("crates/command/src/run/dry_run.rs", "dry_run", "a command from flags to its last line, read from top to bottom"),
    ("crates/command/src/run/open.rs", "new", "what is known of a run, in the order in which it becomes known"),
    ("crates/command/src/run/session.rs", "record", "the fields of an event"),
    ("crates/command/src/run/session/start.rs", "make", "the fields of a session"),
    ("crates/command/src/run/session/start.rs", "start", "the order in which a run claims memory, files and processes"),
    ("crates/command/src/run/summary.rs", "next", "a line for each kind of model"),
    ("crates/command/src/run/train.rs", "train_together", "the loop of training"),
    ("crates/command/src/scores/evaluation.rs", "evaluate", "one pass over the rows, and the fields of its figures"),
    ("crates/cuda-device/src/launch.rs", "multiply_into_columns", "the arguments of one call of cuBLAS"),
    ("crates/dataloader/src/tokenizer/sentence_piece.rs", "tokenizer_json", "a JSON document, written out"),
    ("crates/foreign-bytes/src/bombs.rs", "bombs", "a table"),
    ("crates/model-formats/src/gguf/tokenizer.rs", "keys", "a table"),
    ("crates/openai-server/src/http/routes.rs", "route", "an arm for each path"),
    ("crates/parquet-dataset/src/footer.rs", "chunk", "an arm for each field of a thrift struct"),
    ("crates/parquet-dataset/src/pages/header.rs", "parse", "an arm for each field of a thrift struct"),
    ("crates/row-files/src/delimited.rs", "read", "a state machine over bytes"),
    ("crates/row-files/src/error.rs", "hint", "an arm for each error"),
    ("crates/row-files/src/forms.rs", "choose", "the forms in their order: an earlier one hides a later one"),
    ("crates/row-files/src/forms/guesses.rs", "guesses", "the guesses in their order"),
    ("crates/row-files/src/kind.rs", "form", "one question after another about a file"),
    ("crates/run-plan/src/config/data.rs", "from_values", "the fields of a section"),
    ("crates/run-plan/src/config/mod.rs", "resolve_without_data", "the sections of a config"),
    ("crates/run-plan/src/config/values.rs", "check", "an arm for each kind of key"),
    ("crates/t5-ops/src/matmul/engine.rs", "part", "the loops of a product, around one panel"),
    ("crates/t5-ops/src/matmul/fma.rs", "pack_from", "a loop for each layout of the operand"),
    ("crates/t5-ops/src/ops/attention/cpu.rs", "backward", "the formulas of a backward pass, in their order"),
    ("crates/t5-ops/src/ops/attention/tiles/backward.rs", "strip", "the products of a strip, in their order"),
    ("crates/t5-ops/src/ops/attention/vectors.rs", "head", "the loops of a head"),
    ("crates/t5-ops/src/ops/cross_entropy/cpu.rs", "statistics", "one pass over the logits of a chunk"),
    ("crates/t5-ops/src/ops/cross_entropy/cuda.rs", "chunks", "the launches of a chunk, in their order"),
    ("crates/t5/src/config/gemma.rs", "read", "the fields of config.json"),
    ("crates/t5/src/hf/pickle.rs", "run", "an arm for each opcode"),
    ("crates/trainer/src/trainer.rs", "step_of_samples", "a step, from rows to the update"),
    ("xtask/src/bench/memory.rs", "measure", "one command for each kind of case"),
    ("xtask/src/bench/pressure.rs", "run", "one experiment, from top to bottom"),
    ("xtask/src/faults/scenario.rs", "new", "what every try needs, made in its order"),
    ("crates/trainer/src/trainer/frozen.rs", "teacher_logits", "a batch, from the file or from the teacher"),
];

/// A function of production code fits a screen, or [`LONGER_FUNCTIONS`] says why it does not. A row of that table names a function that
/// is longer.
pub fn functions_fit_a_screen(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_production = |path: &str| path.contains("/src/") && !is_test_file(path);
    for (path, source) in tree.rust_files().filter(|(path, _)| is_production(path)) {
        let all = functions(before_tests(source));
        let long: Vec<_> = all.iter().filter(|(.., lines)| *lines > MAX_FUNCTION_LINES).collect();
        let listed = || LONGER_FUNCTIONS.iter().filter(|(file, ..)| *file == path).map(|(_, name, _)| *name);
        for (line, name, lines) in long.iter().filter(|(_, name, _)| !listed().any(|other| other == *name)) {
            let what =
                format!("`{name}` has {lines} lines, expected at most {MAX_FUNCTION_LINES}: cut it into its parts");
            findings.push(Finding::new(path, *line, what));
        }
        for name in listed().filter(|listed| !long.iter().any(|(_, name, _)| name == listed)) {
            let what = match all.iter().any(|(_, function, _)| *function == name) {
                true => format!("`{name}` has at most {MAX_FUNCTION_LINES} lines: its row in LONGER_FUNCTIONS goes"),
                false => format!("has no `{name}`, which LONGER_FUNCTIONS lists"),
            };
            findings.push(Finding::new(path, 0, what));
        }
    }
    findings
}

/// The functions of a formatted source: the line of each, counted from 1, its name, and its number of lines.
fn functions(source: &str) -> Vec<(usize, &str, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let name = |line: &'_ str| -> Option<usize> {
        let before = line.find("fn ")?;
        let is_qualifier =
            |word: &str| word.starts_with("pub") || ["const", "async", "unsafe", "extern", "\"C\""].contains(&word);
        // `pub(in crate::a)` has a space.
        let qualifiers = line[..before].replace("(in ", "(");
        qualifiers.split_whitespace().all(is_qualifier).then_some(before + 3)
    };
    let found = (0..lines.len()).filter_map(move |at| {
        let line = lines[at];
        let begin = name(line)?;
        let length = line[begin..].find(|c: char| !c.is_alphanumeric() && c != '_')?;
        if line.ends_with('}') || line.ends_with(';') {
            return None;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        let is_end = |line: &&str| {
            line.strip_prefix(indent).is_some_and(|rest| rest == "}" || rest.starts_with(')') && rest.ends_with(';'))
        };
        let after = lines[at + 1..].iter().position(is_end)?;
        Some((at + 1, &line[begin..begin + length], after + 2))
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::super::check_file;
    use super::*;

    #[test]
    fn a_long_function_is_found_in_production_code_and_not_in_tests() {
        let rule = functions_fit_a_screen;
        let long = |lines: usize| {
            format!(
                "impl A {{\n    pub(in a::b) const fn long(\n        a: u8,\n    ) {{\n{}    }}\n}}\n",
                "        b();\n".repeat(lines - 4)
            )
        };
        check_file(rule, "crates/a/src/lib.rs", &long(60), &[]);
        let found = ["crates/a/src/lib.rs:2: `long` has 61 lines, expected at most 60: cut it into its parts"];
        check_file(rule, "crates/a/src/lib.rs", &long(61), &found);
        check_file(rule, "crates/a/src/tests.rs", &long(61), &[]);
        check_file(rule, "crates/a/src/lib.rs", &format!("\n#[cfg(test)]\nmod tests {{\n{}}}\n", long(61)), &[]);
        check_file(
            rule,
            "crates/a/src/lib.rs",
            "trait A {\n    fn a();\n    fn b(\n        &self,\n    ) -> u8;\n    fn c() {}\n}\n",
            &[],
        );
        let (path, listed, _) = LONGER_FUNCTIONS[0];
        check_file(
            rule,
            path,
            "fn other() {\n}\n",
            &LONGER_FUNCTIONS
                .iter()
                .filter(|(file, ..)| *file == path)
                .map(|(_, name, _)| format!("{path}: has no `{name}`, which LONGER_FUNCTIONS lists"))
                .collect::<Vec<_>>()
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>(),
        );
        check_file(rule, path, &long(70).replace("long", listed), &[]);
        let fits = format!("{path}: `{listed}` has at most 60 lines: its row in LONGER_FUNCTIONS goes");
        check_file(rule, path, &long(60).replace("long", listed), &[&fits]);
    }
}
