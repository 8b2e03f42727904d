//! Sizes of this machine's caches, for work that is cut so that it stays in a cache, and instructions that prefetch and evict.

use std::sync::OnceLock;

use candle_core::{Result, Tensor};
use tensor_storage::with_bytes;

/// The size of the second-level cache if it is unknown: most processors have at least this.
const LEAST: usize = 512 << 10;

/// Bytes of the second-level cache for one thread, if all processors that share the cache are busy.
pub(crate) fn second_level() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| on_linux("/sys/devices/system/cpu/cpu0/cache").unwrap_or(LEAST))
}

/// Evicts a tensor on the CPU from the processor's caches, so that its next use takes as long as in a step of a large model.
///
/// # Errors
/// Those of [`with_bytes`].
pub fn evict_from_caches(x: &Tensor) -> Result<()> {
    with_bytes(x, evict)
}

/// Prefetches a line of memory to the second-level cache, for reading. It may be no address of this process.
#[inline(always)]
pub(crate) fn prefetch_read<T>(line: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

/// Prefetches a line of memory for writing.
#[inline(always)]
pub(crate) fn prefetch_write<T>(line: *mut T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing; 64-bit processors without this instruction ignore it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

/// Bytes of the shortest line that a cache has.
const LINE: usize = 64;

/// Evicts memory from all caches, as if other work had used them since: for measurements of weights that come from memory. Without an
/// instruction for it, the memory stays in the caches.
pub(crate) fn evict(bytes: &[u8]) {
    for line in bytes.chunks(LINE) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an address of this process; modified lines are written to memory first.
        unsafe {
            std::arch::x86_64::_mm_clflush(line.as_ptr());
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above; Linux lets programs use the instruction.
        unsafe {
            std::arch::asm!("dc civac, {}", in(reg) line.as_ptr(), options(nostack, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = line;
    }
}

/// Reads the size as the kernel lists it in `directory`, which has a folder `index0`, `index1`, .. for each cache of a processor.
fn on_linux(directory: &str) -> Option<usize> {
    let read = |index: usize, file: &str| std::fs::read_to_string(format!("{directory}/index{index}/{file}")).ok();
    let index = (0..).map_while(|index| Some((index, read(index, "level")?))).find(|(_, level)| level.trim() == "2")?.0;
    let bytes = bytes(read(index, "size")?.trim())?;
    let sharing = read(index, "shared_cpu_list").map_or(1, |list| processors(list.trim()));
    (bytes > 0).then_some(bytes / sharing.max(1))
}

/// Converts a size such as `1024K` to bytes.
fn bytes(size: &str) -> Option<usize> {
    let (digits, unit) = match size.split_at_checked(size.len().checked_sub(1)?)? {
        (digits, "K") => (digits, 1 << 10),
        (digits, "M") => (digits, 1 << 20),
        _ => (size, 1),
    };
    digits.parse::<usize>().ok()?.checked_mul(unit)
}

/// Counts the processors in a list such as `0-3,8`.
fn processors(list: &str) -> usize {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some((last.parse::<usize>().ok()? + 1).saturating_sub(first.parse().ok()?))
    };
    list.split(',').filter_map(range).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_lists_are_read_as_linux_writes_them() {
        assert_eq!(bytes("1024K"), Some(1 << 20));
        assert_eq!(bytes("2M"), Some(2 << 20));
        assert_eq!(bytes("65536"), Some(1 << 16));
        for odd in ["", "K", "4G", "-1K"] {
            assert_eq!(bytes(odd), None, "{odd}");
        }
        assert_eq!(processors("0"), 1);
        assert_eq!(processors("0-3,8"), 5);
        assert_eq!(processors(""), 0);
    }

    #[test]
    fn the_second_level_is_found_among_the_others_and_divided_among_those_who_share_it() {
        let directory = std::env::temp_dir().join(format!("t5-ops-cache-{}", std::process::id()));
        let write = |index: usize, file: &str, text: &str| {
            let folder = directory.join(format!("index{index}"));
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(file), text).unwrap();
        };
        for (index, level, size, shared) in [(0, "1\n", "32K\n", "0\n"), (1, "2\n", "4096K\n", "0-1\n")] {
            write(index, "level", level);
            write(index, "size", size);
            write(index, "shared_cpu_list", shared);
        }
        assert_eq!(on_linux(directory.to_str().unwrap()), Some(2 << 20));
        write(1, "size", "nonsense\n");
        assert_eq!(on_linux(directory.to_str().unwrap()), None);
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(on_linux(directory.to_str().unwrap()), None);
        assert!(second_level() > 0);
    }
}
