//! [`ParquetWriter`]: writes rows of text as a parquet file, in little memory.
//!
//! The command reads parquet without the parquet crate, and this writer avoids that crate for writing, too. Values are
//! plain, never null, and compressed with snappy. Each page has its CRC-32, and each column chunk an offset index, so a
//! reader finds any row without reading page headers.
//!
//! Invariant: memory holds one page for each column, a row group's compressed pages (at most [`Sizes::row_group_bytes`]),
//! and 24 bytes for each page of that group.

use std::io::{self, Write};

use crate::thrift::Compact;

const MAGIC: &[u8; 4] = b"PAR1";
// Values from parquet.thrift.
const BYTE_ARRAY: i32 = 6;
const REQUIRED: i32 = 0;
const UTF8: i32 = 0;
const PLAIN: i32 = 0;
const RLE: i32 = 3;
const SNAPPY: i32 = 1;
const DATA_PAGE: i32 = 0;

/// Sizes of a file's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of values after which a page ends.
    pub page_bytes: usize,
    /// Compressed bytes after which a row group ends.
    pub row_group_bytes: usize,
}

impl Sizes {
    /// Returns sizes for a file of about `bytes` of text. Up to 16 GiB, the file gets at most 16,384 pages a column and
    /// 1,024 row groups; a larger file gets more of both.
    pub fn for_bytes(bytes: u64) -> Self {
        let within = |share: u64, least: u64, most: u64| (bytes / share).clamp(least, most) as usize;
        Self { page_bytes: within(16 << 10, 64 << 10, 1 << 20), row_group_bytes: within(1 << 10, 4 << 20, 16 << 20) }
    }
}

/// Writes rows of text, column by column.
pub struct ParquetWriter<W> {
    out: W,
    at: u64,
    sizes: Sizes,
    columns: Vec<Column>,
    /// Rows of the current row group.
    group_rows: u64,
    groups: Vec<Group>,
    snappy: Snappy,
}

/// The compressor with its tables, and room for a page.
struct Snappy {
    encoder: snap::raw::Encoder,
    compressed: Vec<u8>,
}

/// A column of the current row group.
struct Column {
    name: String,
    /// Values of the current page, each after its length.
    page: Vec<u8>,
    page_rows: i32,
    /// Finished pages, with their headers.
    pages: Vec<u8>,
    /// The size and the first row within the group, for each finished page.
    places: Vec<(usize, u64)>,
    rows: u64,
    uncompressed_bytes: u64,
}

struct Group {
    rows: u64,
    chunks: Vec<Chunk>,
}

struct Chunk {
    offset: u64,
    compressed_bytes: u64,
    uncompressed_bytes: u64,
    index: (u64, i32),
}

impl<W: Write> ParquetWriter<W> {
    /// Begins a file with these columns.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn new(mut out: W, columns: &[&str], sizes: Sizes) -> io::Result<Self> {
        out.write_all(MAGIC)?;
        let columns = columns.iter().map(|name| Column {
            name: (*name).to_owned(),
            page: Vec::new(),
            page_rows: 0,
            pages: Vec::new(),
            places: Vec::new(),
            rows: 0,
            uncompressed_bytes: 0,
        });
        let columns = columns.collect();
        let snappy = Snappy { encoder: snap::raw::Encoder::new(), compressed: Vec::new() };
        Ok(Self { out, at: 4, sizes, columns, group_rows: 0, groups: Vec::new(), snappy })
    }

    /// Rows that were written.
    pub fn rows(&self) -> u64 {
        self.group_rows + self.groups.iter().map(|group| group.rows).sum::<u64>()
    }

    /// Writes a row: a text for each column.
    ///
    /// # Errors
    /// Errors of `out`; a text of 2 GiB or more.
    pub fn write(&mut self, texts: &[&str]) -> io::Result<()> {
        assert_eq!(texts.len(), self.columns.len(), "a text for each column");
        for (column, text) in self.columns.iter_mut().zip(texts) {
            let length = i32::try_from(text.len()).map_err(|_| io::Error::other("a text of 2 GiB or more"))?;
            column.page.extend_from_slice(&length.to_le_bytes());
            column.page.extend_from_slice(text.as_bytes());
            column.page_rows += 1;
            if column.page.len() >= self.sizes.page_bytes {
                column.finish_page(&mut self.snappy)?;
            }
        }
        self.group_rows += 1;
        let held: usize = self.columns.iter().map(|column| column.pages.len()).sum();
        if held >= self.sizes.row_group_bytes { self.finish_group() } else { Ok(()) }
    }

    fn finish_group(&mut self) -> io::Result<()> {
        let rows = std::mem::take(&mut self.group_rows);
        if rows == 0 {
            return Ok(());
        }
        let mut chunks = Vec::with_capacity(self.columns.len());
        let mut indexes = Vec::with_capacity(self.columns.len());
        for column in &mut self.columns {
            column.finish_page(&mut self.snappy)?;
            self.out.write_all(&column.pages)?;
            let offset = self.at;
            self.at += column.pages.len() as u64;
            indexes.push(column.offset_index(offset));
            chunks.push(Chunk {
                offset,
                compressed_bytes: column.pages.len() as u64,
                uncompressed_bytes: std::mem::take(&mut column.uncompressed_bytes),
                index: (0, 0),
            });
            column.rows = 0;
            column.places.clear();
            column.pages.clear();
        }
        for (chunk, index) in chunks.iter_mut().zip(indexes) {
            self.out.write_all(&index)?;
            chunk.index = (self.at, index.len() as i32);
            self.at += index.len() as u64;
        }
        self.groups.push(Group { rows, chunks });
        Ok(())
    }

    /// Writes the remaining rows and the footer. Returns `out` and the number of bytes written.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn finish(mut self) -> io::Result<(W, u64)> {
        self.finish_group()?;
        let footer = self.footer();
        self.out.write_all(&footer)?;
        let length = u32::try_from(footer.len()).map_err(|_| io::Error::other("a footer of 4 GiB or more"))?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(MAGIC)?;
        self.out.flush()?;
        Ok((self.out, self.at + footer.len() as u64 + 8))
    }

    fn footer(&self) -> Vec<u8> {
        let rows = self.rows();
        let schema: Vec<Option<&str>> =
            std::iter::once(None).chain(self.columns.iter().map(|column| Some(&*column.name))).collect();
        Compact::of(|file| {
            file.i32(1, 1);
            file.groups(2, &schema, |element, name| match name {
                None => {
                    element.text(4, "schema");
                    element.i32(5, self.columns.len() as i32);
                }
                Some(name) => {
                    element.i32(1, BYTE_ARRAY);
                    element.i32(3, REQUIRED);
                    element.text(4, name);
                    element.i32(6, UTF8);
                    element.group(10, |logical| logical.group(1, |_| ()));
                }
            });
            file.i64(3, rows);
            file.groups(4, &self.groups, |group, written| self.describe(group, written));
            file.text(6, concat!("train_low_mem ", env!("CARGO_PKG_VERSION")));
        })
    }

    fn describe(&self, group: &mut Compact, written: &Group) {
        let chunks: Vec<(&Chunk, &str)> =
            written.chunks.iter().zip(self.columns.iter().map(|column| &*column.name)).collect();
        let sum = |bytes: fn(&Chunk) -> u64| written.chunks.iter().map(bytes).sum();
        group.groups(1, &chunks, |column, (chunk, name)| {
            column.i64(2, 0);
            column.group(3, |meta| {
                meta.i32(1, BYTE_ARRAY);
                meta.i32s(2, &[PLAIN]);
                meta.texts(3, &[name]);
                meta.i32(4, SNAPPY);
                meta.i64(5, written.rows);
                meta.i64(6, chunk.uncompressed_bytes);
                meta.i64(7, chunk.compressed_bytes);
                meta.i64(9, chunk.offset);
            });
            column.i64(4, chunk.index.0);
            column.i32(5, chunk.index.1);
        });
        group.i64(2, sum(|chunk| chunk.uncompressed_bytes));
        group.i64(3, written.rows);
        group.i64(5, written.chunks.first().map_or(0, |chunk| chunk.offset));
        group.i64(6, sum(|chunk| chunk.compressed_bytes));
    }
}

impl Column {
    /// Compresses the current page and adds it to the finished pages.
    fn finish_page(&mut self, snappy: &mut Snappy) -> io::Result<()> {
        let rows = std::mem::take(&mut self.page_rows);
        if rows == 0 {
            return Ok(());
        }
        let Snappy { encoder, compressed } = snappy;
        compressed.resize(snap::raw::max_compress_len(self.page.len()), 0);
        let length = encoder.compress(&self.page, compressed).map_err(io::Error::other)?;
        let body = &compressed[..length];
        let mut crc = flate2::Crc::new();
        crc.update(body);
        let uncompressed = i32::try_from(self.page.len()).map_err(|_| io::Error::other("a page of 2 GiB or more"))?;
        let header = Compact::of(|page| {
            page.i32(1, DATA_PAGE);
            page.i32(2, uncompressed);
            page.i32(3, length as i32);
            page.i32(4, crc.sum().cast_signed());
            page.group(5, |data| {
                data.i32(1, rows);
                data.i32(2, PLAIN);
                data.i32(3, RLE);
                data.i32(4, RLE);
            });
        });
        self.places.push((header.len() + length, self.rows));
        self.pages.extend_from_slice(&header);
        self.pages.extend_from_slice(body);
        self.rows += rows as u64;
        self.uncompressed_bytes += (header.len() + self.page.len()) as u64;
        self.page.clear();
        // After a page with one large value, release the buffers' memory.
        if self.page.capacity() > 4 << 20 {
            (self.page, *compressed) = (Vec::new(), Vec::new());
        }
        Ok(())
    }

    /// The offset index of the chunk at `offset`.
    fn offset_index(&self, mut offset: u64) -> Vec<u8> {
        Compact::of(|index| {
            index.groups(1, &self.places, |page, (bytes, first_row)| {
                page.i64(1, offset);
                page.i32(2, *bytes as i32);
                page.i64(3, *first_row);
                offset += *bytes as u64;
            });
        })
    }
}
