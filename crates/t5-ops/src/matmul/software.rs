//! Tile registers in software: a kernel with the panels and the sums of [`super::amx`](super), so that the code around it is tested on any
//! machine.
//!
//! Sums are added in the order that Intel's manual gives for `tdpbf16ps`. In each step of 32 along K, products at even and at odd places
//! are summed apart, then both sums are added, then the result is added to C. A product of two bf16 is exact in f32, so a multiplication
//! and an addition round like a fused one. Denormal operands count as zeros, as in the hardware; denormal sums stay, unlike there. Its
//! speed says nothing.

use std::ops::Range;

use half::bf16;

use super::fma;
use super::kernel::{Block, Copied, Kernel, Rows, Side};
use super::lanes::Four;
use super::matrix::Matrix;
use super::tiles::{BLOCK, DEPTH, LINE, Left, SLICE, TILE, Tiles};
use super::turned::turn;
use crate::storage::{Element, Operand};

/// Pairs along K of a step.
const PAIRS: usize = BLOCK / 2;

pub(crate) struct SoftwareTiles;

impl Kernel for SoftwareTiles {
    type Cell = u16;
    const ROWS: usize = BLOCK;
    const COLS: usize = BLOCK;
    const STEP: usize = BLOCK;
    const DEPTH: usize = DEPTH;
    const SLICE: usize = SLICE;

    unsafe fn enter() -> Self {
        Self
    }

    fn direct(_: &Matrix) -> Option<Rows<u16>> {
        None
    }

    fn copied(a: &Matrix) -> Option<Rows<u16>> {
        match a.data {
            Operand::Bf16(data) if a.col_stride == 1 => {
                Some(Rows { data: data.as_ptr().cast(), row: a.row_stride, step: 1 })
            }
            _ => None,
        }
    }

    unsafe fn pack(side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
        match m.data {
            Operand::F32(data) => pack_from(data, side, m, cols, k, cells),
            Operand::Bf16(data) => pack_from(data, side, m, cols, k, cells),
        }
    }

    unsafe fn block(&self, a: Rows<u16>, b: *const u16, depth: usize, c: *mut f32, stride: usize, accumulate: bool) {
        // SAFETY: by the caller's promise.
        unsafe { self.multiply(Left::Packed(a.data), b, depth, c, stride, accumulate) }
    }

    unsafe fn block_and_copy(&self, block: Block<u16>, copied: Copied<u16>) {
        let Block { a, b, depth, c, stride, accumulate } = block;
        for (row, step) in (0..copied.rows).flat_map(|row| (0..depth / BLOCK).map(move |step| (row, step))) {
            // SAFETY: the caller promises rows of `depth`, and the lines of a panel.
            unsafe {
                let from = copied.from.add(row * copied.stride + step * BLOCK);
                from.copy_to_nonoverlapping(copied.to.add(step * 2 * TILE + row * LINE), BLOCK);
            }
        }
        // SAFETY: by the caller's promise.
        unsafe { self.block(a, b, depth, c, stride, accumulate) }
    }

    unsafe fn turn_block(block: *const f32, to: *mut f32) {
        // SAFETY: by the caller's promise.
        unsafe { turn::<Four, BLOCK, BLOCK>(block, to) }
    }

    unsafe fn write_bf16(&self, block: &[f32], c: *mut bf16, stride: usize, size: (usize, usize), accumulate: bool) {
        // SAFETY: by the caller's promise.
        unsafe { fma::write_bf16(block, BLOCK, c, stride, size, accumulate) }
    }
}

impl Tiles for SoftwareTiles {
    unsafe fn multiply(&self, a: Left, b: *const u16, depth: usize, c: *mut f32, stride: usize, accumulate: bool) {
        // From row to row, and from one step along K to the next.
        let (a, row, step) = match a {
            Left::Packed(a) => (a, LINE, 2 * TILE),
            Left::Rows(a, stride) => (a, stride, BLOCK),
        };
        let mut sums = [[0f32; BLOCK]; BLOCK];
        // SAFETY: the caller promises 32 rows of 32 elements.
        let rows_of_c = |i: usize| unsafe { std::slice::from_raw_parts_mut(c.add(i * stride), BLOCK) };
        if accumulate {
            sums.iter_mut().enumerate().for_each(|(i, sums)| sums.copy_from_slice(rows_of_c(i)));
        }
        for number in 0..depth / BLOCK {
            // SAFETY: two tiles a step at `b`.
            let columns = columns(unsafe { std::slice::from_raw_parts(b.add(number * 2 * TILE), 2 * TILE) });
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: 32 rows, of which each step takes 32 elements.
                let line = unsafe { std::slice::from_raw_parts(a.add(number * step + i * row), BLOCK) };
                add_step(line, &columns, sums);
            }
        }
        sums.iter().enumerate().for_each(|(i, sums)| rows_of_c(i).copy_from_slice(sums));
    }
}

/// For each pair along K, its even and its odd element in 32 columns.
type Columns = [[[f32; BLOCK]; 2]; PAIRS];

/// The two tiles of a step of B, widened.
fn columns(tiles: &[u16]) -> Columns {
    let mut columns = [[[0f32; BLOCK]; 2]; PAIRS];
    for (pair, columns) in columns.iter_mut().enumerate() {
        for (place, columns) in columns.iter_mut().enumerate() {
            for (column, to) in columns.iter_mut().enumerate() {
                *to = widened(tiles[column / 16 * TILE + pair * LINE + column % 16 * 2 + place]);
            }
        }
    }
    columns
}

/// Adds a step of one row of A, 32 elements, times B to a row of C.
fn add_step(line: &[u16], columns: &Columns, to: &mut [f32; BLOCK]) {
    let mut sums = [[0f32; BLOCK]; 2];
    for (pair, columns) in line.as_chunks::<2>().0.iter().zip(columns) {
        for ((&a, columns), sums) in pair.iter().zip(columns).zip(&mut sums) {
            let a = widened(a);
            sums.iter_mut().zip(columns).for_each(|(sum, b)| *sum += a * b);
        }
    }
    for (to, (even, odd)) in to.iter_mut().zip(sums[0].iter().zip(&sums[1])) {
        *to += even + odd;
    }
}

/// A bf16 as f32; zero where it is denormal.
fn widened(cell: u16) -> f32 {
    f32::from_bits(u32::from(if cell & 0x7F80 == 0 { cell & 0x8000 } else { cell }) << 16)
}

fn pack_from<T: Element>(data: &[T], side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
    cells.fill(0);
    for (x, col) in cols.enumerate() {
        for (along, k) in k.clone().enumerate() {
            let (step, place) = (along / BLOCK * 2 * TILE, along % BLOCK);
            let at = match side {
                Side::A => x * LINE + place,
                Side::B => x / 16 * TILE + place / 2 * LINE + x % 16 * 2 + place % 2,
            };
            let element = data[k * m.row_stride + col * m.col_stride];
            cells[step + at] = <bf16 as Element>::from_f32(element.to_f32()).to_bits();
        }
    }
}
