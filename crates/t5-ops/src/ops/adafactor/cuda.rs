//! The update on a card: four kernels a parameter, and nothing is read back. What a step decides on the CPU, the clipping factor of the
//! global norm, comes from sums that are measured before.

use std::cell::RefCell;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{AdafactorHyper, COLUMNS, PARTS, SecondMoment, rows_of_part};
use crate::cuda::{Kernel, Module, suffix, unwritten};
use crate::ops::rounding::cuda::Noise;

const THREADS: u32 = 256;
/// Shared memory of a sum over a block.
const OF_SUM: usize = 32 * size_of::<f64>();

/// Sums of the squares of a gradient.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSums {
    /// By row (N), f32.
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

impl Place {
    /// As many as a step of a large model needs.
    const LENGTH: usize = 1024;

    /// The next one of this thread's list.
    fn next(device: &Device) -> Result<Self> {
        thread_local! {
            static NEXT: RefCell<Option<Place>> = const { RefCell::new(None) };
        }
        NEXT.with_borrow_mut(|next| {
            let is_usable = |place: &Place| place.index < Self::LENGTH && place.list.device().same_device(device);
            let place = match next.take().filter(is_usable) {
                Some(place) => place,
                None => Self { list: unwritten(Self::LENGTH, DType::F64, device)?, index: 0 },
            };
            *next = Some(Self { list: place.list.clone(), index: place.index + 1 });
            Ok(place)
        })
    }

    fn tensor(&self) -> Result<Tensor> {
        self.list.narrow(0, self.index, 1)
    }
}

/// The totals of some gradients.
pub(crate) fn totals<'a>(sums: impl IntoIterator<Item = &'a DeviceSums>) -> Result<Vec<f64>> {
    let mut read: Option<(&Tensor, Vec<f64>)> = None;
    let total = |sums: &'a DeviceSums| {
        let Place { list, index } = &sums.total;
        if read.as_ref().is_none_or(|(of, _)| of.id() != list.id()) {
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

pub(super) fn square_sums_of(grad: &Tensor) -> Result<DeviceSums> {
    let (rows, width) = rows_and_width(grad);
    let (grad, device) = (grad.contiguous()?, grad.device());
    let rows_each = rows_of_part(rows);
    let (parts, tiles) = (rows.div_ceil(rows_each), width.div_ceil(COLUMNS));
    let of_rows = unwritten((rows, tiles), DType::F32, device)?;
    let of_columns = unwritten((parts, width), DType::F64, device)?;
    let kernel = Kernel::new(device, Module::Optimizer, format!("square_sums_{}", suffix(grad.dtype())))?;
    let kernel =
        kernel.tensor(&grad)?.tensor(&of_rows)?.tensor(&of_columns)?.size(rows)?.size(rows_each)?.size(width)?;
    let shared = (2 * COLUMNS + 32) * size_of::<f64>();
    // SAFETY: a block for each part of the rows and each tile of columns, with a place of its own in the partial sums.
    unsafe { kernel.launch([parts, tiles, 1], THREADS, shared)? };
    let (row, col) = (unwritten(rows, DType::F32, device)?, unwritten(width, DType::F32, device)?);
    let kernel = Kernel::new(device, Module::Optimizer, "finish_square_sums")?;
    let kernel = kernel.tensor(&of_rows)?.tensor(&of_columns)?.tensor(&row)?.tensor(&col)?;
    let kernel = kernel.size(rows)?.size(tiles)?.size(parts)?.size(width)?;
    // SAFETY: a thread for each sum.
    unsafe { kernel.launch([(rows + width).div_ceil(THREADS as usize), 1, 1], THREADS, 0)? };
    let total = Place::next(device)?;
    let kernel = Kernel::new(device, Module::Optimizer, "total_of")?;
    let kernel = kernel.tensor(&row)?.tensor(&total.tensor()?)?.size(rows)?;
    // SAFETY: one block adds the sums of all rows.
    unsafe { kernel.launch([1, 1, 1], THREADS, OF_SUM)? };
    Ok(DeviceSums { row, col, total })
}

/// What the kernels know of an update.
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

pub(super) fn adafactor(
    param: &Tensor,
    grad: &Tensor,
    sums: &DeviceSums,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    let ((rows, width), device) = (rows_and_width(param), param.device());
    let grad = grad.contiguous()?;
    let hyper = Hyper::of(h);
    let (row_factor, col_factor) = (unwritten(rows, DType::F32, device)?, unwritten(width, DType::F32, device)?);
    match second {
        SecondMoment::Factored { row, col } => {
            if (sums.row.elem_count(), sums.col.elem_count()) != (rows, width) {
                let got = (sums.row.elem_count(), sums.col.elem_count());
                bail!("adafactor: expected the sums of this gradient, got those of {} x {}", got.0, got.1)
            }
            let kernel = Kernel::new(device, Module::Optimizer, "adafactor_factors")?.value(hyper);
            let kernel = kernel.tensor(&sums.row)?.tensor(&sums.col)?.tensor(row)?.tensor(col)?;
            let kernel = kernel.tensor(&row_factor)?.tensor(&col_factor)?.size(rows)?.size(width)?;
            // SAFETY: one block for the rows, and a thread for each column.
            unsafe { kernel.launch([1 + width.div_ceil(THREADS as usize), 1, 1], THREADS, OF_SUM)? };
        }
        SecondMoment::Full(v) => {
            let name = format!("adafactor_factors_of_vector_{}", suffix(grad.dtype()));
            let kernel = Kernel::new(device, Module::Optimizer, name)?.value(hyper);
            let kernel = kernel.tensor(&grad)?.tensor(v)?.tensor(&row_factor)?.tensor(&col_factor)?.size(width)?;
            // SAFETY: a thread for each element of the vector.
            unsafe { kernel.launch([width.div_ceil(THREADS as usize), 1, 1], THREADS, 0)? };
        }
    }
    let rows_each = rows_of_block(rows);
    let parts = rows.div_ceil(rows_each);
    let partial = unwritten((2, parts), DType::F64, device)?;
    let suffixes = format!("{}_{}", suffix(param.dtype()), suffix(grad.dtype()));
    let kernel = Kernel::new(device, Module::Optimizer, format!("adafactor_squares_{suffixes}"))?;
    let kernel = kernel.tensor(param)?.tensor(&grad)?.tensor(&row_factor)?.tensor(&col_factor)?.tensor(&partial)?;
    // SAFETY: parameter and gradient are matrices of these rows; each block has two partial sums.
    unsafe { kernel.size(rows)?.size(rows_each)?.size(width)?.launch([parts, 1, 1], THREADS, OF_SUM)? };
    let kernel = Kernel::new(device, Module::Optimizer, format!("adafactor_apply_{suffixes}"))?;
    let kernel = kernel.value(hyper).value(Noise::of(h.rounding, 0)).tensor(&partial)?.tensor(param)?.tensor(&grad)?;
    let kernel = kernel.tensor_or_null(first)?.tensor(&row_factor)?.tensor(&col_factor)?;
    let kernel = kernel.size(parts)?.size(rows)?.size(rows_each)?.size(width)?;
    // SAFETY: as above.
    unsafe { kernel.launch([parts, 1, 1], THREADS, OF_SUM) }
}

/// Rows that a block updates: enough blocks for the largest card, and few enough that each can add all their sums.
pub(crate) fn rows_of_block(rows: usize) -> usize {
    rows.div_ceil(2 * PARTS).max(1)
}
