//! Memory of the host and of the control group, the time that tasks wait for it, and limits of the process.

use memory_policy::{Budget, Bytes, MemorySnapshot, Pressure, Probe, SystemProbe};
use rustix::process::{Resource, getrlimit};

use super::finding::Finding;

/// With less memory, not even the demo fits.
const LEAST: Bytes = Bytes(96 << 20);
/// The share of time in which tasks wait for memory, above which a run becomes slow.
const MUCH_PRESSURE_PERCENT: f64 = 10.0;
/// The number of open files that a run may need.
const FEW_FILES: u64 = 256;

/// Findings about memory.
pub fn findings() -> Vec<Finding> {
    let mut findings = match SystemProbe::new().snapshot() {
        Ok(now) => diagnose(&now),
        Err(error) => {
            let failure = Finding::failure("memory", format!("cannot be measured: {error}"));
            vec![failure.remedy("give every run `--memory-budget SIZE`, and mount /proc in a container")]
        }
    };
    findings.push(limits(|resource| getrlimit(resource).current));
    findings
}

fn diagnose(now: &MemorySnapshot) -> Vec<Finding> {
    let group = now.group.as_ref();
    let of_group = group.map(|group| group.available());
    let available = of_group.map_or(now.available, |group| group.min(now.available));
    let budget = Budget::ShareOfAvailable.resolve(now);
    let swap = match now.swap_total {
        Bytes(0) => "no swap".to_owned(),
        total => format!("{} of {total} swap used", now.swap_used),
    };
    let found =
        format!("{} of {} available, {swap}; a run without --memory-budget may use {budget}", now.available, now.total);
    let memory = if available < LEAST {
        Finding::failure("memory", format!("{found}: {available} is too little for any run"))
            .remedy("end other programs, or raise the limit of the control group")
    } else {
        Finding::ok("memory", found)
    };
    let memory = memory
        .fact("total_bytes", now.total.0)
        .fact("available_bytes", now.available.0)
        .fact("swap_total_bytes", now.swap_total.0)
        .fact("swap_used_bytes", now.swap_used.0)
        .fact("default_budget_bytes", budget.0);
    let control_group = match group {
        None => Finding::ok("control group", "no memory limit"),
        Some(group) => Finding::ok(
            "control group",
            format!(
                "{} may hold {}, has {} and can take {} more",
                group.path,
                group.limit,
                group.used,
                group.available()
            ),
        )
        .fact("path", group.path.as_str())
        .fact("limit_bytes", group.limit.0)
        .fact("used_bytes", group.used.0)
        .fact("available_bytes", group.available().0),
    };
    vec![memory, control_group, pressure(now)]
}

fn pressure(now: &MemorySnapshot) -> Finding {
    let Some(host) = now.pressure else {
        return Finding::note(
            "pressure",
            "the kernel does not say how long tasks wait for memory; runs cannot shrink before they swap",
        )
        .remedy("boot with `psi=1`, on Linux 4.20 or later");
    };
    let most = now.group_pressure.map_or(host.some_percent, |group| group.some_percent.max(host.some_percent));
    let shown = |pressure: Pressure| {
        format!("tasks waited for memory in {:.1} % of the last ten seconds", pressure.some_percent)
    };
    let finding = match most > MUCH_PRESSURE_PERCENT {
        true => {
            Finding::warning("pressure", format!("{}: memory is short", shown(Pressure { some_percent: most, ..host })))
                .remedy("end other programs, or give runs a smaller `--memory-budget`")
        }
        false => Finding::ok("pressure", shown(host)),
    };
    finding
        .fact("some_percent", host.some_percent)
        .fact("group_some_percent", now.group_pressure.map(|group| group.some_percent))
}

/// Limits of the process. `of` returns a limit, or `None` if it is unlimited.
fn limits(of: impl Fn(Resource) -> Option<u64>) -> Finding {
    let (memory, file, files) = (of(Resource::As), of(Resource::Fsize), of(Resource::Nofile));
    let mut found = Vec::new();
    let mut remedies = Vec::new();
    if let Some(bytes) = memory {
        found.push(format!("address space {}", Bytes(bytes)));
        remedies.push("ulimit -v unlimited");
    }
    if let Some(bytes) = file {
        found.push(format!("files of {}", Bytes(bytes)));
        remedies.push("ulimit -f unlimited");
    }
    if let Some(count) = files.filter(|count| *count < FEW_FILES) {
        found.push(format!("{count} open files"));
        remedies.push("ulimit -n 1024");
    }
    let finding = match found.is_empty() {
        true => Finding::ok("limits", "no limit that affects a run"),
        false => Finding::warning("limits", format!("this shell allows {}", found.join(", "))),
    };
    let finding = remedies.into_iter().fold(finding, Finding::remedy);
    finding.fact("address_space_bytes", memory).fact("file_bytes", file).fact("open_files", files)
}

#[cfg(test)]
mod tests {
    use memory_policy::Group;

    use super::super::finding::Severity;
    use super::*;

    fn roomy() -> MemorySnapshot {
        MemorySnapshot {
            total: Bytes(8 << 30),
            available: Bytes(6 << 30),
            pressure: Some(Pressure::default()),
            ..MemorySnapshot::default()
        }
    }

    fn severities(now: &MemorySnapshot) -> Vec<Severity> {
        diagnose(now).iter().map(|finding| finding.severity).collect()
    }

    #[test]
    fn too_little_memory_is_a_failure_also_where_the_control_group_has_it() {
        use Severity::{Failure, Note, Ok, Warning};
        assert_eq!(severities(&roomy()), [Ok, Ok, Ok]);
        assert_eq!(severities(&MemorySnapshot { available: Bytes(50 << 20), ..roomy() }), [Failure, Ok, Ok]);
        let group = Group { path: "/job".into(), limit: Bytes(64 << 20), used: Bytes(1 << 20), reclaimable: Bytes(0) };
        assert_eq!(severities(&MemorySnapshot { group: Some(group), ..roomy() }), [Failure, Ok, Ok]);
        assert_eq!(severities(&MemorySnapshot { pressure: None, ..roomy() }), [Ok, Ok, Note]);
        let busy = Some(Pressure { some_percent: 30.0, ..Pressure::default() });
        assert_eq!(severities(&MemorySnapshot { group_pressure: busy, ..roomy() }), [Ok, Ok, Warning]);
    }

    #[test]
    fn limits_that_a_run_would_meet_come_with_the_lines_that_raise_them() {
        assert_eq!(limits(|_| None).severity, Severity::Ok);
        assert_eq!(limits(|resource| (resource == Resource::Nofile).then_some(1024)).severity, Severity::Ok);
        let all = limits(|_| Some(100));
        assert_eq!((all.severity, all.remedies.len()), (Severity::Warning, 3), "{all}");
    }
}
