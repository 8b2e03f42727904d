//! The processor that the needs of operations are stated for: this one, or the processor of the machine that a plan is for.
//!
//! Operations themselves always run as this machine can; only their stated needs follow [`with_target_processor`].

use std::cell::Cell;

use crate::{cache, isa, parallel};

/// The facts about a processor that determine the bytes of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processor {
    /// The instruction set that kernels use.
    pub instruction_set: InstructionSet,
    /// Threads that operations run on.
    pub threads: usize,
    /// Bytes of the second-level cache that one thread has.
    pub second_level_bytes: usize,
}

/// The instruction sets that have kernels, on any processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// Tile registers in software, for tests.
    SoftwareTiles,
    /// The baseline alone.
    Portable,
    /// NEON, on AArch64.
    Neon,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512: F, BW, DQ and VL.
    Avx512,
    /// The above, and products of bf16.
    Avx512Bf16,
    /// The above, and tile registers.
    Amx,
}

impl InstructionSet {
    /// All instruction sets.
    pub const ALL: [Self; 7] =
        [Self::SoftwareTiles, Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Its name in `LOW_MEM_T5_ISA` and [`crate::instruction_set`].
    pub fn name(self) -> &'static str {
        match self {
            Self::SoftwareTiles => "software-tiles",
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// Returns the instruction set of that name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|set| set.name() == name)
    }
}

impl Processor {
    /// Returns the instruction set of this process.
    pub fn of_this_process() -> Self {
        Self {
            instruction_set: InstructionSet::of_name(isa::instruction_set()).unwrap_or(InstructionSet::Portable),
            threads: parallel::threads(),
            second_level_bytes: cache::second_level(),
        }
    }

    /// Whether bf16 products multiply pairs along K.
    pub(crate) fn multiplies_pairs(&self) -> bool {
        self.has_tiles() || self.instruction_set == InstructionSet::Avx512Bf16
    }

    /// Whether bf16 products run on tile registers.
    pub fn has_tiles(&self) -> bool {
        matches!(self.instruction_set, InstructionSet::Amx | InstructionSet::SoftwareTiles)
    }
}

thread_local! {
    static COUNTED: Cell<Option<Processor>> = const { Cell::new(None) };
}

/// The processor that needs are stated for on this thread.
pub fn processor() -> Processor {
    COUNTED.get().unwrap_or_else(Processor::of_this_process)
}

/// Needs that are counted on this thread from here on are stated for another processor. For tests, whose threads end with them.
pub fn set_target_processor(processor: Processor) {
    COUNTED.set(Some(processor));
}

/// Calls `f`. Needs that are counted in `f`, on this thread, are stated for another processor.
pub fn with_target_processor<R>(processor: Processor, f: impl FnOnce() -> R) -> R {
    struct Before(Option<Processor>);
    impl Drop for Before {
        fn drop(&mut self) {
            COUNTED.set(self.0);
        }
    }
    let _before = Before(COUNTED.replace(Some(processor)));
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_follow_the_described_processor_and_then_this_one_again() {
        let here = processor();
        let other = Processor { instruction_set: InstructionSet::Amx, threads: 7, second_level_bytes: 2 << 20 };
        assert_eq!(with_target_processor(other, processor), other);
        let caught = std::panic::catch_unwind(|| with_target_processor(other, || panic!("counting failed")));
        assert!(caught.is_err());
        assert_eq!(processor(), here);
        assert_eq!(here.instruction_set.name(), isa::instruction_set());
    }
}
