//! Values that processes send each other, wherever they lie: in memory, or on a card.

use std::ops::Range;

use crate::engine::Result;

/// Values as bytes, read and written some at a time.
pub trait Values {
    /// How many bytes they are.
    fn bytes(&self) -> usize;

    /// Appends the bytes of a range to `to`.
    ///
    /// # Errors
    /// [`crate::Error::Values`] where they cannot be read.
    fn read(&self, range: Range<usize>, to: &mut Vec<u8>) -> Result<()>;

    /// Has `write` set every byte of a range. It is given as many, of any value.
    ///
    /// # Errors
    /// Those of `write`; [`crate::Error::Values`] where they cannot be written.
    fn write(&mut self, range: Range<usize>, write: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()>;
}

impl Values for [u8] {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn read(&self, range: Range<usize>, to: &mut Vec<u8>) -> Result<()> {
        to.extend_from_slice(&self[range]);
        Ok(())
    }

    fn write(&mut self, range: Range<usize>, write: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        write(&mut self[range])
    }
}

/// Values of a process that has none to say: zeros, and whatever is written to them is dropped.
#[derive(Clone, Debug)]
pub struct Zeros {
    bytes: usize,
    /// What is written at a time.
    written: Vec<u8>,
}

impl Zeros {
    /// Zeros of this many bytes.
    pub fn new(bytes: usize) -> Self {
        Self { bytes, written: Vec::new() }
    }
}

impl Values for Zeros {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn read(&self, range: Range<usize>, to: &mut Vec<u8>) -> Result<()> {
        to.resize(to.len() + range.len(), 0);
        Ok(())
    }

    fn write(&mut self, range: Range<usize>, write: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        self.written.resize(range.len(), 0);
        write(&mut self.written)
    }
}
