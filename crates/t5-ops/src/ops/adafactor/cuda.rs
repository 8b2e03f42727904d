//! Sums of squares and updates on a card. Each group of gradients takes two launches for its sums, and all groups together one launch for
//! their totals. Each group of parameters takes three launches. Tables are uploaded before the host waits for the card.
//! Nothing is read back. The clipping factor of the global norm, which the CPU computes in a step, comes from sums that were read before.

use candle_core::{DType, Result, Tensor, bail};
use cuda_device::launch::{Kernel, Module, Number, Scratch, address, check_each_apart, count, read_numbers, table};
use cuda_device::pieces::of_piece;

use super::{
    AdafactorHyper, AdafactorUpdate, COLUMNS, GRADIENT_BYTES, PARAMETER_BYTES, SecondMoment, TOTALS, parts_of_columns,
    rows_of_part, scratch_of_gradient, scratch_of_parameter,
};
use crate::ops::multi_tensor::cuda::{Group, Launch, OF_KEYS, OF_SUM, Parameter, Ready, THREADS, contiguous};
use crate::ops::multi_tensor::{groups, most_of_a_group, rows_of_block};

/// Sums of the squares of a gradient.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSums {
    /// The memory of these sums, shared with the sums of many gradients.
    memory: Tensor,
    /// The addresses of the sums by row (N) and by column (K), f32.
    rows_and_columns: [u64; 2],
    /// (N, K).
    size: (usize, usize),
    /// The place of the sum of all squares, among those of other gradients.
    total: Number,
}

/// Reads the totals of some gradients. The next totals begin a new list, so that each step reads the same number of lists.
pub(crate) fn totals<'a>(sums: impl IntoIterator<Item = &'a DeviceSums>) -> Result<Vec<f64>> {
    read_numbers(sums.into_iter().map(|sums| &sums.total))
}

/// (N, K); a vector counts as one row.
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

/// The sums of gradients on one card, in their order. `gradients` is not empty.
pub(super) fn square_sums_of(gradients: &[&Tensor]) -> Result<Vec<DeviceSums>> {
    const { assert!(size_of::<Gradient>() as u64 == GRADIENT_BYTES) };
    let device = gradients[0].device();
    let sizes: Vec<(usize, usize)> = gradients.iter().map(|gradient| rows_and_width(gradient)).collect();
    let gradients = contiguous(gradients.iter().copied())?;
    let bytes: Vec<u64> = sizes.iter().map(|&size| scratch_of_gradient(size)).collect();
    let mut scratch = Scratch::new(most_of_a_group(&bytes), device)?;
    let of_sums = |size: usize| of_piece((size * size_of::<f32>()) as u64);
    let mut results = Scratch::new(sizes.iter().map(|&(rows, width)| of_sums(rows) + of_sums(width)).sum(), device)?;
    let (mut entries, mut of_groups) = (Vec::with_capacity(sizes.len()), Vec::new());
    let mut sums = Vec::with_capacity(sizes.len());
    for group in groups(&bytes) {
        scratch.begin_again();
        let (mut tiles, mut blocks) = (0, 0);
        for (gradient, &(rows, width)) in gradients[group.clone()].iter().zip(&sizes[group.clone()]) {
            let (row_parts, col_parts) = (width.div_ceil(COLUMNS), parts_of_columns(rows));
            let [row_sums, col_sums] = [rows, width].map(|size| results.piece((size * size_of::<f32>()) as u64));
            let total = Number::next(TOTALS, device)?;
            entries.push(Gradient {
                values: address(gradient)?,
                of_rows: scratch.piece((rows * row_parts * size_of::<f32>()) as u64),
                of_columns: scratch.piece((col_parts * width * size_of::<f64>()) as u64),
                row_sums,
                col_sums,
                total: total.address()?,
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
            sums.push(([row_sums, col_sums], (rows, width), total));
        }
        of_groups.push((group, tiles, blocks));
    }
    // SAFETY: an entry has no padding.
    let table = unsafe { table(&entries, device)? };
    let words = size_of::<Gradient>() / size_of::<u32>();
    // Sums by column, and sums by row of 32 rows for each 128 columns.
    let shared = COLUMNS * size_of::<f64>() + COLUMNS / 128 * 32 * size_of::<f32>();
    for (group, tiles, blocks) in of_groups {
        let table = table.narrow(0, group.start * words, group.len() * words)?;
        let kernel = |name: &str| Kernel::new(device, Module::Optimizer, name)?.tensor(&table)?.size(group.len());
        // SAFETY: the table has these entries. Each part of rows and each tile of columns has a block, which writes to its own place.
        unsafe { kernel("square_sums")?.launch([tiles, 1, 1], THREADS, shared)? };
        // SAFETY: a thread for each sum.
        unsafe { kernel("finish_square_sums")?.launch([blocks, 1, 1], THREADS, 0)? };
    }
    let kernel = Kernel::new(device, Module::Optimizer, "total_square_sums")?.tensor(&table)?;
    // SAFETY: one block for each gradient adds the sums of all its rows.
    unsafe { kernel.launch([entries.len(), 1, 1], THREADS, OF_SUM)? };
    let memory = results.into_memory();
    let of = |(rows_and_columns, size, total)| DeviceSums { memory: memory.clone(), rows_and_columns, size, total };
    Ok(sums.into_iter().map(of).collect())
}

/// The kernels' constants of an update: `Adafactor` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Hyper {
    learning_rate: f64,
    beta2: f64,
    eps1: f64,
    eps2: f64,
    clip_threshold: f64,
    weight_decay: f64,
    beta1: f64,
    scales_parameter: u32,
    has_first_moment: u32,
}

impl Hyper {
    fn new(h: &AdafactorHyper) -> Self {
        Self {
            learning_rate: h.learning_rate,
            beta2: h.beta2,
            eps1: h.eps1,
            eps2: h.eps2,
            clip_threshold: h.clip_threshold,
            weight_decay: h.weight_decay,
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

/// Prepares updates of parameters of one card, except the scale of their gradients. `updates` is not empty.
pub(super) fn ready(updates: &[AdafactorUpdate]) -> Result<Ready> {
    const { assert!(size_of::<Factored>() as u64 == PARAMETER_BYTES) };
    for update in updates {
        check_each_apart("adafactor", &[&[update.param, update.grad], &update.moments()[..]].concat())?;
    }
    let device = updates[0].param.device();
    let gradients = contiguous(updates.iter().map(|update| update.grad))?;
    let bytes: Vec<u64> = updates.iter().map(|update| scratch_of_parameter(rows_and_width(update.param))).collect();
    let mut scratch = Scratch::new(most_of_a_group(&bytes), device)?;
    let mut entries = Vec::with_capacity(updates.len());
    let mut of_groups = Vec::new();
    for group in groups(&bytes) {
        scratch.begin_again();
        let (mut of_factors, mut of_parts) = (0, 0);
        for (update, gradient) in updates[group.clone()].iter().zip(&gradients[group.clone()]) {
            entries.push(Factored::new(update, gradient, &mut scratch, [&mut of_factors, &mut of_parts])?);
        }
        let launches = [
            ("adafactor_factors", of_factors, OF_SUM, true),
            ("adafactor_squares", of_parts, OF_SUM, false),
            ("adafactor_apply", of_parts, OF_KEYS, false),
        ];
        let launches = launches.map(|(kernel, blocks, shared_bytes, takes_scale)| Launch {
            kernel,
            blocks,
            shared_bytes,
            takes_scale,
        });
        of_groups.push(Group { entries: group.len(), launches: launches.into() });
    }
    // SAFETY: an entry has no padding.
    let table = unsafe { table(&entries, device)? };
    let mut held = gradients;
    held.push(scratch.into_memory());
    for update in updates {
        held.push(update.param.clone());
        held.extend(update.moments().into_iter().cloned());
        held.extend(update.sums.on_device.as_ref().map(|sums| sums.memory.clone()));
    }
    Ok(Ready::new(|| tracing::debug_span!("adafactor"), table, of_groups, held))
}

impl Factored {
    /// An entry whose blocks of the factors and of the parts begin at `first`. Advances `first` past them.
    fn new(update: &AdafactorUpdate, gradient: &Tensor, scratch: &mut Scratch, first: [&mut usize; 2]) -> Result<Self> {
        let [of_factors, of_parts] = first;
        let (rows, width) = rows_and_width(update.param);
        let parts = rows.div_ceil(rows_of_block(rows, width));
        let first_factor = count(*of_factors)?;
        *of_factors += width.div_ceil(THREADS as usize);
        let (row, col, [row_sums, col_sums]) = match update.second {
            SecondMoment::Factored { row, col } => {
                *of_factors += 1;
                (address(row)?, address(col)?, sums_of(update, (rows, width))?)
            }
            SecondMoment::Full(v) => (0, address(v)?, [0; 2]),
        };
        let of_f32 = |count: usize| (count * size_of::<f32>()) as u64;
        let noise = (update.hyper.rounding, 0);
        let pair = [update.param, gradient];
        Ok(Self {
            parameter: Parameter::next(pair, update.first, (rows, width), noise, of_parts)?,
            hyper: Hyper::new(&update.hyper),
            row,
            col,
            row_sums,
            col_sums,
            row_factor: scratch.piece(of_f32(rows)),
            col_factor: scratch.piece(of_f32(width)),
            partial: scratch.piece((2 * parts * size_of::<f64>()) as u64),
            parts: count(parts)?,
            first_factor,
        })
    }
}

/// The addresses of the sums by row and by column of an update's gradient.
fn sums_of(update: &AdafactorUpdate, size: (usize, usize)) -> Result<[u64; 2]> {
    match &update.sums.on_device {
        Some(sums) if sums.size == size => Ok(sums.rows_and_columns),
        sums => {
            let got = sums.as_ref().map(|sums| sums.size);
            bail!("adafactor: expected the sums of a gradient of {size:?}, got those of {got:?}")
        }
    }
}
