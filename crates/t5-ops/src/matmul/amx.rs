//! The AMX kernel: a 32 x 32 block of C in four tile registers.
//!
//! Eight tile registers of 16 rows of 64 bytes: four hold C (f32), two A (16 rows of 32 bf16 along K), two B (16 rows of 16 pairs along K).
//! A step of 32 along K loads four tiles and issues four `tdpbf16ps` of 16 cycles each, so the unit is busy while the first- and
//! second-level caches serve the loads.
//! B is loaded with `tileloaddt1`, which leaves the first-level cache to A: a block that is 512 deep then takes 523 ns, and 709 ns with
//! `tileloadd` (32 KiB of A and a stream of B do not fit 48 KiB together).
//!
//! The instructions have no stable intrinsics; inline assembly is stable.

use std::arch::asm;
use std::cell::Cell;
use std::ops::Range;

use half::bf16;

use super::kernel::{Block, Copied, Kernel, Rows, Side};
use super::matrix::Matrix;
use super::tiles::{BLOCK, DEPTH, Left, SLICE, TILE, Tiles};
use super::{pairs, turned};
use crate::storage::Operand;

/// The operand of `ldtilecfg`: palette 1, all eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static TILES: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// The tile registers of the current thread, configured.
///
/// A thread configures them at its first block and leaves them configured: products are many and small, and nothing else in the process
/// uses tiles.
pub(crate) struct Amx(());

/// Copies one row, by number: 32 of its elements to a line of a panel.
macro_rules! row {
    (0) => {
        row!("[{from}]", "0")
    };
    (1) => {
        row!("[{from} + {apart}]", "64")
    };
    (2) => {
        row!("[{from} + {apart}*2]", "128")
    };
    (3) => {
        row!("[{from} + {three}]", "192")
    };
    (4) => {
        row!("[{from} + {apart}*4]", "256")
    };
    (5) => {
        row!("[{after} + {apart}]", "320")
    };
    (6) => {
        row!("[{after} + {apart}*2]", "384")
    };
    (7) => {
        row!("[{after} + {three}]", "448")
    };
    ($from:literal, $to:literal) => {
        concat!("vmovdqu64 zmm16, ", $from, "\n", "vmovdqu64 [{to} + ", $to, "], zmm16")
    };
}

/// The start of a block: loads C (32 x 32 at `c`, `row` bytes from row to row) into the first four tile registers, or zeros where `below`
/// is zero. Afterwards `below` points to the lower half of C, and the loop begins at `2:`.
macro_rules! load_c {
    () => {
        concat!(
            "test {below:e}, {below:e}\n",
            "lea {below}, [{c} + {row}*8]\n",
            "lea {below}, [{below} + {row}*8]\n",
            "jz 3f\n",
            "tileloadd tmm0, [{c} + {row}*1]\n",
            "tileloadd tmm1, [{c} + {row}*1 + 64]\n",
            "tileloadd tmm2, [{below} + {row}*1]\n",
            "tileloadd tmm3, [{below} + {row}*1 + 64]\n",
            "jmp 2f\n",
            "3:\n",
            "tilezero tmm0\n",
            "tilezero tmm1\n",
            "tilezero tmm2\n",
            "tilezero tmm3\n",
            "2:\n",
        )
    };
}

/// The end of a block.
macro_rules! store_c {
    () => {
        concat!(
            "tilestored [{c} + {row}*1], tmm0\n",
            "tilestored [{c} + {row}*1 + 64], tmm1\n",
            "tilestored [{below} + {row}*1], tmm2\n",
            "tilestored [{below} + {row}*1 + 64], tmm3\n",
        )
    };
}

/// The kernel, with a copy that runs beside each of the eight tile instructions of a step.
macro_rules! block {
    ($block:ident, $copied:ident, $e0:expr, $e1:expr, $e2:expr, $e3:expr, $e4:expr, $e5:expr, $e6:expr, $e7:expr) => {
        asm!(
            load_c!(),
            "tileloadd tmm4, [{a} + {line}*1]",
            $e0,
            "tileloaddt1 tmm6, [{b} + {line}*1]",
            $e1,
            "tileloaddt1 tmm7, [{b} + {line}*1 + 1024]",
            $e2,
            "tdpbf16ps tmm0, tmm4, tmm6",
            $e3,
            "tileloadd tmm5, [{a} + {line}*1 + 1024]",
            $e4,
            "tdpbf16ps tmm1, tmm4, tmm7",
            $e5,
            "add {a}, 2048",
            "tdpbf16ps tmm2, tmm5, tmm6",
            $e6,
            "add {b}, 2048",
            "tdpbf16ps tmm3, tmm5, tmm7",
            $e7,
            "add {from}, 64",
            "add {after}, 64",
            "add {to}, 2048",
            "dec {steps:e}",
            "jnz 2b",
            store_c!(),
            "/* {apart} {three} */",
            a = inout(reg) $block.a.data => _,
            b = inout(reg) $block.b => _,
            steps = inout(reg) $block.depth / BLOCK => _,
            c = in(reg) $block.c,
            // Nonzero if C is added to; then the address of its lower half.
            below = inout(reg) usize::from($block.accumulate) => _,
            row = in(reg) $block.stride * 4,
            line = in(reg) 64usize,
            from = inout(reg) $copied.from => _,
            after = inout(reg) $copied.from.wrapping_add(4 * $copied.stride) => _,
            apart = in(reg) $copied.stride * 2,
            three = in(reg) $copied.stride * 6,
            to = inout(reg) $copied.to => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            out("zmm16") _,
            options(nostack),
        )
    };
}

thread_local! {
    static CONFIGURED: Cell<bool> = const { Cell::new(false) };
}

impl Kernel for Amx {
    type Cell = u16;
    const ROWS: usize = BLOCK;
    const COLS: usize = BLOCK;
    const STEP: usize = BLOCK;
    const DEPTH: usize = DEPTH;
    const SLICE: usize = SLICE;

    unsafe fn enter() -> Self {
        if !CONFIGURED.replace(true) {
            // SAFETY: the caller promises that the machine has AMX; the configuration is a valid one.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &TILES, options(nostack, readonly)) };
        }
        Self(())
    }

    fn direct(_: &Matrix) -> Option<Rows<u16>> {
        None
    }

    unsafe fn pack(side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
        // SAFETY: a machine with AMX-BF16 has AVX512-BF16.
        unsafe { pairs::pack(side, m, cols, k, cells) }
    }

    fn copied(a: &Matrix) -> Option<Rows<u16>> {
        match a.data {
            Operand::Bf16(data) if a.col_stride == 1 => {
                Some(Rows { data: data.as_ptr().cast(), row: a.row_stride, step: 1 })
            }
            _ => None,
        }
    }

    #[inline]
    unsafe fn block(&self, a: Rows<u16>, b: *const u16, depth: usize, c: *mut f32, stride: usize, accumulate: bool) {
        let nothing = Copied { from: a.data, stride: 0, to: std::ptr::null_mut(), rows: 0 };
        // SAFETY: by the caller's promise; zero rows are copied.
        unsafe { self.block_and_copy(Block { a, b, depth, c, stride, accumulate }, nothing) }
    }

    #[inline]
    unsafe fn block_and_copy(&self, block: Block<u16>, copied: Copied<u16>) {
        // SAFETY: the caller promises `depth / 32` times two tiles at `a` and `b`, and 32 rows of 32 elements,
        // `stride` apart, at `c`; `rows` rows of `depth` elements to copy from, and the lines of a panel to copy to.
        // The tiles are configured, because `self` exists.
        unsafe {
            match copied.rows {
                0 => block!(block, copied, "", "", "", "", "", "", "", ""),
                1 => block!(block, copied, row!(0), "", "", "", "", "", "", ""),
                2 => block!(block, copied, row!(0), "", "", "", row!(1), "", "", ""),
                3 => block!(block, copied, row!(0), "", row!(1), "", row!(2), "", "", ""),
                4 => block!(block, copied, row!(0), "", row!(1), "", row!(2), "", row!(3), ""),
                5 => block!(block, copied, row!(0), row!(1), row!(2), "", row!(3), "", row!(4), ""),
                6 => block!(block, copied, row!(0), row!(1), row!(2), "", row!(3), row!(4), row!(5), ""),
                7 => block!(block, copied, row!(0), row!(1), row!(2), row!(3), row!(4), row!(5), row!(6), ""),
                _ => block!(block, copied, row!(0), row!(1), row!(2), row!(3), row!(4), row!(5), row!(6), row!(7)),
            }
        }
    }

    unsafe fn turn_block(block: *const f32, to: *mut f32) {
        // SAFETY: by the caller's promise.
        unsafe { turned::turn_tiles(block, to) }
    }

    unsafe fn write_bf16(&self, block: &[f32], c: *mut bf16, stride: usize, size: (usize, usize), accumulate: bool) {
        // SAFETY: by the caller's promise.
        unsafe { pairs::write_bf16(block, c, stride, size, accumulate) }
    }
}

impl Tiles for Amx {
    unsafe fn multiply(&self, a: Left, b: *const u16, depth: usize, c: *mut f32, stride: usize, accumulate: bool) {
        // The upper sixteen rows, the lower ones, from row to row in bytes, and from one step along K to the next.
        let (upper, lower, apart, step) = match a {
            Left::Packed(a) => (a, a.wrapping_add(TILE), 64, 4 * TILE),
            Left::Rows(a, stride) => (a, a.wrapping_add(16 * stride), 2 * stride, 2 * BLOCK),
        };
        // SAFETY: by the caller's promise; the tiles are configured, because `self` exists.
        unsafe {
            asm!(
                load_c!(),
                "tileloadd tmm4, [{upper} + {apart}*1]",
                "tileloaddt1 tmm6, [{b} + {line}*1]",
                "tileloaddt1 tmm7, [{b} + {line}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{lower} + {apart}*1]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {upper}, {step}",
                "add {lower}, {step}",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "add {b}, 2048",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {steps:e}",
                "jnz 2b",
                store_c!(),
                upper = inout(reg) upper => _,
                lower = inout(reg) lower => _,
                apart = in(reg) apart,
                step = in(reg) step,
                b = inout(reg) b => _,
                steps = inout(reg) depth / BLOCK => _,
                c = in(reg) c,
                // Nonzero if C is added to; then the address of its lower half.
                below = inout(reg) usize::from(accumulate) => _,
                row = in(reg) 4 * stride,
                line = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
