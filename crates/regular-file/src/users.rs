//! The users of the system: who we are, and whom we trust with a name.

/// Permission for every user to write.
const OTHERS_WRITE: u32 = 0o002;
/// Only the owner of an entry, or of the directory, may rename or remove it.
const STICKY: u32 = 0o1000;

/// The user of this process.
pub fn ours() -> u32 {
    #[cfg(unix)]
    {
        rustix::process::geteuid().as_raw()
    }
    #[cfg(not(unix))]
    {
        0
    }
}

/// Whether this user cannot harm us: we ourselves, and root. In a container with users of its own, files of the users outside
/// of it, such as the root of the machine, have the owner `overflowuid`.
pub fn is_trusted(user: u32) -> bool {
    user == ours() || user == 0 || Some(user) == outside()
}

/// Whether the names in a directory of this owner and mode stay what they are: no user whom we do not trust can exchange them.
/// Its group may: the owner chose it.
pub fn keeps_names(owner: u32, mode: u32) -> bool {
    is_trusted(owner) && (mode & OTHERS_WRITE == 0 || mode & STICKY != 0)
}

/// The owner that files of users outside of this container have.
fn outside() -> Option<u32> {
    static OUTSIDE: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
    *OUTSIDE.get_or_init(|| {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        outside_of(&read("/proc/self/uid_map")?, &read("/proc/sys/kernel/overflowuid")?)
    })
}

/// `None` if the map has every user.
fn outside_of(uid_map: &str, overflow: &str) -> Option<u32> {
    let mapped: u64 = uid_map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum();
    if mapped >= u64::from(u32::MAX) { None } else { overflow.trim().parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_directory_of_ours_or_of_root_that_others_cannot_change_keeps_its_names() {
        let other = ours().wrapping_add(1).max(1);
        for (owner, mode, expected) in [
            (ours(), 0o755, true),
            (ours(), 0o775, true),
            (0, 0o1777, true),
            (0, 0o777, false),
            (ours(), 0o777, false),
            (other, 0o755, false),
            (other, 0o1777, false),
        ] {
            assert_eq!(keeps_names(owner, mode), expected, "{owner} {mode:o}");
        }
    }

    #[test]
    fn files_of_users_outside_of_a_container_belong_to_nobody_in_it() {
        assert_eq!(outside_of("         0          0 4294967295\n", "65534\n"), None);
        assert_eq!(outside_of("         0       1000          1\n", "65534\n"), Some(65534));
    }
}
