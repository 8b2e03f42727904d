//! The page cache of a file that is written and read in pieces, each once.

use std::fs::File;

/// Has the system read no more of the file than was asked for.
pub fn disable_readahead(file: &File) {
    advise(file, 0, 0, Advice::Random);
}

/// Removes bytes of the file that are on the disk from the page cache, as far as they are whole pages.
pub fn forget(file: &File, offset: u64, bytes: u64) {
    advise(file, offset, bytes, Advice::DontNeed);
}

#[derive(Clone, Copy, Debug)]
enum Advice {
    Random,
    DontNeed,
}

/// Ignored advice costs time or memory, nothing else. `bytes` of 0 means all of the file.
#[cfg(target_os = "linux")]
fn advise(file: &File, offset: u64, bytes: u64, advice: Advice) {
    use rustix::fs;
    let advice = match advice {
        Advice::Random => fs::Advice::Random,
        Advice::DontNeed => fs::Advice::DontNeed,
    };
    let _ = fs::fadvise(file, offset, std::num::NonZeroU64::new(bytes), advice);
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &File, _: u64, _: u64, _: Advice) {}
