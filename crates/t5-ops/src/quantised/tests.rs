use std::collections::HashMap;

use candle_core::{D, DType, Tensor};

use super::*;
use crate::testing::{Numbers, assert_close, device, tolerance};
use crate::{embedding, linear, linear_backward_input, reference};

const PRECISIONS: [Precision; 2] = [Precision::Int8, Precision::Nf4];

fn floats(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn bits(x: &Tensor) -> Vec<u32> {
    floats(x).into_iter().map(f32::to_bits).collect()
}

fn bytes(x: &Tensor) -> Vec<u8> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// The bytes of each part by its name.
fn parts(w: &Quantised) -> HashMap<&'static str, Vec<u8>> {
    let all = bytes(w.bytes());
    let mut rest = all.as_slice();
    let parts = w.quantisation().parts().into_iter().map(|part| {
        let (bytes, after) = rest.split_at(part.bytes());
        rest = after;
        (part.name, bytes.to_vec())
    });
    parts.collect()
}

fn goldens() -> HashMap<String, Tensor> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/quantised/quantised.safetensors");
    candle_core::safetensors::load(path, &device()).unwrap()
}

#[test]
fn nf4_is_that_of_bitsandbytes() {
    let goldens = goldens();
    assert_eq!(bits(&goldens["map"]), absmax_map().map(f32::to_bits));
    for case in ["two_groups", "ragged", "holes", "wild"] {
        let golden = |part: &str| &goldens[&format!("{case}.{part}")];
        let numbers = |part: &str| floats(golden(part)).into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        let (weight, theirs) = (golden("weight"), golden("dequantised"));
        let quantised = Quantised::quantise(weight, Precision::Nf4).unwrap();
        let ours = parts(&quantised);
        assert_eq!(ours["codes"], bytes(golden("codes")), "{case}");
        // bitsandbytes takes the mean in f32, and looks scales up in 65,536 steps.
        let close = |name: &str| {
            let of = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>();
            of(&ours[name]).into_iter().zip(of(&numbers(name))).all(|(a, b)| (a - b).abs() <= 4e-7 * b.abs())
        };
        assert!(close("scales") && close("offset"), "{case}");
        let others = ours["absmax"].iter().zip(bytes(golden("absmax"))).filter(|(a, b)| *a != b).count();
        assert!(50 * others <= ours["absmax"].len(), "{case}: {others} codes of scales differ");
        // Its codes are read as bitsandbytes reads them.
        let theirs_in_order = [bytes(golden("codes")), bytes(golden("absmax")), numbers("scales"), numbers("offset")];
        let all = theirs_in_order.concat();
        let count = all.len();
        let read = Quantised::new(quantised.quantisation(), Tensor::from_vec(all, count, &device()).unwrap());
        assert_eq!(bits(&read.unwrap().dequantised().unwrap()), bits(theirs), "{case}");
    }
}

#[test]
fn int8_is_that_of_bitsandbytes() {
    let goldens = goldens();
    for case in ["two_groups", "ragged", "holes"] {
        let golden = |part: &str| &goldens[&format!("{case}.{part}")];
        let weight = golden("weight").to_dtype(DType::F16).unwrap();
        let ours = parts(&Quantised::quantise(&weight, Precision::Int8).unwrap());
        let theirs = bytes(golden("int8"));
        let off = ours["codes"].iter().zip(&theirs).map(|(a, b)| (*a as i8).abs_diff(*b as i8));
        let (others, most) = off.fold((0, 0), |(n, most), off| (n + usize::from(off > 0), most.max(off)));
        // A product in f16 rounds a few codes to the neighbour.
        assert!(most <= 1 && 100 * others <= theirs.len(), "{case}: {others} codes differ, by at most {most}");
        for (scale, absmax) in ours["scales"].as_chunks().0.iter().zip(floats(golden("int8_absmax"))) {
            assert_eq!(f32::from_le_bytes(*scale), absmax / 127.0, "{case}");
        }
    }
}

#[test]
fn quantising_loses_at_most_half_a_step() {
    // The host alone: codes and f16 are made there. `tests/device` has codes on a card.
    if !device().is_cpu() {
        return;
    }
    let w = Numbers::new(1).tensor(&[40, 130], DType::F32);
    let largest = w.abs().unwrap().max_keepdim(D::Minus1).unwrap();
    let error = |precision| {
        let got = Quantised::quantise(&w, precision).unwrap().dequantised().unwrap();
        (got - &w).unwrap().abs().unwrap()
    };
    let of_int8 = floats(&error(Precision::Int8).broadcast_div(&largest).unwrap());
    assert!(of_int8.iter().all(|e| *e <= 0.5001 / 127.0));
    let of_nf4 = floats(&error(Precision::Nf4));
    // The widest gap of the map is 0.304, and a scale is off by a few percent at most.
    assert!(of_nf4.iter().all(|e| *e <= 0.17));
}

#[test]
fn the_pieces_that_a_weight_comes_in_show_in_no_byte() {
    let w = Numbers::new(2).tensor(&[50, 70], DType::F32);
    let values = floats(&w);
    for precision in PRECISIONS {
        let whole = bytes(Quantised::quantise(&w, precision).unwrap().bytes());
        for piece in [1, 63, 64, 70, 1000, 3500] {
            let mut quantiser = Quantiser::new(Quantisation::new(precision, (50, 70)).unwrap());
            let mut got = Vec::new();
            values.chunks(piece).for_each(|values| quantiser.values(values, &mut got).unwrap());
            quantiser.finish(&mut got);
            assert_eq!(got, whole, "{precision:?} {piece}");
        }
    }
}

#[test]
fn products_have_the_bits_of_those_with_the_dequantised_weight() {
    // The host alone: codes and f16 are made there. `tests/device` has codes on a card.
    if !device().is_cpu() {
        return;
    }
    // K beyond a panel's depth, columns that no panel divides, few rows and many.
    for (rows, n, k) in [(1, 300, 257), (5, 64, 128), (70, 33, 600), (3, 97, 2050), (130, 160, 64), (2, 1, 1)] {
        let mut numbers = Numbers::new(9);
        let w = numbers.tensor(&[n, k], DType::F32);
        let f16 = w.to_dtype(DType::F16).unwrap();
        let quantised = PRECISIONS.map(|precision| Quantised::quantise(&w, precision).unwrap());
        let [int8, nf4] = &quantised;
        let wide = [f16.to_dtype(DType::F32), int8.dequantised(), nf4.dequantised()].map(Result::unwrap);
        for dtype in [DType::F32, DType::BF16] {
            let (x, dy) = (numbers.tensor(&[rows, k], dtype), numbers.tensor(&[rows, n], dtype));
            let sum = numbers.tensor(&[rows, k], dtype);
            for (narrow, wide) in [Weight::from(&f16), int8.into(), nf4.into()].into_iter().zip(&wide) {
                let what = format!("{rows} x {n} x {k} {dtype:?} {:?}", narrow.tensor().dtype());
                let y = linear(&x, narrow).unwrap();
                assert_eq!(bits(&y), bits(&linear(&x, wide).unwrap()), "{what}");
                assert_close(&what, &y, &reference::linear(&x, narrow).unwrap(), tolerance(dtype));
                let dx = |w| linear_backward_input(&dy, w, None).unwrap();
                assert_eq!(bits(&dx(narrow)), bits(&dx(wide.into())), "{what}");
                let dx = |w: Weight<'_>| linear_backward_input(&dy, w, Some(sum.copy().unwrap())).unwrap();
                assert_eq!(bits(&dx(narrow)), bits(&dx(wide.into())), "{what}");
                let expected = reference::linear_backward_input(&dy, narrow, Some(sum.clone())).unwrap();
                assert_close(&what, &dx(narrow), &expected, tolerance(dtype));
            }
        }
    }
}

#[test]
fn an_f16_table_gives_the_bits_of_the_same_values_in_f32() {
    // The host alone: codes and f16 are made there. `tests/device` has codes on a card.
    if !device().is_cpu() {
        return;
    }
    let mut numbers = Numbers::new(4);
    let (rows, d, v) = (40, 72, 300);
    let f16 = numbers.tensor(&[v, d], DType::F16);
    let f32 = f16.to_dtype(DType::F32).unwrap();
    let ids: Vec<u32> = (0..rows as u32).map(|i| i * 7 % 300).collect();
    let settings = crate::CrossEntropy { logit_scale: 0.3, gradient_scale: 0.1, chunk_rows: 33, ..Default::default() };
    for dtype in [DType::F32, DType::BF16] {
        let indices = Tensor::new(&ids[..], &device()).unwrap().reshape((5, 8)).unwrap();
        let rows_of = |table| bits(&embedding(&indices, table, dtype).unwrap());
        assert_eq!(rows_of(&f16), rows_of(&f32), "{dtype:?}");
        let x = numbers.tensor(&[rows, d], dtype);
        let loss = |w| crate::linear_cross_entropy(&x, w, &ids, &settings).unwrap();
        assert_eq!(loss(&f16), loss(&f32), "{dtype:?}");
        let gradients = |w| crate::linear_cross_entropy_backward(&x, w, &ids, &settings, None).unwrap();
        let (got, expected) = (gradients(&f16), gradients(&f32));
        assert_eq!((got.0, bits(&got.1)), (expected.0, bits(&expected.1)), "{dtype:?}");
    }
}

#[test]
fn rows_are_those_of_the_whole() {
    let w = Numbers::new(5).tensor(&[20, 33], DType::F32);
    for precision in PRECISIONS {
        let w = Quantised::quantise(&w, precision).unwrap();
        let whole = w.dequantised().unwrap();
        for rows in [0..20, 3..4, 7..7, 12..20] {
            assert_eq!(bits(&w.rows(rows.clone()).unwrap()), bits(&whole.narrow(0, rows.start, rows.len()).unwrap()));
        }
        assert!(w.rows(19..21).is_err());
    }
}

#[test]
fn what_cannot_be_quantised_is_an_error() {
    let w = Tensor::new(&[[1f32, f32::NAN], [0.0, f32::INFINITY]], &device()).unwrap();
    for precision in PRECISIONS {
        let message = Quantised::quantise(&w, precision).unwrap_err().to_string();
        assert!(message.contains("element (0, 1): expected a finite number, got NaN"), "{message}");
        let form = Quantisation::new(precision, (2, 2)).unwrap();
        assert!(Quantiser::new(form).values(&[0.0; 5], &mut Vec::new()).is_err());
        let short = Tensor::zeros(form.bytes() - 1, DType::U8, &device()).unwrap();
        assert!(Quantised::new(form, short).is_err());
        assert!(Quantised::new(form, Tensor::zeros(form.bytes(), DType::F32, &device()).unwrap()).is_err());
        assert!(Quantisation::new(precision, (1 << 33, 1 << 33)).is_err());
        let tiny = Tensor::new(&[[1e-45f32, -1e-40]], &device()).unwrap();
        let back = Quantised::quantise(&tiny, precision).unwrap().dequantised().unwrap();
        assert!(floats(&back).iter().all(|x| x.abs() < 1e-37));
    }
    let w = Quantised::quantise(&Tensor::zeros((3, 4), DType::F32, &device()).unwrap(), Precision::Int8).unwrap();
    let x = Tensor::zeros((2, 5), DType::F32, &device()).unwrap();
    let message = linear(&x, &w).unwrap_err().to_string();
    assert!(message.contains("expected shape [3, 5], got [3, 4]"), "{message}");
    assert!(linear_backward_input(&x, &w, None).is_err());
}
