//! The next tokens, the cache, attention of few queries.

use candle_core::{D, DType, Device, IndexOp, Tensor};
use cuda_kernels::emulation::Argument;
use t5_ops::{Attention, Mask};

use crate::attention::Shape;
use crate::card::{Buffer, assert_close, in_every_schedule, launch, null, numbers, suffix, tolerance};

const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

fn floats(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Logits with ties, among them the largest of a row, and with NaN and infinities.
fn logits(dtype: DType) -> Tensor {
    let (rows, width) = (5, 301);
    let mut values = floats(&numbers(3, &[rows, width], DType::F32));
    values.iter_mut().for_each(|x| *x = (*x * 20.0).round() / 4.0);
    values[width + 7] = f32::NAN;
    values[2 * width..3 * width].fill(f32::NEG_INFINITY);
    values[3 * width..4 * width].fill(f32::NAN);
    Tensor::from_vec(values, (rows, width), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

#[test]
fn the_largest_logit_is_the_first_of_equal_ones_and_a_number() {
    for dtype in DTYPES {
        let logits = logits(dtype);
        let (rows, width) = logits.dims2().unwrap();
        for threads in [32, 96, 256] {
            let got = in_every_schedule(&format!("{dtype:?}"), |schedule| {
                let (mut logits, mut tokens) = (Buffer::copy_of(&logits), Buffer::new(&[rows], DType::U32));
                let arguments = [logits.pointer(), tokens.pointer(), Argument::from_value(width as i32)];
                let name = format!("largest_{}", suffix(dtype));
                launch(&name, [rows, 1, 1], threads, threads as usize / 32 * 8, &arguments, schedule);
                vec![tokens]
            });
            let values = floats(&logits);
            let expected = values.chunks(width).map(|row| {
                let first = (0, f32::NEG_INFINITY);
                row.iter().enumerate().fold(first, |best, (i, &x)| if x > best.1 { (i, x) } else { best }).0 as u32
            });
            assert_eq!(got[0].to_vec1::<u32>().unwrap(), expected.collect::<Vec<_>>());
        }
    }
}

#[test]
fn candidates_are_the_likeliest_tokens_in_order_with_the_scores_of_all() {
    for dtype in DTYPES {
        // A row, one with a NaN, and the last row.
        let logits = logits(dtype).index_select(&Tensor::new(&[0u32, 1, 4], &Device::Cpu).unwrap(), 0).unwrap();
        let (rows, width) = logits.dims2().unwrap();
        let threads = 128;
        let all = in_every_schedule("all", |schedule| {
            let (mut logits, mut scores) = (Buffer::copy_of(&logits), Buffer::new(&[rows, width], DType::F32));
            let arguments = [logits.pointer(), scores.pointer(), Argument::from_value(width as i32)];
            let name = format!("log_probabilities_{}", suffix(dtype));
            launch(&name, [rows, 1, 1], threads, threads as usize / 32 * 8, &arguments, schedule);
            vec![scores]
        });
        for row in [0, 2] {
            let wide = logits.to_dtype(DType::F32).unwrap().i(row).unwrap();
            let sum = wide.exp().unwrap().sum_keepdim(D::Minus1).unwrap();
            let expected = wide.broadcast_sub(&sum.log().unwrap()).unwrap();
            assert_close("log-probabilities", &all[0].i(row).unwrap(), &expected, 1e-6);
        }
        let scores = floats(&all[0]);
        // Added to the last offset, most scores are equal: the first tokens come first.
        for (offset, count) in [(0.0f32, 8), (-3.25, 20), (-1e9, 12)] {
            let offsets = Tensor::new(&[offset; 3], &Device::Cpu).unwrap();
            let got = in_every_schedule(&format!("{offset} {count}"), |schedule| {
                let (mut logits, mut offsets) = (Buffer::copy_of(&logits), Buffer::copy_of(&offsets));
                let (mut tokens, mut scores) =
                    (Buffer::new(&[rows, count], DType::U32), Buffer::new(&[rows, count], DType::F32));
                let arguments = [
                    logits.pointer(),
                    offsets.pointer(),
                    tokens.pointer(),
                    scores.pointer(),
                    Argument::from_value(width as i32),
                    Argument::from_value(count as i32),
                ];
                let name = format!("candidates_{}", suffix(dtype));
                launch(&name, [rows, 1, 1], threads, threads as usize / 32 * 8, &arguments, schedule);
                vec![tokens, scores]
            });
            for (row, scores) in scores.chunks(width).enumerate() {
                let key =
                    |&token: &usize| if scores[token].is_nan() { f32::NEG_INFINITY } else { scores[token] + offset };
                let mut order: Vec<usize> = (0..width).collect();
                order.sort_by(|a, b| key(b).total_cmp(&key(a)));
                let expected: Vec<u32> = order[..count].iter().map(|&token| token as u32).collect();
                assert_eq!(got[0].i(row).unwrap().to_vec1::<u32>().unwrap(), expected, "{offset} {count}");
                let bits = |scores: Vec<f32>| scores.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                let expected = order[..count].iter().map(|&token| scores[token]).collect();
                assert_eq!(bits(floats(&got[1].i(row).unwrap())), bits(expected), "{offset} {count}");
            }
        }
    }
}

#[test]
fn a_cache_gets_keys_and_values_and_copies_rows() {
    let (rows, capacity, width, position) = (4, 6, 37, 3);
    for dtype in DTYPES {
        let [keys, values] = [1, 2].map(|seed| numbers(seed, &[rows, 1, width], dtype));
        let caches = [3, 4].map(|seed| numbers(seed, &[rows, capacity, width], dtype));
        // Also with a position in memory that is added to the position argument.
        let moved = Tensor::new(&[9u32, 2], &Device::Cpu).unwrap();
        let appended = |schedule, is_moved: bool| {
            let mut moved = Buffer::copy_of(&moved);
            let (mut keys, mut values) = (Buffer::copy_of(&keys), Buffer::copy_of(&values));
            let [mut of_keys, mut of_values] = caches.each_ref().map(Buffer::copy_of);
            let pointers = [&mut keys, &mut values, &mut of_keys, &mut of_values].map(Buffer::pointer);
            let position = if is_moved { position - 2 } else { position };
            let sizes = [capacity, width, position].map(|size| Argument::from_value(size as i32));
            let moved = if is_moved { moved.pointer_at(4) } else { null() };
            let arguments: Vec<Argument> = pointers.into_iter().chain(sizes).chain([moved]).collect();
            launch(&format!("append_{}", suffix(dtype)), [rows, 2, 1], 32, 0, &arguments, schedule);
            vec![of_keys, of_values]
        };
        for is_moved in [false, true] {
            let got = in_every_schedule("append", |schedule| appended(schedule, is_moved));
            for ((got, cache), new) in got.iter().zip(&caches).zip([&keys, &values]) {
                let expected = cache.copy().unwrap();
                expected.slice_set(new, 1, position).unwrap();
                assert_close("append", got, &expected, 0.0);
            }
        }
        let pairs = Tensor::new(&[[0u32, 3], [2, 1]], &Device::Cpu).unwrap();
        let got = in_every_schedule("copies", |schedule| {
            let (mut pairs, mut cache) = (Buffer::copy_of(&pairs), Buffer::copy_of(&caches[0]));
            let sizes = [capacity * width, position * width].map(|size| Argument::from_value(size as i64));
            let arguments: Vec<Argument> = [pairs.pointer(), cache.pointer()].into_iter().chain(sizes).collect();
            launch(&format!("copy_rows_{}", suffix(dtype)), [2, 2, 1], 32, 0, &arguments, schedule);
            vec![cache]
        });
        let expected = caches[0].copy().unwrap();
        t5_ops::copy_rows(&expected, &[(0, 3), (2, 1)], position).unwrap();
        assert_close("copies", &got[0], &expected, 0.0);
    }
}

#[test]
fn attention_of_few_queries_is_that_of_the_cpu() {
    // Queries, keys, heads, their size, and keys that count; without a list if the lengths are equal.
    let cases: [(usize, usize, usize, usize, &[usize]); 6] = [
        (1, 1, 1, 1, &[1]),
        (1, 70, 2, 64, &[70, 70]),
        (4, 37, 2, 32, &[37, 0, 20]),
        (3, 33, 1, 20, &[33]),
        (1, 64, 2, 128, &[9, 9]),
        (8, 50, 1, 6, &[50, 13]),
    ];
    for ((t, s, heads, size, lengths), dtype) in cases.into_iter().flat_map(|case| DTYPES.map(|dtype| (case, dtype))) {
        for (has_bias, causal) in [(true, false), (false, false), (true, true)] {
            let what = format!("({t}, {s}, {heads}, {size}) {lengths:?} {dtype:?} {has_bias} {causal}");
            let (batch, width) = (lengths.len(), heads * size);
            let [q, k, v] = [(1, t), (2, s), (3, s)].map(|(seed, n)| numbers(seed, &[batch, n, width], dtype));
            // Some of the rows of a larger tensor.
            let all = numbers(4, &[heads, t + s + 4], DType::F32);
            let bias = all.narrow(1, 3, t + s - 1).unwrap();
            let a = Attention {
                bias: has_bias.then_some(&bias),
                mask: Mask::causal_if(causal),
                ..Attention::new(heads, lengths)
            };
            let (out, lse) = t5_ops::attention(&q, &k, &v, &a).unwrap();
            let shape = Shape {
                batches: [t, s, s].map(|n| (n * width) as i64),
                rows: [width as i32; 3],
                queries: t as i32,
                keys: s as i32,
                heads: heads as i32,
                head_size: size as i32,
                is_causal: i32::from(causal),
            };
            let are_alike = lengths.iter().all(|length| *length == lengths[0]);
            // Keys and bias may be those of a position in memory.
            let position = if are_alike { lengths[0] - 1 } else { 0 };
            let at = Tensor::new(&[position as u32], &Device::Cpu).unwrap();
            let got = in_every_schedule(&what, |schedule| {
                let mut at = Buffer::copy_of(&at);
                let counts: Vec<u32> = lengths.iter().map(|&n| n as u32).collect();
                let mut counts = Buffer::copy_of(&Tensor::new(counts.as_slice(), &Device::Cpu).unwrap());
                let (mut q, mut k, mut v, mut all) =
                    (Buffer::copy_of(&q), Buffer::copy_of(&k), Buffer::copy_of(&v), Buffer::copy_of(&all));
                let (mut out, mut lse) = (Buffer::new(out.dims(), dtype), Buffer::new(lse.dims(), DType::F32));
                let arguments = [
                    q.pointer(),
                    k.pointer(),
                    v.pointer(),
                    if has_bias { all.pointer_at((3 + position) * 4) } else { null() },
                    Argument::from_value((t + s + 4) as i32),
                    if are_alike { null() } else { counts.pointer() },
                    Argument::from_value((lengths[0] - position) as i32),
                    if are_alike { at.pointer() } else { null() },
                    out.pointer(),
                    lse.pointer(),
                    Argument::from_value(shape),
                ];
                let name = format!("attention_few_{}", suffix(dtype));
                launch(&name, [batch * t, heads, 1], 256, 8 * (size + 2) * 4, &arguments, schedule);
                vec![out, lse]
            });
            assert_close(&format!("{what} out"), &got[0], &out, tolerance(dtype).max(1e-5));
            let finite = |t: &Tensor| floats(t).into_iter().map(|x| x.max(-1e6)).collect::<Vec<f32>>();
            for (got, expected) in finite(&got[1]).into_iter().zip(finite(&lse)) {
                assert!((got - expected).abs() < 1e-2 * expected.abs().max(1.0), "{what} lse: {got} and {expected}");
            }
        }
    }
}
