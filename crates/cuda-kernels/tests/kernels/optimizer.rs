//! Adafactor, AdamW and their parts.

use candle_core::{DType, Tensor};
use cuda_kernels::emulation::{Argument, Schedule};
use t5_ops::{AdafactorHyper, AdamwHyper, Rounding, SecondMoment};

use crate::card::{Buffer, assert_close, assert_same_bits, in_every_schedule, launch, numbers, suffix, tolerance};

#[repr(C)]
#[derive(Clone, Copy)]
struct Noise {
    key: u64,
    is_stochastic: u32,
    first_row: u32,
}

impl Noise {
    fn new(rounding: Rounding, first_row: usize) -> Self {
        match rounding {
            Rounding::Nearest => Self { key: 0, is_stochastic: 0, first_row: first_row as u32 },
            Rounding::Stochastic { key } => Self { key, is_stochastic: 1, first_row: first_row as u32 },
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Adafactor {
    numbers: [f64; 7],
    scales_parameter: u32,
    has_first_moment: u32,
}

impl Adafactor {
    fn new(h: &AdafactorHyper) -> Self {
        let beta1 = h.beta1.unwrap_or(0.0);
        let first = [h.learning_rate, h.beta2, h.eps1, h.eps2];
        let [a, b, c, d] = first;
        Self {
            numbers: [a, b, c, d, h.clip_threshold, h.weight_decay, beta1],
            scales_parameter: u32::from(h.scale_parameter),
            has_first_moment: u32::from(h.beta1.is_some()),
        }
    }
}

const DTYPES: [(DType, DType); 4] =
    [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16), (DType::F32, DType::BF16)];
const KEY: u64 = 0x1234_5678_9ABC_DEF0;
const THREADS: usize = 64;
/// Columns of a block of `square_sums`.
const COLUMNS: usize = 1024;
/// Shared memory of the keys of rows.
const KEYS: usize = 128 * 8;

fn int(n: usize) -> Argument {
    Argument::from_value(n as i32)
}

/// (N, K); a vector is one row.
fn size_of_matrix(t: &Tensor) -> (usize, usize) {
    t.dims2().unwrap_or((1, t.elem_count()))
}

/// A list of f64.
fn doubles(count: usize) -> Buffer {
    Buffer::new(&[count], DType::F64)
}

fn floats(count: usize) -> Buffer {
    Buffer::new(&[count], DType::F32)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Gradient {
    values: u64,
    of_rows: u64,
    of_columns: u64,
    sums: [u64; 3],
    rows: i32,
    rows_each: i32,
    width: i32,
    row_parts: i32,
    col_parts: i32,
    first_tile: i32,
    first_sum: i32,
    is_bf16: u32,
}

/// Sums of squares by row and by column, and their total, for each gradient.
fn square_sums(gradients: &mut [(&Tensor, Buffer)], schedule: Schedule) -> Vec<[Buffer; 3]> {
    let (mut tiles, mut blocks) = (0, 0);
    // Scratch memory is kept until the launches are done: entries have only its addresses.
    let (mut entries, mut scratch, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for (tensor, gradient) in gradients {
        let (rows, width) = size_of_matrix(tensor);
        // Blocks of few rows, and blocks of more rows than are added in f32.
        let rows_each = if rows > 64 { 67 } else { 3 };
        let (row_parts, col_parts) = (width.div_ceil(COLUMNS), rows.div_ceil(rows_each));
        let (mut of_rows, mut of_columns) = (floats(rows * row_parts), doubles(col_parts * width));
        let mut of = [floats(rows), floats(width), doubles(1)];
        entries.push(Gradient {
            values: gradient.address(),
            of_rows: of_rows.address(),
            of_columns: of_columns.address(),
            sums: of.each_mut().map(Buffer::address),
            rows: rows as i32,
            rows_each: rows_each as i32,
            width: width as i32,
            row_parts: row_parts as i32,
            col_parts: col_parts as i32,
            first_tile: tiles as i32,
            first_sum: blocks as i32,
            is_bf16: u32::from(tensor.dtype() == DType::BF16),
        });
        tiles += row_parts * col_parts;
        blocks += (rows + width).div_ceil(THREADS);
        scratch.extend([of_rows, of_columns]);
        sums.push(of);
    }
    let mut table = Buffer::of_entries(&entries);
    let arguments = [table.pointer(), int(entries.len())];
    launch("square_sums", [tiles, 1, 1], THREADS as u32, COLUMNS * 8 + COLUMNS / 128 * 32 * 4, &arguments, schedule);
    launch("finish_square_sums", [blocks, 1, 1], THREADS as u32, 0, &arguments, schedule);
    launch("total_square_sums", [entries.len(), 1, 1], THREADS as u32, 32 * 8, &arguments[..1], schedule);
    sums
}

#[test]
fn squares_are_added_by_row_by_column_and_in_all() {
    let shapes = [[1, 1], [1, 70], [37, 5], [7, 1030], [1, 2100], [2, 1032], [75, 136]];
    let gradients: Vec<Tensor> = [DType::F32, DType::BF16]
        .iter()
        .flat_map(|&dtype| shapes.iter().enumerate().map(move |(i, shape)| numbers(i as u64, shape, dtype)))
        .collect();
    let sums = |gradients: &[&Tensor]| {
        in_every_schedule("square sums", |schedule| {
            let mut with_buffers: Vec<_> = gradients.iter().map(|tensor| (*tensor, Buffer::copy_of(tensor))).collect();
            square_sums(&mut with_buffers, schedule).into_iter().flatten().collect()
        })
    };
    let got = sums(&gradients.iter().collect::<Vec<_>>());
    for (gradient, got) in gradients.iter().zip(got.chunks(3)) {
        let squares = gradient.to_dtype(DType::F64).unwrap().sqr().unwrap();
        assert_close("rows", &got[0], &squares.sum(1).unwrap(), 1e-6);
        assert_close("columns", &got[1], &squares.sum(0).unwrap(), 1e-6);
        assert_close("total", &got[2], &squares.sum_all().unwrap().reshape(1).unwrap(), 1e-6);
        // Beside other gradients the sums have the same bits as alone.
        for (alone, got) in sums(&[gradient]).iter().zip(got) {
            assert_same_bits(alone, got);
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Parameter {
    values: u64,
    gradient: u64,
    first_moment: u64,
    noise: Noise,
    rows: i32,
    rows_each: i32,
    width: i32,
    first_part: i32,
    is_bf16: u32,
    has_bf16_gradient: u32,
}

/// A parameter that is updated.
struct Case {
    param: Tensor,
    grad: Tensor,
    first: Option<Tensor>,
    second: SecondMoment,
    rounding: Rounding,
}

impl Case {
    /// A parameter of this shape with a second moment of Adafactor's, or of AdamW's if it is `whole`.
    fn new(shape: &[usize], (dtype, grad_dtype): (DType, DType), first: bool, whole: bool, rounding: Rounding) -> Self {
        let positive = |seed, shape: &[usize]| numbers(seed, shape, DType::F32).abs().unwrap();
        let second = match *shape {
            [rows, width] if !whole => SecondMoment::Factored { row: positive(3, &[rows]), col: positive(4, &[width]) },
            _ => SecondMoment::Full(positive(3, shape)),
        };
        let (param, grad) = (numbers(1, shape, dtype), numbers(2, shape, grad_dtype));
        Self { param, grad, first: first.then(|| numbers(5, shape, DType::F32)), second, rounding }
    }

    fn moments(&self) -> Vec<&Tensor> {
        match &self.second {
            SecondMoment::Factored { row, col } => [row, col].into_iter().chain(&self.first).collect(),
            SecondMoment::Full(v) => [v].into_iter().chain(&self.first).collect(),
        }
    }
}

/// The memory of a case on the card: parameter and gradient, and the moments.
struct OnCard {
    param: Buffer,
    grad: Buffer,
    moments: Vec<Buffer>,
}

impl OnCard {
    fn copy(case: &Case) -> Self {
        let moments = case.moments().into_iter().map(Buffer::copy_of).collect();
        Self { param: Buffer::copy_of(&case.param), grad: Buffer::copy_of(&case.grad), moments }
    }

    /// The parameter's entry, whose blocks begin at `blocks`. Advances `blocks` past them.
    fn parameter(&mut self, case: &Case, first_row: usize, blocks: &mut usize) -> Parameter {
        let (rows, width) = size_of_matrix(&case.param);
        // Blocks of few rows, and blocks of more rows than have keys at once.
        let rows_each = if rows > 128 { 140 } else { 2 };
        let first_part = *blocks as i32;
        *blocks += rows.div_ceil(rows_each);
        Parameter {
            values: self.param.address(),
            gradient: self.grad.address(),
            first_moment: case.first.as_ref().and(self.moments.last_mut()).map_or(0, Buffer::address),
            noise: Noise::new(case.rounding, first_row),
            rows: rows as i32,
            rows_each: rows_each as i32,
            width: width as i32,
            first_part,
            is_bf16: u32::from(case.param.dtype() == DType::BF16),
            has_bf16_gradient: u32::from(case.grad.dtype() == DType::BF16),
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Factored {
    parameter: Parameter,
    hyper: Adafactor,
    moments: [u64; 2],
    sums: [u64; 2],
    factors: [u64; 2],
    partial: u64,
    parts: i32,
    first_factor: i32,
}

/// The factor of every gradient.
const SCALE: f64 = 0.7;

/// Updates each parameter by the kernels, and returns parameters and moments.
fn adafactor(cases: &[Case], hyper: impl Fn(&Case) -> AdafactorHyper, schedule: Schedule) -> Vec<Buffer> {
    let mut on_card: Vec<OnCard> = cases.iter().map(OnCard::copy).collect();
    let mut gradients: Vec<_> = cases.iter().map(|case| (&case.grad, Buffer::copy_of(&case.grad))).collect();
    let mut sums = square_sums(&mut gradients, schedule);
    let (mut of_factors, mut of_parts) = (0, 0);
    // As above.
    let (mut entries, mut scratch) = (Vec::new(), Vec::new());
    for ((case, on_card), sums) in cases.iter().zip(&mut on_card).zip(&mut sums) {
        let (rows, width) = size_of_matrix(&case.param);
        let first_factor = of_factors as i32;
        let before = of_parts;
        let parameter = on_card.parameter(case, 0, &mut of_parts);
        let parts = of_parts - before;
        let is_factored = matches!(case.second, SecondMoment::Factored { .. });
        of_factors += width.div_ceil(THREADS) + usize::from(is_factored);
        let [of_rows, of_columns, _] = sums;
        let mut factors = [floats(rows), floats(width), doubles(2 * parts)];
        let [row_factor, col_factor, partial] = factors.each_mut().map(Buffer::address);
        let moments = match is_factored {
            true => [on_card.moments[0].address(), on_card.moments[1].address()],
            false => [0, on_card.moments[0].address()],
        };
        let hyper = Adafactor::new(&hyper(case));
        let (sums, factors_at) = ([of_rows.address(), of_columns.address()], [row_factor, col_factor]);
        let parts = parts as i32;
        entries.push(Factored { parameter, hyper, moments, sums, factors: factors_at, partial, parts, first_factor });
        scratch.extend(factors);
    }
    let mut table = Buffer::of_entries(&entries);
    let arguments = [table.pointer(), int(entries.len()), Argument::from_value(SCALE)];
    for (name, blocks, shared, arguments) in [
        ("adafactor_factors", of_factors, 32 * 8, &arguments[..]),
        ("adafactor_squares", of_parts, 32 * 8, &arguments[..2]),
        ("adafactor_apply", of_parts, KEYS, &arguments[..2]),
    ] {
        launch(name, [blocks, 1, 1], THREADS as u32, shared, arguments, schedule);
    }
    on_card.into_iter().flat_map(|on_card| [on_card.param].into_iter().chain(on_card.moments)).collect()
}

/// Compares parameters and moments after an update with those of the CPU.
#[track_caller]
fn assert_updated(cases: &[Case], got: &[Tensor]) {
    let mut got = got.iter();
    for case in cases {
        let what = format!("{:?} {:?} {:?}", case.param.shape(), case.param.dtype(), case.grad.dtype());
        let parameter = got.next().expect("a parameter");
        assert_close(&format!("{what} parameter"), parameter, &case.param, tolerance(case.param.dtype()));
        assert_rounded_alike(&what, parameter, &case.param);
        for expected in case.moments() {
            assert_close(&format!("{what} moment"), got.next().expect("a moment"), expected, 2e-6);
        }
    }
}

/// Fails if more than a few values in bf16 have other bits: values whose f32 lay near the boundary between two bf16.
#[track_caller]
fn assert_rounded_alike(what: &str, got: &Tensor, expected: &Tensor) {
    if got.dtype() != DType::BF16 {
        return;
    }
    let bits = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<half::bf16>().unwrap();
    let (got, expected) = (bits(got), bits(expected));
    let differ = got.iter().zip(&expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    assert!(differ <= 1 + got.len() / 50, "{what}: {differ} of {} are rounded otherwise", got.len());
}

#[test]
fn adafactor_updates_as_the_cpu_does() {
    // The thresholds clip every update, some of them, and none.
    let ways = [
        (0.25, None, Rounding::Nearest),
        (1.0, Some(0.9), Rounding::Stochastic { key: KEY }),
        (50.0, None, Rounding::Stochastic { key: KEY + 1 }),
    ];
    for (clip_threshold, beta1, rounding) in ways {
        let hyper = |case: &Case| AdafactorHyper {
            beta1,
            clip_threshold,
            rounding: case.rounding,
            beta2: 0.4,
            // Each case has its own constants.
            learning_rate: 0.05 * case.param.elem_count() as f64,
            weight_decay: 0.1,
            gradient_scale: SCALE,
            ..AdafactorHyper::default()
        };
        // More blocks than a warp has threads, and more rows than a thread of the factors has at once.
        let cases: Vec<Case> = [&[1, 1][..], &[7, 70], &[33, 5], &[70], &[150, 12], &[7, 264], &[100, 4], &[1100, 5]]
            .iter()
            .flat_map(|shape| DTYPES.map(|dtypes| Case::new(shape, dtypes, beta1.is_some(), false, rounding)))
            .collect();
        let got = in_every_schedule("adafactor", |schedule| adafactor(&cases, hyper, schedule));
        for (i, case) in cases.iter().enumerate().step_by(3) {
            let each = 1 + cases[i].moments().len();
            let from: usize = cases[..i].iter().map(|case| 1 + case.moments().len()).sum();
            let alone = adafactor(std::slice::from_ref(case), hyper, Schedule::all().next().expect("a schedule"));
            for (alone, got) in alone.iter().zip(&got[from..from + each]) {
                assert_same_bits(&alone.tensor(), got);
            }
        }
        for case in &cases {
            t5_ops::adafactor(&case.param, &case.grad, &case.second, case.first.as_ref(), &hyper(case)).unwrap();
        }
        assert_updated(&cases, &got);
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Decayed {
    parameter: Parameter,
    numbers: [f32; 8],
    second_moment: u64,
}

fn adamw(cases: &[Case], h: &AdamwHyper, schedule: Schedule) -> Vec<Buffer> {
    let corrections = [h.beta1, h.beta2].map(|beta| 1.0 - beta.powi(h.update as i32));
    let numbers = [
        h.beta1,
        h.beta2,
        1.0 - h.beta1,
        1.0 - h.beta2,
        h.learning_rate / corrections[0],
        corrections[1].sqrt(),
        h.eps,
        1.0 - h.learning_rate * h.weight_decay,
    ];
    let mut on_card: Vec<OnCard> = cases.iter().map(OnCard::copy).collect();
    let mut blocks = 0;
    let entry = |(case, on_card): (&Case, &mut OnCard)| Decayed {
        parameter: on_card.parameter(case, h.first_row, &mut blocks),
        numbers: numbers.map(|x| x as f32),
        second_moment: on_card.moments[0].address(),
    };
    let entries: Vec<Decayed> = cases.iter().zip(&mut on_card).map(entry).collect();
    let mut table = Buffer::of_entries(&entries);
    let arguments = [table.pointer(), int(entries.len()), Argument::from_value(SCALE)];
    launch("adamw", [blocks, 1, 1], THREADS as u32, KEYS, &arguments, schedule);
    on_card.into_iter().flat_map(|on_card| [on_card.param].into_iter().chain(on_card.moments)).collect()
}

#[test]
fn adamw_updates_as_the_cpu_does() {
    let ways = [Rounding::Nearest, Rounding::Stochastic { key: KEY }];
    let cases: Vec<Case> = [[1, 70], [7, 5], [150, 12]]
        .iter()
        .flat_map(|shape| ways.map(|rounding| DTYPES.map(|dtypes| Case::new(shape, dtypes, true, true, rounding))))
        .flatten()
        .collect();
    let h = AdamwHyper { update: 3, learning_rate: 0.05, gradient_scale: SCALE, first_row: 2, ..AdamwHyper::default() };
    let got = in_every_schedule("adamw", |schedule| adamw(&cases, &h, schedule));
    for Case { param, grad, first, second, rounding } in &cases {
        let (Some(first), SecondMoment::Full(second)) = (first, second) else { unreachable!("two whole moments") };
        let hyper = AdamwHyper { rounding: *rounding, ..h };
        t5_ops::adamw(param, grad, first, second, &hyper).unwrap();
    }
    assert_updated(&cases, &got);
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Narrowed {
    from: u64,
    to: u64,
    elements: u64,
    first_block: i32,
    unused: u32,
}

#[test]
fn copies_in_bf16_of_many_weights_are_casts() {
    // Less than a block, exactly one block, and more than two.
    let weights: Vec<Tensor> = [[3, 5], [128, 128], [3, 11_003]]
        .iter()
        .enumerate()
        .map(|(seed, shape)| numbers(seed as u64, shape, DType::F32))
        .collect();
    let got = in_every_schedule("copies", |schedule| {
        let mut from: Vec<Buffer> = weights.iter().map(Buffer::copy_of).collect();
        let mut to: Vec<Buffer> = weights.iter().map(|w| Buffer::new(w.dims(), DType::BF16)).collect();
        let mut blocks = 0;
        let entry = |((w, from), to): ((&Tensor, &mut Buffer), &mut Buffer)| {
            let (elements, first_block) = (w.elem_count() as u64, blocks as i32);
            blocks += w.elem_count().div_ceil(16 << 10);
            Narrowed { from: from.address(), to: to.address(), elements, first_block, unused: 0 }
        };
        let entries: Vec<Narrowed> = weights.iter().zip(&mut from).zip(&mut to).map(entry).collect();
        let mut table = Buffer::of_entries(&entries);
        launch("narrow_each", [blocks, 1, 1], 64, 0, &[table.pointer(), int(entries.len())], schedule);
        to
    });
    for (got, w) in got.iter().zip(&weights) {
        assert_same_bits(got, &w.to_dtype(DType::BF16).unwrap());
    }
}

/// Counts of elements: all by fours, and with some left over. A buffer of the second count begins at an address that allows no fours in some
/// schedules.
const COUNTS: [usize; 2] = [1000, 1003];

#[test]
fn gradients_are_added_in_f32() {
    for (dtype, count) in [DType::F32, DType::BF16].into_iter().flat_map(|dtype| COUNTS.map(|count| (dtype, count))) {
        let (sum, x) = (numbers(1, &[count], dtype), numbers(2, &[count], dtype));
        let got = in_every_schedule("sum", |schedule| {
            let (mut sum, mut x) = (Buffer::copy_of(&sum), Buffer::copy_of(&x));
            let arguments = [sum.pointer(), x.pointer(), Argument::from_value(count)];
            launch(&format!("add_{}", suffix(dtype)), [3, 1, 1], 64, 0, &arguments, schedule);
            vec![sum]
        });
        t5_ops::add_in_place(&sum, &x).unwrap();
        assert_close("sum", &got[0], &sum, 0.0);
    }
}

#[test]
fn a_scaled_tensor_has_the_bits_of_the_cpu() {
    for (dtype, count) in [DType::F32, DType::BF16].into_iter().flat_map(|dtype| COUNTS.map(|count| (dtype, count))) {
        let x = numbers(1, &[count], dtype);
        let got = in_every_schedule("scaled", |schedule| {
            let (mut x, mut y) = (Buffer::copy_of(&x), Buffer::new(&[count], dtype));
            let arguments = [x.pointer(), y.pointer(), Argument::from_value(0.37f32), Argument::from_value(count)];
            launch(&format!("scaled_{}", suffix(dtype)), [3, 1, 1], 64, 0, &arguments, schedule);
            vec![y]
        });
        let expected = (x.to_dtype(DType::F32).unwrap() * f64::from(0.37f32)).unwrap().to_dtype(dtype).unwrap();
        assert_same_bits(&got[0], &expected);
    }
}
