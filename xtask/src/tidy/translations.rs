//! Translations: `NAME.zh.md` is `NAME.md` in Chinese, with the same commands.
//!
//! A test runs the commands of `README.md` only; an identical copy needs no test of its own.

use super::{Finding, Tree};

/// A translation has the commands of its original, in the same order. Comments may be translated.
pub fn a_translation_shows_the_commands_of_its_original(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files() {
        let Some(name) = path.strip_suffix(".zh.md") else { continue };
        let original = format!("{name}.md");
        let Some(expected) = tree.get(&original) else {
            findings.push(Finding::new(path, 0, format!("a translation of {original}, which is not there")));
            continue;
        };
        let (expected, found) = (commands(expected), commands(text));
        if let Some(at) = (0..expected.len().max(found.len())).find(|&at| command(&expected, at) != command(&found, at))
        {
            let (line, shown) = found.get(at).map_or((0, "nothing"), |(line, shown)| (*line, shown));
            let wanted = expected.get(at).map_or("nothing", |(_, wanted)| wanted);
            findings.push(Finding::new(path, line, format!("shows `{shown}`, expected `{wanted}` as in {original}")));
        }
    }
    findings
}

fn command(commands: &[(usize, String)], at: usize) -> Option<&str> {
    commands.get(at).map(|(_, command)| command.as_str())
}

/// Lines of fenced code that call the program or cargo, with their continuation lines, without comments.
fn commands(text: &str) -> Vec<(usize, String)> {
    let (mut is_code, mut continues) = (false, false);
    let mut commands = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            (is_code, continues) = (!is_code, false);
            continue;
        }
        let command = line.split("  #").next().unwrap_or(line).trim();
        if is_code && (continues || ["train_low_mem", "cargo"].contains(&command.split(' ').next().unwrap_or(""))) {
            commands.push((at + 1, command.to_owned()));
            continues = command.ends_with('\\');
        }
    }
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGINAL: &str = "```text\ncargo run   # trains\ntrain_low_mem --config a \\\n    --output b\n1 MiB\n```\n";

    #[track_caller]
    fn check(translation: &str, expected: &[&str]) {
        let tree = Tree::from_files(&[("README.md", ORIGINAL), ("README.zh.md", translation)]);
        let findings = a_translation_shows_the_commands_of_its_original(&tree);
        assert_eq!(findings.iter().map(Finding::to_string).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn other_comments_and_other_output_are_a_translation_and_another_command_is_none() {
        check(ORIGINAL, &[]);
        check(&ORIGINAL.replace("trains", "训练").replace("1 MiB", "2 MiB"), &[]);
        check(
            &ORIGINAL.replace("--output b", "--output c"),
            &["README.zh.md:4: shows `--output c`, expected `--output b` as in README.md"],
        );
        check("没有命令", &["README.zh.md: shows `nothing`, expected `cargo run` as in README.md"]);
    }

    #[test]
    fn a_translation_of_nothing_is_found() {
        let tree = Tree::from_files(&[("docs/a.zh.md", "")]);
        let findings = a_translation_shows_the_commands_of_its_original(&tree);
        let expected = "docs/a.zh.md: a translation of docs/a.md, which is not there";
        assert_eq!(findings.iter().map(Finding::to_string).collect::<Vec<_>>(), [expected]);
    }
}
