//! Chooses the path that an operation takes, and has the code that references share.

use candle_core::{DType, Device, Result, Tensor, bail};

use tensor_storage::{elements, overwrite};

/// The path of an operation, decided once per call from the dtypes and devices of the operands.
///
/// The kernels of each path are in files `cpu`, `cuda` and `reference` of an operation's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// The kernels for the CPU: all operands lie there, in `F32` or `BF16`.
    Cpu,
    /// Plain candle operations on the CPU, in any floating dtype.
    Reference,
    /// Kernels for a card, where there are kernels for the operands; otherwise plain candle operations on the card.
    Device,
}

impl Path {
    /// The path of these operands.
    pub(crate) fn choose(operands: &[&Tensor]) -> Self {
        if operands.iter().any(|t| !t.device().is_cpu()) {
            return Path::Device;
        }
        let takes = |t: &&Tensor| Path::on_cpu(t.dtype()) == Path::Cpu;
        if operands.iter().all(takes) { Path::Cpu } else { Path::Reference }
    }

    /// The path of operands of a dtype on the CPU.
    pub fn on_cpu(dtype: DType) -> Self {
        if matches!(dtype, DType::F32 | DType::BF16) { Path::Cpu } else { Path::Reference }
    }

    /// Returns this path if its kernel takes the other arguments (`takes`), and otherwise the reference.
    pub(crate) fn provided(self, takes: bool) -> Self {
        if takes || self == Path::Device { self } else { Path::Reference }
    }
}

/// The dtype in which reductions over `t` are computed: `F64` stays, everything else is `F32`.
pub(crate) fn wide_dtype(t: &Tensor) -> DType {
    if t.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// `t` in the dtype of its reductions.
pub(crate) fn wide(t: &Tensor) -> Result<Tensor> {
    t.to_dtype(wide_dtype(t))
}

/// The dtype in which a reference multiplies matrices: the dtype of `t` where the device can
/// (accelerators accumulate in `F32` by themselves), the wide dtype on the CPU, whose matmul refuses `BF16`.
pub(crate) fn matmul_dtype(t: &Tensor) -> DType {
    match t.device() {
        Device::Cpu => wide_dtype(t),
        _ => t.dtype(),
    }
}

/// `accumulator += x`, in place on any device.
pub(crate) fn add_into(accumulator: &Tensor, x: &Tensor) -> Result<()> {
    let sum = (accumulator + x.to_dtype(accumulator.dtype())?.reshape(accumulator.shape())?)?;
    overwrite(accumulator, &sum)
}

/// Returns an error unless `t` can be written in place.
pub(crate) fn check_accumulator(op: &str, what: &str, t: &Tensor, expected: &[usize]) -> Result<()> {
    check_shape(op, what, t, expected)?;
    if !t.is_contiguous() {
        bail!("{op}: accumulator {what}: expected a contiguous tensor, got strides {:?}", t.stride())
    }
    Ok(())
}

/// Returns an error unless `t` has exactly the expected shape.
pub(crate) fn check_shape(op: &str, what: &str, t: &Tensor, expected: &[usize]) -> Result<()> {
    if t.dims() != expected {
        bail!("{op}: {what}: expected shape {expected:?}, got {:?}", t.dims())
    }
    Ok(())
}

/// Splits off the last dimension: `(.., K)` gives (product of the others, K).
pub(crate) fn rows_and_width(op: &str, what: &str, t: &Tensor) -> Result<(usize, usize)> {
    match t.dims() {
        [] => bail!("{op}: {what}: expected at least one dimension, got a scalar"),
        [rest @ .., width] => {
            elements(t.shape())?;
            Ok((rest.iter().product(), *width))
        }
    }
}
