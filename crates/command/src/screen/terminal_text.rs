//! Text as the reader's terminal can show it: drawings in ASCII where the locale has no other letters, and lines that break between words
//! where the terminal is narrow.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::sync::LazyLock;

use rustix::termios::tcgetwinsize;

/// Tables are laid out for terminals of at least this many columns.
const USUAL_COLUMNS: usize = 80;

/// Whether the locale has ASCII alone.
static IS_ASCII: LazyLock<bool> = LazyLock::new(|| is_ascii(|name| std::env::var(name).ok()));

/// The text for standard output, and for messages beside it.
pub fn suited(text: Cow<'_, str>) -> Cow<'_, str> {
    let text = drawing(text);
    match columns() {
        Some(columns) if columns < USUAL_COLUMNS => Cow::Owned(wrapped(&text, columns)),
        _ => text,
    }
}

/// A drawing in the letters of the locale.
pub fn drawing(text: Cow<'_, str>) -> Cow<'_, str> {
    if *IS_ASCII { in_ascii(text) } else { text }
}

/// The columns of the terminal that standard output is.
fn columns() -> Option<usize> {
    let out = std::io::stdout();
    let size = if out.is_terminal() { tcgetwinsize(out).ok()? } else { return None };
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Whether the variables name a locale of ASCII alone. Without any of them, as in a container, terminals show UTF-8.
fn is_ascii(variable: impl Fn(&str) -> Option<String>) -> bool {
    let named =
        ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(|name| variable(name).filter(|value| !value.is_empty()));
    named.is_some_and(|locale| locale == "C" || locale == "POSIX")
}

/// The text with ASCII in place of our drawings.
fn in_ascii(text: Cow<'_, str>) -> Cow<'_, str> {
    let plain = |letter: char| match letter {
        '█' => Some("#"),
        '░' => Some("."),
        '▼' => Some("v"),
        '▲' => Some("^"),
        '…' => Some("..."),
        '\u{2800}' => Some(" "),
        // The dots of a chart.
        '\u{2801}'..='\u{28ff}' => Some("*"),
        _ => None,
    };
    if !text.contains(|letter| plain(letter).is_some()) {
        return text;
    }
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        match plain(letter) {
            Some(plain) => shown.push_str(plain),
            None => shown.push(letter),
        }
    }
    Cow::Owned(shown)
}

/// The text in lines of at most `columns` columns, if its words are short enough. What continues a line is indented.
fn wrapped(text: &str, columns: usize) -> String {
    text.split_inclusive('\n').map(|line| wrapped_line(line, columns)).collect()
}

fn wrapped_line(line: &str, columns: usize) -> String {
    let content = line.trim_end_matches('\n');
    if content.chars().count() <= columns {
        return line.to_owned();
    }
    let indent = content.chars().take_while(|c| *c == ' ').count();
    let first = if indent * 2 > columns { columns / 4 } else { indent };
    let (mut done, mut now, mut spaces) = (String::new(), " ".repeat(first), 0);
    let mut is_begun = false;
    for word in content.trim_start_matches(' ').split(' ') {
        if word.is_empty() {
            spaces += 1;
            continue;
        }
        if is_begun && now.chars().count() + 1 + spaces + word.chars().count() > columns {
            done = done + &now + "\n";
            now = " ".repeat((first + 2).min(columns / 2));
        } else if is_begun {
            now += &" ".repeat(1 + spaces);
        }
        now += word;
        (spaces, is_begun) = (0, true);
    }
    done + &now + &line[content.len()..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_breaks_lines_between_words() {
        let bill = "  process           26.4 MiB  83 %  ######    measured: program\n                                              tokenizer, footers\n";
        let expected =
            "  process           26.4 MiB  83 %\n    ######    measured: program\n          tokenizer, footers\n";
        assert_eq!(wrapped(bill, 40), expected);
        assert_eq!(wrapped("short\nwithout an end", 40), "short\nwithout an end");
        let long = "/a/path/that/has/more/than/forty/columns/in/all";
        assert_eq!(wrapped(&format!("in {long} now"), 40), format!("in\n  {long}\n  now"));
        assert_eq!(wrapped("", 40), "");
    }

    #[test]
    fn drawings_are_ascii_where_the_locale_is() {
        let of = |name: &'static str, value: &'static str| is_ascii(|asked| (asked == name).then(|| value.to_owned()));
        assert!(of("LC_ALL", "C") && of("LANG", "POSIX"));
        assert!(!of("LC_ALL", "C.UTF-8") && !of("LANG", "de_DE.UTF-8") && !of("LANG", "") && !of("HOME", "C"));
        assert_eq!(in_ascii("██░ 0.9 ▼ long…".into()), "##. 0.9 v long...");
        assert_eq!(in_ascii("grüße".into()), "grüße");
    }
}
