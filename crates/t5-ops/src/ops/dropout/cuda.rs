//! Dropout on a card, with the masks of the CPU.

use candle_core::{Device, Result, Tensor};
use cuda_device::launch::{Kernel, Module, changing, recording, suffix, unwritten};

use super::{Dropout, dropout_key};
use crate::dispatch::rows_and_width;

/// The kernels' struct of a dropout.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Mask {
    step: u64,
    site: u32,
    threshold: u32,
    scale: f32,
    /// The address on the card from which recorded launches read `step`, or 0.
    step_on_card: u64,
}

impl Mask {
    /// The mask of a dropout. Without a dropout, a mask that drops nothing.
    pub(crate) fn new(d: Option<&Dropout>) -> Self {
        match d {
            None => Self { step: 0, site: 0, threshold: 0, scale: 1.0, step_on_card: 0 },
            Some(d) => Self {
                step: dropout_key(d.seed, d.step),
                site: d.site,
                threshold: d.threshold(),
                scale: d.scale() as f32,
                step_on_card: recording::key().unwrap_or(0),
            },
        }
    }
}

/// The samples of a dropout, if there is one.
pub(crate) fn samples(d: Option<&Dropout>, device: &Device) -> Result<Option<Tensor>> {
    d.map(|d| changing(d.samples, device)).transpose()
}

/// The rows of `x`: their number, the number in a sequence, and their width. An `x` of another rank than three counts as one sequence; it
/// has no dropout.
pub(crate) fn rows(x: &Tensor) -> Result<(usize, usize, usize)> {
    let (rows, width) = rows_and_width("dropout", "x", x)?;
    Ok((rows, x.dims3().map_or(rows, |(_, positions, _)| positions), width))
}

/// `residual + dropout(x)`, or `dropout(x)` without a residual.
pub(super) fn dropout(residual: Option<&Tensor>, x: &Tensor, d: Option<&Dropout>) -> Result<Tensor> {
    let (x, residual) = (x.contiguous()?, residual.map(Tensor::contiguous).transpose()?);
    let y = unwritten(x.shape(), x.dtype(), x.device())?;
    let rows = rows(&x)?;
    let samples = samples(d, x.device())?;
    let kernel = Kernel::new(x.device(), Module::Dropout, format!("dropout_{}", suffix(x.dtype())))?;
    let kernel = kernel.value(Mask::new(d)).tensor_or_null(samples.as_ref())?.tensor_or_null(residual.as_ref())?;
    let kernel = kernel.tensor(&x)?.tensor(&y)?;
    // SAFETY: three tensors of one shape, and a sample for each sequence.
    unsafe { launch_on_rows(kernel, rows)? };
    Ok(y)
}

/// Rows of a block.
const ROWS: usize = 4;
/// If a row is a multiple of this, a thread takes eight columns at once, otherwise four.
const TWO_FOURS: usize = 16;
/// The most threads of a block.
const THREADS: usize = 256;

/// Threads of a block. In each pass along a row every thread has columns, if the row has enough for a warp.
fn threads_in_turns(width: usize) -> u32 {
    let columns = if width.is_multiple_of(TWO_FOURS) { width / 8 } else { width.div_ceil(4) };
    let turns = columns.div_ceil(THREADS).max(1);
    columns.div_ceil(turns).next_multiple_of(32).max(32) as u32
}

/// Launches a kernel whose last arguments are these [`rows`].
///
/// # Safety
///
/// The arguments before are the kernel's, and its tensors have these rows.
pub(crate) unsafe fn launch_on_rows(kernel: Kernel, (rows, positions, width): (usize, usize, usize)) -> Result<()> {
    let kernel = kernel.size(rows)?.size(positions)?.size(width)?;
    // SAFETY: by the caller's promise; each row of a block has a key in shared memory.
    unsafe { kernel.launch([rows.div_ceil(ROWS), 1, 1], threads_in_turns(width), ROWS * size_of::<u64>()) }
}
