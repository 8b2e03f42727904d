//! The look-up in plain candle operations.

use candle_core::{DType, Result, Tensor};

use crate::dispatch::overwrite;

/// See [`crate::embedding`].
pub fn embedding(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    let mut shape = ids.dims().to_vec();
    shape.push(table.dim(1)?);
    table.index_select(&ids.flatten_all()?, 0)?.to_dtype(dtype)?.reshape(shape)
}

/// See [`crate::embedding_backward`].
pub fn embedding_backward(ids: &Tensor, dy: &Tensor, dtable: &Tensor) -> Result<()> {
    let dy = dy.reshape((ids.elem_count(), dtable.dim(1)?))?.to_dtype(dtable.dtype())?;
    overwrite(dtable, &dtable.index_add(&ids.flatten_all()?, &dy.contiguous()?, 0)?)
}
