//! [`Lists`]: columns of a list of structs, read row by row from the first row of a file to the last.
//!
//! A [`Dataset`](crate::Dataset) finds any row of flat columns. Lists are read only once, to convert them into flat columns.
//! So there is one cursor for each column: the open page, and the positions in its levels and values.
//!
//! Invariants:
//! - Memory holds one page of each column, its dictionary, and one row up to the limits of [`Lists::open`]. A page is held
//!   whole up to [`WHOLE_PAGE_BYTES`]; a longer page is streamed.
//! - No declaration of a page is trusted before it is compared with the bytes that exist or with a limit.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::{Error, Fault, Place};
use crate::footer::{Chunk, chunk};
use crate::footer_walk::{RawChunk, Sink, walk};
use crate::io::{Files, Handle};
use crate::limits::{Limits, Parts};
use crate::pages::list_cursor::{ListCursor, ListLevels};
use crate::rows::Column;
use crate::schema::Leaf;

/// Lists of strings of one file.
pub struct Lists {
    files: Files,
    handle: Handle,
    columns: Vec<ListColumn>,
    groups: Vec<Group>,
    /// The current row group (`None` before the first row), and its remaining rows.
    group: Option<usize>,
    left: u32,
    cursors: Vec<ListCursor>,
    /// The next row of the file.
    next: u64,
    rows: u64,
    limits: RowLimits,
}

/// The most elements and bytes of a row that are kept.
#[derive(Debug, Clone, Copy)]
struct RowLimits {
    elements: usize,
    bytes: u64,
}

/// A column.
#[derive(Debug, Clone)]
struct ListColumn {
    name: String,
    leaf: usize,
    levels: ListLevels,
}

struct Group {
    rows: u32,
    /// For each column its chunk, and the number of levels that it declares.
    chunks: Vec<(Chunk, u64)>,
}

/// The elements of one row.
#[derive(Debug, Clone, Default)]
pub struct ListRow {
    columns: Vec<Column>,
    elements: u64,
    is_null: bool,
    is_cut: bool,
}

impl ListRow {
    /// The number of elements in the list. At most the number given to [`Lists::open`] are kept.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// Whether the row has no list.
    pub fn is_null(&self) -> bool {
        self.is_null
    }

    /// Whether the row has more bytes than the limit, so that some were dropped.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// The value of an element in a column; `None` for null. Panics beyond the kept elements.
    pub fn bytes(&self, column: usize, element: usize) -> Option<&[u8]> {
        self.columns[column].get(element)
    }
}

impl Lists {
    /// Opens a file to read these columns, by dotted path. They must be strings in one list, as [`crate::list_columns`]
    /// finds them. At most `elements` elements and `bytes` bytes of a row are kept.
    ///
    /// # Errors
    /// The file cannot be read, or a column does not exist or is not a list of strings.
    pub fn open(path: &Path, columns: &[String], elements: usize, bytes: u64) -> Result<Self, Error> {
        let mut files = Files::new(None);
        let (handle, identity) = files.add(path)?;
        let mut found = Found { path, names: columns, columns: Vec::new(), wanted: Vec::new(), groups: Vec::new() };
        walk(path, &handle, identity.bytes, &mut found).map_err(|error| files.changed_or(0, error))?;
        let (columns, groups) = (found.columns, found.groups);
        let rows = groups.iter().map(|group| u64::from(group.rows)).sum();
        let limits = RowLimits { elements, bytes };
        Ok(Self { files, handle, columns, groups, group: None, left: 0, cursors: Vec::new(), next: 0, rows, limits })
    }

    /// Rows of the file.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Reads the next row; false after the last.
    ///
    /// # Errors
    /// Errors of reading. After an error no more rows can be read.
    pub fn next(&mut self, row: &mut ListRow) -> Result<bool, Error> {
        while self.left == 0 {
            if !self.next_group()? {
                return Ok(false);
            }
        }
        row.columns.resize_with(self.columns.len(), Column::default);
        (row.is_null, row.is_cut) = (false, false);
        let kept = AtomicU64::new(self.limits.bytes);
        let is_cut = AtomicBool::new(false);
        // A value is kept whole or not at all.
        let part = |_: u64, _: usize, bytes: u64| -> Range<u64> {
            let left = kept.load(Ordering::Relaxed);
            let fits = bytes <= left && !is_cut.load(Ordering::Relaxed);
            kept.store(left.saturating_sub(bytes), Ordering::Relaxed);
            is_cut.fetch_or(!fits, Ordering::Relaxed);
            if fits { 0..bytes } else { 0..0 }
        };
        let most = self.limits.bytes;
        let parts = Some(Parts { whole: 0, part: &part });
        let mut limits = Limits { value_bytes: most, read_bytes: most, left: most, more: None, parts, column: 0 };
        for column in 0..self.cursors.len() {
            let cursor = &mut self.cursors[column];
            limits.column = column;
            let to = &mut row.columns[column];
            to.clear();
            // Decompressors are third-party code, and the bytes may be anything.
            let read = AssertUnwindSafe(|| cursor.row(self.next, self.limits.elements, to, &mut limits));
            let read = catch_unwind(read).unwrap_or_else(|_| Fault::corrupt("its bytes made a decoder panic"));
            let found = match read {
                Ok(found) if column > 0 && found.elements != row.elements => Fault::corrupt(format!(
                    "row {} has {} elements, in another column of the list {}",
                    self.next, found.elements, row.elements
                )),
                read => read,
            };
            let found = found.map_err(|fault| self.error(column, fault))?;
            row.elements = found.elements;
            row.is_null |= found.is_null;
        }
        row.is_cut = is_cut.into_inner();
        (self.left, self.next) = (self.left - 1, self.next + 1);
        if self.left == 0 {
            for column in 0..self.cursors.len() {
                let finished = self.cursors[column].finish();
                finished.map_err(|fault| self.error(column, fault))?;
            }
        }
        Ok(true)
    }

    /// Advances to the next row group; false after the last.
    fn next_group(&mut self) -> Result<bool, Error> {
        let number = self.group.map_or(0, |group| group + 1);
        let Some(group) = self.groups.get(number) else { return Ok(false) };
        self.group = Some(number);
        // Once for each row group, the file is compared with the file that was opened.
        self.handle = self.files.handle(0)?;
        self.left = group.rows;
        let chunks = group.chunks.iter().zip(&self.columns);
        self.cursors = chunks
            .map(|((chunk, levels), column)| {
                ListCursor::new(self.handle.clone(), chunk.clone(), *levels, column.levels)
            })
            .collect();
        Ok(true)
    }

    fn error(&self, column: usize, fault: Fault) -> Error {
        let place = Place {
            path: self.files.path(0).to_owned(),
            row_group: self.group,
            column: Some(self.columns[column].name.clone()),
            rows: None,
        };
        self.files.changed_or(0, fault.at(place))
    }
}

/// Collects the chunks of the requested columns.
struct Found<'a> {
    path: &'a Path,
    names: &'a [String],
    columns: Vec<ListColumn>,
    /// The leaves of the columns, in order.
    wanted: Vec<usize>,
    groups: Vec<Group>,
}

impl Sink for Found<'_> {
    fn leaf(&mut self, index: usize, leaf: &Leaf<'_>) -> Result<(), Error> {
        if self.names.iter().any(|name| name == leaf.path) && leaf.is_list_of_strings() {
            self.wanted.push(index);
            self.columns.push(ListColumn {
                name: leaf.path.to_owned(),
                leaf: index,
                levels: ListLevels {
                    value: leaf.max_definition_level.min(64) as u8,
                    element: leaf.element_definition_level.min(64) as u8,
                },
            });
        }
        Ok(())
    }

    fn end_of_schema(&mut self, _leaves: usize) -> Result<(), Error> {
        let place = |name: &String| self.columns.iter().position(|column| column.name == *name);
        if let Some(column) = self.names.iter().find(|name| place(name).is_none()) {
            let (path, string_columns) = (self.path.to_owned(), Vec::new());
            return Err(Error::MissingColumn { path, column: column.clone(), string_columns });
        }
        // In the requested order.
        self.columns = self.names.iter().filter_map(place).map(|place| self.columns[place].clone()).collect();
        Ok(())
    }

    fn wants(&self, column: usize) -> bool {
        self.wanted.binary_search(&column).is_ok()
    }

    fn row_group(&mut self, number: usize, rows: i64, raw: &[RawChunk], data_end: u64) -> Result<(), Error> {
        let corrupt = |reason| Error::Footer { path: self.path.to_owned(), reason };
        let Ok(rows) = u32::try_from(rows) else {
            return Err(corrupt(format!("row group {number} declares {rows} rows, expected 0 to {}", u32::MAX)));
        };
        let mut chunks = Vec::with_capacity(self.columns.len());
        for column in &self.columns {
            let Some(raw) = raw.iter().find(|raw| raw.column == column.leaf) else {
                return Err(corrupt(format!("row group {number} lacks column {}", column.leaf)));
            };
            let place = || Place {
                path: self.path.to_owned(),
                row_group: Some(number),
                column: Some(column.name.clone()),
                rows: None,
            };
            // An empty list has a level, too.
            let levels = u64::try_from(raw.values).ok().filter(|&levels| levels >= u64::from(rows));
            let levels = levels
                .ok_or_else(|| corrupt(format!("row group {number} declares {} values in {rows} rows", raw.values)))?;
            chunks.push((chunk(raw, column.levels.value, rows, data_end, &place)?, levels));
        }
        self.groups.push(Group { rows, chunks });
        Ok(())
    }
}
