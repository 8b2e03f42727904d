//! Blocks of a product that is computed as its transpose, turned back as they are written.

use half::bf16;

use super::kernel::Kernel;
use super::lanes::Lanes;
use super::matrix::MatrixMut;
use super::small_m::put;
#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::parallel::Shared;
use crate::storage::{Element, Target};
use crate::vector::vectorized;

/// Elements from one row of a turned block to the next: no kernel has more rows.
const APART: usize = 32;
/// Elements of a turned block of the kernel with the most columns.
pub(super) const ELEMENTS: usize = 48 * APART;

/// Transposes a block of `ROWS` rows of `COLS` elements.
///
/// # Safety
///
/// The machine has the instructions of `V`. If `ROWS` is no multiple of the vector's width, the missing rows can be read after `block`, and
/// `to` has room for [`ELEMENTS`].
#[inline(always)]
pub(super) unsafe fn turn<V: Lanes, const ROWS: usize, const COLS: usize>(block: *const f32, to: *mut f32) {
    for i in (0..ROWS).step_by(V::WIDTH) {
        for j in (0..COLS).step_by(V::WIDTH) {
            // SAFETY: by the caller's promise.
            unsafe { V::turn(block.add(i * COLS + j), COLS, to.add(j * APART + i), APART) };
        }
    }
}

/// Transposes a block of a kernel of tiles, see [`turn`].
///
/// # Safety
///
/// As [`turn`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn turn_tiles(block: *const f32, to: *mut f32) {
    // SAFETY: by the caller's promise.
    unsafe { turn::<std::arch::x86_64::__m512, { tiles::BLOCK }, { tiles::BLOCK }>(block, to) }
}

/// Writes the part of the block at (i, j) that lies inside C, whose columns are lines of memory. The block is the first of `sums`, whose
/// last [`ELEMENTS`] are for its transpose.
///
/// # Safety
///
/// The block of C belongs to the caller, and the machine has the kernel's instructions.
pub(super) unsafe fn write<K: Kernel>(c: &MatrixMut, (i, j): (usize, usize), sums: &mut [f32], accumulate: bool) {
    assert!(c.turned && sums.len() >= K::ROWS * K::COLS + ELEMENTS);
    let (rows, cols) = (K::ROWS.min(c.rows - i), K::COLS.min(c.cols - j));
    let (block, place) = (sums.as_mut_ptr(), sums.len() - ELEMENTS);
    // SAFETY: a block and its transpose, both inside. Rows that are missing to a vector are read from the memory after the block.
    unsafe { K::turn_block(block, block.add(place)) };
    let (turned, start) = (&sums[place..], c.start + j * c.stride + i);
    match c.data {
        Target::F32(to) => {
            // SAFETY: inside C, and this task's alone.
            let to = unsafe { Lines::new(to, start, c.stride, rows) };
            write_lines::<K, f32>(turned, to, cols, accumulate);
        }
        Target::Bf16(to) => {
            // SAFETY: as above.
            let to = unsafe { Lines::new(to, start, c.stride, rows) };
            write_lines::<K, bf16>(turned, to, cols, accumulate);
        }
    }
}

/// Parts of lines of memory.
struct Lines<T> {
    to: Shared<T>,
    start: usize,
    stride: usize,
    length: usize,
}

impl<T> Lines<T> {
    /// `length` elements of each line. The first line begins at `start`, and lines are `stride` apart.
    ///
    /// # Safety
    ///
    /// Nothing else reaches them while the result lives.
    unsafe fn new(to: Shared<T>, start: usize, stride: usize, length: usize) -> Self {
        Self { to, start, stride, length }
    }

    fn line(&mut self, number: usize) -> &mut [T] {
        // SAFETY: by the promise of `new`.
        unsafe { self.to.slice(self.start + number * self.stride, self.length) }
    }
}

vectorized! {
    fn write_lines<K: Kernel, T: Element>(turned: &[f32], to: Lines<T>, lines: usize, accumulate: bool) {
        let mut to = to;
        for (number, sums) in turned.chunks_exact(APART).take(lines).enumerate() {
            let to = to.line(number);
            if to.len() == K::ROWS {
                // The compiler knows this length.
                put(&mut to[..K::ROWS], sums[..K::ROWS].iter().copied(), accumulate);
            } else {
                put(to, sums.iter().copied(), accumulate);
            }
        }
    }
}
