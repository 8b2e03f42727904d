use candle_core::{DType, IndexOp};
use half::bf16;

use super::*;
use crate::testing::{Numbers, assert_close, autograd, check_gradient, device, tolerance, values, weighted};

struct Case {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    dout: Tensor,
    heads: usize,
    lengths: Vec<usize>,
    samples: Vec<u32>,
}

impl Case {
    fn new((b, t, s, heads, size): (usize, usize, usize, usize, usize), dtype: DType) -> Self {
        let mut numbers = Numbers::new((b * t * s * heads * size) as u64);
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut tensor = |shape: &[usize], dtype| numbers.tensor(shape, dtype);
        Self {
            q: tensor(&[b, t, heads * size], dtype),
            k: tensor(&[b, s, heads * size], dtype),
            v: tensor(&[b, s, heads * size], dtype),
            bias: tensor(&[heads, t + s - 1], wide),
            dout: tensor(&[b, t, heads * size], dtype),
            heads,
            // The first sequence is whole, the others are shorter.
            lengths: (0..b).map(|i| if i == 0 { s } else { (s * i / b).max(1) }).collect(),
            samples: (0..b as u32).map(|i| 3 * i + 1).collect(),
        }
    }

    /// Every combination of bias, causal mask and dropout.
    fn variants(&self) -> Vec<Attention<'_>> {
        let mut variants = Vec::new();
        for bias in [None, Some(&self.bias)] {
            for causal in [false, true] {
                for probability in [0.0, 0.3] {
                    let dropout = Some(Dropout { probability, seed: 9, step: 4, site: 2, samples: &self.samples });
                    variants.push(Attention {
                        bias,
                        mask: Mask::causal_if(causal),
                        dropout,
                        ..Attention::new(self.heads, &self.lengths)
                    });
                }
            }
        }
        variants
    }
}

#[test]
fn the_reference_agrees_with_finite_differences_and_autograd() {
    let case = Case::new((2, 4, 5, 2, 3), DType::F64);
    let (q, k, v, dout) = (&case.q, &case.k, &case.v, &case.dout);
    for a in case.variants() {
        let what = format!("bias {} {:?} {:?}", a.bias.is_some(), a.mask, a.dropout);
        let (out, lse) = attention(q, k, v, &a).unwrap();
        let dbias = case.bias.zeros_like().unwrap();
        let (dq, dk, dv) =
            attention_backward(&Attended { q, k, v, out: &out, lse: &lse }, dout, &a, Some(&dbias)).unwrap();
        check_gradient(&what, q, &dq, |q| weighted(&attention(q, k, v, &a)?.0, dout));
        check_gradient(&what, k, &dk, |k| weighted(&attention(q, k, v, &a)?.0, dout));
        check_gradient(&what, v, &dv, |v| weighted(&attention(q, k, v, &a)?.0, dout));
        if a.bias.is_some() {
            check_gradient(&what, &case.bias, &dbias, |bias| {
                weighted(&attention(q, k, v, &Attention { bias: Some(bias), ..a })?.0, dout)
            });
            let expected = autograd(&[q, k, v, &case.bias], dout, |t| {
                Ok(reference::attention(&t[0], &t[1], &t[2], &Attention { bias: Some(&t[3]), ..a })?.0)
            });
            for (got, expected) in [&dq, &dk, &dv, &dbias].into_iter().zip(&expected) {
                assert_close(&what, got, expected, 1e-10);
            }
        }
    }
}

#[test]
fn kernels_agree_with_the_reference() {
    // The host alone: its kernels. `tests/device` has those of a card.
    if !device().is_cpu() {
        return;
    }
    let sizes = [
        (1, 1, 1, 1, 1),
        (2, 7, 7, 3, 5),
        (3, 1, 65, 2, 8),
        (2, 65, 40, 2, 16),
        (2, 300, 300, 2, 64),
        (1, 20, 5000, 1, 4),
        // Few queries: heads of one vector and less, of four and of five, groups of one, two and four queries.
        (2, 3, 40, 2, 16),
        (3, 4, 130, 2, 64),
        (1, 6, 20, 2, 80),
        // In bf16 on tile registers or AVX512-BF16, if there are any: partial strips, groups and tiles, and a case of several parts.
        (1, 8, 2, 2, 32),
        (2, 9, 33, 2, 32),
        (3, 100, 520, 1, 32),
        (1, 290, 48, 1, 96),
    ];
    for size in sizes {
        for dtype in [DType::F32, DType::BF16] {
            let case = Case::new(size, dtype);
            for a in case.variants() {
                agrees_with_the_reference(&case, &a, dtype, cpu::attention, cpu::attention_backward);
                if dtype == DType::F32 {
                    let forward = cpu::forward::<f32, vectors::Forward<f32>>;
                    agrees_with_the_reference(&case, &a, dtype, forward, cpu::attention_backward);
                }
                if dtype == DType::BF16 {
                    let forward = cpu::forward::<bf16, vectors::Forward<bf16>>;
                    let backward = cpu::backward::<bf16, vectors::Backward<bf16>>;
                    agrees_with_the_reference(&case, &a, dtype, forward, backward);
                }
            }
        }
    }
}

#[test]
fn kernels_agree_with_the_reference_for_groups_windows_scales_and_caps() {
    // The host alone: its kernels.
    if !device().is_cpu() {
        return;
    }
    let window = |before, after| Mask { before, after };
    // B, T, S, H, KH, K
    let cases = [
        ((1, 2, 5, 2, 1, 4), window(1, 0), 0.5),
        ((2, 7, 7, 4, 2, 5), window(2, 1), 0.25),
        ((2, 3, 40, 4, 1, 16), window(20, 0), 1.0),
        ((2, 8, 130, 6, 2, 32), window(33, 4), 1.0 / 16.0),
        ((2, 65, 40, 4, 2, 16), Mask::CAUSAL, 0.3),
        ((2, 300, 300, 2, 2, 64), window(31, 0), 1.0),
        ((1, 700, 700, 3, 1, 32), window(63, 64), 0.25),
        ((2, 330, 330, 4, 1, 32), Mask::ALL, 0.25),
        ((1, 90, 600, 4, 2, 64), window(300, 7), 0.125),
        ((1, 280, 280, 4, 1, 256), window(99, 0), 1.0 / 16.0),
        ((1, 40, 1100, 2, 1, 256), Mask::ALL, 1.0 / 16.0),
    ];
    for ((b, t, s, heads, key_heads, size), mask, scale) in cases {
        for dtype in [DType::F32, DType::BF16] {
            let mut case = Case::new((b, t, s, heads, size), dtype);
            let width = key_heads * size;
            [&mut case.k, &mut case.v]
                .into_iter()
                .for_each(|x| *x = x.narrow(2, 0, width).unwrap().contiguous().unwrap());
            for a in case.variants().into_iter().filter(|a| a.mask == Mask::ALL) {
                for soft_cap in [None, Some(0.7)] {
                    let a = Attention { key_heads, mask, scale, soft_cap, ..a };
                    agrees_with_the_reference(&case, &a, dtype, cpu::attention, cpu::attention_backward);
                }
                let a = Attention { key_heads, mask, scale, ..a };
                match dtype {
                    DType::F32 => {
                        let forward = cpu::forward::<f32, vectors::Forward<f32>>;
                        agrees_with_the_reference(&case, &a, dtype, forward, cpu::attention_backward);
                    }
                    _ => {
                        let forward = cpu::forward::<bf16, vectors::Forward<bf16>>;
                        let backward = cpu::backward::<bf16, vectors::Backward<bf16>>;
                        agrees_with_the_reference(&case, &a, dtype, forward, backward);
                    }
                }
            }
        }
    }
}

#[test]
fn the_reference_agrees_with_finite_differences_for_groups_windows_scales_and_caps() {
    let mut case = Case::new((2, 5, 7, 4, 3), DType::F64);
    [&mut case.k, &mut case.v].into_iter().for_each(|x| *x = x.narrow(2, 0, 6).unwrap().contiguous().unwrap());
    let (q, k, v, dout) = (&case.q, &case.k, &case.v, &case.dout);
    for (a, soft_cap) in case.variants().into_iter().zip([None, Some(0.8)].into_iter().cycle()) {
        let a = Attention { key_heads: 2, mask: Mask { before: 2, after: 1 }, scale: 0.6, soft_cap, ..a };
        let what = format!("{a:?}");
        let (out, lse) = attention(q, k, v, &a).unwrap();
        let dbias = case.bias.zeros_like().unwrap();
        let of = Attended { q, k, v, out: &out, lse: &lse };
        let (dq, dk, dv) = attention_backward(&of, dout, &a, Some(&dbias)).unwrap();
        check_gradient(&what, q, &dq, |q| weighted(&attention(q, k, v, &a)?.0, dout));
        check_gradient(&what, k, &dk, |k| weighted(&attention(q, k, v, &a)?.0, dout));
        check_gradient(&what, v, &dv, |v| weighted(&attention(q, k, v, &a)?.0, dout));
        if a.bias.is_some() {
            check_gradient(&what, &case.bias, &dbias, |bias| {
                weighted(&attention(q, k, v, &Attention { bias: Some(bias), ..a })?.0, dout)
            });
        }
    }
}

#[test]
fn a_query_sees_the_keys_of_its_window() {
    let lengths = [7, 3];
    let seen = |mask, (queries, keys), b, i| {
        let a = Attention { mask, ..Attention::new(1, &lengths) };
        a.seen(&a.sizes_of((2, queries, 4), keys), b, i)
    };
    let causal = Mask::causal_window(3);
    assert_eq!([0, 1, 4, 6].map(|i| seen(causal, (7, 7), 0, i)), [0..1, 0..2, 2..5, 4..7]);
    // Beyond the keys that count a window may be empty.
    assert_eq!([1, 3, 6].map(|i| seen(causal, (7, 7), 1, i)), [0..2, 1..3, 3..3]);
    // `sliding_window_mask_function` of transformers for 5 and 4, both ways.
    assert_eq!([0, 3, 6].map(|i| seen(Mask::window_around(5), (7, 7), 0, i)), [0..3, 1..6, 4..7]);
    assert_eq!([0, 3, 6].map(|i| seen(Mask::window_around(4), (7, 7), 0, i)), [0..3, 2..6, 5..7]);
    // The last query is at the last key.
    assert_eq!(seen(causal, (1, 7), 0, 0), 4..7);
    assert_eq!([0, 3].map(|i| seen(Mask::CAUSAL, (4, 2), 0, i)), [0..0, 0..2]);
    assert_eq!(seen(Mask::ALL, (4, 7), 1, 0), 0..3);
}

fn agrees_with_the_reference(
    case: &Case,
    a: &Attention,
    dtype: DType,
    forward: impl Fn(&Tensor, &Tensor, &Tensor, &Attention, &Sizes) -> Result<(Tensor, Tensor)>,
    backward: impl Fn(&Attended, &Tensor, &Attention, &Sizes, Option<&Tensor>) -> Result<(Tensor, Tensor, Tensor)>,
) {
    let (q, k, v, dout) = (&case.q, &case.k, &case.v, &case.dout);
    let sizes = a.sizes("attention", q, k, v).unwrap();
    let what = format!("{sizes:?} {dtype:?} bias {} {:?} {:?}", a.bias.is_some(), a.mask, a.dropout);
    let what = format!("{what} {:?}", a.soft_cap);
    let (out, lse) = forward(q, k, v, a, &sizes).unwrap();
    let (expected_out, expected_lse) = reference::attention(q, k, v, a).unwrap();
    assert_eq!(out.dtype(), dtype);
    assert_close(&format!("{what} out"), &out, &expected_out, tolerance(dtype));
    assert_close(&format!("{what} lse"), &lse, &expected_lse, 1e-5);
    let dbias = case.bias.copy().unwrap();
    let expected_dbias = case.bias.copy().unwrap();
    let of = Attended { q, k, v, out: &out, lse: &lse };
    let got = backward(&of, dout, a, &sizes, Some(&dbias)).unwrap();
    let expected = reference::attention_backward(&of, dout, a, Some(&expected_dbias)).unwrap();
    // With one visible key its probability is 1, and dq and dk are differences of equal numbers.
    let tolerance = |what: &str| if sizes.keys == 1 && what != "dv" { 1.0 } else { tolerance(dtype) };
    assert_close(&format!("{what} dq"), &got.0, &expected.0, tolerance("dq"));
    assert_close(&format!("{what} dk"), &got.1, &expected.1, tolerance("dk"));
    assert_close(&format!("{what} dv"), &got.2, &expected.2, tolerance("dv"));
    assert_close(&format!("{what} dbias"), &dbias, &expected_dbias, tolerance("dbias"));
}

#[test]
fn a_query_that_sees_no_key_gives_zeros_and_zero_gradients() {
    let sizes = [(2, 6, 4, 2, 3), (2, 40, 5, 1, 32)];
    for (size, dtype) in sizes.into_iter().flat_map(|size| [DType::F32, DType::F64, DType::BF16].map(|d| (size, d))) {
        let mut case = Case::new(size, dtype);
        case.lengths = vec![0, 3];
        let (q, k, v, dout) = (&case.q, &case.k, &case.v, &case.dout);
        // With more queries than keys a causal mask hides everything from the first queries, too.
        for a in case.variants() {
            let (out, lse) = attention(q, k, v, &a).unwrap();
            assert!(values(&out).iter().all(|x| x.is_finite()));
            assert!(values(&out.i(0).unwrap()).iter().all(|&x| x == 0.0));
            let dbias = case.bias.zeros_like().unwrap();
            let (dq, dk, dv) =
                attention_backward(&Attended { q, k, v, out: &out, lse: &lse }, dout, &a, Some(&dbias)).unwrap();
            for gradient in [&dq, &dk, &dv, &dbias] {
                assert!(values(gradient).iter().all(|x| x.is_finite()));
            }
            for gradient in [dq, dk, dv] {
                assert!(values(&gradient.i(0).unwrap()).iter().all(|&x| x == 0.0));
            }
        }
    }
}

#[test]
fn padding_changes_nothing() {
    for (size, dtype) in [(4, DType::F32), (4, DType::BF16), (32, DType::BF16)] {
        let case = Case::new((1, 9, 9, 2, size), dtype);
        let longer = Case::new((1, 9, 44, 2, size), dtype);
        let pad = |x: &Tensor, like: &Tensor| Tensor::cat(&[x, &like.narrow(1, 9, 35).unwrap()], 1).unwrap();
        let (k, v) = (pad(&case.k, &longer.k), pad(&case.v, &longer.v));
        // The bias of the padded call begins with the bias of the other call: both start at j - i = -(T - 1).
        let bias = Tensor::cat(&[&case.bias, &longer.bias.narrow(1, 0, 35).unwrap()], 1).unwrap();
        for a in case.variants().into_iter().filter(|a| a.mask == Mask::ALL) {
            let padded = Attention { bias: a.bias.map(|_| &bias), ..a };
            let (out, lse) = attention(&case.q, &case.k, &case.v, &a).unwrap();
            let (padded_out, padded_lse) = attention(&case.q, &k, &v, &padded).unwrap();
            assert_eq!(values(&out), values(&padded_out));
            assert_eq!(values(&lse), values(&padded_lse));
        }
    }
}

#[test]
fn scores_that_are_not_finite_are_not_hidden() {
    for (size, dtype) in [((1, 4, 4, 1, 2), DType::F32), ((1, 9, 40, 1, 32), DType::BF16)] {
        let mut case = Case::new(size, dtype);
        case.q = (case.q * f64::NAN).unwrap();
        let a = &case.variants()[0];
        let (out, _) = attention(&case.q, &case.k, &case.v, a).unwrap();
        assert!(values(&out).iter().all(|x| x.is_nan()));
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let case = Case::new((2, 4, 5, 2, 3), DType::F32);
    let a = case.variants()[0];
    let run = |a: &Attention| attention(&case.q, &case.k, &case.v, a);
    assert!(run(&Attention { heads: 4, ..a }).is_err());
    assert!(run(&Attention { heads: 0, ..a }).is_err());
    assert!(run(&Attention { key_lengths: &[1], ..a }).is_err());
    assert!(run(&Attention { bias: Some(&case.q), ..a }).is_err());
    assert!(attention(&case.q, &case.k, &case.q, &a).is_err());
    let empty = Tensor::zeros((2, 0, 6), DType::F32, &device()).unwrap();
    assert!(attention(&empty, &case.k, &case.v, &a).is_err());
}
