use std::ops::Range;

use half::bf16;

use super::*;
use crate::narrow::{Form, Narrow};
use crate::parallel::Shared;
use crate::processor::InstructionSet;
use crate::storage::{Element, Operand};
use crate::testing::Numbers;

mod narrow_results;

/// A matrix stored with a stride, by rows or transposed, and its values.
struct Stored<T> {
    data: Vec<T>,
    rows: usize,
    cols: usize,
    transposed: bool,
    stride: usize,
}

impl<T: Element> Stored<T> {
    fn random(rows: usize, cols: usize, transposed: bool, gap: usize, seed: u64) -> Self {
        let (outer, inner) = if transposed { (cols, rows) } else { (rows, cols) };
        let stride = inner + gap;
        let mut numbers = Numbers::new(seed);
        let data = (0..outer * stride).map(|_| T::from_f32(numbers.next() as f32)).collect();
        Self { data, rows, cols, transposed, stride }
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        let (i, j) = if self.transposed { (j, i) } else { (i, j) };
        f64::from(self.data[i * self.stride + j].to_f32())
    }

    fn matrix(&self) -> Matrix<'_> {
        let data = T::operand(&self.data);
        if self.transposed {
            Matrix::strided(data, self.cols, self.rows, self.stride).t()
        } else {
            Matrix::strided(data, self.rows, self.cols, self.stride)
        }
    }
}

const SIZES: [(usize, usize, usize); 15] = [
    (1, 1, 1),
    (7, 5, 3),
    (16, 16, 32),
    (17, 33, 31),
    (32, 32, 64),
    (65, 64, 7),
    (64, 1, 65),
    (1, 128, 100),
    (100, 97, 129),
    (256, 48, 256),
    (33, 300, 513),
    (300, 257, 65),
    // Rows of A are copied beside blocks: one slice of K, two slices, and three slices with a shorter last one.
    (130, 330, 128),
    (97, 140, 1024),
    (70, 290, 1088),
];

type Multiply<'a> = &'a dyn Fn(MatrixMut, Matrix, Matrix, bool, Threads);

/// Checks a product on all sizes, orientations and strides, with and without accumulation.
fn check_all<A: Element, B: Element, C: Element>(tolerance: f64, multiply: Multiply) {
    for (case, (m, n, k)) in SIZES.into_iter().enumerate() {
        for variant in 0..8 {
            let [a_t, b_t, gap] = [1, 2, 4].map(|bit| variant & bit != 0);
            let gap = if gap { 5 } else { 0 };
            let a = Stored::<A>::random(m, k, a_t, gap, 1 + case as u64);
            let b = Stored::<B>::random(k, n, b_t, gap, 100 + case as u64);
            let before = Stored::<C>::random(m, n, false, gap, 200 + case as u64);
            let product = product(&a, &b);
            for (accumulate, threads) in [(false, Threads::One), (true, Threads::One), (true, Threads::All)] {
                let mut c = before.data.clone();
                // SAFETY: `c` lives to the end of this block and nothing else writes it.
                let target = unsafe { MatrixMut::part(Shared::new(&mut c), 0, m, n, n + gap) };
                multiply(target, a.matrix(), b.matrix(), accumulate, threads);
                let what = format!("({m}, {n}, {k}) variant {variant} {accumulate} {threads:?}");
                for i in 0..m {
                    for j in 0..n {
                        let expected = product[i * n + j] + if accumulate { before.at(i, j) } else { 0.0 };
                        let got = f64::from(c[i * (n + gap) + j].to_f32());
                        let close = (got - expected).abs() <= tolerance * (1.0 + (k as f64).sqrt());
                        assert!(close, "{what}: ({i}, {j}): expected {expected}, got {got}");
                    }
                    for j in n..if i + 1 < m { n + gap } else { n } {
                        let at = i * (n + gap) + j;
                        assert_eq!(c[at].to_f32(), before.data[at].to_f32(), "{what}: written between rows");
                    }
                }
            }
        }
    }
}

/// The product in f64, rows one after the other.
fn product<A: Element, B: Element>(a: &Stored<A>, b: &Stored<B>) -> Vec<f64> {
    let mut product = vec![0.0; a.rows * b.cols];
    let mut row = vec![0.0; b.cols];
    for l in 0..a.cols {
        for (j, b_value) in row.iter_mut().enumerate() {
            *b_value = b.at(l, j);
        }
        for (i, product) in product.chunks_exact_mut(b.cols).enumerate() {
            let a_value = a.at(i, l);
            for (product, b_value) in product.iter_mut().zip(&row) {
                *product += a_value * b_value;
            }
        }
    }
    product
}

/// Every way of multiplying that this machine has.
fn instruction_sets() -> impl Iterator<Item = Isa> {
    crate::isa::ALL.into_iter().filter(|&isa| isa <= crate::isa::detect())
}

#[test]
fn f32_products_of_every_shape_and_stride() {
    // AVX512-BF16 and tiles have no f32 products of their own.
    for isa in instruction_sets().filter(|isa| !["software-tiles", "avx512bf16", "amx"].contains(&isa.name())) {
        let multiply = |c: MatrixMut, a: Matrix, b: Matrix, accumulate, threads| {
            multiply_with(isa, c, a, b, accumulate, threads);
        };
        check_all::<f32, f32, f32>(2e-6, &multiply);
        check_all::<f32, f32, bf16>(1e-2, &multiply);
    }
}

#[test]
fn the_number_of_columns_shows_in_no_bit_of_a_column() {
    let (m, k) = (70, 1100);
    let a = Stored::<f32>::random(m, k, false, 0, 1);
    let b = Stored::<f32>::random(k, 144, false, 0, 2);
    let product = |isa, cols: usize| {
        let mut c = vec![0f32; m * cols];
        let b = Matrix::strided(Operand::F32(&b.data), k, cols, 144);
        multiply_with(isa, MatrixMut::new(&mut c, m, cols), a.matrix(), b, false, Threads::All);
        c
    };
    for isa in instruction_sets() {
        let all = product(isa, 144);
        for cols in [1, 32, 48, 64, 100] {
            let some = product(isa, cols);
            for (some, all) in some.chunks_exact(cols).zip(all.chunks_exact(144)) {
                assert_eq!(some, &all[..cols], "{isa:?}, {cols} columns");
            }
        }
    }
}

#[test]
fn bf16_products_of_every_shape_and_stride() {
    for isa in instruction_sets() {
        let multiply = |c: MatrixMut, a: Matrix, b: Matrix, accumulate, threads| {
            multiply_with(isa, c, a, b, accumulate, threads);
        };
        check_all::<bf16, bf16, f32>(2e-6, &multiply);
        check_all::<bf16, bf16, bf16>(1e-2, &multiply);
        check_all::<bf16, f32, bf16>(1e-2, &multiply);
        check_all::<f32, bf16, f32>(1e-2, &multiply);
    }
}

#[test]
fn products_larger_than_the_packing_buffers() {
    // K is so long that a panel is larger than a run of B. M (N) and K are so large that A (B) is packed in two groups.
    for (m, n, k, a_transposed, b_transposed) in
        [(40, 70, 20_000, false, true), (520, 40, 9_000, true, true), (40, 520, 9_000, false, false)]
    {
        let a = Stored::<bf16>::random(m, k, a_transposed, 0, 1);
        let b = Stored::<bf16>::random(k, n, b_transposed, 0, 2);
        let mut results = instruction_sets().map(|isa| {
            let mut c = vec![0f32; m * n];
            multiply_with(isa, MatrixMut::new(&mut c, m, n), a.matrix(), b.matrix(), false, Threads::All);
            (isa, c)
        });
        let (_, expected) = results.next().expect("the portable path");
        for (isa, got) in results {
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert!((got - expected).abs() < 1e-3, "{isa:?}: element {i}: expected {expected}, got {got}");
            }
        }
    }
}

#[test]
fn a_packed_operand_gives_the_bits_of_one_that_is_packed_on_the_way() {
    // In the last case K is cut into slices.
    for (case, (m, n, k)) in SIZES.into_iter().chain([(40, 70, 9_000)]).enumerate() {
        for b_transposed in [false, true] {
            let a = Stored::<f32>::random(m, k, false, 0, 1 + case as u64);
            let a_bf16 = Stored::<bf16>::random(m, k, true, 0, 1 + case as u64);
            let b = Stored::<f32>::random(k, n, b_transposed, 3, 100 + case as u64);
            for isa in instruction_sets() {
                for a in [a.matrix(), a_bf16.matrix()] {
                    let packed = Packed::with(isa, b.matrix(), Factor::from(a).is_bf16(), Threads::All);
                    let (mut expected, mut got) = (vec![1f32; m * n], vec![1f32; m * n]);
                    multiply_with(isa, MatrixMut::new(&mut expected, m, n), a, b.matrix(), true, Threads::All);
                    multiply_packed(MatrixMut::new(&mut got, m, n), a, &packed, true, Threads::One);
                    assert_eq!(got, expected, "{isa:?} ({m}, {n}, {k})");
                }
            }
        }
    }
}

#[test]
fn rows_that_are_read_where_they_lie_have_the_bits_of_packed_ones() {
    for (case, (m, n, k)) in SIZES.into_iter().chain([(40, 70, 9_000), (70, 64, 144)]).enumerate() {
        let a = Stored::<bf16>::random(m, k, false, 5, 1 + case as u64);
        // The same values in f32 are rounded as they are packed.
        let packed: Vec<f32> = a.data.iter().map(|x| x.to_f32()).collect();
        let packed = Matrix::strided(Operand::F32(&packed), m, k, a.stride);
        let b = Stored::<bf16>::random(k, n, true, 0, 100 + case as u64);
        for isa in instruction_sets() {
            let product = |a: Matrix| {
                let mut c = vec![1f32; m * n];
                multiply_with(isa, MatrixMut::new(&mut c, m, n), a, b.matrix(), true, Threads::All);
                c
            };
            assert_eq!(product(a.matrix()), product(packed), "{isa:?} ({m}, {n}, {k})");
        }
    }
}

#[test]
fn panels_that_are_over_have_two_threads_each_or_are_not_shared() {
    for threads in 1..20 {
        for panels in 0..60 {
            let (even, team) = engine::shares(panels, threads);
            let over = panels - even;
            if over == 0 {
                assert!(panels % threads == 0 || 2 * (panels % threads) > threads, "{panels} of {threads}");
            } else {
                assert_eq!(even % threads, 0, "{panels} of {threads}");
                assert!(team >= 2 && over * team <= threads, "{panels} of {threads}: {over} by {team}");
            }
        }
    }
}

#[test]
fn a_product_on_one_thread_has_the_bits_of_one_on_all() {
    let a = Stored::<bf16>::random(300, 200, false, 0, 1);
    let b = Stored::<f32>::random(200, 500, true, 0, 2);
    for isa in instruction_sets() {
        let run = |threads| {
            let mut c = vec![0f32; 300 * 500];
            multiply_with(isa, MatrixMut::new(&mut c, 300, 500), a.matrix(), b.matrix(), false, threads);
            c
        };
        assert_eq!(run(Threads::One), run(Threads::All), "{isa:?}");
    }
}

#[test]
fn mixed_products_round_the_f32_operand_to_bf16() {
    let a = [1.0f32 + 1.0 / 1024.0];
    let b = [bf16::ONE];
    let mut c = [0f32];
    let target = MatrixMut::new(&mut c, 1, 1);
    multiply(target, Matrix::new((&a[..]).into(), 1, 1), Matrix::new((&b[..]).into(), 1, 1), false, Threads::One);
    assert_eq!(c[0], 1.0);
}

#[test]
fn an_empty_sum_clears_or_keeps_the_result() {
    let mut c = [3f32; 4];
    let empty: &[f32] = &[];
    let (a, b) = (Matrix::new(empty.into(), 2, 0), Matrix::new(empty.into(), 0, 2));
    multiply(MatrixMut::new(&mut c, 2, 2), a, b, true, Threads::All);
    assert_eq!(c, [3.0; 4]);
    multiply(MatrixMut::new(&mut c, 2, 2), a, b, false, Threads::All);
    assert_eq!(c, [0.0; 4]);
}

#[test]
fn narrow_operands_give_the_bits_of_wide_ones() {
    // In the last case K is cut into slices.
    for (case, (m, n, k)) in SIZES.into_iter().chain([(40, 70, 9_000), (3, 1030, 200)]).enumerate() {
        let number = Stored::<f32>::random(k, n, false, 0, 100 + case as u64).data;
        let narrow: Vec<half::f16> = number.iter().map(|&x| half::f16::from_f32(x)).collect();
        let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
        let narrow = super::Stored::Narrow(Narrow::new(Form::F16(&narrow), k * n));
        for isa in instruction_sets() {
            for rounds in [false, true] {
                let operand = |turned: bool| {
                    let (rows, cols) = if turned { (n, k) } else { (k, n) };
                    let both =
                        (Factor::new(narrow, rows, cols), Factor::from(Matrix::new((&wide[..]).into(), rows, cols)));
                    if turned { (both.0.t(), both.1.t()) } else { both }
                };
                let other = Stored::<f32>::random(m, k, false, 0, 1 + case as u64);
                for (narrow, wide) in [operand(false), operand(true)] {
                    let right = |b: Factor, threads| {
                        let mut c = vec![1f32; m * n];
                        let operands = (other.matrix().into(), b);
                        multiply_rounding(isa, rounds, MatrixMut::new(&mut c, m, n), operands, None, true, threads);
                        c
                    };
                    let expected = right(wide, Threads::All);
                    assert_eq!(right(narrow, Threads::All), expected, "{isa:?} ({m}, {n}, {k})");
                    assert_eq!(right(narrow, Threads::One), expected, "{isa:?} ({m}, {n}, {k})");
                    // The same on the left: C turned.
                    let packed = Packed::with(isa, other.matrix().t(), rounds, Threads::All);
                    let left = |a: Factor| {
                        let mut c = vec![1f32; m * n];
                        multiply_packed(MatrixMut::new(&mut c, n, m), a, &packed, true, Threads::All);
                        c
                    };
                    assert_eq!(left(narrow.t()), left(wide.t()), "{isa:?} ({m}, {n}, {k}), left");
                }
            }
        }
    }
}

#[test]
fn a_product_that_is_computed_as_its_transpose_has_the_same_bits_but_for_one_beside_it() {
    for isa in instruction_sets() {
        for rounds in [false, true] {
            bits_of_transposes::<f32>(isa, rounds);
            bits_of_transposes::<bf16>(isa, rounds);
        }
    }
}

/// Computes the same product directly and as its transpose. With an added product, sums may round in another order. Both written and
/// added.
fn bits_of_transposes<C: Element>(isa: Isa, rounds: bool) {
    let mut turned = 0;
    for (case, (m, n, k)) in [(32, 200, 70), (96, 130, 2100), (127, 515, 600)].into_iter().enumerate() {
        let seeds = |first: u64| first + case as u64;
        let (x, w) =
            (Stored::<f32>::random(m, k, false, 3, seeds(1)), Stored::<f32>::random(n, k, false, 0, seeds(10)));
        let (x2, w2) =
            (Stored::<f32>::random(m, 9, false, 0, seeds(20)), Stored::<f32>::random(n, 9, false, 0, seeds(30)));
        let before = Stored::<C>::random(m, n, false, 0, seeds(40));
        for (accumulate, has_added) in [(false, false), (true, false), (false, true), (true, true)] {
            let factor = |matrix| Factor { rounds, ..Factor::from(matrix) };
            let (a, b) = (factor(x.matrix()), factor(w.matrix().t()));
            let added = has_added.then(|| (factor(x2.matrix()), factor(w2.matrix().t())));
            let (mut one, mut other) = (before.data.clone(), before.data.clone());
            let c = MatrixMut::new(&mut one, m, n);
            turned += usize::from(can_be_turned(&c, (&a, &b), added.as_ref(), accumulate));
            multiply_rounding(isa, rounds, c, (a, b), added, accumulate, Threads::All);
            let c = MatrixMut::new(&mut other, m, n);
            super::product((isa, rounds, is_wide(n)), c, a, (Right::Factor(b), added), accumulate, Threads::All);
            let ulp = if size_of::<C>() == 2 { 1.0 / 128.0 } else { 1.0 / (1 << 20) as f32 };
            let is_same = |one: &C, other: &C| {
                let (one, other) = (one.to_f32(), other.to_f32());
                one.to_bits() == other.to_bits() || has_added && (one - other).abs() <= ulp * (1.0 + one.abs())
            };
            let are_same = one.iter().zip(&other).all(|(one, other)| is_same(one, other));
            assert!(are_same, "{isa:?} {rounds} ({m}, {n}, {k}) {accumulate} {has_added}");
        }
    }
    assert!(turned >= 3, "{isa:?} {rounds}: {turned} products were computed as their transposes");
}

#[test]
fn the_sizes_of_every_kernel_are_those_that_its_code_has() {
    for isa in crate::isa::ALL {
        let set = InstructionSet::of_name(isa.name()).expect("it has a name");
        for (rounds, wide) in [(false, false), (false, true), (true, false), (true, true)] {
            let compiled = with_kernel!(isa, rounds, wide, K, Geometry::for_kernel::<K>());
            assert_eq!(Geometry::chosen(set, rounds, wide), compiled, "{isa:?}, {rounds}, {wide}");
        }
    }
}

/// Products of few rows: each element against f64, and every row has the bits of the same row alone.
fn check_few_rows<A: Element, B: Element, C: Element>(tolerance: f64) {
    for (m, n, k) in
        [(1, 1, 1), (1, 64, 512), (2, 7, 33), (3, 9, 48), (5, 130, 100), (8, 33, 15), (9, 70, 640), (16, 6, 47)]
    {
        for (gap, accumulate, threads) in [(0, false, Threads::One), (5, true, Threads::All), (0, false, Threads::All)]
        {
            let what = format!("({m}, {n}, {k}) gap {gap} {accumulate} {threads:?}");
            let a = Stored::<A>::random(m, k, false, gap, 1);
            let b = Stored::<B>::random(k, n, true, gap, 2);
            let before = Stored::<C>::random(m, n, false, gap, 3);
            let expected = product(&a, &b);
            assert!(small_m::takes(&a.matrix(), &b.matrix().into()), "{what}: left to the engine");
            let mut c = before.data.clone();
            // SAFETY: `c` lives to the end of this block and nothing else writes it.
            let target = unsafe { MatrixMut::part(Shared::new(&mut c), 0, m, n, n + gap) };
            multiply_as_a(target, a.matrix(), b.matrix(), accumulate, threads);
            for i in 0..m {
                let mut alone = before.data[i * (n + gap)..][..n].to_vec();
                let row = a.matrix().t().columns(i..i + 1).t();
                multiply_as_a(MatrixMut::new(&mut alone, 1, n), row, b.matrix(), accumulate, Threads::One);
                for j in 0..n {
                    let at = i * (n + gap) + j;
                    let expected = expected[i * n + j] + if accumulate { before.at(i, j) } else { 0.0 };
                    let got = f64::from(c[at].to_f32());
                    let close = (got - expected).abs() <= tolerance * (1.0 + (k as f64).sqrt());
                    assert!(close, "{what}: ({i}, {j}): expected {expected}, got {got}");
                    assert_eq!(c[at].to_f32().to_bits(), alone[j].to_f32().to_bits(), "{what}: ({i}, {j}) alone");
                }
                let between = i * (n + gap) + n..((i + 1) * (n + gap)).min(c.len());
                assert!(between.clone().all(|at| c[at].to_f32() == before.data[at].to_f32()), "{what}: between rows");
            }
        }
    }
}

#[test]
fn few_rows_are_multiplied_where_the_weight_lies() {
    check_few_rows::<f32, f32, f32>(1e-6);
    check_few_rows::<f32, bf16, f32>(1e-6);
    check_few_rows::<bf16, bf16, bf16>(1e-2);
    // The weight is rounded to bf16.
    check_few_rows::<bf16, f32, bf16>(2e-2);
    check_few_rows::<bf16, f32, f32>(1e-2);
}

#[test]
fn few_rows_with_a_narrow_weight_have_the_bits_of_a_wide_one() {
    for (m, n, k) in [(1, 70, 130), (3, 6, 48), (9, 33, 20)] {
        let numbers = Stored::<f32>::random(k, n, true, 0, 2).data;
        let narrow: Vec<half::f16> = numbers.iter().map(|&x| half::f16::from_f32(x)).collect();
        let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
        let narrow = Factor::new(super::Stored::Narrow(Narrow::new(Form::F16(&narrow), n * k)), n, k).t();
        let wide = Factor::from(Matrix::new((&wide[..]).into(), n, k)).t();
        let product = |a: Matrix, b: Factor| {
            let mut c = vec![1f32; m * n];
            assert!(small_m::takes(&a, &b));
            multiply_as_a(MatrixMut::new(&mut c, m, n), a, b, true, Threads::All);
            c
        };
        let (a, a_bf16) = (Stored::<f32>::random(m, k, false, 0, 1), Stored::<bf16>::random(m, k, false, 0, 1));
        assert_eq!(product(a.matrix(), narrow), product(a.matrix(), wide), "({m}, {n}, {k})");
        assert_eq!(product(a_bf16.matrix(), narrow), product(a_bf16.matrix(), wide), "({m}, {n}, {k}), rounded");
    }
}

#[test]
fn many_rows_and_operands_across_k_are_left_to_the_engine() {
    let matrix = |rows, transposed| Stored::<f32>::random(rows, 8, transposed, 0, 1);
    let weight = Stored::<f32>::random(8, 12, true, 0, 2);
    let takes = |a: &Stored<f32>, b: &Stored<f32>| small_m::takes(&a.matrix(), &b.matrix().into());
    assert!(takes(&matrix(small_m::MAX_ROWS, false), &weight));
    assert!(!takes(&matrix(small_m::MAX_ROWS + 1, false), &weight));
    assert!(!takes(&matrix(2, true), &weight));
    assert!(!takes(&matrix(2, false), &Stored::<f32>::random(8, 12, false, 0, 2)));
}

#[test]
fn thin_results_of_every_shape_and_type() {
    let multiply = |c: MatrixMut, a: Matrix, b: Matrix, accumulate, threads| multiply(c, a, b, accumulate, threads);
    check_all::<f32, f32, f32>(2e-6, &multiply);
    check_all::<bf16, bf16, f32>(2e-6, &multiply);
    check_all::<bf16, bf16, bf16>(1e-2, &multiply);
    let taken = SIZES.iter().filter(|&&(m, n, k)| {
        let (a, b) = (Stored::<bf16>::random(m, k, true, 0, 1), Stored::<bf16>::random(k, n, false, 0, 2));
        let takes = skinny::takes(&a.matrix(), &b.matrix());
        assert_eq!(takes, thin_bytes((m, k, n), DType::F32).is_some(), "({m}, {n}, {k})");
        takes
    });
    assert!(taken.count() >= 5, "skinny results among these");
    let along = Stored::<f32>::random(4, 8, false, 0, 1);
    assert!(!skinny::takes(&along.matrix(), &Stored::<f32>::random(8, 12, false, 0, 2).matrix()), "A along K");
}

fn check_threads_of_thin_results<T: Element>() {
    // More columns than a thread has at a time, an odd number of rows, and columns and rows that do not fill a block.
    for (m, n, k) in [(16, 1115, 700), (1115, 5, 701)] {
        let (a, b) = (Stored::<T>::random(m, k, true, 3, 1), Stored::<T>::random(k, n, false, 0, 2));
        let of_threads = |threads| {
            let mut c = vec![0f32; m * n];
            multiply(MatrixMut::new(&mut c, m, n), a.matrix(), b.matrix(), false, threads);
            c
        };
        let alone = of_threads(Threads::One);
        assert_eq!(alone, of_threads(Threads::All));
        for (at, (got, expected)) in alone.into_iter().zip(product(&a, &b)).enumerate() {
            assert!((f64::from(got) - expected).abs() < 1e-4, "({m}, {n}, {k}) {at}: expected {expected}, got {got}");
        }
    }
}

#[test]
fn threads_show_in_no_bit_of_a_thin_result() {
    check_threads_of_thin_results::<f32>();
    check_threads_of_thin_results::<bf16>();
}

/// `A B + A₂ B₂` against f64, on every instruction set, with operands of `T`.
fn check_added<T: Element, C: Element>(tolerance: f64) {
    // In the last case K is cut into slices.
    for (m, n, k) in SIZES.into_iter().chain([(40, 70, 4_200)]) {
        for (rank, transposed) in [(16, true), (1, false), (70, true)] {
            let what = format!("({m}, {n}, {k}) beside {rank} {transposed}");
            let [a, u] = [k, rank].map(|k| Stored::<T>::random(m, k, false, 0, k as u64));
            let [b, w] = [k, rank].map(|k| Stored::<T>::random(k, n, transposed, 0, 7 + k as u64));
            let before = Stored::<C>::random(m, n, false, 0, 3);
            let (first, second) = (product(&a, &b), product(&u, &w));
            for isa in instruction_sets() {
                let rounds = size_of::<T>() == size_of::<bf16>();
                for (accumulate, threads) in [(false, Threads::All), (true, Threads::One), (true, Threads::All)] {
                    let mut c = before.data.clone();
                    let operands = (a.matrix().into(), b.matrix().into());
                    let added = Some((u.matrix().into(), w.matrix().into()));
                    multiply_rounding(isa, rounds, MatrixMut::new(&mut c, m, n), operands, added, accumulate, threads);
                    for (at, got) in c.iter().enumerate() {
                        let expected =
                            first[at] + second[at] + if accumulate { before.data[at].to_f32().into() } else { 0.0 };
                        let close = (f64::from(got.to_f32()) - expected).abs() <= tolerance * (1.0 + (k as f64).sqrt());
                        assert!(close, "{what} {isa:?} {threads:?}: {at}: expected {expected}, got {}", got.to_f32());
                    }
                }
            }
        }
    }
}

#[test]
fn a_product_beside_another_is_added_to_it() {
    check_added::<f32, f32>(2e-6);
    check_added::<bf16, bf16>(1e-2);
    check_added::<bf16, f32>(2e-6);
}
