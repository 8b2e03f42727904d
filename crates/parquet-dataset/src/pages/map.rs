//! Page maps: where each page of a column chunk lies and which rows it holds.
//!
//! With a page map every block of rows is a seek. It comes from the file's offset index where there is a
//! sound one; otherwise from one walk over the page headers, a few hundred bytes per page and none of the
//! data, but for dictionaries that are too large to be held whole. A chunk's map is made when the chunk is first read
//! and kept from then on: 24 bytes a page, and 4 for its digest.
//!
//! Invariant: within a map, pages lie in the chunk's bytes, start at row 0, and each starts after the one
//! before it, in rows and in bytes. What a page declares about itself is compared with the map when it is read.

use std::ops::Range;

use crate::dictionary::DictionaryPage;
use crate::error::Fault;
use crate::footer::{Chunk, Codec};
use crate::io::Handle;
use crate::page_bytes::zstd_window;
use crate::page_digests::Digests;
use crate::page_header::{PageHeader, PageKind, PageLocation, parse_offset_index};

/// An offset index of more bytes is not believed; a map of a million pages has about 12 MiB.
const MAX_OFFSET_INDEX_BYTES: u64 = 64 << 20;

/// One page: header and body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageEntry {
    pub(crate) offset: u64,
    /// Header and body, as stored.
    pub(crate) bytes: u32,
    /// The body once decompressed; 0 where only an offset index was read, which does not say.
    pub(crate) uncompressed_bytes: u32,
    /// Within the row group. 0 for a dictionary page.
    pub(crate) first_row: u32,
}

/// The pages of one column chunk.
#[derive(Debug, Default)]
pub(crate) struct ChunkMap {
    pub(crate) dictionary: Option<DictionaryPage>,
    /// Data pages, in the order of their rows. Pages without rows are left out.
    pub(crate) pages: Vec<PageEntry>,
    /// The largest window of the pages that are decompressed as a zstd stream.
    pub(crate) window_bytes: u64,
    /// Digests of the pages' bytes at their first read.
    pub(crate) digests: Digests,
}

impl ChunkMap {
    /// Finds the pages of a chunk: from its offset index, or from its page headers. Pages of up to `whole_page_bytes`
    /// will be held whole while they are read.
    pub(crate) fn build(handle: &Handle, chunk: &Chunk, whole_page_bytes: usize) -> Result<Self, Fault> {
        if chunk.rows == 0 {
            return Ok(Self::default());
        }
        let mut map = match Self::from_offset_index(handle, chunk, whole_page_bytes) {
            Ok(Some(map)) => map,
            Err(Fault::File(error)) => return Err(Fault::File(error)),
            // An index that is wrong costs a walk, nothing else.
            Ok(None) | Err(_) => Self::from_page_headers(handle, chunk)?,
        };
        if chunk.codec == Codec::Zstd {
            let entries = map.dictionary.iter().map(|page| &page.entry).chain(&map.pages);
            for entry in entries.filter(|entry| entry.bytes.max(entry.uncompressed_bytes) as usize > whole_page_bytes) {
                map.window_bytes = map.window_bytes.max(zstd_window(handle, entry)?);
            }
        }
        if let Some(page) = &mut map.dictionary {
            *page = DictionaryPage::examine(handle, page.entry, chunk.codec, whole_page_bytes)?;
        }
        map.digests = Digests::new(map.dictionary.as_ref().map(|page| &page.entry), &map.pages);
        Ok(map)
    }

    fn from_offset_index(handle: &Handle, chunk: &Chunk, whole_page_bytes: usize) -> Result<Option<Self>, Fault> {
        let Some(range) = chunk.offset_index.clone().filter(|range| range.end - range.start <= MAX_OFFSET_INDEX_BYTES)
        else {
            return Ok(None);
        };
        let mut bytes = vec![0; (range.end - range.start) as usize];
        handle.read_exact_at(&mut bytes, range.start)?;
        let Some(mut pages) = sound_pages(&parse_offset_index(&bytes)?, chunk) else {
            return Ok(None);
        };
        let mut dictionary = None;
        if pages.first().is_some_and(|first| first.offset > chunk.bytes.start) {
            let header = PageHeader::read(handle, chunk.bytes.start, pages[0].offset)?;
            if header.kind == PageKind::Dictionary {
                if chunk.bytes.start + header.total_bytes() > pages[0].offset {
                    return Ok(None);
                }
                dictionary = Some(dictionary_entry(chunk.bytes.start, &header));
            }
        }
        // Only the page itself declares the memory that zstd needs.
        if chunk.codec == Codec::Zstd && chunk.uncompressed_bytes > whole_page_bytes as u64 {
            for page in &mut pages {
                let header = PageHeader::read(handle, page.offset, page.offset + u64::from(page.bytes))?;
                page.uncompressed_bytes = header.uncompressed_bytes;
            }
        }
        Ok(Some(Self { dictionary, pages, ..Self::default() }))
    }

    fn from_page_headers(handle: &Handle, chunk: &Chunk) -> Result<Self, Fault> {
        let mut map = Self::default();
        let (mut offset, mut rows) = (chunk.bytes.start, 0u32);
        while rows < chunk.rows {
            if offset >= chunk.bytes.end {
                return Fault::corrupt(format!("its pages hold {rows} rows, expected {}", chunk.rows));
            }
            let header = PageHeader::read(handle, offset, chunk.bytes.end)?;
            let end = offset + header.total_bytes();
            if end > chunk.bytes.end {
                return Fault::corrupt(format!(
                    "a page at {offset} declares {} bytes, expected at most {}",
                    header.total_bytes(),
                    chunk.bytes.end - offset
                ));
            }
            match header.kind {
                PageKind::Dictionary if map.dictionary.is_some() || !map.pages.is_empty() => {
                    return Fault::corrupt(format!("a second dictionary page, or one behind data, at {offset}"));
                }
                PageKind::Dictionary => map.dictionary = Some(dictionary_entry(offset, &header)),
                PageKind::Data | PageKind::DataV2 => {
                    if header.values > chunk.rows - rows {
                        return Fault::corrupt(format!(
                            "a page at {offset} declares {} rows, expected at most {}",
                            header.values,
                            chunk.rows - rows
                        ));
                    }
                    if header.values > 0 {
                        map.pages.push(entry(offset, &header, rows));
                    }
                    rows += header.values;
                }
                PageKind::Other => {}
            }
            offset = end;
        }
        map.pages.shrink_to_fit();
        Ok(map)
    }

    /// The rows of page `index`, within the row group.
    pub(crate) fn rows_of(&self, index: usize, chunk_rows: u32) -> Range<u32> {
        let end = self.pages.get(index + 1).map_or(chunk_rows, |next| next.first_row);
        self.pages[index].first_row..end
    }

    /// The page that holds a row.
    pub(crate) fn page_of(&self, row: u32) -> usize {
        self.pages.partition_point(|page| page.first_row <= row).saturating_sub(1)
    }

    /// The bytes that this map takes in memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        (size_of::<Self>() + self.pages.capacity() * size_of::<PageEntry>() + self.digests.memory_bytes()) as u64
    }

    /// Where the first page lies that does not lie where it lies in `other`.
    pub(crate) fn first_difference(&self, other: &Self) -> Option<u64> {
        let places = |map: &Self| {
            let dictionary = map.dictionary.map(|page| (page.entry.offset, page.entry.bytes, 0));
            let pages = map.pages.iter().map(|page| (page.offset, page.bytes, page.first_row));
            dictionary.into_iter().chain(pages).collect::<Vec<_>>()
        };
        let (ours, theirs) = (places(self), places(other));
        let same = ours.iter().zip(&theirs).take_while(|(ours, theirs)| ours == theirs).count();
        (same < ours.len().max(theirs.len())).then(|| ours.get(same).or(theirs.get(same)).map_or(0, |page| page.0))
    }

    /// Whether the map could be that of `chunk`.
    pub(crate) fn fits(&self, chunk: &Chunk) -> bool {
        let inside = |page: &PageEntry| {
            page.offset >= chunk.bytes.start && page.offset.saturating_add(u64::from(page.bytes)) <= chunk.bytes.end
        };
        let ascending = self.pages.windows(2).all(|pair| {
            pair[0].first_row < pair[1].first_row && pair[0].offset + u64::from(pair[0].bytes) <= pair[1].offset
        });
        self.dictionary.iter().map(|page| &page.entry).chain(&self.pages).all(inside)
            && ascending
            && self.pages.first().map_or(chunk.rows == 0, |first| first.first_row == 0)
            && self.pages.last().is_none_or(|last| last.first_row < chunk.rows)
    }
}

fn entry(offset: u64, header: &PageHeader, first_row: u32) -> PageEntry {
    PageEntry {
        offset,
        bytes: u32::try_from(header.total_bytes()).unwrap_or(u32::MAX),
        uncompressed_bytes: header.uncompressed_bytes,
        first_row,
    }
}

/// A dictionary of which only the header was read.
fn dictionary_entry(offset: u64, header: &PageHeader) -> DictionaryPage {
    DictionaryPage { entry: entry(offset, header, 0), held_bytes: 0, largest_value_bytes: 0 }
}

/// The offset index as pages, if it agrees with itself and the chunk.
fn sound_pages(locations: &[PageLocation], chunk: &Chunk) -> Option<Vec<PageEntry>> {
    let mut pages = Vec::with_capacity(locations.len());
    for (index, location) in locations.iter().enumerate() {
        let first_row = u32::try_from(location.first_row).ok()?;
        // A page without rows starts where the next one starts, or at the end.
        let next = locations.get(index + 1).map_or(i64::from(chunk.rows), |next| next.first_row);
        if next == location.first_row {
            continue;
        }
        pages.push(PageEntry {
            offset: u64::try_from(location.offset).ok()?,
            bytes: u32::try_from(location.bytes).ok().filter(|&bytes| bytes > 0)?,
            uncompressed_bytes: 0,
            first_row,
        });
    }
    let map = ChunkMap { pages, ..ChunkMap::default() };
    map.fits(chunk).then_some(map.pages)
}
