//! Text of others, as a terminal or a log may receive it: no character moves the cursor, changes the terminal, or hides text.
//!
//! A row, a name or an answer can contain control sequences, which set a terminal's title, erase lines, or make false links. It can also
//! contain characters that reverse the order of a line, or that are invisible. Such a character is written as JSON would write it, such as
//! `\u001b`. So JSON stays the same JSON.
//!
//! ```
//! use run_report::visible;
//! assert_eq!(visible::lines("a \u{1b}]0;title\u{7}\nb"), "a \\u001b]0;title\\u0007\nb");
//! assert_eq!(visible::line("a\nb"), "a\\nb");
//! ```

use std::borrow::Cow;
use std::fmt::Write;

/// A text of several lines: line ends and tabs stay.
pub fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, &['\n', '\t'])
}

/// A text that must stay on one line: line ends and tabs become `\n` and `\t`.
pub fn line(text: &str) -> Cow<'_, str> {
    escaped(text, &[])
}

fn escaped<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let mut is_hidden = hidden();
    if text.chars().all(|c| !is_hidden(c) || kept.contains(&c)) {
        return Cow::Borrowed(text);
    }
    let (mut shown, mut is_hidden) = (String::with_capacity(text.len() + 16), hidden());
    for c in text.chars() {
        match c {
            c if !is_hidden(c) || kept.contains(&c) => shown.push(c),
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            c => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| {
                let _ = write!(shown, "\\u{unit:04x}");
            }),
        }
    }
    Cow::Owned(shown)
}

/// A function that tells of each character of a text, in order, whether it must be escaped.
fn hidden() -> impl FnMut(char) -> bool {
    // Joiners shape the letters of some scripts, and join pictures. Elsewhere, and one after another, they only hide text.
    let mut may_join = true;
    move |c| {
        let is_joiner = matches!(c, '\u{200c}' | '\u{200d}');
        let is_hidden = if is_joiner { !may_join } else { is_always_hidden(c) };
        may_join = !(is_hidden || is_joiner || c.is_ascii());
        is_hidden
    }
}

/// Whether a character is a control character, changes the direction of text, separates lines, or cannot be seen.
fn is_always_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            // Soft hyphens, fillers and other letters without a shape.
            '\u{ad}' | '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{3164}' | '\u{ffa0}'
            // Marks of direction, embeddings, overrides and isolates; separators of lines and paragraphs; marks of byte order.
            | '\u{61c}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
            // Variants of letters, except the two that choose between a letter and a picture.
            | '\u{fe00}'..='\u{fe0d}'
            // Formats of annotations, hieroglyphs, shorthand and music.
            | '\u{fff9}'..='\u{fffb}' | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
            // Tags, and further variants.
            | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_of_every_language_stays_as_it_is() {
        for text in [
            "",
            "plain\n\ttext",
            "字2+2 — “ß”",
            "مرحبا بالعالم",
            "می\u{200c}خواهم",
            "क\u{94d}\u{200d}ष",
            "👩\u{200d}🔬 ❤\u{fe0f}",
            "e\u{301}",
        ] {
            assert!(matches!(lines(text), Cow::Borrowed(same) if same == text), "{text}");
        }
    }

    #[test]
    fn what_moves_the_cursor_or_hides_text_is_shown() {
        for (text, shown) in [
            ("\u{1b}[2J\r\u{8}\u{7f}", "\\u001b[2J\\r\\u0008\\u007f"),
            ("\u{9b}2J\u{85}", "\\u009b2J\\u0085"),
            ("a\u{202e}b\u{2066}\u{200f}", "a\\u202eb\\u2066\\u200f"),
            ("a\u{200b}\u{feff}\u{ad}\u{2028}", "a\\u200b\\ufeff\\u00ad\\u2028"),
            ("\u{e0041}", "\\udb40\\udc41"),
            ("a\u{200d}b 字\u{200d}\u{200d}", "a\\u200db 字\u{200d}\\u200d"),
        ] {
            assert_eq!(lines(text), shown);
        }
        assert_eq!(line("a\r\n\tb\u{1b}"), "a\\r\\n\\tb\\u001b");
    }

    proptest! {
        #[test]
        fn json_means_the_same_and_nothing_is_hidden_in_it(text in "\\PC{0,8}|[\u{0}-\u{ffff}]{0,40}|[\u{e0000}-\u{e007f}]{0,4}") {
            let json = serde_json::to_string_pretty(&serde_json::json!({ "text": text })).unwrap();
            let shown = lines(&json);
            let read: serde_json::Value = serde_json::from_str(&shown).unwrap();
            prop_assert_eq!(read["text"].as_str(), Some(text.as_str()));
            let is_hidden = |c: char| (c.is_control() && c != '\n') || ('\u{202a}'..='\u{202e}').contains(&c);
            prop_assert!(!shown.contains(is_hidden), "{:?}", shown);
            prop_assert!(!line(&text).chars().any(char::is_control));
            prop_assert_eq!(lines(&shown), shown.as_ref());
        }
    }
}
