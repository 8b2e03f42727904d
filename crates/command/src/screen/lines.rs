//! Lines of a text that may have no end, such as a pipe's: each is read within a limit.

use std::io::BufRead;

use memory_policy::Bytes;

use crate::failure::{Failure, Outcome};

/// The lines of a text.
pub struct Lines<R> {
    from: R,
    name: String,
    most_bytes: usize,
    count: u64,
}

impl<R: BufRead> Lines<R> {
    /// The lines of a text with this name, each of at most `most_bytes` bytes.
    pub fn new(from: R, name: String, most_bytes: usize) -> Self {
        Self { from, name, most_bytes, count: 0 }
    }

    /// The next line without its end; `None` after the last.
    ///
    /// # Errors
    /// The line is longer than the limit or is not UTF-8, or the text cannot be read.
    pub fn next_line(&mut self) -> Outcome<Option<String>> {
        let mut line = Vec::new();
        self.count += 1;
        loop {
            let fault = |what: &str| fault(&self.name, self.count, what);
            let piece = self.from.fill_buf().map_err(|error| fault(&error.to_string()))?;
            if piece.is_empty() {
                break;
            }
            let end = piece.iter().position(|byte| *byte == b'\n');
            let bytes = end.unwrap_or(piece.len());
            // One byte more, for a carriage return.
            if line.len() + bytes > self.most_bytes + 1 {
                let most = Bytes(self.most_bytes as u64);
                return Err(fault(&format!("expected at most {most}, got more")).hint("each line is a prompt"));
            }
            line.extend_from_slice(&piece[..bytes]);
            self.from.consume(bytes + usize::from(end.is_some()));
            if end.is_some() {
                line.pop_if(|byte| *byte == b'\r');
                return self.text(line).map(Some);
            }
        }
        if line.is_empty() { Ok(None) } else { self.text(line).map(Some) }
    }

    fn text(&self, mut line: Vec<u8>) -> Outcome<String> {
        // Windows writes a mark before the first line of UTF-8.
        if self.count == 1 && line.starts_with("\u{feff}".as_bytes()) {
            line.drain(.."\u{feff}".len());
        }
        String::from_utf8(line).map_err(|error| {
            fault(&self.name, self.count, &format!("not UTF-8: {}", error.utf8_error())).hint(
                "prompts are UTF-8, one per line; of a file, `--encoding` names another encoding, such as windows-1252",
            )
        })
    }
}

fn fault(name: &str, line: u64, what: &str) -> Failure {
    Failure::unusable(format!("{name}: line {line}: {what}"))
}

impl<R: BufRead> Iterator for Lines<R> {
    type Item = Outcome<String>;

    fn next(&mut self) -> Option<Outcome<String>> {
        self.next_line().transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufReader, Read, repeat};

    use super::*;

    fn lines(text: impl Read) -> Lines<BufReader<impl Read>> {
        Lines::new(BufReader::with_capacity(7, text), "a.txt".to_owned(), 1 << 20)
    }

    #[test]
    fn lines_are_those_of_the_standard_library() {
        for text in ["", "\n", "a", "a\n", "a\r\nb\r", "\n\nlong line of words\n é\n", "a\n\n"] {
            let found: Vec<String> = lines(text.as_bytes()).map(Result::unwrap).collect();
            assert_eq!(found, text.as_bytes().lines().map(Result::unwrap).collect::<Vec<_>>(), "{text:?}");
        }
        let found: Vec<String> = lines("\u{feff}a\n\u{feff}b".as_bytes()).map(Result::unwrap).collect();
        assert_eq!(found, ["a", "\u{feff}b"]);
    }

    #[test]
    fn a_line_without_an_end_and_bytes_that_are_no_text_are_errors_with_their_place() {
        let longest = vec![b'a'; 1 << 20];
        assert_eq!(lines(longest.as_slice()).next().unwrap().unwrap().len(), 1 << 20);
        let mut endless = lines(b"first\n".chain(repeat(b'a')));
        assert_eq!(endless.next_line().unwrap().as_deref(), Some("first"));
        let failure = endless.next_line().unwrap_err().to_string();
        assert!(failure.contains("a.txt: line 2: expected at most 1 MiB"), "{failure}");
        let failure = lines(&[b'a', b'\n', 0xff, b'\n'][..]).nth(1).unwrap().unwrap_err().to_string();
        assert!(failure.contains("a.txt: line 2: not UTF-8"), "{failure}");
    }
}
