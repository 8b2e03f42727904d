//! The needs of a call of an operation besides its operands and results: stated before the call, in bytes and arithmetic.
//!
//! Each operation states its own needs, beside the kernels of each [`Path`]: [`linear_needs`] states those of [`linear`], and so on. The
//! planner of a step adds them up.
//!
//! Left out are sums by row or column, and the tile that each thread works on: less than a MiB a thread. Attention in strips keeps all keys
//! of a head in a tile, so that tile is counted.

use candle_core::DType;

#[cfg(doc)]
use crate::{Path, linear, linear_needs};

/// Requests of the host to a card's driver. Each takes microseconds, however small the work is.
///
/// Setting elements to zero when they are allocated, and copies on the card, are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Graph launches. Kernels, products and uploads inside a graph are not counted below.
    pub graphs: u64,
    /// Kernel launches, except those of matrix products.
    pub launches: u64,
    /// Matrix products.
    pub products: u64,
    /// Copies to the card, except lists that a step uses many times: the step counts those once.
    pub uploads: u64,
    /// Copies from the card. The host waits for each.
    pub downloads: u64,
}

impl std::ops::Add for Calls {
    type Output = Calls;

    fn add(self, other: Calls) -> Calls {
        self.with(other, |a, b| a + b)
    }
}

impl std::ops::Sub for Calls {
    type Output = Calls;

    fn sub(self, other: Calls) -> Calls {
        self.with(other, |a, b| a - b)
    }
}

impl Calls {
    fn with(self, other: Calls, f: fn(u64, u64) -> u64) -> Calls {
        Calls {
            graphs: f(self.graphs, other.graphs),
            launches: f(self.launches, other.launches),
            products: f(self.products, other.products),
            uploads: f(self.uploads, other.uploads),
            downloads: f(self.downloads, other.downloads),
        }
    }
}

impl std::ops::Mul<u64> for Calls {
    type Output = Calls;

    fn mul(self, times: u64) -> Calls {
        let n = times;
        self.with(Calls { graphs: n, launches: n, products: n, uploads: n, downloads: n }, |a, b| a * b)
    }
}

/// Bytes and arithmetic of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Needs {
    /// Bytes held during the call, besides operands and results.
    pub transient: u64,
    /// Bytes of the host's memory for data that the processor prepares, where operands lie on a device.
    pub on_host: u64,
    /// Bytes that threads keep for the next call.
    pub kept: Kept,
    /// Multiply-adds of matrix products.
    pub multiply_adds: f64,
    /// The requests to a card. They are not stated for compositions of candle's operations.
    pub calls: Calls,
}

impl Needs {
    /// Needs of bytes alone.
    pub(crate) fn bytes(transient: u64) -> Self {
        Self { transient, ..Self::default() }
    }

    /// Needs of calls that run one after the other: the largest of each kind of bytes, and the sum of all arithmetic.
    pub fn most(calls: impl IntoIterator<Item = Self>) -> Self {
        calls.into_iter().fold(Self::default(), |most, call| Self {
            transient: most.transient.max(call.transient),
            on_host: most.on_host.max(call.on_host),
            kept: most.kept.max(call.kept),
            multiply_adds: most.multiply_adds + call.multiply_adds,
            calls: most.calls + call.calls,
        })
    }

    /// Needs of kernels of a card that allocate no memory.
    pub(crate) fn launches(launches: u64) -> Self {
        Self::default().with_launches(launches)
    }

    /// Adds this many kernel launches on a card.
    pub(crate) fn with_launches(self, launches: u64) -> Self {
        self.with_calls(Calls { launches, ..Calls::default() })
    }

    /// Adds these requests to a card.
    pub(crate) fn with_calls(self, calls: Calls) -> Self {
        Self { calls, ..self }
    }

    /// Adds this many bytes of the host's memory.
    pub(crate) fn with_bytes_on_host(self, on_host: u64) -> Self {
        Self { on_host, ..self }
    }

    /// Adds `count` matrix products (M, K) times (K, N).
    pub(crate) fn with_products(self, count: usize, (m, k, n): (usize, usize, usize)) -> Self {
        Self { multiply_adds: count as f64 * (m as f64 * k as f64 * n as f64), ..self }
    }
}

/// Counts the elements of a shape, in 64 bits on every machine: a plan may be for a larger machine.
pub(crate) fn elements<const N: usize>(shape: [usize; N]) -> u64 {
    shape.iter().map(|&size| size as u64).product()
}

/// Bytes of `count` copies of `elements` in the dtype in which a reference reduces them: `F64` stays, all other dtypes become `F32`.
pub(crate) fn copies(count: u64, elements: u64, dtype: DType) -> u64 {
    count * elements * wide_size(dtype) as u64
}

/// Bytes of the operand and the result of a reference in that dtype, where their own dtype is narrower.
pub(crate) fn widened(elements: u64, dtype: DType) -> u64 {
    if dtype.size_in_bytes() < wide_size(dtype) { copies(2, elements, dtype) } else { 0 }
}

/// The size of an element of the dtype in which a reference reduces `dtype`.
pub(crate) fn wide_size(dtype: DType) -> usize {
    if dtype == DType::F64 { 8 } else { 4 }
}

/// Bytes of a copy of `elements` in elements of another size; 0 if the size is the same.
pub(crate) fn converted(elements: u64, from: DType, size: usize) -> u64 {
    if from.size_in_bytes() == size { 0 } else { elements * size as u64 }
}

/// Bytes of a copy of `elements` in another dtype; 0 if the dtype is the same.
pub(crate) fn cast(elements: u64, from: DType, to: DType) -> u64 {
    if from == to { 0 } else { elements * to.size_in_bytes() as u64 }
}

/// Bytes of the host's memory for a dropout mask of `elements` elements: f32, before and after scaling.
pub(crate) fn mask_on_host(elements: u64, drops: bool) -> u64 {
    if drops { 2 * elements * size_of::<f32>() as u64 } else { 0 }
}

/// Bytes that threads keep from one product to the next: for each kind, the most that any product needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Packed weights.
    pub weights: u64,
    /// Packed blocks of logits.
    pub loss: u64,
    /// The larger operand of the gradient of a weight.
    pub larger: u64,
    /// The smaller operand of the gradient of a weight.
    pub smaller: u64,
}

impl Kept {
    /// The sum of all kinds.
    pub fn total(self) -> u64 {
        self.weights + self.loss + self.along_tokens()
    }

    /// Bytes that depend on the tokens of a pass: the operands of the gradients of weights.
    pub fn along_tokens(self) -> u64 {
        self.larger + self.smaller
    }

    /// The larger of each kind.
    pub fn max(self, other: Self) -> Self {
        Self {
            weights: self.weights.max(other.weights),
            loss: self.loss.max(other.loss),
            larger: self.larger.max(other.larger),
            smaller: self.smaller.max(other.smaller),
        }
    }
}
