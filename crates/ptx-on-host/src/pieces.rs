//! Splits the text of PTX into pieces.

use crate::Error;

/// Text up to a `;`, a `{`, a `}` or a label, and the line that it begins in.
#[derive(Debug, PartialEq)]
pub(crate) enum Piece {
    /// Without its `;`.
    Statement(usize, String),
    Open(usize),
    Close(usize),
    Label(String),
}

pub(crate) fn error(line: usize, problem: impl Into<String>) -> Error {
    Error { line, problem: problem.into() }
}

/// Splits a text into its pieces. A brace within a statement is a vector's.
pub(crate) fn pieces(ptx: &str) -> Result<Vec<Piece>, Error> {
    let mut pieces = Vec::new();
    let mut text = String::new();
    let (mut started, mut in_vector) = (0, false);
    for (at, line) in ptx.lines().enumerate().map(|(at, line)| (at + 1, line)) {
        let line = line.split("//").next().unwrap_or_default();
        let is_directive = |text: &str| [".version", ".target", ".address_size"].iter().any(|d| text.starts_with(d));
        for c in line.chars() {
            if text.is_empty() {
                if c.is_whitespace() {
                    continue;
                }
                started = at;
            }
            match c {
                // After the head of a function, or between statements.
                '{' if text.is_empty() => pieces.push(Piece::Open(at)),
                '{' if text.starts_with(".visible") || text.starts_with(".func") || text.starts_with(".entry") => {
                    pieces.push(Piece::Statement(started, std::mem::take(&mut text)));
                    pieces.push(Piece::Open(at));
                }
                '}' if text.is_empty() => pieces.push(Piece::Close(at)),
                ';' => pieces.push(Piece::Statement(started, std::mem::take(&mut text))),
                ':' if !text.contains(char::is_whitespace) => pieces.push(Piece::Label(std::mem::take(&mut text))),
                _ => {
                    in_vector = (in_vector || c == '{') && c != '}';
                    text.push(c);
                }
            }
        }
        // Only these end with their line.
        if is_directive(&text) {
            pieces.push(Piece::Statement(started, std::mem::take(&mut text)));
        } else if !text.is_empty() && !in_vector {
            text.push(' ');
        }
    }
    if text.trim().is_empty() { Ok(pieces) } else { Err(error(started, "a statement without `;`")) }
}
