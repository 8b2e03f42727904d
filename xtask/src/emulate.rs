//! `cargo xtask emulate [ARGUMENTS]`: `cargo test --release --workspace ARGUMENTS` with tile registers and bf16 instructions in
//! software, where the processor has none. What runs there is what is built for everyone; see `crates/t5-ops/emulation`.

use std::path::Path;
use std::process::Command;

const LIBRARY: &str = "emulated_units";

/// Runs the tests; says why where there is nothing to run.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        println!("skipped: signals and instructions of x86-64 Linux are emulated, and nothing else");
        return Ok(());
    }
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if processor.split_whitespace().any(|flag| flag == "amx_bf16") {
        println!("nothing to emulate: this processor has tile registers, and its tests use them");
        return Ok(());
    }
    let cargo = |arguments: &[&str]| {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        command.current_dir(root).args(arguments).args(["--release", "--workspace"]);
        command
    };
    succeed(&mut cargo(&["build", "--example", LIBRARY]))?;
    // Beside this program, wherever cargo builds.
    let here = std::env::current_exe().map_err(|error| error.to_string())?;
    let library = here.with_file_name("examples").join(format!("lib{LIBRARY}.so"));
    let loaded = Command::new("true").env("LD_PRELOAD", &library).output();
    match loaded {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            println!("skipped: {}", String::from_utf8_lossy(&output.stderr).trim());
            return Ok(());
        }
        Err(error) => return Err(format!("true: {error}")),
    }
    let runner = format!("target.'cfg(unix)'.runner=[\"env\", \"LD_PRELOAD={}\"]", library.display());
    succeed(cargo(&["test", "--config", &runner]).args(arguments))
}

fn succeed(command: &mut Command) -> Result<(), String> {
    let status = command.status().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    if status.success() { Ok(()) } else { Err(format!("cargo ended with {status}")) }
}
