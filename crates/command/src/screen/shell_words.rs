//! Words of a shell: paths and texts in shown commands, quoted where a shell would change them.

use std::path::Path;

/// A path as a word.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+:@%=,".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) { text } else { quoted_text(&text) }
}

/// A text as a word, always quoted.
pub fn quoted_text(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_shell_would_change_is_quoted() {
        assert_eq!(quoted(Path::new("runs/a-1.csv")), "runs/a-1.csv");
        assert_eq!(quoted(Path::new("first try")), "'first try'");
        assert_eq!(quoted(Path::new("")), "''");
        assert_eq!(quoted_text("it's"), "'it'\\''s'");
    }
}
