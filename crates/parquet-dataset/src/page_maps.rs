//! The page maps of a dataset's chunks, and their serialised form, which is kept beside a run.
//!
//! [`PageMaps::to_bytes`] serialises all maps. [`PageMaps::restore`] reads them back and drops the maps of files with
//! another size or footer. The maps include the digests of the bytes that were read. A file that was touched meanwhile
//! (its inode or times differ) keeps its maps and is reported.

use std::sync::{Arc, OnceLock};

use sha2::{Digest, Sha256};

use crate::error::Fault;
use crate::footer::{Chunk, Footer};
use crate::io::{Handle, Identity, STAMP_BYTES};
use crate::pages::digests::Digests;
use crate::pages::entry::{DictionaryPage, PageEntry};
use crate::pages::map::ChunkMap;

const MAGIC: &[u8] = b"parquet-dataset page map 3\n";

/// The page maps of all chunks of a dataset, each made when it is first needed.
pub(crate) struct PageMaps {
    /// The index in `chunks` of each file's first chunk.
    file_starts: Vec<usize>,
    columns: usize,
    /// Pages up to this size are held whole while they are read.
    whole_page_bytes: usize,
    /// Files with restored maps whose stamps differ from the stored ones.
    touched: Vec<bool>,
    chunks: Vec<OnceLock<Arc<ChunkMap>>>,
}

impl PageMaps {
    pub(crate) fn new(footers: &[Footer], columns: usize, whole_page_bytes: usize) -> Self {
        let mut file_starts = Vec::with_capacity(footers.len());
        let mut total = 0;
        for footer in footers {
            file_starts.push(total);
            total += footer.row_groups.len() * columns;
        }
        Self {
            file_starts,
            columns,
            whole_page_bytes,
            touched: vec![false; footers.len()],
            chunks: (0..total).map(|_| OnceLock::new()).collect(),
        }
    }

    fn slot(&self, file: usize, row_group: usize, column: usize) -> &OnceLock<Arc<ChunkMap>> {
        &self.chunks[self.file_starts[file] + row_group * self.columns + column]
    }

    /// The map of a chunk, if it has been made.
    pub(crate) fn get(&self, file: usize, row_group: usize, column: usize) -> Option<&Arc<ChunkMap>> {
        self.slot(file, row_group, column).get()
    }

    /// Returns the map of a chunk, making it if necessary. Two threads may make it at once; one result is kept.
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
        let map = Arc::new(ChunkMap::build(handle, chunk, self.whole_page_bytes)?);
        Ok(slot.get_or_init(|| map))
    }

    /// Whether a file's maps were restored, and the file was touched since they were stored.
    pub(crate) fn is_touched(&self, file: usize) -> bool {
        self.touched[file]
    }

    /// The number of page segments that were read so far.
    pub(crate) fn known_segments(&self) -> u64 {
        let maps = self.chunks.iter().filter_map(|slot| slot.get());
        maps.map(|map| map.digests.words().filter(|&word| word != 0).count() as u64).sum()
    }

    /// The number of bytes that [`PageMaps::to_bytes`] returns.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let files = self.file_starts.len() as u64 * (FILE_KEY_BYTES + STAMP_BYTES + 8) as u64;
        let maps = self.chunks.iter().filter_map(|slot| slot.get());
        let maps = maps.map(|map| (20 * map.pages.len() + 4 * map.digests.len() + 60) as u64).sum::<u64>();
        128 + files + 8 * self.chunks.len() as u64 + maps
    }

    /// Bytes of memory of all maps made so far.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let slots = size_of_val(&*self.chunks) as u64;
        slots + self.chunks.iter().filter_map(|slot| slot.get()).map(|map| map.memory_bytes()).sum::<u64>()
    }

    /// Serialises all maps made so far, for [`PageMaps::restore`].
    pub(crate) fn to_bytes(&self, footers: &[Footer], identities: &[&Identity], columns: &[String]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.kept_bytes() as usize);
        bytes.extend(MAGIC);
        bytes.extend(columns_hash(columns));
        put(&mut bytes, footers.len() as u64);
        for (file, (footer, identity)) in footers.iter().zip(identities).enumerate() {
            bytes.extend(file_key(footer, identity));
            bytes.extend(identity.stamp());
            put(&mut bytes, (footer.row_groups.len() * self.columns) as u64);
            for slot in 0..footer.row_groups.len() * self.columns {
                put_map(&mut bytes, self.chunks[self.file_starts[file] + slot].get());
            }
        }
        bytes.extend(Sha256::digest(&bytes));
        bytes
    }

    /// Reads the result of [`PageMaps::to_bytes`]. Maps of changed files are left out, and if the bytes are damaged,
    /// all maps are: a missing map is made again. Returns the number of restored chunks.
    pub(crate) fn restore(
        &mut self,
        bytes: &[u8],
        footers: &[Footer],
        identities: &[&Identity],
        columns: &[String],
        forgets_digests: bool,
    ) -> usize {
        let mut restored = 0;
        let mut taken = vec![false; footers.len()];
        let mut read_all = || -> Option<()> {
            let (body, checksum) = bytes.split_at_checked(bytes.len().checked_sub(32)?)?;
            if Sha256::digest(body)[..] != *checksum {
                return None;
            }
            let mut input = body.strip_prefix(MAGIC)?.strip_prefix(&columns_hash(columns))?;
            for _ in 0..take(&mut input)? {
                let (key, rest) = input.split_at_checked(FILE_KEY_BYTES)?;
                let (stamp, rest) = rest.split_at_checked(STAMP_BYTES)?;
                input = rest;
                let is_same = |file: &usize| file_key(&footers[*file], identities[*file]) == *key && !taken[*file];
                // If there are copies of a file, only their stamps may tell them apart.
                let same = (0..footers.len()).find(|file| is_same(file) && identities[*file].stamp() == *stamp);
                let same = same.or_else(|| (0..footers.len()).find(is_same));
                if let Some(file) = same {
                    taken[file] = true;
                    self.touched[file] = !forgets_digests && identities[file].stamp() != *stamp;
                }
                for slot in 0..take(&mut input)? as usize {
                    let map = take_map(&mut input, forgets_digests)?;
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
        // Damage was found before any map was used: the checksum covers all bytes.
        let _ = read_all();
        restored
    }
}

const FILE_KEY_BYTES: usize = 8 + 32;

fn file_key(footer: &Footer, identity: &Identity) -> [u8; FILE_KEY_BYTES] {
    let mut key = [0; FILE_KEY_BYTES];
    key[..8].copy_from_slice(&identity.bytes.to_le_bytes());
    key[8..].copy_from_slice(&footer.hash);
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

/// Writes the number of pages + 1 (0: no map), the window, the dictionary if there is one, the pages, and their
/// digests.
fn put_map(bytes: &mut Vec<u8>, map: Option<&Arc<ChunkMap>>) {
    let Some(map) = map else { return put(bytes, 0) };
    put(bytes, map.pages.len() as u64 + 1);
    put(bytes, map.window_bytes);
    bytes.push(u8::from(map.dictionary.is_some()));
    if let Some(page) = &map.dictionary {
        put_entry(bytes, &page.entry);
        put(bytes, page.held_bytes);
        put(bytes, page.largest_value_bytes);
    }
    map.pages.iter().for_each(|page| put_entry(bytes, page));
    map.digests.words().for_each(|word| bytes.extend(word.to_le_bytes()));
}

fn take_map(input: &mut &[u8], forgets_digests: bool) -> Option<Option<ChunkMap>> {
    let Some(pages) = take(input)?.checked_sub(1) else { return Some(None) };
    let window_bytes = take(input)?;
    let (&has_dictionary, rest) = input.split_first()?;
    *input = rest;
    let mut map = ChunkMap { window_bytes, ..ChunkMap::default() };
    if has_dictionary == 1 {
        let entry = take_entry(input)?;
        map.dictionary = Some(DictionaryPage { entry, held_bytes: take(input)?, largest_value_bytes: take(input)? });
    }
    for _ in 0..pages {
        map.pages.push(take_entry(input)?);
    }
    map.pages.shrink_to_fit();
    map.digests = Digests::new(map.dictionary.as_ref().map(|page| &page.entry), &map.pages);
    for index in 0..map.digests.len() {
        let (word, rest) = input.split_first_chunk::<4>()?;
        *input = rest;
        map.digests.set(index, if forgets_digests { 0 } else { u32::from_le_bytes(*word) });
    }
    Some(Some(map))
}
