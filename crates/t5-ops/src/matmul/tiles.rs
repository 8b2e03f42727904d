//! Single blocks of bf16 products on tile registers, for an operation that packs its operands itself and has other work
//! between two blocks: attention.
//!
//! Shapes: A (M, K), B (K, N), C (M, N); a block is 32 x 32, and K goes in steps of 32.

use std::arch::asm;
use std::ops::Range;

use super::amx::{Amx, load_c, store_c};
use super::kernel::Kernel;
pub(crate) use super::pairs::transpose;
use super::panels::{Buffer, Side};
use super::{Matrix, pairs};

/// Rows and columns of a block, and elements along K of a step.
pub(crate) const BLOCK: usize = pairs::BLOCK;
/// Cells of a tile: 16 lines of 32.
pub(crate) const TILE: usize = pairs::TILE;

/// The right to use the tile registers on this thread.
pub(crate) struct Tiles(());

/// 32 rows of A.
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// As [`Tiles::pack_left`] packs them.
    Packed(*const u16),
    /// One after the other along K, so many cells apart. Best an odd number of cache lines: rows a power of two apart fall
    /// into few sets of the caches.
    Rows(*const u16, usize),
}

/// Cells in whole cache lines, their contents unspecified.
pub(crate) struct Cells(Buffer);

impl Cells {
    pub(crate) fn new(len: usize) -> Self {
        Self(Buffer::apart::<u16>(len))
    }

    pub(crate) fn all(&mut self) -> &mut [u16] {
        self.0.cells()
    }

    pub(crate) fn read(&self) -> &[u16] {
        self.0.read()
    }
}

impl Tiles {
    /// # Safety
    ///
    /// [`has_tiles`](crate::vector::has_tiles) was true.
    pub(crate) unsafe fn enter() -> Self {
        // SAFETY: by the caller's promise. The tiles of a thread stay configured.
        unsafe { Amx::enter() };
        Self(())
    }

    /// Packs rows `rows`, at most 32, of A (M, K) over `k`, filled up with zeros: 32 cells for each k. `k` starts at a multiple
    /// of 32 and ends at one or with A.
    pub(crate) fn pack_left(&self, a: Matrix, rows: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
        check((a.rows, a.cols), &rows, &k, cells);
        // SAFETY: a machine with AMX-BF16 has the instructions; the ranges lie inside of A, and the cells are as many.
        unsafe { pairs::pack(Side::A, &a.t(), rows, k, cells) }
    }

    /// The same for columns of B (K, N).
    pub(crate) fn pack_right(&self, b: Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
        check((b.cols, b.rows), &cols, &k, cells);
        // SAFETY: as above.
        unsafe { pairs::pack(Side::B, &b, cols, k, cells) }
    }

    /// `C (+)= A B` for one block over `depth`, a multiple of 32 and not zero.
    ///
    /// # Safety
    ///
    /// `a` has 32 rows, `b` is a packed panel, both of `depth`; `c` points to 32 rows of 32 elements, `stride` apart, which
    /// nothing else reaches.
    pub(crate) unsafe fn block(
        &self,
        a: Left,
        b: *const u16,
        depth: usize,
        c: *mut f32,
        stride: usize,
        accumulate: bool,
    ) {
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
                // Whether C is added to; then the place of its lower half.
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

/// Ranges of an operand that has so many rows (columns) and so much of K, and cells for them.
fn check((across, along): (usize, usize), x: &Range<usize>, k: &Range<usize>, cells: &[u16]) {
    assert!(x.end <= across && x.len() <= BLOCK && k.end <= along, "{x:?}, {k:?} of {across}, {along}");
    assert_eq!(cells.len(), k.len().next_multiple_of(BLOCK) * BLOCK, "cells of a panel");
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn a_block_is_the_product_of_what_was_packed() {
        if !crate::vector::has_tiles() {
            return;
        }
        // SAFETY: they are.
        let tiles = unsafe { Tiles::enter() };
        let (rows, cols, depth) = (29, 17, 96);
        let number = |i: usize| bf16::from_f32(((i * 37 % 64) as f32 - 31.0) / 16.0);
        let a: Vec<bf16> = (0..rows * depth).map(number).collect();
        let b: Vec<bf16> = (0..depth * cols).map(|i| number(7 * i + 3)).collect();
        let (mut left, mut right) = (Cells::new(depth * BLOCK), Cells::new(depth * BLOCK));
        tiles.pack_left(Matrix::new(a[..].into(), rows, depth), 0..rows, 0..depth, left.all());
        tiles.pack_right(Matrix::new(b[..].into(), depth, cols), 0..cols, 0..depth, right.all());
        let stride = depth + BLOCK;
        let mut lines = Cells::new(BLOCK * stride);
        lines.all().fill(0);
        for (line, a) in lines.all().chunks_exact_mut(stride).zip(a.chunks_exact(depth)) {
            line.iter_mut().zip(a).for_each(|(line, a)| *line = a.to_bits());
        }
        for (left, accumulate) in [
            (Left::Packed(left.read().as_ptr()), false),
            (Left::Rows(lines.read().as_ptr(), stride), false),
            (Left::Rows(lines.read().as_ptr(), stride), true),
        ] {
            let mut c = vec![2.0f32; BLOCK * 48];
            // SAFETY: whole panels, and a block of `c`.
            unsafe { tiles.block(left, right.read().as_ptr(), depth, c.as_mut_ptr(), 48, accumulate) };
            for (i, row) in c.chunks_exact(48).enumerate() {
                for (j, &got) in row.iter().enumerate() {
                    let term = |k: usize| a[i * depth + k].to_f32() * b[k * cols + j].to_f32();
                    let sum: f32 = if i < rows && j < cols { (0..depth).map(term).sum() } else { 0.0 };
                    let expected = if j >= BLOCK { 2.0 } else { sum + if accumulate { 2.0 } else { 0.0 } };
                    assert_eq!(got, expected, "{i} {j}");
                }
            }
        }
    }
}
