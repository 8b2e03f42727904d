//! The resident set of this process and its peak, from `/proc`. On other systems both are unknown.

use std::fs;

/// Resets the peak: [`peak_kib`] then returns the largest resident set from now on.
pub(crate) fn forget_peak() {
    // This pseudo-file takes a digit and stores nothing, so no torn file is possible.
    let _ = fs::OpenOptions::new().write(true).open("/proc/self/clear_refs").and_then(|mut file| {
        use std::io::Write;
        file.write_all(b"5")
    });
}

/// The resident set in KiB.
pub(crate) fn resident_kib() -> Option<u64> {
    status("VmRSS:")
}

/// The largest resident set since [`forget_peak`], in KiB.
pub(crate) fn peak_kib() -> Option<u64> {
    status("VmHWM:")
}

fn status(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}
