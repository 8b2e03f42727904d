//! Buffers of a card, launches, comparisons.

// Kernels take pointers.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;
use std::ptr::null_mut;

use candle_core::{DType, Device, Tensor, WithDType};
use cuda_kernels::emulation::{self, Argument, Launch, Order, Schedule};
use half::bf16;
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};
use rustix::param::page_size;

/// A NaN in each dtype of numbers, so that reads there are detected, too. It differs from the NaN of unwritten elements.
const UNTOUCHED: [u8; 2] = [0xF5, 0x7F];

thread_local! {
    /// Whether new buffers begin where their first page ends.
    static IS_AT_START: Cell<bool> = const { Cell::new(false) };
}

/// Evaluates a block in which a name stands for the type of a dtype.
macro_rules! with_type {
    ($dtype:expr, $T:ident, $value:block) => {
        match $dtype {
            DType::F32 => with_type!(as f32, $T, $value),
            DType::F64 => with_type!(as f64, $T, $value),
            DType::BF16 => with_type!(as bf16, $T, $value),
            DType::U8 => with_type!(as u8, $T, $value),
            DType::U32 => with_type!(as u32, $T, $value),
            DType::I64 => with_type!(as i64, $T, $value),
            other => panic!("no buffer of {other:?}"),
        }
    };
    (as $type:ident, $T:ident, $value:block) => {{
        type $T = $type;
        $value
    }};
}

/// Memory of the card, between two pages that nothing may touch. It begins behind the first one or ends before the second one. Up to a
/// page of bytes lies between a buffer and the other page. Nothing may write these bytes either.
pub struct Buffer {
    mapping: *mut u8,
    /// The bytes between the two pages.
    room: usize,
    /// The bytes of the elements within the room.
    contents: Range<usize>,
    dtype: DType,
    shape: Vec<usize>,
}

impl Buffer {
    /// Unwritten elements: NaN.
    pub fn new(shape: &[usize], dtype: DType) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size_in_bytes();
        // Bytes are the codes of a weight and entries of tables: kernels read several at once.
        let taken = if dtype == DType::U8 { bytes.next_multiple_of(16) } else { bytes };
        let page = page_size();
        let room = (taken + 1).next_multiple_of(page);
        let (readable, none) = (ProtFlags::READ | ProtFlags::WRITE, MprotectFlags::empty());
        // SAFETY: a new mapping, whose first and last page become inaccessible.
        let mapping = unsafe {
            let mapping =
                mm::mmap_anonymous(null_mut(), room + 2 * page, readable, MapFlags::PRIVATE).unwrap().cast::<u8>();
            mm::mprotect(mapping.cast(), page, none).unwrap();
            mm::mprotect(mapping.add(page + room).cast(), page, none).unwrap();
            mapping
        };
        let from = if IS_AT_START.get() { 0 } else { room - taken };
        let mut buffer = Self { mapping, room, contents: from..from + bytes, dtype, shape: shape.to_vec() };
        for (at, byte) in buffer.all_mut().iter_mut().enumerate() {
            *byte = UNTOUCHED[at % 2];
        }
        buffer.contents_mut().fill(0xFF);
        buffer
    }

    /// A copy of a tensor.
    pub fn copy_of(t: &Tensor) -> Self {
        let mut buffer = Self::new(t.dims(), t.dtype());
        let flat = t.flatten_all().unwrap();
        let bytes: Vec<u8> =
            with_type!(t.dtype(), T, { flat.to_vec1::<T>().unwrap().into_iter().flat_map(T::to_ne_bytes).collect() });
        buffer.contents_mut().copy_from_slice(&bytes);
        buffer
    }

    /// Structs with C's layout and without padding, one after the other.
    pub fn of_entries<T: Copy>(entries: &[T]) -> Self {
        let mut buffer = Self::new(&[size_of_val(entries)], DType::U8);
        // SAFETY: the memory has this many bytes, each of which is written.
        let bytes = unsafe { std::slice::from_raw_parts(entries.as_ptr().cast(), size_of_val(entries)) };
        buffer.contents_mut().copy_from_slice(bytes);
        buffer
    }

    fn all(&self) -> &[u8] {
        // SAFETY: the readable part of the mapping, which lives as long as the buffer.
        unsafe { std::slice::from_raw_parts(self.mapping.add(page_size()), self.room) }
    }

    fn all_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; it can be written, too.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.add(page_size()), self.room) }
    }

    fn contents_mut(&mut self) -> &mut [u8] {
        let contents = self.contents.clone();
        &mut self.all_mut()[contents]
    }

    /// The address of the first element, as an argument.
    pub fn pointer(&mut self) -> Argument {
        Argument::from_value(self.contents_mut().as_mut_ptr())
    }

    /// The address of the first element, for an entry of a table.
    pub fn address(&mut self) -> u64 {
        self.contents_mut().as_mut_ptr() as u64
    }

    /// The address `bytes` bytes after the first element, as an argument.
    pub fn pointer_at(&mut self, bytes: usize) -> Argument {
        assert!(bytes < self.contents.len(), "an address within the buffer");
        Argument::from_value(self.contents_mut()[bytes..].as_mut_ptr())
    }

    /// The bytes of the elements.
    pub fn bits(&self) -> &[u8] {
        &self.all()[self.contents.clone()]
    }

    /// The elements.
    pub fn tensor(&self) -> Tensor {
        let data = self.bits();
        with_type!(self.dtype, T, {
            let data: Vec<T> =
                data.chunks(size_of::<T>()).map(|bytes| T::from_ne_bytes(bytes.try_into().unwrap())).collect();
            Tensor::from_vec(data, self.shape.as_slice(), &Device::Cpu).unwrap()
        })
    }
}

impl Drop for Buffer {
    /// Fails if bytes outside of the buffer were written.
    fn drop(&mut self) {
        let is_untouched = |(at, &byte): (usize, &u8)| self.contents.contains(&at) || byte == UNTOUCHED[at % 2];
        let all_are_untouched = self.all().iter().enumerate().all(is_untouched);
        // SAFETY: the whole mapping, to which no reference is left.
        unsafe { mm::munmap(self.mapping.cast(), self.room + 2 * page_size()).unwrap() };
        assert!(all_are_untouched || std::thread::panicking(), "written outside of a buffer");
    }
}

/// A null pointer.
pub fn null() -> Argument {
    Argument::from_value(std::ptr::null::<u8>())
}

/// Runs a kernel; the test fails if the kernel fails.
#[track_caller]
pub fn launch(
    name: &str,
    grid: [usize; 3],
    threads: u32,
    shared_bytes: usize,
    arguments: &[Argument],
    schedule: Schedule,
) {
    let grid = grid.map(|n| u32::try_from(n).expect("a size of a grid"));
    // SAFETY: every pointer is to a buffer of the shape that the test gives.
    unsafe { emulation::launch(name, Launch { grid, threads, shared_bytes }, arguments, schedule) }.unwrap();
}

/// A number in a dtype.
pub fn number(dtype: DType, x: f64) -> Argument {
    with_type!(dtype, T, { Argument::from_value(T::from_f64(x)) })
}

/// The suffix of a dtype in names of kernels.
pub fn suffix(dtype: DType) -> &'static str {
    if dtype == DType::BF16 { "bf16" } else { "f32" }
}

/// A reproducible tensor of numbers in [-1, 1).
pub fn numbers(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = t5_ops::keys::mix(state);
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Fails unless two tensors have the same bits.
#[track_caller]
pub fn assert_same_bits(a: &Tensor, b: &Tensor) {
    assert!(Buffer::copy_of(a).bits() == Buffer::copy_of(b).bits(), "other bits: {a} {b}");
}

/// Fails unless every element differs by at most `tolerance` times the largest expected magnitude.
#[track_caller]
pub fn assert_close(what: &str, got: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(got.elem_count(), expected.elem_count(), "{what}: elements");
    let flat = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (got, expected) = (flat(got), flat(expected));
    let scale = expected.iter().filter(|x| x.is_finite()).fold(1e-30f64, |m, x| m.max(x.abs()));
    for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
        assert!(
            g == e || (g - e).abs() <= tolerance * scale,
            "{what}: element {i}: expected {e}, got {g} (scale {scale})"
        );
    }
}

/// The tolerance of a kernel in `dtype` against the CPU's.
pub fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::BF16 { 8e-3 } else { 2e-6 }
}

/// Runs a test in every schedule: results must be the same bits. In some of them buffers begin behind a page that nothing may touch, in the
/// others they end before one.
#[track_caller]
pub fn in_every_schedule(what: &str, run: impl Fn(Schedule) -> Vec<Buffer>) -> Vec<Tensor> {
    let mut first: Option<Vec<Buffer>> = None;
    for schedule in Schedule::all() {
        IS_AT_START.set(schedule.order == Order::LastFirst);
        let got = run(schedule);
        IS_AT_START.set(false);
        match &first {
            None => first = Some(got),
            Some(first) => {
                for (i, (a, b)) in first.iter().zip(&got).enumerate() {
                    assert!(a.bits() == b.bits(), "{what}: result {i} has other bits with {schedule:?}");
                }
            }
        }
    }
    first.expect("there are schedules").iter().map(Buffer::tensor).collect()
}
