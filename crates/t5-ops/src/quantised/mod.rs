//! A frozen weight in codes of 8 or 4 bits, and the operations' view of any weight.
//!
//! The codes and scales of a weight are bytes of one tensor, which may lie in a file: nothing is wider until a product
//! packs it. In order:
//!
//! | precision | bytes |
//! | --- | --- |
//! | int8 | a signed code for each element, row after row; an f32 for each row: code x scale is the element |
//! | NF4 | two codes a byte, the first in its upper half; a byte for each block of 64 elements; an f32 for each group of 256 blocks; an f32 for all |
//!
//! NF4 is QLoRA's with double quantisation, as bitsandbytes stores it. Blocks go through the elements row after row. The scale of a block
//! is its group's scale times the value of its byte in the dynamic map, plus the last f32.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use t5_ops::{Precision, Quantised, linear};
//! let w = Tensor::randn(0f32, 1.0, (6, 64), &Device::Cpu)?; // (out, in)
//! let x = Tensor::ones((2, 64), DType::F32, &Device::Cpu)?;
//! let w = Quantised::quantise(&w, Precision::Nf4)?;
//! assert_eq!(linear(&x, &w)?.to_vec2::<f32>()?, linear(&x, &w.dequantised()?)?.to_vec2::<f32>()?);
//! # Ok::<(), candle_core::Error>(())
//! ```

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod panels;
mod quantiser;
#[cfg(test)]
mod tests;
mod weight;

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};
pub(crate) use panels::{in_panels, panel_bytes};
pub use quantiser::Quantiser;
pub use weight::Weight;

use crate::narrow::tables::{NF4, absmax_map};
use crate::narrow::{BLOCK, Form, GROUP, Int8, Narrow, Nf4};
use crate::simd::code_at;
use crate::storage::{View, filled};

/// On a card, up to this many rows are multiplied with codes directly: one token each of this many answers. For more rows the codes are
/// converted to numbers in memory.
pub(crate) const MAX_SMALL_M: usize = 16;

/// The precision of a quantised weight's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 8 bits an element, and a scale for each row.
    Int8,
    /// 4 bits an element, 4.127 with its scales.
    Nf4,
}

impl Precision {
    /// Its name: `int8` or `nf4`.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Int8 => "int8",
            Precision::Nf4 => "nf4",
        }
    }

    /// The precision of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        [Precision::Int8, Precision::Nf4].into_iter().find(|precision| precision.name() == name)
    }
}

/// The parts of a quantised weight, in the order of their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantisedPart {
    /// `codes`, `absmax`, `scales` or `offset`.
    pub name: &'static str,
    /// U8 or F32.
    pub dtype: DType,
    /// Its elements.
    pub count: usize,
}

/// The precision and the shape of a quantised weight: all that its bytes do not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantisation {
    precision: Precision,
    rows: usize,
    cols: usize,
}

impl Quantisation {
    /// The quantisation of a weight (rows, cols).
    ///
    /// # Errors
    /// A weight that no memory could hold.
    pub fn new(precision: Precision, (rows, cols): (usize, usize)) -> Result<Self> {
        tensor_storage::elements(&(rows, cols).into())?;
        Ok(Self { precision, rows, cols })
    }

    /// Returns the precision of the codes.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Rows and columns: out and in.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Returns the parts, in order.
    pub fn parts(&self) -> Vec<QuantisedPart> {
        let count = self.rows * self.cols;
        let blocks = count.div_ceil(BLOCK);
        let part = |name, dtype, count| QuantisedPart { name, dtype, count };
        match self.precision {
            Precision::Int8 => vec![part("codes", DType::U8, count), part("scales", DType::F32, self.rows)],
            Precision::Nf4 => vec![
                part("codes", DType::U8, count.div_ceil(2)),
                part("absmax", DType::U8, blocks),
                part("scales", DType::F32, blocks.div_ceil(GROUP)),
                part("offset", DType::F32, 1),
            ],
        }
    }

    /// Returns the bytes of all parts.
    pub fn bytes(&self) -> usize {
        self.parts().iter().map(QuantisedPart::bytes).sum()
    }
}

impl QuantisedPart {
    /// Returns the bytes of the part.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size_in_bytes()
    }
}

/// A weight (out, in) in codes. Cloning it copies no elements.
#[derive(Clone, Debug)]
pub struct Quantised {
    quantisation: Quantisation,
    /// U8, all parts one after the other.
    bytes: Tensor,
}

impl Quantised {
    /// The weight whose parts are in `bytes`, a vector of U8.
    ///
    /// # Errors
    /// Another kind of tensor; another number of bytes than the shape has.
    pub fn new(quantisation: Quantisation, bytes: Tensor) -> Result<Self> {
        let expected = quantisation.bytes();
        if bytes.dims() != [expected] || bytes.dtype() != DType::U8 || !bytes.is_contiguous() {
            let (got, dims) = (bytes.dtype(), bytes.dims());
            bail!("a quantised weight: expected {expected} contiguous U8, got {got:?} {dims:?}")
        }
        Ok(Self { quantisation, bytes })
    }

    /// Quantises a weight (out, in).
    ///
    /// # Errors
    /// A value that is not finite.
    pub fn quantise(w: &Tensor, precision: Precision) -> Result<Self> {
        let mut quantiser = Quantiser::new(Quantisation::new(precision, w.dims2()?)?);
        let mut bytes = Vec::with_capacity(quantiser.quantisation().bytes());
        for row in 0..w.dim(0)? {
            let row = w.narrow(0, row, 1)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            quantiser.values(&row, &mut bytes)?;
        }
        let quantisation = quantiser.quantisation();
        quantiser.finish(&mut bytes);
        let count = bytes.len();
        Self::new(quantisation, Tensor::from_vec(bytes, count, &Device::Cpu)?)
    }

    /// Returns its precision and shape.
    pub fn quantisation(&self) -> Quantisation {
        self.quantisation
    }

    /// Returns its bytes, for paging and for files.
    pub fn bytes(&self) -> &Tensor {
        &self.bytes
    }

    /// Converts all of the weight to f32 (out, in), on its device, element by element from the codes' definition: for tests and references.
    ///
    /// # Errors
    /// None in a tensor that can be read.
    pub fn dequantised(&self) -> Result<Tensor> {
        let (rows, cols) = self.quantisation.shape();
        let all = self.on_cpu()?.with_form(|form| {
            let value = |i: usize| match form {
                Form::Int8(int8) => f32::from(int8.codes[i] as i8) * f32::from_le_bytes(int8.scales[i / cols]),
                Form::Nf4(nf4) => NF4[code_at(nf4.codes, i)] * nf4.scale(absmax_map(), i / BLOCK),
                Form::F16(data) => data[i].to_f32(),
            };
            Tensor::from_vec((0..rows * cols).map(value).collect::<Vec<f32>>(), (rows, cols), &Device::Cpu)
        })?;
        all.to_device(self.bytes.device())
    }

    /// The same bytes on the CPU, where its kernels can read them.
    fn on_cpu(&self) -> Result<Self> {
        Ok(Self { bytes: self.bytes.to_device(&Device::Cpu)?, ..self.clone() })
    }

    /// Converts some rows of the weight to f32, on the CPU.
    ///
    /// # Errors
    /// Rows that it does not have.
    pub fn rows(&self, rows: Range<usize>) -> Result<Tensor> {
        let (count, cols) = self.quantisation.shape();
        if rows.start > rows.end || rows.end > count {
            bail!("rows {rows:?} of a quantised weight of {count}")
        }
        self.on_cpu()?.with_form(|form| {
            filled::<f32>((rows.len(), cols), |to| {
                Narrow::new(form, count * cols).widen(rows.start * cols, to);
                Ok(())
            })
        })
    }

    /// Calls `f` with the parts, under the tensor's read lock.
    fn with_form<R>(&self, f: impl FnOnce(Form) -> Result<R>) -> Result<R> {
        let view = View::new(&self.bytes)?;
        let mut rest = view.slice::<u8>()?;
        let mut parts = self.quantisation.parts().into_iter().map(|part| {
            let (bytes, after) = rest.split_at(part.bytes());
            rest = after;
            bytes
        });
        let mut next = || parts.next().unwrap_or_default();
        let codes = next();
        f(match self.quantisation.precision {
            Precision::Int8 => Form::Int8(Int8 { codes, scales: next().as_chunks().0, width: self.quantisation.cols }),
            Precision::Nf4 => {
                let (absmax, scales, offset) = (next(), next().as_chunks().0, next().as_chunks().0);
                Form::Nf4(Nf4 { codes, absmax, scales, offset: offset.first().map_or(0.0, |&b| f32::from_le_bytes(b)) })
            }
        })
    }
}
