//! Tidy: checks the rules of ARCHITECTURE.md and STYLE.md that a program can check.
//!
//! A rule is a pure function from the [`Tree`] to its findings, so each rule is tested on a few lines of text. `cargo
//! xtask tidy` prints the findings for this repository. The test at the end of this file makes the same check, so
//! `cargo test` fails on an untidy tree.

mod architecture;
mod devices;
mod functions;
mod glossary;
mod links;
mod modules;
mod processors;
mod prose;
mod sources;
mod text;
mod translations;
mod tree;
mod workflows;

use std::fmt;
use std::path::Path;

pub use tree::Tree;

/// A violation of a rule.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// Path from the root, with forward slashes.
    pub path: String,
    /// Line, counted from 1; 0 for the file as a whole.
    pub line: usize,
    /// The problem, with the expected and the found value.
    pub what: String,
}

impl Finding {
    fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_string(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.what),
            line => write!(f, "{}:{line}: {}", self.path, self.what),
        }
    }
}

/// A rule: returns the violations in a tree.
type Rule = fn(&Tree) -> Vec<Finding>;

/// Every rule.
const RULES: &[Rule] = &[
    architecture::every_crate_is_in_the_table_and_back,
    architecture::crates_use_allowed_edges_only,
    architecture::every_allowed_edge_is_imported,
    architecture::every_crate_is_drawn_above_those_that_it_uses,
    architecture::dependencies_are_named_by_their_owners_only,
    architecture::versions_and_lints_come_from_the_workspace,
    devices::tests_name_the_cpu_with_a_reason,
    functions::functions_fit_a_screen,
    glossary::every_word_has_one_row_and_a_name_in_the_code,
    links::links_lead_to_files_and_headings,
    modules::modules_import_each_other_in_no_circle,
    processors::tests_of_plans_state_their_processor,
    sources::unsafe_is_allowed_in_its_crates_only,
    sources::every_module_opens_with_its_documentation,
    sources::files_fit_the_length_limit,
    sources::files_are_named_for_what_they_hold,
    sources::files_are_changed_by_durable_files_only,
    sources::text_is_shown_in_one_place,
    sources::no_test_is_ignored,
    sources::messages_are_not_in_debug_form,
    prose::cells_of_the_log_are_short,
    prose::documents_have_plain_sentences,
    prose::documents_and_help_use_plain_words,
    text::no_text_names_a_path_of_one_machine,
    text::documents_name_files_that_exist,
    translations::a_translation_shows_the_commands_of_its_original,
    workflows::workflows_name_what_cannot_be_exchanged,
];

/// Checks the repository at `root`.
pub fn run(root: &Path) -> Result<(), String> {
    let tree = Tree::read(root)?;
    let findings = check(&tree);
    if findings.is_empty() {
        println!("{} files are tidy", tree.len());
        return Ok(());
    }
    let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
    let hint = "hint: ARCHITECTURE.md and STYLE.md say why each rule is there";
    Err(format!("{} findings\n{}\n{hint}", lines.len(), lines.join("\n")))
}

/// The findings of all rules, in the order of the rules.
fn check(tree: &Tree) -> Vec<Finding> {
    RULES.iter().flat_map(|rule| rule(tree)).collect()
}

/// For tests of rules: what a rule finds in one file.
#[cfg(test)]
#[track_caller]
fn check_file(rule: Rule, path: &str, text: &str, expected: &[&str]) {
    let findings: Vec<String> = rule(&Tree::from_files(&[(path, text)])).iter().map(Finding::to_string).collect();
    assert_eq!(findings, expected, "{path}: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_tidy() {
        if let Err(findings) = run(crate::root()) {
            panic!("{findings}");
        }
    }
}
