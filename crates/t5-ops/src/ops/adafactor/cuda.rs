//! Sums of squares and updates on a card: three kernels for the sums of many gradients, and three for the updates of many parameters.
//! Nothing is read back. What a step decides on the CPU, the clipping factor of the global norm, comes from sums that are measured before.

use std::cell::RefCell;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{
    AdafactorHyper, AdafactorUpdate, COLUMNS, GRADIENT_BYTES, PARAMETER_BYTES, SecondMoment, TOTALS, parts_of_columns,
    rows_of_part, scratch_of_gradient, scratch_of_parameter,
};
use crate::cuda::{Kernel, Module, Scratch, address, check_each_apart, count, table, unwritten};
use crate::ops::together::cuda::{OF_KEYS, OF_SUM, Parameter, THREADS, contiguous};
use crate::ops::together::{groups, of_piece, rows_of_block};

/// Sums of the squares of a gradient.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSums {
    /// By row (N), f32: part of a list of many gradients.
    row: Tensor,
    /// By column (K), f32.
    col: Tensor,
    /// Of all, among those of other gradients.
    total: Place,
}

/// A number in a list of f64 on the card. Reading waits for the card, so that many are read at once.
#[derive(Clone, Debug)]
struct Place {
    list: Tensor,
    index: usize,
}

thread_local! {
    /// The next number of this thread's list.
    static NEXT: RefCell<Option<Place>> = const { RefCell::new(None) };
}

/// Drops the list of sums that this thread keeps.
pub(crate) fn forget_totals() {
    NEXT.take();
}

impl Place {
    /// The next one of this thread's list.
    fn next(device: &Device) -> Result<Self> {
        NEXT.with_borrow_mut(|next| {
            let is_usable = |place: &Place| place.index < TOTALS && place.list.device().same_device(device);
            let place = match next.take().filter(is_usable) {
                Some(place) => place,
                None => Self { list: unwritten(TOTALS, DType::F64, device)?, index: 0 },
            };
            *next = Some(Self { list: place.list.clone(), index: place.index + 1 });
            Ok(place)
        })
    }

    fn address(&self) -> Result<u64> {
        address(&self.list.narrow(0, self.index, 1)?)
    }
}

/// The totals of some gradients. The next ones begin a new list, so that each step reads as many lists as the others.
pub(crate) fn totals<'a>(sums: impl IntoIterator<Item = &'a DeviceSums>) -> Result<Vec<f64>> {
    let mut read: Option<(&Tensor, Vec<f64>)> = None;
    let total = |sums: &'a DeviceSums| {
        let Place { list, index } = &sums.total;
        if read.as_ref().is_none_or(|(of, _)| of.id() != list.id()) {
            NEXT.set(None);
            read = Some((list, list.to_vec1()?));
        }
        Ok(read.as_ref().map_or(f64::NAN, |(_, values)| values[*index]))
    };
    sums.into_iter().map(total).collect()
}

/// (N, K), a vector as one row.
fn rows_and_width(t: &Tensor) -> (usize, usize) {
    t.dims2().unwrap_or((1, t.elem_count()))
}

/// `Gradient` of `optimizer.cu`, which has no padding.
#[repr(C)]
#[derive(Clone, Copy)]
struct Gradient {
    values: u64,
    of_rows: u64,
    of_columns: u64,
    row_sums: u64,
    col_sums: u64,
    total: u64,
    rows: i32,
    rows_each: i32,
    width: i32,
    row_parts: i32,
    col_parts: i32,
    first_tile: i32,
    first_sum: i32,
    is_bf16: u32,
}

/// The sums of gradients on one card, in their order.
pub(super) fn square_sums_of(gradients: &[&Tensor]) -> Result<Vec<DeviceSums>> {
    let bytes = |gradient: &&Tensor| scratch_of_gradient(rows_and_width(gradient)) + GRADIENT_BYTES;
    let groups = groups(&gradients.iter().map(bytes).collect::<Vec<_>>());
    let sums: Vec<_> =
        groups.into_iter().map(|group| square_sums_of_group(&gradients[group])).collect::<Result<_>>()?;
    Ok(sums.concat())
}

fn square_sums_of_group(gradients: &[&Tensor]) -> Result<Vec<DeviceSums>> {
    const { assert!(size_of::<Gradient>() as u64 == GRADIENT_BYTES) };
    let device = gradients[0].device();
    let sizes = gradients.iter().map(|gradient| rows_and_width(gradient));
    let mut scratch = Scratch::new(sizes.clone().map(scratch_of_gradient).sum(), device)?;
    let of_sums = |size: usize| of_piece((size * size_of::<f32>()) as u64);
    let mut results = Scratch::new(sizes.map(|(rows, width)| of_sums(rows) + of_sums(width)).sum(), device)?;
    let (mut tiles, mut blocks) = (0, 0);
    let (mut entries, mut sums) = (Vec::new(), Vec::new());
    let gradients = contiguous(gradients.iter().copied())?;
    for gradient in &gradients {
        let (rows, width) = rows_and_width(gradient);
        let (row_parts, col_parts) = (width.div_ceil(COLUMNS), parts_of_columns(rows));
        let of = DeviceSums { row: results.floats(rows)?, col: results.floats(width)?, total: Place::next(device)? };
        entries.push(Gradient {
            values: address(gradient)?,
            of_rows: scratch.piece((rows * row_parts * size_of::<f32>()) as u64)?,
            of_columns: scratch.piece((col_parts * width * size_of::<f64>()) as u64)?,
            row_sums: address(&of.row)?,
            col_sums: address(&of.col)?,
            total: of.total.address()?,
            rows: count(rows)?,
            rows_each: count(rows_of_part(rows))?,
            width: count(width)?,
            row_parts: count(row_parts)?,
            col_parts: count(col_parts)?,
            first_tile: count(tiles)?,
            first_sum: count(blocks)?,
            is_bf16: u32::from(gradient.dtype() == DType::BF16),
        });
        tiles += row_parts * col_parts;
        blocks += (rows + width).div_ceil(THREADS as usize);
        sums.push(of);
    }
    // SAFETY: an entry has no padding.
    let table = unsafe { table(&entries, device)? };
    let kernel = |name: &str| Kernel::new(device, Module::Optimizer, name)?.tensor(&table);
    // Sums by column, and those by row of 32 rows for each 128 columns.
    let shared = COLUMNS * size_of::<f64>() + COLUMNS / 128 * 32 * size_of::<f32>();
    // SAFETY: a table of so many entries, and a block for each part of the rows and each tile of columns, with places of their own.
    unsafe { kernel("square_sums")?.size(entries.len())?.launch([tiles, 1, 1], THREADS, shared)? };
    // SAFETY: a thread for each sum.
    unsafe { kernel("finish_square_sums")?.size(entries.len())?.launch([blocks, 1, 1], THREADS, 0)? };
    // SAFETY: a block for each gradient adds the sums of all its rows.
    unsafe { kernel("total_square_sums")?.launch([entries.len(), 1, 1], THREADS, OF_SUM)? };
    Ok(sums)
}

/// What the kernels know of an update: `Adafactor` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Hyper {
    learning_rate: f64,
    beta2: f64,
    eps1: f64,
    eps2: f64,
    clip_threshold: f64,
    weight_decay: f64,
    gradient_scale: f64,
    beta1: f64,
    scales_parameter: u32,
    has_first_moment: u32,
}

impl Hyper {
    fn of(h: &AdafactorHyper) -> Self {
        Self {
            learning_rate: h.learning_rate,
            beta2: h.beta2,
            eps1: h.eps1,
            eps2: h.eps2,
            clip_threshold: h.clip_threshold,
            weight_decay: h.weight_decay,
            gradient_scale: h.gradient_scale,
            beta1: h.beta1.unwrap_or(0.0),
            scales_parameter: u32::from(h.scale_parameter),
            has_first_moment: u32::from(h.beta1.is_some()),
        }
    }
}

/// `Factored` of `optimizer.cu`, which has no padding.
#[repr(C)]
#[derive(Clone, Copy)]
struct Factored {
    parameter: Parameter,
    hyper: Hyper,
    row: u64,
    col: u64,
    row_sums: u64,
    col_sums: u64,
    row_factor: u64,
    col_factor: u64,
    partial: u64,
    parts: i32,
    first_factor: i32,
}

/// Updates parameters of one card.
pub(super) fn adafactor(updates: &[AdafactorUpdate]) -> Result<()> {
    for update in updates {
        check_each_apart("adafactor", &[&[update.param, update.grad], &update.moments()[..]].concat())?;
    }
    let bytes = |update: &AdafactorUpdate| scratch_of_parameter(rows_and_width(update.param)) + PARAMETER_BYTES;
    let groups = groups(&updates.iter().map(bytes).collect::<Vec<_>>());
    groups.into_iter().try_for_each(|group| adafactor_of_group(&updates[group]))
}

fn adafactor_of_group(updates: &[AdafactorUpdate]) -> Result<()> {
    const { assert!(size_of::<Factored>() as u64 == PARAMETER_BYTES) };
    let device = updates[0].param.device();
    let gradients = contiguous(updates.iter().map(|update| update.grad))?;
    let sizes = updates.iter().map(|update| rows_and_width(update.param));
    let mut scratch = Scratch::new(sizes.map(scratch_of_parameter).sum(), device)?;
    let (mut of_factors, mut of_parts) = (0, 0);
    let mut entries = Vec::new();
    for (update, gradient) in updates.iter().zip(&gradients) {
        let (rows, width) = rows_and_width(update.param);
        let parts = rows.div_ceil(rows_of_block(rows, width));
        let first_factor = count(of_factors)?;
        of_factors += width.div_ceil(THREADS as usize);
        let (row, col, [row_sums, col_sums]) = match update.second {
            SecondMoment::Factored { row, col } => {
                of_factors += 1;
                (address(row)?, address(col)?, sums_of(update, (rows, width))?)
            }
            SecondMoment::Full(v) => (0, address(v)?, [0; 2]),
        };
        let of_f32 = |count: usize| (count * size_of::<f32>()) as u64;
        let noise = (update.hyper.rounding, 0);
        let pair = [update.param, gradient];
        entries.push(Factored {
            parameter: Parameter::next(pair, update.first, (rows, width), noise, &mut of_parts)?,
            hyper: Hyper::of(&update.hyper),
            row,
            col,
            row_sums,
            col_sums,
            row_factor: scratch.piece(of_f32(rows))?,
            col_factor: scratch.piece(of_f32(width))?,
            partial: scratch.piece((2 * parts * size_of::<f64>()) as u64)?,
            parts: count(parts)?,
            first_factor,
        });
    }
    // SAFETY: an entry has no padding.
    let table = unsafe { table(&entries, device)? };
    for (name, blocks, shared) in [
        ("adafactor_factors", of_factors, OF_SUM),
        ("adafactor_squares", of_parts, OF_SUM),
        ("adafactor_apply", of_parts, OF_KEYS),
    ] {
        let kernel = Kernel::new(device, Module::Optimizer, name)?.tensor(&table)?.size(entries.len())?;
        // SAFETY: a table of so many entries, each of matrices and moments of its size, in whose blocks every row and column is once.
        unsafe { kernel.launch([blocks, 1, 1], THREADS, shared)? };
    }
    Ok(())
}

/// Where the sums by row and by column of an update's gradient lie.
fn sums_of(update: &AdafactorUpdate, size: (usize, usize)) -> Result<[u64; 2]> {
    match &update.sums.on_device {
        Some(sums) if (sums.row.elem_count(), sums.col.elem_count()) == size => {
            Ok([address(&sums.row)?, address(&sums.col)?])
        }
        sums => {
            let got = sums.as_ref().map(|sums| (sums.row.elem_count(), sums.col.elem_count()));
            bail!("adafactor: expected the sums of a gradient of {size:?}, got those of {got:?}")
        }
    }
}
