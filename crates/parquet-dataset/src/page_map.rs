//! Page maps: where each page of a column chunk lies and which rows it holds.
//!
//! With a page map every block of rows is a seek. It comes from the file's offset index where there is a
//! sound one; otherwise from one walk over the page headers, a few hundred bytes per page and none of the
//! data. A chunk's map is made when the chunk is first read and kept from then on: 24 bytes a page.
//!
//! [`PageMaps::to_bytes`] gives all maps to whoever wants to keep them beside a run, [`PageMaps::restore`]
//! takes them back and drops those of files that are not the same any more: another size, modification time
//! or footer.
//!
//! Invariant: within a map, pages lie in the chunk's bytes, start at row 0, and each starts after the one
//! before it, in rows and in bytes. What a page declares about itself is compared with the map when it is read.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use sha2::{Digest, Sha256};

use crate::error::Fault;
use crate::footer::{Chunk, Footer};
use crate::io::{Handle, Identity};
use crate::page_header::{PageHeader, PageKind, PageLocation, parse_offset_index};

/// An offset index of more bytes is not believed; a map of a million pages has about 12 MiB.
const MAX_OFFSET_INDEX_BYTES: u64 = 64 << 20;
const MAGIC: &[u8] = b"parquet-dataset page map 1\n";

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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ChunkMap {
    pub(crate) dictionary: Option<PageEntry>,
    /// Data pages, in the order of their rows. Pages without rows are left out.
    pub(crate) pages: Vec<PageEntry>,
}

impl ChunkMap {
    /// Finds the pages of a chunk: from its offset index, or from its page headers.
    pub(crate) fn build(handle: &Handle, chunk: &Chunk) -> Result<Self, Fault> {
        if chunk.rows == 0 {
            return Ok(Self::default());
        }
        match Self::from_offset_index(handle, chunk) {
            Ok(Some(map)) => Ok(map),
            Err(Fault::File(error)) => Err(Fault::File(error)),
            // An index that is wrong costs a walk, nothing else.
            Ok(None) | Err(_) => Self::from_page_headers(handle, chunk),
        }
    }

    fn from_offset_index(handle: &Handle, chunk: &Chunk) -> Result<Option<Self>, Fault> {
        let Some(range) = chunk.offset_index.clone().filter(|range| range.end - range.start <= MAX_OFFSET_INDEX_BYTES)
        else {
            return Ok(None);
        };
        let mut bytes = vec![0; (range.end - range.start) as usize];
        handle.read_exact_at(&mut bytes, range.start)?;
        let Some(pages) = sound_pages(&parse_offset_index(&bytes)?, chunk) else {
            return Ok(None);
        };
        let mut dictionary = None;
        if pages.first().is_some_and(|first| first.offset > chunk.bytes.start) {
            let header = PageHeader::read(handle, chunk.bytes.start, pages[0].offset)?;
            if header.kind == PageKind::Dictionary {
                if chunk.bytes.start + header.total_bytes() > pages[0].offset {
                    return Ok(None);
                }
                dictionary = Some(entry(chunk.bytes.start, &header, 0));
            }
        }
        Ok(Some(Self { dictionary, pages }))
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
                PageKind::Dictionary => map.dictionary = Some(entry(offset, &header, 0)),
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
        (size_of::<Self>() + self.pages.capacity() * size_of::<PageEntry>()) as u64
    }

    /// Whether the map could be that of `chunk`.
    fn fits(&self, chunk: &Chunk) -> bool {
        let inside = |page: &PageEntry| {
            page.offset >= chunk.bytes.start && page.offset.saturating_add(u64::from(page.bytes)) <= chunk.bytes.end
        };
        let ascending = self.pages.windows(2).all(|pair| {
            pair[0].first_row < pair[1].first_row && pair[0].offset + u64::from(pair[0].bytes) <= pair[1].offset
        });
        self.dictionary.iter().chain(&self.pages).all(inside)
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
    let map = ChunkMap { dictionary: None, pages };
    map.fits(chunk).then_some(map.pages)
}

/// The page maps of all chunks of a dataset, each made when it is first needed.
pub(crate) struct PageMaps {
    /// Where each file's chunks start in `chunks`.
    file_starts: Vec<usize>,
    columns: usize,
    chunks: Vec<OnceLock<Arc<ChunkMap>>>,
}

impl PageMaps {
    pub(crate) fn new(footers: &[Footer], columns: usize) -> Self {
        let mut file_starts = Vec::with_capacity(footers.len());
        let mut total = 0;
        for footer in footers {
            file_starts.push(total);
            total += footer.row_groups.len() * columns;
        }
        Self { file_starts, columns, chunks: (0..total).map(|_| OnceLock::new()).collect() }
    }

    fn slot(&self, file: usize, row_group: usize, column: usize) -> &OnceLock<Arc<ChunkMap>> {
        &self.chunks[self.file_starts[file] + row_group * self.columns + column]
    }

    /// The map of a chunk, if it has been made.
    pub(crate) fn get(&self, file: usize, row_group: usize, column: usize) -> Option<&Arc<ChunkMap>> {
        self.slot(file, row_group, column).get()
    }

    /// The map of a chunk; made now if it is not there. Two threads may make it at once; one is kept.
    pub(crate) fn get_or_build(
        &self,
        (file, row_group, column): (usize, usize, usize),
        handle: &Handle,
        chunk: &Chunk,
    ) -> Result<&Arc<ChunkMap>, Fault> {
        let slot = self.slot(file, row_group, column);
        if let Some(map) = slot.get() {
            return Ok(map);
        }
        let map = Arc::new(ChunkMap::build(handle, chunk)?);
        Ok(slot.get_or_init(|| map))
    }

    /// The bytes that all maps made so far take in memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let slots = size_of_val(&*self.chunks) as u64;
        slots + self.chunks.iter().filter_map(|slot| slot.get()).map(|map| map.memory_bytes()).sum::<u64>()
    }

    /// Everything made so far, for [`PageMaps::restore`].
    pub(crate) fn to_bytes(&self, footers: &[Footer], identities: &[&Identity], columns: &[String]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(columns_hash(columns));
        put(&mut bytes, footers.len() as u64);
        for (file, (footer, identity)) in footers.iter().zip(identities).enumerate() {
            bytes.extend(file_key(footer, identity));
            put(&mut bytes, (footer.row_groups.len() * self.columns) as u64);
            for slot in 0..footer.row_groups.len() * self.columns {
                put_map(&mut bytes, self.chunks[self.file_starts[file] + slot].get());
            }
        }
        bytes.extend(Sha256::digest(&bytes));
        bytes
    }

    /// Takes back what [`PageMaps::to_bytes`] gave. Maps of files that are not the same any more are left out,
    /// and so is everything if the bytes are damaged: a map that is missing is made again. Returns how many
    /// chunks were restored.
    pub(crate) fn restore(
        &mut self,
        bytes: &[u8],
        footers: &[Footer],
        identities: &[&Identity],
        columns: &[String],
    ) -> usize {
        let mut restored = 0;
        let mut read_all = || -> Option<()> {
            let (body, checksum) = bytes.split_at_checked(bytes.len().checked_sub(32)?)?;
            if Sha256::digest(body)[..] != *checksum {
                return None;
            }
            let mut input = body.strip_prefix(MAGIC)?.strip_prefix(&columns_hash(columns))?;
            for _ in 0..take(&mut input)? {
                let (key, rest) = input.split_at_checked(FILE_KEY_BYTES)?;
                input = rest;
                let same = (0..footers.len()).find(|&file| file_key(&footers[file], identities[file]) == *key);
                for slot in 0..take(&mut input)? as usize {
                    let map = take_map(&mut input)?;
                    let (Some(file), Some(map)) = (same, map) else { continue };
                    let (row_group, column) = (slot / self.columns, slot % self.columns);
                    let chunk = footers[file].row_groups.get(row_group)?.chunks.get(column)?;
                    if map.fits(chunk) && self.slot(file, row_group, column).set(Arc::new(map)).is_ok() {
                        restored += 1;
                    }
                }
            }
            Some(())
        };
        // Damage is found before anything is used: the checksum covers all of it.
        let _ = read_all();
        restored
    }
}

const FILE_KEY_BYTES: usize = 8 + 16 + 32;

fn file_key(footer: &Footer, identity: &Identity) -> [u8; FILE_KEY_BYTES] {
    let mut key = [0; FILE_KEY_BYTES];
    key[..8].copy_from_slice(&identity.bytes.to_le_bytes());
    key[8..24].copy_from_slice(&identity.modified_ns.to_le_bytes());
    key[24..].copy_from_slice(&footer.hash);
    key
}

fn columns_hash(columns: &[String]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for column in columns {
        hash.update((column.len() as u64).to_le_bytes());
        hash.update(column);
    }
    hash.finalize().into()
}

fn put(bytes: &mut Vec<u8>, value: u64) {
    bytes.extend(value.to_le_bytes());
}

fn take(input: &mut &[u8]) -> Option<u64> {
    let (value, rest) = input.split_first_chunk::<8>()?;
    *input = rest;
    Some(u64::from_le_bytes(*value))
}

fn put_entry(bytes: &mut Vec<u8>, page: &PageEntry) {
    put(bytes, page.offset);
    bytes.extend(page.bytes.to_le_bytes());
    bytes.extend(page.uncompressed_bytes.to_le_bytes());
    bytes.extend(page.first_row.to_le_bytes());
}

fn take_entry(input: &mut &[u8]) -> Option<PageEntry> {
    let offset = take(input)?;
    let mut words = [0u32; 3];
    for word in &mut words {
        let (value, rest) = input.split_first_chunk::<4>()?;
        *input = rest;
        *word = u32::from_le_bytes(*value);
    }
    Some(PageEntry { offset, bytes: words[0], uncompressed_bytes: words[1], first_row: words[2] })
}

/// Number of entries + 1 (0: no map), whether the first is a dictionary, the entries.
fn put_map(bytes: &mut Vec<u8>, map: Option<&Arc<ChunkMap>>) {
    let Some(map) = map else { return put(bytes, 0) };
    let entries = map.dictionary.iter().chain(&map.pages);
    put(bytes, entries.clone().count() as u64 + 1);
    bytes.push(u8::from(map.dictionary.is_some()));
    entries.for_each(|page| put_entry(bytes, page));
}

fn take_map(input: &mut &[u8]) -> Option<Option<ChunkMap>> {
    let Some(entries) = take(input)?.checked_sub(1) else { return Some(None) };
    let (&has_dictionary, rest) = input.split_first()?;
    *input = rest;
    let mut map = ChunkMap::default();
    for index in 0..entries {
        let page = take_entry(input)?;
        match index == 0 && has_dictionary == 1 {
            true => map.dictionary = Some(page),
            false => map.pages.push(page),
        }
    }
    map.pages.shrink_to_fit();
    Some(Some(map))
}
