//! The faults and their operations: the lines of `FAULT_POINTS`, each `KEY=VALUE`.
//!
//! ```text
//! under=/absolute/path   count operations on files below it; may be repeated
//! only=TEXT              of these, only where the path contains TEXT
//! not=TEXT               of these, not where the path contains TEXT
//! calls=write,pwrite     of these, only these calls
//! from=3                 the first operation to be struck, counted from 1
//! to=9                   the last one; as `from` where left out; `to=end` for all that follow
//! every=2                of these, every second one
//! do=ACTION              kill-before, kill-in, kill-after, errno:5, signal:15, short, lie, hold:8388608
//! trace=/path            write a line for each operation that is counted
//! record=/path           keep a copy of each file as it was when it was synced: /path/NUMBER
//! threads=2              start at most 2 threads; the next one fails (EAGAIN)
//! ```

/// The fault at an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// No fault: operations are only counted.
    Count,
    /// The process kills itself before the operation.
    KillBefore,
    /// The process kills itself after half of a write, or after the whole of any other operation.
    KillIn,
    /// The process kills itself after the operation.
    KillAfter,
    /// The operation fails with this error number.
    Errno(i64),
    /// The process sends itself this signal, and then performs the operation.
    Signal(i64),
    /// A read or write is performed for a third of its bytes.
    Short,
    /// The process gets so many bytes of memory that nothing frees, and then performs the operation.
    Hold(i64),
    /// The operation reports success without being performed: for tests of the checker.
    Lie,
}

/// A set of faults, and the operations that get them.
#[derive(Debug, PartialEq, Eq)]
pub struct Settings {
    /// Directories and files whose operations count.
    pub under: Vec<String>,
    /// Text that a path must contain.
    pub only: Option<String>,
    /// Text that a path must not contain.
    pub not: Option<String>,
    /// Names of the calls that count; empty for all.
    pub calls: Vec<String>,
    /// The first operation that gets the fault, counted from 1.
    pub from: u64,
    /// The last operation that gets the fault.
    pub to: u64,
    /// Only every n-th of these operations gets it.
    pub every: u64,
    /// The fault.
    pub action: Action,
    /// File for a line per operation.
    pub trace: Option<String>,
    /// Directory for copies of synced files.
    pub record: Option<String>,
    /// The most threads that can be started.
    pub threads: u64,
}

impl Settings {
    /// Parses the lines of `FAULT_POINTS`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut settings = Settings {
            under: Vec::new(),
            only: None,
            not: None,
            calls: Vec::new(),
            from: 0,
            to: 0,
            every: 1,
            action: Action::Count,
            trace: None,
            record: None,
            threads: u64::MAX,
        };
        let mut to = None;
        for line in text.lines().filter(|line| !line.is_empty()) {
            let (key, value) = line.split_once('=').ok_or_else(|| format!("expected KEY=VALUE, got `{line}`"))?;
            let number = || value.parse::<u64>().map_err(|_| format!("{key}: expected a number, got `{value}`"));
            match key {
                "under" => settings.under.push(value.trim_end_matches('/').to_string()),
                "only" => settings.only = Some(value.to_string()),
                "not" => settings.not = Some(value.to_string()),
                "calls" => settings.calls = value.split(',').map(str::to_string).collect(),
                "from" => settings.from = number()?,
                "to" if value == "end" => to = Some(u64::MAX),
                "to" => to = Some(number()?),
                "every" => settings.every = number()?.max(1),
                "do" => settings.action = action(value)?,
                "trace" => settings.trace = Some(value.to_string()),
                "record" => settings.record = Some(value.to_string()),
                "threads" => settings.threads = number()?,
                _ => return Err(format!("unknown key `{key}`")),
            }
        }
        settings.to = to.unwrap_or(settings.from);
        Ok(settings)
    }

    /// Whether operations on this path count.
    pub fn covers(&self, path: &[u8]) -> bool {
        let is_below = |base: &String| {
            path.strip_prefix(base.as_bytes()).is_some_and(|rest| rest.is_empty() || rest[0] == b'/' || rest[0] == b' ')
        };
        let contains = |text: &String| path.windows(text.len().max(1)).any(|part| part == text.as_bytes());
        self.under.iter().any(is_below)
            && self.only.as_ref().is_none_or(contains)
            && !self.not.as_ref().is_some_and(contains)
    }

    /// The fault at the operation with this number, counted from 1.
    pub fn action(&self, number: u64) -> Action {
        let is_struck = self.from > 0 && (self.from..=self.to).contains(&number);
        if is_struck && (number - self.from).is_multiple_of(self.every) { self.action } else { Action::Count }
    }
}

fn action(text: &str) -> Result<Action, String> {
    let number = |value: &str| value.parse::<i64>().map_err(|_| format!("do: expected a number, got `{value}`"));
    Ok(match text.split_once(':') {
        None => match text {
            "count" => Action::Count,
            "kill-before" => Action::KillBefore,
            "kill-in" => Action::KillIn,
            "kill-after" => Action::KillAfter,
            "short" => Action::Short,
            "lie" => Action::Lie,
            _ => return Err(format!("unknown action `{text}`")),
        },
        Some(("errno", value)) => Action::Errno(number(value)?),
        Some(("signal", value)) => Action::Signal(number(value)?),
        Some(("hold", value)) => Action::Hold(number(value)?),
        Some(_) => return Err(format!("unknown action `{text}`")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_below_the_directory_count_and_their_neighbours_do_not() {
        let settings = Settings::parse("under=/runs/a/\nonly=step\nnot=9").unwrap();
        for (path, is_covered) in [
            ("/runs/a/step-1", true),
            ("/runs/a/b/step-1", true),
            ("/runs/a/step-9", false),
            ("/runs/a/b", false),
            ("/runs/abc/step-1", false),
            ("/proc/step", false),
        ] {
            assert_eq!(settings.covers(path.as_bytes()), is_covered, "{path}");
        }
        // The name of a file that was removed while open ends in ` (deleted)`.
        assert!(Settings::parse("under=/runs/a").unwrap().covers(b"/runs/a (deleted)"));
    }

    #[test]
    fn one_operation_is_struck_or_all_from_one_on_or_every_second_one() {
        let struck = |text: &str| -> Vec<u64> {
            let settings = Settings::parse(text).unwrap();
            (1..=6).filter(|&number| settings.action(number) != Action::Count).collect()
        };
        assert_eq!(struck("from=3\ndo=errno:5"), [3]);
        assert_eq!(struck("from=3\nto=end\ndo=errno:5"), [3, 4, 5, 6]);
        assert_eq!(struck("from=2\nto=5\nevery=2\ndo=short"), [2, 4]);
        assert_eq!(struck("do=kill-in"), [0u64; 0]);
    }

    #[test]
    fn a_line_that_says_nothing_is_refused() {
        for text in ["from", "from=x", "do=kill", "do=errno:EIO", "where=/tmp"] {
            assert!(Settings::parse(text).is_err(), "{text}");
        }
    }
}
