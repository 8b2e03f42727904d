//! Compiles the kernels: for the host over the emulation, or, with the feature `ptx`, by nvcc. With that feature and
//! `LOW_MEM_T5_CUDA=emulated` the driver is emulated, too: a shared library, so that the whole program runs on a card that does not exist.
//!
//! The emulation compiles the kernels' C++. With `LOW_MEM_T5_KERNELS=ptx` it takes the PTX that nvcc makes of it instead, and
//! with `contracted-ptx` also makes one operation of each product and sum that a driver may.

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use ptx_on_host::Contraction;

/// The sources. Each becomes one module of PTX.
const SOURCES: [&str; 14] = [
    "attention",
    "attention_backward",
    "attention_forward",
    "cross_entropy",
    "decoding",
    "dequantise",
    "dropout",
    "elementwise",
    "indexing",
    "norm",
    "optimizer",
    "reduce",
    "rows",
    "small_m",
];
/// The libraries that cudarc names to the linker.
const LIBRARIES: [&str; 7] = ["cublas", "cublasLt", "cuda", "cudart", "curand", "nccl", "nvrtc"];
/// The least compute capability that the kernels are compiled for, unless another one is named: Ampere's, the first with bf16.
const CAPABILITY: &str = "80";
/// Sources with instructions that Ampere introduced. They are for bf16 alone, so an older card never loads them.
const OF_AMPERE: [&str; 2] = ["attention_backward", "attention_forward"];
/// The additional source for kernels from PTX.
const OF_PTX: &str = "emulation/ptx_checks.cc";

fn main() -> Result<(), Box<dyn Error>> {
    for folder in ["kernels", "emulation"] {
        println!("cargo::rerun-if-changed={folder}");
    }
    for variable in ["LOW_MEM_T5_CUDA", "LOW_MEM_T5_KERNELS", "CUDA_COMPUTE_CAP", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    println!("cargo::rustc-check-cfg=cfg(emulated_card)");
    if env::var_os("CARGO_FEATURE_PTX").is_none() {
        return emulation(&["by_name.cc", "execution.cc"]);
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    empty_libraries(&out)?;
    if env::var("LOW_MEM_T5_CUDA").is_ok_and(|value| value == "emulated") {
        emulated_card(&out)
    } else {
        println!("cargo::rustc-env=CUDA_OF_PTX={}", version_of_nvcc()?);
        compile_to_ptx(&out)
    }
}

/// Builds a static library of every kernel for the host, and of these sources that run the kernels.
fn emulation(sources: &[&str]) -> Result<(), Box<dyn Error>> {
    let mut build = of_emulation(sources)?;
    // Nothing refers to the functions that register a kernel.
    build.link_lib_modifier("+whole-archive");
    build.try_compile("cuda_emulation")?;
    Ok(())
}

/// Compiles every kernel for the host, and these sources that run the kernels.
fn of_emulation(sources: &[&str]) -> Result<cc::Build, Box<dyn Error>> {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).include("emulation").include("kernels");
    // A card's arithmetic follows the source. Unused variables belong to other instances of a template.
    build.flag_if_supported("-ffp-contract=off").warnings(false);
    build.files(sources.iter().map(|source| Path::new("emulation").join(source)));
    match env::var("LOW_MEM_T5_KERNELS").as_deref() {
        Ok("ptx") => build.file(OF_PTX).files(from_ptx(Contraction::Nowhere)?),
        Ok("contracted-ptx") => build.file(OF_PTX).files(from_ptx(Contraction::Everywhere)?),
        Ok(other) => {
            return Err(format!("LOW_MEM_T5_KERNELS: expected \"ptx\" or \"contracted-ptx\", got \"{other}\"").into());
        }
        Err(_) => build.file("emulation/kernels.cc"),
    };
    Ok(build)
}

/// Translates the PTX of each source to C++.
fn from_ptx(contraction: Contraction) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let folder = PathBuf::from(env::var("OUT_DIR")?).join("from-ptx");
    std::fs::create_dir_all(&folder)?;
    compile_to_ptx(&folder)?;
    let translate = |source| {
        let path = folder.join(format!("{source}.ptx"));
        let cpp = ptx_on_host::translate(&std::fs::read_to_string(&path)?, source, "ptx.h", contraction)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        std::fs::write(path.with_extension("cc"), cpp)?;
        Ok(path.with_extension("cc"))
    };
    SOURCES.into_iter().map(translate).collect()
}

/// Builds a shared library with a driver, cuBLAS and NCCL, which the program opens as it opens NVIDIA's: all that a program for a card needs
/// on a machine without a card and without the toolkit. A module is only the name of its source.
fn emulated_card(out: &Path) -> Result<(), Box<dyn Error>> {
    println!("cargo::rustc-cfg=emulated_card");
    println!("cargo::rustc-env=CUDA_OF_PTX=0");
    for source in SOURCES {
        std::fs::write(out.join(format!("{source}.ptx")), format!("// emulated: {source}\n"))?;
    }
    let sources =
        ["blas.cc", "driver.cc", "execution.cc", "graphs.cc", "launches.cc", "memory.cc", "nccl.cc", "trace.cc"];
    let mut build = of_emulation(&sources)?;
    let objects = build.pic(true).flag("-ftls-model=initial-exec").cargo_metadata(false).try_compile_intermediates()?;
    let library = out.join("libemulated_card.so");
    // The program has functions of the same names, which the library must not take for its own.
    let mut link = build.try_get_compiler()?.to_command();
    let status = link.args(["-shared", "-Wl,-Bsymbolic", "-pthread"]).args(objects).arg("-o").arg(&library).status()?;
    if !status.success() {
        return Err(format!("{link:?}: {status}").into());
    }
    println!("cargo::rustc-env=EMULATED_CARD={}", library.display());
    Ok(())
}

/// Gives the linker an empty library for each that cudarc names: the program opens them itself (`src/libraries.rs`). They are shared, since
/// some linkers take no archive in the place of one, and are not needed by the program, since it uses nothing of them.
fn empty_libraries(out: &Path) -> Result<(), Box<dyn Error>> {
    let (source, empty) = (out.join("empty.c"), out.join("empty.so"));
    std::fs::write(&source, "")?;
    let mut compile = cc::Build::new().try_get_compiler()?.to_command();
    let status = compile.args(["-shared", "-fPIC"]).arg(&source).arg("-o").arg(&empty).status()?;
    if !status.success() {
        return Err(format!("{compile:?}: {status}").into());
    }
    for library in LIBRARIES {
        std::fs::copy(&empty, out.join(format!("lib{library}.so")))?;
    }
    println!("cargo::rustc-link-search=native={}", out.display());
    Ok(())
}

/// Compiles each source to `SOURCE.ptx`.
fn compile_to_ptx(folder: &Path) -> Result<(), Box<dyn Error>> {
    let wanted = env::var("CUDA_COMPUTE_CAP").unwrap_or_else(|_| CAPABILITY.to_owned());
    let number = |capability: &str| capability.parse::<u32>().unwrap_or(u32::MAX);
    for source in SOURCES {
        let is_too_old = OF_AMPERE.contains(&source) && number(&wanted) < number(CAPABILITY);
        let capability = if is_too_old { CAPABILITY } else { &wanted };
        nvcc(capability, &Path::new("kernels").join(format!("{source}.cu")), &folder.join(format!("{source}.ptx")))?;
    }
    Ok(())
}

/// The compiler of `CUDA_HOME`, or else of the `PATH`.
fn compiler() -> PathBuf {
    match env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc")) {
        Some(program) if program.exists() => program,
        _ => PathBuf::from("nvcc"),
    }
}

/// Returns the compiler's version in the form of `cuDriverGetVersion`: 12080 for 12.8. An older driver refuses its PTX.
fn version_of_nvcc() -> Result<u32, Box<dyn Error>> {
    let program = compiler();
    let said = Command::new(&program).arg("--version").output().map_err(|error| not_started(&program, &error))?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let numbers = said.split_once("release ").and_then(|(_, rest)| rest.split_once(',')?.0.split_once('.'));
    let (major, minor) =
        numbers.ok_or_else(|| format!("{} --version: expected `release M.N,`, got {said:?}", program.display()))?;
    Ok(major.parse::<u32>()? * 1000 + minor.parse::<u32>()? * 10)
}

fn not_started(program: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}; the feature `cuda` takes NVIDIA's CUDA toolkit, 12.2 or later", program.display())
}

fn nvcc(capability: &str, source: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    let program = compiler();
    let status = Command::new(&program)
        .args(["-ptx", "-O3", "-std=c++17", "--expt-relaxed-constexpr", &format!("-arch=compute_{capability}")])
        .arg(source)
        .arg("-o")
        .arg(to)
        .status()
        .map_err(|error| not_started(&program, &error))?;
    if !status.success() {
        return Err(format!("{} could not compile {}", program.display(), source.display()).into());
    }
    Ok(())
}
