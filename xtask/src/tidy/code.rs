//! Code without its words: Rust source with comments, strings and characters blanked out, so that a
//! rule about code does not trip over prose.

/// `source` with comments and the insides of literals replaced by spaces. Lines stay where they are.
pub fn without_words(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => block_comment(rest),
            '"' => string(rest),
            'r' | 'b' if !code.ends_with(is_identifier) => match prefixed_string(rest) {
                Some(length) => length,
                None => copy(&mut code, first),
            },
            '\'' => match character(rest) {
                Some(length) => length,
                None => copy(&mut code, first), // a lifetime
            },
            _ => copy(&mut code, first),
        };
        let (done, left) = rest.split_at(length);
        if length != first.len_utf8() || first == '"' {
            code.extend(done.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        }
        rest = left;
    }
    code
}

/// The part of `source` before its tests: they come last, in `#[cfg(test)] mod`.
pub fn before_tests(source: &str) -> &str {
    source.find("\n#[cfg(test)]\nmod ").map_or(source, |end| &source[..end])
}

/// Whether a file holds tests only.
pub fn is_test_file(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    ["tests.rs", "testing.rs"].contains(&name) || path.starts_with("tests/") || path.contains("/tests/")
}

/// Lines, counted from 1, in which `word` stands as a word of its own.
pub fn lines_with_word<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let stands_in = move |line: &str| {
        line.match_indices(word).any(|(at, _)| {
            let (before, after) = (&line[..at], &line[at + word.len()..]);
            !before.ends_with(is_identifier) && !after.starts_with(is_identifier)
        })
    };
    code.lines().enumerate().filter(move |(_, line)| stands_in(line)).map(|(at, _)| at + 1)
}

fn copy(code: &mut String, c: char) -> usize {
    code.push(c);
    c.len_utf8()
}

fn is_identifier(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Bytes of the block comment, nested ones included, that `rest` begins with.
fn block_comment(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        match &rest.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// Bytes of the string that `rest` begins with, quotes included.
fn string(rest: &str) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Bytes of the raw, byte or C string, or byte character, that `rest` begins with, if it is one.
fn prefixed_string(rest: &str) -> Option<usize> {
    let prefix = rest.find(|c| !matches!(c, 'r' | 'b')).unwrap_or(rest.len());
    let body = &rest[prefix..];
    if rest[..prefix].contains('r') {
        let hashes = body.find(|c| c != '#').unwrap_or(body.len());
        body[hashes..].strip_prefix('"')?;
        let end = format!("\"{}", "#".repeat(hashes));
        let inside = &body[hashes + 1..];
        let length = inside.find(&end).map_or(inside.len(), |at| at + end.len());
        return Some(prefix + hashes + 1 + length);
    }
    match body.chars().next()? {
        '"' => Some(prefix + string(body)),
        '\'' => Some(prefix + character(body)?),
        _ => None,
    }
}

/// Bytes of the character literal that `rest` begins with; `None` for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let mut chars = rest.char_indices().skip(1);
    let (_, first) = chars.next()?;
    if first == '\\' {
        chars.next()?;
        return chars.find(|&(_, c)| c == '\'').map(|(at, _)| at + 1);
    }
    chars.next().filter(|&(_, c)| c == '\'').map(|(at, _)| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, expected: &str) {
        let code = without_words(source);
        assert_eq!(code.split_whitespace().collect::<Vec<_>>().join(" "), expected, "{source}");
        assert_eq!(code.lines().count(), source.lines().count());
    }

    #[test]
    fn comments_and_literals_are_blanked_and_code_is_kept() {
        check("let x = 1; // unsafe", "let x = 1;");
        check("//! unsafe\nfn f() {}", "fn f() {}");
        check("a /* unsafe /* nested */ still */ b", "a b");
        check("let s = \"unsafe \\\" still\"; t", "let s = ; t");
        check("let s = r#\"unsafe \" still\"#; t", "let s = ; t");
        check("let s = b\"unsafe\"; t", "let s = ; t");
        check("let s = br\"unsafe\\\"; t", "let s = ; t");
        check("let c = '\"'; let d = '\\''; let e = b'\"'; t", "let c = ; let d = ; let e = ; t");
        check("fn f<'a>(x: &'a str) -> &'a str { x }", "fn f<'a>(x: &'a str) -> &'a str { x }");
        check("let bar = for_r\n + b;", "let bar = for_r + b;");
        check("let 数 = \"一\n二\"; t", "let 数 = ; t");
        check("open \"never closed\n", "open");
        check("open /* never closed", "open");
    }

    #[test]
    fn words_are_found_as_words() {
        let lines: Vec<_> = lines_with_word("unsafe {\nunsafely\nnot_unsafe\n(unsafe)", "unsafe").collect();
        assert_eq!(lines, [1, 4]);
    }

    #[test]
    fn tests_at_the_end_are_cut_off() {
        assert_eq!(before_tests("fn a() {}\n\n#[cfg(test)]\nmod tests { b }"), "fn a() {}\n");
        assert_eq!(before_tests("fn a() {}\n#[cfg(test)]\nfn b() {}\n"), "fn a() {}\n#[cfg(test)]\nfn b() {}\n");
    }
}
