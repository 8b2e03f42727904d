//! `cargo xtask release`: builds what users install, and tries each of it.
//!
//! * One static program for each target that this toolchain has: stripped, checked for its size, and run in an empty directory
//!   tree, as a `FROM scratch` image runs it.
//! * A wheel with the program inside (`maturin`), installed into a new environment and run from there.
//! * An image (`packaging/Dockerfile`), where a container engine runs.
//!
//! What this machine cannot build is skipped, with the line that would make it possible. Everything is written below
//! `target/release-files`.

mod elf;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const USAGE: &str = "usage: cargo xtask release [TARGET]...   [default: every target that the toolchain has]";

/// The targets of a release. The last one needs no other toolchain than the usual one.
const TARGETS: [&str; 3] = ["x86_64-unknown-linux-musl", "aarch64-unknown-linux-musl", "x86_64-unknown-linux-gnu"];

/// Static, and random bytes from the system call: a static program of glibc does not find the call by its name, and an image
/// from scratch has no /dev/urandom.
const RUSTFLAGS: &str = "-C target-feature=+crt-static --cfg getrandom_backend=\"linux_getrandom\"";

/// The most that a stripped program may take.
const MOST_BYTES: u64 = 15 << 20;

/// Builds and tries everything that can be built here.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    if arguments.iter().any(|argument| argument.starts_with('-')) {
        return Err(USAGE.to_owned());
    }
    let release = Release { root, directory: root.join("target/release-files") };
    fs::create_dir_all(&release.directory).map_err(|error| format!("{}: {error}", release.directory.display()))?;
    let installed = output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let has_target = |target: &str| Path::new(installed.trim()).join("lib/rustlib").join(target).join("lib").is_dir();
    let mut programs = Vec::new();
    for target in TARGETS.into_iter().filter(|target| arguments.is_empty() || arguments.iter().any(|one| one == target))
    {
        if !has_target(target) {
            println!("skipped: {target}: `rustup target add {target}` adds it");
            continue;
        }
        let program = release.build(target)?;
        release.check(target, &program)?;
        programs.push((target, program));
    }
    let Some((target, program)) = programs.iter().find(|(target, _)| target.starts_with(std::env::consts::ARCH)) else {
        return Err("no program for this machine was built".to_owned());
    };
    release.wheel(target, program)?;
    release.image(program)
}

struct Release<'a> {
    root: &'a Path,
    directory: PathBuf,
}

impl Release<'_> {
    /// A static, stripped program.
    fn build(&self, target: &str) -> Result<PathBuf, String> {
        let mut cargo = Command::new("cargo");
        cargo
            .args(["build", "--release", "--locked", "-p", "train-low-mem", "--target", target])
            .current_dir(self.root);
        cargo.env("RUSTFLAGS", RUSTFLAGS).env("CARGO_PROFILE_RELEASE_LTO", "thin");
        done(&mut cargo)?;
        let built = self.root.join("target").join(target).join("release/train_low_mem");
        let program = self.directory.join(format!("train_low_mem-{target}"));
        fs::copy(&built, &program).map_err(|error| format!("{}: {error}", built.display()))?;
        Ok(program)
    }

    /// Size and linking of a program, and a short run of it where this machine can.
    fn check(&self, target: &str, program: &Path) -> Result<(), String> {
        let bytes = fs::read(program).map_err(|error| format!("{}: {error}", program.display()))?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(format!("{}: expected at most {MOST_BYTES} bytes, got {}", program.display(), bytes.len()));
        }
        if elf::interpreter(&bytes)? {
            return Err(format!(
                "{}: expected a static program, got one that needs a dynamic linker",
                program.display()
            ));
        }
        if !target.starts_with(std::env::consts::ARCH) {
            println!("{target}: {} bytes, static; it does not run on this machine", bytes.len());
            return Ok(());
        }
        // Nothing but the program, as in an image from scratch.
        let empty = self.directory.join("scratch");
        let _ = fs::remove_dir_all(&empty);
        fs::create_dir_all(empty.join("data")).map_err(|error| format!("{}: {error}", empty.display()))?;
        let inside = empty.join("train_low_mem");
        fs::copy(program, &inside).map_err(|error| format!("{}: {error}", inside.display()))?;
        let alone = ["train", "--max-steps", "3", "--device", "cpu", "--output", "/data/run"];
        let mut run = Command::new("chroot");
        run.arg(&empty).arg("/train_low_mem").args(alone);
        let is_root = output(Command::new("id").arg("-u"))?.trim() == "0";
        let how = if is_root {
            done(&mut run)?;
            "alone in its root directory"
        } else {
            let output = empty.join("data/run").display().to_string();
            done(Command::new(&inside).args(["--max-steps", "3", "--output", &output]).env_clear())?;
            "without an environment"
        };
        if !empty.join("data/run/model/model.safetensors").exists() {
            return Err(format!("{}: the run left no model", program.display()));
        }
        println!("{target}: {} bytes, static, trained three steps {how}", bytes.len());
        Ok(())
    }

    /// The wheel, installed and run.
    fn wheel(&self, target: &str, program: &Path) -> Result<(), String> {
        let has_maturin = output(Command::new("maturin").arg("--version")).is_ok();
        if !has_maturin {
            println!("skipped: the wheel: `pip install maturin` adds what builds it");
            return Ok(());
        }
        let wheels = self.directory.join("wheels");
        let _ = fs::remove_dir_all(&wheels);
        let mut maturin = Command::new("maturin");
        // The crate itself knows nothing of Python: its pyproject is in a folder of its own.
        maturin.args(["build", "--release", "--locked", "--target", target, "--out"]).arg(&wheels);
        maturin.current_dir(self.root.join("packaging"));
        maturin.env("RUSTFLAGS", RUSTFLAGS).env("CARGO_PROFILE_RELEASE_LTO", "thin");
        done(&mut maturin)?;
        let wheel = fs::read_dir(&wheels)
            .map_err(|error| error.to_string())?
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|end| end == "whl"))
            .ok_or("maturin made no wheel")?;
        let environment = self.directory.join("environment");
        let _ = fs::remove_dir_all(&environment);
        done(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
        done(Command::new(environment.join("bin/pip")).args(["install", "--quiet", "--no-index"]).arg(&wheel))?;
        let said = output(Command::new(environment.join("bin/train_low_mem")).arg("--version"))?;
        let expected = output(Command::new(program).arg("--version"))?;
        if said != expected {
            return Err(format!("the wheel's program says `{}`, expected `{}`", said.trim(), expected.trim()));
        }
        println!("wheel: {} installs and runs", wheel.display());
        Ok(())
    }

    /// The image, where an engine runs.
    fn image(&self, program: &Path) -> Result<(), String> {
        let engine = ["docker", "podman"].into_iter().find(|engine| output(Command::new(engine).arg("info")).is_ok());
        let Some(engine) = engine else {
            println!(
                "skipped: the image: no container engine runs here; the program ran alone in its root directory above"
            );
            return Ok(());
        };
        let context = self.directory.join("image");
        let _ = fs::remove_dir_all(&context);
        fs::create_dir_all(&context).map_err(|error| error.to_string())?;
        fs::copy(program, context.join("train_low_mem")).map_err(|error| error.to_string())?;
        let dockerfile = self.root.join("packaging/Dockerfile");
        done(Command::new(engine).args(["build", "--tag", "train_low_mem", "--file"]).arg(&dockerfile).arg(&context))?;
        done(Command::new(engine).args(["run", "--rm", "train_low_mem", "--version"]))?;
        println!("image: train_low_mem, from scratch, runs");
        Ok(())
    }
}

/// Runs a command to its end.
fn done(command: &mut Command) -> Result<(), String> {
    let shown = format!("{command:?}");
    let status = command.status().map_err(|error| format!("{shown}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{shown}: {status}")) }
}

/// A command's standard output.
fn output(command: &mut Command) -> Result<String, String> {
    let shown = format!("{command:?}");
    let output = command.output().map_err(|error| format!("{shown}: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("{shown}: {}", output.status))
    }
}
