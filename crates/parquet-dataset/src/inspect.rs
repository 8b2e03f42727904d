//! A report on a parquet file: its shape, and the cost of reading one row.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Location};
use crate::footer::{chunk, codec_name, encoding_name, one_value_a_row};
use crate::footer_walk::{RawChunk, Sink, walk};
use crate::io::{Files, Handle};
use crate::pages::header::PageHeader;
use crate::pages::map::ChunkMap;
use crate::schema::Leaf;

/// The result of [`inspect`].
#[derive(Debug, Clone)]
pub struct Inspection {
    /// The file, as it was given.
    pub path: PathBuf,
    /// The file's size.
    pub bytes: u64,
    /// The writer's own description of itself.
    pub created_by: Option<String>,
    /// Rows of each row group.
    pub row_groups: Vec<u64>,
    /// Whether every string column has an offset index.
    pub has_page_index: bool,
    /// Whether every data page of the string columns carries a checksum.
    pub has_checksums: bool,
    /// All columns.
    pub columns: Vec<ColumnInspection>,
    /// Average bytes to read for one row of all string columns: for each column a page, and a dictionary if there is
    /// one. `None` if the file has no readable string column.
    pub bytes_to_read_one_row: Option<u64>,
}

/// One column of an [`Inspection`].
#[derive(Debug, Clone)]
pub struct ColumnInspection {
    /// Dotted path.
    pub name: String,
    /// Parquet's type: `BYTE_ARRAY (String)`, `INT64`.
    pub type_name: String,
    /// Whether the trainer can read the column as text.
    pub is_string: bool,
    /// Whether the column may hold nulls.
    pub is_nullable: bool,
    /// All encodings of the column's pages, including those of levels.
    pub encodings: Vec<String>,
    /// All compression codecs of the column's chunks.
    pub compressions: Vec<&'static str>,
    /// Bytes in the file.
    pub compressed_bytes: u64,
    /// Bytes once decompressed, still encoded.
    pub uncompressed_bytes: u64,
    /// Number of data pages, if this is a string column that can be read.
    pub pages: Option<u64>,
    /// Bytes of the largest data page: header and body, as stored.
    pub largest_page_bytes: Option<u64>,
}

impl Inspection {
    /// Rows of the file.
    pub fn rows(&self) -> u64 {
        self.row_groups.iter().sum()
    }
}

/// Inspects a file: its footer, and the page headers or offset indexes of its string columns. Reads no data.
pub fn inspect(path: &Path) -> Result<Inspection, Error> {
    let mut files = Files::new(None);
    let (handle, identity) = files.add(path)?;
    let mut inspector = Inspector {
        path,
        handle: &handle,
        row_groups: Vec::new(),
        columns: Vec::new(),
        is_readable: true,
        is_indexed: true,
        is_checked: true,
        row_bytes: 0.0,
    };
    let walked = walk(path, &handle, identity.bytes, &mut inspector).map_err(|error| files.changed_or(0, error))?;
    let rows: u64 = inspector.row_groups.iter().sum();
    let has_pages = inspector.is_readable && rows > 0 && inspector.columns.iter().any(|found| found.shown.is_string);
    if has_pages && u64::try_from(walked.rows) != Ok(rows) {
        let reason = format!("it declares {} rows, but its row groups have {rows}", walked.rows);
        return Err(Error::Footer { path: path.to_owned(), reason });
    }
    Ok(Inspection {
        path: path.to_owned(),
        bytes: identity.bytes,
        created_by: walked.created_by,
        has_page_index: has_pages && inspector.is_indexed,
        has_checksums: has_pages && inspector.is_checked,
        bytes_to_read_one_row: has_pages.then(|| (inspector.row_bytes / rows as f64).round() as u64),
        row_groups: inspector.row_groups,
        columns: inspector.columns.into_iter().map(|found| found.shown(has_pages)).collect(),
    })
}

/// A leaf of a file's schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeafColumn {
    /// The dotted path, with the groups between a list and its elements.
    pub path: String,
    /// Parquet's type: `BYTE_ARRAY (String)`, `INT64`.
    pub type_name: String,
    /// Whether each row has a string or byte string, or null. Only such a column can be read by this crate.
    pub is_string: bool,
    /// Whether a row has any number of values.
    pub is_repeated: bool,
}

/// The names of a file's string columns, from its footer alone.
///
/// # Errors
/// As [`leaf_columns`].
pub fn string_columns(path: &Path) -> Result<Vec<String>, Error> {
    Ok(leaf_columns(path)?.into_iter().filter(|leaf| leaf.is_string).map(|leaf| leaf.path).collect())
}

/// All of a file's columns, including those in lists and groups, from its footer alone.
///
/// # Errors
/// As [`described`].
pub fn leaf_columns(path: &Path) -> Result<Vec<LeafColumn>, Error> {
    Ok(described(path)?.columns)
}

/// What a footer says about a file's rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The file's rows.
    pub rows: u64,
    /// All columns, including those in lists and groups.
    pub columns: Vec<LeafColumn>,
    /// The description of the columns by Hugging Face's `datasets`, in JSON; `None` if there is none of at most a MiB.
    pub features: Option<String>,
}

/// Reads the footer of a file.
///
/// # Errors
/// The file is not a parquet file, or cannot be read.
pub fn described(path: &Path) -> Result<Described, Error> {
    struct Leaves(Vec<LeafColumn>);
    impl Sink for Leaves {
        fn leaf(&mut self, _index: usize, leaf: &Leaf<'_>) -> Result<(), Error> {
            if self.0.len() < MAX_COLUMNS {
                self.0.push(LeafColumn {
                    path: leaf.path.to_owned(),
                    type_name: leaf.type_name(),
                    is_string: leaf.is_string(),
                    is_repeated: leaf.max_repetition_level > 0,
                });
            }
            Ok(())
        }

        fn end_of_schema(&mut self, _leaves: usize) -> Result<(), Error> {
            Ok(())
        }

        fn wants(&self, _column: usize) -> bool {
            false
        }

        fn row_group(&mut self, _: usize, _: i64, _: &[RawChunk], _: u64) -> Result<(), Error> {
            Ok(())
        }
    }
    let mut files = Files::new(None);
    let (handle, identity) = files.add(path)?;
    let mut leaves = Leaves(Vec::new());
    let walked = walk(path, &handle, identity.bytes, &mut leaves).map_err(|error| files.changed_or(0, error))?;
    Ok(Described { rows: walked.rows.max(0) as u64, columns: leaves.0, features: walked.features })
}

/// Files with more columns are refused when all columns are to be shown.
const MAX_COLUMNS: usize = 200_000;

/// Examines each row group during the walk over the footer.
struct Inspector<'a> {
    path: &'a Path,
    handle: &'a Handle,
    row_groups: Vec<u64>,
    columns: Vec<Found>,
    /// False once a chunk is found that this crate cannot read.
    is_readable: bool,
    is_indexed: bool,
    is_checked: bool,
    /// Bytes to read if every row is read once, alone.
    row_bytes: f64,
}

/// A column, and the totals of its chunks.
struct Found {
    shown: ColumnInspection,
    max_definition_level: u8,
    encodings: u32,
    /// Bit `i` stands for codec `i`; the last bit for all unknown codecs.
    codecs: u32,
    pages: u64,
    largest_page_bytes: u64,
}

impl Found {
    fn shown(mut self, has_pages: bool) -> ColumnInspection {
        let names = |bits: u32| (0..32).filter(move |bit| bits >> bit & 1 == 1);
        self.shown.encodings = names(self.encodings).map(encoding_name).collect();
        self.shown.encodings.sort_unstable();
        self.shown.compressions = names(self.codecs).map(|codec| codec_name(codec as i32)).collect();
        self.shown.compressions.sort_unstable();
        if has_pages && self.shown.is_string {
            self.shown.pages = Some(self.pages);
            self.shown.largest_page_bytes = Some(self.largest_page_bytes);
        }
        self.shown
    }
}

impl Sink for Inspector<'_> {
    fn leaf(&mut self, _index: usize, leaf: &Leaf<'_>) -> Result<(), Error> {
        if self.columns.len() == MAX_COLUMNS {
            let reason = format!("it has more than {MAX_COLUMNS} columns");
            return Err(Error::Footer { path: self.path.to_owned(), reason });
        }
        self.columns.push(Found {
            shown: ColumnInspection {
                name: leaf.path.to_owned(),
                type_name: leaf.type_name(),
                is_string: leaf.is_string(),
                is_nullable: leaf.max_definition_level > 0,
                encodings: Vec::new(),
                compressions: Vec::new(),
                compressed_bytes: 0,
                uncompressed_bytes: 0,
                pages: None,
                largest_page_bytes: None,
            },
            max_definition_level: leaf.max_definition_level.min(64) as u8,
            encodings: 0,
            codecs: 0,
            pages: 0,
            largest_page_bytes: 0,
        });
        Ok(())
    }

    fn end_of_schema(&mut self, _leaves: usize) -> Result<(), Error> {
        Ok(())
    }

    fn wants(&self, column: usize) -> bool {
        column < self.columns.len()
    }

    fn row_group(&mut self, number: usize, rows: i64, raw: &[RawChunk], data_end: u64) -> Result<(), Error> {
        let Ok(group_rows) = u32::try_from(rows) else {
            let reason = format!("row group {number} declares {rows} rows, expected 0 to {}", u32::MAX);
            return Err(Error::Footer { path: self.path.to_owned(), reason });
        };
        if raw.len() < self.columns.len() {
            let reason = format!("row group {number} lacks column {}", raw.len());
            return Err(Error::Footer { path: self.path.to_owned(), reason });
        }
        self.row_groups.push(u64::from(group_rows));
        for raw in raw {
            let found = &mut self.columns[raw.column];
            found.encodings |= raw.encodings;
            found.codecs |= 1 << u32::try_from(raw.codec).map_or(31, |codec| codec.min(31));
            let sizes = (&mut found.shown.compressed_bytes, &mut found.shown.uncompressed_bytes);
            *sizes.0 = sizes.0.saturating_add(raw.compressed_bytes.max(0) as u64);
            *sizes.1 = sizes.1.saturating_add(raw.uncompressed_bytes.max(0) as u64);
            if found.shown.is_string && group_rows > 0 && self.is_readable {
                match self.pages(number, group_rows, raw, data_end) {
                    // Show the shape even if the data cannot be read.
                    Err(Error::Unsupported { .. }) => self.is_readable = false,
                    outcome => outcome?,
                }
            }
        }
        Ok(())
    }
}

impl Inspector<'_> {
    /// Adds the facts of a chunk that only its page map and page headers contain.
    fn pages(&mut self, number: usize, rows: u32, raw: &RawChunk, data_end: u64) -> Result<(), Error> {
        let found = &mut self.columns[raw.column];
        let place = || Location {
            path: self.path.to_owned(),
            row_group: Some(number),
            column: Some(found.shown.name.clone()),
            rows: None,
        };
        one_value_a_row(raw, rows, &place)?;
        let chunk = chunk(raw, found.max_definition_level, rows, data_end, &place)?;
        // Only headers are read, so no dictionary is too large.
        let map = ChunkMap::build(self.handle, &chunk, usize::MAX).map_err(|fault| fault.at(place()))?;
        self.is_indexed &= chunk.offset_index.is_some();
        found.pages += map.pages.len() as u64;
        for (page, entry) in map.pages.iter().enumerate() {
            found.largest_page_bytes = found.largest_page_bytes.max(u64::from(entry.bytes));
            let header = PageHeader::read(self.handle, entry.offset, entry.offset + u64::from(entry.bytes)).ok();
            self.is_checked &= header.as_ref().is_some_and(|header| header.crc.is_some());
            let dictionary = match (&map.dictionary, header) {
                (Some(dictionary), Some(header)) if header.needs_dictionary() => dictionary.entry.bytes,
                _ => 0,
            };
            let rows = map.rows_of(page, chunk.rows);
            self.row_bytes += f64::from(rows.end - rows.start) * (f64::from(entry.bytes) + f64::from(dictionary));
        }
        Ok(())
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes_no = |yes: bool| if yes { "yes" } else { "no" };
        writeln!(f, "{}", self.path.display())?;
        let groups = self.row_groups.len();
        let largest = self.row_groups.iter().max().unwrap_or(&0);
        writeln!(f, "  rows         {} in {groups} row group{}", self.rows(), if groups == 1 { "" } else { "s" })?;
        if groups > 1 {
            writeln!(f, "  largest      {largest} rows")?;
        }
        writeln!(f, "  size         {}", size(self.bytes))?;
        writeln!(f, "  page index   {}", yes_no(self.has_page_index))?;
        writeln!(f, "  checksums    {}", yes_no(self.has_checksums))?;
        if let Some(created_by) = &self.created_by {
            writeln!(f, "  written by   {created_by}")?;
        }
        if let Some(bytes) = self.bytes_to_read_one_row {
            writeln!(f, "  one row      reads {} on average (all string columns)", size(bytes))?;
        }
        writeln!(f, "  columns")?;
        let width = self.columns.iter().map(|column| column.name.chars().count()).max().unwrap_or(0);
        for column in &self.columns {
            write!(
                f,
                "    {:width$}  {}{}, {}, {}, {} ({} decompressed)",
                column.name,
                column.type_name,
                if column.is_nullable { ", nullable" } else { "" },
                column.compressions.join("+"),
                column.encodings.join("+"),
                size(column.compressed_bytes),
                size(column.uncompressed_bytes),
            )?;
            if let (Some(pages), Some(largest)) = (column.pages, column.largest_page_bytes) {
                write!(f, ", {pages} page{} up to {}", if pages == 1 { "" } else { "s" }, size(largest))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// A size in readable form: `12 B`, `3.4 KiB`, `431.0 MiB`.
fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.2} GiB")
}
