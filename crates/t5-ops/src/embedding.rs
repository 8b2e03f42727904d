//! Token embedding: rows of a table by id, and the scatter-add that is its gradient.
//!
//! Shapes: ids (B, T) of `U32`, table (V, D), result (B, T, D).

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::{check_accumulator, check_shape, has_kernel};
use crate::storage::elements;

/// Looks `ids` up in `table`, giving rows in `dtype`. An id outside the table is an error.
pub fn embedding(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
    let _span = tracing::debug_span!("embedding").entered();
    check_ids("embedding", ids)?;
    table.dims2()?;
    elements(table.shape())?;
    if has_kernel(&[table]) && ids.device().is_cpu() && matches!(dtype, DType::F32 | DType::BF16) {
        kernel::embedding(ids, table, dtype)
    } else {
        reference::embedding(ids, table, dtype)
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
    if has_kernel(&[dy, dtable]) && dtable.dtype() == DType::F32 && ids.device().is_cpu() {
        kernel::embedding_backward(ids, dy, dtable)
    } else {
        reference::embedding_backward(ids, dy, dtable)
    }
}

fn check_ids(op: &str, ids: &Tensor) -> Result<()> {
    if ids.dtype() != DType::U32 {
        bail!("{op}: ids: expected U32, got {:?}", ids.dtype())
    }
    elements(ids.shape())?;
    Ok(())
}

mod kernel {
    use candle_core::{DType, Result, Tensor, bail};

    use crate::parallel::{Shared, for_each_part, for_each_rows};
    use crate::storage::{Element, View, filled, update, with_element};
    use crate::vector::vectorized;

    pub(super) fn embedding(ids: &Tensor, table: &Tensor, dtype: DType) -> Result<Tensor> {
        let (entries, width) = table.dims2()?;
        let (ids, table) = (ids.contiguous()?, table.contiguous()?);
        let (ids_view, table_view) = (View::new(&ids)?, View::new(&table)?);
        let id_data = ids_view.ids()?;
        check_range("embedding", id_data, entries)?;
        let mut shape = ids.dims().to_vec();
        shape.push(width);
        with_element!(table.dtype(), S, {
            let table_data = table_view.slice::<S>()?;
            with_element!(dtype, T, {
                filled::<T>(shape, |out| {
                    let out = Shared::new(out);
                    for_each_rows(id_data.len(), width, |rows| {
                        for row in rows {
                            let entry = id_data[row] as usize * width;
                            // SAFETY: each row belongs to one part.
                            let out = unsafe { out.slice(row * width, width) };
                            convert::<S, T>(&table_data[entry..entry + width], out);
                        }
                    });
                    Ok(())
                })
            })
        })
    }

    pub(super) fn embedding_backward(ids: &Tensor, dy: &Tensor, dtable: &Tensor) -> Result<()> {
        let (entries, width) = dtable.dims2()?;
        let (ids, dy) = (ids.contiguous()?, dy.contiguous()?);
        let (ids_view, dy_view) = (View::new(&ids)?, View::new(&dy)?);
        let id_data = ids_view.ids()?;
        check_range("embedding_backward", id_data, entries)?;
        // Rows may repeat, so the threads share the columns: every sum runs in the order of the rows.
        let threads = if id_data.len() * width < 1 << 16 { 1 } else { rayon::current_num_threads() };
        let part = width.div_ceil(threads).next_multiple_of(64).max(64);
        with_element!(dy.dtype(), T, {
            let dy_data = dy_view.slice::<T>()?;
            update::<f32, _>("embedding_backward", dtable, &[&ids, &dy], |dtable| {
                let dtable = Shared::new(dtable);
                for_each_part(width.div_ceil(part), |p| {
                    let (first, count) = (p * part, part.min(width - p * part));
                    for (row, &id) in id_data.iter().enumerate() {
                        // SAFETY: each part has its own columns.
                        let sum = unsafe { dtable.slice(id as usize * width + first, count) };
                        add::<T>(&dy_data[row * width + first..][..count], sum);
                    }
                });
                Ok(())
            })
        })
    }

    fn check_range(op: &str, ids: &[u32], entries: usize) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= entries) {
            Some(id) => bail!("{op}: expected ids below {entries}, got {id}"),
            None => Ok(()),
        }
    }

    vectorized! {
        fn convert<S: Element, T: Element>(x: &[S], y: &mut [T]) {
            for (y, x) in y.iter_mut().zip(x) {
                *y = T::from_f32(x.to_f32());
            }
        }

        fn add<T: Element>(x: &[T], y: &mut [f32]) {
            for (y, x) in y.iter_mut().zip(x) {
                *y += x.to_f32();
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{Numbers, assert_close, check_gradient, tolerance, weighted};

    fn random_ids(b: usize, t: usize, entries: usize) -> Tensor {
        let mut numbers = Numbers::new(8);
        let ids: Vec<u32> = (0..b * t).map(|_| numbers.below(entries) as u32).collect();
        Tensor::from_vec(ids, (b, t), &Device::Cpu).unwrap()
    }

    #[test]
    fn the_reference_agrees_with_finite_differences() {
        let mut numbers = Numbers::new(9);
        let (ids, table) = (random_ids(2, 6, 5), numbers.tensor(&[5, 3], DType::F64));
        let dy = numbers.tensor(&[2, 6, 3], DType::F64);
        let dtable = table.zeros_like().unwrap();
        embedding_backward(&ids, &dy, &dtable).unwrap();
        check_gradient("dtable", &table, &dtable, |table| weighted(&embedding(&ids, table, DType::F64)?, &dy));
    }

    #[test]
    fn kernels_agree_with_the_reference() {
        for (b, t, v, d) in [(1, 1, 1, 1), (2, 7, 9, 65), (4, 100, 50, 300)] {
            for (dtype, table_dtype) in
                [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)]
            {
                let mut numbers = Numbers::new(10);
                let (ids, table) = (random_ids(b, t, v), numbers.tensor(&[v, d], table_dtype));
                let what = format!("({b}, {t}, {v}, {d}) {dtype:?}");
                let got = embedding(&ids, &table, dtype).unwrap();
                assert_eq!(got.dtype(), dtype);
                assert_close(&what, &got, &reference::embedding(&ids, &table, dtype).unwrap(), 0.0);
                let dy = numbers.tensor(&[b, t, d], dtype);
                let dtable = numbers.tensor(&[v, d], DType::F32);
                let expected = dtable.copy().unwrap();
                reference::embedding_backward(&ids, &dy, &expected).unwrap();
                embedding_backward(&ids, &dy, &dtable).unwrap();
                assert_close(&what, &dtable, &expected, tolerance(DType::F32));
            }
        }
    }

    #[test]
    fn an_id_outside_the_table_is_an_error() {
        let table = Tensor::zeros((4, 2), DType::F32, &Device::Cpu).unwrap();
        let ids = Tensor::new(&[[0u32, 4]], &Device::Cpu).unwrap();
        let message = embedding(&ids, &table, DType::F32).unwrap_err().to_string();
        assert!(message.contains("expected ids below 4, got 4"), "{message}");
        let dy = Tensor::zeros((1, 2, 2), DType::F32, &Device::Cpu).unwrap();
        assert!(embedding_backward(&ids, &dy, &table).is_err());
    }
}
