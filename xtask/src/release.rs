//! `cargo xtask release`: builds the files that users install, and tries each of them.
//!
//! * One static program for each target of this toolchain: stripped, checked for its size, and run in an empty directory tree,
//!   as a `FROM scratch` image runs it. A program for another processor runs under QEMU there.
//! * One program with support for NVIDIA's cards, for glibc 2.28 or later, where cargo-zigbuild and CUDA's compiler are at hand. It links none of
//!   NVIDIA's libraries, and is run here, where there may be none.
//! * A wheel of each program with the Python package. This machine's is installed into a new environment, where the package's tests run.
//! * An image (`packaging/Dockerfile`), with the first of docker, podman and buildah that works.
//! * Beside each program: the notices of other packages in it, which are in the wheel and the image too, and a bill of materials.
//! * The planner for a browser, in one file (`cargo xtask page`).
//! * Completions for shells, a manual page, and `install.sh`.
//! * SHA256SUMS of all of these. `install.sh` then installs this machine's program from them.
//!
//! Parts that this machine cannot build are skipped, with a line that says how to make them possible. Output goes below
//! `target/release-files`, or below CARGO_TARGET_DIR.

mod elf;
pub mod man;
mod third_party;
mod wheel;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::{kernels, page};

const USAGE: &str = "usage: cargo xtask release [TARGET]...   [default: every target that the toolchain has]";

/// The targets of a release.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-musl", "aarch64-unknown-linux-musl"];

/// The target of the program for NVIDIA's cards. A static program opens no libraries, and a card's are libraries.
const OF_CARDS: &str = "x86_64-unknown-linux-gnu";
/// The features of that program. Several cards (`nccl`) take processes of an MPI, which is linked.
const FEATURES_OF_CARDS: &str = "train-low-mem/cuda";

/// Static linking, and random bytes from the system call: an image from scratch has no /dev/urandom.
const RUSTFLAGS: &str = "-C target-feature=+crt-static --cfg getrandom_backend=\"linux_getrandom\"";

/// Linker flags to strip symbols.
const STRIPPED: [&str; 2] = ["-C", "strip=symbols"];

/// Relocations in a bit table instead of entries of 24 bytes. zig's linker does not support this.
const PACKED: [&str; 2] = ["-C", "link-arg=-Wl,-z,pack-relative-relocs"];

/// Merges functions with identical code, which the toolchain's own linker supports.
const FOLDED: [&str; 4] = ["-C", "link-arg=-fuse-ld=lld", "-C", "link-arg=-Wl,--icf=all"];

/// The profile of Cargo.toml for programs.
const PROFILE: &str = "dist";

/// The name of the image.
const IMAGE: &str = "train_low_mem";

/// The notices of other packages, in the wheel and the image.
const NOTICES: &str = "THIRD-PARTY-NOTICES.txt";

/// The digests of all files.
const SUMS: &str = "SHA256SUMS";

/// Installs a release for one user.
const INSTALLER: &str = "install.sh";

/// Shells, and the files in which they look for completions.
const COMPLETIONS: [(&str, &str); 3] =
    [("bash", "train_low_mem.bash"), ("zsh", "_train_low_mem"), ("fish", "train_low_mem.fish")];

/// The most bytes of a stripped program.
const MAX_BYTES: u64 = 18_000_000;

/// `cargo xtask wheel PROGRAM`: a wheel with a program that was built before, for this machine and others with as new a C library.
pub fn wheel_of(root: &Path, arguments: &[String]) -> Result<(), String> {
    let [program] = arguments else { return Err("usage: cargo xtask wheel PROGRAM".to_owned()) };
    let program = fs::canonicalize(program).map_err(|error| format!("{program}: {error}"))?;
    let directory = root.join("target").join("wheel-notices");
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let said = output(Command::new("rustc").arg("-vV"))?;
    let target = said.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("rustc names no host")?;
    let [notices, _] = third_party::write(root, target, &[], &directory)?;
    let wheel = wheel::write(root, &program, &notices, &version(&program)?, Path::new("."), true)?;
    println!("{}", wheel.display());
    Ok(())
}

/// `cargo xtask notices TARGET DIRECTORY`: the notices and the bill of materials of a program that another way builds.
pub fn notices_of(root: &Path, arguments: &[String]) -> Result<(), String> {
    let [target, directory] = arguments else { return Err("usage: cargo xtask notices TARGET DIRECTORY".to_owned()) };
    for path in third_party::write(root, target, &[], Path::new(directory))? {
        println!("{}", path.display());
    }
    Ok(())
}

/// Builds and tries everything that this machine can build.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    if arguments.iter().any(|argument| argument.starts_with('-')) {
        return Err(USAGE.to_owned());
    }
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |directory| root.join(directory));
    let toolchain =
        PathBuf::from(output(Command::new("rustc").args(["--print", "sysroot"]))?.trim()).join("lib/rustlib");
    let has_target = |target: &str| toolchain.join(target).join("lib").is_dir();
    let linker = fs::read_dir(&toolchain).ok().and_then(|mut hosts| {
        hosts.find_map(|host| host.ok().map(|host| host.path().join("bin/gcc-ld")).filter(|linker| linker.is_dir()))
    });
    let release = Release { root, directory: target.join("release-files"), target, linker };
    fs::create_dir_all(&release.directory).map_err(|error| format!("{}: {error}", release.directory.display()))?;
    let mut programs = Vec::new();
    for target in TARGETS.into_iter().filter(|target| arguments.is_empty() || arguments.iter().any(|one| one == target))
    {
        if !has_target(target) {
            println!("skipped: {target}: `rustup target add {target}` adds it");
            continue;
        }
        let Some(compiler) = Compiler::find(target) else {
            println!("skipped: {target}: it needs a C compiler: {}", hint_for_compiler(target));
            continue;
        };
        let program = release.build(compiler, target)?;
        release.check(target, &program)?;
        third_party::write(root, target, &[], &release.directory)?;
        programs.push((target, program));
    }
    let alone =
        programs.iter().find(|(target, _)| is_native(target)).map(|(target, program)| (*target, program.clone()));
    if arguments.is_empty() || arguments.iter().any(|one| one == OF_CARDS) {
        match release.build_for_cards() {
            Ok(program) => {
                release.check_for_cards(&program)?;
                third_party::write(root, OF_CARDS, &[FEATURES_OF_CARDS], &release.directory)?;
                programs.push((OF_CARDS, program));
            }
            Err(Absent::Tool(why)) => println!("skipped: {OF_CARDS} with GPUs: {why}"),
            Err(Absent::Build(why)) => return Err(why),
        }
    }
    let Some((_, program)) = programs.iter().find(|(target, _)| is_native(target)) else {
        return Err("no program for this machine was built".to_owned());
    };
    release.wheels(&programs, program)?;
    match &alone {
        Some((target, program)) => release.image(program, &release.notices(target))?,
        None => println!("skipped: the image: it takes the static program of this machine"),
    }
    if page::has_target()? {
        page::write(root, &release.directory)?;
    } else {
        println!("skipped: {}: `rustup target add {}` adds what it needs", page::PAGE, page::TARGET);
    }
    release.write_shell_files(program)?;
    release.write_sums()?;
    release.install(program)
}

/// Why there is no program for cards.
enum Absent {
    /// This machine lacks what builds it.
    Tool(String),
    /// It does not build.
    Build(String),
}

/// The compiler and linker for a target's C libraries. zig supports every target.
#[derive(Clone, Copy, PartialEq)]
enum Compiler {
    Machine,
    Zig,
}

impl Compiler {
    /// Returns the compiler that works here.
    fn find(target: &str) -> Option<Self> {
        let works = |program: &str| output(Command::new(program).arg("--version")).is_ok();
        if is_native(target) && works(&format!("{}-linux-musl-gcc", std::env::consts::ARCH)) {
            Some(Self::Machine)
        } else {
            works("cargo-zigbuild").then_some(Self::Zig)
        }
    }
}

fn hint_for_compiler(target: &str) -> &'static str {
    if is_native(target) {
        "`apt-get install musl-tools` or `pip install cargo-zigbuild` adds one"
    } else {
        "`pip install cargo-zigbuild` adds one"
    }
}

/// Whether this machine runs a target's programs itself.
fn is_native(target: &str) -> bool {
    processor(target) == std::env::consts::ARCH
}

fn processor(target: &str) -> &str {
    target.split('-').next().unwrap_or(target)
}

/// Finds a program in the PATH.
fn found(name: &str) -> Option<PathBuf> {
    let directories = std::env::var_os("PATH")?;
    std::env::split_paths(&directories).map(|directory| directory.join(name)).find(|path| path.is_file())
}

struct Release<'a> {
    root: &'a Path,
    /// Cargo's target directory.
    target: PathBuf,
    /// The release's directory.
    directory: PathBuf,
    /// The folder of the toolchain's own linker, if it has one.
    linker: Option<PathBuf>,
}

impl Release<'_> {
    /// The last arguments of rustc.
    fn linking(&self, compiler: Compiler) -> Vec<String> {
        let mut linking = STRIPPED.map(str::to_owned).to_vec();
        if compiler == Compiler::Zig {
            return linking;
        }
        linking.extend(PACKED.map(str::to_owned));
        if let Some(linker) = &self.linker {
            linking.extend(["-C".to_owned(), format!("link-arg=-B{}", linker.display())]);
            linking.extend(FOLDED.map(str::to_owned));
        }
        linking
    }

    /// Builds a static, stripped program.
    fn build(&self, compiler: Compiler, target: &str) -> Result<PathBuf, String> {
        let cargo = match compiler {
            Compiler::Machine => "cargo",
            Compiler::Zig => "cargo-zigbuild",
        };
        self.built(cargo, (target, &[]), &self.linking(compiler), ("RUSTFLAGS", RUSTFLAGS))
    }

    /// Builds the program for NVIDIA's cards, for the C library of `manylinux_2_28`.
    fn build_for_cards(&self) -> Result<PathBuf, Absent> {
        if output(Command::new("cargo-zigbuild").arg("--version")).is_err() {
            return Err(Absent::Tool(hint_for_compiler("").to_owned()));
        }
        let toolkit = kernels::toolkit().map_err(Absent::Tool)?;
        let target = format!("{OF_CARDS}.2.28");
        let features = ["--features", FEATURES_OF_CARDS];
        let linking = STRIPPED.map(str::to_owned);
        self.built("cargo-zigbuild", (&target, &features), &linking, ("CUDARC_CUDA_VERSION", &toolkit))
            .map_err(Absent::Build)
    }

    /// Builds a program with this cargo, for a target whose C library's version may be behind a dot, with a variable. Returns its place in
    /// the release.
    fn built(
        &self,
        cargo: &str,
        (target, features): (&str, &[&str]),
        linking: &[String],
        (variable, value): (&str, &str),
    ) -> Result<PathBuf, String> {
        let mut cargo = Command::new(cargo);
        cargo.args(["rustc", "--profile", PROFILE, "--locked", "-p", "train-low-mem", "--bin", "train_low_mem"]);
        cargo.args(features).args(["--target", target, "--"]).args(linking);
        cargo.current_dir(self.root).env("CARGO_TARGET_DIR", &self.target).env(variable, value);
        done(&mut cargo)?;
        let (target, _) = target.split_once('.').unwrap_or((target, ""));
        let built = self.target.join(target).join(PROFILE).join("train_low_mem");
        let program = self.directory.join(format!("train_low_mem-{target}"));
        fs::copy(&built, &program).map_err(|error| format!("{}: {error}", built.display()))?;
        Ok(program)
    }

    /// Checks that the program for cards needs none of their libraries to start, and trains with it here.
    fn check_for_cards(&self, program: &Path) -> Result<(), String> {
        let bytes = fs::read(program).map_err(|error| format!("{}: {error}", program.display()))?;
        let needed = elf::needed(&bytes)?;
        if let Some(library) =
            needed.iter().find(|name| ["libcu", "libnccl", "libnv"].iter().any(|of| name.starts_with(of)))
        {
            return Err(format!(
                "{}: expected a program that opens a card's libraries itself, got one that links {library}",
                program.display()
            ));
        }
        let run = self.directory.join("run-of-cards");
        let _ = fs::remove_dir_all(&run);
        done(Command::new(program).args(["train", "--max-steps", "20", "--output"]).arg(&run))?;
        println!("{OF_CARDS}: {} bytes, needs {}, trained 20 steps", bytes.len(), needed.join(" "));
        Ok(())
    }

    /// Checks the size and linking of a program, and runs it briefly if this machine can.
    fn check(&self, target: &str, program: &Path) -> Result<(), String> {
        let bytes = fs::read(program).map_err(|error| format!("{}: {error}", program.display()))?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(format!("{}: expected at most {MAX_BYTES} bytes, got {}", program.display(), bytes.len()));
        }
        if elf::interpreter(&bytes)? {
            return Err(format!(
                "{}: expected a static program, got one that needs a dynamic linker",
                program.display()
            ));
        }
        let emulator = found(&format!("qemu-{}-static", processor(target))).filter(|_| !is_native(target));
        if emulator.is_none() && !is_native(target) {
            println!(
                "{target}: {} bytes, static; only its header was read: `apt-get install qemu-user-static` adds what runs it",
                bytes.len()
            );
            return Ok(());
        }
        let how = self.try_alone(program, emulator.as_deref())?;
        println!("{target}: {} bytes, static, {how}", bytes.len());
        Ok(())
    }

    /// Runs a program without any other files, as in an image from scratch. Returns how it was run.
    fn try_alone(&self, program: &Path, emulator: Option<&Path>) -> Result<String, String> {
        let empty = self.directory.join("scratch");
        let _ = fs::remove_dir_all(&empty);
        fs::create_dir_all(empty.join("data")).map_err(|error| format!("{}: {error}", empty.display()))?;
        let is_root = output(Command::new("id").arg("-u"))?.trim() == "0";
        let top = if is_root { Path::new("/") } else { &empty };
        let copied = |from: &Path, name: &str| {
            fs::copy(from, empty.join(name)).map_err(|error| format!("{}: {error}", from.display()))?;
            Ok::<_, String>(top.join(name))
        };
        let inside = copied(program, "train_low_mem")?;
        let emulator = emulator.map(|emulator| copied(emulator, "emulator")).transpose()?;
        let command = || {
            let mut command = Command::new(if is_root { "chroot" } else { "env" });
            command.arg(if is_root { empty.as_os_str() } else { OsStr::new("-i") }).args(&emulator).arg(&inside);
            command
        };
        // An emulator is slow.
        let steps = if emulator.is_some() { "3" } else { "20" };
        output(command().arg("--help"))?;
        let mut train = command();
        train.args(["train", "--max-steps", steps, "--device", "cpu", "--output"]).arg(top.join("data/run"));
        done(&mut train)?;
        if !empty.join("data/run/model/model.safetensors").exists() {
            return Err(format!("{}: the run left no model", program.display()));
        }
        let place = if is_root { "alone in its root directory" } else { "without an environment" };
        let under = if emulator.is_some() { ", under QEMU" } else { "" };
        Ok(format!("trained {steps} steps {place}{under}"))
    }

    /// Makes the wheel of each program, and tries this machine's: `native`.
    fn wheels(&self, programs: &[(&str, PathBuf)], native: &Path) -> Result<(), String> {
        let wheels = self.directory.join("wheels");
        let _ = fs::remove_dir_all(&wheels);
        let version = version(native)?;
        for (target, program) in programs {
            let notices = self.notices(target);
            let wheel = wheel::write(self.root, program, &notices, &version, &wheels, false)?;
            let bytes = fs::metadata(&wheel).map_or(0, |file| file.len());
            let tried = if is_native(target) {
                self.try_wheel(program, &wheel)?;
                "installs, and its program and package run"
            } else {
                "not tried on this machine"
            };
            println!("wheel: {} ({bytes} bytes): {tried}", wheel.display());
        }
        Ok(())
    }

    /// The notices of the packages in a target's program.
    fn notices(&self, target: &str) -> PathBuf {
        self.directory.join(format!("THIRD-PARTY-NOTICES-{target}.txt"))
    }

    /// Installs a wheel into a new environment, and runs its program and the tests of its package.
    fn try_wheel(&self, program: &Path, wheel: &Path) -> Result<(), String> {
        let environment = self.directory.join("environment");
        let _ = fs::remove_dir_all(&environment);
        done(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
        done(Command::new(environment.join("bin/pip")).args(["install", "--quiet", "--no-index"]).arg(wheel))?;
        let said = output(Command::new(environment.join("bin/train_low_mem")).arg("--version"))?;
        let expected = output(Command::new(program).arg("--version"))?;
        if said != expected {
            return Err(format!("the wheel's program says `{}`, expected `{}`", said.trim(), expected.trim()));
        }
        // The package of the environment, which finds the environment's program.
        let mut tests = Command::new(environment.join("bin/python"));
        tests.args(["-m", "unittest", "discover", "--start-directory"]).arg(self.root.join("python/tests"));
        done(tests.current_dir(&environment).env_remove("PYTHONPATH").env_remove("LOW_MEM_T5_PROGRAM"))
    }

    /// Writes the completions and the manual page, as the program says them, and the installer.
    fn write_shell_files(&self, program: &Path) -> Result<(), String> {
        // Help names the program as it was called, and the file of a release has its target in its name.
        let named = self.directory.join("train_low_mem");
        fs::copy(program, &named).map_err(|error| format!("{}: {error}", program.display()))?;
        let written = self.write_said(&named);
        fs::remove_file(&named).map_err(|error| format!("{}: {error}", named.display()))?;
        written
    }

    fn write_said(&self, program: &Path) -> Result<(), String> {
        let said = |arguments: &[&str]| output(Command::new(program).args(arguments));
        let write = |name: &str, text: String| {
            let path = self.directory.join(name);
            fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
        };
        for (shell, name) in COMPLETIONS {
            write(name, said(&["completions", shell])?)?;
        }
        let help = said(&["--help"])?;
        let commands = man::commands(&help).into_iter().map(|name| Ok((name.to_owned(), said(&[name, "--help"])?)));
        let commands = commands.collect::<Result<Vec<_>, String>>()?;
        write("train_low_mem.1", man::page(said(&["--version"])?.trim(), &help, &commands))?;
        let installer = self.root.join("packaging").join(INSTALLER);
        fs::copy(&installer, self.directory.join(INSTALLER))
            .map_err(|error| format!("{}: {error}", installer.display()))?;
        Ok(())
    }

    /// Installs this machine's program with the installer, and runs it.
    fn install(&self, program: &Path) -> Result<(), String> {
        let home = self.directory.join("home");
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home).map_err(|error| format!("{}: {error}", home.display()))?;
        let mut installer = Command::new("sh");
        installer.arg(self.directory.join(INSTALLER)).arg("--from").arg(&self.directory).env("HOME", &home);
        done(installer.env_remove("XDG_DATA_HOME").env_remove("XDG_CONFIG_HOME"))?;
        let said = output(Command::new(home.join(".local/bin/train_low_mem")).arg("--version"))?;
        if said != output(Command::new(program).arg("--version"))? {
            return Err(format!("the installed program says `{}`", said.trim()));
        }
        println!("{INSTALLER}: installs the program, which runs");
        Ok(())
    }

    /// Writes the digests of all files of the release, as `sha256sum --check` reads them.
    fn write_sums(&self) -> Result<(), String> {
        let mut files = Vec::new();
        for directory in [self.directory.clone(), self.directory.join("wheels")] {
            let entries = fs::read_dir(&directory).into_iter().flatten().filter_map(Result::ok);
            files.extend(entries.map(|entry| entry.path()).filter(|path| path.is_file() && !path.ends_with(SUMS)));
        }
        files.sort();
        let mut sums = String::new();
        for path in files {
            let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            sums += &format!("{digest}  {}\n", path.strip_prefix(&self.directory).unwrap_or(&path).display());
        }
        fs::write(self.directory.join(SUMS), sums).map_err(|error| format!("{SUMS}: {error}"))
    }

    /// Builds the image, if an engine works.
    fn image(&self, program: &Path, notices: &Path) -> Result<(), String> {
        let context = self.directory.join("image");
        let _ = fs::remove_dir_all(&context);
        fs::create_dir_all(&context).map_err(|error| error.to_string())?;
        fs::copy(program, context.join("train_low_mem")).map_err(|error| error.to_string())?;
        fs::copy(notices, context.join(NOTICES)).map_err(|error| error.to_string())?;
        let dockerfile = self.root.join("packaging/Dockerfile");
        if let Some(engine) =
            ["docker", "podman"].into_iter().find(|engine| output(Command::new(engine).arg("info")).is_ok())
        {
            done(Command::new(engine).args(["build", "--tag", IMAGE, "--file"]).arg(&dockerfile).arg(&context))?;
            done(Command::new(engine).args(["run", "--rm", IMAGE, "--version"]))?;
        } else if output(Command::new("buildah").arg("--version")).is_ok() {
            self.image_without_a_daemon(&dockerfile, &context)?;
        } else {
            println!(
                "skipped: the image: no container engine works here: `apt-get install buildah` adds one that needs no daemon"
            );
            return Ok(());
        }
        println!("image: {IMAGE}, from scratch, runs");
        Ok(())
    }

    /// Root can do this inside a container too: plain folders as layers, and chroot as isolation.
    fn image_without_a_daemon(&self, dockerfile: &Path, context: &Path) -> Result<(), String> {
        let layers = self.directory.join("layers");
        let buildah = || {
            let mut command = Command::new("buildah");
            command.env("BUILDAH_ISOLATION", "chroot").env("STORAGE_DRIVER", "vfs");
            command.arg("--root").arg(layers.join("kept")).arg("--runroot").arg(layers.join("run"));
            command
        };
        done(buildah().args(["build", "--tag", IMAGE, "--file"]).arg(dockerfile).arg(context))?;
        let container = output(buildah().args(["from", IMAGE]))?;
        let run = done(buildah().args(["run", container.trim(), "--", "/train_low_mem", "--version"]));
        output(buildah().args(["rm", container.trim()]))?;
        run
    }
}

/// The version that a program says.
fn version(program: &Path) -> Result<String, String> {
    let said = output(Command::new(program).arg("--version"))?;
    Ok(said.trim().rsplit(' ').next().unwrap_or_default().to_owned())
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_release_has_files_for_shells_and_installs_itself() {
        let directory = std::env::temp_dir().join(format!("train-low-mem-release-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
        let release = Release { root, target: directory.clone(), directory: directory.clone(), linker: None };
        let program = directory.join(format!("train_low_mem-{}-unknown-linux-musl", std::env::consts::ARCH));
        let says = "#!/bin/sh\ncase $1$2 in\n--version) echo train_low_mem 0 ;;\n\
            --help) printf 'Trains\\n\\nUsage: %s\\n\\nCommands:\\n  plan  Plan\\n' \"${0##*/}\" ;;\n*) echo \"says $*\" ;;\nesac\n";
        fs::write(&program, says).expect("a program");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("it may run");
        release.write_shell_files(&program).expect("files for shells");
        release.write_sums().expect("digests");
        release.install(&program).expect("an installed program");
        let installed = |name: &str| fs::read_to_string(directory.join("home").join(name)).expect("a file");
        assert_eq!(installed(".local/bin/train_low_mem"), says);
        assert_eq!(installed(".local/share/zsh/site-functions/_train_low_mem"), "says completions zsh\n");
        let page = installed(".local/share/man/man1/train_low_mem.1");
        assert!(
            page.contains("Usage: train_low_mem\n")
                && page.contains(".SH train_low_mem plan\n.nf\nsays plan \\-\\-help\n"),
            "{page}"
        );
        let sums = fs::read_to_string(directory.join(SUMS)).expect("digests");
        for name in ["_train_low_mem", "install.sh", "train_low_mem.1", "train_low_mem.bash", "train_low_mem.fish"] {
            assert!(sums.contains(&format!("  {name}\n")), "{sums}");
        }
        fs::remove_dir_all(&directory).expect("it was made");
    }
}
