//! Products of few rows with weights in codes.

use candle_core::{DType, Tensor};
use cuda_kernels::emulation::Argument;
use t5_ops::{Precision, Quantised};

use crate::card::{Buffer, assert_close, in_every_schedule, launch, numbers, suffix, tolerance};
use crate::dequantise::{TABLES, weight};

/// Threads of a block: of two warps, the last of which may have no column of the result.
const THREADS: usize = 64;
/// Columns of the rows that are in shared memory at a time.
const AT_ONCE: usize = 512;

/// `x` times the transpose of the weight, by the kernel whose blocks have `each` rows.
fn product(w: &Quantised, x: &Tensor, each: usize) -> Tensor {
    let (precision, (outputs, width)) = (w.quantisation().precision(), w.quantisation().shape());
    let (rows, dtype) = (x.dim(0).unwrap(), x.dtype());
    let name = format!("small_m_{each}_{}_{}", precision.name(), suffix(dtype));
    let got = in_every_schedule(&format!("{name}: {rows} rows, {outputs} x {width}"), |schedule| {
        let (mut bytes, mut x) = (Buffer::copy_of(w.bytes()), Buffer::copy_of(x));
        let mut y = Buffer::new(&[rows, outputs], dtype);
        let (mut arguments, mut at) = (Vec::new(), 0);
        for of_weight in w.quantisation().parts() {
            arguments.push(bytes.pointer_at(at));
            at += of_weight.bytes();
        }
        arguments.extend([x.pointer(), y.pointer()]);
        arguments.extend([rows, width, outputs].map(|size| Argument::from_value(size as i32)));
        let tables = if precision == Precision::Nf4 { TABLES } else { 0 };
        let blocks = outputs.div_ceil(THREADS / 32);
        launch(
            &name,
            [blocks, rows.div_ceil(each), 1],
            THREADS as u32,
            tables + each * AT_ONCE * 4,
            &arguments,
            schedule,
        );
        vec![y]
    });
    got.into_iter().next().unwrap()
}

#[test]
fn products_of_few_rows_with_codes_are_those_of_the_cpu() {
    // Widths that are read eight at a time, one by one, and in more than one part.
    for (outputs, width) in [(7, 1_032), (5, 101), (1, 8), (4, 514)] {
        for precision in [Precision::Int8, Precision::Nf4] {
            let w = weight(precision, (outputs, width));
            for dtype in [DType::F32, DType::BF16] {
                // The weight as the product takes it: in the dtype of the rows. Sums of the reference are in f64.
                let weight = w.dequantised().unwrap().to_dtype(dtype).unwrap().to_dtype(DType::F64).unwrap();
                for (rows, kernel) in [(1, 4), (4, 4), (5, 8), (16, 8)] {
                    let x = numbers(rows as u64, &[rows, width], dtype);
                    let expected = x.to_dtype(DType::F64).unwrap().matmul(&weight.t().unwrap()).unwrap();
                    let what = format!("{precision:?} {dtype:?}: {rows} rows, {outputs} x {width}");
                    assert_close(&what, &product(&w, &x, kernel), &expected, tolerance(dtype));
                }
            }
        }
    }
}
