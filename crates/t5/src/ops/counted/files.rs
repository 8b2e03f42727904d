//! Files of counted tensors.

use std::cell::RefCell;

use candle_core::DType;

use super::{Counted, Ledger};
use crate::error::Result;
use crate::ops::{Ops, Spill};

/// Counted files: the bytes written, and the tensor that is read ahead.
#[derive(Debug)]
pub(crate) struct CountedFiles {
    ledger: Ledger,
    written: u64,
    ahead: RefCell<Option<(CountedStretch, Counted)>>,
    /// Whether copies overlap with computation. Then the tensors that were put, and those that are fetched, are listed.
    copies_overlap: bool,
    leaving: Vec<Counted>,
    coming: Vec<(CountedStretch, Counted)>,
}

/// Where a counted tensor lies in a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CountedStretch {
    start: u64,
    dims: Vec<usize>,
    dtype: DType,
}

impl CountedFiles {
    /// Files of tensors whose bytes this ledger adds up.
    pub fn new(ledger: Ledger, copies_overlap: bool) -> CountedFiles {
        let (ahead, leaving, coming) = (RefCell::new(None), Vec::new(), Vec::new());
        CountedFiles { ledger, written: 0, ahead, copies_overlap, leaving, coming }
    }

    fn read(&self, stretch: &CountedStretch) -> Counted {
        self.ledger.tensor(&stretch.dims, stretch.dtype)
    }
}

impl Spill<Counted> for CountedFiles {
    fn put(&mut self, x: Counted) -> Result<CountedStretch> {
        let stretch = CountedStretch { start: self.written, dims: Ops::dims(&x).to_vec(), dtype: x.dtype };
        self.written += Ops::bytes(&x);
        self.leaving.extend(self.copies_overlap.then_some(x));
        Ok(stretch)
    }

    fn get(&mut self, stretch: CountedStretch, after: Option<&CountedStretch>) -> Result<Counted> {
        if self.copies_overlap {
            let fetched = self.coming.iter().position(|(other, _)| *other == stretch);
            return Ok(match fetched {
                Some(place) => self.coming.swap_remove(place).1,
                None => self.read(&stretch),
            });
        }
        let tensor = match self.ahead.take() {
            Some((ahead, tensor)) if ahead == stretch => tensor,
            _ => self.read(&stretch),
        };
        *self.ahead.borrow_mut() = after.map(|after| (after.clone(), self.read(after)));
        Ok(tensor)
    }

    fn fetch(&mut self, stretch: &CountedStretch) -> Result<()> {
        if self.copies_overlap {
            self.coming.push((stretch.clone(), self.read(stretch)));
        }
        Ok(())
    }

    fn copy(&mut self) -> Result<()> {
        self.leaving.clear();
        Ok(())
    }

    #[cfg(test)]
    fn written_bytes(&self) -> u64 {
        self.written
    }
}
