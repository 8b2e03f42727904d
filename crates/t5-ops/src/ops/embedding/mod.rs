//! Token embedding: rows of a table by id, and the scatter-add that is its gradient.
//!
//! Shapes: ids (B, T) of `U32`, table (V, D), result (B, T, D).

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};
use tensor_storage::{can_read_in_place, elements, is_in_file};

use crate::dispatch::{Path, check_accumulator, check_shape};
use crate::needs::Needs;

/// Looks `ids` up in `table`, which may be in f16, and returns rows in `dtype`. An id outside the table is an error. A device does not
/// check ids: the caller checks them before copying them there.
pub fn embedding(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    let _span = tracing::debug_span!("embedding").entered();
    check_ids("embedding", ids)?;
    table.dims2()?;
    elements(table.shape())?;
    let takes = ids.device().is_cpu() && Path::on_cpu(dtype) == Path::Cpu;
    let takes_table = Path::choose(&[table]) == Path::Cpu || table.device().is_cpu() && table.dtype() == DType::F16;
    let path = match Path::choose(&[table]) {
        Path::Device => Path::Device,
        _ => Path::Cpu.provided(takes && takes_table),
    };
    match path {
        Path::Cpu => cpu::embedding(ids, table, dtype, cpu::From::Memory),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([table]) && cuda_device::launch::computes_in(dtype) => {
            cuda::embedding(ids, table, dtype)
        }
        Path::Reference | Path::Device => reference::embedding(ids, table, dtype),
    }
}

/// Like [`embedding`], for a table that lies in a file. Each row is read with a call of its own, because through the mapping the system
/// would read megabytes around a missing page. Calls [`embedding`] if the table is in memory, on a card, or in a dtype that is not read in
/// place.
pub fn embedding_by_rows(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    let is_taken = can_read_in_place(table.dtype()) && ids.device().is_cpu() && Path::on_cpu(dtype) == Path::Cpu;
    if !is_taken || !is_in_file(table) {
        return embedding(ids, table, dtype);
    }
    let _span = tracing::debug_span!("embedding").entered();
    check_ids("embedding", ids)?;
    cpu::embedding(ids, table, dtype, cpu::From::File)
}

/// Returns the needs of [`embedding`] for `rows` ids, the width of the table, and the dtypes of the table and the result.
pub fn embedding_needs(path: Path, rows: usize, width: usize, dtypes: [DType; 2]) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Device => Needs::launches(1),
        Path::Reference => reference::forward_needs(rows, width, dtypes),
    }
}

/// `dtable[ids] += dy`, in place. dy (B, T, D), dtable (V, D).
pub fn embedding_backward(ids: &Tensor, dy: &Tensor, dtable: &Tensor) -> Result<()> {
    let _span = tracing::debug_span!("embedding_backward").entered();
    check_ids("embedding_backward", ids)?;
    let (v, d) = dtable.dims2()?;
    check_accumulator("embedding_backward", "dtable", dtable, &[v, d])?;
    let mut expected = ids.dims().to_vec();
    expected.push(d);
    check_shape("embedding_backward", "dy", dy, &expected)?;
    match Path::choose(&[dy, dtable]).provided(dtable.dtype() == DType::F32 && ids.device().is_cpu()) {
        Path::Cpu => cpu::embedding_backward(ids, dy, dtable),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([dy, dtable]) && dtable.dtype() == DType::F32 => {
            cuda::embedding_backward(ids, dy, dtable)
        }
        Path::Reference | Path::Device => reference::embedding_backward(ids, dy, dtable),
    }
}

/// Returns the needs of [`embedding_backward`] for `rows` ids, the table's (V, D), and the dtypes of dy and of dtable.
pub fn embedding_backward_needs(path: Path, rows: usize, table: (usize, usize), dtypes: [DType; 2]) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        // The gradient of a table in bf16 is computed by candle's operations.
        // A card sorts the rows by id first: it writes the order and the sorted ids.
        Path::Device if dtypes[1] == DType::F32 => {
            Needs::bytes(2 * rows as u64 * size_of::<u32>() as u64).with_launches(2)
        }
        Path::Reference | Path::Device => reference::backward_needs(rows, table, dtypes),
    }
}

fn check_ids(op: &str, ids: &Tensor) -> Result<()> {
    if ids.dtype() != DType::U32 {
        bail!("{op}: ids: expected U32, got {:?}", ids.dtype())
    }
    elements(ids.shape())?;
    Ok(())
}
