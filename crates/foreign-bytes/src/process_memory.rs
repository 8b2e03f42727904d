//! The resident set of this process and its peak, from `/proc`. Elsewhere both are unknown.

use std::fs;

/// Forgets the peak: what [`peak_kib`] says from now on is the largest resident set from now on.
pub(crate) fn forget_peak() {
    // The file takes a digit and keeps nothing, so this is no file that could be torn.
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
