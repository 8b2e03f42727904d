//! Counts, as people read them.

/// `12,345`
pub fn counted(count: u64) -> String {
    let digits = count.to_string();
    let first = digits.len() % 3;
    let groups = digits.as_bytes()[first..].chunks(3).map(|group| String::from_utf8_lossy(group).into_owned());
    let head = (first > 0).then(|| digits[..first].to_string());
    head.into_iter().chain(groups).collect::<Vec<_>>().join(",")
}

/// `1 step`, `2 steps`, `12,345 queries`
pub fn plural(count: u64, noun: &str) -> String {
    let number = counted(count);
    match noun.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'i', 'o', 'u'])) {
        _ if count == 1 => format!("{number} {noun}"),
        Some(stem) => format!("{number} {stem}ies"),
        None => format!("{number} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart_and_one_is_no_plural() {
        assert_eq!([0, 7, 999, 1000, 1_234_567].map(counted), ["0", "7", "999", "1,000", "1,234,567"]);
        for (count, noun, expected) in [
            (1, "row", "1 row"),
            (2000, "row", "2,000 rows"),
            (1, "directory", "1 directory"),
            (2, "more directory", "2 more directories"),
            (3, "key", "3 keys"),
        ] {
            assert_eq!(plural(count, noun), expected);
        }
    }
}
