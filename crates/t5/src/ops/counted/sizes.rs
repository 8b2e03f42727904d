//! Sizes of counted tensors, and what their uses count.

use std::rc::Rc;

use candle_core::DType;
use t5_ops::{AttentionSizes, Path};

use super::ledger::{Placement, Sums};
use super::{Counted, Ledger};
use crate::error::Result;
use crate::ops::{AttentionSettings, Ops};

impl Counted {
    pub(super) fn sums(&self) -> &Sums {
        &self.memory.sums
    }

    pub(super) fn ledger(&self) -> Ledger {
        Ledger { sums: Rc::clone(&self.memory.sums) }
    }

    pub(super) fn like(&self) -> Counted {
        self.ledger().tensor(Ops::dims(self), self.dtype)
    }

    pub(super) fn with_width(&self, width: usize) -> Counted {
        let mut dims = self.dims;
        dims[self.rank - 1] = width;
        self.ledger().tensor(&dims[..self.rank], self.dtype)
    }

    pub(super) fn width(&self) -> usize {
        self.dims[self.rank - 1]
    }

    /// Token ids.
    pub(super) fn count(&self) -> usize {
        self.dims.iter().product()
    }

    pub(super) fn rows(&self) -> usize {
        self.dims[..self.rank - 1].iter().product()
    }

    /// A weight in a file is paged in when it is used.
    pub(super) fn used(&self) {
        if let Placement::File { is_resident } = &self.memory.home
            && !is_resident.replace(true)
        {
            self.sums().add(Ops::bytes(self));
        }
    }

    /// Calls `f`, which reads this weight from its file by rows, `times` times. Meanwhile a window of rows is in memory.
    pub(super) fn by_rows(&self, times: u64, f: impl FnOnce()) {
        let (window, sums) = (t5_ops::window_bytes(self.of_weight(), self.dtype), self.sums());
        if !matches!(self.memory.home, Placement::Memory) {
            sums.paged_in.set(sums.paged_in.get() + times * Ops::bytes(self));
        }
        match &self.memory.home {
            Placement::Memory => f(),
            Placement::File { .. } => {
                sums.add(window);
                f();
                sums.take(window);
            }
            Placement::FileCountedElsewhere { .. } => {
                sums.come(window);
                f();
                sums.leave(window);
            }
        }
    }

    /// Whether the weight lies in a file.
    #[cfg(test)]
    pub fn is_in_file(&self) -> bool {
        matches!(self.memory.home, Placement::File { .. })
    }

    /// The dtype of statistics: F32, or F64 for F64.
    pub(super) fn statistics(&self) -> DType {
        if self.dtype == DType::F64 { DType::F64 } else { DType::F32 }
    }

    pub(super) fn elements(&self) -> u64 {
        self.dims.iter().map(|&size| size as u64).product()
    }

    /// The path of a call on tensors like this one.
    pub(super) fn path(&self) -> Path {
        if self.sums().is_on_device.get() { Path::Device } else { Path::on_cpu(self.dtype) }
    }

    /// This result of a product, scaled. On a card the product scales it.
    pub(super) fn scaled_after(self, scale: f64) -> Result<Self> {
        if self.path() == Path::Device { Ok(self) } else { self.scaled(scale) }
    }

    /// The sizes of attention with these queries.
    pub(super) fn attention_sizes(&self, keys: &Counted, settings: &AttentionSettings<Self>) -> AttentionSizes {
        settings.with_bias(None).sizes_of((self.dims[0], self.dims[1], self.width()), keys.dims[1])
    }

    /// A weight's (N, K).
    pub(super) fn of_weight(&self) -> (usize, usize) {
        (self.dims[0], self.dims[1])
    }
}
