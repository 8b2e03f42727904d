//! The look-up in plain candle operations.

use candle_core::{DType, Result, Tensor};
use tensor_storage::overwrite;

use crate::needs::{Needs, converted, elements};

/// See [`crate::embedding`].
pub fn embedding(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    let mut shape = ids.dims().to_vec();
    shape.push(table.dim(1)?);
    table.index_select(&ids.flatten_all()?, 0)?.to_dtype(dtype)?.reshape(shape)
}

/// Rows of the table, if the result has another dtype.
pub(super) fn forward_needs(rows: usize, width: usize, [table, result]: [DType; 2]) -> Needs {
    let transient = if table == result { 0 } else { elements([rows, width, table.size_in_bytes()]) };
    Needs::bytes(transient)
}

/// The sum, and the gradient of the rows if it has another dtype.
pub(super) fn backward_needs(rows: usize, (v, d): (usize, usize), [dy, dtable]: [DType; 2]) -> Needs {
    let size = dtable.size_in_bytes();
    Needs::bytes(elements([v, d, size]) + converted(elements([rows, d]), dy, size))
}

/// See [`crate::embedding_backward`].
pub fn embedding_backward(ids: &Tensor, dy: &Tensor, dtable: &Tensor) -> Result<()> {
    let dy = dy.reshape((ids.elem_count(), dtable.dim(1)?))?.to_dtype(dtable.dtype())?;
    overwrite(dtable, &dtable.index_add(&ids.flatten_all()?, &dy.contiguous()?, 0)?)
}
