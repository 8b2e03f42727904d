//! Files of counted tensors.

use std::cell::RefCell;

use candle_core::DType;

use super::{Counted, Ledger};
use crate::error::Result;
use crate::ops::{Ops, Spill};

/// Counted files: what was written, and the tensor that is read ahead.
#[derive(Debug)]
pub(crate) struct CountedFiles {
    ledger: Ledger,
    written: u64,
    ahead: RefCell<Option<(CountedStretch, Counted)>>,
}

/// Where a counted tensor lies in a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CountedStretch {
    start: u64,
    dims: Vec<usize>,
    dtype: DType,
}

impl CountedFiles {
    /// Of tensors that are added up there.
    pub fn new(ledger: Ledger) -> CountedFiles {
        CountedFiles { ledger, written: 0, ahead: RefCell::new(None) }
    }
}

impl Spill<Counted> for CountedFiles {
    fn put(&mut self, x: Counted) -> Result<CountedStretch> {
        let stretch = CountedStretch { start: self.written, dims: Ops::dims(&x).to_vec(), dtype: x.dtype };
        self.written += Ops::bytes(&x);
        Ok(stretch)
    }

    fn get(&mut self, stretch: CountedStretch, after: Option<&CountedStretch>) -> Result<Counted> {
        let read = |stretch: &CountedStretch| self.ledger.tensor(&stretch.dims, stretch.dtype);
        let tensor = match self.ahead.take() {
            Some((ahead, tensor)) if ahead == stretch => tensor,
            _ => read(&stretch),
        };
        *self.ahead.borrow_mut() = after.map(|after| (after.clone(), read(after)));
        Ok(tensor)
    }

    #[cfg(test)]
    fn written_bytes(&self) -> u64 {
        self.written
    }
}
