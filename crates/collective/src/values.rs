//! Values that processes send each other, wherever they are: in memory, or on a card.

use std::ops::Range;

use crate::engine::Result;

/// Values as bytes, which are read and written a range at a time.
pub trait Values {
    /// The number of bytes.
    fn bytes(&self) -> usize;

    /// Appends the bytes of a range to `to`.
    ///
    /// # Errors
    /// [`crate::Error::Values`] if they cannot be read.
    fn read(&self, range: Range<usize>, to: &mut Vec<u8>) -> Result<()>;

    /// Has `write` set every byte of a range. The bytes that `write` is given may have any value.
    ///
    /// # Errors
    /// `write` returns an error; [`crate::Error::Values`] if the bytes cannot be written.
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

/// Values of a process that has none to add: zeros. Bytes that are written to them are dropped.
#[derive(Clone, Debug)]
pub struct Zeros {
    bytes: usize,
    /// The bytes that are being written.
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
