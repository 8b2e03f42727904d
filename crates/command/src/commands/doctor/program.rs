//! The program and its system: versions, the features of the build, and environment variables that change its behaviour.

use serde_json::Value;

use super::finding::Finding;

/// Environment variables of the program, of its libraries and of the hub that change a run.
const VARIABLES: [&str; 12] = [
    "LOW_MEM_T5_GRAPHS",
    "LOW_MEM_T5_ISA",
    "LOW_MEM_T5_PRICES",
    "RAYON_NUM_THREADS",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_CACHE",
    "XDG_CACHE_HOME",
    "TMPDIR",
    "MIMALLOC_PURGE_DELAY",
    "NO_COLOR",
];

/// A longer system file is not the expected one.
pub const SYSTEM_FILE_BYTES: u64 = 1 << 20;

/// Reads a small system file.
pub fn read(path: &str) -> Option<String> {
    // Files below /proc and /sys report a size of zero, or that they are no regular files.
    let file = std::fs::File::open(path).ok()?;
    let mut text = String::new();
    std::io::Read::read_to_string(&mut std::io::Read::take(file, SYSTEM_FILE_BYTES), &mut text).ok()?;
    Some(text)
}

/// Findings about the program and its system.
pub fn findings() -> Vec<Finding> {
    vec![built(&features(), cfg!(debug_assertions)), system(), variables(|name| std::env::var(name).ok())]
}

/// The devices and libraries that the program was built for.
fn features() -> Vec<&'static str> {
    let all = [("cuda", cfg!(feature = "cuda")), ("mpi", cfg!(feature = "mpi")), ("nccl", cfg!(feature = "nccl"))];
    all.into_iter().filter(|(_, is_built)| *is_built).map(|(name, _)| name).collect()
}

fn built(features: &[&str], is_debug: bool) -> Finding {
    let version = env!("CARGO_PKG_VERSION");
    let shown = if features.is_empty() { "none".to_owned() } else { features.join(", ") };
    let target = format!("{} {}", std::env::consts::ARCH, std::env::consts::OS);
    let found = format!("train_low_mem {version} for {target}, features: {shown}");
    let finding = match is_debug {
        true => Finding::warning("program", format!("{found}; built without optimisation, many times slower"))
            .remedy("cargo build --release"),
        false => Finding::ok("program", found),
    };
    finding.fact("version", version).fact("features", features.to_vec()).fact("target", target)
}

fn system() -> Finding {
    let name = rustix::system::uname();
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let (kernel, release) = (text(name.sysname()), text(name.release()));
    let distribution = read("/etc/os-release").as_deref().and_then(|text| value_of(text, "PRETTY_NAME"));
    let shown = distribution.clone().map_or(String::new(), |name| format!(", {name}"));
    let is_container =
        ["/.dockerenv", "/run/.containerenv"].into_iter().any(|path| std::path::Path::new(path).exists());
    let container = if is_container { ", in a container" } else { "" };
    Finding::ok("system", format!("{kernel} {release}{shown}{container}"))
        .fact("kernel", format!("{kernel} {release}"))
        .fact("distribution", distribution.map_or(Value::Null, Value::from))
        .fact("is_container", is_container)
}

/// The value of `KEY=value` or `KEY="value"`.
pub fn value_of(text: &str, key: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
    Some(value.trim().trim_matches('"').to_owned())
}

fn variables(value_of: impl Fn(&str) -> Option<String>) -> Finding {
    let set: Vec<(&str, String)> = VARIABLES.into_iter().filter_map(|name| Some((name, value_of(name)?))).collect();
    let shown: Vec<String> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let found = if shown.is_empty() { "none is set".to_owned() } else { shown.join(" ") };
    set.into_iter().fold(Finding::ok("variables", found), |finding, (name, value)| finding.fact(name, value))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    #[test]
    fn a_build_without_optimisation_is_a_warning_with_the_line_that_makes_a_better_one() {
        assert_eq!(built(&["cuda"], false).severity, Severity::Ok);
        assert!(built(&["cuda"], false).found.ends_with("features: cuda"));
        assert_eq!((built(&[], true).severity, built(&[], true).remedies.len()), (Severity::Warning, 1));
    }

    #[test]
    fn values_of_the_release_file_come_without_their_quotes() {
        let text = "ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n";
        assert_eq!(value_of(text, "PRETTY_NAME").as_deref(), Some("Debian GNU/Linux 12"));
        assert_eq!(value_of(text, "ID").as_deref(), Some("debian"));
        assert_eq!(value_of(text, "NAME"), None);
    }

    #[test]
    fn variables_that_are_set_are_shown() {
        let found = variables(|name| (name == "LOW_MEM_T5_ISA").then(|| "avx2".to_owned()));
        assert_eq!((found.found.as_str(), found.facts.len()), ("LOW_MEM_T5_ISA=avx2", 1));
    }
}
