//! Sums and extremes.

use candle_core::{DType, Device, Result, Tensor};

use super::{FLOATING, Given, View, assert_same, dtypes, elements, flat, numbers, run, size};
use crate::card::Buffer;

/// Launches a reduction over these dimensions as candle does. The result has the other dimensions.
fn reduce(kernel: &str, from: &View, dims: &[usize]) -> Tensor {
    let rank = from.view.rank();
    let (kept, dtype) = ((0..rank).filter(|d| !dims.contains(d)), from.view.dtype());
    let order: Vec<usize> = kept.chain(dims.iter().copied()).collect();
    let view = from.view.permute(order).unwrap();
    let shape = &view.dims()[..rank - dims.len()];
    let results: usize = shape.iter().product();
    let (count, each) = (view.elem_count(), view.elem_count() / results);
    let is_small = kernel == "sum" && each <= 32;
    let (kernel, count, grid) = match is_small {
        true => ("sum_small", results, [results.div_ceil(256), 256]),
        false => (kernel, count, [results, each.min(1024).next_power_of_two()]),
    };
    let to = if kernel.starts_with("arg") { DType::U32 } else { dtype };
    let from = View { storage: from.storage.clone(), view: view.clone() };
    let layout = View::layout_at_all(&[&from]);
    let given = [size(count), size(each), size(rank), layout, Given::View(&from), Given::Result(0)];
    run(&format!("fast_{kernel}_{}", dtype.as_str()), grid, &given, || Buffer::new(shape, to))
}

/// Blocks of one thread, of fewer threads than a warp, of a warp, and of the most threads.
const CASES: [(&[usize], &[usize]); 12] = [
    (&[4, 1], &[1]),
    (&[3, 2], &[1]),
    (&[7], &[0]),
    (&[2, 31], &[1]),
    (&[32, 3], &[0]),
    (&[3, 33], &[1]),
    (&[33, 3], &[0]),
    (&[2, 64, 3], &[1]),
    (&[2, 1000], &[1]),
    (&[1025, 2], &[0]),
    (&[2, 2100], &[1]),
    (&[300], &[0]),
];

#[test]
fn sums_are_those_of_the_cpu() {
    let of_several: [(&[usize], &[usize]); 4] =
        [(&[5, 4, 16], &[0, 2]), (&[5, 4, 3], &[1, 2]), (&[2, 3, 4], &[0, 1]), (&[9, 11, 2], &[0, 1, 2])];
    for dtype in dtypes() {
        for (shape, dims) in CASES.into_iter().chain(of_several) {
            let x = if dtype.is_int() { elements(1, shape, dtype) } else { numbers(1, shape, dtype) };
            for from in View::each(&x) {
                // The sum in a wide type, cut to the bits of the dtype: an overflowing sum of integers has these bits.
                let wide = if dtype.is_int() { DType::I64 } else { DType::F64 };
                let expected = from.view.to_dtype(wide).unwrap().sum(dims).unwrap().to_dtype(dtype).unwrap();
                let within = match dtype {
                    DType::F32 => 1e-5,
                    DType::F64 => 1e-12,
                    _ => super::rounding(dtype),
                };
                assert_same(&format!("sum {shape:?} {dims:?}"), &reduce("sum", &from, dims), &expected, within);
            }
        }
    }
}

#[test]
fn a_sum_of_nothing_is_zero() {
    for dtype in dtypes() {
        let x = Tensor::zeros((3, 0), dtype, &Device::Cpu).unwrap();
        let expected = x.sum(1).unwrap();
        assert_eq!(expected.dims(), [3]);
        assert_same("sum", &reduce("sum", &View::contiguous(&x), &[1]), &expected, 0.0);
    }
}

/// Numbers with many equal values. Some are NaN: the first ones of some results, and later ones of others.
fn with_equals_and_nan(shape: &[usize], dtype: DType) -> Tensor {
    if dtype.is_int() {
        return elements(2, shape, dtype);
    }
    let rounded = (numbers(2, shape, DType::F64) * 8.0).unwrap().round().unwrap();
    let mut values = flat(&rounded);
    values.iter_mut().skip(1).step_by(5).for_each(|value| *value = f64::NAN);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

#[test]
fn extremes_and_their_numbers_are_those_of_the_cpu() {
    type Reduction = fn(&Tensor, usize) -> Result<Tensor>;
    let reductions: [(&str, Reduction); 4] =
        [("min", Tensor::min), ("max", Tensor::max), ("argmin", Tensor::argmin), ("argmax", Tensor::argmax)];
    for dtype in dtypes() {
        for (shape, dims) in CASES {
            for from in View::each(&with_equals_and_nan(shape, dtype)) {
                for (name, reduction) in reductions {
                    let expected = reduction(&from.view, dims[0]).unwrap();
                    assert_same(&format!("{name} {shape:?}"), &reduce(name, &from, dims), &expected, 0.0);
                }
            }
        }
    }
}

#[test]
fn an_extreme_that_begins_with_nan_is_nan_and_a_later_nan_is_passed_over() {
    for dtype in FLOATING {
        for count in [2, 40] {
            let mut values = vec![1.0; 2 * count];
            (values[0], values[2 * count - 1]) = (f64::NAN, f64::NAN);
            let x = Tensor::from_vec(values, (2, count), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            for kernel in ["min", "max"] {
                let got = reduce(kernel, &View::contiguous(&x), &[1]).to_dtype(DType::F64).unwrap();
                let got: Vec<f64> = got.to_vec1().unwrap();
                assert!(got[0].is_nan() && got[1] == 1.0, "{kernel} {dtype:?} {count}: {got:?}");
            }
        }
    }
}
