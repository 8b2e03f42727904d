//! The processor: its units, the kernels that use them, and threads.

use super::finding::Finding;
use super::program::read;

/// Units that kernels are compiled for or could use, by their names in /proc/cpuinfo.
const UNITS: [&str; 12] = [
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "bf16",
];

/// The facts about the processor.
#[derive(Clone, Debug, Default)]
struct Facts {
    model: String,
    units: Vec<&'static str>,
    /// Cores that the process may run on.
    cores: usize,
    /// Cores of the machine.
    all_cores: usize,
    /// The processor time that the control group allows, in cores; `None` without a limit.
    quota: Option<f64>,
    threads: usize,
    /// The best kernels that the processor can run, and the kernels in use.
    best: String,
    used: String,
    /// The average number of tasks that waited for a core in the last minute.
    load: Option<f64>,
}

/// Findings about the processor.
pub fn findings() -> Vec<Finding> {
    diagnose(&facts())
}

fn facts() -> Facts {
    let text = read("/proc/cpuinfo").unwrap_or_default();
    let field = |names: &[&str]| {
        let values = text.lines().filter_map(|line| line.split_once(':'));
        let mut values = values.map(|(name, value)| (name.trim(), value.trim()));
        values.find(|(name, _)| names.contains(name)).map(|(_, value)| value.to_owned())
    };
    let flags = field(&["flags", "Features"]).unwrap_or_default();
    let has = |unit: &&str| flags.split_whitespace().any(|flag| flag == *unit);
    let names = ["amx", "avx512bf16", "avx512", "avx2", "neon", "portable"];
    let best = names.into_iter().find(|name| t5_ops::has_instruction_set(name)).unwrap_or("portable");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Facts {
        model: field(&["model name", "Model", "Hardware"]).unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        units: UNITS.into_iter().filter(has).collect(),
        cores,
        all_cores: text.lines().filter(|line| line.starts_with("processor")).count().max(cores),
        quota: quota(),
        threads: t5_ops::threads(),
        best: best.to_owned(),
        used: t5_ops::instruction_set().to_owned(),
        load: read("/proc/loadavg").and_then(|text| text.split_whitespace().next()?.parse().ok()),
    }
}

/// The processor time that the process's own control group may use, of version 2 or of version 1.
fn quota() -> Option<f64> {
    let groups = read("/proc/self/cgroup")?;
    let of = |prefix: &str| groups.lines().find_map(|line| line.split_once(prefix).map(|(_, path)| path.to_owned()));
    let text = match of("0::").and_then(|path| read(&format!("/sys/fs/cgroup{path}/cpu.max"))) {
        Some(text) => text,
        None => read("/sys/fs/cgroup/cpu.max").or_else(|| {
            let [quota, period] =
                ["cpu.cfs_quota_us", "cpu.cfs_period_us"].map(|name| read(&format!("/sys/fs/cgroup/cpu/{name}")));
            Some(format!("{} {}", quota?.trim(), period?.trim()))
        })?,
    };
    quota_of(&text)
}

/// `max 100000`, `200000 100000`, or `-1 100000` of version 1.
fn quota_of(text: &str) -> Option<f64> {
    let mut numbers = text.split_whitespace();
    let (quota, period): (f64, f64) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

fn diagnose(facts: &Facts) -> Vec<Finding> {
    let Facts { model, units, cores, all_cores, quota, threads, best, used, load } = facts;
    let shown = if units.is_empty() { String::new() } else { format!("; units {}", units.join(", ")) };
    let limited = if cores < all_cores {
        format!("{cores} of {all_cores} cores")
    } else {
        memory_policy::plural(*cores as u64, "core")
    };
    let processor = Finding::ok("processor", format!("{model}, {limited}{shown}"))
        .fact("model", model.as_str())
        .fact("cores", *cores)
        .fact("all_cores", *all_cores)
        .fact("units", units.clone());
    let words = match used.as_str() {
        "amx" => "amx: bf16 in tile registers, f32 in avx512",
        "avx512bf16" => "avx512bf16: bf16 by dot products, f32 in avx512",
        "avx512" => "avx512: f32; bf16 is widened to f32",
        "avx2" => "avx2: f32; bf16 is widened to f32",
        "neon" => "neon: f32; bf16 is widened to f32",
        other => other,
    };
    let kernels = if used == best {
        match used.as_str() {
            "portable" => Finding::warning(
                "kernels",
                "portable: this processor has no unit that kernels are written for (avx2 with fma, neon); steps are many times slower",
            ),
            _ => Finding::ok("kernels", words),
        }
    } else {
        Finding::warning("kernels", format!("{words}; the processor could run {best}")).remedy("unset LOW_MEM_T5_ISA")
    };
    let kernels = kernels.fact("used", used.as_str()).fact("best", best.as_str());
    let busy = load.filter(|load| *load > 0.5 * *cores as f64);
    let threads_found = match (quota, busy) {
        (Some(quota), _) if *quota + 0.5 < *threads as f64 => {
            let whole = quota.floor().max(1.0);
            let found = format!("{threads}, but the control group gives {quota:.1} cores' worth of time");
            Finding::warning("threads", found).remedy(format!("export RAYON_NUM_THREADS={whole}"))
        }
        _ if threads < cores => {
            let found = format!("{threads} of {cores} cores are used");
            Finding::warning("threads", found).remedy("unset RAYON_NUM_THREADS")
        }
        _ if threads > cores => {
            let found = format!("{threads} on {cores} cores take turns");
            Finding::warning("threads", found).remedy("unset RAYON_NUM_THREADS")
        }
        (_, Some(load)) => {
            let found = format!("{threads}; other programs use them as well: load {load:.1}");
            Finding::note("threads", found)
        }
        _ => Finding::ok("threads", threads.to_string()),
    };
    let threads_found = threads_found.fact("threads", *threads).fact("load", *load).fact("quota_cores", *quota);
    vec![processor, kernels, threads_found]
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    fn quiet() -> Facts {
        Facts {
            cores: 4,
            all_cores: 4,
            threads: 4,
            best: "avx512".into(),
            used: "avx512".into(),
            load: Some(0.1),
            ..Facts::default()
        }
    }

    #[track_caller]
    fn check(facts: &Facts, name: &str, severity: Severity, words: &str) {
        let findings = diagnose(facts);
        let finding = findings.iter().find(|finding| finding.name == name).expect("the finding");
        let text = finding.to_string();
        assert!(finding.severity == severity && text.contains(words), "{text}");
    }

    #[test]
    fn units_that_are_not_used_and_threads_that_do_not_fit_are_warnings() {
        check(&quiet(), "kernels", Severity::Ok, "avx512");
        check(&quiet(), "threads", Severity::Ok, "4");
        check(&Facts { used: "avx2".into(), ..quiet() }, "kernels", Severity::Warning, "unset LOW_MEM_T5_ISA");
        let portable = Facts { used: "portable".into(), best: "portable".into(), ..quiet() };
        check(&portable, "kernels", Severity::Warning, "no unit");
        check(&Facts { quota: Some(1.5), ..quiet() }, "threads", Severity::Warning, "RAYON_NUM_THREADS=1");
        check(&Facts { quota: Some(4.0), ..quiet() }, "threads", Severity::Ok, "4");
        check(&Facts { threads: 2, ..quiet() }, "threads", Severity::Warning, "2 of 4 cores");
        check(&Facts { threads: 8, ..quiet() }, "threads", Severity::Warning, "8 on 4 cores");
        check(&Facts { load: Some(3.0), ..quiet() }, "threads", Severity::Note, "load 3.0");
        check(&Facts { all_cores: 64, ..quiet() }, "processor", Severity::Ok, "4 of 64 cores");
    }

    #[test]
    fn a_quota_is_time_in_a_period_or_none() {
        assert_eq!(quota_of("150000 100000\n"), Some(1.5));
        assert_eq!(quota_of("max 100000\n"), None);
        assert_eq!(quota_of("-1 100000"), None);
        assert_eq!(quota_of(""), None);
    }

    #[test]
    fn this_machine_has_a_processor_with_kernels_and_threads() {
        let names: Vec<&str> = findings().iter().map(|finding| finding.name).collect();
        assert_eq!(names, ["processor", "kernels", "threads"]);
    }
}
