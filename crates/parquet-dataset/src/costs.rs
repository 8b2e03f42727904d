//! What a dataset costs in bytes, for whoever plans memory.

use crate::dataset::{Dataset, Residency};
use crate::footer::{Chunk, Codec};
use crate::page_bytes::page_memory_bytes;
use crate::page_map::ChunkMap;

/// Writers stop dictionaries at this size unless told otherwise.
const USUAL_DICTIONARY_BYTES: u64 = 1 << 20;

/// One row of the bill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostRow {
    /// What the bytes are for.
    pub name: &'static str,
    /// An upper bound where page maps have been made or the file says enough, an estimate otherwise.
    pub bytes: u64,
}

impl Dataset {
    /// What the dataset holds at most with `readers` threads reading at once, without the rows it gives away.
    /// Exact page sizes are known once [`Dataset::page_map`] has been called or given.
    pub fn costs(&self, residency: Residency, readers: usize) -> Vec<CostRow> {
        let mut rows = vec![
            CostRow { name: "dataset metadata", bytes: self.metadata_bytes() },
            CostRow { name: "dataset decoding", bytes: self.decoding_bytes() * readers as u64 },
        ];
        let bytes = self.cache_bytes(residency);
        if bytes > 0 {
            rows.push(CostRow { name: "dataset cache", bytes });
        }
        rows
    }

    /// Bytes of all rows once decoded. A lower bound where values are dictionary-encoded by a writer that does
    /// not say how long they are together.
    pub fn decoded_bytes(&self) -> u64 {
        let chunks = self.footers.iter().flat_map(|footer| &footer.row_groups).flat_map(|group| &group.chunks);
        chunks.map(Chunk::decoded_bytes).fold(0, u64::saturating_add)
    }

    /// What one row takes once decoded, on average.
    pub fn mean_row_bytes(&self) -> u64 {
        self.decoded_bytes().div_ceil(self.rows().max(1))
    }

    /// The capacity that a residency gives to the block cache.
    pub(crate) fn cache_bytes(&self, residency: Residency) -> u64 {
        match residency {
            // Blocks have some bytes of their own.
            Residency::InMemory => {
                let blocks = self.rows() / u64::from(self.block_rows()) + 1;
                self.decoded_bytes().saturating_add(self.decoded_bytes() / 64).saturating_add(blocks * 64)
            }
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

    /// The most that one reader holds while it decodes: a dictionary and a page of one column.
    fn decoding_bytes(&self) -> u64 {
        let mut most = 0;
        for (file, footer) in self.footers.iter().enumerate() {
            for (row_group, group) in footer.row_groups.iter().enumerate() {
                for (column, chunk) in group.chunks.iter().enumerate() {
                    let whole = self.options.whole_page_bytes;
                    let bytes = match self.maps.get(file, row_group, column) {
                        Some(map) => mapped_decoding_bytes(chunk, map, whole),
                        None => unmapped_decoding_bytes(chunk, whole),
                    };
                    most = most.max(bytes);
                }
            }
        }
        most
    }
}

impl Chunk {
    /// Bytes of the chunk's rows once decoded, as its footer tells.
    pub(crate) fn decoded_bytes(&self) -> u64 {
        let rows = u64::from(self.rows);
        match self.value_bytes {
            Some(bytes) => bytes.saturating_add(rows * 4 + rows / 8),
            // Plain encoding spends four bytes on each length, as we do.
            None => self.uncompressed_bytes.saturating_add(rows / 8),
        }
    }
}

fn mapped_decoding_bytes(chunk: &Chunk, map: &ChunkMap, whole: usize) -> u64 {
    let page = |stored: u32, declared: u32| {
        let decompressed = match declared {
            // An offset index does not say: assume the chunk's ratio, doubled.
            0 => 2 * u64::from(stored) * chunk.uncompressed_bytes.div_ceil(chunk.compressed_bytes.max(1)).max(1),
            declared => u64::from(declared),
        };
        page_memory_bytes(u64::from(stored), decompressed, chunk.codec, whole)
    };
    let pages = map.pages.iter().map(|entry| page(entry.bytes, entry.uncompressed_bytes)).max().unwrap_or(0);
    // While a dictionary is read, its page is there too; afterwards it and the offsets of its values.
    let dictionary = map.dictionary.map_or(0, |entry| 2 * u64::from(entry.uncompressed_bytes));
    let dictionary_page = map.dictionary.map_or(0, |entry| page(entry.bytes, entry.uncompressed_bytes));
    dictionary + pages.max(dictionary_page)
}

fn unmapped_decoding_bytes(chunk: &Chunk, whole: usize) -> u64 {
    let page = chunk.uncompressed_bytes.min(whole as u64);
    let stored = if chunk.codec == Codec::Uncompressed { 0 } else { chunk.compressed_bytes.min(page) };
    let streamed = match chunk.uncompressed_bytes > whole as u64 {
        true => page_memory_bytes(chunk.compressed_bytes, chunk.uncompressed_bytes, chunk.codec, whole),
        false => 0,
    };
    let dictionary = if chunk.has_dictionary { 2 * chunk.uncompressed_bytes.min(USUAL_DICTIONARY_BYTES) } else { 0 };
    dictionary + (page + stored).max(streamed)
}
