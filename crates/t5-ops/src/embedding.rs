//! Token embedding: rows of a table by id, and the scatter-add that is its gradient.
//!
//! Shapes: ids (B, T) of `U32`, table (V, D), result (B, T, D).

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::{check_accumulator, check_shape};

/// Looks `ids` up in `table`, giving rows in `dtype`. An id outside the table is an error.
pub fn embedding(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    let _span = tracing::debug_span!("embedding").entered();
    check_ids("embedding", ids)?;
    table.dims2()?;
    reference::embedding(ids, table, dtype)
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
    reference::embedding_backward(ids, dy, dtable)
}

fn check_ids(op: &str, ids: &Tensor) -> Result<()> {
    if ids.dtype() != DType::U32 {
        bail!("{op}: ids: expected U32, got {:?}", ids.dtype())
    }
    Ok(())
}

pub(crate) mod reference {
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
}
