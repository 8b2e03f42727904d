//! What a call of an operation needs beside its operands and results: stated before the call, in bytes and arithmetic.
//!
//! Each operation states its own, beside the kernels of each [`Path`]: [`linear_needs`] those of [`linear`], and so on.
//! Who plans a step adds them up.
//!
//! Left out are sums by row or column, and the tile that each thread works on: less than a MiB a thread. Attention in strips has all keys of
//! a head in it, and is counted.

use candle_core::DType;

#[cfg(doc)]
use crate::{Path, linear, linear_needs};

/// What a card is asked to do. Each is a request of the host to the driver, which takes microseconds however small the work is.
///
/// Elements that are set to zero when their memory is taken, and copies on the card, are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Graphs that are launched. Kernels, products and uploads inside a graph are not counted below.
    pub graphs: u64,
    /// Kernels that are launched, but for those of matrix products.
    pub launches: u64,
    /// Matrix products.
    pub products: u64,
    /// Copies to the card. Lists that a step uses many times are not among them: who carries the step out counts them once.
    pub uploads: u64,
    /// Copies from the card, which are waited for.
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
    /// Bytes held while it runs, beside operands and results.
    pub transient: u64,
    /// Bytes of the host's memory, where operands lie on a device: what the processor makes for it.
    pub on_host: u64,
    /// Bytes that threads keep for the next call.
    pub kept: Kept,
    /// Multiply-adds of matrix products.
    pub multiply_adds: f64,
    /// The requests to a card. Those of compositions of candle's operations are not stated.
    pub calls: Calls,
}

impl Needs {
    /// Of bytes alone.
    pub(crate) fn bytes(transient: u64) -> Self {
        Self { transient, ..Self::default() }
    }

    /// Of calls one after the other: the most of each kind, and all arithmetic.
    pub fn most(calls: impl IntoIterator<Item = Self>) -> Self {
        calls.into_iter().fold(Self::default(), |most, call| Self {
            transient: most.transient.max(call.transient),
            on_host: most.on_host.max(call.on_host),
            kept: most.kept.max(call.kept),
            multiply_adds: most.multiply_adds + call.multiply_adds,
            calls: most.calls + call.calls,
        })
    }

    /// Of kernels of a card that hold nothing.
    pub(crate) fn launches(launches: u64) -> Self {
        Self::default().with_launches(launches)
    }

    /// With so many kernels of a card.
    pub(crate) fn with_launches(self, launches: u64) -> Self {
        self.with_calls(Calls { launches, ..Calls::default() })
    }

    /// With these requests to a card.
    pub(crate) fn with_calls(self, calls: Calls) -> Self {
        Self { calls, ..self }
    }

    /// With so many bytes on the host beside a device.
    pub(crate) fn with_bytes_on_host(self, on_host: u64) -> Self {
        Self { on_host, ..self }
    }

    /// With the matrix products (M, K) times (K, N).
    pub(crate) fn with_products(self, count: usize, (m, k, n): (usize, usize, usize)) -> Self {
        Self { multiply_adds: count as f64 * (m as f64 * k as f64 * n as f64), ..self }
    }
}

/// Elements of a shape. Counted in 64 bits wherever this runs: a plan may be for a larger machine.
pub(crate) fn elements<const N: usize>(shape: [usize; N]) -> u64 {
    shape.iter().map(|&size| size as u64).product()
}

/// So many copies of `elements` in the dtype in which a reference reduces them: `F64` stays, everything else is `F32`.
pub(crate) fn copies(count: u64, elements: u64, dtype: DType) -> u64 {
    count * elements * wide_size(dtype) as u64
}

/// Operand and result of a reference in that dtype, where they are narrower.
pub(crate) fn widened(elements: u64, dtype: DType) -> u64 {
    if dtype.size_in_bytes() < wide_size(dtype) { copies(2, elements, dtype) } else { 0 }
}

/// The size of an element of that dtype.
pub(crate) fn wide_size(dtype: DType) -> usize {
    if dtype == DType::F64 { 8 } else { 4 }
}

/// Bytes of a copy of `elements` in elements of another size; none where they are as large.
pub(crate) fn converted(elements: u64, from: DType, size: usize) -> u64 {
    if from.size_in_bytes() == size { 0 } else { elements * size as u64 }
}

/// Bytes of a copy of `elements` in another dtype; none where it is the same one.
pub(crate) fn cast(elements: u64, from: DType, to: DType) -> u64 {
    if from == to { 0 } else { elements * to.size_in_bytes() as u64 }
}

/// Bytes of the host that a mask of so many elements takes: f32, before and after it is scaled.
pub(crate) fn mask_on_host(elements: u64, drops: bool) -> u64 {
    if drops { 2 * elements * size_of::<f32>() as u64 } else { 0 }
}

/// Bytes that threads keep from one product to the next: of each kind, the most that any product needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Weights.
    pub weights: u64,
    /// Blocks of logits.
    pub loss: u64,
    /// The larger operand of the gradient of a weight.
    pub larger: u64,
    /// The smaller one.
    pub smaller: u64,
}

impl Kept {
    /// All of it.
    pub fn total(self) -> u64 {
        self.weights + self.loss + self.along_tokens()
    }

    /// What depends on the tokens of a pass: the operands of the gradients of weights.
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
