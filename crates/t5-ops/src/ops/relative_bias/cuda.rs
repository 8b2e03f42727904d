//! The bias on a card.

use candle_core::{DType, Result, Tensor};

use cuda_device::launch::{Kernel, Module, suffix, unwritten, uploaded};

pub(super) fn relative_bias(table: &Tensor, buckets: &[u32]) -> Result<Tensor> {
    let (heads, offsets) = (table.dim(1)?, buckets.len());
    let table = table.contiguous()?;
    let ids = uploaded(buckets, table.device())?;
    let bias = unwritten((heads, offsets), DType::F32, table.device())?;
    let kernel = Kernel::new(table.device(), Module::Rows, format!("relative_bias_{}", suffix(table.dtype())))?;
    let kernel = kernel.tensor(&table)?.tensor(&ids)?.tensor(&bias)?.size(heads)?.size(offsets)?;
    // SAFETY: a thread for each element of the bias; buckets are rows of the table.
    unsafe { kernel.launch([(heads * offsets).div_ceil(256), 1, 1], 256, 0)? };
    Ok(bias)
}

pub(super) fn relative_bias_backward(dbias: &Tensor, buckets: &[u32], dtable: &Tensor) -> Result<()> {
    let (count, heads) = dtable.dims2()?;
    let dbias = dbias.contiguous()?;
    let ids = uploaded(buckets, dtable.device())?;
    let kernel = Kernel::new(dtable.device(), Module::Rows, "relative_bias_backward")?;
    let kernel = kernel.tensor(&dbias)?.tensor(&ids)?.tensor(dtable)?;
    let kernel = kernel.size(count)?.size(heads)?.size(buckets.len())?;
    // SAFETY: a thread for each element of the table.
    unsafe { kernel.launch([(count * heads).div_ceil(32), 1, 1], 32, 0) }
}
