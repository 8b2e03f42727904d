//! Adafactor, AdamW and what they are made of.

use candle_core::{DType, Tensor};
use cuda_kernels::emulation::{Argument, Schedule};
use t5_ops::{AdafactorHyper, AdamwHyper, Rounding, SecondMoment};

use crate::card::{Buffer, assert_close, in_every_schedule, launch, null, numbers, suffix, tolerance};

#[repr(C)]
#[derive(Clone, Copy)]
struct Noise {
    key: u64,
    is_stochastic: u32,
    first_row: u32,
}

impl Noise {
    fn of(rounding: Rounding, first_row: usize) -> Self {
        match rounding {
            Rounding::Nearest => Self { key: 0, is_stochastic: 0, first_row: first_row as u32 },
            Rounding::Stochastic { key } => Self { key, is_stochastic: 1, first_row: first_row as u32 },
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Adafactor {
    numbers: [f64; 8],
    scales_parameter: u32,
    has_first_moment: u32,
}

impl Adafactor {
    fn of(h: &AdafactorHyper) -> Self {
        let beta1 = h.beta1.unwrap_or(0.0);
        let first = [h.learning_rate, h.beta2, h.eps1, h.eps2];
        let [a, b, c, d] = first;
        Self {
            numbers: [a, b, c, d, h.clip_threshold, h.weight_decay, h.gradient_scale, beta1],
            scales_parameter: u32::from(h.scale_parameter),
            has_first_moment: u32::from(h.beta1.is_some()),
        }
    }
}

const DTYPES: [(DType, DType); 4] =
    [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16), (DType::F32, DType::BF16)];
const KEY: u64 = 0x1234_5678_9ABC_DEF0;

fn int(n: usize) -> Argument {
    Argument::of(n as i32)
}

/// Sums of squares by row and by column, and their total.
fn square_sums(gradient: &mut Buffer, dtype: DType, rows: usize, width: usize, schedule: Schedule) -> [Buffer; 3] {
    const COLUMNS: usize = 1024;
    let (rows_each, col_tiles) = (3, width.div_ceil(COLUMNS));
    let parts = rows.div_ceil(rows_each);
    let mut of_rows = Buffer::new(&[rows, col_tiles], DType::F32);
    let mut of_columns = Buffer::new(&[2 * parts, width], DType::F32);
    let shared = (2 * COLUMNS + 32) * 8;
    let arguments =
        [gradient.pointer(), of_rows.pointer(), of_columns.pointer(), int(rows), int(rows_each), int(width)];
    let name = format!("square_sums_{}", suffix(dtype));
    launch(&name, [parts, col_tiles, 1], 64, shared, &arguments, schedule);
    let (mut row_sums, mut col_sums) = (Buffer::new(&[rows], DType::F32), Buffer::new(&[width], DType::F32));
    let pointers = [of_rows.pointer(), of_columns.pointer(), row_sums.pointer(), col_sums.pointer()];
    let arguments = [&pointers[..], &[int(rows), int(col_tiles), int(parts), int(width)]].concat();
    launch("finish_square_sums", [(rows + width).div_ceil(64), 1, 1], 64, 0, &arguments, schedule);
    let mut total = Buffer::new(&[2], DType::F32);
    launch("total_of", [1, 1, 1], 64, 32 * 8, &[row_sums.pointer(), total.pointer(), int(rows)], schedule);
    [row_sums, col_sums, total]
}

#[test]
fn squares_are_added_by_row_by_column_and_in_all() {
    for (rows, width) in [(1, 1), (1, 70), (37, 5), (7, 1030)] {
        for dtype in [DType::F32, DType::BF16] {
            let gradient = numbers(1, &[rows, width], dtype);
            let got = in_every_schedule("square sums", |schedule| {
                square_sums(&mut Buffer::of(&gradient), dtype, rows, width, schedule).into()
            });
            let squares = gradient.to_dtype(DType::F64).unwrap().sqr().unwrap();
            assert_close("rows", &got[0], &squares.sum(1).unwrap(), 1e-6);
            assert_close("columns", &got[1], &squares.sum(0).unwrap(), 1e-6);
            let bits: Vec<f32> = got[2].to_vec1().unwrap();
            let total = f64::from_bits(u64::from(bits[0].to_bits()) | u64::from(bits[1].to_bits()) << 32);
            let expected: f64 = squares.sum_all().unwrap().to_scalar().unwrap();
            assert!((total - expected).abs() <= 1e-6 * expected, "{total} {expected}");
        }
    }
}

/// One update by the kernels: parameter, moments.
fn adafactor(
    param: &Tensor,
    grad: &Tensor,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
    schedule: Schedule,
) -> Vec<Buffer> {
    let (rows, width) = param.dims2().unwrap_or_else(|_| (1, param.elem_count()));
    let (mut p, mut g, mut first) = (Buffer::of(param), Buffer::of(grad), first.map(Buffer::of));
    let (mut row_factor, mut col_factor) = (Buffer::new(&[rows], DType::F32), Buffer::new(&[width], DType::F32));
    let hyper = Argument::of(Adafactor::of(h));
    let moments = match second {
        SecondMoment::Factored { row, col } => {
            let [mut row_sums, mut col_sums, _] = square_sums(&mut g, grad.dtype(), rows, width, schedule);
            let (mut row, mut col) = (Buffer::of(row), Buffer::of(col));
            let pointers = [&mut row_sums, &mut col_sums, &mut row, &mut col, &mut row_factor, &mut col_factor];
            let pointers = pointers.map(Buffer::pointer);
            let arguments = [std::slice::from_ref(&hyper), &pointers[..], &[int(rows), int(width)]].concat();
            launch("adafactor_factors", [1 + width.div_ceil(64), 1, 1], 64, 32 * 8, &arguments, schedule);
            vec![row, col]
        }
        SecondMoment::Full(v) => {
            let mut v = Buffer::of(v);
            let pointers = [&mut g, &mut v, &mut row_factor, &mut col_factor].map(Buffer::pointer);
            let arguments = [std::slice::from_ref(&hyper), &pointers[..], &[int(width)]].concat();
            let name = format!("adafactor_factors_of_vector_{}", suffix(grad.dtype()));
            launch(&name, [width.div_ceil(64), 1, 1], 64, 0, &arguments, schedule);
            vec![v]
        }
    };
    let rows_each = 2;
    let parts = rows.div_ceil(rows_each);
    let mut partial = Buffer::new(&[2, 2 * parts], DType::F32);
    let sizes = [int(rows), int(rows_each), int(width)];
    let names = format!("{}_{}", suffix(param.dtype()), suffix(grad.dtype()));
    let pointers = [&mut p, &mut g, &mut row_factor, &mut col_factor, &mut partial].map(Buffer::pointer);
    let arguments = [&pointers[..], &sizes].concat();
    launch(&format!("adafactor_squares_{names}"), [parts, 1, 1], 64, 32 * 8, &arguments, schedule);
    let noise = Argument::of(Noise::of(h.rounding, 0));
    let pointers = [&mut partial, &mut p, &mut g].map(Buffer::pointer);
    let of_first = first.as_mut().map_or_else(null, Buffer::pointer);
    let factors = [row_factor.pointer(), col_factor.pointer()];
    let arguments = [&[hyper, noise], &pointers[..], &[of_first], &factors, &[int(parts)], &sizes].concat();
    launch(&format!("adafactor_apply_{names}"), [parts, 1, 1], 64, 32 * 8, &arguments, schedule);
    [p].into_iter().chain(moments).chain(first).collect()
}

#[test]
fn adafactor_updates_as_the_cpu_does() {
    for shape in [&[1, 1][..], &[7, 70], &[33, 5], &[70]] {
        for (dtype, grad_dtype) in DTYPES {
            for (beta1, rounding) in [
                (None, Rounding::Nearest),
                (Some(0.9), Rounding::Stochastic { key: KEY }),
                (None, Rounding::Stochastic { key: KEY }),
            ] {
                let (param, grad) = (numbers(1, shape, dtype), numbers(2, shape, grad_dtype));
                let positive = |seed, shape: &[usize]| numbers(seed, shape, DType::F32).abs().unwrap();
                let second = match *shape {
                    [rows, width] => SecondMoment::Factored { row: positive(3, &[rows]), col: positive(4, &[width]) },
                    _ => SecondMoment::Full(positive(3, shape)),
                };
                let first = beta1.map(|_| numbers(5, shape, DType::F32));
                let h = AdafactorHyper {
                    beta1,
                    rounding,
                    beta2: 0.4,
                    learning_rate: 0.05,
                    weight_decay: 0.1,
                    gradient_scale: 0.7,
                    ..AdafactorHyper::default()
                };
                let what = format!("{shape:?} {dtype:?} {grad_dtype:?} {h:?}");
                let got = in_every_schedule(&what, |schedule| {
                    adafactor(&param, &grad, &second, first.as_ref(), &h, schedule)
                });
                t5_ops::adafactor(&param, &grad, &second, first.as_ref(), &h).unwrap();
                let moments = match &second {
                    SecondMoment::Factored { row, col } => vec![row, col],
                    SecondMoment::Full(v) => vec![v],
                };
                assert_close(&format!("{what} parameter"), &got[0], &param, tolerance(dtype));
                for (got, expected) in got[1..].iter().zip(moments.into_iter().chain(&first)) {
                    assert_close(&format!("{what} moment"), got, expected, 2e-6);
                }
            }
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Adamw {
    numbers: [f32; 9],
}

#[test]
fn adamw_updates_as_the_cpu_does() {
    for shape in [[1, 70], [7, 5]] {
        for (dtype, grad_dtype) in DTYPES {
            for rounding in [Rounding::Nearest, Rounding::Stochastic { key: KEY }] {
                let (param, grad) = (numbers(1, &shape, dtype), numbers(2, &shape, grad_dtype));
                let (first, second) = (numbers(3, &shape, DType::F32), numbers(4, &shape, DType::F32).abs().unwrap());
                let h = AdamwHyper {
                    rounding,
                    update: 3,
                    learning_rate: 0.05,
                    gradient_scale: 0.7,
                    first_row: 2,
                    ..AdamwHyper::default()
                };
                let what = format!("{shape:?} {dtype:?} {grad_dtype:?} {rounding:?}");
                let got = in_every_schedule(&what, |schedule| {
                    let mut buffers = [&param, &grad, &first, &second].map(Buffer::of);
                    let corrections = [h.beta1, h.beta2].map(|beta| 1.0 - beta.powi(3));
                    let numbers = [
                        h.gradient_scale,
                        h.beta1,
                        h.beta2,
                        1.0 - h.beta1,
                        1.0 - h.beta2,
                        h.learning_rate / corrections[0],
                        corrections[1].sqrt(),
                        h.eps,
                        1.0 - h.learning_rate * h.weight_decay,
                    ];
                    let hyper = Argument::of(Adamw { numbers: numbers.map(|x| x as f32) });
                    let pointers = buffers.each_mut().map(Buffer::pointer);
                    let sizes = [int(shape[0]), int(3), int(shape[1])];
                    let noise = Argument::of(Noise::of(h.rounding, h.first_row));
                    let arguments = [&[hyper, noise], &pointers[..], &sizes].concat();
                    let name = format!("adamw_{}_{}", suffix(dtype), suffix(grad_dtype));
                    launch(&name, [shape[0].div_ceil(3), 1, 1], 64, 0, &arguments, schedule);
                    let [param, _, first, second] = buffers;
                    vec![param, first, second]
                });
                t5_ops::adamw(&param, &grad, &first, &second, &h).unwrap();
                for (got, (expected, within)) in
                    got.iter().zip([(&param, tolerance(dtype)), (&first, 2e-6), (&second, 2e-6)])
                {
                    assert_close(&what, got, expected, within);
                }
            }
        }
    }
}

#[test]
fn gradients_are_added_in_f32() {
    for dtype in [DType::F32, DType::BF16] {
        let (sum, x) = (numbers(1, &[1000], dtype), numbers(2, &[1000], dtype));
        let got = in_every_schedule("sum", |schedule| {
            let (mut sum, mut x) = (Buffer::of(&sum), Buffer::of(&x));
            let arguments = [sum.pointer(), x.pointer(), Argument::of(1000usize)];
            launch(&format!("add_{}", suffix(dtype)), [3, 1, 1], 64, 0, &arguments, schedule);
            vec![sum]
        });
        t5_ops::add_in_place(&sum, &x).unwrap();
        assert_close("sum", &got[0], &sum, 0.0);
    }
}
