//! `cargo xtask kernels`: the result of compiling the kernels with NVIDIA's compiler, and bounds from a card's published
//! rates.
//!
//! Invariants: no card is needed; a kernel that spills, or has more registers than [`launches`] allows, makes the command
//! fail.

mod launches;
mod occupancy;
mod ptxas;
mod roofline;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bench::record;
use occupancy::{Block, CAPABILITIES};
use ptxas::Resources;

const USAGE: &str = "\
usage: cargo xtask kernels [--record]

Compiles crates/cuda-kernels/kernels for compute capabilities 8.0, 8.6, 8.9, 9.0 and 12.0, and prints registers, spills,
occupancy and rooflines. With --record, rooflines and the kernels with many registers are written to bench/kernels.md.";

/// The default capability of a build's PTX, as in `crates/cuda-kernels/build.rs`. A driver compiles the PTX for its card.
const PTX_CAPABILITY: &str = "80";
const SOURCES: &str = "crates/cuda-kernels/kernels";

/// The record has the kernels with at least this many registers for some capability, and the command prints all.
const RECORDED_REGISTERS: u32 = 169;

/// Kernels by source and name, for each of [`CAPABILITIES`].
type Kernels = BTreeMap<(String, String), Vec<Resources>>;

/// Compiles the kernels, prints the page, and records it if requested.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    let is_recorded = match arguments {
        [] => false,
        [only] if only == "--record" => true,
        _ => return Err(USAGE.to_owned()),
    };
    let nvcc = nvcc();
    let version = version(&output(Command::new(&nvcc).arg("--version"))?)?;
    let kernels = compiled(root, &nvcc)?;
    let excesses = excesses(&kernels);
    print!("{}", page(root, &version, &kernels, 0)?);
    if !excesses.is_empty() {
        return Err(excesses.join("\n"));
    }
    if is_recorded {
        let path = root.join("bench/kernels.md");
        let page = page(root, &version, &kernels, RECORDED_REGISTERS)?;
        fs::write(&path, page).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// The version of CUDA's toolkit here, in the form of `CUDARC_CUDA_VERSION`: 13000 for 13.0.
///
/// # Errors
/// No nvcc, which the message says.
pub fn toolkit() -> Result<String, String> {
    let version = version(&output(Command::new(nvcc()).arg("--version"))?)?;
    Ok(version.replace('.', "0") + "0")
}

/// The compiler, found in the same way as in `crates/cuda-kernels/build.rs`.
fn nvcc() -> PathBuf {
    match std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc")) {
        Some(program) if program.exists() => program,
        _ => PathBuf::from("nvcc"),
    }
}

/// Both outputs of a command.
fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| {
        let program = command.get_program().display();
        format!(
            "{program}: {error}\nhint: this takes NVIDIA's CUDA toolkit, 12.2 or later: set CUDA_HOME, or put nvcc in the PATH"
        )
    })?;
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    if output.status.success() { Ok(text) } else { Err(format!("{command:?}: {}\n{text}", output.status)) }
}

/// The version in text such as `Cuda compilation tools, release 13.0, V13.0.88`.
fn version(text: &str) -> Result<String, String> {
    let release = text.split_once("release ").and_then(|(_, rest)| rest.split_once(','));
    let (release, _) = release.ok_or_else(|| format!("nvcc --version: expected a release, got: {text}"))?;
    Ok(release.to_owned())
}

fn compiled(root: &Path, nvcc: &Path) -> Result<Kernels, String> {
    let describe = |path: &Path, error| format!("{}: {error}", path.display());
    let (sources, target) = (root.join(SOURCES), root.join("target/kernels"));
    fs::create_dir_all(&target).map_err(|error| describe(&target, error))?;
    let entries = fs::read_dir(&sources).map_err(|error| describe(&sources, error))?;
    let paths = entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "cu"));
    let mut kernels = Kernels::new();
    for path in paths {
        let source = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let (ptx, cubin) = (target.join(format!("{source}.ptx")), target.join(format!("{source}.cubin")));
        let flags = ["-ptx", "-O3", "-std=c++17", "--expt-relaxed-constexpr"];
        let arch = format!("-arch=compute_{PTX_CAPABILITY}");
        output(Command::new(nvcc).args(flags).args([&arch]).arg(&path).arg("-o").arg(&ptx))?;
        for capability in CAPABILITIES {
            let arch = format!("-arch=sm_{}", capability.number);
            let flags = ["-cubin", "-O3", "-Xptxas", "-v", &arch];
            let report = output(Command::new(nvcc).args(flags).arg(&ptx).arg("-o").arg(&cubin))?;
            for kernel in ptxas::kernels(&report)? {
                kernels.entry((source.clone(), kernel.name.clone())).or_default().push(kernel);
            }
        }
    }
    Ok(kernels)
}

/// A line for each kernel that exceeds a limit.
fn excesses(kernels: &Kernels) -> Vec<String> {
    let mut lines = Vec::new();
    for ((source, name), compiled) in kernels {
        for (kernel, capability) in compiled.iter().zip(CAPABILITIES) {
            let at = format!("{SOURCES}/{source}.cu: {name} for {}", capability.name);
            if kernel.spill_stores + kernel.spill_loads > 0 {
                let Resources { spill_stores, spill_loads, .. } = kernel;
                lines.push(format!("{at} spills: {spill_stores} bytes stored, {spill_loads} loaded, expected none"));
            }
            let most = launches::most_registers_at(name, capability.number);
            if kernel.registers > most {
                lines.push(format!("{at} takes {} registers, expected at most {most}", kernel.registers));
            }
        }
    }
    lines
}

/// The page, with the kernels that have at least `least` registers.
fn page(root: &Path, version: &str, kernels: &Kernels, least: u32) -> Result<String, String> {
    let (commit, date) = (record::commit(root), record::today());
    let mut page = format!(
        "# Kernels for NVIDIA GPUs: registers, occupancy, rooflines

- command: `cargo xtask kernels --record`.
- commit: {commit}.
- date: {date}.
- toolkit: nvcc {version}.
- machine: any; **nothing here was measured on a GPU**.

nvcc compiled the sources to PTX for compute capability 8.0, as a build does by default. ptxas compiled this PTX for each capability below.
A driver has a compiler of its own, which may choose other registers. A kernel that spills makes the command fail, and so does one with
more registers than `xtask/src/kernels/launches.rs` allows. The tables have the kernels with {least} registers or more, and `cargo xtask kernels` prints all.
"
    );
    let kernels = with_registers(kernels, least);
    page += &registers(&kernels);
    page += &residency(&kernels)?;
    page += &rooflines();
    Ok(page)
}

/// The kernels with at least `least` registers for some capability, and all of candle's.
fn with_registers(kernels: &Kernels, least: u32) -> Kernels {
    let is_kept = |source: &str, compiled: &[Resources]| {
        launches::CANDLES.contains(&source) || worst(compiled, |kernel| kernel.registers) >= least
    };
    let kept = kernels.iter().filter(|((source, _), compiled)| is_kept(source, compiled));
    kept.map(|(key, compiled)| (key.clone(), compiled.clone())).collect()
}

/// The largest value over all capabilities.
fn worst(kernels: &[Resources], of: impl Fn(&Resources) -> u32) -> u32 {
    kernels.iter().map(of).max().unwrap_or(0)
}

/// Cells of a row.
fn cells(values: impl IntoIterator<Item = u32>) -> String {
    values.into_iter().map(|value| format!(" {value} |")).collect()
}

/// One column for each capability, with the name of its values.
fn columns(of: &str) -> String {
    CAPABILITIES.iter().map(|capability| format!(" {of}{} |", capability.name)).collect()
}

fn memory(kernels: &[Resources]) -> String {
    let of: [fn(&Resources) -> u32; 4] = [|k| k.spill_stores, |k| k.spill_loads, |k| k.stack, |k| k.shared];
    cells(of.map(|of| worst(kernels, of)))
}

fn registers(kernels: &Kernels) -> String {
    const REST: &str = "spill stores | spill loads | stack | static shared memory";
    let mut page = format!(
        "\n## Registers\n\nRegisters of a thread for each compute capability.\n\n| kernel |{} most allowed |\n| --- |{} --- |\n",
        columns(""),
        " --- |".repeat(CAPABILITIES.len())
    );
    let mut sources: BTreeMap<&str, Vec<&Vec<Resources>>> = BTreeMap::new();
    for ((source, name), compiled) in kernels {
        if launches::CANDLES.contains(&source.as_str()) {
            sources.entry(source).or_default().push(compiled);
            continue;
        }
        let registers = compiled.iter().map(|kernel| kernel.registers).chain([launches::most_registers(name)]);
        _ = writeln!(page, "| `{name}` |{}", cells(registers));
    }
    let more = launches::MORE_REGISTERS.map(|(name, most)| format!("`{name}` {most}")).join(", ");
    _ = writeln!(page, "\nOn 12.0 some kernels may have more registers: {more}.");
    page += "\nThe kernels with candle's names, one row for each source file. Each number is for the worst kernel of the file; memory is in bytes.\n\n";
    _ = writeln!(page, "| source | kernels |{} {REST} |", columns(""));
    _ = writeln!(page, "| --- | --- |{} --- | --- | --- | --- |", " --- |".repeat(CAPABILITIES.len()));
    for (source, compiled) in sources {
        let of_capability = |i: usize| compiled.iter().map(|kernel| kernel[i].registers).max().unwrap_or(0);
        let registers = cells((0..CAPABILITIES.len()).map(of_capability));
        let all: Vec<Resources> = compiled.iter().flat_map(|kernels| kernels.iter().cloned()).collect();
        _ = writeln!(page, "| {source} | {} |{registers}{}", compiled.len(), memory(&all));
    }
    page
}

fn residency(kernels: &Kernels) -> Result<String, String> {
    let most: Vec<String> = CAPABILITIES.iter().map(|c| format!("{} on {}", c.warps, c.name)).collect();
    let mut page = format!(
        "\n## Occupancy\n\nResident warps of a multiprocessor for each compute capability. The limits are {}.\n\
         Widths are t5-base's. Attention kernels whose names end in a head size use tensor cores; in bf16 the others compute other head sizes.\n\n\
         | kernel | head size | threads | dynamic shared memory |{}\n| --- | --- | --- | --- |{}\n",
        most.join(", "),
        columns(""),
        " --- |".repeat(CAPABILITIES.len())
    );
    for ((source, name), compiled) in kernels {
        if launches::CANDLES.contains(&source.as_str()) {
            continue;
        }
        let launches = launches::find(name);
        if launches.is_empty() {
            return Err(format!(
                "{SOURCES}/{source}.cu: {name} has no launch in xtask/src/kernels/launches.rs: add one"
            ));
        }
        for launch in launches {
            let warps = compiled.iter().zip(CAPABILITIES).map(|(kernel, capability)| {
                let shared = launch.shared + kernel.shared;
                capability.resident_warps(Block { threads: launch.threads, registers: kernel.registers, shared })
            });
            let head_size = launch.head_size.map(|size| format!("{size} ")).unwrap_or_default();
            let numbers = cells([launch.threads, launch.shared].into_iter().chain(warps));
            _ = writeln!(page, "| `{name}` | {head_size}|{numbers}");
        }
    }
    Ok(page)
}

fn rooflines() -> String {
    let mut page = "\n## Rooflines\n\n**These are bounds, not times of a GPU.** One call for t5-base in bf16 with 16,384 tokens, 32 samples of 512. Attention\n\
        is the encoder's, and updates cover all 222.9 million parameters. Bytes count once, however often they are read. Rates are\n\
        NVIDIA's for the H100 SXM: 3.35 TB/s, 989 TFLOP/s in bf16 on tensor cores (attention), 67 TFLOP/s in f32 (the rest). A kernel cannot be\n\
        faster than its bound. Only a GPU shows how much slower it is: bench/card.md has an H200's times.\n\n\
        | kernel | read, MB | written, MB | GFLOP | bound by memory, us | bound by arithmetic, us | bound, us |\n\
        | --- | --- | --- | --- | --- | --- | --- |\n"
        .to_owned();
    for work in roofline::works() {
        let [of_bytes, of_operations] = work.microseconds();
        let [read, written, operations] =
            [(work.read, 1e6), (work.written, 1e6), (work.operations, 1e9)].map(|(n, unit)| n as f64 / unit);
        _ = writeln!(
            page,
            "| {} | {read:.1} | {written:.1} | {operations:.2} | {of_bytes:.1} | {of_operations:.1} | {:.1} |",
            work.name,
            of_bytes.max(of_operations)
        );
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiled(name: &str, registers: u32, spill_stores: u32) -> Kernels {
        let kernel = Resources { name: name.to_owned(), registers, spill_stores, ..Resources::default() };
        Kernels::from([(("attention_forward".to_owned(), name.to_owned()), vec![kernel; CAPABILITIES.len()])])
    }

    #[test]
    fn spills_and_too_many_registers_are_named() {
        assert!(excesses(&compiled("attention_forward_64", 168, 0)).is_empty());
        let lines = excesses(&compiled("attention_forward_64", 176, 8));
        assert_eq!(lines.len(), 10);
        let start = "crates/cuda-kernels/kernels/attention_forward.cu: attention_forward_64 for 8.0";
        assert_eq!(lines[0], format!("{start} spills: 8 bytes stored, 0 loaded, expected none"));
        assert_eq!(lines[1], format!("{start} takes 176 registers, expected at most 168"));
    }

    #[test]
    fn a_record_has_the_kernels_with_many_registers() {
        let kernels = compiled("attention_forward_64", 141, 0);
        assert_eq!(with_registers(&kernels, 141).len(), 1);
        assert_eq!(with_registers(&kernels, 142).len(), 0);
    }

    #[test]
    fn a_kernel_without_a_launch_is_an_error() {
        assert!(residency(&compiled("unknown", 32, 0)).unwrap_err().contains("unknown has no launch"));
        let page = residency(&compiled("attention_forward_64", 141, 0)).unwrap();
        assert!(page.ends_with("| `attention_forward_64` | 64 | 128 | 41984 | 12 | 8 | 8 | 12 | 8 |\n"), "{page}");
    }

    #[test]
    fn the_version_is_that_of_the_release() {
        let text = "Cuda compilation tools, release 13.0, V13.0.88\n";
        assert_eq!(version(text), Ok("13.0".to_owned()));
        assert!(version("gcc 14").is_err());
    }
}
