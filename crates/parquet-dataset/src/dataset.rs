//! A dataset: any rows of any files, in the order asked, within the memory allowed.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::cache::BlockCache;
use crate::chunk_rows::ChunkRows;
use crate::error::{Error, Fault, Place};
use crate::footer::Footer;
use crate::io::{Files, Handle, Identity, IoLog};
use crate::layout::{FileLayout, Layout, hex};
use crate::limits::{Limits, PartOf, Parts};
use crate::page_maps::PageMaps;
use crate::pages::bytes::WHOLE_PAGE_BYTES;
use crate::pages::map::ChunkMap;
use crate::rows::Rows;

/// Memory reserved on a footer's word; more is taken as values arrive.
const MAX_RESERVED_BYTES: u64 = 1 << 20;
const MAX_RESERVED_ROWS: usize = 1 << 18;
/// Values up to this size are held in blocks. A longer one is read again each time that it is wanted.
const HELD_VALUE_BYTES: u64 = 64 << 10;

/// The data kept between reads. The rows are the same in every mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// Every block, once it has been decoded.
    InMemory,
    /// Decoded blocks, the most recently used ones, up to this many bytes.
    RowGroupCache {
        /// Bytes of decoded values, their offsets and null bits.
        bytes: u64,
    },
    /// Nothing but metadata. Every read decodes the pages it needs and drops them.
    UltraLowMem,
}

/// How to open a dataset.
#[derive(Debug, Clone)]
pub struct DatasetOptions {
    /// The columns to read, by dotted path, in the order in which values are wanted.
    pub columns: Vec<String>,
    /// The data to keep between reads; [`Dataset::set_residency`] changes it.
    pub residency: Residency,
    /// Rows that are decoded and held together: block `k` is the rows `[k * block_rows, (k + 1) * block_rows)`.
    /// Best the same as the blocks of the order in which rows are read.
    pub block_rows: u32,
    /// A larger value is an error, not an allocation.
    pub max_value_bytes: u64,
    /// A read of more bytes of values is an error, not an allocation. At most 4 GiB - 1.
    pub max_read_bytes: u64,
    /// Pages up to this size are held whole while they are decoded; larger ones are streamed.
    pub whole_page_bytes: usize,
    /// An earlier result of [`Dataset::page_map`] for these files. Parts that do not fit are ignored.
    pub page_map: Option<Vec<u8>>,
    /// Whether what `page_map` knows of the pages' bytes is forgotten: changed data is then welcome.
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
/// Any number of threads may read at once; each holds what [`Dataset::costs`] says about decoding, and no lock
/// while it reads or decodes.
pub struct Dataset {
    pub(crate) files: Files,
    pub(crate) footers: Vec<Footer>,
    pub(crate) maps: PageMaps,
    pub(crate) options: DatasetOptions,
    /// Every row group that has rows, in order.
    groups: Vec<Group>,
    rows: u64,
    residency: Mutex<Residency>,
    cache: BlockCache,
}

/// Where a row group lies among all rows.
struct Group {
    first_row: u64,
    /// Its first row within its file.
    first_row_in_file: u64,
    file: usize,
    row_group: usize,
}

impl Dataset {
    /// Opens a dataset: reads the footer of each file, nothing else.
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

    /// How many rows there are, over all files.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The columns that are read, in order.
    pub fn columns(&self) -> &[String] {
        &self.options.columns
    }

    /// The rows that are decoded and held together.
    pub fn block_rows(&self) -> u32 {
        self.options.block_rows
    }

    /// The files' shape, and with it their fingerprint.
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

    /// Changes what is held between reads. What may not be held any more is dropped at once.
    pub fn set_residency(&self, residency: Residency) {
        *self.residency.lock().unwrap_or_else(PoisonError::into_inner) = residency;
        self.cache.set_capacity(self.cache_bytes(residency));
    }

    /// Drops every decoded block.
    pub fn clear_cache(&self) {
        self.cache.clear();
    }

    /// Bytes of decoded blocks held now.
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

    /// Reads rows in the order given; a row may be asked for more than once. Pages are opened once each,
    /// whatever the order.
    pub fn read_rows(&self, rows: &[u64]) -> Result<Rows, Error> {
        self.read_in_order(rows, &mut self.limits(self.options.max_read_bytes))
    }

    /// Reads rows in the order given, but of values of more than `whole` bytes only a part: `part` is asked with the
    /// row, the column (in the order of [`Dataset::columns`]) and the value's length, and answers with the range of its
    /// bytes. What is not wanted is never held. [`Rows::value_bytes`] says how long a value is. Cutting pays no regard to
    /// characters.
    pub fn read_parts(&self, rows: &[u64], whole: u64, part: &PartOf<'_>) -> Result<Rows, Error> {
        self.read_parts_within(rows, self.options.max_read_bytes, whole, part)
    }

    /// As [`Dataset::read_parts`], with an error that [is a read too large](Error::is_read_too_large) before more than
    /// `most_bytes` of values are held. Fewer rows may then fit.
    pub fn read_parts_within(
        &self,
        rows: &[u64],
        most_bytes: u64,
        whole: u64,
        part: &PartOf<'_>,
    ) -> Result<Rows, Error> {
        let mut limits = self.limits(most_bytes.min(self.options.max_read_bytes));
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
        // Every row asked for is in `distinct`.
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

    /// Reads ranges that are ascending, disjoint and not empty: from blocks, if blocks may be held.
    fn read_sorted(&self, ranges: &[Range<u64>], limits: &mut Limits<'_>) -> Result<Rows, Error> {
        let mut rows = Rows::new(self.options.columns.len());
        // A row of nulls has no bytes, but still an offset in each column.
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
        // Blocks that push each other out would be decoded for a few rows each.
        let fits = (blocks.len() as u64).saturating_mul(self.estimated_block_bytes()) <= capacity || blocks.len() == 1;
        if fits {
            // Blocks that nobody decodes yet come first, so that several readers decode different ones.
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
            // A value that is too long to be held comes from the file, and with it the other rows of its block.
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

    /// A whole block, or `None` if it is too large to be held.
    fn block(&self, block: u64) -> Result<Option<Arc<Rows>>, Error> {
        let first = block * u64::from(self.options.block_rows);
        let range = first..(first + u64::from(self.options.block_rows)).min(self.rows);
        let count = range.end - range.start;
        let nothing = |_: u64, _: usize, _: u64| 0..0;
        self.cache.get_or_load(block, self.estimated_block_bytes(), |loading| {
            // Where each value ends, and bits for nulls.
            let offsets = (count * 4 + count / 8 + 8) * self.options.columns.len() as u64;
            let bytes = loading.reserved().saturating_sub(offsets);
            let mut admitted = bytes;
            let mut more = |missing: u64| {
                // While a column grows, what it held and what it grows to are both there.
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
                // Not the caller's limit, ours: the rows asked for may still be read without the block.
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
                // Room for what the footer says the values take on average, as far as that is little.
                let count: u64 = ranges.iter().map(|range| range.end - range.start).sum();
                for (column, chunk) in found.chunks.iter().enumerate() {
                    let mean = chunk.decoded_bytes() / u64::from(chunk.rows.max(1));
                    // Of a long value a part may be wanted.
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

    fn place(&self, file: usize, row_group: usize, column: usize) -> Place {
        Place {
            path: self.files.path(file).to_owned(),
            row_group: Some(row_group),
            column: Some(self.options.columns[column].clone()),
            rows: None,
        }
    }

    fn place_of(&self, row: u64) -> Place {
        let group = &self.groups[self.groups.partition_point(|group| group.first_row <= row) - 1];
        let row = group.first_row_in_file + row - group.first_row;
        Place {
            path: self.files.path(group.file).to_owned(),
            row_group: Some(group.row_group),
            column: None,
            rows: Some(row..row + 1),
        }
    }

    /// Makes the page maps that are missing, so that a read never walks page headers and [`Dataset::costs`] knows the pages.
    /// Reads page headers or offset indexes, and of data only dictionaries that are too large to be held whole.
    ///
    /// # Errors
    /// Those of reading; [`Error::Rewritten`] where the pages of a [touched file](Dataset::touched_files) lie elsewhere
    /// than they did.
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
            // There were pages when the map was made.
            Err(Fault::Corrupt(_) | Fault::Ended(_)) => Err(Fault::Rewritten { at: chunk.bytes.start }),
            Err(fault) => Err(fault),
        };
        compared.map_err(|fault| self.files.changed_or(file, fault.at(self.place(file, row_group, column))))
    }

    /// The files whose pages are known from [`DatasetOptions::page_map`], but that somebody touched since it was made:
    /// size and footer are the same, inode or times are not. Pages that were read before are checked when they are
    /// read again; whether others changed cannot be told.
    pub fn touched_files(&self) -> Vec<&Path> {
        (0..self.footers.len()).filter(|&file| self.maps.is_touched(file)).map(|file| self.files.path(file)).collect()
    }

    /// How many parts of pages were read so far, in this process or as `page_map` told: with each, what
    /// [`Dataset::page_map`] gives changes.
    pub fn known_stretches(&self) -> u64 {
        self.maps.known_stretches()
    }

    /// The page maps of all chunks, for [`DatasetOptions::page_map`] at another time. Makes those that are missing, as
    /// [`Dataset::find_pages`] does.
    pub fn page_map(&self) -> Result<Vec<u8>, Error> {
        self.find_pages()?;
        let identities: Vec<&Identity> = (0..self.footers.len()).map(|file| self.files.identity(file)).collect();
        Ok(self.maps.to_bytes(&self.footers, &identities, &self.options.columns))
    }
}

/// Appends rows of a block; of values that are wanted in part, that part.
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
