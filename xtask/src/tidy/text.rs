//! Rules about all text: no paths of a single machine, and no missing files in documents.

use super::{Finding, Tree};

/// Beginnings of paths that exist only on an author's machine. Spelled in two halves, so that this file does not break
/// its own rule.
const MACHINE_PATHS: [(&str, &str); 3] = [("/wo", "rk/"), ("/tm", "p/"), ("/roo", "t/")];

/// Directories whose files may be named in documents.
const OUR_DIRECTORIES: [&str; 10] =
    ["bench/", "crates/", "xtask/", "configs/", "scripts/", "tests/", "docs/", "data/", ".ci/", ".cargo/"];

/// No text names a path that exists on one machine only.
pub fn no_text_names_a_path_of_one_machine(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files() {
        for (at, line) in text.lines().enumerate() {
            for (first, second) in MACHINE_PATHS {
                let machine_path = [first, second].concat();
                // Within a longer path or an address, the text is a part of that path.
                let mut places = line.match_indices(&machine_path);
                let begins_here = |(at, _): (usize, &str)| {
                    !line[..at].ends_with(|c: char| c.is_alphanumeric() || "}.-_~*$".contains(c))
                };
                if places.any(begins_here) {
                    findings.push(Finding::new(path, at + 1, format!("names `{machine_path}`, a path of one machine")));
                }
            }
        }
    }
    findings
}

/// Documents name only files of ours that exist.
pub fn documents_name_files_that_exist(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files().filter(|(path, _)| path.ends_with(".md")) {
        for (at, line) in text.lines().enumerate() {
            let words = line.split(|c: char| c.is_whitespace() || "`\"'()[]<>|,;:=#".contains(c));
            for word in words.map(|word| word.trim_end_matches(['.', '/'])) {
                let is_ours = OUR_DIRECTORIES.iter().any(|directory| word.starts_with(directory));
                if is_ours && !is_pattern(word) && !tree.has(word) && !is_data(word) {
                    findings.push(Finding::new(path, at + 1, format!("names `{word}`, which does not exist")));
                }
            }
        }
    }
    findings
}

/// Whether a path is a pattern: `crates/*/src`, `scripts/NAME.py`, `${dir}/a`.
fn is_pattern(path: &str) -> bool {
    let is_placeholder = |part: &str| {
        let name = part.split('.').next().unwrap_or(part);
        name.len() > 1 && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
    };
    path.contains(['*', '{', '$']) || path.contains("..") || path.split('/').any(is_placeholder)
}

/// Whether a file is data, which the tree of text files does not contain.
fn is_data(path: &str) -> bool {
    [".parquet", ".safetensors", ".png"].iter().any(|extension| path.ends_with(extension))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(rule: super::super::Rule, text: &str, expected: &[&str]) {
        let tree = Tree::from_files(&[("docs/a.md", text), ("crates/t5/src/lib.rs", "")]);
        let findings: Vec<String> = rule(&tree).iter().map(|finding| finding.what.clone()).collect();
        assert_eq!(findings, expected, "{text}");
    }

    #[test]
    fn a_path_of_one_machine_is_found_and_a_part_of_a_longer_one_is_not() {
        let rule = no_text_names_a_path_of_one_machine;
        for (first, second) in MACHINE_PATHS {
            let path = [first, second].concat();
            let expected = format!("names `{path}`, a path of one machine");
            check(rule, &format!("see `{path}file`"), &[&expected]);
            check(rule, &format!("https://example.org{path}file and ${path}"), &[]);
        }
    }

    #[test]
    fn a_document_that_names_a_missing_file_is_found() {
        let rule = documents_name_files_that_exist;
        check(rule, "see `crates/t5/src/lib.rs`, crates/t5/ and [it](crates/t5).", &[]);
        check(rule, "all of `crates/*/src`, checkpoints/step-1, `data/train.parquet`", &[]);
        check(rule, "see crates/t6/src", &["names `crates/t6/src`, which does not exist"]);
        check(rule, "run --config configs/no.toml", &["names `configs/no.toml`, which does not exist"]);
    }
}
