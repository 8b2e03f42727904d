//! The memory of a dataset, for the memory plan.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::dataset::{Dataset, Residency};
use crate::footer::{Chunk, Codec};
use crate::pages::bytes::{max_level_bytes, page_memory_bytes, whole_data_page_bytes};
use crate::pages::entry::PageEntry;
use crate::pages::map::ChunkMap;
use crate::pages::rows::MAX_DELTA_ROWS;

/// Writers stop dictionaries at this size by default.
const USUAL_DICTIONARY_BYTES: u64 = 1 << 20;

/// One row of the bill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostRow {
    /// Purpose of the bytes.
    pub name: &'static str,
    /// An upper bound if page maps exist or the file declares enough, an estimate otherwise.
    pub bytes: u64,
    /// Whether the bytes are held already when the costs are stated. The measured memory of the process then includes
    /// them.
    pub is_held: bool,
    /// Whether the bytes are freed after each read, so that other code can reuse their large blocks.
    pub is_while_read: bool,
}

impl Dataset {
    /// Peak memory of the dataset with `readers` threads reading at once, without the rows it returns.
    /// Exact page sizes are known once [`Dataset::page_map`] has been called or given.
    pub fn costs(&self, residency: Residency, readers: usize) -> Vec<CostRow> {
        let row = |name, bytes| CostRow { name, bytes, is_held: false, is_while_read: false };
        let mut rows = vec![
            CostRow { is_held: true, ..row("dataset metadata", self.metadata_bytes()) },
            CostRow {
                is_while_read: !self.has_zstd(),
                ..row("dataset decoding", self.decoding_bytes() * readers as u64)
            },
            // Needed while the map is written beside a checkpoint.
            row("dataset page map", self.maps.kept_bytes()),
        ];
        let bytes = self.cache_bytes(residency);
        if bytes > 0 {
            rows.push(row("dataset cache", bytes));
        }
        rows
    }

    /// Bytes of all rows once decoded. A lower bound if values are dictionary-encoded and the writer does not declare
    /// their total length.
    pub fn decoded_bytes(&self) -> u64 {
        let chunks = self.footers.iter().flat_map(|footer| &footer.row_groups).flat_map(|group| &group.chunks);
        chunks.map(Chunk::decoded_bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of all blocks of rows, including each block's overhead.
    pub fn bytes_of_all_blocks(&self) -> u64 {
        let blocks = self.rows() / u64::from(self.block_rows()) + 1;
        self.decoded_bytes().saturating_add(self.decoded_bytes() / 64).saturating_add(blocks * 64)
    }

    /// Mean bytes of a decoded row.
    pub fn mean_row_bytes(&self) -> u64 {
        self.decoded_bytes().div_ceil(self.rows().max(1))
    }

    /// Upper bound of a column's largest value. Once [`Dataset::find_pages`] was called, it is as exact as the pages
    /// allow; before, it comes from the footer.
    pub fn largest_value_bytes(&self, column: usize) -> u64 {
        let mut largest = 0;
        self.each_chunk(|file, row_group, index, chunk| {
            if index == column {
                largest = largest.max(match self.maps.get(file, row_group, column) {
                    Some(map) => largest_value_of(chunk, map),
                    None => chunk.uncompressed_bytes,
                });
            }
        });
        largest
    }

    /// The most bytes of values that a read of any `rows` rows returns, if at most `most_of_a_value` bytes of each
    /// value are read. As exact as [`Dataset::largest_value_bytes`].
    pub fn most_read_bytes(&self, rows: usize, most_of_a_value: u64) -> u64 {
        let mut columns = vec![MostRead::new(rows, most_of_a_value); self.columns().len()];
        self.each_chunk(|file, row_group, column, chunk| match self.maps.get(file, row_group, column) {
            Some(map) => {
                let in_dictionary = map.dictionary.map_or(0, |page| page.largest_value_bytes);
                for (index, entry) in map.pages.iter().enumerate() {
                    let rows = map.rows_of(index, chunk.rows);
                    let size = max_bytes_of_data(chunk, map, entry);
                    // Delta encoding lets each value repeat the one before it.
                    let repeated = if chunk.delta_lengths > 1 { size } else { in_dictionary };
                    columns[column].page(u64::from(rows.end - rows.start), size, repeated);
                }
            }
            None if chunk.has_dictionary => {
                columns[column].page(u64::from(chunk.rows), chunk.uncompressed_bytes, chunk.uncompressed_bytes);
            }
            None => columns[column].page(u64::from(chunk.rows), chunk.uncompressed_bytes, 0),
        });
        columns.iter().map(MostRead::bytes).fold(0, u64::saturating_add)
    }

    fn each_chunk(&self, mut take: impl FnMut(usize, usize, usize, &Chunk)) {
        for (file, footer) in self.footers.iter().enumerate() {
            for (row_group, group) in footer.row_groups.iter().enumerate() {
                group.chunks.iter().enumerate().for_each(|(column, chunk)| take(file, row_group, column, chunk));
            }
        }
    }

    /// The block cache's capacity under a residency.
    pub(crate) fn cache_bytes(&self, residency: Residency) -> u64 {
        match residency {
            Residency::InMemory => self.bytes_of_all_blocks(),
            Residency::RowGroupCache { bytes } => bytes,
            Residency::UltraLowMem => 0,
        }
    }

    pub(crate) fn estimated_block_bytes(&self) -> u64 {
        self.mean_row_bytes().saturating_mul(u64::from(self.block_rows()).min(self.rows()))
    }

    fn metadata_bytes(&self) -> u64 {
        let groups: usize = self.footers.iter().map(|footer| footer.row_groups.len()).sum();
        let per_group = 64 + self.columns().len() * size_of::<Chunk>();
        self.maps.memory_bytes() + (groups * per_group) as u64
    }

    /// Whether any column is compressed by zstd. Its memory comes from the C library, which leaves no large blocks to
    /// reuse.
    fn has_zstd(&self) -> bool {
        let mut has_zstd = false;
        self.each_chunk(|_, _, _, chunk| has_zstd |= chunk.codec == Codec::Zstd);
        has_zstd
    }

    /// The most bytes that one reader holds while it decodes: a dictionary and a page of one column.
    fn decoding_bytes(&self) -> u64 {
        let (mut most, whole) = (0, self.options.whole_page_bytes);
        self.each_chunk(|file, row_group, column, chunk| {
            most = most.max(match self.maps.get(file, row_group, column) {
                Some(map) => mapped_decoding_bytes(chunk, map, whole),
                None => unmapped_decoding_bytes(chunk, whole),
            });
        });
        most
    }
}

/// The sum of the largest values that some rows of a column can have. A value is no larger than its page, and neither
/// is the sum of a page's values, unless they come from a dictionary.
#[derive(Clone)]
struct MostRead {
    rows: usize,
    most_of_a_value: u64,
    /// The largest values so far, at most `rows` of them, the smallest first.
    largest: BinaryHeap<Reverse<u64>>,
}

impl MostRead {
    fn new(rows: usize, most_of_a_value: u64) -> Self {
        Self { rows, most_of_a_value, largest: BinaryHeap::new() }
    }

    fn page(&mut self, rows: u64, page_bytes: u64, in_dictionary: u64) {
        let from_dictionary = in_dictionary.min(self.most_of_a_value);
        let mut left = page_bytes;
        for _ in 0..rows.min(self.rows as u64) {
            let plain = left.min(self.most_of_a_value);
            left -= plain;
            let value = plain.max(from_dictionary);
            if self.largest.len() < self.rows {
                self.largest.push(Reverse(value));
            } else if self.largest.peek().is_some_and(|least| least.0 < value) {
                self.largest.pop();
                self.largest.push(Reverse(value));
            } else {
                return;
            }
        }
    }

    fn bytes(&self) -> u64 {
        self.largest.iter().map(|value| value.0).fold(0, u64::saturating_add)
    }
}

fn largest_value_of(chunk: &Chunk, map: &ChunkMap) -> u64 {
    let page = map.pages.iter().map(|entry| max_bytes_of_data(chunk, map, entry)).max().unwrap_or(0);
    page.max(map.dictionary.map_or(0, |page| page.largest_value_bytes))
}

impl Chunk {
    /// Bytes of the chunk's rows once decoded, from its footer.
    pub(crate) fn decoded_bytes(&self) -> u64 {
        let rows = u64::from(self.rows);
        match self.value_bytes {
            Some(bytes) => bytes.saturating_add(rows * 4 + rows / 8),
            // Plain encoding uses four bytes for each length, as `Rows` does.
            None => self.uncompressed_bytes.saturating_add(rows / 8),
        }
    }
}

/// Peak memory of reading one page of the chunk: its dictionary, the page, its levels, its delta-encoded lengths.
fn mapped_decoding_bytes(chunk: &Chunk, map: &ChunkMap, whole: usize) -> u64 {
    let page = |entry: &PageEntry, size: u64, whole| {
        let memory = |size| page_memory_bytes(u64::from(entry.bytes), size, chunk.codec, map.window_bytes, whole);
        match entry.uncompressed_bytes {
            // An offset index does not give the size. The page is held whole or streamed; take the larger memory of the
            // two.
            0 => memory(size.min(whole as u64)).max(memory(size)),
            _ => memory(size),
        }
    };
    let whole_data = whole_data_page_bytes(chunk.codec, whole);
    let data = |(index, entry): (usize, &PageEntry)| {
        let (rows, size) = (map.rows_of(index, chunk.rows), max_bytes_of_data(chunk, map, entry));
        page(entry, size, whole_data) + value_state_bytes(chunk, rows.end - rows.start, size)
    };
    let pages = map.pages.iter().enumerate().map(data).max().unwrap_or(0);
    // A dictionary is read while the page that first needs it is open. Long values of a large dictionary are read again.
    let Some(dictionary) = &map.dictionary else { return pages };
    let size = max_uncompressed_bytes(chunk, &dictionary.entry);
    let dictionary_page = page(&dictionary.entry, size, whole);
    pages
        + match dictionary.is_streamed(whole) {
            true => dictionary.held_bytes + dictionary_page,
            false => dictionary.held_bytes.max(dictionary_page),
        }
}

/// Memory for decoding the values of a page, beside its bytes.
fn value_state_bytes(chunk: &Chunk, rows: u32, page_bytes: u64) -> u64 {
    let levels = if chunk.max_definition_level > 0 { max_level_bytes(rows).min(page_bytes) } else { 0 };
    let lengths = u64::from(chunk.delta_lengths) * 4 * u64::from(rows.min(MAX_DELTA_ROWS));
    // The previous value: the next value repeats its beginning.
    let last = if chunk.delta_lengths > 1 { page_bytes } else { 0 };
    levels + lengths + last
}

/// The most bytes of a decompressed page.
fn max_uncompressed_bytes(chunk: &Chunk, entry: &PageEntry) -> u64 {
    match entry.uncompressed_bytes {
        0 => chunk.uncompressed_bytes.max(u64::from(entry.bytes)),
        declared => u64::from(declared),
    }
}

/// The most that a data page can be once decompressed. The footer counts the dictionary's page with them.
fn max_bytes_of_data(chunk: &Chunk, map: &ChunkMap, entry: &PageEntry) -> u64 {
    let dictionary = map.dictionary.map_or(0, |page| u64::from(page.entry.uncompressed_bytes));
    match (entry.uncompressed_bytes, chunk.codec) {
        (0, Codec::Uncompressed) => u64::from(entry.bytes),
        (0, _) => chunk.uncompressed_bytes.saturating_sub(dictionary).max(u64::from(entry.bytes)),
        _ => max_uncompressed_bytes(chunk, entry),
    }
}

fn unmapped_decoding_bytes(chunk: &Chunk, whole: usize) -> u64 {
    let page = chunk.uncompressed_bytes.min(whole as u64);
    let stored = if chunk.codec == Codec::Uncompressed { 0 } else { chunk.compressed_bytes.min(page) };
    let streamed = match chunk.uncompressed_bytes > whole as u64 {
        // The window of zstd's levels up to 19, limited by the page's size.
        true => {
            let window = chunk.uncompressed_bytes.min(8 << 20);
            page_memory_bytes(chunk.compressed_bytes, chunk.uncompressed_bytes, chunk.codec, window, whole)
        }
        false => 0,
    };
    let dictionary = if chunk.has_dictionary { 2 * chunk.uncompressed_bytes.min(USUAL_DICTIONARY_BYTES) } else { 0 };
    dictionary + (page + stored).max(streamed)
}
