//! JSON text: the members of an object and the elements of a list as slices of the text, checked but not decoded.
//!
//! Slices keep what a number type would change: `2.50`, thirty digits, `1e5`. `NaN`, `Infinity` and `-Infinity`, which
//! Python and pandas write, are values. Depth is unlimited: a level takes one bit.

use std::borrow::Cow;

/// Text that is not JSON: the byte, from 0, and what is wrong there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NotJson {
    pub at: usize,
    pub reason: &'static str,
}

fn wrong<T>(at: usize, reason: &'static str) -> Result<T, NotJson> {
    Err(NotJson { at, reason })
}

/// The kind of a value, by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Null,
    Text,
    Number,
    Bool,
    List,
    Object,
}

/// The kind of a checked value.
pub(crate) fn kind(value: &str) -> Kind {
    match value.as_bytes().first() {
        Some(b'"') => Kind::Text,
        Some(b'{') => Kind::Object,
        Some(b'[') => Kind::List,
        Some(b't' | b'f') => Kind::Bool,
        Some(b'-' | b'0'..=b'9') if value != "-Infinity" => Kind::Number,
        _ => Kind::Null,
    }
}

/// The one value that `text` holds, with white space around it.
pub(crate) fn value(text: &str) -> Result<&str, NotJson> {
    let start = blanks(text.as_bytes(), 0);
    let end = value_end(text.as_bytes(), start)?;
    match blanks(text.as_bytes(), end) {
        rest if rest == text.len() => Ok(&text[start..end]),
        rest => wrong(rest, "trailing characters"),
    }
}

/// Calls `take` for each member of a checked object, with its name and value.
pub(crate) fn members<'a>(object: &'a str, mut take: impl FnMut(Cow<'a, str>, &'a str)) {
    each(object, |name, value| {
        if let Some(name) = name.and_then(text) {
            take(name, value);
        }
    });
}

/// Calls `take` for each element of a checked list.
pub(crate) fn elements<'a>(list: &'a str, mut take: impl FnMut(&'a str)) {
    each(list, |_, value| take(value));
}

/// Calls `take` for each value of a checked object or list, with the text of its name.
fn each<'a>(value: &'a str, mut take: impl FnMut(Option<&'a str>, &'a str)) {
    let bytes = value.as_bytes();
    let is_object = bytes.first() == Some(&b'{');
    let mut at = blanks(bytes, 1);
    while at + 1 < bytes.len() {
        let mut name = None;
        if is_object {
            let Ok(end) = string_end(bytes, at) else { return };
            name = Some(&value[at..end]);
            at = blanks(bytes, blanks(bytes, end) + 1);
        }
        let Ok(end) = value_end(bytes, at) else { return };
        take(name, &value[at..end]);
        at = blanks(bytes, blanks(bytes, end) + 1);
    }
}

/// The text of a checked string, without its quotes and escapes. `None` for a surrogate that stands alone.
pub(crate) fn text(string: &str) -> Option<Cow<'_, str>> {
    let inner = string.strip_prefix('"')?.strip_suffix('"')?;
    let Some(first) = memchr::memchr(b'\\', inner.as_bytes()) else { return Some(Cow::Borrowed(inner)) };
    // The text is no longer than its escapes.
    let mut text = String::with_capacity(inner.len());
    text.push_str(&inner[..first]);
    let mut rest = &inner[first..];
    while let Some(escape) = rest.strip_prefix('\\') {
        let (letter, after) = escape.split_at_checked(1)?;
        rest = after;
        text.push(match letter {
            "b" => '\u{8}',
            "f" => '\u{c}',
            "n" => '\n',
            "r" => '\r',
            "t" => '\t',
            "u" => {
                let mut unit = || -> Option<u32> {
                    let (digits, after) = rest.split_at_checked(4)?;
                    rest = after;
                    u32::from_str_radix(digits, 16).ok()
                };
                let first = unit()?;
                match first {
                    0xd800..=0xdbff => {
                        rest = rest.strip_prefix("\\u")?;
                        let (digits, after) = rest.split_at_checked(4)?;
                        rest = after;
                        let second = u32::from_str_radix(digits, 16).ok().filter(|s| (0xdc00..=0xdfff).contains(s))?;
                        char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00))?
                    }
                    _ => char::from_u32(first)?,
                }
            }
            other => other.chars().next()?,
        });
        let plain = memchr::memchr(b'\\', rest.as_bytes()).unwrap_or(rest.len());
        text.push_str(&rest[..plain]);
        rest = &rest[plain..];
    }
    Some(Cow::Owned(text))
}

fn blanks(bytes: &[u8], mut at: usize) -> usize {
    while matches!(bytes.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

/// The end of the string that begins at `at`.
fn string_end(bytes: &[u8], at: usize) -> Result<usize, NotJson> {
    match bytes.get(at) {
        Some(b'"') => {}
        Some(b'\'') => return wrong(at, "expected a string in double quotes, got a single quote"),
        Some(_) => return wrong(at, "expected a string in double quotes"),
        None => return wrong(at, "the row ends too early"),
    }
    let mut at = at + 1;
    loop {
        match bytes.get(at) {
            None => return wrong(at, "a string is not closed"),
            Some(b'"') => return Ok(at + 1),
            Some(b'\\') => match bytes.get(at + 1) {
                Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => at += 2,
                Some(b'u') if bytes.get(at + 2..at + 6).is_some_and(|d| d.iter().all(u8::is_ascii_hexdigit)) => at += 6,
                _ => return wrong(at, "invalid escape"),
            },
            Some(0..0x20) => return wrong(at, "a control character in a string"),
            Some(_) => at += 1,
        }
    }
}

/// The end of a number, a word, or one of the numbers that are not finite.
fn scalar_end(bytes: &[u8], at: usize) -> Result<usize, NotJson> {
    let words: [&[u8]; 6] = [b"true", b"false", b"null", b"NaN", b"Infinity", b"-Infinity"];
    if let Some(word) = words.iter().find(|word| bytes[at..].starts_with(word)) {
        return Ok(at + word.len());
    }
    let digits = |from: usize| from + bytes[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let start = at + usize::from(bytes[at] == b'-');
    let mut end = digits(start);
    match end - start {
        0 if start == at => return wrong(at, "expected value"),
        0 => return wrong(at, "invalid number"),
        2.. if bytes[start] == b'0' => return wrong(at, "invalid number"),
        _ => {}
    }
    if bytes.get(end) == Some(&b'.') {
        let fraction = digits(end + 1);
        if fraction == end + 1 {
            return wrong(end, "invalid number");
        }
        end = fraction;
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
        let exponent = digits(end + 1 + sign);
        if exponent == end + 1 + sign {
            return wrong(end, "invalid number");
        }
        end = exponent;
    }
    Ok(end)
}

/// Which brackets are open: a bit for each, set for an object.
#[derive(Default)]
struct Open {
    bits: Vec<u64>,
    depth: usize,
}

impl Open {
    fn push(&mut self, is_object: bool) {
        if self.bits.len() * 64 == self.depth {
            self.bits.push(0);
        }
        let (word, bit) = (&mut self.bits[self.depth / 64], 1 << (self.depth % 64));
        *word = if is_object { *word | bit } else { *word & !bit };
        self.depth += 1;
    }

    /// Whether the innermost bracket is an object's; `None` if none is open.
    fn is_object(&self) -> Option<bool> {
        let last = self.depth.checked_sub(1)?;
        Some(self.bits[last / 64] >> (last % 64) & 1 == 1)
    }
}

/// The end of the value that begins at `at`, which is checked.
fn value_end(bytes: &[u8], mut at: usize) -> Result<usize, NotJson> {
    let mut open = Open::default();
    loop {
        // A value begins at `at`.
        match bytes.get(at) {
            None => return wrong(at, "the row ends too early"),
            Some(&bracket @ (b'{' | b'[')) => {
                let is_object = bracket == b'{';
                let inside = blanks(bytes, at + 1);
                if bytes.get(inside) == Some(if is_object { &b'}' } else { &b']' }) {
                    at = inside + 1;
                } else {
                    open.push(is_object);
                    at = if is_object { name_end(bytes, inside)? } else { inside };
                    continue;
                }
            }
            Some(b'"') => at = string_end(bytes, at)?,
            Some(b'\'') => return wrong(at, "expected a string in double quotes, got a single quote"),
            Some(_) => at = scalar_end(bytes, at)?,
        }
        // A value ended at `at`.
        loop {
            let Some(is_object) = open.is_object() else { return Ok(at) };
            at = blanks(bytes, at);
            match (bytes.get(at), is_object) {
                (Some(b','), true) => at = name_end(bytes, blanks(bytes, at + 1))?,
                (Some(b','), false) => at = blanks(bytes, at + 1),
                (Some(b'}'), true) | (Some(b']'), false) => {
                    open.depth -= 1;
                    at += 1;
                    continue;
                }
                (None, _) => return wrong(at, "the row ends too early"),
                (_, true) => return wrong(at, "expected `,` or `}`"),
                (_, false) => return wrong(at, "expected `,` or `]`"),
            }
            break;
        }
    }
}

/// The start of the value whose name begins at `at`.
fn name_end(bytes: &[u8], at: usize) -> Result<usize, NotJson> {
    if bytes.get(at) == Some(&b'}') {
        return wrong(at, "trailing comma");
    }
    let colon = blanks(bytes, string_end(bytes, at)?);
    match bytes.get(colon) {
        Some(b':') => Ok(blanks(bytes, colon + 1)),
        None => wrong(colon, "the row ends too early"),
        Some(_) => wrong(colon, "expected `:`"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn members_are_slices_of_the_text() {
        let row =
            value(r#" {"a": 2.50, "b\n":[1,{"c":null}] , "c":"x\u00e9\ud83d\ude00\/", "d":NaN,"e":{}} "#).unwrap();
        let mut found = Vec::new();
        members(row, |name, value| found.push((name.into_owned(), value, kind(value))));
        let expected = [
            ("a", "2.50", Kind::Number),
            ("b\n", r#"[1,{"c":null}]"#, Kind::List),
            ("c", r#""x\u00e9\ud83d\ude00\/""#, Kind::Text),
            ("d", "NaN", Kind::Null),
            ("e", "{}", Kind::Object),
        ];
        assert_eq!(found, expected.map(|(name, value, kind)| (name.to_owned(), value, kind)));
        assert_eq!(text(found[2].1).as_deref(), Some("xé😀/"));
        assert_eq!(text(r#""\ud83d""#), None);
        let mut list = Vec::new();
        elements(found[1].1, |element| list.push(element));
        assert_eq!(list, ["1", r#"{"c":null}"#]);
    }

    #[test]
    fn a_fault_names_its_byte_and_its_reason() {
        for (text, at, reason) in [
            ("", 0, "the row ends too early"),
            ("{\"a\": }", 6, "expected value"),
            ("{'a': 1}", 1, "expected a string in double quotes, got a single quote"),
            ("{\"a\":1,}", 7, "trailing comma"),
            ("{\"a\" 1}", 5, "expected `:`"),
            ("[1 2]", 3, "expected `,` or `]`"),
            ("{\"a\":1]", 6, "expected `,` or `}`"),
            ("01", 0, "invalid number"),
            ("1 2", 2, "trailing characters"),
            ("\"\\x\"", 1, "invalid escape"),
            ("\"a", 2, "a string is not closed"),
        ] {
            assert_eq!(value(text), Err(NotJson { at, reason }), "{text}");
        }
        assert!(value(&"[".repeat(1_000_000)).is_err());
        assert!(value(&format!("{}{}", "[".repeat(100_000), "]".repeat(100_000))).is_ok());
    }

    proptest! {
        #[test]
        fn text_is_json_where_serde_json_says_so(text in r#"[\[\]{},:"a\\u0-9 .eE+tnrulfs-]{0,24}"#) {
            // Lone surrogates are found when a string is decoded, and serde_json limits numbers and depth.
            let is_json = serde_json::from_str::<serde::de::IgnoredAny>(&text);
            let is_other = text.contains("\\u") || is_json.as_ref().is_err_and(|e| e.to_string().contains("out of range"));
            prop_assert!(is_other || value(&text).is_ok() == is_json.is_ok(), "{:?} {:?}", value(&text), is_json);
        }

        #[test]
        fn any_string_is_read_back(text in any::<String>()) {
            let json = serde_json::to_string(&text).unwrap();
            prop_assert_eq!(super::text(value(&json).unwrap()).unwrap().into_owned(), text);
        }
    }
}
