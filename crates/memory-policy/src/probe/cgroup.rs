//! Control groups: the limits of this process, of version 1, 2 or both side by side.
//!
//! `/proc/self/cgroup` names the process's group in each hierarchy. `/proc/self/mountinfo` has the mount point of each hierarchy, and the
//! directory in it that the mount shows. Every level from the group up to the mount is read, because a parent's limit counts all its
//! children. The level that leaves the least memory decides. A file that cannot be read counts as no limit: a container may hide any of
//! them. See cgroups(7), proc_pid_mountinfo(5) and the kernel's `admin-guide/cgroup-v2` and `cgroup-v1/memory`.

use std::fs;
use std::path::{Path, PathBuf};

use super::procfs;
use crate::{Bytes, Group, Pressure};

/// Version 1 writes "no limit" as the largest multiple of the page size below 2^63. No machine has half of that, with any page size.
const V1_UNLIMITED: Bytes = Bytes(1 << 62);

/// The readings of the control groups.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// The level that leaves the least memory, of all hierarchies; `None` without any limit.
    pub(super) tightest: Option<Group>,
    /// Pressure of the process's own group (version 2 only).
    pub(super) pressure: Option<Pressure>,
    /// How often the process's own group reached its limit: `high` and `max` of `memory.events`, or `memory.failcnt`.
    pub(super) reclaims: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Version {
    V1,
    V2,
}

/// Reads every memory hierarchy that this process is in, with all paths taken below `root`.
pub(super) fn read(root: &Path) -> Groups {
    let Ok(membership) = fs::read_to_string(root.join("proc/self/cgroup")) else {
        return Groups::default();
    };
    let Ok(mountinfo) = fs::read_to_string(root.join("proc/self/mountinfo")) else {
        return Groups::default();
    };
    let mut groups = Groups::default();
    for (version, path) in membership.lines().filter_map(own_group) {
        let Some(mount) = mountinfo.lines().filter_map(|line| Mount::parse(line, version)).next_back() else {
            continue;
        };
        let mounted_at = root.join(mount.point.trim_start_matches('/'));
        let below = mount.below(path);
        let levels = levels(&mounted_at, &below);
        if let Some((own, _)) = levels.first() {
            groups.reclaims += reclaims(own, version);
            if version == Version::V2 {
                groups.pressure = procfs::pressure(&own.join("memory.pressure"));
            }
        }
        let limits = levels.into_iter().filter_map(|(directory, name)| level(&directory, name, version));
        groups.tightest = groups.tightest.into_iter().chain(limits).min_by_key(Group::available);
    }
    groups
}

/// The groups of this process that can limit memory: each with its directory, and the name of the file that has the limit of a group.
pub(crate) fn own_groups(root: &Path) -> Vec<(PathBuf, &'static str)> {
    let text = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
    let (membership, mountinfo) = (text("proc/self/cgroup"), text("proc/self/mountinfo"));
    let directory = |(version, path): (Version, &str)| {
        let mount = mountinfo.lines().filter_map(|line| Mount::parse(line, version)).next_back()?;
        let file = if version == Version::V2 { "memory.max" } else { "memory.limit_in_bytes" };
        Some((root.join(mount.point.trim_start_matches('/')).join(mount.below(path)), file))
    };
    membership.lines().filter_map(own_group).filter_map(directory).collect()
}

/// Parses a line `id:controllers:path` of `/proc/self/cgroup`; `None` if its hierarchy cannot limit memory.
fn own_group(line: &str) -> Option<(Version, &str)> {
    let mut fields = line.splitn(3, ':');
    let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    match controllers {
        "" if id == "0" => Some((Version::V2, path)),
        _ if controllers.split(',').any(|controller| controller == "memory") => Some((Version::V1, path)),
        _ => None,
    }
}

/// The mount of a hierarchy.
struct Mount {
    /// The group that the mount shows at its mount point: `/` on a host, often a container's own group.
    root: String,
    /// The mount point.
    point: String,
}

impl Mount {
    /// Parses a line of `/proc/self/mountinfo`; `None` unless it mounts a memory hierarchy of this version.
    fn parse(line: &str, version: Version) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = file_system.split(' ');
        let (kind, options) = (fields.next()?, fields.nth(1)?);
        let wanted = match version {
            Version::V2 => kind == "cgroup2",
            Version::V1 => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
        };
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        wanted.then(|| Self { root: unescape(root), point: unescape(point) })
    }

    /// The group's path below the mount point, without a leading slash.
    ///
    /// With a namespace of its own, or a mount of another group, the group may be outside the mount. Then the mount's root is the nearest
    /// visible level.
    fn below(&self, group: &str) -> String {
        let inside = match self.root.as_str() {
            "/" => Some(group),
            root => group.strip_prefix(root).filter(|rest| rest.is_empty() || rest.starts_with('/')),
        };
        let visible = inside.filter(|path| !path.split('/').any(|part| part == ".."));
        visible.unwrap_or("").trim_matches('/').to_string()
    }
}

/// Undoes mountinfo's octal escapes of space, tab, newline and backslash.
fn unescape(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(field.to_string(), |text, (escaped, plain)| text.replace(escaped, plain))
}

/// The directories from the group up to the mount point, each with its name inside the hierarchy.
fn levels(mounted_at: &Path, below: &str) -> Vec<(PathBuf, String)> {
    let mut names = vec![below];
    while let Some(name) = names.last().filter(|name| !name.is_empty()) {
        names.push(name.rsplit_once('/').map_or("", |(parent, _)| parent));
    }
    names.into_iter().map(|name| (mounted_at.join(name), format!("/{name}"))).collect()
}

/// How often a group reached its limit. The limit counts page cache, so a group may reach it all the time without harm. It is pressure only
/// together with swapping; see [`crate::replan`].
fn reclaims(directory: &Path, version: Version) -> u64 {
    let text = |file: &str| fs::read_to_string(directory.join(file)).unwrap_or_default();
    match version {
        Version::V1 => text("memory.failcnt").trim().parse().unwrap_or(0),
        Version::V2 => {
            let events = text("memory.events");
            let count = |name: &str| -> u64 {
                let line = events.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
                line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
            };
            count("high") + count("max")
        }
    }
}

/// The limit and use of one level; `None` if it has no limit.
fn level(directory: &Path, path: String, version: Version) -> Option<Group> {
    let number = |file: &str| fs::read_to_string(directory.join(file)).ok()?.trim().parse().ok().map(Bytes);
    let stat = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
    let field = |name: &str| -> Option<Bytes> {
        let value = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        value.trim().parse().ok().map(Bytes)
    };
    // Version 2's `high` does not kill. It stalls the process until memory is freed, so it counts as a limit. The word `max` is not a
    // number, and so is no limit.
    let (limits, used, cached, mapped) = match version {
        Version::V2 => (
            [number("memory.max"), number("memory.high")],
            number("memory.current"),
            ["inactive_file", "active_file"],
            "file_mapped",
        ),
        Version::V1 => (
            [number("memory.limit_in_bytes"), field("hierarchical_memory_limit")],
            number("memory.usage_in_bytes"),
            ["total_inactive_file", "total_active_file"],
            "total_mapped_file",
        ),
    };
    let limit = limits.into_iter().flatten().min().filter(|&limit| limit < V1_UNLIMITED)?;
    let cached: Bytes = cached.into_iter().filter_map(field).sum();
    let reclaimable = cached.saturating_sub(field(mapped).unwrap_or_default());
    Some(Group { path, limit, used: used.unwrap_or_default(), reclaimable })
}
