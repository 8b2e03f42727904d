//! Days and times of day since 1970, in UTC, as text.

/// Seconds of a day.
pub const DAY: u64 = 24 * 60 * 60;

/// The date that is `days` after 1970-01-01, by counting 400-year cycles from a March 1st
/// (Hinnant, "chrono-compatible low-level date algorithms").
pub fn date(days: u64) -> String {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

/// The day and time of a number of seconds since 1970: RFC 3339.
pub fn date_and_time(seconds: u64) -> String {
    let left = seconds % DAY;
    format!("{}T{:02}:{:02}:{:02}Z", date(seconds / DAY), left / 3600, left / 60 % 60, left % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        for (days, expected) in
            [(0, "1970-01-01"), (11_016, "2000-02-29"), (20_780, "2026-11-23"), (20_819, "2027-01-01")]
        {
            assert_eq!(date(days), expected);
        }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_795_412_096, "2026-11-23T05:34:56Z"),
        ] {
            assert_eq!(date_and_time(seconds), expected);
        }
    }
}
