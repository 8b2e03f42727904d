//! f32 kernels: a block of rows by two or three vectors of columns, its sums in registers, one fused multiply-add for each sum and k. The
//! same code for every instruction set, over vectors of its width.
//!
//! A core with one busy thread is bound by its multiply-add units. A core that two threads share is bound by instructions: there three
//! vectors of columns, which take fewer loads for the same number of sums, and few addresses matter.
//!
//! | | vector | block | registers |
//! | --- | --- | --- | --- |
//! | AVX-512 | 16 | 8 x 48 | 24 sums, 3 of B, 1 of A; of 32 |
//! | AVX-512, from panels of A and where 48 divides badly | 16 | 12 x 32 | 24 sums, 2 of B, 1 of A; of 32 |
//! | AVX2 + FMA | 8 | 6 x 16 | 12 sums, 2 of B, 1 of A; of 16 |
//! | NEON | 4 | 12 x 8 | 24 sums, 2 of B, 1 of A; of 32 |
//! | any | 4 | 4 x 8 | multiplies, then adds |
//!
//! Operands in bf16 are widened as they are packed; with a bf16 operand on the other side, f32 is rounded to
//! bf16 first, so that a product of mixed types is the same on machines with and without bf16 instructions.

use std::ops::Range;

use half::bf16;

use super::kernel::{Kernel, Rows, Side};
use super::lanes::{Four, Lanes};
use super::matrix::Matrix;
use super::turned::turn;
use crate::storage::{Element, Operand};

/// The most of K in a panel: with AVX-512 a panel of B then has 192 KiB, and the rows of A 32 KiB.
pub(super) const DEPTH: usize = 1024;

#[inline(always)]
unsafe fn block<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    a: Rows<f32>,
    b: *const f32,
    depth: usize,
    c: *mut f32,
    stride: usize,
    accumulate: bool,
) {
    // SAFETY: by the promise of `Kernel::block`.
    unsafe {
        let mut sums = [[V::zero(); VECTORS]; ROWS];
        if accumulate {
            for i in 0..ROWS {
                for j in 0..VECTORS {
                    V::prefetch(c.wrapping_add(i * stride + j * V::WIDTH));
                }
            }
        }
        if a.step == 1 {
            along_rows::<V, ROWS, VECTORS>(a, b, depth, &mut sums);
        } else {
            of_panel::<V, ROWS, VECTORS>(a.data, b, depth, &mut sums);
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (j, sum) in sums.into_iter().enumerate() {
                let to = c.add(i * stride + j * V::WIDTH);
                let sum = if accumulate { V::load(to).add(sum) } else { sum };
                sum.store(to);
            }
        }
    }
}

/// Values of K between two updates of the pointers.
const TOGETHER: usize = 4;

/// Elements of a line of the cache.
const LINE: usize = 16;
/// A panel of B is prefetched this many values of K ahead. It comes from the second-level cache, in lines that are used once, and not every
/// processor prefetches them by itself: products with AVX-512 gain 2 to 8 % on a core with 1 MiB of that cache.
const AHEAD: usize = 8;

/// The sums of a block from a packed panel of A.
///
/// In a loop over single values of K, loop instructions would be a sixth of all AVX2 instructions. A core that takes in four a cycle would
/// then have none to spare while its units multiply.
///
/// # Safety
///
/// As [`Kernel::block`].
#[inline(always)]
unsafe fn of_panel<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    mut a: *const f32,
    mut b: *const f32,
    depth: usize,
    sums: &mut [[V; VECTORS]; ROWS],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        for _ in 0..depth / TOGETHER {
            for k in 0..TOGETHER {
                multiply_add::<V, ROWS, VECTORS>(|i| a.add(k * ROWS + i), b.add(k * VECTORS * V::WIDTH), sums);
            }
            a = a.add(TOGETHER * ROWS);
            b = b.add(TOGETHER * VECTORS * V::WIDTH);
        }
        for k in 0..depth % TOGETHER {
            multiply_add::<V, ROWS, VECTORS>(|i| a.add(k * ROWS + i), b.add(k * VECTORS * V::WIDTH), sums);
        }
    }
}

/// Computes the sums of a block, one value of K after the other, along the rows of A in place.
///
/// Twelve rows have more addresses than there are registers. A compiler would add up the stride row after row: a dependent addition for
/// each two multiply-adds. So every third row has a base here. The two rows after it are one and two strides away, which an operand can
/// express, and bases advance by several values of K at once.
///
/// # Safety
///
/// As [`Kernel::block`].
#[inline(always)]
unsafe fn along_rows<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    a: Rows<f32>,
    b: *const f32,
    depth: usize,
    sums: &mut [[V; VECTORS]; ROWS],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut bases: [*const f32; 4] = std::array::from_fn(|j| a.data.wrapping_add(3 * j * a.row));
        let mut b = b;
        for _ in 0..depth / TOGETHER {
            bases = bases.map(opaque);
            for k in 0..TOGETHER {
                multiply_add::<V, ROWS, VECTORS>(
                    |i| bases[i / 3].add(i % 3 * a.row + k),
                    b.add(k * VECTORS * V::WIDTH),
                    sums,
                );
            }
            bases = bases.map(|base| base.wrapping_add(TOGETHER));
            b = b.add(TOGETHER * VECTORS * V::WIDTH);
        }
        for k in 0..depth % TOGETHER {
            multiply_add::<V, ROWS, VECTORS>(
                |i| bases[i / 3].add(i % 3 * a.row + k),
                b.add(k * VECTORS * V::WIDTH),
                sums,
            );
        }
    }
}

/// Adds, for one value of K, the products of an element of each row and the vectors of columns.
#[inline(always)]
unsafe fn multiply_add<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    a: impl Fn(usize) -> *const f32,
    b: *const f32,
    sums: &mut [[V; VECTORS]; ROWS],
) {
    // SAFETY: by the promise of `Kernel::block`.
    unsafe {
        let width = VECTORS * V::WIDTH;
        for line in (0..width).step_by(LINE) {
            V::prefetch(b.wrapping_add(AHEAD * width + line));
        }
        let b: [V; VECTORS] = std::array::from_fn(|j| V::load(b.add(j * V::WIDTH)));
        for (i, sums) in sums.iter_mut().enumerate() {
            let a = V::splat(a(i));
            for (sum, &b) in sums.iter_mut().zip(&b) {
                *sum = sum.multiply_add(a, b);
            }
        }
    }
}

/// A pointer whose relation to others the compiler does not know.
// Nothing is read or written through it, which the lint asks us to make sure of.
#[allow(clippy::pointers_in_nomem_asm_block)]
#[inline(always)]
fn opaque(pointer: *const f32) -> *const f32 {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    let pointer = {
        let same: *const f32;
        // SAFETY: no instruction.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) pointer => same, options(pure, nomem, nostack, preserves_flags));
        }
        same
    };
    pointer
}

fn direct(a: &Matrix) -> Option<Rows<f32>> {
    match a.data {
        Operand::F32(data) if a.col_stride == 1 && !a.rounds => {
            Some(Rows { data: data.as_ptr(), row: a.row_stride, step: a.col_stride })
        }
        _ => None,
    }
}

/// Calls `$body` with the elements of a matrix and the function that converts each to f32.
macro_rules! with_conversion {
    ($matrix:expr, $data:ident, $convert:ident, $body:expr) => {
        match $matrix.data {
            Operand::F32($data) if $matrix.rounds => {
                let $convert = rounded;
                $body
            }
            Operand::F32($data) => {
                let $convert = |x: f32| x;
                $body
            }
            Operand::Bf16($data) => {
                let $convert = |x: bf16| x.to_f32();
                $body
            }
        }
    };
}

/// See [`Kernel::pack`]: for each k, `width` cells.
///
/// # Safety
///
/// The machine has the instructions of `V`.
#[inline(always)]
unsafe fn pack<V: Lanes>(m: &Matrix, cols: Range<usize>, k: Range<usize>, width: usize, panel: &mut [f32]) {
    // SAFETY: by the caller's promise.
    with_conversion!(m, data, convert, unsafe { pack_from::<V, _>(data, m, cols, k, width, panel, convert) });
}

/// Cells between two converted rows of A: rows a power of two apart would fall into few sets of the cache.
pub(super) const BETWEEN_ROWS: usize = 16;

/// See [`Kernel::rows`]. Elements along K are converted in place. Transposing them as well took two fifths of a bf16 product's time on a
/// machine without instructions for bf16.
#[inline(always)]
fn rows(m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [f32]) -> Rows<f32> {
    let row = k.len() + BETWEEN_ROWS;
    with_conversion!(m, data, convert, {
        for (col, cells) in cols.zip(cells.chunks_exact_mut(row)) {
            let from = &data[col * m.col_stride + k.start..][..k.len()];
            for (to, &from) in cells[..k.len()].iter_mut().zip(from) {
                *to = convert(from);
            }
        }
    });
    Rows { data: cells.as_ptr(), row, step: 1 }
}

/// Rounds to the nearest value of bf16.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    <bf16 as Element>::from_f32(x).to_f32()
}

/// Converts all whole runs of `N`; returns the rest. A run is read as a whole before it is written. Otherwise the compiler could not
/// vectorise, because source and target may be the same memory for all it knows.
#[inline(always)]
fn convert_by<'a, const N: usize, T: Copy>(
    from: &'a [T],
    to: &'a mut [f32],
    convert: &impl Fn(T) -> f32,
) -> (&'a [T], &'a mut [f32]) {
    let ((from, from_rest), (to, to_rest)) = (from.as_chunks::<N>(), to.as_chunks_mut::<N>());
    for (&from, to) in from.iter().zip(to) {
        let mut run = [0f32; N];
        for (run, from) in run.iter_mut().zip(from) {
            *run = convert(from);
        }
        *to = run;
    }
    (from_rest, to_rest)
}

/// Elements along K are read in runs of this many, so that the lines of the panel are written while they are in the cache.
const RUN: usize = 16;

#[inline(always)]
unsafe fn pack_from<V: Lanes, T: Copy>(
    data: &[T],
    m: &Matrix,
    cols: Range<usize>,
    k: Range<usize>,
    width: usize,
    panel: &mut [f32],
    convert: impl Fn(T) -> f32,
) {
    let count = cols.len();
    let assume_filled = match m.data {
        Operand::F32(data) if !m.rounds => Some(data),
        _ => None,
    };
    if count < width {
        panel.fill(0.0);
    }
    if m.col_stride == 1 {
        let start = |k: usize| k * m.row_stride + cols.start;
        if count == width {
            // `width` is a constant: copying a row is a few vectors, and would be a call for a variable length.
            for (k, cells) in k.zip(panel.chunks_exact_mut(width)) {
                let to = &mut cells[..width];
                if let Some(data) = assume_filled {
                    to.copy_from_slice(&data[start(k)..][..width]);
                } else if width.is_multiple_of(16) {
                    for (to, &from) in to.iter_mut().zip(&data[start(k)..][..width]) {
                        *to = convert(from);
                    }
                } else {
                    let (from, to) = convert_by::<4, T>(&data[start(k)..][..width], to, &convert);
                    convert_by::<1, T>(from, to, &convert);
                }
            }
        } else {
            for (k, cells) in k.zip(panel.chunks_exact_mut(width)) {
                for (to, &from) in cells.iter_mut().zip(&data[start(k)..][..count]) {
                    *to = convert(from);
                }
            }
        }
        return;
    }
    for first in k.clone().step_by(RUN) {
        let run = RUN.min(k.end - first);
        let cells = &mut panel[(first - k.start) * width..];
        let read = |j: usize| &data[(cols.start + j) * m.col_stride + first..][..run];
        let mut j = 0;
        while run == RUN && width.is_multiple_of(V::WIDTH) && j + V::WIDTH <= count {
            // A square at a time, turned in registers.
            let mut converted = [[0f32; RUN]; RUN];
            let (from, stride) = match assume_filled {
                Some(data) => (data[(cols.start + j) * m.col_stride + first..].as_ptr(), m.col_stride),
                None => {
                    for (i, to) in converted.iter_mut().take(V::WIDTH).enumerate() {
                        let from: &[T; RUN] = read(j + i).first_chunk().expect("a whole run");
                        for (to, &from) in to.iter_mut().zip(from) {
                            *to = convert(from);
                        }
                    }
                    (converted.as_flattened().as_ptr(), RUN)
                }
            };
            for i in (0..RUN).step_by(V::WIDTH) {
                let to = cells[i * width + j..].as_mut_ptr();
                // SAFETY: `WIDTH` rows of `RUN`, and as many rows of the panel.
                unsafe { V::turn(from.add(i), stride, to, width) };
            }
            j += V::WIDTH;
        }
        for j in j..count {
            for (i, &from) in read(j).iter().enumerate() {
                cells[i * width + j] = convert(from);
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn write_bf16(
    block: &[f32],
    width: usize,
    c: *mut bf16,
    stride: usize,
    (rows, cols): (usize, usize),
    accumulate: bool,
) {
    for (i, block) in block.chunks_exact(width).take(rows).enumerate() {
        // SAFETY: `cols` elements of row i of C, by the caller's promise.
        let to = unsafe { std::slice::from_raw_parts_mut(c.add(i * stride), cols) };
        for (to, &x) in to.iter_mut().zip(block) {
            let before = if accumulate { Element::to_f32(*to) } else { 0.0 };
            *to = <bf16 as Element>::from_f32(before + x);
        }
    }
}

/// A kernel over vectors of type `$vector`, compiled with the features that it needs.
macro_rules! kernel {
    ($name:ident, $vector:ty, $rows:literal, $vectors:literal $(, $feature:literal)?) => {
        pub(super) struct $name;

        impl Kernel for $name {
            type Cell = f32;
            const ROWS: usize = $rows;
            const COLS: usize = $vectors * <$vector>::WIDTH;
            const STEP: usize = 1;
            const DEPTH: usize = DEPTH;
            const SLICE: usize = DEPTH;

            unsafe fn enter() -> Self {
                Self
            }

            fn direct(a: &Matrix) -> Option<Rows<f32>> {
                direct(a)
            }

            unsafe fn pack(side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [f32]) {
                $(#[target_feature(enable = $feature)])?
                unsafe fn with_features(side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [f32]) {
                    // SAFETY: by the caller's promise.
                    unsafe {
                        match side {
                            Side::A => pack::<$vector>(m, cols, k, $rows, cells),
                            Side::B => pack::<$vector>(m, cols, k, $vectors * <$vector>::WIDTH, cells),
                        }
                    }
                }
                // SAFETY: the caller promises that the machine has the instructions.
                unsafe { with_features(side, m, cols, k, cells) }
            }

            const BETWEEN_ROWS: usize = BETWEEN_ROWS;

            unsafe fn rows(m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [f32]) -> Option<Rows<f32>> {
                $(#[target_feature(enable = $feature)])?
                unsafe fn with_features(m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [f32]) -> Rows<f32> {
                    rows(m, cols, k, cells)
                }
                let is_offered = m.row_stride == 1 && cols.len() == $rows;
                // SAFETY: the caller promises that the machine has the instructions.
                is_offered.then(|| unsafe { with_features(m, cols, k, cells) })
            }

            unsafe fn block(
                &self,
                a: Rows<f32>,
                b: *const f32,
                depth: usize,
                c: *mut f32,
                stride: usize,
                accumulate: bool,
            ) {
                $(#[target_feature(enable = $feature)])?
                unsafe fn with_features(
                    a: Rows<f32>,
                    b: *const f32,
                    depth: usize,
                    c: *mut f32,
                    stride: usize,
                    accumulate: bool,
                ) {
                    // SAFETY: by the caller's promise.
                    unsafe { block::<$vector, $rows, $vectors>(a, b, depth, c, stride, accumulate) }
                }
                // SAFETY: by the caller's promise.
                unsafe { with_features(a, b, depth, c, stride, accumulate) }
            }

            unsafe fn turn_block(block: *const f32, to: *mut f32) {
                $(#[target_feature(enable = $feature)])?
                unsafe fn with_features(block: *const f32, to: *mut f32) {
                    // SAFETY: by the caller's promise.
                    unsafe { turn::<$vector, $rows, { $vectors * <$vector>::WIDTH }>(block, to) }
                }
                // SAFETY: by the caller's promise.
                unsafe { with_features(block, to) }
            }

            unsafe fn write_bf16(
                &self,
                block: &[f32],
                c: *mut bf16,
                stride: usize,
                size: (usize, usize),
                accumulate: bool,
            ) {
                $(#[target_feature(enable = $feature)])?
                unsafe fn with_features(
                    block: &[f32],
                    c: *mut bf16,
                    stride: usize,
                    size: (usize, usize),
                    accumulate: bool,
                ) {
                    // SAFETY: by the caller's promise.
                    unsafe { write_bf16(block, $vectors * <$vector>::WIDTH, c, stride, size, accumulate) }
                }
                // SAFETY: by the caller's promise.
                unsafe { with_features(block, c, stride, size, accumulate) }
            }
        }
    };
}

kernel!(Portable, Four, 4, 2);
#[cfg(target_arch = "x86_64")]
kernel!(Avx512Wide, std::arch::x86_64::__m512, 8, 3, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma");
#[cfg(target_arch = "x86_64")]
kernel!(Avx512, std::arch::x86_64::__m512, 12, 2, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma");
#[cfg(target_arch = "x86_64")]
kernel!(Avx2, std::arch::x86_64::__m256, 6, 2, "avx2,fma");
#[cfg(target_arch = "aarch64")]
kernel!(Neon, std::arch::aarch64::float32x4_t, 12, 2);
