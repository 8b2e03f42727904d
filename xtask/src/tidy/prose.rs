//! Rules about English: documents and help have short sentences, and well-known words.
//!
//! Only prose is checked: not code blocks, tables, headings or the text between backticks. Records in `bench` keep their words. The log is a
//! table, whose cells have a rule of their own. Translations (`NAME.zh.md`) are not English.

use super::{Finding, Tree};

/// The most words of a sentence. STYLE.md asks for about 25; the rest is tolerance.
const MAX_WORDS: usize = 30;

/// The most words of a cell of the log.
const MAX_CELL_WORDS: usize = 25;

const LOG: &str = "docs/LOG.md";

/// Words and phrases that this project once used in its own sense, with plain replacements.
const DIALECT: [(&str, &str); 10] = [
    ("foretold", "predicted"),
    ("nevertheless", "still"),
    ("held against", "compared with"),
    ("put out", "output"),
    ("goes twice", "is computed twice"),
    ("counts as nothing", "is negligible"),
    ("a card", "a GPU"),
    ("the card", "the GPU"),
    ("all the same", "anyway"),
    ("the same but for", "the same except"),
];

/// Sources whose doc comments and strings are the command's help.
const HELP: [&str; 2] = ["crates/command/src/cli/mod.rs", "crates/run-plan/src/config/keys.rs"];

/// No sentence of a document is too long to read once, or begins with "What" without asking a question.
pub fn documents_have_plain_sentences(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files().filter(|(path, _)| is_document(path)) {
        for (line, sentence) in paragraphs(text).iter().flat_map(sentences) {
            let words = sentence.split_whitespace().count();
            if words > MAX_WORDS {
                findings.push(Finding::new(
                    path,
                    line,
                    format!("a sentence of {words} words, expected at most {MAX_WORDS}"),
                ));
            }
            if sentence.starts_with("What ") && !sentence.ends_with('?') {
                findings.push(Finding::new(path, line, "a sentence that begins with \"What\": name the subject"));
            }
        }
    }
    findings
}

/// A row of the log says what, how much and why in a few words. The reason is beside the code.
pub fn cells_of_the_log_are_short(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in outside_code(tree.get(LOG).unwrap_or_default()).filter(|(_, line)| line.starts_with('|')) {
        for cell in line.trim_matches('|').split(" | ") {
            let words = cell.split_whitespace().count();
            if words > MAX_CELL_WORDS {
                findings.push(Finding::new(
                    LOG,
                    at,
                    format!("a cell of {words} words, expected at most {MAX_CELL_WORDS}"),
                ));
            }
        }
    }
    findings
}

/// Documents and help use the field's words.
pub fn documents_and_help_use_plain_words(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files().filter(|(path, _)| is_document(path) || HELP.contains(path)) {
        for (at, line) in outside_code(text) {
            for (word, plain) in DIALECT.iter().filter(|(word, _)| line.contains(word)) {
                findings.push(Finding::new(path, at, format!("says \"{word}\", expected \"{plain}\"")));
            }
        }
    }
    findings
}

/// The lines of a text outside of fenced code blocks, trimmed, each with its number. A fence counts as an empty line.
fn outside_code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (at + 1, if is_code || is_fence { "" } else { line.trim() })
    })
}

fn is_document(path: &str) -> bool {
    let is_english = path.ends_with(".md") && !path.ends_with(".zh.md");
    is_english && !["bench/", "fuzz/"].iter().any(|old| path.starts_with(old))
}

/// The paragraphs and list items of a document, each with the number of its first line.
fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let mut paragraphs: Vec<(usize, String)> = Vec::new();
    let mut is_open = false;
    for (at, line) in outside_code(text) {
        if line.is_empty() || line.starts_with(['|', '#', '<']) {
            is_open = false;
            continue;
        }
        let item = line.strip_prefix("- ").or_else(|| line.strip_prefix("* ")).or_else(|| numbered(line));
        match paragraphs.last_mut().filter(|_| is_open && item.is_none()) {
            Some((_, paragraph)) => {
                paragraph.push(' ');
                paragraph.push_str(line);
            }
            None => paragraphs.push((at, item.unwrap_or(line).to_owned())),
        }
        is_open = true;
    }
    paragraphs
}

/// The text of a list item `1. text`.
fn numbered(line: &str) -> Option<&str> {
    line.split_once(". ").filter(|(number, _)| number.parse::<u32>().is_ok()).map(|(_, text)| text)
}

/// The sentences of a paragraph, each with the paragraph's line. A text between backticks counts as one word.
fn sentences((line, paragraph): &(usize, String)) -> Vec<(usize, String)> {
    let plain: Vec<&str> =
        paragraph.split('`').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { "code" }).collect();
    let mut sentences = vec![String::new()];
    for word in plain.concat().split_whitespace() {
        let word = word.trim_start_matches('*');
        if let Some(sentence) = sentences.last_mut() {
            sentence.push_str(word);
            sentence.push(' ');
        }
        if word.trim_end_matches([')', '*', '"']).ends_with(['.', '?', '!', ':', ';']) {
            sentences.push(String::new());
        }
    }
    sentences.into_iter().map(|sentence| (*line, sentence.trim().to_owned())).filter(|(_, s)| !s.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::check_file;
    use super::*;

    #[test]
    fn a_long_sentence_of_a_document_is_found_and_code_tables_and_lists_are_not() {
        let long = "word ".repeat(MAX_WORDS + 1);
        let short = "word ".repeat(20);
        let rule = documents_have_plain_sentences;
        check_file(
            rule,
            "docs/a.md",
            &format!("# Title\n\nShort.\n{long}"),
            &["docs/a.md:3: a sentence of 31 words, expected at most 30"],
        );
        check_file(rule, "docs/a.md", &format!("{short}.\n{short}: {short}\n\n- {short}\n- {short}\n1. {short}"), &[]);
        check_file(rule, "docs/a.md", &format!("```text\n{long}\n```\n\n| {long} |\n\n`{long}` is one word."), &[]);
        check_file(rule, "bench/a.md", &long, &[]);
        check_file(rule, "a.rs", &long, &[]);
    }

    #[test]
    fn a_long_cell_of_the_log_is_found() {
        let long = "word ".repeat(MAX_CELL_WORDS + 1);
        let rule = cells_of_the_log_are_short;
        check_file(rule, LOG, "| one | two |\n| --- | --- |", &[]);
        check_file(
            rule,
            LOG,
            &format!("\n| one | {long} |"),
            &["docs/LOG.md:2: a cell of 26 words, expected at most 25"],
        );
        check_file(rule, "docs/a.md", &format!("| {long} |"), &[]);
    }

    #[test]
    fn a_sentence_whose_subject_is_a_what_clause_is_found_and_a_question_is_not() {
        let rule = documents_have_plain_sentences;
        check_file(
            rule,
            "a.md",
            "What is held counts.",
            &["a.md:1: a sentence that begins with \"What\": name the subject"],
        );
        check_file(rule, "a.md", "What is held? Tensors.", &[]);
    }

    #[test]
    fn a_word_of_the_dialect_is_found_in_documents_and_help_alone() {
        let rule = documents_and_help_use_plain_words;
        check_file(rule, "a.md", "\nthe foretold peak", &["a.md:2: says \"foretold\", expected \"predicted\""]);
        check_file(
            rule,
            HELP[0],
            "/// held against it",
            &[&format!("{}:1: says \"held against\", expected \"compared with\"", HELP[0])],
        );
        check_file(rule, "crates/t5/src/lib.rs", "// foretold", &[]);
    }
}
