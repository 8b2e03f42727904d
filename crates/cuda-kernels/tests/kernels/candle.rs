//! The kernels that candle launches by name. They are launched as in candle's `cuda_backend`, and compared with its operations on the CPU.

mod indexing;
mod reduce;

use candle_core::scalar::Scalar;
use candle_core::{DType, Device, Result, Tensor};
use cuda_kernels::emulation::Argument;
use half::{bf16, f16};

use crate::card::{Buffer, in_every_schedule, launch, null, number, numbers};

const FLOATING: [DType; 3] = [DType::F32, DType::F64, DType::BF16];
const INTEGERS: [DType; 3] = [DType::U8, DType::U32, DType::I64];

fn dtypes() -> impl Iterator<Item = DType> {
    FLOATING.into_iter().chain(INTEGERS)
}

/// A tensor that is a view of a contiguous tensor: a kernel gets it in this form.
struct View {
    storage: Tensor,
    view: Tensor,
}

impl View {
    fn contiguous(t: &Tensor) -> Self {
        Self { storage: t.clone(), view: t.clone() }
    }

    /// The same elements, with the first and the last dimension swapped in memory.
    fn transposed(t: &Tensor) -> Self {
        let last = t.rank() - 1;
        let storage = t.transpose(0, last).unwrap().contiguous().unwrap();
        Self { view: storage.transpose(0, last).unwrap(), storage }
    }

    /// The same elements, within longer rows.
    fn narrowed(t: &Tensor) -> Self {
        let (last, beside) = (t.rank() - 1, t.zeros_like().unwrap());
        let storage = Tensor::cat(&[&beside, t, &beside], last).unwrap();
        let width = t.dims()[last];
        Self { view: storage.narrow(last, width, width).unwrap(), storage }
    }

    /// The elements at the first index of the first dimension, repeated along it.
    fn broadcast(t: &Tensor) -> Self {
        let storage = t.narrow(0, 0, 1).unwrap().contiguous().unwrap();
        Self { view: storage.broadcast_as(t.shape()).unwrap(), storage }
    }

    fn each(t: &Tensor) -> [Self; 4] {
        [Self::contiguous, Self::transposed, Self::narrowed, Self::broadcast].map(|of| of(t))
    }

    /// Sizes and strides, as candle copies them to a card. It passes none for contiguous tensors.
    fn layout<'a>(views: &[&Self]) -> Given<'a> {
        match views.iter().all(|view| view.view.is_contiguous()) {
            true => Given::Value(null()),
            false => Self::layout_at_all(views),
        }
    }

    fn layout_at_all<'a>(views: &[&Self]) -> Given<'a> {
        let strides = views.iter().flat_map(|view| view.view.stride());
        let numbers: Vec<i64> = views[0].view.dims().iter().chain(strides).map(|&n| n as i64).collect();
        Given::Numbers(numbers)
    }

    fn bytes_before(&self) -> usize {
        self.view.layout().start_offset() * self.view.dtype().size_in_bytes()
    }
}

/// An argument of a launch.
enum Given<'a> {
    View(&'a View),
    Numbers(Vec<i64>),
    Value(Argument),
    /// The result, from this byte on.
    Result(usize),
}

fn size(n: usize) -> Given<'static> {
    Given::Value(Argument::from_value(n))
}

/// Launches a kernel, and returns its result.
#[track_caller]
fn run(name: &str, [blocks, threads]: [usize; 2], given: &[Given], result: impl Fn() -> Buffer) -> Tensor {
    let results = in_every_schedule(name, |schedule| {
        let (mut result, mut buffers, mut arguments) = (result(), Vec::new(), Vec::new());
        for given in given {
            let (buffer, before) = match given {
                Given::View(view) => (Buffer::copy_of(&view.storage), view.bytes_before()),
                Given::Numbers(numbers) => {
                    (Buffer::copy_of(&Tensor::new(numbers.as_slice(), &Device::Cpu).unwrap()), 0)
                }
                Given::Value(value) => {
                    arguments.push(value.clone());
                    continue;
                }
                Given::Result(before) => {
                    arguments.push(pointer(&mut result, *before));
                    continue;
                }
            };
            buffers.push(buffer);
            arguments.push(pointer(buffers.last_mut().expect("the buffer of this argument"), before));
        }
        launch(name, [blocks, 1, 1], threads as u32, 0, &arguments, schedule);
        vec![result]
    });
    results.into_iter().next().expect("a result")
}

fn pointer(buffer: &mut Buffer, before: usize) -> Argument {
    if before == 0 { buffer.pointer() } else { buffer.pointer_at(before) }
}

/// Blocks and threads of a launch with a thread for each element, as in candle.
fn threads_for(count: usize) -> [usize; 2] {
    [count.div_ceil(1024), 1024]
}

/// Fails unless every element equals the expected one, is NaN like it, or is within the tolerance.
#[track_caller]
fn assert_same(what: &str, got: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{what}");
    if got.dtype().is_int() {
        let all = |t: &Tensor| t.to_dtype(DType::I64).unwrap().flatten_all().unwrap().to_vec1::<i64>().unwrap();
        return assert_eq!(all(got), all(expected), "{what}");
    }
    let all = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    for (i, (got, expected)) in all(got).into_iter().zip(all(expected)).enumerate() {
        let is_close = (got - expected).abs() <= tolerance * expected.abs().max(1.0);
        let is_same = got == expected || got.is_nan() && expected.is_nan();
        assert!(is_same || is_close, "{what}: element {i}: expected {expected}, got {got}");
    }
}

/// An error of a few units in the last place.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 4e-3,
        DType::F64 => 1e-14,
        _ => 2e-6,
    }
}

/// Numbers in [-4, 4) after a few that are special to a float.
fn floats(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -2.5, 1.0, -1.0];
    let mut values = flat(&(numbers(seed, shape, DType::F64) * 4.0).unwrap());
    let from = seed as usize % 3;
    for (value, special) in values.iter_mut().skip(from).step_by(2).zip(special) {
        *value = special;
    }
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// Integers from `least` on, `count` of them.
fn integers(seed: u64, shape: &[usize], least: f64, count: f64, dtype: DType) -> Tensor {
    let random = flat(&numbers(seed, shape, DType::F64)).into_iter();
    let values: Vec<i64> = random.map(|x| (least + (x + 1.0) / 2.0 * count) as i64).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Elements of any type. Sums and products of a few of them are in its range.
fn elements(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    match dtype {
        DType::U8 => integers(seed, shape, 0.0, 12.0, dtype),
        DType::U32 => integers(seed, shape, 0.0, 5000.0, dtype),
        DType::I64 => integers(seed, shape, -4e9, 8e9, dtype),
        _ => floats(seed, shape, dtype),
    }
}

/// Runs a kernel of one tensor and a result of its shape. Some have arguments `before` the tensors, others `after` them.
#[track_caller]
fn check_unary(name: &str, from: &View, before: &[Argument], after: &[Argument], expected: &Tensor, tolerance: f64) {
    let count = from.view.elem_count();
    let values = |arguments: &[Argument]| arguments.iter().cloned().map(Given::Value).collect::<Vec<_>>();
    let mut given = vec![size(count), size(from.view.rank()), View::layout(&[from])];
    given.extend(values(before));
    given.extend([Given::View(from), Given::Result(0)]);
    given.extend(values(after));
    let got = run(name, threads_for(count), &given, || Buffer::new(from.view.dims(), expected.dtype()));
    assert_same(name, &got, expected, tolerance);
}

const SHAPE: [usize; 3] = [3, 5, 7];

#[test]
fn functions_of_an_element_are_those_of_the_cpu() {
    type Function = fn(&Tensor) -> Result<Tensor>;
    let functions: [(&str, Function); 20] = [
        ("uneg", Tensor::neg),
        ("urecip", Tensor::recip),
        ("uexp", Tensor::exp),
        ("ulog", Tensor::log),
        ("usin", Tensor::sin),
        ("ucos", Tensor::cos),
        ("utanh", Tensor::tanh),
        ("uerf", Tensor::erf),
        ("uceil", Tensor::ceil),
        ("ufloor", Tensor::floor),
        ("uround", Tensor::round),
        ("usign", Tensor::sign),
        ("uabs", Tensor::abs),
        ("usqr", Tensor::sqr),
        ("usqrt", Tensor::sqrt),
        ("ugelu", Tensor::gelu),
        ("ugelu_erf", Tensor::gelu_erf),
        ("urelu", Tensor::relu),
        ("usilu", Tensor::silu),
        ("usigmoid", |x| (x.neg()?.exp()? + 1.0)?.recip()),
    ];
    for dtype in FLOATING {
        for (name, function) in functions {
            let x = floats(1, &SHAPE, dtype);
            for from in [View::contiguous(&x), View::transposed(&x)] {
                let expected = function(&in_f32_of_bf16(&from.view)).unwrap().to_dtype(dtype).unwrap();
                let name = format!("{name}_{}", dtype.as_str());
                check_unary(&name, &from, &[], &[], &expected, rounding(dtype));
            }
        }
    }
}

/// bf16 is computed in f32 here. candle's CPU rounds after each step of a formula.
fn in_f32_of_bf16(t: &Tensor) -> Tensor {
    if t.dtype() == DType::BF16 { t.to_dtype(DType::F32).unwrap() } else { t.clone() }
}

#[test]
fn functions_with_parameters_are_those_of_the_cpu() {
    for dtype in dtypes() {
        let suffix = dtype.as_str();
        for from in View::each(&elements(2, &SHAPE, dtype)) {
            let (factor, term) = if dtype.is_int() { (3.0, 5.0) } else { (-1.75, 0.625) };
            let expected = in_f32_of_bf16(&from.view).affine(factor, term).unwrap().to_dtype(dtype).unwrap();
            let parameters = [factor, term].map(|x| number(dtype, x));
            check_unary(&format!("affine_{suffix}"), &from, &[], &parameters, &expected, rounding(dtype));
            if dtype.is_int() {
                continue;
            }
            for exponent in [2.0, -0.5, 3.0] {
                let expected = in_f32_of_bf16(&from.view).powf(exponent).unwrap().to_dtype(dtype).unwrap();
                let parameter = [number(dtype, exponent)];
                check_unary(&format!("upowf_{suffix}"), &from, &parameter, &[], &expected, rounding(dtype));
            }
            let expected = in_f32_of_bf16(&from.view).elu(0.75).unwrap().to_dtype(dtype).unwrap();
            check_unary(&format!("uelu_{suffix}"), &from, &[number(dtype, 0.75)], &[], &expected, rounding(dtype));
        }
    }
}

#[test]
fn elements_are_copied_and_set_where_they_lie() {
    for dtype in dtypes() {
        let suffix = dtype.as_str();
        // More than one block has threads.
        for shape in [&SHAPE[..], &[3, 700], &[1]] {
            for from in View::each(&elements(3, shape, dtype)) {
                check_unary(&format!("ucopy_{suffix}"), &from, &[], &[], &from.view, 0.0);
            }
            // If several elements of the target share memory, the error is candle's, not the kernel's.
            for to in View::each(&elements(4, shape, dtype)).into_iter().take(3) {
                let count = to.view.elem_count();
                let layout = View::layout(&[&to]);
                let value = Given::Value(number(dtype, 1.0));
                let given = [size(count), size(shape.len()), layout, value, Given::Result(to.bytes_before())];
                let got =
                    run(&format!("const_set_{suffix}"), threads_for(count), &given, || Buffer::copy_of(&to.storage));
                // A separate copy: candle sets values in place.
                let (expected, last) = (to.storage.copy().unwrap(), shape.len() - 1);
                let set = match to.view.layout().start_offset() {
                    0 => expected.clone(),
                    width => expected.narrow(last, width, width).unwrap(),
                };
                set.const_set(Scalar::one(dtype)).unwrap();
                assert_same(&format!("const_set_{suffix}"), &got, &expected, 0.0);
            }
        }
        let (from, to) = (elements(5, &[33, 41], dtype), elements(6, &[37, 50], dtype));
        let (rows, width) = (33, 34);
        let numbers = [rows, width, 41, 50].map(|n: u32| Given::Value(Argument::from_value(n)));
        let source = View { view: from.narrow(1, 7, 34).unwrap(), storage: from };
        let before = (2 * 50 + 3) * dtype.size_in_bytes();
        let given: Vec<Given> = [Given::View(&source), Given::Result(before)].into_iter().chain(numbers).collect();
        let got = run(&format!("copy2d_{suffix}"), threads_for(33 * 34), &given, || Buffer::copy_of(&to));
        let expected = to.slice_assign(&[2..35, 3..37], &source.view).unwrap();
        assert_same(&format!("copy2d_{suffix}"), &got, &expected, 0.0);
    }
}

#[test]
fn operations_on_two_elements_are_those_of_the_cpu() {
    type Operation = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let operations: [(&str, Operation); 12] = [
        ("badd", Tensor::add),
        ("bsub", Tensor::sub),
        ("bmul", Tensor::mul),
        ("bdiv", Tensor::div),
        ("bmaximum", |x, y| x.maximum(y)),
        ("bminimum", |x, y| x.minimum(y)),
        ("eq", |x, y| x.eq(y)),
        ("ne", |x, y| x.ne(y)),
        ("lt", |x, y| x.lt(y)),
        ("le", |x, y| x.le(y)),
        ("gt", |x, y| x.gt(y)),
        ("ge", |x, y| x.ge(y)),
    ];
    for dtype in dtypes() {
        let [left, right] = match dtype {
            // No difference is negative, and no divisor is zero.
            DType::U8 => [integers(7, &SHAPE, 8.0, 8.0, dtype), integers(8, &SHAPE, 1.0, 8.0, dtype)],
            DType::U32 => [integers(7, &SHAPE, 3e4, 3e4, dtype), integers(8, &SHAPE, 1.0, 3e4, dtype)],
            DType::I64 => [integers(7, &SHAPE, -4e9, 8e9, dtype), integers(8, &SHAPE, -9e5, 8e5, dtype)],
            // With NaN on the left, on the right, and on both sides.
            _ => [floats(7, &SHAPE, dtype), floats(9, &SHAPE, dtype)],
        };
        // Some are equal.
        let is_odd = (numbers(10, &SHAPE, DType::F32) * 4.0).unwrap().round().unwrap().eq(0.0).unwrap();
        let right = is_odd.where_cond(&left, &right).unwrap();
        for left in [View::contiguous(&left), View::transposed(&left)] {
            for right in [View::contiguous(&right), View::narrowed(&right), View::broadcast(&right)] {
                for (name, operation) in operations {
                    let Ok(expected) = operation(&left.view, &right.view) else { panic!("{name}") };
                    let count = left.view.elem_count();
                    let layout = View::layout(&[&left, &right]);
                    let operands = [Given::View(&left), Given::View(&right), Given::Result(0)];
                    let given: Vec<Given> =
                        [size(count), size(SHAPE.len()), layout].into_iter().chain(operands).collect();
                    let name = format!("{name}_{}", dtype.as_str());
                    let got = run(&name, threads_for(count), &given, || Buffer::new(&SHAPE, expected.dtype()));
                    assert_same(&name, &got, &expected, 0.0);
                }
            }
        }
    }
}

#[test]
fn an_integer_divided_by_zero_is_zero() {
    for dtype in INTEGERS {
        let (left, right) = (elements(11, &[9], dtype), Tensor::zeros(9, dtype, &Device::Cpu).unwrap());
        let [left, right] = [left, right].map(|t| View::contiguous(&t));
        let operands = [Given::View(&left), Given::View(&right), Given::Result(0)];
        let given: Vec<Given> = [size(9), size(1), Given::Value(null())].into_iter().chain(operands).collect();
        let got = run(&format!("bdiv_{}", dtype.as_str()), [1, 1024], &given, || Buffer::new(&[9], dtype));
        assert_same("quotients", &got, &right.view, 0.0);
    }
}

#[test]
fn numbers_are_converted_as_the_cpu_does() {
    for from in dtypes() {
        let x = if from.is_int() {
            let (least, count) = if from == DType::I64 { (-9e18, 1.8e19) } else { (0.0, 5e9) };
            let small = elements(12, &SHAPE, from);
            Tensor::cat(&[&integers(13, &SHAPE, least, count, DType::I64).to_dtype(from).unwrap(), &small], 2).unwrap()
        } else {
            let (floats, factor) = (floats(12, &SHAPE, DType::F64), numbers(13, &SHAPE, DType::F64));
            // From fractions to far more than an integer holds.
            let wide = ((&floats * 90.0).unwrap() * (factor * 44.0).unwrap().exp().unwrap()).unwrap();
            Tensor::cat(&[&floats, &(&floats * 90.0).unwrap(), &wide], 2).unwrap().to_dtype(from).unwrap()
        };
        for to in dtypes() {
            for from in View::each(&x) {
                let name = format!("cast_{}_{}", from.view.dtype().as_str(), to.as_str());
                check_unary(&name, &from, &[], &[], &from.view.to_dtype(to).unwrap(), 0.0);
            }
        }
    }
}

/// A list of halves, in a buffer of elements that are as large.
fn halves(bits: impl IntoIterator<Item = u16>) -> Tensor {
    let bits: Vec<bf16> = bits.into_iter().map(bf16::from_bits).collect();
    let count = bits.len();
    Tensor::from_vec(bits, count, &Device::Cpu).unwrap()
}

#[test]
fn halves_are_converted_as_by_the_half_crate() {
    let all = halves(0..=u16::MAX);
    let count = all.elem_count();
    let given = [size(count), size(1), Given::Value(null()), Given::View(&View::contiguous(&all)), Given::Result(0)];
    let got = run("cast_f16_f32", threads_for(count), &given, || Buffer::new(&[count], DType::F32));
    let got: Vec<f32> = got.to_vec1().unwrap();
    for (bits, got) in (0..=u16::MAX).zip(&got) {
        let expected = f16::from_bits(bits).to_f32();
        assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{bits:#06x}: {got}");
    }
    // Each half, the value halfway to the next one, and its neighbours; values that are too large or too small.
    let near = |x: f32| [x, x.next_up(), x.next_down()];
    let halfway = got.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let edges = [65_504.0, 65_519.996, 65_520.0, 65_536.0, 1e30, f32::INFINITY, f32::NAN, 1e-8, 2.980_232_2e-8, 1e-45];
    let floats: Vec<f32> =
        got.iter().copied().chain(halfway).chain(edges).flat_map(near).flat_map(|x| [x, -x]).collect();
    let (count, expected) = (floats.len(), floats.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>());
    let from = Tensor::new(floats.as_slice(), &Device::Cpu).unwrap();
    let given = [size(count), size(1), Given::Value(null()), Given::View(&View::contiguous(&from)), Given::Result(0)];
    let got = run("cast_f32_f16", threads_for(count), &given, || Buffer::new(&[count], DType::BF16));
    let got: Vec<bf16> = got.to_vec1().unwrap();
    for ((x, expected), got) in floats.iter().zip(&expected).zip(&got) {
        let (got, is_nan) = (f16::from_bits(got.to_bits()), expected.is_nan());
        assert!(got.to_bits() == expected.to_bits() || got.is_nan() && is_nan, "{x}: {got} instead of {expected}");
    }
}

#[test]
fn conditions_choose_as_on_the_cpu() {
    for dtype in dtypes() {
        for condition in INTEGERS {
            let yes = elements(14, &SHAPE, dtype);
            let no = elements(15, &SHAPE, dtype);
            let conditions = integers(16, &SHAPE, 0.0, 3.0, condition);
            let views = [View::contiguous, View::transposed, View::narrowed, View::broadcast];
            for i in 0..views.len() {
                let [conditions, yes, no] =
                    [(&conditions, 0), (&yes, i), (&no, 2 * i)].map(|(t, k)| views[(i + k) % views.len()](t));
                let expected = conditions.view.where_cond(&yes.view, &no.view).unwrap();
                let layout = View::layout_at_all(&[&conditions, &yes, &no]);
                let tensors = [&conditions, &yes, &no].map(Given::View);
                let head = [size(expected.elem_count()), size(SHAPE.len()), layout];
                let given: Vec<Given> = head.into_iter().chain(tensors).chain([Given::Result(0)]).collect();
                let name = format!("where_{}_{}", condition.as_str(), dtype.as_str());
                let got = run(&name, threads_for(expected.elem_count()), &given, || Buffer::new(&SHAPE, dtype));
                assert_same(&name, &got, &expected, 0.0);
            }
        }
    }
}
