//! The result of a read: values by column and row. Nulls and broken UTF-8 are visible.

/// Bytes of a column's buffer that are kept for the next row.
const KEPT_BYTES: usize = 1 << 20;

/// The rows of one read, in the requested order. Values lie back to back in one buffer per column.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    columns: Vec<Column>,
    rows: usize,
}

/// One value. The caller decides how to treat a value that is not text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// The row has no value.
    Null,
    /// Valid UTF-8; may be empty.
    Text(&'a str),
    /// Bytes that are not UTF-8.
    Invalid(&'a [u8]),
}

impl<'a> Value<'a> {
    /// The text, if it is text.
    pub fn text(self) -> Option<&'a str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Null | Self::Invalid(_) => None,
        }
    }
}

impl Rows {
    pub(crate) fn new(columns: usize) -> Self {
        Self { columns: vec![Column::default(); columns], rows: 0 }
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether no row was read.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The number of columns.
    pub fn columns(&self) -> usize {
        self.columns.len()
    }

    /// The value of a row in a column, both counted from 0 in the requested order. Panics beyond the end.
    pub fn value(&self, column: usize, row: usize) -> Value<'_> {
        match self.bytes(column, row) {
            None => Value::Null,
            Some(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => Value::Text(text),
                Err(_) => Value::Invalid(bytes),
            },
        }
    }

    /// The length of the whole value, which is more than `bytes(column, row)` if only a part was read. `None` for null.
    /// Panics beyond the end.
    pub fn value_bytes(&self, column: usize, row: usize) -> Option<u64> {
        let held = self.bytes(column, row)?;
        Some(self.columns[column].cut_from(row).unwrap_or(held.len() as u64))
    }

    /// The value's bytes, with no check of their encoding; `None` for null. Panics beyond the end.
    pub fn bytes(&self, column: usize, row: usize) -> Option<&[u8]> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        self.columns[column].get(row)
    }

    /// Bytes of memory of these rows.
    pub fn memory_bytes(&self) -> u64 {
        self.columns.iter().map(Column::memory_bytes).sum()
    }

    /// Takes the bytes of a column that has one row; `None` for null. The row is then without this value.
    pub fn take_bytes(&mut self, column: usize) -> Option<Vec<u8>> {
        assert_eq!(self.rows, 1, "one row");
        let column = &mut self.columns[column];
        (!column.is_null(0)).then(|| std::mem::take(&mut column.bytes))
    }

    /// Drops all rows. The memory of short values is kept.
    pub(crate) fn restart(&mut self, columns: usize) {
        self.rows = 0;
        self.columns.resize_with(columns, Column::default);
        self.columns.iter_mut().for_each(Column::clear);
    }

    pub(crate) fn column_mut(&mut self, column: usize) -> &mut Column {
        &mut self.columns[column]
    }

    /// Records that every column has received the same `rows` further rows.
    pub(crate) fn complete(&mut self, rows: usize) {
        self.rows += rows;
        assert!(self.columns.iter().all(|column| column.len() == self.rows), "columns differ in length");
    }

    pub(crate) fn shrink_to_fit(&mut self) {
        for column in &mut self.columns {
            column.bytes.shrink_to_fit();
            column.ends.shrink_to_fit();
            column.nulls.shrink_to_fit();
            column.cuts.shrink_to_fit();
        }
    }

    /// Bytes of the values of `rows`.
    pub(crate) fn range_bytes(&self, rows: std::ops::Range<usize>) -> u64 {
        let bytes = |column: &Column| column.range(rows.end - 1).end - column.range(rows.start).start;
        self.columns.iter().map(|column| bytes(column) as u64).sum()
    }

    /// Whether any value of `rows` was cut.
    pub(crate) fn has_cuts(&self, rows: std::ops::Range<usize>) -> bool {
        self.columns.iter().any(|column| {
            let first = column.cuts.partition_point(|&(row, _)| (row as usize) < rows.start);
            column.cuts.get(first).is_some_and(|&(row, _)| (row as usize) < rows.end)
        })
    }

    /// Bytes of the values that [`Rows::gather`] would copy.
    pub(crate) fn gathered_bytes(&self, order: &[u32]) -> u64 {
        let bytes = |column: &Column| order.iter().map(|&row| column.range(row as usize).len() as u64).sum::<u64>();
        self.columns.iter().map(bytes).sum()
    }

    /// Appends rows `rows` of `other`, which has the same columns.
    pub(crate) fn append(&mut self, other: &Self, rows: std::ops::Range<usize>) {
        for (to, from) in self.columns.iter_mut().zip(&other.columns) {
            to.append(from, rows.clone());
        }
        self.complete(rows.len());
    }

    /// Copies the rows numbered in `order`, in that order.
    pub(crate) fn gather(&self, order: &[u32]) -> Self {
        let columns = self.columns.iter().map(|column| column.gather(order)).collect();
        Self { columns, rows: order.len() }
    }
}

/// The values of one column.
#[derive(Debug, Clone, Default)]
pub(crate) struct Column {
    bytes: Vec<u8>,
    /// The end of each value in `bytes`; a value starts at the end of the previous one.
    ends: Vec<u32>,
    /// One bit per row, set for null. Rows beyond its end are not null.
    nulls: Vec<u64>,
    /// The rows whose value was cut, with the length of the whole value, in the order of rows.
    cuts: Vec<(u32, u64)>,
}

impl Column {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Drops all values. The memory of short values is kept.
    fn clear(&mut self) {
        match self.bytes.capacity() > KEPT_BYTES {
            true => self.bytes = Vec::new(),
            false => self.bytes.clear(),
        }
        self.ends.clear();
        self.nulls.clear();
        self.cuts.clear();
    }

    /// Reserves room for `rows` further rows.
    pub(crate) fn reserve(&mut self, rows: usize, bytes: usize) {
        self.ends.reserve(rows);
        self.bytes.reserve_exact(bytes);
    }

    #[inline]
    pub(crate) fn push(&mut self, value: &[u8]) {
        self.extend(value);
        self.ends.push(self.bytes.len() as u32);
    }

    /// Appends bytes to the current value, which [`Column::finish`] ends.
    #[inline]
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        if self.bytes.capacity() - self.bytes.len() < bytes.len() {
            self.grow(bytes.len());
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Grows by a quarter instead of doubling: while the allocator copies, the old and new buffers exist at once.
    #[cold]
    fn grow(&mut self, needed: usize) {
        self.bytes.reserve_exact(needed.max(self.bytes.len() / 4).max(1 << 10));
    }

    /// Ends a value that was appended in pieces. `whole` is its length; `is_cut` if only a part was appended.
    pub(crate) fn finish(&mut self, whole: u64, is_cut: bool) {
        if is_cut {
            self.cuts.push((self.ends.len() as u32, whole));
        }
        self.ends.push(self.bytes.len() as u32);
    }

    fn cut_from(&self, row: usize) -> Option<u64> {
        let index = self.cuts.binary_search_by_key(&row, |&(row, _)| row as usize).ok()?;
        Some(self.cuts[index].1)
    }

    pub(crate) fn push_null(&mut self) {
        self.mark_null(self.ends.len());
        self.ends.push(self.bytes.len() as u32);
    }

    fn mark_null(&mut self, row: usize) {
        if self.nulls.len() <= row / 64 {
            self.nulls.resize(row / 64 + 1, 0);
        }
        self.nulls[row / 64] |= 1 << (row % 64);
    }

    fn is_null(&self, row: usize) -> bool {
        self.nulls.get(row / 64).is_some_and(|word| word >> (row % 64) & 1 == 1)
    }

    fn range(&self, row: usize) -> std::ops::Range<usize> {
        let start = if row == 0 { 0 } else { self.ends[row - 1] as usize };
        start..self.ends[row] as usize
    }

    pub(crate) fn get(&self, row: usize) -> Option<&[u8]> {
        (!self.is_null(row)).then(|| &self.bytes[self.range(row)])
    }

    fn append(&mut self, other: &Self, rows: std::ops::Range<usize>) {
        if rows.is_empty() {
            return;
        }
        let bytes = other.range(rows.start).start..other.range(rows.end - 1).end;
        let moved = self.bytes.len() as u32;
        let first_cut = other.cuts.partition_point(|&(row, _)| (row as usize) < rows.start);
        let cuts = other.cuts[first_cut..].iter().take_while(|&&(row, _)| (row as usize) < rows.end);
        let first = self.ends.len();
        self.cuts.extend(cuts.map(|&(row, whole)| ((first + row as usize - rows.start) as u32, whole)));
        if !other.nulls.is_empty() {
            for row in rows.clone().filter(|&row| other.is_null(row)) {
                self.mark_null(self.ends.len() + row - rows.start);
            }
        }
        self.ends.extend(other.ends[rows].iter().map(|end| end - bytes.start as u32 + moved));
        self.extend(&other.bytes[bytes]);
    }

    fn gather(&self, order: &[u32]) -> Self {
        let mut column = Self::default();
        column.reserve(order.len(), order.iter().map(|&row| self.range(row as usize).len()).sum());
        for &row in order {
            match (self.get(row as usize), self.cut_from(row as usize)) {
                (None, _) => column.push_null(),
                (Some(value), None) => column.push(value),
                (Some(value), Some(whole)) => {
                    column.extend(value);
                    column.finish(whole, true);
                }
            }
        }
        column
    }

    fn memory_bytes(&self) -> u64 {
        let cuts = self.cuts.capacity() * size_of::<(u32, u64)>();
        (self.bytes.capacity() + self.ends.capacity() * 4 + self.nulls.capacity() * 8 + cuts) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(values: &[Option<&[u8]>]) -> Rows {
        let mut rows = Rows::new(1);
        for value in values {
            match value {
                Some(value) => rows.column_mut(0).push(value),
                None => rows.column_mut(0).push_null(),
            }
        }
        rows.complete(values.len());
        rows
    }

    #[test]
    fn null_empty_and_broken_text_are_told_apart() {
        let rows = sample(&[Some(b"a"), None, Some(b""), Some(&[0xff])]);
        assert_eq!(rows.value(0, 0), Value::Text("a"));
        assert_eq!(rows.value(0, 1), Value::Null);
        assert_eq!(rows.value(0, 2), Value::Text(""));
        assert_eq!(rows.value(0, 3), Value::Invalid(&[0xff]));
    }

    #[test]
    fn appending_and_gathering_move_nulls_with_their_rows() {
        let from = sample(&[Some(b"a"), None, Some(b"ccc"), None, Some(b"e")]);
        let mut to = sample(&[Some(b"x")]);
        to.append(&from, 1..4);
        let seen: Vec<_> = (0..to.len()).map(|row| to.bytes(0, row)).collect();
        assert_eq!(seen, [Some(&b"x"[..]), None, Some(b"ccc"), None]);
        let gathered = from.gather(&[4, 1, 4, 0]);
        let seen: Vec<_> = (0..gathered.len()).map(|row| gathered.bytes(0, row)).collect();
        assert_eq!(seen, [Some(&b"e"[..]), None, Some(b"e"), Some(b"a")]);
    }
}
