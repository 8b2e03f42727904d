//! RMS normalisation.

use candle_core::DType;
use cuda_kernels::emulation::Argument;

use crate::card::{Buffer, assert_close, in_every_schedule, launch, null, numbers, suffix, tolerance};

const EPS: f64 = 1e-6;

#[test]
fn forward_and_backward_are_those_of_the_cpu() {
    for (rows, width, rows_each) in [(1, 1, 1), (7, 65, 3), (9, 96, 4), (23, 136, 11), (5, 516, 5)] {
        for (dtype, weight_dtype) in
            [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)]
        {
            let x = numbers(1, &[rows, width], dtype);
            let weight = numbers(2, &[width], weight_dtype);
            let dy = numbers(3, &[rows, width], dtype);
            let residual = numbers(4, &[rows, width], dtype);
            let dweight = numbers(5, &[width], DType::F32);
            let what = format!("({rows}, {width}) {dtype:?} {weight_dtype:?}");
            let names = format!("{}_{}", suffix(dtype), suffix(weight_dtype));
            let sizes = [rows, rows_each, width].map(|size| Argument::from_value(size as i32));

            let got = in_every_schedule(&what, |schedule| {
                let (mut x, mut weight) = (Buffer::copy_of(&x), Buffer::copy_of(&weight));
                let mut y = Buffer::new(&[rows, width], dtype);
                let mut inv_rms = Buffer::new(&[rows], DType::F32);
                let arguments = [
                    x.pointer(),
                    weight.pointer(),
                    Argument::from_value(EPS as f32),
                    y.pointer(),
                    inv_rms.pointer(),
                    sizes[0].clone(),
                    sizes[2].clone(),
                ];
                launch(&format!("rms_norm_{names}"), [rows.div_ceil(4), 1, 1], 128, 0, &arguments, schedule);
                vec![y, inv_rms]
            });
            let (y, inv_rms) = t5_ops::rms_norm(&x, &weight, EPS).unwrap();
            assert_close(&format!("{what} y"), &got[0], &y, tolerance(dtype));
            assert_close(&format!("{what} inv_rms"), &got[1], &inv_rms, 2e-6);

            for residual in [None, Some(&residual)] {
                let parts = rows.div_ceil(rows_each);
                let got = in_every_schedule(&what, |schedule| {
                    let (mut x, mut weight, mut inv_rms) =
                        (Buffer::copy_of(&x), Buffer::copy_of(&weight), Buffer::copy_of(&inv_rms));
                    let (mut dy, mut dweight) = (Buffer::copy_of(&dy), Buffer::copy_of(&dweight));
                    let mut residual = residual.map(Buffer::copy_of);
                    let mut partial = Buffer::new(&[parts, width], DType::F32);
                    let arguments = [
                        x.pointer(),
                        weight.pointer(),
                        inv_rms.pointer(),
                        dy.pointer(),
                        residual.as_mut().map_or_else(null, Buffer::pointer),
                        partial.pointer(),
                        sizes[0].clone(),
                        sizes[1].clone(),
                        sizes[2].clone(),
                    ];
                    let shared = (width + 64) * size_of::<f32>();
                    launch(&format!("rms_norm_backward_{names}"), [parts, 1, 1], 128, shared, &arguments, schedule);
                    let arguments = [
                        partial.pointer(),
                        dweight.pointer(),
                        Argument::from_value(parts as i32),
                        Argument::from_value(width as i32),
                    ];
                    let shared = 64 * 16 * size_of::<f32>();
                    launch("add_partial_sums", [width.div_ceil(32), 1, 1], 64, shared, &arguments, schedule);
                    vec![dy, dweight]
                });
                let expected_dweight = dweight.copy().unwrap();
                let given = dy.copy().unwrap();
                let dx =
                    t5_ops::rms_norm_backward(&x, &weight, &inv_rms, given, residual, Some(&expected_dweight)).unwrap();
                // With a single channel the gradient is a difference of equals.
                let within = if width == 1 { 1.0 } else { tolerance(dtype) };
                assert_close(&format!("{what} dx"), &got[0], &dx, within);
                assert_close(&format!("{what} dweight"), &got[1], &expected_dweight, 1e-5);
            }
        }
    }
}

#[test]
fn lengths_of_rows_are_those_of_candle() {
    for (rows, width) in [(1, 1), (9, 33), (5, 516)] {
        let x = numbers(6, &[rows, width], DType::F32);
        let got = in_every_schedule(&format!("({rows}, {width})"), |schedule| {
            let (mut x, mut lengths) = (Buffer::copy_of(&x), Buffer::new(&[rows], DType::F32));
            let sizes = [rows, width].map(|size| Argument::from_value(size as i32));
            let arguments = [x.pointer(), lengths.pointer(), sizes[0].clone(), sizes[1].clone()];
            launch("row_lengths", [rows.div_ceil(4), 1, 1], 128, 0, &arguments, schedule);
            vec![lengths]
        });
        let expected = x.sqr().unwrap().sum(1).unwrap().sqrt().unwrap();
        assert_close(&format!("({rows}, {width})"), &got[0], &expected, 2e-6);
    }
}
