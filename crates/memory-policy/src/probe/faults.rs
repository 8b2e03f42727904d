//! Page faults of this process, if the system counts them.

use std::ops::{Add, Div, Sub};
use std::path::Path;

/// How often this process touched memory that had no page yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageFaults {
    /// Faults served from memory: the first use of allocated memory.
    pub minor: u64,
    /// Faults served from a disk: a file read through a map, or swap.
    pub major: u64,
}

impl Sub for PageFaults {
    type Output = Self;

    /// The faults between two readings.
    fn sub(self, before: Self) -> Self {
        Self { minor: self.minor.saturating_sub(before.minor), major: self.major.saturating_sub(before.major) }
    }
}

impl Add for PageFaults {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { minor: self.minor + other.minor, major: self.major + other.major }
    }
}

impl Div<u64> for PageFaults {
    type Output = Self;

    /// The faults divided by a number of equal parts, rounded down.
    fn div(self, parts: u64) -> Self {
        Self { minor: self.minor / parts, major: self.major / parts }
    }
}

/// The faults in `self/stat` below `proc`, fields 10 and 12 of proc_pid_stat(5); `None` if there is no such file.
pub(super) fn page_faults(proc: &Path) -> Option<PageFaults> {
    let stat = std::fs::read(proc.join("self/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The second field is the program's name in parentheses. The name may contain any characters, including parentheses.
    let (_, after_name) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    Some(PageFaults { minor: fields.get(7)?.parse().ok()?, major: fields.get(9)?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_found_behind_any_name() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("self")).unwrap();
        let check = |stat: &str, expected: Option<PageFaults>| {
            std::fs::write(root.path().join("self/stat"), stat).unwrap();
            assert_eq!(page_faults(root.path()), expected, "{stat}");
        };
        let faults = Some(PageFaults { minor: 7, major: 9 });
        check("1 (train) S 1 1 1 0 -1 4194304 7 8 9 10 11 12", faults);
        check("1 (a) b) 5) S 1 1 1 0 -1 4194304 7 8 9 10 11 12", faults);
        check("1 (train) S 1 1", None);
        check("", None);
        assert_eq!(page_faults(&root.path().join("absent")), None);
    }
}
