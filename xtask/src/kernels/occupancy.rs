//! The number of a kernel's warps that a multiprocessor holds at once.
//!
//! Limits are from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". The allocation units of
//! registers and shared memory are those of NVIDIA's occupancy calculator.

/// A compute capability, such as 80 for 8.0, and the limits of its multiprocessors.
#[derive(Clone, Copy, Debug)]
pub struct Capability {
    pub number: u32,
    /// The usual notation, such as `8.0`.
    pub name: &'static str,
    /// The most resident warps.
    pub warps: u32,
    blocks: u32,
    /// Shared memory in bytes.
    shared: u32,
}

const fn capability(number: u32, name: &'static str, warps: u32, blocks: u32, shared_kib: u32) -> Capability {
    Capability { number, name, warps, blocks, shared: shared_kib << 10 }
}

/// The compiled capabilities: A100; A10 and the RTX 30 series; L4, L40 and the RTX 40 series; H100 and H200; the RTX 50 series.
pub const CAPABILITIES: [Capability; 5] = [
    capability(80, "8.0", 64, 32, 164),
    capability(86, "8.6", 48, 16, 100),
    capability(89, "8.9", 48, 24, 100),
    capability(90, "9.0", 64, 32, 228),
    capability(120, "12.0", 48, 24, 100),
];

const WARP: u32 = 32;
/// Registers of a multiprocessor, for every capability here.
const REGISTERS: u32 = 64 << 10;
/// A multiprocessor has four parts, each with its share of the registers; a warp runs in one of them.
const PARTS: u32 = 4;
/// Registers are given to a warp in multiples of this.
const REGISTER_UNIT: u32 = 256;
/// Shared memory is given to a block in multiples of this, in bytes.
const SHARED_UNIT: u32 = 128;
/// The system's part of each block's shared memory, in bytes. A block can never use the last such part of a
/// multiprocessor.
const RESERVED: u32 = 1 << 10;

/// A launched block: its threads, and its static and dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub threads: u32,
    pub registers: u32,
    pub shared: u32,
}

impl Capability {
    /// Warps of such blocks that are resident at once; 0 if a block cannot be launched.
    pub fn resident_warps(&self, block: Block) -> u32 {
        let warps = block.threads.div_ceil(WARP);
        let of_warp = (block.registers * WARP).next_multiple_of(REGISTER_UNIT);
        let by_registers = REGISTERS / PARTS / of_warp * PARTS / warps;
        let by_shared = self.shared / (block.shared + RESERVED).next_multiple_of(SHARED_UNIT);
        let blocks = self.blocks.min(self.warps / warps).min(by_registers).min(by_shared);
        blocks * warps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(capability: usize, [threads, registers, shared]: [u32; 3], expected: u32) {
        assert_eq!(CAPABILITIES[capability].resident_warps(Block { threads, registers, shared }), expected);
    }

    #[test]
    fn few_registers_and_no_shared_memory_fill_a_multiprocessor() {
        check(0, [256, 32, 0], 64);
        check(1, [256, 40, 0], 48);
        check(3, [1024, 32, 0], 64);
    }

    #[test]
    fn registers_are_given_out_by_parts_of_a_multiprocessor() {
        // 168 registers leave room for three warps in each part, 176 for two.
        check(0, [128, 168, 0], 12);
        check(0, [128, 176, 0], 8);
        check(0, [128, 255, 0], 8);
        // 33 registers count as 40.
        check(3, [256, 33, 0], 48);
    }

    #[test]
    fn each_block_pays_for_the_systems_shared_memory() {
        // Twice 50 KiB are 100 KiB, and the system has 1 KiB of each.
        check(1, [128, 32, 50 << 10], 4);
        check(1, [128, 32, 49 << 10], 8);
        check(0, [128, 32, 163 << 10], 4);
        check(0, [128, 32, 164 << 10], 0);
    }

    #[test]
    fn small_blocks_are_limited_by_their_number() {
        check(1, [32, 16, 0], 16);
        check(2, [32, 16, 0], 24);
        check(3, [32, 16, 0], 32);
    }

    #[test]
    fn blocks_that_do_not_divide_the_warps_leave_some_idle() {
        check(1, [1024, 32, 0], 32);
    }
}
