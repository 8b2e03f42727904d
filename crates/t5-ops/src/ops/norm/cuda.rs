//! The norm on a card: a warp a row; the gradient of the weight in parts of some rows, added in order.

use candle_core::{DType, Result, Tensor};
use cuda_device::launch::{Kernel, Module, bytes_to_add_in_order, check_apart, suffix, threads_along, unwritten};

use crate::dispatch::rows_and_width;

pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let (rows, width) = rows_and_width("rms_norm", "x", x)?;
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let y = unwritten(x.shape(), x.dtype(), x.device())?;
    let inv_rms = unwritten(rows, DType::F32, x.device())?;
    let kernel = Kernel::new(x.device(), Module::Norm, format!("rms_norm_{}", suffixes(&x, &weight)))?;
    let kernel = kernel.tensor(&x)?.tensor(&weight)?.value(eps as f32).tensor(&y)?.tensor(&inv_rms)?;
    // SAFETY: x and y have rows of this width, the weight is one, and each row has a statistic.
    unsafe { kernel.size(rows)?.size(width)?.launch([rows.div_ceil(ROWS), 1, 1], 32 * ROWS as u32, 0)? };
    Ok((y, inv_rms))
}

/// Threads of a block that adds the parts of 32 columns.
const SUM_THREADS: u32 = 512;
/// Rows of a block: a warp each.
const ROWS: usize = 8;

pub(super) fn rms_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    inv_rms: &Tensor,
    dy: Tensor,
    residual: Option<&Tensor>,
    dweight: Option<&Tensor>,
) -> Result<Tensor> {
    let (rows, width) = rows_and_width("rms_norm_backward", "x", x)?;
    let operands = [x, weight, inv_rms].into_iter().chain(residual);
    check_apart("rms_norm_backward", &dy, operands.clone().chain(dweight))?;
    if let Some(dweight) = dweight {
        check_apart("rms_norm_backward", dweight, operands)?;
    }
    let (x, weight, inv_rms, dy) = (x.contiguous()?, weight.contiguous()?, inv_rms.contiguous()?, dy.contiguous()?);
    let residual = residual.map(Tensor::contiguous).transpose()?;
    let rows_each = rows.div_ceil(super::PARTS_ON_DEVICE as usize).max(1);
    let parts = rows.div_ceil(rows_each);
    let partial = unwritten((parts, width), DType::F32, x.device())?;
    let kernel = Kernel::new(x.device(), Module::Norm, format!("rms_norm_backward_{}", suffixes(&x, &weight)))?;
    let kernel =
        kernel.tensor(&x)?.tensor(&weight)?.tensor(&inv_rms)?.tensor(&dy)?.tensor_or_null(residual.as_ref())?;
    let kernel = kernel.tensor(&partial)?.size(rows)?.size(rows_each)?.size(width)?;
    let shared = (width + 64) * size_of::<f32>();
    // SAFETY: x, dy and the residual have the same shape; each block has a row of partial sums, in memory and in shared memory.
    unsafe { kernel.launch([parts, 1, 1], threads_along(width), shared)? };
    if let Some(dweight) = dweight {
        let kernel = Kernel::new(x.device(), Module::Norm, "add_partial_sums")?;
        let kernel = kernel.tensor(&partial)?.tensor(dweight)?.size(parts)?.size(width)?;
        let shared = bytes_to_add_in_order(SUM_THREADS);
        // SAFETY: a lane for each column; each thread has 16 numbers in shared memory.
        unsafe { kernel.launch([width.div_ceil(32), 1, 1], SUM_THREADS, shared)? };
    }
    Ok(dy)
}

fn suffixes(x: &Tensor, weight: &Tensor) -> String {
    format!("{}_{}", suffix(x.dtype()), suffix(weight.dtype()))
}
