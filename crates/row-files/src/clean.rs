//! Cleans a text: control characters, and repeated punctuation.
//!
//! * Control characters are removed, except line breaks and tabs. So are invisible marks: the byte order mark and the
//!   zero-width space. `\r\n` and `\r` become `\n`.
//! * Repeats of the same character become one for `!`, `?`, `,`, `;`, `:`, `~`, their Chinese forms, `。` and `、`.
//! * More than three full stops in a row become three, and more than two of `…` or `—` become two.
//! * Spaces and line breaks at both ends are removed, and more than two line breaks in a row become two.

use std::borrow::Cow;

/// The most repeats of a character in a row.
fn most(c: char) -> usize {
    match c {
        '!' | '?' | ',' | ';' | ':' | '~' | '！' | '？' | '，' | '；' | '：' | '～' | '。' | '、' => 1,
        '…' | '—' | '\n' => 2,
        '.' => 3,
        _ => usize::MAX,
    }
}

fn is_kept(c: char) -> bool {
    matches!(c, '\n' | '\t') || !(c.is_control() || matches!(c, '\u{feff}' | '\u{200b}' | '\u{2028}' | '\u{2029}'))
}

/// Returns the cleaned text; borrowed if nothing changes.
pub fn clean(text: &str) -> Cow<'_, str> {
    let trimmed = text.trim();
    let (mut last, mut run) = ('\0', 0);
    let is_clean = trimmed.len() == text.len()
        && trimmed.chars().all(|c| {
            run = if c == last { run + 1 } else { 1 };
            last = c;
            is_kept(c) && run <= most(c)
        });
    if is_clean {
        return Cow::Borrowed(text);
    }
    let mut cleaned = String::with_capacity(trimmed.len());
    (last, run) = ('\0', 0);
    let mut characters = trimmed.chars().peekable();
    while let Some(c) = characters.next() {
        let c = match c {
            '\r' if characters.peek() == Some(&'\n') => continue,
            '\r' | '\u{2028}' | '\u{2029}' => '\n',
            c => c,
        };
        if !is_kept(c) {
            continue;
        }
        run = if c == last { run + 1 } else { 1 };
        last = c;
        if run <= most(c) {
            cleaned.push(c);
        }
    }
    let end = cleaned.trim_end().len();
    cleaned.truncate(end);
    let blank = cleaned.len() - cleaned.trim_start().len();
    cleaned.drain(..blank);
    Cow::Owned(cleaned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_and_repeated_punctuation_go() {
        for (text, expected) in [
            ("plain, text.", "plain, text."),
            ("a\0b\u{7}c\td", "abc\td"),
            ("什么？？？好！！", "什么？好！"),
            ("wait.....", "wait..."),
            ("a...b——c————d", "a...b——c——d"),
            ("x\r\ny\rz\n\n\n\nw", "x\ny\nz\n\nw"),
            ("  \u{feff}both ends \n", "both ends"),
            ("!?!?", "!?!?"),
            ("a == b; c++", "a == b; c++"),
        ] {
            assert_eq!(clean(text), expected, "{text:?}");
            assert_eq!(clean(&clean(text)), clean(text), "{text:?}: cleaning again changes nothing");
        }
    }
}
