//! A child process whose memory the operating system counts, in its own control group if requested.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The outcome of a child process.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// `VmHWM`: the largest resident set, as last read before the end.
    pub peak_bytes: u64,
    /// Exit code; -1 after a signal.
    pub exit_code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Wall time.
    pub seconds: f64,
    /// The control group's counters, if there was a group.
    pub group: Option<GroupCounters>,
}

impl Measured {
    /// Standard output as JSON.
    pub fn json(&self) -> Result<serde_json::Value, String> {
        serde_json::from_str(&self.stdout)
            .map_err(|error| format!("exit code {}: {error}: {}", self.exit_code, self.stderr.trim()))
    }
}

/// A control group's own counters after the child's end.
#[derive(Clone, Copy, Debug, Default)]
pub struct GroupCounters {
    /// The most bytes that the group held, including page cache.
    pub peak_bytes: u64,
    /// How often the group reached its limit, so that memory had to be reclaimed.
    pub failures: u64,
    /// Processes killed for lack of memory.
    pub kills: u64,
}

/// Interval between reads of the peak. The peak only grows, so only its growth in the last interval can be missed.
const POLL_INTERVAL: Duration = Duration::from_millis(4);
/// `until` is called once in this many reads, because it may read files.
const LOOKS_A_QUESTION: usize = 20;

/// Runs `program` with `arguments` to its end; `until` may end it earlier by killing it.
pub fn run(
    program: &Path,
    arguments: &[String],
    group: Option<&Group>,
    scratch: &Path,
    until: &dyn Fn() -> bool,
) -> Result<Measured, String> {
    // Files, not pipes: a full pipe would block the child, since no thread reads it while the child runs.
    let [out_path, err_path] = ["stdout", "stderr"].map(|name| scratch.join(format!("child.{name}")));
    let file = |path: &Path| fs::File::create(path).map_err(|error| format!("{}: {error}", path.display()));
    let mut command = match group {
        None => Command::new(program),
        Some(group) => group.command(program),
    };
    command.args(arguments).stdin(Stdio::null()).stdout(file(&out_path)?).stderr(file(&err_path)?);
    let began = Instant::now();
    let mut child = command.spawn().map_err(|error| format!("{}: {error}", program.display()))?;
    let mut measured = Measured { exit_code: -1, ..Measured::default() };
    let mut looks = 0;
    let status = loop {
        measured.peak_bytes = measured.peak_bytes.max(peak(&child));
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            break status;
        }
        looks += 1;
        if looks % LOOKS_A_QUESTION == 0 && until() {
            child.kill().and_then(|()| child.wait()).map_err(|error| error.to_string())?;
        }
        #[expect(clippy::disallowed_methods, reason = "a benchmark looks at another process again and again")]
        std::thread::sleep(POLL_INTERVAL);
    };
    measured.exit_code = status.code().unwrap_or(-1);
    measured.seconds = began.elapsed().as_secs_f64();
    measured.stdout = fs::read_to_string(&out_path).unwrap_or_default();
    measured.stderr = fs::read_to_string(&err_path).unwrap_or_default();
    measured.group = group.map(Group::counters);
    Ok(measured)
}

fn peak(child: &Child) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// A control group (version 1) with a memory limit; removed when dropped.
pub struct Group {
    path: PathBuf,
}

impl Group {
    /// Makes a group below the memory controller's mount, or returns why that is not possible.
    pub fn new(limit_bytes: u64) -> Result<Group, String> {
        let mount = Path::new("/sys/fs/cgroup/memory");
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = mount.join(format!("low-mem-t5-{}-{number}", std::process::id()));
        let group = Group { path };
        fs::create_dir(&group.path).map_err(|error| {
            format!("{}: {error} (needs the memory controller of version 1, writable)", group.path.display())
        })?;
        let limit = group.path.join("memory.limit_in_bytes");
        fs::write(&limit, limit_bytes.to_string()).map_err(|error| format!("{}: {error}", limit.display()))?;
        Ok(group)
    }

    /// The group's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command that runs a program in the group. A shell enters the group and then becomes the program, so all memory
    /// counts there.
    pub fn command(&self, program: &Path) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.path.join("cgroup.procs")).arg(program);
        shell
    }

    fn counters(&self) -> GroupCounters {
        let text = |file: &str| fs::read_to_string(self.path.join(file)).unwrap_or_default();
        let number = |file: &str| text(file).trim().parse().unwrap_or(0);
        let kills = text("memory.oom_control").lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok());
        GroupCounters {
            peak_bytes: number("memory.max_usage_in_bytes"),
            failures: number("memory.failcnt"),
            kills: kills.unwrap_or(0),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

/// The free memory of a group. Page cache that can be dropped counts as free.
pub fn left(group: &Path) -> Result<u64, String> {
    let text =
        |file: &str| fs::read_to_string(group.join(file)).map_err(|error| format!("{}: {error}", group.display()));
    let number = |file: &str| text(file)?.trim().parse::<u64>().map_err(|error| format!("{file}: {error}"));
    let stat = text("memory.stat")?;
    let field = |name: &str| -> u64 {
        let value = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
    };
    let cached = (field("total_inactive_file") + field("total_active_file")).saturating_sub(field("total_mapped_file"));
    let used = number("memory.usage_in_bytes")?.saturating_sub(cached);
    Ok(number("memory.limit_in_bytes")?.saturating_sub(used))
}
