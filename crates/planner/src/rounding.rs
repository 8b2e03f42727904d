//! Numbers for reading.

/// Rounds to three significant digits.
pub(crate) fn significant(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    format!("{value:.2e}").parse().unwrap_or(value)
}
