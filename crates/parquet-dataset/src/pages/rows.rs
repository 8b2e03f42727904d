//! Rows of one page. Definition levels mark null rows; the page's encoding determines the places of values.
//!
//! Encodings: PLAIN, dictionary (RLE_DICTIONARY and its old name), DELTA_LENGTH_BYTE_ARRAY and
//! DELTA_BYTE_ARRAY; format: parquet-format `Encodings.md`. Everything is decoded in order, one value at a time, from a
//! bounded buffer; skipped rows are not copied.

use std::ops::Range;
use std::sync::Arc;

use super::bytes::{OpenPage, PageBytes, STREAM_BUFFER_BYTES, max_level_bytes};
use super::delta;
use super::dictionary::Dictionary;
use super::header::{PageHeader, PageKind};
use super::runs::Runs;
use crate::error::Fault;
use crate::footer::encoding;
use crate::limits::Limits;
use crate::rows::Column;

/// The most rows of a page with delta-encoded values. The lengths of all its values are held, so a page of more rows is
/// refused before they are read. Writers stop pages at 20,000 rows or at 1 MiB by default.
pub(crate) const MAX_DELTA_ROWS: u32 = 1 << 22;

/// A cursor over the rows of one data page.
pub(crate) struct PageRows {
    /// `None` if every row has a value.
    levels: Option<(PageBytes, Runs)>,
    max_level: u32,
    bytes: PageBytes,
    values: Values,
    rows: u32,
}

/// State of the page's encoding. The bytes before the first value are only read with that value, since a page of nulls
/// may have no bytes at all.
enum Values {
    Plain,
    Dictionary { dictionary: Arc<Dictionary>, indexes: Option<Runs> },
    Lengths { lengths: Option<Vec<u32>>, next: usize },
    Prefixed { lengths: Option<(Vec<u32>, Vec<u32>)>, next: usize, last: Vec<u8> },
}

impl PageRows {
    /// Starts at the first row of a page that must have `rows` rows.
    pub(crate) fn new(
        page: OpenPage,
        dictionary: Option<&Arc<Dictionary>>,
        max_level: u8,
        rows: u32,
    ) -> Result<Self, Fault> {
        let OpenPage { header, definitions, mut bytes, .. } = page;
        if header.values != rows {
            return Fault::corrupt(format!("a page declares {} rows, expected {rows}", header.values));
        }
        let level_bytes = match header.kind {
            _ if max_level == 0 => None,
            PageKind::Data => Some(version_1_levels(&mut bytes, header.definition_encoding, rows)?),
            PageKind::DataV2 => Some(definitions),
            PageKind::Dictionary | PageKind::Other => {
                return Fault::corrupt("a data page was expected, another kind of page is there");
            }
        };
        let bit_width = 8 - max_level.leading_zeros() as u8;
        Ok(Self {
            levels: level_bytes.map(|bytes| (PageBytes::whole(bytes), Runs::new(bit_width))),
            max_level: u32::from(max_level),
            values: Values::new(&header, dictionary, rows)?,
            bytes,
            rows,
        })
    }

    /// Ends the reading of the page; no more rows are needed.
    pub(crate) fn finish(&mut self) -> Result<(), Fault> {
        self.bytes.finish()
    }

    /// Skips `count` rows.
    pub(crate) fn skip(&mut self, count: u32, limits: &Limits<'_>) -> Result<(), Fault> {
        let mut values = u64::from(count);
        if let Some((bytes, runs)) = &mut self.levels {
            let mut left = u64::from(count);
            while left > 0 {
                let (level, run) = runs.next(bytes, left)?;
                left -= run;
                if level != self.max_level {
                    values -= run;
                }
            }
        }
        self.values.skip(&mut self.bytes, values, self.rows, limits)
    }

    /// Appends the next `count` rows to `column`. The first of them has number `first` in the dataset.
    pub(crate) fn read(
        &mut self,
        first: u64,
        count: u32,
        column: &mut Column,
        limits: &mut Limits<'_>,
    ) -> Result<(), Fault> {
        let Some((bytes, runs)) = &mut self.levels else {
            let rows = first..first + u64::from(count);
            return self.values.read(&mut self.bytes, rows, self.rows, column, limits);
        };
        let mut left = u64::from(count);
        let end = first + left;
        while left > 0 {
            let (level, run) = runs.next(bytes, left)?;
            left -= run;
            if level > self.max_level {
                return Fault::corrupt(format!("a definition level of {level}, expected at most {}", self.max_level));
            }
            match level == self.max_level {
                true => {
                    let row = end - left - run;
                    self.values.read(&mut self.bytes, row..row + run, self.rows, column, limits)?;
                }
                false => (0..run).for_each(|_| column.push_null()),
            }
        }
        Ok(())
    }
}

/// Reads the levels at the beginning of a version 1 page of `levels` values: their length, then their run-length
/// encoding.
fn version_1_levels(bytes: &mut PageBytes, encoded: i32, levels: u32) -> Result<Vec<u8>, Fault> {
    if encoded != encoding::RLE {
        return Err(Fault::Unsupported(format!("encoding {encoded} of levels")));
    }
    let length = bytes.peek(4)?;
    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
    bytes.consume(4);
    if u64::from(length) > max_level_bytes(levels).min(bytes.remaining()) {
        return Fault::corrupt(format!("{length} bytes of levels for {levels} rows"));
    }
    let encoded = bytes.peek(length as usize)?.to_vec();
    bytes.consume(length as usize);
    Ok(encoded)
}

impl Values {
    /// Prepares to read the values of a page of `rows` rows.
    pub(crate) fn new(header: &PageHeader, dictionary: Option<&Arc<Dictionary>>, rows: u32) -> Result<Self, Fault> {
        Ok(match (header.encoding, dictionary) {
            (encoding::PLAIN, _) => Self::Plain,
            (encoding::RLE_DICTIONARY | encoding::PLAIN_DICTIONARY, Some(dictionary)) => {
                Self::Dictionary { dictionary: Arc::clone(dictionary), indexes: None }
            }
            (encoding::RLE_DICTIONARY | encoding::PLAIN_DICTIONARY, None) => {
                return Fault::corrupt("a page needs a dictionary, but its column has none");
            }
            (encoding::DELTA_LENGTH_BYTE_ARRAY | encoding::DELTA_BYTE_ARRAY, _) if rows > MAX_DELTA_ROWS => {
                return Err(Fault::Unsupported(format!(
                    "a page of {rows} delta-encoded values (expected at most {MAX_DELTA_ROWS})"
                )));
            }
            (encoding::DELTA_LENGTH_BYTE_ARRAY, _) => Self::Lengths { lengths: None, next: 0 },
            (encoding::DELTA_BYTE_ARRAY, _) => Self::Prefixed { lengths: None, next: 0, last: Vec::new() },
            (other, _) => return Err(Fault::Unsupported(format!("encoding {other} of strings"))),
        })
    }

    /// Reads the bytes before the first value. `rows` limits the number of values that a page may declare.
    fn start(&mut self, bytes: &mut PageBytes, rows: u32) -> Result<(), Fault> {
        match self {
            Self::Dictionary { indexes: indexes @ None, .. } => {
                let bit_width = bytes.peek(1)?[0];
                bytes.consume(1);
                if bit_width > 32 {
                    return Fault::corrupt(format!("dictionary indexes of {bit_width} bits, expected at most 32"));
                }
                *indexes = Some(Runs::new(bit_width));
            }
            Self::Lengths { lengths: lengths @ None, .. } => *lengths = Some(delta::lengths(bytes, rows)?),
            Self::Prefixed { lengths: lengths @ None, .. } => {
                let prefixes = delta::lengths(bytes, rows)?;
                let suffixes = delta::lengths(bytes, rows)?;
                if prefixes.len() != suffixes.len() {
                    return Fault::corrupt("a page has other numbers of prefixes than of suffixes");
                }
                *lengths = Some((prefixes, suffixes));
            }
            _ => {}
        }
        Ok(())
    }

    /// Skips `count` values.
    pub(crate) fn skip(
        &mut self,
        bytes: &mut PageBytes,
        count: u64,
        rows: u32,
        limits: &Limits<'_>,
    ) -> Result<(), Fault> {
        if count == 0 {
            return Ok(());
        }
        self.start(bytes, rows)?;
        match self {
            Self::Plain => {
                for _ in 0..count {
                    let length = plain_length(bytes)?;
                    bytes.skip(length)?;
                }
            }
            Self::Dictionary { indexes, .. } => {
                if let Some(indexes) = indexes {
                    indexes.skip(bytes, count)?;
                }
            }
            Self::Lengths { lengths, next } => {
                let lengths = lengths.as_deref().unwrap_or_default();
                let Some(skipped) = lengths.get(*next..*next + count as usize) else {
                    return too_few_values();
                };
                bytes.skip(skipped.iter().map(|&length| u64::from(length)).sum())?;
                *next += count as usize;
            }
            Self::Prefixed { lengths, next, last } => {
                for _ in 0..count {
                    // A skipped value still provides the prefix of the next value.
                    next_prefixed(lengths.as_ref(), next, last, bytes, limits.value_bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Appends a value for each of the `wanted` rows.
    pub(crate) fn read(
        &mut self,
        bytes: &mut PageBytes,
        wanted: Range<u64>,
        rows: u32,
        column: &mut Column,
        limits: &mut Limits<'_>,
    ) -> Result<(), Fault> {
        if wanted.is_empty() {
            return Ok(());
        }
        self.start(bytes, rows)?;
        match self {
            Self::Plain => {
                for row in wanted {
                    let length = plain_length(bytes)?;
                    read_value(bytes, row, length, column, limits)?;
                }
            }
            Self::Dictionary { dictionary, indexes } => {
                let Some(indexes) = indexes else { return too_few_values() };
                let mut row = wanted.start;
                while row < wanted.end {
                    let (index, run) = indexes.next(bytes, wanted.end - row)?;
                    for row in row..row + run {
                        dictionary.read_value(index, row, column, limits)?;
                    }
                    row += run;
                }
            }
            Self::Lengths { lengths, next } => {
                for row in wanted {
                    let Some(&length) = lengths.as_deref().and_then(|lengths| lengths.get(*next)) else {
                        return too_few_values();
                    };
                    *next += 1;
                    read_value(bytes, row, u64::from(length), column, limits)?;
                }
            }
            Self::Prefixed { lengths, next, last } => {
                for row in wanted {
                    next_prefixed(lengths.as_ref(), next, last, bytes, limits.value_bytes)?;
                    let part = limits.admit(row, last.len() as u64)?;
                    column.extend(&last[part.start as usize..part.end as usize]);
                    column.finish(last.len() as u64, part.end - part.start < last.len() as u64);
                }
            }
        }
        Ok(())
    }
}

fn too_few_values<T>() -> Result<T, Fault> {
    Fault::corrupt("a page holds fewer values than rows that are not null")
}

/// Reads the four-byte length before a plain value, and compares it with the page's remaining bytes.
#[inline]
fn plain_length(bytes: &mut PageBytes) -> Result<u64, Fault> {
    let length = bytes.peek(4)?;
    let length = u64::from(u32::from_le_bytes([length[0], length[1], length[2], length[3]]));
    bytes.consume(4);
    if length > bytes.remaining() {
        return Fault::corrupt(format!("a value of {length} bytes where its page has {} left", bytes.remaining()));
    }
    Ok(length)
}

/// Reads a value of `length` bytes, or the wanted part of it, and skips the rest.
#[inline]
fn read_value(
    bytes: &mut PageBytes,
    row: u64,
    length: u64,
    column: &mut Column,
    limits: &mut Limits<'_>,
) -> Result<(), Fault> {
    if length > bytes.remaining() {
        return Fault::corrupt(format!("a value of {length} bytes where its page has {} left", bytes.remaining()));
    }
    let part = limits.admit(row, length)?;
    if length <= STREAM_BUFFER_BYTES as u64 && part == (0..length) {
        column.push(bytes.peek(length as usize)?);
        bytes.consume(length as usize);
        return Ok(());
    }
    bytes.skip(part.start)?;
    bytes.copy_to(part.end - part.start, column)?;
    bytes.skip(length - part.end)?;
    column.finish(length, part.end - part.start < length);
    Ok(())
}

/// Turns `last` into the next value: a prefix of `last`, then a suffix from the page.
fn next_prefixed(
    lengths: Option<&(Vec<u32>, Vec<u32>)>,
    next: &mut usize,
    last: &mut Vec<u8>,
    bytes: &mut PageBytes,
    limit: u64,
) -> Result<(), Fault> {
    let pair = lengths.and_then(|(prefixes, suffixes)| prefixes.get(*next).zip(suffixes.get(*next)));
    let Some((&prefix, &suffix)) = pair else {
        return too_few_values();
    };
    *next += 1;
    if prefix as usize > last.len() {
        return Fault::corrupt(format!("a prefix of {prefix} bytes of a value of {}", last.len()));
    }
    if u64::from(suffix) > bytes.remaining() {
        return Fault::corrupt(format!("a suffix of {suffix} bytes where its page has {} left", bytes.remaining()));
    }
    let length = u64::from(prefix) + u64::from(suffix);
    if length > limit {
        return Err(Fault::TooLarge { what: "a value", bytes: length, limit });
    }
    last.truncate(prefix as usize);
    last.extend_from_slice(bytes.peek(suffix as usize)?);
    bytes.consume(suffix as usize);
    Ok(())
}
