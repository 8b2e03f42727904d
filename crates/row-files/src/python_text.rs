//! Python's own form of lists and dictionaries as JSON. pandas writes it into the cells of a CSV, as in
//! `{'text': array(['blue'], dtype=object), 'answer_start': [3]}`.

/// Deeper values are not read.
const MAX_DEPTH: usize = 32;

/// The JSON of a Python value; `None` if the text is none, or has values that JSON lacks.
pub(crate) fn json(text: &str) -> Option<String> {
    let mut value = Value { rest: text, json: String::with_capacity(text.len()) };
    value.take(0)?;
    value.rest.trim_start().is_empty().then_some(value.json)
}

/// The text behind the part that was read, and the JSON of that part.
struct Value<'a> {
    rest: &'a str,
    json: String,
}

impl<'a> Value<'a> {
    fn take(&mut self, depth: usize) -> Option<()> {
        self.rest = self.rest.trim_start();
        if depth == MAX_DEPTH {
            return None;
        }
        if self.skip("array(") {
            self.take(depth + 1)?;
            // The dtype, or nothing.
            self.rest = self.rest.split_once(')')?.1;
            return Some(());
        }
        match self.rest.chars().next()? {
            '{' => self.list(("}", '{', '}'), depth),
            '[' => self.list(("]", '[', ']'), depth),
            '(' => self.list((")", '[', ']'), depth),
            '\'' | '"' => self.string(),
            _ => self.word(),
        }
    }

    /// Skips a sign and the blanks before it, if it comes next.
    fn skip(&mut self, sign: &str) -> bool {
        let after = self.rest.trim_start().strip_prefix(sign);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    /// The elements of a list, or the pairs of a dictionary.
    fn list(&mut self, (end, open, close): (&str, char, char), depth: usize) -> Option<()> {
        self.rest = &self.rest[1..];
        self.json.push(open);
        let mut is_first = true;
        while !self.skip(end) {
            if !is_first {
                // numpy's arrays have no commas in `str`, which cannot be told from other text.
                self.skip(",").then_some(())?;
                if self.skip(end) {
                    break;
                }
                self.json.push(',');
            }
            is_first = false;
            self.take(depth + 1)?;
            if open == '{' {
                self.skip(":").then_some(())?;
                self.json.push(':');
                self.take(depth + 1)?;
            }
        }
        self.json.push(close);
        Some(())
    }

    fn string(&mut self) -> Option<()> {
        let quote = self.rest.chars().next()?;
        let mut letters = self.rest[1..].chars();
        let mut text = String::new();
        loop {
            match letters.next()? {
                letter if letter == quote => break,
                '\\' => match letters.next()? {
                    'n' => text.push('\n'),
                    'r' => text.push('\r'),
                    't' => text.push('\t'),
                    letter @ ('\\' | '\'' | '"') => text.push(letter),
                    letter @ ('x' | 'u' | 'U') => {
                        let digits = match letter {
                            'x' => 2,
                            'u' => 4,
                            _ => 8,
                        };
                        let code: String = letters.by_ref().take(digits).collect();
                        text.push(char::from_u32(u32::from_str_radix(&code, 16).ok()?)?);
                    }
                    letter => text.extend(['\\', letter]),
                },
                letter => text.push(letter),
            }
        }
        self.rest = letters.as_str();
        self.json.push_str(&serde_json::to_string(&text).ok()?);
        Some(())
    }

    /// A number, a truth or nothing.
    fn word(&mut self) -> Option<()> {
        let is_word = |letter: char| letter.is_ascii_alphanumeric() || "+-.".contains(letter);
        let end = self.rest.find(|letter| !is_word(letter)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        self.json.push_str(match word {
            "None" | "nan" => "null",
            "True" => "true",
            "False" => "false",
            number => number.parse::<f64>().ok().filter(|number| number.is_finite()).map(|_| number)?,
        });
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::json;

    #[test]
    fn pythons_values_become_those_of_json() {
        let check = |python: &str, expected: &str| assert_eq!(json(python).as_deref(), Some(expected), "{python}");
        check("{'text': ['four legs'], 'answer_start': [3]}", r#"{"text":["four legs"],"answer_start":[3]}"#);
        check(
            "{'text': array([\"it's\", 'b'], dtype=object), 'answer_start': array([3, 4], dtype=int32)}",
            r#"{"text":["it's","b"],"answer_start":[3,4]}"#,
        );
        check(
            "[{'role': 'user', 'content': 'a\\n\"b\" \\'c\\' \\u00e9'},]",
            r#"[{"role":"user","content":"a\n\"b\" 'c' é"}]"#,
        );
        check("(1, 2.5, -1e3, None, True, nan)", "[1,2.5,-1e3,null,true,null]");
        check(" [ ] ", "[]");
    }

    #[test]
    fn other_texts_are_none() {
        for text in
            ["", "{", "{'a'}", "{'a': }", "['a' 'b']", "['a'] and more", "{a: 1}", "[inf]", "'open", "array(['a']"]
        {
            assert_eq!(json(text), None, "{text}");
        }
        assert_eq!(json(&"[".repeat(100_000)), None);
    }
}
