//! [`super::small_n`] in bf16 on AVX512-BF16: rows of A are read in place, in pairs along K. Only the existing columns are computed,
//! half of a block of the kernel.
//!
//! Each element is one sum along K in the order of the kernel, and has the same bits as in the kernel.

use std::arch::x86_64::{
    __m512bh, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::ops::Range;

use half::bf16;

use super::kernel::Side;
use super::matrix::{Factor, Matrix, MatrixMut, Stored, Strides, Threads};
use super::pairs;
use super::panels::Buffer;
use super::skinny::MOST;
use super::small_m::MAX_ROWS;
use super::small_n::in_rows;
use super::tiles::{BLOCK, DEPTH, LINE, SLICE, TILE};
use crate::cache::prefetch_read;
use crate::isa::Isa;
use crate::storage::Operand;

/// Rows of A at a time: enough sums to hide how long one takes.
const TOGETHER: usize = 16;

/// Returns the operands of `A B`, if they are multiplied here.
pub(super) fn operands<'a>(isa: Isa, a: &Factor<'a>, b: &Factor<'a>) -> Option<(Strides<&'a [bf16]>, Matrix<'a>)> {
    let Stored::Wide(Operand::Bf16(rows)) = a.data else { return None };
    let is_taken =
        a.rows > MAX_ROWS && (1..=MOST).contains(&b.cols) && a.col_stride == 1 && (1..=DEPTH).contains(&a.cols);
    b.wide().filter(|_| isa == Isa::Avx512Bf16 && is_taken).map(|b| (a.with(rows), b))
}

/// `C (+)= A B`, B rounded to bf16.
///
/// # Safety
///
/// The machine has AVX512-BF16.
pub(super) unsafe fn multiply(c: &MatrixMut, (a, b): (Strides<&[bf16]>, Matrix), accumulate: bool, threads: Threads) {
    assert!(c.rows == a.rows && c.cols == b.cols && a.cols == b.rows, "the sizes of a product");
    let mut packed = Buffer::new::<u16>(a.cols.next_multiple_of(BLOCK) * BLOCK);
    // SAFETY: by the caller's promise.
    unsafe { pairs::pack(Side::B, &b, 0..b.cols, 0..b.rows, packed.cells()) };
    let packed = packed.read::<u16>();
    // SAFETY: by the caller's promise.
    let add_up = |rows: Range<usize>, sums: &mut _| unsafe { add_up(a, rows.start, packed, sums) };
    in_rows::<TOGETHER>(c, a.cols, accumulate, threads, add_up);
}

/// Sums over K of [`TOGETHER`] rows of A from `first` on times every column. If there are fewer rows, the last one is multiplied again.
///
/// # Safety
///
/// The machine has AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_up(a: Strides<&[bf16]>, first: usize, packed: &[u16], sums: &mut [[f32; MOST]; TOGETHER]) {
    let row = |i: usize| &a.data[(first + i).min(a.rows - 1) * a.row_stride..][..a.cols];
    let rows: [&[bf16]; TOGETHER] = std::array::from_fn(row);
    for (number, steps) in packed.as_chunks::<{ 2 * TILE }>().0.chunks(SLICE / LINE).enumerate() {
        let mut lanes = [_mm512_setzero_ps(); TOGETHER];
        for (step, panel) in steps.iter().enumerate() {
            let start = number * SLICE + step * LINE;
            let k = start..a.cols.min(start + LINE);
            let mut rest = [[bf16::ZERO; LINE]; TOGETHER];
            let lines: [*const bf16; TOGETHER] = if k.len() == LINE {
                rows.map(|row| row[k.clone()].as_ptr())
            } else {
                rest.iter_mut().zip(rows).for_each(|(rest, row)| rest[..k.len()].copy_from_slice(&row[k.clone()]));
                std::array::from_fn(|i| rest[i].as_ptr())
            };
            for line in lines {
                prefetch_read(line.wrapping_add(TOGETHER * a.row_stride));
            }
            for (pair, columns) in panel[..TILE].as_chunks::<LINE>().0.iter().enumerate() {
                // SAFETY: a line is 64 bytes.
                let columns = unsafe { columns.as_ptr().cast::<__m512bh>().read_unaligned() };
                for (line, sum) in lines.iter().zip(&mut lanes) {
                    // SAFETY: pair `pair` of a line, whose 64 bytes are reinterpreted.
                    let pair: __m512bh = unsafe {
                        std::mem::transmute(_mm512_set1_epi32(line.cast::<i32>().add(pair).read_unaligned()))
                    };
                    // The last operand is broadcast as it is read. A separate broadcast would take a third of the time of such a product.
                    *sum = _mm512_dpbf16_ps(*sum, columns, pair);
                }
            }
        }
        for (sums, lanes) in sums.iter_mut().zip(lanes) {
            // SAFETY: sixteen elements.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(sums.as_ptr()), lanes)) };
        }
    }
}
