//! [`Prefixed`]: a text with a prefix.

use std::ops::Range;

use super::windows::{Source, TextFault};

/// A text with a prefix, read as a single text.
pub(crate) struct Prefixed<'p, S> {
    prefix: &'p str,
    text: S,
    /// A segment that spans the prefix and the text.
    both: String,
}

impl<'p, S> Prefixed<'p, S> {
    pub fn new(prefix: &'p str, text: S) -> Self {
        Self { prefix, text, both: String::new() }
    }
}

impl<S: Source> Source for Prefixed<'_, S> {
    fn len(&self) -> usize {
        self.prefix.len() + self.text.len()
    }

    fn segment(&mut self, range: Range<usize>) -> Result<&str, TextFault> {
        let border = self.prefix.len();
        if range.start >= border {
            return self.text.segment(range.start - border..range.end - border);
        }
        if range.end <= border {
            return Ok(&self.prefix[range.start..self.prefix.floor_char_boundary(range.end)]);
        }
        self.both.clear();
        self.both.push_str(&self.prefix[range.start..]);
        self.both.push_str(self.text.segment(0..range.end - border)?);
        Ok(&self.both)
    }
}

impl<S: Source> Source for &mut S {
    fn len(&self) -> usize {
        S::len(self)
    }

    fn segment(&mut self, range: Range<usize>) -> Result<&str, TextFault> {
        S::segment(self, range)
    }
}
