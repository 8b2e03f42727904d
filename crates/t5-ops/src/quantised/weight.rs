//! The weight argument of an operation.

use candle_core::{DType, Result, Tensor};

use super::Quantised;
use crate::by_rows::Rows;
use crate::dispatch::Path;
use crate::matmul::{Factor, Stored};
use crate::narrow::{Form, Narrow};
use crate::storage::View;

/// A weight (out, in): a tensor, also in `F16`, or a quantised one. Elements narrower than f32 are used as they are stored.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// Numbers.
    Dense(&'a Tensor),
    /// Codes.
    Quantised(&'a Quantised),
    /// Numbers in a file. The loss and [`crate::linear`] have some of the rows in memory at a time ([`crate::window_bytes`]). Other
    /// operations treat them as [`Weight::Dense`].
    ByRows(&'a Tensor),
}

impl<'a> From<&'a Tensor> for Weight<'a> {
    fn from(weight: &'a Tensor) -> Self {
        Weight::Dense(weight)
    }
}

impl<'a> From<&'a Quantised> for Weight<'a> {
    fn from(weight: &'a Quantised) -> Self {
        Weight::Quantised(weight)
    }
}

impl<'a> Weight<'a> {
    /// Returns (out, in).
    ///
    /// # Errors
    /// A tensor that is no matrix.
    pub fn dims2(&self) -> Result<(usize, usize)> {
        match self {
            Weight::Dense(w) | Weight::ByRows(w) => w.dims2(),
            Weight::Quantised(w) => Ok(w.quantisation().shape()),
        }
    }

    /// Returns the tensor of its numbers or bytes.
    pub fn tensor(&self) -> &'a Tensor {
        match self {
            Weight::Dense(w) | Weight::ByRows(w) => w,
            Weight::Quantised(w) => w.bytes(),
        }
    }

    /// The path of an operation on this weight and `operand`.
    pub(crate) fn path_with(&self, operand: &Tensor) -> Path {
        let takes = match self {
            Weight::Dense(w) | Weight::ByRows(w) => w.dtype() == DType::F16 || Path::on_cpu(w.dtype()) == Path::Cpu,
            Weight::Quantised(_) => true,
        };
        Path::choose(&[operand]).provided(takes && self.tensor().device().is_cpu())
    }

    /// Converts all of it to numbers of `dtype`, on its device.
    pub(crate) fn dense(&self, dtype: DType) -> Result<Tensor> {
        match self {
            Weight::Dense(w) | Weight::ByRows(w) => w.to_dtype(dtype),
            Weight::Quantised(w) => w.dequantised()?.to_dtype(dtype),
        }
    }

    /// [`Weight::with_factor`] for callers that copy rows of [`Weight::ByRows`] to memory.
    pub(crate) fn with_rows<R>(&self, f: impl FnOnce(Rows) -> Result<R>) -> Result<R> {
        let come = matches!(self, Weight::ByRows(_));
        self.with_factor(|weight| f(Rows::new(weight, come)))
    }

    /// Calls `f` with its elements (out, in), under its read lock.
    pub(crate) fn with_factor<R>(&self, f: impl FnOnce(Factor) -> Result<R>) -> Result<R> {
        let (rows, cols) = self.dims2()?;
        match self {
            Weight::Dense(w) | Weight::ByRows(w) => {
                let w = w.contiguous()?;
                let view = View::new(&w)?;
                if w.dtype() == DType::F16 {
                    let data = Narrow::new(Form::F16(view.slice()?), rows * cols);
                    return f(Factor::new(Stored::Narrow(data), rows, cols));
                }
                f(Factor::new(Stored::Wide(view.operand()?), rows, cols))
            }
            Weight::Quantised(w) => {
                w.with_form(|form| f(Factor::new(Stored::Narrow(Narrow::new(form, rows * cols)), rows, cols)))
            }
        }
    }
}
