//! Finds the pages of a column chunk: in its file's offset index, or by a walk over its page headers.
//!
//! The walk reads a few hundred bytes per page and no data, except dictionaries that are too large to be held whole.

use super::bytes::zstd_window;
use super::digests::Digests;
use super::entry::{DictionaryPage, PageEntry};
use super::header::{PageHeader, PageKind, PageLocation, parse_offset_index};
use super::map::ChunkMap;
use crate::error::Fault;
use crate::footer::{Chunk, Codec};
use crate::io::Handle;

/// Larger offset indexes are not used; a map of a million pages has about 12 MiB.
const MAX_OFFSET_INDEX_BYTES: u64 = 64 << 20;

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
            // A wrong index only costs a walk.
            Ok(None) | Err(_) => Self::from_page_headers(handle, chunk)?,
        };
        if chunk.codec == Codec::Zstd {
            let entries = map.dictionary.iter().map(|page| &page.entry).chain(&map.pages);
            for entry in entries.filter(|entry| entry.bytes.max(entry.uncompressed_bytes) as usize > whole_page_bytes) {
                map.window_bytes = map.window_bytes.max(zstd_window(handle, entry)?);
            }
        }
        if let Some(page) = &mut map.dictionary {
            *page = page.examine(handle, chunk.codec, whole_page_bytes)?;
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
        let Some(mut pages) = validated_pages(&parse_offset_index(&bytes)?, chunk) else {
            return Ok(None);
        };
        let mut dictionary = None;
        if pages.first().is_some_and(|first| first.offset > chunk.bytes.start) {
            let header = PageHeader::read(handle, chunk.bytes.start, pages[0].offset)?;
            if header.kind == PageKind::Dictionary {
                if chunk.bytes.start + header.total_bytes() > pages[0].offset {
                    return Ok(None);
                }
                dictionary = Some(DictionaryPage::new(chunk.bytes.start, &header));
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
                PageKind::Dictionary => map.dictionary = Some(DictionaryPage::new(offset, &header)),
                PageKind::Data | PageKind::DataV2 => {
                    if header.values > chunk.rows - rows {
                        return Fault::corrupt(format!(
                            "a page at {offset} declares {} rows, expected at most {}",
                            header.values,
                            chunk.rows - rows
                        ));
                    }
                    if header.values > 0 {
                        map.pages.push(PageEntry::new(offset, &header, rows));
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
}

/// Converts the offset index to pages, if it agrees with itself and the chunk.
fn validated_pages(locations: &[PageLocation], chunk: &Chunk) -> Option<Vec<PageEntry>> {
    let mut pages = Vec::with_capacity(locations.len());
    for (index, location) in locations.iter().enumerate() {
        let first_row = u32::try_from(location.first_row).ok()?;
        // A page without rows starts at the first row of the next page, or at the end.
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
