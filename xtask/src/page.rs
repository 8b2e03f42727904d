//! `cargo xtask page`: builds the planner for browsers as WebAssembly, and puts it and its page into one file.
//!
//! Invariants: the file makes no network requests; it is smaller than [`MAX_BYTES`]; the same sources, compiler and flags
//! give the same bytes in any directory.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;

/// The generated file's name.
pub const PAGE: &str = "will-it-fit.html";
/// Its sources, below the workspace.
const PARTS: &str = "crates/will-it-fit/page";
/// The target of the planner.
pub const TARGET: &str = "wasm32-unknown-unknown";
/// A larger page is slow to open on a phone.
const MAX_BYTES: usize = 1 << 20;
/// The mark that the planner replaces.
const PLANNER: &str = "{{wasm}}";

/// Builds the page below `target`.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    if !arguments.is_empty() {
        return Err("usage: cargo xtask page".to_string());
    }
    if !has_target()? {
        return Err(format!("the target {TARGET} is not installed\nhint: rustup target add {TARGET}"));
    }
    let path = write(root, &root.join("target/page"))?;
    println!("`node scripts/check_page.mjs` compares the answers of {} with those of the command", path.display());
    Ok(())
}

/// Builds the page into a directory. The toolchain has [`TARGET`].
pub fn write(root: &Path, directory: &Path) -> Result<PathBuf, String> {
    let around = around(root)?;
    let planner = packed(&compiled(root)?)?;
    let page = around.replace(PLANNER, &planner);
    if page.len() > MAX_BYTES {
        return Err(format!("{PAGE}: expected at most {MAX_BYTES} bytes, got {}", page.len()));
    }
    let path = directory.join(PAGE);
    std::fs::write(&path, &page).map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{PAGE}: {} KiB, the planner {} KiB of it", page.len() >> 10, planner.len() >> 10);
    Ok(path)
}

/// The page without the planner.
fn around(root: &Path) -> Result<String, String> {
    let read = |name: &str| {
        let path = root.join(PARTS).join(name);
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
    };
    let mut page = read("page.html")?;
    for part in ["style.css", "worker.js", "script.js"] {
        page = page.replace(&format!("{{{{{part}}}}}"), read(part)?.trim_end());
    }
    Ok(page)
}

/// The planner as WebAssembly.
fn compiled(root: &Path) -> Result<Vec<u8>, String> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("HOME")?;
        Some(Path::new(&home).join(".cargo"))
    });
    // Panics name source files, whose paths differ on every machine.
    let mut flags = format!("--cfg getrandom_backend=\"wasm_js\" --remap-path-prefix={}=.", root.display());
    if let Some(home) = home {
        flags += &format!(" --remap-path-prefix={}=cargo", home.display());
        // If several prefixes match, the last counts: the page does not depend on the registry of the crates.
        for registry in std::fs::read_dir(home.join("registry/src")).into_iter().flatten().flatten() {
            flags += &format!(" --remap-path-prefix={}=crates", registry.path().display());
        }
    }
    let target = root.join("target/page");
    let status = Command::new("cargo")
        .current_dir(root)
        .env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS", flags)
        .args(["rustc", "--locked", "--profile", "page", "--target", TARGET, "-p", "will-it-fit", "--lib"])
        .args(["--crate-type", "cdylib", "--target-dir"])
        .arg(&target)
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    if !status.success() {
        return Err(format!("the planner was not built: {status}"));
    }
    let path = target.join(TARGET).join("page/will_it_fit.wasm");
    std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Whether the toolchain has [`TARGET`].
pub fn has_target() -> Result<bool, String> {
    let printed = Command::new("rustc").args(["--print", "target-libdir", "--target", TARGET]).output();
    let printed = printed.map_err(|error| format!("rustc: {error}"))?;
    let directory = String::from_utf8_lossy(&printed.stdout);
    Ok(printed.status.success() && Path::new(directory.trim()).is_dir())
}

/// Bytes as text: compressed, and encoded in characters that HTML leaves unchanged.
fn packed(bytes: &[u8]) -> Result<String, String> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let zipped = encoder.write_all(bytes).and_then(|()| encoder.finish());
    Ok(STANDARD.encode(zipped.map_err(|error| error.to_string())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_all_of_its_parts_and_nothing_from_elsewhere() {
        let around = around(crate::root()).expect("the parts of the page");
        let (before, after) = around.split_once(PLANNER).expect("a place for the planner");
        let parts = [before, after].concat();
        assert!(!parts.contains("{{") && !parts.contains("://"), "a part is missing, or comes from elsewhere");
        assert!(parts.contains("<style>") && parts.contains("WebAssembly"), "a part is empty");
    }

    #[test]
    fn the_planner_is_text_that_unpacks_to_its_bytes() {
        let bytes: Vec<u8> = (0..=255).cycle().take(5000).collect();
        let zipped = STANDARD.decode(packed(&bytes).unwrap()).unwrap();
        let mut unpacked = Vec::new();
        std::io::copy(&mut flate2::read::GzDecoder::new(&zipped[..]), &mut unpacked).unwrap();
        assert_eq!(unpacked, bytes);
    }
}
