//! Tiles: the layout of bf16 operands for tile registers, and single blocks of products. Attention uses them: it packs its operands itself,
//! and has other work between two blocks.
//!
//! ```text
//! panel:      for each step of 32 along K two tiles: rows (columns) 0 to 15 and 16 to 31
//! tile of A:  16 lines of 64 bytes, line i holds row i: elements k .. k+32
//! tile of B:  line p holds K-pair p: (k+2p, k+2p+1) of column 0, of column 1, .. of column 15
//! ```
//!
//! Shapes: A (M, K), B (K, N), C (M, N); a block is 32 x 32, and K goes in steps of 32.

use std::ops::Range;

use super::kernel::{Kernel, Side};
use super::matrix::Matrix;
use super::panels::Buffer;

/// Rows and columns of a block, and elements along K of a step.
pub(crate) const BLOCK: usize = 32;

/// The most of K in a panel, which then has 256 KiB.
pub(super) const DEPTH: usize = 4096;

/// The most of K in a block at a time: 32 KiB of A.
pub(super) const SLICE: usize = 512;

/// Cells of a line.
pub(super) const LINE: usize = 32;
/// Cells of a tile: 16 lines of 32.
pub(crate) const TILE: usize = 16 * LINE;

/// 32 rows of A.
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// Packed by [`Tiles::pack_left`].
    Packed(*const u16),
    /// In place along K, this many cells apart. An odd number of cache lines is best: rows a power of two apart fall into few sets of the
    /// caches.
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

/// A kernel whose panels consist of tiles. A value is the right to use the tiles on this thread.
pub(crate) trait Tiles: Kernel<Cell = u16> {
    /// Packs rows `rows`, at most 32, of A (M, K) over `k`, filled up with zeros: 32 cells for each k. `k` starts at a multiple of 32 and
    /// ends at such a multiple or with A.
    fn pack_left(&self, a: Matrix, rows: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
        check((a.rows, a.cols), &rows, &k, cells);
        // SAFETY: the machine has the instructions, because `self` exists. The ranges lie inside of A, and there are enough cells.
        unsafe { Self::pack(Side::A, &a.t(), rows, k, cells) }
    }

    /// Packs columns of B (K, N) in the same way.
    fn pack_right(&self, b: Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
        check((b.cols, b.rows), &cols, &k, cells);
        // SAFETY: as above.
        unsafe { Self::pack(Side::B, &b, cols, k, cells) }
    }

    /// `C (+)= A B` for one block over `depth`, a multiple of 32 and not zero.
    ///
    /// # Safety
    ///
    /// `a` has 32 rows, `b` is a packed panel, both of `depth`; `c` points to 32 rows of 32 elements, `stride` apart, which
    /// nothing else reaches.
    unsafe fn multiply(&self, a: Left, b: *const u16, depth: usize, c: *mut f32, stride: usize, accumulate: bool);
}

/// Checks ranges of an operand with this many rows (columns) and this much of K, and the cells for them.
fn check((across, along): (usize, usize), x: &Range<usize>, k: &Range<usize>, cells: &[u16]) {
    assert!(x.end <= across && x.len() <= BLOCK && k.end <= along, "{x:?}, {k:?} of {across}, {along}");
    assert_eq!(cells.len(), k.len().next_multiple_of(BLOCK) * BLOCK, "cells of a panel");
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::matmul::software::SoftwareTiles;

    #[test]
    fn a_block_is_the_product_of_what_was_packed() {
        // SAFETY: software has no instructions of its own.
        let software = unsafe { SoftwareTiles::enter() };
        check_block(&software);
        #[cfg(target_arch = "x86_64")]
        {
            use crate::isa::{Isa, detect};
            if detect() >= Isa::Avx512Bf16 {
                // SAFETY: the machine has the instructions.
                check_block(&unsafe { crate::matmul::avx512::Avx512Bf16::enter() });
            }
            if detect() == Isa::Amx {
                // SAFETY: as above.
                check_block(&unsafe { crate::matmul::amx::Amx::enter() });
            }
        }
    }

    fn check_block(tiles: &impl Tiles) {
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
            unsafe { tiles.multiply(left, right.read().as_ptr(), depth, c.as_mut_ptr(), 48, accumulate) };
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
