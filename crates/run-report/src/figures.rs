//! Formats numbers for readers, with their units.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The last second of the year 9999, after which a time has no RFC 3339 form.
const LAST: Duration = Duration::from_secs(253_402_300_799);

/// The median; for an even number of values the mean of the middle two. `None` if there are no values.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (last, middle) = (values.len().checked_sub(1)?, values.len() / 2);
    Some(f64::midpoint(values[last / 2], values[middle]))
}

/// Bytes in a fitting unit: `74.8 MiB`, `1.66 GiB`.
#[expect(clippy::cast_precision_loss, reason = "for reading")]
pub fn bytes(bytes: u64) -> String {
    let of = |unit: u64| bytes as f64 / unit as f64;
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{:.0} KiB", of(1 << 10)),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", of(1 << 20)),
        0x4000_0000..0x100_0000_0000 => format!("{:.2} GiB", of(1 << 30)),
        _ => format!("{:.2} TiB", of(1 << 40)),
    }
}

/// A count with separators: `1,000,000`.
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A short count for an axis: `200`, `1.5k`, `2M`.
pub fn short(value: f64) -> String {
    let trimmed = |value: f64, unit: &str| {
        let text = format!("{value:.2}");
        format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
    };
    match value.abs() {
        size if size >= 1e9 => trimmed(value / 1e9, "G"),
        size if size >= 1e6 => trimmed(value / 1e6, "M"),
        size if size >= 1e4 => trimmed(value / 1e3, "k"),
        _ => decimal(value),
    }
}

/// A number with four significant digits: `7.366`, `0.02788`, `3.00e-5`.
pub fn decimal(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let size = value.abs();
    if !(1e-4..1e7).contains(&size) {
        return format!("{value:.2e}");
    }
    let digits = (3 - size.log10().floor() as i32).clamp(0, 7) as usize;
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A duration: `42 s`, `3 min 20 s`, `2 h 05 min`.
pub fn duration(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        3600..172_800 => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// A point in time, as RFC 3339 writes it, to the millisecond. That format has the years from 1970 to 9999 here; a clock that shows
/// another year counts as the nearest of them.
pub fn timestamp(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time.clamp(UNIX_EPOCH, UNIX_EPOCH + LAST)).to_string()
}

/// A point in time, to the minute: `2026-11-23 18:25 UTC`.
pub fn moment(milliseconds: u64) -> String {
    let text = timestamp(UNIX_EPOCH + Duration::from_millis(milliseconds).min(LAST));
    format!("{} UTC", text.get(..16).unwrap_or(&text).replace('T', " "))
}

/// The name of a score.
pub fn score_name(name: &str) -> String {
    match name {
        "bleu" => "BLEU".to_owned(),
        "chrf" => "chrF".to_owned(),
        "chrf++" => "chrF++".to_owned(),
        "exact_match" => "exact match".to_owned(),
        "rewards/accuracies" => "chosen preferred".to_owned(),
        "rewards/margins" => "reward margin".to_owned(),
        "mrr@10" | "ndcg@10" => name.to_uppercase(),
        name => name.replace('_', " ").replace("rouge", "ROUGE-"),
    }
}

/// A score: BLEU and chrF are out of 100, other scores are fractions.
pub fn score(name: &str, value: f64) -> String {
    if name.starts_with("bleu") || name.starts_with("chrf") {
        format!("{value:.1}")
    } else if ["preference_loss", "rewards/margins", "mrr@10", "ndcg@10", "pearson", "spearman"].contains(&name) {
        format!("{value:.4}")
    } else {
        format!("{:.1} %", 100.0 * value)
    }
}

/// Cuts a text after `most` characters.
pub fn clipped(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([]), None);
    }

    #[test]
    fn a_clock_that_shows_any_year_has_a_time() {
        let at = |seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).unwrap();
        let before = UNIX_EPOCH - Duration::from_secs(4_000_000_000);
        assert_eq!(timestamp(before), "1970-01-01T00:00:00.000Z");
        assert_eq!(timestamp(at(1_795_000_000)), "2026-11-18T11:06:40.000Z");
        assert_eq!(timestamp(at(400_000_000_000)), "9999-12-31T23:59:59.000Z");
        assert_eq!(moment(u64::MAX), "9999-12-31 23:59 UTC");
    }

    #[test]
    fn numbers_are_for_reading() {
        assert_eq!([999, 1000, 1_234_567].map(count), ["999", "1,000", "1,234,567"]);
        assert_eq!([0, 74_777_547, 19_556_637_081].map(bytes), ["0 B", "71.3 MiB", "18.21 GiB"]);
        assert_eq!(
            [0.0, 7.366_258, 0.027_881, 3e-5, 1581.7, 100.0].map(decimal),
            ["0", "7.366", "0.02788", "3.00e-5", "1582", "100"]
        );
        assert_eq!([200.0, 15_000.0, 2e6, 0.5].map(short), ["200", "15k", "2M", "0.5"]);
        assert_eq!(
            [59_999, 200_000, 7_500_000, 180_000_000].map(duration),
            ["59 s", "3 min 20 s", "2 h 05 min", "2 d 2 h"]
        );
        assert_eq!(moment(1_500), "1970-01-01 00:00 UTC");
        assert_eq!((clipped("äöü", 2), clipped("äö", 2)), ("äö…".to_owned(), "äö".to_owned()));
    }
}
