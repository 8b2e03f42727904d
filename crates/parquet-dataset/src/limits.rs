//! Memory limits of a read, and the wanted part of a long value.

use std::ops::Range;

use crate::error::Fault;

/// Returns the bytes of a value to read, from its row in the dataset, its column and its length.
pub type PartOf<'a> = dyn Fn(u64, usize, u64) -> Range<u64> + Sync + 'a;

/// Values of up to `whole` bytes are read whole; for a longer value, `part` returns the range of bytes.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) whole: u64,
    pub(crate) part: &'a PartOf<'a>,
}

/// The limits of one read.
pub(crate) struct Limits<'a> {
    /// Larger values, or larger parts of values, are refused.
    pub(crate) value_bytes: u64,
    /// Limit of all values together.
    pub(crate) read_bytes: u64,
    /// The unused rest of `read_bytes`.
    pub(crate) left: u64,
    /// Called with the missing bytes if `left` is not enough; returns the bytes that it adds to the limit.
    pub(crate) more: Option<&'a mut dyn FnMut(u64) -> u64>,
    pub(crate) parts: Option<Parts<'a>>,
    /// The column that is being read.
    pub(crate) column: usize,
}

impl Limits<'_> {
    /// Counts a value before it is copied. Returns the part of it that is wanted.
    #[inline]
    pub(crate) fn admit(&mut self, row: u64, bytes: u64) -> Result<Range<u64>, Fault> {
        let part = match &self.parts {
            Some(parts) if bytes > parts.whole => {
                let part = (parts.part)(row, self.column, bytes);
                let end = part.end.min(bytes);
                part.start.min(end)..end
            }
            _ => 0..bytes,
        };
        let wanted = part.end - part.start;
        if wanted > self.value_bytes {
            return Err(Fault::TooLarge { what: "a value", bytes: wanted, limit: self.value_bytes });
        }
        self.admit_all(wanted)?;
        Ok(part)
    }

    /// Counts values that were each admitted before.
    #[inline]
    pub(crate) fn admit_all(&mut self, bytes: u64) -> Result<(), Fault> {
        if bytes > self.left {
            self.make_room(bytes)?;
        }
        self.left -= bytes;
        Ok(())
    }

    #[cold]
    fn make_room(&mut self, bytes: u64) -> Result<(), Fault> {
        let allowed = self.more.as_mut().map_or(0, |more| more(bytes - self.left));
        self.left += allowed;
        self.read_bytes += allowed;
        if bytes > self.left {
            let bytes = self.read_bytes - self.left + bytes;
            return Err(Fault::TooLarge { what: "one read", bytes, limit: self.read_bytes });
        }
        Ok(())
    }
}
