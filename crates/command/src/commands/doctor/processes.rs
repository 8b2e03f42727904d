//! Several processes: the MPI on this machine.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::finding::Finding;
use super::program::{read, value_of};

/// Launchers of MPI, by the names that all implementations share.
const LAUNCHERS: [&str; 2] = ["mpirun", "mpiexec"];
/// The longest time to wait for a launcher's version.
const PATIENCE: Duration = Duration::from_secs(3);

/// The facts about MPI.
#[derive(Clone, Debug, Default)]
struct Facts {
    launcher: Option<PathBuf>,
    version: Option<String>,
    is_built_for_mpi: bool,
    /// The distribution, as /etc/os-release names it.
    distribution: Option<String>,
}

/// Findings about MPI.
pub fn findings() -> Vec<Finding> {
    let launcher = on_the_path();
    let version = launcher.as_deref().and_then(version);
    let distribution = read("/etc/os-release").as_deref().and_then(|text| value_of(text, "ID"));
    vec![diagnose(&Facts { launcher, version, is_built_for_mpi: cfg!(feature = "mpi"), distribution })]
}

fn on_the_path() -> Option<PathBuf> {
    let directories = std::env::var_os("PATH")?;
    let directories: Vec<PathBuf> = std::env::split_paths(&directories).collect();
    let places = LAUNCHERS.iter().flat_map(|name| directories.iter().map(move |directory| directory.join(name)));
    places.into_iter().find(|path| path.is_file())
}

/// The first line that the launcher prints about itself.
fn version(launcher: &Path) -> Option<String> {
    let mut command = Command::new(launcher);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let out = child.stdout.take()?;
    let (said, says) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let read = out.take(1 << 12).read_to_string(&mut text);
        let _ = said.send(read.map(|_| text));
    });
    let text = says.recv_timeout(PATIENCE);
    // A launcher that has printed its version has ended, or is about to end.
    let _ = child.kill();
    let _ = child.wait();
    let text = text.ok()?.ok()?;
    text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
}

fn diagnose(facts: &Facts) -> Finding {
    let Facts { launcher, version, is_built_for_mpi, distribution } = facts;
    let Some(launcher) = launcher else {
        let line = match distribution.as_deref() {
            Some("fedora" | "rhel" | "centos" | "rocky" | "almalinux") => {
                "dnf install openmpi openmpi-devel && module load mpi"
            }
            Some("arch") => "pacman -S openmpi",
            Some("alpine") => "apk add openmpi openmpi-dev",
            Some("opensuse-leap" | "opensuse-tumbleweed" | "sles") => "zypper install openmpi4 openmpi4-devel",
            _ => "apt-get install openmpi-bin libopenmpi-dev",
        };
        return Finding::note("mpi", "no mpirun on the PATH; only runs of several processes need it").remedy(line);
    };
    let shown = version.clone().unwrap_or_else(|| "of unknown version".to_owned());
    let found = format!("{shown} ({})", launcher.display());
    let finding = match is_built_for_mpi {
        true => Finding::ok("mpi", found),
        false => {
            Finding::note("mpi", format!("{found}; this build has no `mpi`; only runs of several processes need it"))
                .remedy("cargo build --release --features mpi")
        }
    };
    finding.fact("launcher", launcher.display().to_string()).fact("version", version.clone())
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    #[test]
    fn mpi_that_is_missing_comes_with_the_line_that_installs_it_here() {
        let of = |distribution: &str| diagnose(&Facts { distribution: Some(distribution.into()), ..Facts::default() });
        assert_eq!(of("debian").severity, Severity::Note);
        for (distribution, word) in
            [("debian", "apt-get"), ("fedora", "dnf"), ("arch", "pacman"), ("unknown", "apt-get")]
        {
            assert!(of(distribution).remedies[0].contains(word), "{distribution}");
        }
        let there = Facts {
            launcher: Some("/usr/bin/mpirun".into()),
            version: Some("mpirun (Open MPI) 4.1.4".into()),
            is_built_for_mpi: true,
            ..Facts::default()
        };
        assert_eq!((diagnose(&there).severity, diagnose(&there).remedies.len()), (Severity::Ok, 0));
        assert!(diagnose(&there).found.contains("Open MPI"));
        let without = diagnose(&Facts { is_built_for_mpi: false, ..there });
        assert!(without.severity == Severity::Note && without.remedies[0].contains("--features mpi"), "{without}");
    }
}
