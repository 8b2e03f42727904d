//! Reads from an ELF file whether it needs a dynamic linker, and which version of the C library.
//!
//! Sources: the System V ABI, chapters "ELF header", "program header" and "sections", and the Linux Standard Base, "Symbol Versioning";
//! 64 bits, little endian.

/// The type of a program header that names an interpreter.
const PT_INTERP: u32 = 3;
/// The type of the section that names the versions of other libraries.
const SHT_GNU_VERNEED: u64 = 0x6fff_fffe;
/// The type of the section for the dynamic linker, and of its entries that name a library.
const SHT_DYNAMIC: u64 = 6;
const DT_NEEDED: u64 = 1;
/// Processors by their number in the header.
const PROCESSORS: [(u64, &str); 2] = [(62, "x86_64"), (183, "aarch64")];

/// Whether a program names an interpreter, the dynamic linker.
pub fn interpreter(file: &[u8]) -> Result<bool, String> {
    if file.get(..6) != Some(b"\x7fELF\x02\x01") {
        return Err("expected an ELF file of 64 bits, little endian".to_owned());
    }
    let start = number(file, 0x20, 8)?;
    let (size, count) = (number(file, 0x36, 2)?, number(file, 0x38, 2)?);
    for index in 0..count {
        if number(file, start + index * size, 4)? == u64::from(PT_INTERP) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The processor of a program, as wheels name it.
pub fn processor(file: &[u8]) -> Result<&'static str, String> {
    let machine = number(file, 0x12, 2)?;
    let known = PROCESSORS.into_iter().find(|(number, _)| *number == machine);
    known
        .map(|(_, name)| name)
        .ok_or_else(|| format!("expected a program for x86_64 or aarch64, got machine {machine}"))
}

/// The newest version of glibc of which a program needs a function; `None` if it needs none.
pub fn newest_glibc(file: &[u8]) -> Result<Option<(u64, u64)>, String> {
    let start = number(file, 0x28, 8)?;
    let (size, count) = (number(file, 0x3a, 2)?, number(file, 0x3c, 2)?);
    let field = |section: u64, at: u64, bytes: usize| number(file, start + section * size + at, bytes);
    let mut newest = None;
    for section in 0..count {
        if field(section, 4, 4)? != SHT_GNU_VERNEED {
            continue;
        }
        let names = field(field(section, 0x28, 4)?, 0x18, 8)?;
        let mut library = field(section, 0x18, 8)?;
        // `sh_info` is the number of libraries. Each has a list of versions.
        for _ in 0..field(section, 0x2c, 4)? {
            let mut version = library + number(file, library + 8, 4)?;
            for _ in 0..number(file, library + 2, 2)? {
                newest = newest.max(glibc_version(text(file, names + number(file, version + 8, 4)?)));
                version += number(file, version + 12, 4)?;
            }
            library += number(file, library + 12, 4)?;
        }
    }
    Ok(newest)
}

/// The libraries that the dynamic linker loads before a program starts.
pub fn needed(file: &[u8]) -> Result<Vec<String>, String> {
    let start = number(file, 0x28, 8)?;
    let (size, count) = (number(file, 0x3a, 2)?, number(file, 0x3c, 2)?);
    let field = |section: u64, at: u64, bytes: usize| number(file, start + section * size + at, bytes);
    let mut libraries = Vec::new();
    for section in 0..count {
        if field(section, 4, 4)? != SHT_DYNAMIC {
            continue;
        }
        let names = field(field(section, 0x28, 4)?, 0x18, 8)?;
        let (at, bytes) = (field(section, 0x18, 8)?, field(section, 0x20, 8)?);
        for entry in (at..at + bytes).step_by(16) {
            if number(file, entry, 8)? == DT_NEEDED {
                libraries.push(text(file, names + number(file, entry + 8, 8)?).to_owned());
            }
        }
    }
    Ok(libraries)
}

/// `GLIBC_2.34`, or `GLIBC_2.2.5`, of which the last number does not count.
fn glibc_version(name: &str) -> Option<(u64, u64)> {
    let mut numbers = name.strip_prefix("GLIBC_")?.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The text that begins here and ends with a zero.
fn text(file: &[u8], start: u64) -> &str {
    let rest = usize::try_from(start).ok().and_then(|start| file.get(start..)).unwrap_or_default();
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
    std::str::from_utf8(&rest[..end]).unwrap_or_default()
}

fn number(file: &[u8], start: u64, bytes: usize) -> Result<u64, String> {
    let start = usize::try_from(start).unwrap_or(usize::MAX);
    let extent = file.get(start..start.saturating_add(bytes)).ok_or("the ELF file is cut short")?;
    let mut number = [0; 8];
    number[..bytes].copy_from_slice(extent);
    Ok(u64::from_le_bytes(number))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A program of x86-64 without code: static, or with these versions of the C library.
    pub fn program(versions: Option<&[&str]>) -> Vec<u8> {
        let mut file = vec![0; 0x40 + 0x38];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (file[0x12], file[0x20], file[0x36], file[0x38]) = (62, 0x40, 0x38, 1);
        let Some(versions) = versions else {
            file[0x40] = 1;
            return file;
        };
        file[0x40] = 3;
        let names = file.len() as u64;
        let mut places = Vec::new();
        for version in versions {
            places.push((file.len() as u64 - names) as u32);
            file.extend(version.bytes().chain([0]));
        }
        let needed = file.len() as u64;
        file.extend([1u16, versions.len() as u16].map(u16::to_le_bytes).concat());
        file.extend([0u32, 16, 0].map(u32::to_le_bytes).concat());
        places.iter().for_each(|place| file.extend([0, 0, *place, 16].map(u32::to_le_bytes).concat()));
        let sections = file.len() as u64;
        file[0x28..0x30].copy_from_slice(&sections.to_le_bytes());
        (file[0x3a], file[0x3c]) = (0x40, 2);
        for (kind, at, link, info) in [(3u32, names, 0u32, 0u32), (0x6fff_fffe, needed, 0, 1)] {
            let mut section = [0; 0x40];
            section[4..8].copy_from_slice(&kind.to_le_bytes());
            section[0x18..0x20].copy_from_slice(&at.to_le_bytes());
            section[0x28..0x2c].copy_from_slice(&link.to_le_bytes());
            section[0x2c..0x30].copy_from_slice(&info.to_le_bytes());
            file.extend(section);
        }
        file
    }

    #[test]
    fn a_program_with_a_dynamic_linker_is_told_from_one_without() {
        assert_eq!((interpreter(&program(Some(&[]))), interpreter(&program(None))), (Ok(true), Ok(false)));
        assert!(interpreter(&program(None)[..0x41]).is_err() && interpreter(b"#!/bin/sh").is_err());
        assert_eq!(processor(&program(None)), Ok("x86_64"));
    }

    #[test]
    fn the_newest_version_of_the_c_library_is_found_by_number() {
        assert_eq!(newest_glibc(&program(Some(&["GLIBC_2.9", "GLIBC_2.34", "GLIBC_2.2.5"]))), Ok(Some((2, 34))));
        assert_eq!(newest_glibc(&program(Some(&["GCC_3.0"]))), Ok(None));
        assert_eq!(newest_glibc(&program(None)), Ok(None));
        let cut = program(Some(&["GLIBC_2.34"]));
        assert!(newest_glibc(&cut[..cut.len() - 0x20]).is_err());
    }

    /// A real program: this one. It runs here, so it needs no newer library than the machine has.
    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn this_program_needs_a_c_library_that_the_machine_has() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let has = std::process::Command::new("getconf").arg("GNU_LIBC_VERSION").output().unwrap();
        let has = String::from_utf8(has.stdout).unwrap();
        let has = glibc_version(&has.trim().replace("glibc ", "GLIBC_")).unwrap();
        let needed = newest_glibc(&file).unwrap().expect("a program with a C library");
        assert!(needed >= (2, 2) && needed <= has, "needs {needed:?}, the machine has {has:?}");
    }
}
