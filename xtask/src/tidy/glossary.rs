//! The glossary: each word has one meaning, and a name in the code.

use std::collections::{HashMap, HashSet};

use super::{Finding, Tree};

const GLOSSARY: &str = "docs/glossary.md";

/// A row of the glossary is word, meaning and names in the code, in backticks. Each name occurs in the sources of a crate, and no word has two
/// rows.
pub fn every_word_has_one_row_and_a_name_in_the_code(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut first_rows: HashMap<&str, usize> = HashMap::new();
    let sources = tree.files().filter(|(path, _)| path.starts_with("crates/") && path.ends_with(".rs"));
    let known: HashSet<&str> = sources.flat_map(|(_, text)| names(text)).collect();
    for (at, line) in tree.get(GLOSSARY).unwrap_or_default().lines().enumerate().map(|(at, line)| (at + 1, line)) {
        let Some(cells) = line.strip_prefix("| ").and_then(|line| line.strip_suffix(" |")) else { continue };
        let cells: Vec<&str> = cells.split(" | ").collect();
        if cells[0] == "word" || cells[0].starts_with("---") {
            continue;
        }
        for word in cells[0].split(", ") {
            if let Some(first) = first_rows.insert(word, at) {
                findings.push(Finding::new(GLOSSARY, at, format!("defines `{word}` again, as in line {first}")));
            }
        }
        let in_code: Vec<&str> = cells.get(2).copied().unwrap_or_default().split('`').skip(1).step_by(2).collect();
        if in_code.is_empty() {
            findings.push(Finding::new(GLOSSARY, at, format!("`{}` has no name in the code", cells[0])));
        }
        for name in in_code.into_iter().filter(|name| !known.contains(name)) {
            findings.push(Finding::new(GLOSSARY, at, format!("names `{name}`, which no crate has")));
        }
    }
    findings
}

/// The identifiers of a source, its comments included.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(rows: &str, expected: &[&str]) {
        let page = format!("# Glossary\n\n| word | meaning | in the code |\n| --- | --- | --- |\n{rows}");
        let tree =
            Tree::from_files(&[(GLOSSARY, &page), ("crates/t5/src/lib.rs", "struct MicroBatch { rows: usize }")]);
        let findings = every_word_has_one_row_and_a_name_in_the_code(&tree);
        assert_eq!(findings.iter().map(Finding::to_string).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_word_without_a_name_of_the_code_or_with_two_rows_is_found() {
        check("| micro-batch, part | samples | `MicroBatch`, `rows` |\n", &[]);
        check("| micro-batch | samples | `Batch` |\n", &["docs/glossary.md:5: names `Batch`, which no crate has"]);
        check("| micro-batch | samples | |\n", &["docs/glossary.md:5: `micro-batch` has no name in the code"]);
        check(
            "| a | one | `rows` |\n| b, a | two | `rows` |\n",
            &["docs/glossary.md:6: defines `a` again, as in line 5"],
        );
    }
}
