//! Converts values for a file: a parameter's rows from the source, and their bytes in the file's dtype.

use std::io::Write;

use half::{bf16, f16};

use crate::error::Error;
use crate::t5::Parameter;

/// Receives whole rows of a parameter's values.
pub type EachRows<'a, E> = &'a mut dyn FnMut(&[f32]) -> Result<(), E>;

/// The source of a model's parameter values.
pub trait Weights {
    /// Errors of reading values, and of writing them.
    type Error: From<Error>;

    /// Passes the values of the parameter with transformers' name `name` to `each`, in order, whole rows at a time.
    ///
    /// # Errors
    /// Errors of reading, and of `each`.
    fn each_rows(&self, name: &str, shape: &[usize], each: EachRows<'_, Self::Error>) -> Result<(), Self::Error>;
}

/// The dtype of the matrices in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// 16 bits, of which 5 are the exponent.
    F16,
    /// 16 bits, of which 8 are the exponent.
    BF16,
    /// 8 bits and a scale in f16 for every 32 values of a row: GGUF's `Q8_0`.
    Q8_0,
    /// 8 bits and a scale in f32 for every row: CTranslate2's `int8`.
    Int8,
}

/// Values of a row that share a scale in [`Dtype::Q8_0`].
pub(crate) const Q8_0_BLOCK: usize = 32;
const Q8_0_BLOCK_BYTES: usize = 2 + Q8_0_BLOCK;

impl Dtype {
    /// The dtype's name.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::BF16 => "bf16",
            Dtype::Q8_0 => "q8_0",
            Dtype::Int8 => "int8",
        }
    }

    /// Bytes of `values` values in whole rows, without the scales of [`Dtype::Int8`].
    pub(crate) fn bytes(self, values: usize) -> u64 {
        let values = values as u64;
        match self {
            Dtype::F32 => values * 4,
            Dtype::F16 | Dtype::BF16 => values * 2,
            Dtype::Q8_0 => values / Q8_0_BLOCK as u64 * Q8_0_BLOCK_BYTES as u64,
            Dtype::Int8 => values,
        }
    }
}

/// A tensor of a file that takes its values from a model.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    /// The name in the file.
    pub(crate) name: String,
    /// The dimensions, the outermost first.
    pub(crate) shape: Vec<usize>,
    /// The parameters whose rows it consists of, in order.
    pub(crate) parts: Vec<Parameter>,
    /// A factor for every value.
    pub(crate) factor: f32,
    pub(crate) dtype: Dtype,
}

impl Tensor {
    /// A tensor of a single parameter.
    pub(crate) fn single(name: impl Into<String>, parameter: Parameter, dtype: Dtype) -> Tensor {
        Tensor { name: name.into(), shape: parameter.shape.clone(), parts: vec![parameter], factor: 1.0, dtype }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.dtype.bytes(self.shape.iter().product())
    }

    /// Writes the values. Returns the scales of the rows if the dtype has them.
    pub(crate) fn write<W: Weights>(&self, sink: &mut dyn Write, weights: &W) -> Result<Vec<f32>, W::Error> {
        let columns = self.shape[1..].iter().product::<usize>();
        // A vector is one row.
        let columns = if self.shape.len() == 1 { self.shape[0] } else { columns };
        let mut encoder = Encoder { tensor: self, columns, bytes: Vec::new(), scales: Vec::new() };
        let mut written = 0;
        for part in &self.parts {
            weights.each_rows(&part.name, &part.shape, &mut |values| {
                encoder.bytes.clear();
                encoder.encode(values)?;
                written += encoder.bytes.len() as u64;
                Ok(sink.write_all(&encoder.bytes).map_err(Error::Io)?)
            })?;
        }
        assert_eq!(written, self.bytes(), "`{}`: a source gives every value once", self.name);
        Ok(encoder.scales)
    }
}

struct Encoder<'a> {
    tensor: &'a Tensor,
    columns: usize,
    bytes: Vec<u8>,
    scales: Vec<f32>,
}

impl Encoder<'_> {
    fn encode(&mut self, values: &[f32]) -> Result<(), Error> {
        let factor = self.tensor.factor;
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            return Err(self.refuse(*value));
        }
        match self.tensor.dtype {
            Dtype::F32 => self.bytes.extend(values.iter().flat_map(|value| (value * factor).to_le_bytes())),
            Dtype::BF16 => {
                for value in values {
                    let narrow = bf16::from_f32(value * factor);
                    if !narrow.is_finite() {
                        return Err(self.refuse(*value));
                    }
                    self.bytes.extend(narrow.to_le_bytes());
                }
            }
            Dtype::F16 => {
                for value in values {
                    let narrow = f16::from_f32(value * factor);
                    if !narrow.is_finite() {
                        return Err(self.refuse(*value));
                    }
                    self.bytes.extend(narrow.to_le_bytes());
                }
            }
            Dtype::Q8_0 => {
                for block in values.chunks_exact(Q8_0_BLOCK) {
                    self.q8_0(block, factor)?;
                }
            }
            Dtype::Int8 => values.chunks_exact(self.columns).for_each(|row| self.int8(row, factor)),
        }
        Ok(())
    }

    /// The same as `quantize_row_q8_0_ref` in llama.cpp's `ggml/src/ggml-quants.c`: halves are rounded away from zero.
    fn q8_0(&mut self, block: &[f32], factor: f32) -> Result<(), Error> {
        let largest = block.iter().fold(0.0_f32, |largest, value| largest.max((value * factor).abs()));
        let scale = largest / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let stored = f16::from_f32(scale);
        if !stored.is_finite() {
            return Err(self.refuse(largest));
        }
        self.bytes.extend(stored.to_le_bytes());
        self.bytes.extend(block.iter().map(|value| (value * factor * inverse).round() as i8 as u8));
        Ok(())
    }

    /// The same as `_quantize` in CTranslate2's `specs/model_spec.py`: halves are rounded to even.
    fn int8(&mut self, row: &[f32], factor: f32) {
        let largest = row.iter().fold(0.0_f32, |largest, value| largest.max((value * factor).abs()));
        let largest = if largest == 0.0 { 127.0 } else { largest.max(127.0 / f32::MAX) };
        let scale = 127.0 / largest;
        self.scales.push(scale);
        self.bytes.extend(row.iter().map(|value| (value * factor * scale).round_ties_even() as i8 as u8));
    }

    fn refuse(&self, value: f32) -> Error {
        Error::Value { tensor: self.tensor.name.clone(), dtype: self.tensor.dtype.name(), value }
    }
}
