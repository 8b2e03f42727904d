//! A dataset: any rows of any files, in the requested order, within the allowed memory.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::cache::BlockCache;
use crate::chunk_rows::ChunkRows;
use crate::error::{Error, Fault, Location};
use crate::footer::Footer;
use crate::io::{Files, Handle, Identity, IoLog};
use crate::layout::{FileLayout, Layout, hex};
use crate::limits::{Limits, PartOf, Parts};
use crate::page_maps::PageMaps;
use crate::pages::bytes::WHOLE_PAGE_BYTES;
use crate::pages::map::ChunkMap;
use crate::rows::Rows;

/// The most memory that is reserved from a footer's declared sizes; more is allocated as values arrive.
const MAX_RESERVED_BYTES: u64 = 1 << 20;
const MAX_RESERVED_ROWS: usize = 1 << 18;
/// Values up to this size are held in blocks. A longer value is read again each time it is needed.
const HELD_VALUE_BYTES: u64 = 64 << 10;

/// The data kept between reads. The rows are the same in every mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// Every block, from its first decoding on.
    InMemory,
    /// Decoded blocks up to this many bytes, the most recently used ones.
    RowGroupCache {
        /// Bytes of decoded values, their offsets and null bits.
        bytes: u64,
    },
    /// Nothing but metadata. Every read decodes the pages it needs and drops them.
    UltraLowMem,
}

/// Options for opening a dataset.
#[derive(Debug, Clone)]
pub struct DatasetOptions {
    /// Columns to read, by dotted path, in the order of the returned values.
    pub columns: Vec<String>,
    /// Data to keep between reads; [`Dataset::set_residency`] changes it.
    pub residency: Residency,
    /// Rows that are decoded and held together: block `k` is the rows `[k * block_rows, (k + 1) * block_rows)`. Best
    /// equal to the block size of the order in which rows are read.
    pub block_rows: u32,
    /// A larger value is an error, not an allocation.
    pub max_value_bytes: u64,
    /// A read of more bytes of values is an error, not an allocation. At most 4 GiB - 1.
    pub max_read_bytes: u64,
    /// Pages up to this size are held whole while they are decoded; larger ones are streamed.
    pub whole_page_bytes: usize,
    /// An earlier result of [`Dataset::page_map`] for these files. Parts for other files are ignored.
    pub page_map: Option<Vec<u8>>,
    /// Whether to forget the digests in `page_map`: changed data is then accepted.
    pub forget_digests: bool,
    /// Records every positional read.
    pub io_log: Option<Arc<IoLog>>,
}

impl Default for DatasetOptions {
    fn default() -> Self {
        Self {
            columns: Vec::new(),
            residency: Residency::UltraLowMem,
            block_rows: 4096,
            max_value_bytes: 64 << 20,
            max_read_bytes: 1 << 30,
            whole_page_bytes: WHOLE_PAGE_BYTES,
            page_map: None,
            forget_digests: false,
            io_log: None,
        }
    }
}

impl DatasetOptions {
    /// The named columns, everything else at its default.
    pub fn new<S: Into<String>>(columns: impl IntoIterator<Item = S>) -> Self {
        Self { columns: columns.into_iter().map(Into::into).collect(), ..Self::default() }
    }
}

/// Rows of a set of parquet files. Rows are numbered over all files, in the order the files were given.
///
/// Any number of threads may read at once. Each thread takes the memory that [`Dataset::costs`] states for decoding,
/// and holds no lock while it reads or decodes.
pub struct Dataset {
    pub(crate) files: Files,
    pub(crate) footers: Vec<Footer>,
    pub(crate) maps: PageMaps,
    pub(crate) options: DatasetOptions,
    /// Every row group with rows, in order.
    groups: Vec<Group>,
    rows: u64,
    residency: Mutex<Residency>,
    cache: BlockCache,
}

/// The position of a row group among all rows.
struct Group {
    first_row: u64,
    /// The group's first row within its file.
    first_row_in_file: u64,
    file: usize,
    row_group: usize,
}

impl Dataset {
    /// Opens a dataset. Reads only the footer of each file.
    pub fn open(files: &[PathBuf], options: &DatasetOptions) -> Result<Self, Error> {
        let mut options = options.clone();
        options.block_rows = options.block_rows.max(1);
        options.max_read_bytes = options.max_read_bytes.min(u64::from(u32::MAX));
        let Some(first) = files.first() else { return Err(Error::NoFiles) };
        if options.columns.is_empty() {
            return Err(Error::NoColumns);
        }
        let mut opened = Files::new(options.io_log.clone());
        let mut footers = Vec::with_capacity(files.len());
        for path in files {
            let (handle, identity) = opened.add(path)?;
            let footer = Footer::read(path, &handle, identity.bytes, &options.columns);
            footers.push(footer.map_err(|error| opened.changed_or(opened.len() - 1, error))?);
        }
        let (groups, rows) = groups(&footers);
        if rows == 0 {
            return Err(Error::NoRows { path: first.clone(), files: files.len() });
        }
        let mut maps = PageMaps::new(&footers, options.columns.len(), options.whole_page_bytes);
        if let Some(bytes) = options.page_map.take() {
            let identities: Vec<&Identity> = (0..footers.len()).map(|file| opened.identity(file)).collect();
            maps.restore(&bytes, &footers, &identities, &options.columns, options.forget_digests);
        }
        let residency = options.residency;
        let dataset = Self {
            files: opened,
            footers,
            maps,
            options,
            groups,
            rows,
            residency: Mutex::new(residency),
            cache: BlockCache::default(),
        };
        dataset.set_residency(residency);
        Ok(dataset)
    }

    /// Number of rows in all files.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The columns that are read, in order.
    pub fn columns(&self) -> &[String] {
        &self.options.columns
    }

    /// Rows of a block: they are decoded and held together.
    pub fn block_rows(&self) -> u32 {
        self.options.block_rows
    }

    /// The files' layout, which includes their fingerprint.
    pub fn layout(&self) -> Layout {
        let files = self.footers.iter().enumerate().map(|(file, footer)| FileLayout {
            path: self.files.path(file).to_owned(),
            bytes: self.files.identity(file).bytes,
            row_groups: footer.row_groups.iter().map(|row_group| row_group.rows).collect(),
            footer_sha256: hex(&footer.hash),
        });
        Layout { files: files.collect() }
    }

    /// The data kept between reads.
    pub fn residency(&self) -> Residency {
        *self.residency.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes which data is kept between reads. Data that may no longer be kept is dropped at once.
    pub fn set_residency(&self, residency: Residency) {
        *self.residency.lock().unwrap_or_else(PoisonError::into_inner) = residency;
        self.cache.set_capacity(self.cache_bytes(residency));
    }

    /// Drops every decoded block.
    pub fn clear_cache(&self) {
        self.cache.clear();
    }

    /// Bytes of decoded blocks in memory now.
    pub fn cached_bytes(&self) -> u64 {
        self.cache.held_bytes()
    }

    /// Reads a range of rows.
    pub fn read_range(&self, range: Range<u64>) -> Result<Rows, Error> {
        self.read(std::slice::from_ref(&range))
    }

    /// Reads ranges of rows, in the order given; ranges may overlap.
    pub fn read(&self, ranges: &[Range<u64>]) -> Result<Rows, Error> {
        let ranges: Vec<_> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
        if let Some(beyond) = ranges.iter().find(|range| range.end > self.rows) {
            return Err(Error::RowOutOfRange { row: beyond.end - 1, rows: self.rows });
        }
        if ranges.windows(2).all(|pair| pair[0].end <= pair[1].start) {
            return self.read_sorted(&ranges, &mut self.limits(self.options.max_read_bytes));
        }
        let rows: Vec<u64> = ranges.into_iter().flatten().collect();
        self.read_rows(&rows)
    }

    /// Reads rows in the given order; a row may occur more than once. Each page is opened only once, whatever the
    /// order.
    pub fn read_rows(&self, rows: &[u64]) -> Result<Rows, Error> {
        self.read_in_order(rows, &mut self.limits(self.options.max_read_bytes))
    }

    /// Reads rows in the given order, but only a part of each value of more than `whole` bytes. `part` gets the row, the
    /// column (in the order of [`Dataset::columns`]) and the value's length, and returns the range of bytes to read.
    /// Other bytes are never held. [`Rows::value_bytes`] gives the length of the whole value. The cut may fall within a
    /// character.
    pub fn read_parts(&self, rows: &[u64], whole: u64, part: &PartOf<'_>) -> Result<Rows, Error> {
        self.read_parts_within(rows, self.options.max_read_bytes, whole, part)
    }

    /// Like [`Dataset::read_parts`], but fails with an error that [is a read too large](Error::is_read_too_large)
    /// before values take more than `max_bytes`. Fewer rows may then fit.
    pub fn read_parts_within(
        &self,
        rows: &[u64],
        max_bytes: u64,
        whole: u64,
        part: &PartOf<'_>,
    ) -> Result<Rows, Error> {
        let mut limits = self.limits(max_bytes.min(self.options.max_read_bytes));
        limits.parts = Some(Parts { whole, part });
        self.read_in_order(rows, &mut limits)
    }

    fn read_in_order(&self, rows: &[u64], limits: &mut Limits<'_>) -> Result<Rows, Error> {
        if let Some(&row) = rows.iter().find(|&&row| row >= self.rows) {
            return Err(Error::RowOutOfRange { row, rows: self.rows });
        }
        let mut distinct = rows.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for &row in &distinct {
            match ranges.last_mut() {
                Some(last) if last.end == row => last.end += 1,
                _ => ranges.push(row..row + 1),
            }
        }
        let limit = limits.read_bytes;
        let read = self.read_sorted(&ranges, limits)?;
        if rows.len() == distinct.len() && rows.is_sorted() {
            return Ok(read);
        }
        // Every requested row is in `distinct`.
        let order: Vec<u32> = rows.iter().map(|row| distinct.partition_point(|found| found < row) as u32).collect();
        if rows.len() > distinct.len() {
            let bytes = read.gathered_bytes(&order);
            if bytes > limit {
                let place = self.place_of(rows[0]);
                return Err(Fault::TooLarge { what: "one read", bytes, limit }.at(place));
            }
        }
        Ok(read.gather(&order))
    }

    /// Reads ranges that are ascending, disjoint and not empty. Uses blocks if the cache has any capacity.
    fn read_sorted(&self, ranges: &[Range<u64>], limits: &mut Limits<'_>) -> Result<Rows, Error> {
        let mut rows = Rows::new(self.options.columns.len());
        // A row of nulls has no bytes, but has an offset in each column.
        let count: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let offsets = count.saturating_mul(4 * self.options.columns.len() as u64);
        if let (Some(first), true) = (ranges.first(), offsets > self.options.max_read_bytes) {
            let limit = self.options.max_read_bytes;
            let fault = Fault::TooLarge { what: "one read", bytes: offsets, limit };
            return Err(fault.at(self.place_of(first.start)));
        }
        let capacity = self.cache.capacity();
        if capacity == 0 {
            self.read_direct(ranges, &mut rows, limits)?;
            return Ok(rows);
        }
        let parts = self.split_by_block(ranges);
        let mut blocks: Vec<u64> = parts.iter().map(|part| self.block_of(part.start)).collect();
        blocks.dedup();
        // Blocks that evict each other would each be decoded for a few rows.
        let fits = (blocks.len() as u64).saturating_mul(self.estimated_block_bytes()) <= capacity || blocks.len() == 1;
        if fits {
            // Blocks that no reader decodes yet come first, so that several readers decode different blocks.
            for &block in blocks.iter().filter(|&&block| !self.cache.contains(block)) {
                self.block(block)?;
            }
        }
        let mut direct: Vec<Range<u64>> = Vec::new();
        for part in parts.chunk_by(|a, b| self.block_of(a.start) == self.block_of(b.start)) {
            let block = self.block_of(part[0].start);
            let held = match fits || self.cache.contains(block) {
                true => self.block(block)?,
                false => None,
            };
            let first = block * u64::from(self.options.block_rows);
            let local = |range: &Range<u64>| (range.start - first) as usize..(range.end - first) as usize;
            // A value that is too long for a block is read from the file, together with the other requested rows of its
            // block.
            let held = held.filter(|held| !part.iter().any(|range| held.has_cuts(local(range))));
            let Some(held) = held else {
                direct.extend_from_slice(part);
                continue;
            };
            self.read_direct(&std::mem::take(&mut direct), &mut rows, limits)?;
            for range in part {
                append_held(&held, local(range), range.start, &mut rows, limits)
                    .map_err(|fault| fault.at(self.place_of(range.start)))?;
            }
        }
        self.read_direct(&direct, &mut rows, limits)?;
        Ok(rows)
    }

    fn block_of(&self, row: u64) -> u64 {
        row / u64::from(self.options.block_rows)
    }

    fn split_by_block(&self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        let block_rows = u64::from(self.options.block_rows);
        let mut parts = Vec::with_capacity(ranges.len());
        for range in ranges {
            let mut start = range.start;
            while start < range.end {
                let end = ((start / block_rows + 1) * block_rows).min(range.end);
                parts.push(start..end);
                start = end;
            }
        }
        parts
    }

    /// Returns a whole block, or `None` if it is too large for the cache.
    fn block(&self, block: u64) -> Result<Option<Arc<Rows>>, Error> {
        let first = block * u64::from(self.options.block_rows);
        let range = first..(first + u64::from(self.options.block_rows)).min(self.rows);
        let count = range.end - range.start;
        let nothing = |_: u64, _: usize, _: u64| 0..0;
        self.cache.get_or_load(block, self.estimated_block_bytes(), |loading| {
            // The ends of values, and the bits for nulls.
            let offsets = (count * 4 + count / 8 + 8) * self.options.columns.len() as u64;
            let bytes = loading.reserved().saturating_sub(offsets);
            let mut admitted = bytes;
            let mut more = |missing: u64| {
                // While a column grows, its old and its new buffer exist at once.
                let step = missing.max(admitted / 4);
                let is_allowed = admitted + step <= self.options.max_read_bytes;
                let fits = is_allowed && loading.reserve(offsets + 2 * (admitted + step) + admitted / 4);
                admitted += if fits { step } else { 0 };
                if fits { step } else { 0 }
            };
            let mut limits = self.limits(bytes.min(self.options.max_read_bytes));
            limits.more = Some(&mut more);
            limits.parts = Some(Parts { whole: HELD_VALUE_BYTES, part: &nothing });
            let mut rows = Rows::new(self.options.columns.len());
            match self.read_direct(std::slice::from_ref(&range), &mut rows, &mut limits) {
                Ok(()) => Ok(Some(rows)),
                // The cache's limit, not the caller's: the requested rows may still be read without the block.
                Err(error) if error.is_read_too_large() => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    fn limits<'a>(&self, read_bytes: u64) -> Limits<'a> {
        let value_bytes = self.options.max_value_bytes;
        Limits { value_bytes, read_bytes, left: read_bytes, more: None, parts: None, column: 0 }
    }

    /// Reads ascending, disjoint ranges from the files.
    fn read_direct(&self, ranges: &[Range<u64>], rows: &mut Rows, limits: &mut Limits<'_>) -> Result<(), Error> {
        let mut pending = ranges.iter().cloned();
        let mut next = pending.next();
        let mut is_first = true;
        while let Some(range) = &next {
            let group = &self.groups[self.groups.partition_point(|group| group.first_row <= range.start) - 1];
            let found = &self.footers[group.file].row_groups[group.row_group];
            if std::mem::take(&mut is_first) {
                // Reserve room for the average bytes of the values, from the footer, if that is little.
                let count: u64 = ranges.iter().map(|range| range.end - range.start).sum();
                for (column, chunk) in found.chunks.iter().enumerate() {
                    let mean = chunk.decoded_bytes() / u64::from(chunk.rows.max(1));
                    // Only a part of a long value may be wanted.
                    let wanted = limits.parts.as_ref().filter(|parts| mean > parts.whole);
                    let wanted = wanted.map_or(mean, |parts| {
                        let part = (parts.part)(range.start, column, mean);
                        part.end.saturating_sub(part.start)
                    });
                    let bytes = wanted.saturating_mul(count);
                    let bytes = bytes.min(limits.left).min(MAX_RESERVED_BYTES) as usize;
                    rows.column_mut(column).reserve((count as usize).min(MAX_RESERVED_ROWS), bytes);
                }
            }
            let end = group.first_row + found.rows;
            let mut local = Vec::new();
            let mut count = 0;
            while let Some(range) = next.clone().filter(|range| range.start < end) {
                let stop = range.end.min(end);
                // Row groups have at most u32::MAX rows.
                local.push((range.start - group.first_row) as u32..(stop - group.first_row) as u32);
                count += (stop - range.start) as usize;
                next = if stop < range.end { Some(stop..range.end) } else { pending.next() };
            }
            self.read_group(group, &local, rows, limits)?;
            rows.complete(count);
        }
        Ok(())
    }

    fn read_group(
        &self,
        group: &Group,
        ranges: &[Range<u32>],
        rows: &mut Rows,
        limits: &mut Limits<'_>,
    ) -> Result<(), Error> {
        let handle = self.files.handle(group.file)?;
        let (whole_page_bytes, first_row) = (self.options.whole_page_bytes, group.first_row);
        for column in 0..self.options.columns.len() {
            let chunk = &self.footers[group.file].row_groups[group.row_group].chunks[column];
            let map = self.chunk_map(&handle, group.file, group.row_group, column)?;
            let reader = ChunkRows { handle: &handle, chunk, map, first_row, whole_page_bytes };
            limits.column = column;
            reader.read(ranges, rows.column_mut(column), limits).map_err(|(fault, page_rows)| {
                let mut place = self.place(group.file, group.row_group, column);
                let first = group.first_row_in_file;
                place.rows = Some(first + u64::from(page_rows.start)..first + u64::from(page_rows.end));
                self.files.changed_or(group.file, fault.at(place))
            })?;
        }
        Ok(())
    }

    pub(crate) fn chunk_map(
        &self,
        handle: &Handle,
        file: usize,
        row_group: usize,
        column: usize,
    ) -> Result<&Arc<ChunkMap>, Error> {
        let chunk = &self.footers[file].row_groups[row_group].chunks[column];
        self.maps
            .get_or_build((file, row_group, column), handle, chunk)
            .map_err(|fault| self.files.changed_or(file, fault.at(self.place(file, row_group, column))))
    }

    fn place(&self, file: usize, row_group: usize, column: usize) -> Location {
        Location {
            path: self.files.path(file).to_owned(),
            row_group: Some(row_group),
            column: Some(self.options.columns[column].clone()),
            rows: None,
        }
    }

    fn place_of(&self, row: u64) -> Location {
        let group = &self.groups[self.groups.partition_point(|group| group.first_row <= row) - 1];
        let row = group.first_row_in_file + row - group.first_row;
        Location {
            path: self.files.path(group.file).to_owned(),
            row_group: Some(group.row_group),
            column: None,
            rows: Some(row..row + 1),
        }
    }

    /// Makes the missing page maps, so that a read never walks page headers and [`Dataset::costs`] knows the pages. Reads
    /// page headers or offset indexes. The only data read are dictionaries that are too large to be held whole.
    ///
    /// # Errors
    /// Errors of reading; [`Error::Rewritten`] if the pages of a [touched file](Dataset::touched_files) have moved.
    pub fn find_pages(&self) -> Result<(), Error> {
        for (file, footer) in self.footers.iter().enumerate() {
            let handle = self.files.handle(file)?;
            for row_group in 0..footer.row_groups.len() {
                for column in 0..self.options.columns.len() {
                    let map = self.chunk_map(&handle, file, row_group, column)?;
                    if self.maps.is_touched(file) {
                        self.compare_pages(&handle, map, (file, row_group, column))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn compare_pages(&self, handle: &Handle, map: &ChunkMap, at: (usize, usize, usize)) -> Result<(), Error> {
        let (file, row_group, column) = at;
        let chunk = &self.footers[file].row_groups[row_group].chunks[column];
        let found = ChunkMap::build(handle, chunk, self.options.whole_page_bytes);
        let compared = match found {
            Ok(found) => map.first_difference(&found).map_or(Ok(()), |at| Err(Fault::Rewritten { at })),
            // The chunk had pages when the map was made.
            Err(Fault::Corrupt(_) | Fault::UnexpectedEof(_)) => Err(Fault::Rewritten { at: chunk.bytes.start }),
            Err(fault) => Err(fault),
        };
        compared.map_err(|fault| self.files.changed_or(file, fault.at(self.place(file, row_group, column))))
    }

    /// Files with pages from [`DatasetOptions::page_map`] that were touched since that map was made: size and footer
    /// are the same, inode or times are not. Pages that were read before are checked when they are read again. For
    /// other pages, a change cannot be detected.
    pub fn touched_files(&self) -> Vec<&Path> {
        (0..self.footers.len()).filter(|&file| self.maps.is_touched(file)).map(|file| self.files.path(file)).collect()
    }

    /// The number of page segments with a known digest, from this process's reads or from `page_map`. Each further
    /// segment changes the result of [`Dataset::page_map`].
    pub fn known_segments(&self) -> u64 {
        self.maps.known_segments()
    }

    /// The page maps of all chunks, to pass to [`DatasetOptions::page_map`] later. Makes the missing maps, as
    /// [`Dataset::find_pages`] does.
    pub fn page_map(&self) -> Result<Vec<u8>, Error> {
        self.find_pages()?;
        let identities: Vec<&Identity> = (0..self.footers.len()).map(|file| self.files.identity(file)).collect();
        Ok(self.maps.to_bytes(&self.footers, &identities, &self.options.columns))
    }
}

/// Appends rows of a block; for values that are wanted in part, only that part.
fn append_held(
    held: &Rows,
    local: Range<usize>,
    first_row: u64,
    rows: &mut Rows,
    limits: &mut Limits<'_>,
) -> Result<(), Fault> {
    let is_whole = match &limits.parts {
        None => true,
        Some(parts) => parts.whole >= HELD_VALUE_BYTES || held.range_bytes(local.clone()) <= parts.whole,
    };
    if is_whole {
        limits.admit_all(held.range_bytes(local.clone()))?;
        rows.append(held, local);
        return Ok(());
    }
    for column in 0..held.columns() {
        limits.column = column;
        let to = rows.column_mut(column);
        for row in local.clone() {
            let Some(value) = held.bytes(column, row) else {
                to.push_null();
                continue;
            };
            let part = limits.admit(first_row + (row - local.start) as u64, value.len() as u64)?;
            to.extend(&value[part.start as usize..part.end as usize]);
            to.finish(value.len() as u64, part.end - part.start < value.len() as u64);
        }
    }
    rows.complete(local.len());
    Ok(())
}

fn groups(footers: &[Footer]) -> (Vec<Group>, u64) {
    let mut groups = Vec::new();
    let mut first_row = 0;
    for (file, footer) in footers.iter().enumerate() {
        let mut first_row_in_file = 0;
        for (row_group, found) in footer.row_groups.iter().enumerate().filter(|(_, found)| found.rows > 0) {
            groups.push(Group { first_row, first_row_in_file, file, row_group });
            first_row += found.rows;
            first_row_in_file += found.rows;
        }
    }
    (groups, first_row)
}
