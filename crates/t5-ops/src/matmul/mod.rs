//! Matrix products behind one interface: `C (+)= A B`, any strides in A and B, f32 accumulation.
//!
//! A transpose is a [`Matrix::t`], never a copy. Operands and result are `F32` or `BF16`. Two f32 operands are multiplied in f32. If one
//! operand is bf16, the product is a bf16 product: both are rounded to bf16 as they are packed, and sums are f32. Narrow operands (f16 and
//! quantised ones, a [`Factor`]) count as f32: they are widened a piece at a time as they are packed.
//!
//! | module | |
//! | --- | --- |
//! | `engine` | which operands are packed, in which order blocks are computed, and on which thread; the same for all kernels |
//! | `small_n`, `small_n_bf16` | products with a result of a few columns, whose many rows of A are read where they lie |
//! | `small_m` | products of a few rows with a weight, which is read where it lies |
//! | `skinny`, `skinny_bf16` | products with a result of a few rows or columns, of operands that lie across K and are read where they lie |
//! | `geometry` | the sizes of kernels, and the bytes that follow from them |
//! | `kernel` | the trait of kernels, which compute one block |
//! | `matrix` | operands and results as they lie in memory |
//! | `panels` | packed operands and their memory |
//! | `amx`, `avx512` | kernels for bf16 operands, over the panels of `pairs` |
//! | `tiles` | how panels of bf16 lie, and single blocks, for an operation that packs by itself |
//! | `software` | a kernel of tiles on any machine, for tests |
//! | `turned` | blocks of a product that is computed as its transpose |
//! | `rate` | the rate that the kernels alone reach |
//! | `fma` | kernels for f32 operands, over the vectors of `lanes`, and for bf16 where the above are missing |
//!
//! Shapes: C (M, N), A (M, K), B (K, N).

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod engine;
mod fma;
mod geometry;
mod kernel;
mod lanes;
mod matrix;
#[cfg(target_arch = "x86_64")]
pub(crate) mod pairs;
mod panels;
mod rate;
mod skinny;
#[cfg(target_arch = "x86_64")]
mod skinny_bf16;
mod small_m;
mod small_n;
#[cfg(target_arch = "x86_64")]
mod small_n_bf16;
pub(crate) mod software;
pub(crate) mod tiles;
mod turned;

use candle_core::DType;
use engine::{AddedProduct, Right};
use geometry::Geometry;
pub(crate) use matrix::{Factor, Matrix, MatrixMut, Stored, Threads};
pub(crate) use panels::Buffer;
pub use panels::release_kept;

use crate::isa::{Isa, isa};
use crate::needs::{Kept, elements};
use crate::processor::processor;
use crate::storage::Target;

/// Whether AVX-512 multiplies rows of A in place in blocks of 8 x 48 instead of 12 x 32: in fewer instructions, but the last block may be
/// emptier. Both sum in the same order, so no bit of a product depends on the choice.
fn is_wide_enough(cols: usize) -> bool {
    16 * cols.next_multiple_of(48) <= 17 * cols.next_multiple_of(32)
}

/// Whether products with this many columns are computed in wide blocks on this processor family.
fn is_wide(cols: usize) -> bool {
    cfg!(target_arch = "x86_64") && is_wide_enough(cols)
}

/// Calls `$body` with the type alias `$kernel` set to the kernel of an instruction set for products that round to bf16, or for products of
/// f32, with wide blocks if it has them.
macro_rules! with_kernel {
    ($isa:expr, $rounds:expr, $wide:expr, $kernel:ident, $body:expr) => {
        match ($isa, $rounds, $wide) {
            (Isa::SoftwareTiles, true, _) => {
                type $kernel = software::SoftwareTiles;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx, true, _) => {
                type $kernel = amx::Amx;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, true, _) => {
                type $kernel = avx512::Avx512Bf16;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512, _, true) => {
                type $kernel = fma::Avx512Wide;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512, _, false) => {
                type $kernel = fma::Avx512;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, _, _) => {
                type $kernel = fma::Avx2;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon, _, _) => {
                type $kernel = fma::Neon;
                $body
            }
            (Isa::SoftwareTiles | Isa::Portable, _, _) => {
                type $kernel = fma::Portable;
                $body
            }
        }
    };
}

/// Bytes of the sums of a product (M, K) times (K, N) that this machine cuts along K, because K is longer than one piece can be. If the
/// result is bf16, an f32 for each element of the result holds the sum so far.
///
/// `operands`, `result`: F32 or BF16.
pub(crate) fn bytes_of_sums((m, k, n): (usize, usize, usize), operands: DType, result: DType) -> u64 {
    let longest = Geometry::chosen(processor().instruction_set, operands == DType::BF16, true).depth();
    if result == DType::BF16 && k > longest { elements([m, n, size_of::<f32>()]) } else { 0 }
}

/// Bytes that all threads hold for a layer's output, or for the gradient of its input. This is a product of `rows` rows with a weight of
/// (K, N), whose result has the dtype of the `operands`, plus an added product with a weight of (`added`, N). The threads keep the
/// memory for the next product.
pub(crate) fn product_bytes(rows: usize, (k, added, n): (usize, usize, usize), operands: DType) -> u64 {
    let is_bf16 = operands == DType::BF16;
    let processor = processor();
    let of = |columns| Geometry::of_product(processor.instruction_set, is_bf16, columns);
    let packed = of(n).product((k, added, n), is_bf16, &processor);
    if added == 0 && !is_bf16 && small_n::is_better(rows, n, of(n)) {
        // A weight in codes is packed.
        return packed.max(skinny::kept_bytes(k, operands));
    }
    // A weight that lies across K, or in codes, is packed.
    if is_better_turned(rows, n, of(n), of(rows)) {
        packed.max(of(rows).turned((k, added, rows), &processor))
    } else {
        packed
    }
}

/// Bytes that all threads hold of the larger and of the smaller operand of a product (M, K) times (K, N), such as the gradient of a weight.
/// Both operands lie across K. The threads hold the part of K that this machine sums in one piece, and keep the memory for the next
/// product.
///
/// `operands`: F32 or BF16.
pub(crate) fn across_bytes(size: (usize, usize, usize), operands: DType) -> Kept {
    // Blocks are wide only where rows of A lie along K.
    let geometry = Geometry::chosen(processor().instruction_set, operands == DType::BF16, false);
    let [left, right] = geometry.across(size);
    Kept { larger: left.max(right), smaller: left.min(right), ..Kept::default() }
}

/// Bytes that a thread holds of the skinny operand of a product (M, K) times (K, N) with a skinny result, whose operands lie across K: all of
/// it. The thread keeps the memory for the next product. `None` if both operands are packed.
///
/// `operands`: F32 or BF16.
pub(crate) fn thin_bytes((m, k, n): (usize, usize, usize), operands: DType) -> Option<u64> {
    skinny::is_skinny(m, n).then(|| skinny::kept_bytes(k, operands))
}

/// `C = A B`, or `C += A B` with `accumulate`. If an operand is bf16, both are rounded to bf16.
pub(crate) fn multiply<'a>(
    c: MatrixMut,
    a: impl Into<Factor<'a>>,
    b: impl Into<Factor<'a>>,
    accumulate: bool,
    threads: Threads,
) {
    let (a, b) = (a.into(), b.into());
    let Some((a, b)) = a.wide().zip(b.wide()).filter(|(a, b)| skinny::takes(a, b)) else {
        return multiply_with(isa(), c, a, b, accumulate, threads);
    };
    #[cfg(target_arch = "x86_64")]
    if let Some(operands) = skinny_bf16::operands(isa(), &a, &b) {
        // SAFETY: `isa` names only instruction sets that this machine was found to have.
        return unsafe { skinny_bf16::multiply(&c, operands, accumulate, threads) };
    }
    skinny::multiply(&c, &a, &b, accumulate, threads);
}

/// [`multiply`] in the precision of A: if A is f32, a bf16 B is widened, which changes none of its values.
pub(crate) fn multiply_as_a<'a>(
    c: MatrixMut,
    a: impl Into<Factor<'a>>,
    b: impl Into<Factor<'a>>,
    accumulate: bool,
    threads: Threads,
) {
    multiply_plus_product(c, (a.into(), b.into()), None, accumulate, threads);
}

/// `C (+)= A B + A₂ B₂` in the precision of A. Rows of A₂ lie along its columns, and B₂ lies as B does.
pub(crate) fn multiply_plus_product(
    c: MatrixMut,
    (a, b): (Factor, Factor),
    added: Option<(Factor, Factor)>,
    accumulate: bool,
    threads: Threads,
) {
    let kernel = || with_kernel!(isa(), false, is_wide(b.cols), K, Geometry::for_kernel::<K>());
    let operands = small_n::operands(&a, &b).filter(|_| added.is_none());
    if let Some(operands) = operands.filter(|_| small_n::is_better(a.rows, b.cols, kernel())) {
        return small_n::multiply(&c, operands, accumulate, threads);
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(operands) = small_n_bf16::operands(isa(), &a, &b).filter(|_| added.is_none()) {
        // SAFETY: `isa` names only instruction sets that this machine was found to have.
        return unsafe { small_n_bf16::multiply(&c, operands, accumulate, threads) };
    }
    let Some(rows) = a.wide().filter(|rows| small_m::takes(rows, &b)) else {
        return multiply_rounding(isa(), a.is_bf16(), c, (a, b), added, accumulate, threads);
    };
    small_m::multiply(&c, rows, b, accumulate, threads);
    if let Some((a, b)) = added {
        let rows = a.wide().filter(|rows| small_m::takes(rows, &b));
        small_m::multiply(&c, rows.expect("as few rows as A has, and a B that lies as that one"), b, true, threads);
    }
}

/// [`multiply`] with the instructions of `isa`, which the machine must have.
fn multiply_with<'a>(
    isa: Isa,
    c: MatrixMut,
    a: impl Into<Factor<'a>>,
    b: impl Into<Factor<'a>>,
    accumulate: bool,
    threads: Threads,
) {
    let (a, b) = (a.into(), b.into());
    // A product with a bf16 operand rounds both, on every instruction set.
    multiply_rounding(isa, a.is_bf16() || b.is_bf16(), c, (a, b), None, accumulate, threads);
}

/// The most rows of A with which a product of operands along K is computed as its transpose: the weight is then read in place, and rows of
/// A are packed instead. With more rows, packing the weight takes a small part of the time, and turning the result takes more.
const MAX_TURNED: usize = 128;

/// Rows of A that take about as long as packing the weight. A turned product may be filled up with this many more rows.
const ROWS_OF_PACKING: usize = 12;

/// Whether to compute a product (M, K) times (K, N) as its transpose, if its operands lie along K: decided by the blocks that M fills up.
fn is_better_turned(m: usize, n: usize, of_rows: Geometry, of_columns: Geometry) -> bool {
    let (rows, columns) = (m.next_multiple_of(of_rows.rows()), m.next_multiple_of(of_columns.columns()));
    (1..=MAX_TURNED).contains(&m) && m < n && columns <= rows + ROWS_OF_PACKING
}

/// Whether a product can be computed as its transpose. Without an added product, no bit depends on that: each element is the same sum.
/// With one, the two sums may be added to an element one after the other, or together.
fn can_be_turned(c: &MatrixMut, (a, b): (&Factor, &Factor), added: Option<&AddedProduct>, accumulate: bool) -> bool {
    let along = |m: &Factor| m.wide().is_some_and(|m| m.col_stride == 1);
    // Products that round have sums in pieces of K, which would be added to an f32 result in the same two ways.
    let is_one_sum = !b.rounds || added.is_none() && !(accumulate && matches!(c.data, Target::F32(_)));
    is_one_sum && along(a) && along(&b.t()) && added.is_none_or(|(a, b)| along(a) && along(&b.t()))
}

fn multiply_rounding(
    isa: Isa,
    rounds: bool,
    c: MatrixMut,
    (a, mut b): (Factor, Factor),
    added: Option<(Factor, Factor)>,
    accumulate: bool,
    threads: Threads,
) {
    b.rounds = rounds;
    let added = added.map(|(a, b)| (Factor { rounds, ..a }, Factor { rounds, ..b }));
    // From a packed panel of A, narrow blocks take no more instructions and are faster: dW by 4 to 6 %.
    let wide = a.col_stride == 1 && is_wide(b.cols);
    let geometry = |wide| with_kernel!(isa, rounds, wide, K, Geometry::for_kernel::<K>());
    let is_better = is_better_turned(a.rows, b.cols, geometry(wide), geometry(is_wide(a.rows)));
    if is_better && can_be_turned(&c, (&a, &b), added.as_ref(), accumulate) {
        let added = added.map(|(a, b)| (b.t(), a.t()));
        let right = Right::Factor(Factor { rounds, ..a }.t());
        return product((isa, rounds, is_wide(a.rows)), c.t(), b.t(), (right, added), accumulate, threads);
    }
    product((isa, b.rounds, wide), c, a, (Right::Factor(b), added), accumulate, threads);
}

/// A right-hand operand that is packed once for several products.
pub(crate) struct Packed {
    panels: engine::Packed,
    isa: Isa,
    rounds: bool,
    wide: bool,
}

impl Packed {
    /// Packs B, for products that round to bf16 or do not.
    pub(crate) fn new(b: Matrix, rounds: bool, threads: Threads) -> Self {
        Self::with(isa(), b, rounds, threads)
    }

    /// [`Packed::new`] for the instructions of `isa`, which the machine must have.
    fn with(isa: Isa, b: Matrix, rounds: bool, threads: Threads) -> Self {
        let mut b = Factor::from(b);
        assert!(rounds || !b.is_bf16(), "a bf16 operand makes a product that rounds");
        b.rounds = rounds;
        let wide = is_wide(b.cols);
        // SAFETY: `isa` names only instruction sets that this machine was found to have.
        let panels = unsafe { with_kernel!(isa, rounds, wide, K, engine::Packed::new::<K>(b, threads)) };
        Self { panels, isa, rounds, wide }
    }

    /// Bytes that a packed (`k`, `n`) holds.
    pub(crate) fn bytes(k: usize, n: usize, rounds: bool) -> u64 {
        Geometry::of_product(processor().instruction_set, rounds, n).packed(k, n)
    }
}

/// [`multiply`] with a B that was packed before.
pub(crate) fn multiply_packed<'a>(
    c: MatrixMut,
    a: impl Into<Factor<'a>>,
    b: &Packed,
    accumulate: bool,
    threads: Threads,
) {
    let a = a.into();
    assert_eq!((a.cols, c.cols), b.panels.size(), "rows and columns of B, which was packed");
    multiply_packed_part(c, a, b, accumulate, threads);
}

/// [`multiply`] with the first rows and columns of a B that was packed before: as many rows as A has columns, and the columns of C.
pub(crate) fn multiply_packed_part<'a>(
    c: MatrixMut,
    a: impl Into<Factor<'a>>,
    b: &Packed,
    accumulate: bool,
    threads: Threads,
) {
    let a = a.into();
    let part = (a.cols, c.cols);
    assert!(b.panels.has_part(part.0, part.1), "{part:?} of a packed B of {:?}", b.panels.size());
    product((b.isa, b.rounds, b.wide), c, a, (Right::Packed(&b.panels, part), None), accumulate, threads);
}

/// A product by one kernel: the instruction set, whether operands are rounded to bf16, whether blocks are wide.
fn product(
    (isa, rounds, wide): (Isa, bool, bool),
    c: MatrixMut,
    mut a: Factor,
    (b, added): (Right, Option<AddedProduct>),
    accumulate: bool,
    threads: Threads,
) {
    if let Some((a, b)) = &added {
        let size = (a.rows, a.cols, b.rows, b.cols);
        assert!(a.rows == c.rows && a.cols == b.rows && b.cols == c.cols, "{size:?} of an added product");
    }
    let (b_rows, b_cols) = b.size();
    assert!(
        c.rows == a.rows && c.cols == b_cols && a.cols == b_rows,
        "C ({}, {}) = A ({}, {}) B ({b_rows}, {b_cols})",
        c.rows,
        c.cols,
        a.rows,
        a.cols,
    );
    if c.rows == 0 || c.cols == 0 {
        return;
    }
    if a.cols == 0 {
        if !accumulate {
            c.clear();
        }
        return added.map_or((), |(a, b)| {
            product((isa, rounds, wide), c, a, (Right::Factor(b), None), true, threads);
        });
    }
    let added = added.filter(|(a, _)| a.cols > 0);
    a.rounds = rounds;
    // SAFETY: `isa` names only instruction sets that this machine was found to have.
    unsafe { with_kernel!(isa, rounds, wide, K, engine::multiply::<K>(&c, a, b, added, accumulate, threads)) }
}

/// The rate of the kernel for bf16 (or f32) operands on the calling thread, in operations a second. No product exceeds it: the kernel reads
/// from the first-level cache only.
pub(crate) fn kernel_rate(bf16: bool) -> f64 {
    // SAFETY: `isa` names only instruction sets that this machine was found to have.
    unsafe { with_kernel!(isa(), bf16, true, K, rate::block_rate::<K>()) }
}

#[cfg(test)]
mod tests;
