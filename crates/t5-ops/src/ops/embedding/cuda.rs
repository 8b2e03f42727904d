//! The look-up on a card, and the sum of gradients by row of the table: each row sums in the order of the ids.

use candle_core::{DType, Result, Tensor};

use cuda_device::launch::{Kernel, Module, check_apart, suffix, threads_along, unwritten};

pub(super) fn embedding(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    let mut shape = ids.dims().to_vec();
    shape.push(table.dim(1)?);
    gathered(ids, table, dtype)?.reshape(shape)
}

/// The rows (.., D) of `table` (R, D) with these numbers.
pub(crate) fn gathered(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    let (ids, table) = (ids.contiguous()?, table.contiguous()?);
    let (count, width) = (ids.elem_count(), table.dim(1)?);
    let rows = unwritten((count, width), dtype, table.device())?;
    let name = format!("gather_{}_{}", suffix(table.dtype()), suffix(dtype));
    let kernel = Kernel::new(table.device(), Module::Rows, name)?;
    let kernel = kernel.tensor(&ids)?.tensor(&table)?.tensor(&rows)?.size(width)?;
    // SAFETY: a row for each id; the code that made the ids has checked that they are rows of the table.
    unsafe { kernel.launch([count, 1, 1], threads_along(width), 0)? };
    Ok(rows)
}

/// Writes `rows` (C, D) over the rows of `table` (R, D) with these numbers, each once.
pub(crate) fn scatter(ids: &Tensor, rows: &Tensor, table: &Tensor) -> Result<()> {
    let (count, width) = rows.dims2()?;
    let kernel = Kernel::new(table.device(), Module::Rows, format!("scatter_{}", suffix(rows.dtype())))?;
    let kernel = kernel.tensor(ids)?.tensor(rows)?.tensor(table)?.size(width)?;
    // SAFETY: as above.
    unsafe { kernel.launch([count, 1, 1], threads_along(width), 0) }
}

pub(super) fn embedding_backward(ids: &Tensor, dy: &Tensor, dtable: &Tensor) -> Result<()> {
    check_apart("embedding_backward", dtable, [dy])?;
    let (ids, dy) = (ids.contiguous()?, dy.contiguous()?);
    let (count, width) = (ids.elem_count(), dtable.dim(1)?);
    // The order of rows and the sorted ids. Memory for recorded work is f32 or bf16.
    let order = unwritten((2, count), DType::F32, dy.device())?;
    let kernel = Kernel::new(dy.device(), Module::Rows, "order_by_id")?;
    let kernel = kernel.tensor(&ids)?.tensor(&order)?.size(count)?;
    // Each warp has 128 ids and 32 counts in shared memory.
    let shared = (ORDER_THREADS / 32) as usize * (128 + 32) * size_of::<u32>();
    // SAFETY: two numbers of 32 bits for each id.
    unsafe { kernel.launch([count.div_ceil(PLACES), 1, 1], ORDER_THREADS, shared)? };
    let kernel = Kernel::new(dy.device(), Module::Rows, format!("scatter_add_{}", suffix(dy.dtype())))?;
    let kernel = kernel.tensor(&order)?.tensor(&dy)?.tensor(dtable)?.size(count)?.size(width)?;
    let columns = width.div_ceil(4 * ADD_THREADS as usize);
    // SAFETY: as above; the ordered rows are rows of dy.
    unsafe { kernel.launch([count.div_ceil(PLACES), columns, 1], ADD_THREADS, 0) }
}

/// Rows of a block that orders them, and places of a block that adds them.
const PLACES: usize = 32;
/// Threads of these blocks.
const ORDER_THREADS: u32 = 256;
const ADD_THREADS: u32 = 64;
