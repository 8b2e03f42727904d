//! A wheel: the program and the Python package in one file that `pip install` puts in place.
//!
//! The program is the one that was built and tried, byte for byte. The wheel's name says where it runs, as its header says: a static
//! program on any Linux, another one from the C library on whose newest function it calls. Sources: PEP 427 (wheels), PEP 600 and 656
//! (names of platforms), APPNOTE.TXT of PKWARE (ZIP).

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use flate2::write::DeflateEncoder;
use flate2::{Compression, Crc};
use sha2::{Digest, Sha256};

use super::elf;

/// The most bytes of a wheel.
const MAX_BYTES: u64 = 40_000_000;

/// The Python package, below `python`.
const PACKAGE: &str = "low_mem_t5";

/// cuBLAS as a wheel, for drivers of CUDA 12 and later: what the extra `cuda` adds to a program with support for cards.
const CUBLAS: &str = "nvidia-cublas-cu12";

/// The newest version of the C library that a wheel may need: that of `manylinux_2_28`.
const NEWEST_GLIBC: (u64, u64) = (2, 28);

/// The date of every file: the first that ZIP knows. So the same files give the same wheel.
const DATE: [u8; 4] = [0, 0, 0x21, 0];

/// Writes a wheel into this directory. `version` is the program's own.
///
/// A program that needs a newer C library than 2.28 is refused, unless `for_this_machine` says that the wheel goes nowhere else.
pub fn write(
    root: &Path,
    program: &Path,
    notices: &Path,
    version: &str,
    directory: &Path,
    for_this_machine: bool,
) -> Result<PathBuf, String> {
    let named = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let read = |path: &Path| fs::read(path).map_err(|error| named(path, error));
    let bytes = read(program)?;
    let tags = tags(&bytes, for_this_machine).map_err(|why| format!("{}: {why}", program.display()))?;
    let information = format!("{PACKAGE}-{version}.dist-info");
    let mut archive = Archive::default();
    let package = root.join("python").join(PACKAGE);
    let mut sources: Vec<PathBuf> = fs::read_dir(&package)
        .map_err(|error| named(&package, error))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.is_file())
        .collect();
    sources.sort();
    for path in &sources {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.add(&format!("{PACKAGE}/{name}"), &read(path)?, false)?;
    }
    archive.add(&format!("{PACKAGE}-{version}.data/scripts/train_low_mem"), &bytes, true)?;
    let licences = ["LICENSE-APACHE", "LICENSE-MIT"].map(|name| root.join(name));
    let licences: Vec<PathBuf> = licences.into_iter().chain([notices.to_path_buf()]).collect();
    let mut metadata = format!(
        "Metadata-Version: 2.4\nName: low-mem-t5\nVersion: {version}\nSummary: Train T5 in the memory you have\n\
         License-Expression: MIT OR Apache-2.0\nRequires-Python: >=3.8\nClassifier: Typing :: Typed\n"
    );
    if opens_libraries(&bytes) {
        metadata += &format!("Provides-Extra: cuda\nRequires-Dist: {CUBLAS}; extra == \"cuda\"\n");
    }
    for path in &licences {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        metadata += &format!("License-File: {name}\n");
        archive.add(&format!("{information}/licenses/{name}"), &read(path)?, false)?;
    }
    archive.add(&format!("{information}/METADATA"), metadata.as_bytes(), false)?;
    let mut wheel = "Wheel-Version: 1.0\nGenerator: train_low_mem\nRoot-Is-Purelib: false\n".to_owned();
    tags.iter().for_each(|tag| wheel += &format!("Tag: py3-none-{tag}\n"));
    archive.add(&format!("{information}/WHEEL"), wheel.as_bytes(), false)?;
    let record = format!("{}{information}/RECORD,,\n", archive.record);
    archive.add(&format!("{information}/RECORD"), record.as_bytes(), false)?;
    let whole = archive.end();
    if whole.len() as u64 > MAX_BYTES {
        return Err(format!("the wheel: expected at most {MAX_BYTES} bytes, got {}", whole.len()));
    }
    let path = directory.join(format!("{PACKAGE}-{version}-py3-none-{}.whl", tags.join(".")));
    fs::create_dir_all(directory).map_err(|error| named(directory, error))?;
    fs::write(&path, whole).map_err(|error| named(&path, error))?;
    Ok(path)
}

/// Whether a program knows cards: it then has the name of the library that it opens.
fn opens_libraries(program: &[u8]) -> bool {
    let name = b"libcublas.so";
    program.windows(name.len()).any(|window| window == name)
}

/// The platforms on which a program runs, as wheels name them.
fn tags(program: &[u8], for_this_machine: bool) -> Result<Vec<String>, String> {
    let processor = elf::processor(program)?;
    if !elf::interpreter(program)? {
        // A static program needs no C library, and both kinds of systems have programs: the oldest names of both.
        return Ok(vec![format!("manylinux_2_17_{processor}"), format!("musllinux_1_1_{processor}")]);
    }
    let (major, minor) = elf::newest_glibc(program)?.ok_or("expected a static program, or one that needs glibc")?;
    if (major, minor) > NEWEST_GLIBC && !for_this_machine {
        let (at_most, of) = NEWEST_GLIBC;
        return Err(format!(
            "expected a program that needs at most glibc {at_most}.{of}, got one that needs {major}.{minor}\n\
             hint: build the static program (`cargo xtask release`), or use `cargo zigbuild --target {processor}-unknown-linux-gnu.{at_most}.{of}`"
        ));
    }
    Ok(vec![format!("manylinux_{major}_{minor}_{processor}")])
}

/// A ZIP archive as it grows.
#[derive(Default)]
struct Archive {
    files: Vec<u8>,
    directory: Vec<u8>,
    count: u16,
    /// The lines of the wheel's RECORD.
    record: String,
}

impl Archive {
    fn add(&mut self, name: &str, bytes: &[u8], may_run: bool) -> Result<(), String> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
        let packed = encoder.write_all(bytes).and_then(|()| encoder.finish()).map_err(|error| error.to_string())?;
        let mut crc = Crc::new();
        crc.update(bytes);
        let size = |length: usize| u32::try_from(length).map_err(|_| format!("{name}: larger than 4 GiB"));
        let name_length = u16::try_from(name.len()).map_err(|_| format!("{name}: a name of more than 64 KiB"))?;
        let start = size(self.files.len())?;
        // From "version needed" to the lengths of names, which both headers have alike: deflate, and names in UTF-8.
        let mut shared = vec![20, 0, 0, 8, 8, 0];
        shared.extend(DATE);
        for number in [crc.sum(), size(packed.len())?, size(bytes.len())?] {
            shared.extend(number.to_le_bytes());
        }
        shared.extend(name_length.to_le_bytes());
        shared.extend([0, 0]);
        self.files.extend([b"PK\x03\x04", shared.as_slice(), name.as_bytes(), &packed].concat());
        // Made on Unix: a regular file and its permissions.
        let mode: u32 = if may_run { 0o100_755 } else { 0o100_644 };
        self.directory.extend([b"PK\x01\x02", [20, 3].as_slice(), &shared, &[0; 6]].concat());
        self.directory.extend((mode << 16).to_le_bytes());
        self.directory.extend(start.to_le_bytes());
        self.directory.extend(name.as_bytes());
        self.count += 1;
        self.record += &format!("{name},sha256={},{}\n", URL_SAFE_NO_PAD.encode(Sha256::digest(bytes)), bytes.len());
        Ok(())
    }

    fn end(self) -> Vec<u8> {
        let [start, length] = [self.files.len(), self.directory.len()].map(|length| length as u32);
        let mut end = b"PK\x05\x06\0\0\0\0".to_vec();
        end.extend([self.count.to_le_bytes(), self.count.to_le_bytes()].concat());
        end.extend([length.to_le_bytes(), start.to_le_bytes()].concat());
        end.extend([0, 0]);
        [self.files, self.directory, end].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::super::elf::tests::program;
    use super::*;

    #[test]
    fn the_name_of_a_wheel_says_where_its_program_runs_and_a_new_c_library_is_refused() {
        let of = |file: &[u8], for_this_machine| tags(file, for_this_machine).map(|tags| tags.join("."));
        assert_eq!(of(&program(None), false).unwrap(), "manylinux_2_17_x86_64.musllinux_1_1_x86_64");
        assert_eq!(of(&program(Some(&["GLIBC_2.28", "GLIBC_2.2.5"])), false).unwrap(), "manylinux_2_28_x86_64");
        let new = program(Some(&["GLIBC_2.9", "GLIBC_2.34"]));
        let refused = of(&new, false).unwrap_err();
        assert!(refused.contains("at most glibc 2.28") && refused.contains("needs 2.34"), "{refused}");
        assert_eq!(of(&new, true).unwrap(), "manylinux_2_34_x86_64");
        assert!(of(b"#!/bin/sh", false).is_err());
    }

    #[test]
    fn a_wheel_has_the_program_the_package_and_a_record_of_both_and_is_the_same_each_time() {
        let directory = std::env::temp_dir().join(format!("train-low-mem-wheel-{}", std::process::id()));
        let root = crate::root();
        fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("program");
        fs::write(&path, program(None)).expect("a program");
        let notices = directory.join("THIRD-PARTY-NOTICES-a.txt");
        fs::write(&notices, "of others").expect("notices");
        let make =
            || fs::read(write(root, &path, &notices, "0.2.0", &directory, false).expect("a wheel")).expect("a file");
        let wheel = make();
        assert_eq!(wheel, make());
        assert!(directory.join("low_mem_t5-0.2.0-py3-none-manylinux_2_17_x86_64.musllinux_1_1_x86_64.whl").exists());
        let has = |words: &str| wheel.windows(words.len()).any(|window| window == words.as_bytes());
        for name in [
            "low_mem_t5/__init__.py",
            "low_mem_t5/py.typed",
            "low_mem_t5-0.2.0.data/scripts/train_low_mem",
            "low_mem_t5-0.2.0.dist-info/licenses/LICENSE-MIT",
            "low_mem_t5-0.2.0.dist-info/licenses/THIRD-PARTY-NOTICES-a.txt",
            "low_mem_t5-0.2.0.dist-info/RECORD",
        ] {
            assert!(has(name), "{name}");
        }
        fs::remove_dir_all(&directory).expect("it was made");
    }
}
