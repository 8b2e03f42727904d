//! [`Template`]: a text with the names of columns in braces, such as `{subject}\n{body}`.
//!
//! `{{` and `}}` stand for a brace; `\n`, `\t` and `\\` for a line break, a tab and a backslash. Everything else is kept byte for byte.

use std::fmt;

/// A text that is made from columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Column(String),
}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// A text for the user: a brace without its partner, a name that is empty, or no column at all.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (mut pieces, mut literal) = (Vec::new(), String::new());
        let mut rest = text.chars().peekable();
        while let Some(c) = rest.next() {
            match (c, rest.peek().copied()) {
                ('{', Some('{')) | ('}', Some('}')) => literal.extend(rest.next()),
                ('{', _) => {
                    let mut is_closed = false;
                    let until_brace = rest.by_ref().take_while(|c| {
                        is_closed = *c == '}';
                        !is_closed
                    });
                    let name: String = until_brace.collect();
                    if !is_closed {
                        return Err(format!("`{{{name}` is not closed; a brace is written `{{{{`"));
                    }
                    if name.trim().is_empty() {
                        return Err("`{}` names no column; a brace is written `{{`".to_owned());
                    }
                    if !literal.is_empty() {
                        pieces.push(Piece::Text(std::mem::take(&mut literal)));
                    }
                    pieces.push(Piece::Column(name));
                }
                ('}', _) => return Err("`}` closes no column; a brace is written `}}`".to_owned()),
                ('\\', Some('n' | 't' | '\\')) => literal.extend(rest.next().map(|c| match c {
                    'n' => '\n',
                    't' => '\t',
                    c => c,
                })),
                (c, _) => literal.push(c),
            }
        }
        if !literal.is_empty() {
            pieces.push(Piece::Text(literal));
        }
        let template = Self { pieces };
        if template.columns().next().is_none() {
            return Err("expected the name of a column in braces, such as `{subject}`".to_owned());
        }
        Ok(template)
    }

    /// The template of one column alone.
    pub fn of_column(name: &str) -> Self {
        Self { pieces: vec![Piece::Column(name.to_owned())] }
    }

    /// The names of its columns, in their order. A name may occur twice.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Column(name) => Some(name.as_str()),
            Piece::Text(_) => None,
        })
    }

    /// The column, if the template is that column alone.
    pub fn column(&self) -> Option<&str> {
        match self.pieces.as_slice() {
            [Piece::Column(name)] => Some(name),
            _ => None,
        }
    }

    /// The text, with a value in place of each column.
    pub fn fill<'a>(&self, value: impl Fn(&str) -> &'a str) -> String {
        let parts = self.pieces.iter().map(|piece| match piece {
            Piece::Text(text) => text.as_str(),
            Piece::Column(name) => value(name),
        });
        parts.collect()
    }
}

impl fmt::Display for Template {
    /// The template as it can be typed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for piece in &self.pieces {
            match piece {
                Piece::Column(name) => write!(f, "{{{name}}}")?,
                Piece::Text(text) => {
                    for c in text.chars() {
                        match c {
                            '{' | '}' => write!(f, "{c}{c}")?,
                            '\n' => f.write_str("\\n")?,
                            '\t' => f.write_str("\\t")?,
                            '\\' => f.write_str("\\\\")?,
                            c => write!(f, "{c}")?,
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_filled_and_shown_as_it_was_typed() {
        let value = |name: &str| if name == "subject" { "S" } else { "B" };
        for (typed, filled) in [
            ("{subject}\\n{body}", "S\nB"),
            ("{subject}\n{body}", "S\nB"),
            (" a: {body}  ", " a: B  "),
            ("{{{subject}}} \\\\n", "{S} \\n"),
            ("{subject}{subject}", "SS"),
        ] {
            let template = Template::parse(typed).unwrap();
            assert_eq!(template.fill(value), filled, "{typed}");
            assert_eq!(Template::parse(&template.to_string()).unwrap(), template, "{typed}");
        }
        assert_eq!(Template::parse("{a}").unwrap().column(), Some("a"));
        assert_eq!(Template::parse("{a} ").unwrap().column(), None);
    }

    #[test]
    fn a_template_without_a_column_or_with_a_stray_brace_is_refused() {
        for (typed, expected) in [
            ("subject", "the name of a column in braces"),
            ("{subject", "is not closed"),
            ("subject}", "closes no column"),
            ("{}", "names no column"),
            ("{{subject}}", "the name of a column in braces"),
        ] {
            let error = Template::parse(typed).unwrap_err();
            assert!(error.contains(expected), "{typed}: {error}");
        }
    }
}
