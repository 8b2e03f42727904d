//! Counts, as people read them.

/// `12,345`
pub fn counted(count: u64) -> String {
    let digits = count.to_string();
    let first = digits.len() % 3;
    let groups = digits.as_bytes()[first..].chunks(3).map(|group| String::from_utf8_lossy(group).into_owned());
    let head = (first > 0).then(|| digits[..first].to_string());
    head.into_iter().chain(groups).collect::<Vec<_>>().join(",")
}

/// `1 step`, `2 steps`, `12,345 steps`
pub fn plural(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", counted(count), if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart_and_one_is_no_plural() {
        assert_eq!([0, 7, 999, 1000, 1_234_567].map(counted), ["0", "7", "999", "1,000", "1,234,567"]);
        assert_eq!((plural(1, "row"), plural(2000, "row")), ("1 row".to_string(), "2,000 rows".to_string()));
    }
}
