//! What a parquet file looks like from here: its shape, and what reading one row of it costs.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use parquet::file::metadata::ParquetMetaData;

use crate::dataset::{Dataset, DatasetOptions};
use crate::error::Error;
use crate::footer::{codec_name, is_string_column, read_raw, string_columns, type_name};
use crate::io::Files;
use crate::page_header::PageHeader;

/// What [`inspect`] finds.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// The file, as it was given.
    pub path: PathBuf,
    /// The file's size.
    pub bytes: u64,
    /// Who wrote it, in the writer's words.
    pub created_by: Option<String>,
    /// Rows of each row group.
    pub row_groups: Vec<u64>,
    /// Whether every string column has an offset index.
    pub has_page_index: bool,
    /// Whether every data page of the string columns carries a checksum.
    pub has_checksums: bool,
    /// All columns.
    pub columns: Vec<ColumnInspection>,
    /// Bytes to read for one row of all string columns, on average: a page and, where there is one, a dictionary
    /// for each. `None` if the file has no readable string column.
    pub bytes_to_read_one_row: Option<u64>,
}

/// One column of an [`Inspection`].
#[derive(Debug, Clone)]
pub struct ColumnInspection {
    /// Dotted path.
    pub name: String,
    /// Parquet's type: `BYTE_ARRAY (String)`, `INT64`.
    pub type_name: String,
    /// Whether the trainer can read it as text.
    pub is_string: bool,
    /// Whether it may hold nulls.
    pub is_nullable: bool,
    /// All encodings of its pages, levels included.
    pub encodings: Vec<String>,
    /// All compressions of its chunks.
    pub compressions: Vec<&'static str>,
    /// Bytes in the file.
    pub compressed_bytes: u64,
    /// Bytes once decompressed, still encoded.
    pub uncompressed_bytes: u64,
    /// Data pages, if it is a string column that can be read.
    pub pages: Option<u64>,
    /// The largest of them: header and body, as stored.
    pub largest_page_bytes: Option<u64>,
}

impl Inspection {
    /// Rows of the file.
    pub fn rows(&self) -> u64 {
        self.row_groups.iter().sum()
    }
}

/// Looks at a file: its footer, and the page headers or offset indexes of its string columns. Reads no data.
pub fn inspect(path: &Path) -> Result<Inspection, Error> {
    let mut files = Files::new(None);
    let (handle, identity) = files.add(path)?;
    let raw = read_raw(path, &handle, identity.bytes, true)?;
    let file = raw.metadata.file_metadata();
    let schema = file.schema_descr();
    let mut inspection = Inspection {
        path: path.to_owned(),
        bytes: identity.bytes,
        created_by: file.created_by().map(str::to_owned),
        row_groups: raw.metadata.row_groups().iter().map(|group| group.num_rows().max(0) as u64).collect(),
        has_page_index: false,
        has_checksums: false,
        columns: (0..schema.num_columns()).map(|index| column(&raw.metadata, index)).collect(),
        bytes_to_read_one_row: None,
    };
    let names = string_columns(schema.columns());
    if names.is_empty() || inspection.rows() == 0 {
        return Ok(inspection);
    }
    match Dataset::open(&[path.to_owned()], &DatasetOptions::new(names)) {
        Ok(dataset) => add_pages(&mut inspection, &dataset)?,
        // The shape is worth seeing although the data cannot be read.
        Err(Error::Unsupported { .. }) => {}
        Err(error) => return Err(error),
    }
    Ok(inspection)
}

fn column(metadata: &ParquetMetaData, index: usize) -> ColumnInspection {
    let descriptor = metadata.file_metadata().schema_descr().column(index);
    let (mut encodings, mut compressions) = (BTreeSet::new(), BTreeSet::new());
    let (mut compressed_bytes, mut uncompressed_bytes) = (0u64, 0u64);
    for chunk in metadata.row_groups().iter().filter_map(|group| group.columns().get(index)) {
        encodings.extend(chunk.encodings().map(|encoding| encoding.to_string()));
        compressions.insert(codec_name(chunk.compression()));
        compressed_bytes = compressed_bytes.saturating_add(chunk.compressed_size().max(0) as u64);
        uncompressed_bytes = uncompressed_bytes.saturating_add(chunk.uncompressed_size().max(0) as u64);
    }
    ColumnInspection {
        name: descriptor.path().string(),
        type_name: type_name(&descriptor),
        is_string: is_string_column(&descriptor),
        is_nullable: descriptor.max_def_level() > 0,
        encodings: encodings.into_iter().collect(),
        compressions: compressions.into_iter().collect(),
        compressed_bytes,
        uncompressed_bytes,
        pages: None,
        largest_page_bytes: None,
    }
}

/// Adds what only page maps and page headers tell.
fn add_pages(inspection: &mut Inspection, dataset: &Dataset) -> Result<(), Error> {
    let handle = dataset.files.handle(0)?;
    let rows = inspection.rows();
    let (mut indexed, mut checked, mut row_bytes) = (true, true, 0.0);
    let strings = inspection.columns.iter_mut().filter(|column| column.is_string);
    for (number, column) in strings.enumerate() {
        let (mut pages, mut largest) = (0, 0);
        for (row_group, group) in dataset.footers[0].row_groups.iter().enumerate().filter(|(_, group)| group.rows > 0) {
            let chunk = &group.chunks[number];
            let map = dataset.chunk_map(&handle, 0, row_group, number)?;
            indexed &= chunk.offset_index.is_some();
            pages += map.pages.len() as u64;
            for (page, entry) in map.pages.iter().enumerate() {
                largest = largest.max(u64::from(entry.bytes));
                let header = PageHeader::read(&handle, entry.offset, entry.offset + u64::from(entry.bytes)).ok();
                checked &= header.as_ref().is_some_and(|header| header.crc.is_some());
                let dictionary = match (&map.dictionary, header) {
                    (Some(dictionary), Some(header)) if header.needs_dictionary() => dictionary.entry.bytes,
                    _ => 0,
                };
                let share = f64::from(map.rows_of(page, chunk.rows).len() as u32) / rows as f64;
                row_bytes += share * (f64::from(entry.bytes) + f64::from(dictionary));
            }
        }
        column.pages = Some(pages);
        column.largest_page_bytes = Some(largest);
    }
    inspection.has_page_index = indexed;
    inspection.has_checksums = checked;
    inspection.bytes_to_read_one_row = Some(row_bytes.round() as u64);
    Ok(())
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

/// A size for people: `12 B`, `3.4 KiB`, `431.0 MiB`.
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
