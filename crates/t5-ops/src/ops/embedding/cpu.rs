//! The look-up on the CPU, and the sum of gradients by row of the table.

use candle_core::{DType, Result, Tensor, WithDType, bail};
use half::f16;

use crate::by_rows::copied;
use crate::narrow::{Form, Narrow};
use crate::parallel::{Shared, for_each_part, for_each_rows};
use crate::storage::{Element, View, filled, update, with_element};
use crate::vector::vectorized;

/// The source of a table's rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    Memory,
    /// The file that the table lies in, one row at a time.
    File,
}

pub(super) fn embedding(ids: &Tensor, table: &Tensor, dtype: DType, from: From) -> Result<Tensor> {
    let (entries, width) = table.dims2()?;
    let (ids, table) = (ids.contiguous()?, table.contiguous()?);
    let (ids_view, table_view) = (View::new(&ids)?, View::new(&table)?);
    let id_data = ids_view.ids()?;
    check_range("embedding", id_data, entries)?;
    let mut shape = ids.dims().to_vec();
    shape.push(width);
    with_element!(dtype, T, {
        filled::<T>(shape, |out| {
            let out = Shared::new(out);
            // Copies the row at an element of the table.
            let look_up = |copy: &(dyn Fn(usize, &mut [T]) + Sync)| {
                for_each_rows(id_data.len(), width, |rows| {
                    for row in rows {
                        // SAFETY: each row belongs to one part.
                        let out = unsafe { out.slice(row * width, width) };
                        copy(id_data[row] as usize * width, out);
                    }
                });
            };
            if table.dtype() == DType::F16 {
                let table = table_view.slice::<f16>()?;
                look_up(&|entry, out| with_row(&table[entry..][..width], from, |row| widen(row, out)));
                return Ok(());
            }
            with_element!(table.dtype(), S, {
                let table = table_view.slice::<S>()?;
                look_up(&|entry, out| with_row(&table[entry..][..width], from, |row| convert::<S, T>(row, out)));
            });
            Ok(())
        })
    })
}

/// Calls `f` with a row of a table, or with a copy of it from the file.
fn with_row<S: WithDType>(row: &[S], from: From, f: impl FnOnce(&[S])) {
    if from == From::Memory {
        return f(row);
    }
    f(copied(row, &mut vec![S::zero(); row.len()]).unwrap_or(row));
}

/// Elements of f16 that are widened at a time.
const WIDENED: usize = 512;

fn widen<T: Element>(row: &[f16], out: &mut [T]) {
    let row = Narrow::new(Form::F16(row), row.len());
    let mut wide = [0f32; WIDENED];
    for (piece, out) in out.chunks_mut(WIDENED).enumerate() {
        let wide = &mut wide[..out.len()];
        row.widen(piece * WIDENED, wide);
        convert::<f32, T>(wide, out);
    }
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
