//! Results with few columns.

use super::*;

/// Products with few columns: each element against f64, and every row has the bits of the same row among others.
fn check_few_columns<C: Element>(tolerance: f64) {
    for (m, n, k) in [(17, 1, 1), (24, 16, 512), (33, 7, 33), (40, 16, 48), (100, 5, 130), (259, 16, 15), (70, 2, 640)]
    {
        for (gap, transposed, accumulate) in [(0, true, false), (5, false, true), (3, true, true), (0, false, false)] {
            let what = format!("({m}, {n}, {k}) gap {gap} {transposed} {accumulate}");
            let a = Stored::<f32>::random(m, k, false, gap, 1);
            let b = Stored::<f32>::random(k, n, transposed, gap, 2);
            let before = Stored::<C>::random(m, n, false, gap, 3);
            let run = |rows: Range<usize>, threads| {
                let mut c = before.data.clone();
                // SAFETY: `c` lives to the end of this block and nothing else writes it.
                let target =
                    unsafe { MatrixMut::part(Shared::new(&mut c), rows.start * (n + gap), rows.len(), n, n + gap) };
                let rows = a.matrix().t().columns(rows).t();
                let operands = small_n::operands(&rows.into(), &b.matrix().into()).expect("a product of the module");
                small_n::multiply(&target, operands, accumulate, threads);
                c.into_iter().map(Element::to_f32).collect::<Vec<_>>()
            };
            let (all, expected) = (run(0..m, Threads::All), product(&a, &b));
            assert_eq!(all, run(0..m, Threads::One), "{what}: threads");
            let some = run(m - 17..m, Threads::All);
            for i in 0..m {
                for j in 0..n {
                    let at = i * (n + gap) + j;
                    let expected = expected[i * n + j] + if accumulate { before.at(i, j) } else { 0.0 };
                    let got = f64::from(all[at]);
                    let close = (got - expected).abs() <= tolerance * (1.0 + (k as f64).sqrt());
                    assert!(close, "{what}: ({i}, {j}): expected {expected}, got {got}");
                    assert!(i < m - 17 || some[at] == all[at], "{what}: ({i}, {j}) among fewer rows");
                }
                let between = i * (n + gap) + n..((i + 1) * (n + gap)).min(all.len());
                assert!(between.clone().all(|at| all[at] == before.data[at].to_f32()), "{what}: between rows");
            }
        }
    }
}

#[test]
fn few_columns_are_multiplied_where_many_rows_lie() {
    check_few_columns::<f32>(1e-6);
    check_few_columns::<bf16>(1e-2);
    let operands = |a: Stored<f32>, b: Stored<f32>| small_n::operands(&a.matrix().into(), &b.matrix().into()).is_some();
    let matrix = |rows, cols, transposed| Stored::<f32>::random(rows, cols, transposed, 0, 1);
    assert!(operands(matrix(17, 8, false), matrix(8, 16, true)));
    assert!(!operands(matrix(17, 8, false), matrix(8, 17, true)), "many columns");
    assert!(!operands(matrix(17, 8, true), matrix(8, 16, true)), "A across K");
    // A block of 32 columns would be half empty; one of 16 is full.
    let is_better = |set, m, n| small_n::is_better(m, n, Geometry::of_product(set, false, n));
    assert!(is_better(InstructionSet::Avx512, 17, 16) && !is_better(InstructionSet::Avx2, 17, 16));
    assert!(!is_better(InstructionSet::Avx512, small_m::MAX_ROWS, 16) && !is_better(InstructionSet::Avx512, 17, 17));
}

/// Products with few columns in bf16 have the bits of the engine's, also in rows that are not whole lines.
#[cfg(target_arch = "x86_64")]
fn check_few_columns_bf16<B: Element, C: Element>() {
    for (m, n, k) in [(17, 1, 1), (24, 16, 512), (33, 7, 33), (100, 5, 130), (259, 16, 2047)] {
        for (gap, transposed, accumulate) in [(0, true, false), (5, false, true), (3, true, true), (0, false, false)] {
            let a = Stored::<bf16>::random(m, k, false, gap, 1);
            let b = Stored::<B>::random(k, n, transposed, gap, 2);
            let before = Stored::<C>::random(m, n, false, 0, 3).data;
            let (a, b) = (Factor::from(a.matrix()), Factor::from(b.matrix()));
            let bits = |c: &[C]| c.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
            let mut expected = before.clone();
            let c = MatrixMut::new(&mut expected, m, n);
            multiply_rounding(Isa::Avx512Bf16, true, c, (a, b), None, accumulate, Threads::All);
            for threads in [Threads::One, Threads::All] {
                let mut got = before.clone();
                let operands = small_n_bf16::operands(Isa::Avx512Bf16, &a, &b).expect("a product of the module");
                let c = MatrixMut::new(&mut got, m, n);
                // SAFETY: the caller has found the instructions.
                unsafe { small_n_bf16::multiply(&c, operands, accumulate, threads) };
                let what = format!("({m}, {n}, {k}) gap {gap} {transposed} {accumulate} {threads:?}");
                assert!(bits(&got) == bits(&expected), "{what}");
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn few_columns_in_bf16_have_the_bits_of_the_kernel() {
    let matrix = |rows, cols, transposed| Stored::<bf16>::random(rows, cols, transposed, 0, 1);
    let takes = |isa, a: Stored<bf16>, b: Stored<bf16>| {
        small_n_bf16::operands(isa, &a.matrix().into(), &b.matrix().into()).is_some()
    };
    assert!(takes(Isa::Avx512Bf16, matrix(17, 8, false), matrix(8, 16, true)));
    assert!(!takes(Isa::Amx, matrix(17, 8, false), matrix(8, 16, true)), "tiles are faster");
    assert!(!takes(Isa::Avx512Bf16, matrix(17, 8, false), matrix(8, 17, true)), "many columns");
    assert!(!takes(Isa::Avx512Bf16, matrix(16, 8, false), matrix(8, 16, true)), "few rows");
    assert!(!takes(Isa::Avx512Bf16, matrix(17, 8, true), matrix(8, 16, true)), "A across K");
    if crate::isa::detect() >= Isa::Avx512Bf16 {
        check_few_columns_bf16::<bf16, f32>();
        check_few_columns_bf16::<bf16, bf16>();
        check_few_columns_bf16::<f32, bf16>();
    }
}
