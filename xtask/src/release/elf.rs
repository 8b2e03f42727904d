//! Reads from an ELF file whether it needs a dynamic linker.
//!
//! Source: the System V ABI, chapters "ELF header" and "program header"; 64 bits, little endian.

/// The type of a program header that names an interpreter.
const PT_INTERP: u32 = 3;

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

fn number(file: &[u8], start: u64, bytes: usize) -> Result<u64, String> {
    let start = usize::try_from(start).unwrap_or(usize::MAX);
    let extent = file.get(start..start.saturating_add(bytes)).ok_or("the ELF file is cut short")?;
    let mut number = [0; 8];
    number[..bytes].copy_from_slice(extent);
    Ok(u64::from_le_bytes(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_a_dynamic_linker_is_told_from_one_without() {
        let file = |kind: u32| {
            let mut file = vec![0; 0x40 + 0x38];
            file[..6].copy_from_slice(b"\x7fELF\x02\x01");
            file[0x20] = 0x40;
            file[0x36] = 0x38;
            file[0x38] = 1;
            file[0x40..0x44].copy_from_slice(&kind.to_le_bytes());
            file
        };
        assert_eq!((interpreter(&file(3)), interpreter(&file(1))), (Ok(true), Ok(false)));
        assert!(interpreter(&file(1)[..0x41]).is_err() && interpreter(b"#!/bin/sh").is_err());
    }
}
