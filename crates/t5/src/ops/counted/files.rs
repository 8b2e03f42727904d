//! The offload store of counted tensors.

use std::cell::RefCell;

use candle_core::DType;

use super::{Counted, Ledger};
use crate::error::Result;
use crate::ops::{OffloadStore, Ops};

/// Counted files: the bytes written, and the tensor that is read ahead.
#[derive(Debug)]
pub(crate) struct CountedFiles {
    ledger: Ledger,
    written: u64,
    ahead: RefCell<Option<(CountedExtent, Counted)>>,
    /// Whether copies overlap with computation. Then the tensors that were put, and those that are prefetched, are listed.
    copies_overlap: bool,
    outgoing: Vec<Counted>,
    incoming: Vec<(CountedExtent, Counted)>,
}

/// Where a counted tensor lies in a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CountedExtent {
    start: u64,
    dims: Vec<usize>,
    dtype: DType,
}

impl CountedFiles {
    /// Files of tensors whose bytes this ledger adds up.
    pub fn new(ledger: Ledger, copies_overlap: bool) -> CountedFiles {
        let (ahead, outgoing, incoming) = (RefCell::new(None), Vec::new(), Vec::new());
        CountedFiles { ledger, written: 0, ahead, copies_overlap, outgoing, incoming }
    }

    fn read(&self, extent: &CountedExtent) -> Counted {
        self.ledger.tensor(&extent.dims, extent.dtype)
    }
}

impl OffloadStore<Counted> for CountedFiles {
    fn put(&mut self, x: Counted) -> Result<CountedExtent> {
        let extent = CountedExtent { start: self.written, dims: Ops::dims(&x).to_vec(), dtype: x.dtype };
        self.written += Ops::bytes(&x);
        self.outgoing.extend(self.copies_overlap.then_some(x));
        Ok(extent)
    }

    fn get(&mut self, extent: CountedExtent, after: Option<&CountedExtent>) -> Result<Counted> {
        if self.copies_overlap {
            let fetched = self.incoming.iter().position(|(other, _)| *other == extent);
            return Ok(match fetched {
                Some(place) => self.incoming.swap_remove(place).1,
                None => self.read(&extent),
            });
        }
        let tensor = match self.ahead.take() {
            Some((ahead, tensor)) if ahead == extent => tensor,
            _ => self.read(&extent),
        };
        *self.ahead.borrow_mut() = after.map(|after| (after.clone(), self.read(after)));
        Ok(tensor)
    }

    fn prefetch(&mut self, extent: &CountedExtent) -> Result<()> {
        if self.copies_overlap {
            self.incoming.push((extent.clone(), self.read(extent)));
        }
        Ok(())
    }

    fn copy(&mut self) -> Result<()> {
        self.outgoing.clear();
        Ok(())
    }
}
