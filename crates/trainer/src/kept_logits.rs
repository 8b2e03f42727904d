//! A file of a teacher's largest logits, so that the teacher reads each sample once.
//!
//! The file has a line that says what its logits depend on, and then a record for each sample: its key, the number of its tokens, the entries
//! and the values of each token, and a checksum. Records are appended and never changed. A record that a killed process did not finish is cut
//! off. In memory there is a table of places alone. A sample's key is a digest of its tokens, so the file serves any order, mixture and number
//! of processes: one of them writes, and all read.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use durable_files::Directory;
use sha2::{Digest, Sha256};
use t5_ops::TopLogits;

use crate::error::{Error, Result};
use crate::files::sha256;

const KEY_BYTES: usize = 16;
/// A key and a number of tokens.
const HEAD_BYTES: u64 = KEY_BYTES as u64 + 4;
const CHECKSUM_BYTES: u64 = 8;
/// Slots of the table of places for each sample, in quarters: a table that is at most four fifths full is searched quickly.
const QUARTERS_OF_SLOTS: u64 = 5;

/// The name of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key([u8; KEY_BYTES]);

impl Key {
    /// The key of a sample with these tokens.
    pub fn of_sample(source: &[u32], target: &[u32]) -> Self {
        let mut digest = Sha256::new();
        digest.update((source.len() as u64).to_le_bytes());
        source.iter().chain(target).for_each(|id| digest.update(id.to_le_bytes()));
        let mut key = [0; KEY_BYTES];
        key.copy_from_slice(&digest.finalize()[..KEY_BYTES]);
        Self(key)
    }

    fn slot(self, slots: usize) -> usize {
        let first = self.0.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
        (first % slots as u64) as usize
    }
}

/// What a file of logits holds.
#[derive(Clone, Debug)]
pub struct KeptLogitsOf {
    /// The logits of a token.
    pub count: usize,
    /// The dtype of activations.
    pub dtype: DType,
    /// What the logits depend on, such as digests of the teacher's files. Another text begins the file anew.
    pub depends_on: String,
    /// The most samples that it holds.
    pub samples: u64,
}

impl KeptLogitsOf {
    fn value_bytes(&self) -> u64 {
        if self.dtype == DType::F64 { 8 } else { 4 }
    }

    /// Bytes of a sample in the file.
    pub fn sample_bytes(&self, target_tokens: usize) -> u64 {
        let logits = (target_tokens * self.count) as u64;
        HEAD_BYTES + logits * (size_of::<u32>() as u64 + self.value_bytes()) + CHECKSUM_BYTES
    }

    /// Bytes of the table of places in memory.
    pub fn table_bytes(&self) -> u64 {
        self.slots() * size_of::<u64>() as u64
    }

    fn slots(&self) -> u64 {
        (self.samples.saturating_mul(QUARTERS_OF_SLOTS) / 4).max(64)
    }

    fn line(&self) -> String {
        let Self { count, dtype, depends_on, .. } = self;
        format!("largest logits {}\n", sha256(format!("{count} {dtype:?} {depends_on}").as_bytes()))
    }
}

/// The file of logits of a run.
#[derive(Debug)]
pub struct KeptLogits {
    of: KeptLogitsOf,
    file: File,
    path: PathBuf,
    /// Where the next record begins.
    end: u64,
    /// Where records begin, by their keys; 0 is empty.
    places: Vec<u64>,
    samples: u64,
}

impl KeptLogits {
    /// Opens the file, or begins it. Only one process `writes`; it opens the file before the others.
    ///
    /// # Errors
    /// It cannot be opened, read or written.
    pub fn open(path: &Path, of: KeptLogitsOf, writes: bool) -> Result<Self> {
        let failed = |error| Error::io("open", path, error);
        let (directory, name) = Directory::open_parent(path).map_err(failed)?;
        let file = directory.append(&name).map_err(failed)?;
        let line = of.line();
        let mut found = vec![0; line.len()];
        let is_same = (&file).read_exact(&mut found).is_ok() && found == line.as_bytes();
        if !is_same && writes {
            file.set_len(0).and_then(|()| (&file).write_all(line.as_bytes())).map_err(failed)?;
        }
        let places = vec![0; usize::try_from(of.slots()).unwrap_or(usize::MAX)];
        let end = line.len() as u64;
        let mut kept = Self { of, file, path: path.to_owned(), end, places, samples: 0 };
        kept.follow()?;
        if writes {
            kept.file.set_len(kept.end).map_err(failed)?;
        }
        Ok(kept)
    }

    /// The samples that it holds.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Notes the whole records that were appended since.
    pub(crate) fn follow(&mut self) -> Result<()> {
        let length = self.file.metadata().map_err(|error| self.failed("read", error))?.len();
        while let Some((key, bytes)) = self.head(self.end, length)? {
            let is_last = self.end + bytes == length;
            if is_last && self.sound(self.end, bytes)?.is_none() {
                break;
            }
            self.note(key);
            self.end += bytes;
        }
        Ok(())
    }

    /// The key and the bytes of a record at `place`; `None` if it is not whole.
    fn head(&self, place: u64, length: u64) -> Result<Option<(Key, u64)>> {
        if length < place + HEAD_BYTES {
            return Ok(None);
        }
        let mut head = [0; HEAD_BYTES as usize];
        self.read_at(place, &mut head)?;
        let mut key = [0; KEY_BYTES];
        key.copy_from_slice(&head[..KEY_BYTES]);
        let tokens = head[KEY_BYTES..].first_chunk().map_or(0, |tokens| u32::from_le_bytes(*tokens));
        let bytes = self.of.sample_bytes(tokens as usize);
        Ok((place + bytes <= length).then_some((Key(key), bytes)))
    }

    /// The record at a place, without its checksum; `None` if it has another one.
    fn sound(&self, place: u64, bytes: u64) -> Result<Option<Vec<u8>>> {
        let mut record = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
        self.read_at(place, &mut record)?;
        let checksum = record.split_off(record.len() - CHECKSUM_BYTES as usize);
        Ok((Sha256::digest(&record)[..checksum.len()] == checksum[..]).then_some(record))
    }

    /// Notes the record that begins at the end. A file with more samples than it was opened for keeps the first.
    fn note(&mut self, key: Key) {
        if self.samples >= self.of.samples {
            return;
        }
        let mut slot = key.slot(self.places.len());
        while self.places[slot] != 0 {
            slot = (slot + 1) % self.places.len();
        }
        self.places[slot] = self.end;
        self.samples += 1;
    }

    fn place(&self, key: &Key) -> Result<Option<u64>> {
        let mut slot = key.slot(self.places.len());
        let mut found = [0; KEY_BYTES];
        while self.places[slot] != 0 {
            self.read_at(self.places[slot], &mut found)?;
            if found == key.0 {
                return Ok(Some(self.places[slot]));
            }
            slot = (slot + 1) % self.places.len();
        }
        Ok(None)
    }

    /// Whether a sample is there.
    pub(crate) fn has(&self, key: &Key) -> Result<bool> {
        Ok(self.place(key)?.is_some())
    }

    /// The record of a sample: a row of logits for each token of its target.
    pub(crate) fn record(&self, key: &Key, rows: &TopLogits) -> Result<Vec<u8>> {
        let tokens = rows.entries.len() / self.of.count;
        let mut record = Vec::with_capacity(usize::try_from(self.of.sample_bytes(tokens)).unwrap_or(0));
        record.extend(key.0);
        record.extend(u32::try_from(tokens).unwrap_or(u32::MAX).to_le_bytes());
        record.extend(rows.entries.iter().flat_map(|entry| entry.to_le_bytes()));
        let values = rows.values.flatten_all()?;
        match self.of.dtype {
            DType::F64 => record.extend(values.to_vec1::<f64>()?.into_iter().flat_map(f64::to_le_bytes)),
            _ => record.extend(values.to_dtype(DType::F32)?.to_vec1::<f32>()?.into_iter().flat_map(f32::to_le_bytes)),
        }
        let checksum = Sha256::digest(&record);
        record.extend(&checksum[..CHECKSUM_BYTES as usize]);
        Ok(record)
    }

    /// Appends those of some records, one after the other, whose samples are not there yet, as long as there is room.
    pub(crate) fn append(&mut self, records: &[u8]) -> Result<()> {
        let mut rest = records;
        while let Some((head, tokens)) = rest.split_first_chunk::<KEY_BYTES>().and_then(|(key, rest)| {
            let tokens = rest.first_chunk().map(|tokens| u32::from_le_bytes(*tokens))?;
            Some((Key(*key), tokens))
        }) {
            let bytes = usize::try_from(self.of.sample_bytes(tokens as usize)).unwrap_or(usize::MAX).min(rest.len());
            let (record, others) = rest.split_at(bytes);
            if self.samples < self.of.samples && !self.has(&head)? {
                self.file.write_all(record).map_err(|error| Error::io("write", &self.path, error))?;
                self.note(head);
                self.end += record.len() as u64;
            }
            rest = others;
        }
        Ok(())
    }

    /// The rows of a sample with so many tokens, with rows of zeros up to `longest`; `None` if it is not there.
    pub(crate) fn read(&self, key: &Key, tokens: usize, longest: usize) -> Result<Option<TopLogits>> {
        let Some(place) = self.place(key)? else { return Ok(None) };
        let said = self.sound(place, self.of.sample_bytes(tokens))?.ok_or_else(|| self.is_damaged())?;
        let (logits, padded) = (tokens * self.of.count, longest * self.of.count);
        let (entries, values) = said[HEAD_BYTES as usize..].split_at(logits * size_of::<u32>());
        let mut entries: Vec<u32> = entries.as_chunks().0.iter().map(|entry| u32::from_le_bytes(*entry)).collect();
        entries.resize(padded, 0);
        let shape = (longest, self.of.count);
        let values = match self.of.dtype {
            DType::F64 => {
                let mut values: Vec<f64> =
                    values.as_chunks().0.iter().map(|value| f64::from_le_bytes(*value)).collect();
                values.resize(padded, 0.0);
                Tensor::from_vec(values, shape, &Device::Cpu)?
            }
            dtype => {
                let mut values: Vec<f32> =
                    values.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
                values.resize(padded, 0.0);
                Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?
            }
        };
        Ok(Some(TopLogits { entries, values }))
    }

    /// The error for contents that this program did not write.
    pub(crate) fn is_damaged(&self) -> Error {
        let problem = "the logits of a teacher in it are damaged; remove it, and they are computed again";
        self.failed("read", std::io::Error::new(std::io::ErrorKind::InvalidData, problem))
    }

    fn read_at(&self, place: u64, to: &mut [u8]) -> Result<()> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(place)).and_then(|_| file.read_exact(to)).map_err(|error| self.failed("read", error))
    }

    fn failed(&self, what: &'static str, error: std::io::Error) -> Error {
        Error::io(what, &self.path, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(depends_on: &str, dtype: DType) -> KeptLogitsOf {
        KeptLogitsOf { count: 2, dtype, depends_on: depends_on.to_owned(), samples: 3 }
    }

    fn rows(first: u32, tokens: usize, dtype: DType) -> TopLogits {
        let entries: Vec<u32> = (first..).take(2 * tokens).collect();
        let values: Vec<f64> = entries.iter().map(|entry| f64::from(*entry) + 0.25).collect();
        // The host alone: the logits are there.
        let values = Tensor::from_vec(values, (tokens, 2), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        TopLogits { entries, values }
    }

    fn same(got: &TopLogits, expected: &TopLogits, tokens: usize) -> bool {
        let values = |of: &TopLogits| of.values.to_dtype(DType::F64).unwrap().to_vec2::<f64>().unwrap();
        got.entries[..2 * tokens] == expected.entries[..] && values(got)[..tokens] == values(expected)[..]
    }

    #[test]
    fn samples_are_found_again_and_what_a_killed_process_left_is_cut_off() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("logits");
            let mut kept = KeptLogits::open(&path, of("a", dtype), true).unwrap();
            let reader = KeptLogits::open(&path, of("a", dtype), false);
            let keys = [1, 2, 3, 4].map(|id| Key::of_sample(&[id], &[id, 1]));
            let lengths = [1, 3, 2, 1];
            for (number, (key, tokens)) in keys.iter().zip(lengths).enumerate() {
                let record = kept.record(key, &rows(10 * number as u32, tokens, dtype)).unwrap();
                assert_eq!(record.len() as u64, of("a", dtype).sample_bytes(tokens));
                let other = kept.record(key, &rows(77, tokens, dtype)).unwrap();
                // The first one stays.
                kept.append(&[record, other].concat()).unwrap();
            }
            // There is no room for the fourth.
            assert_eq!((kept.samples(), kept.has(&keys[3]).unwrap()), (3, false));
            let mut reader = reader.unwrap();
            assert!(!reader.has(&keys[0]).unwrap());
            reader.follow().unwrap();
            for kept in [&kept, &reader, &KeptLogits::open(&path, of("a", dtype), true).unwrap()] {
                for (number, (key, tokens)) in keys[..3].iter().zip(lengths).enumerate() {
                    let got = kept.read(key, tokens, 4).unwrap().unwrap();
                    assert_eq!(got.values.dims(), [4, 2]);
                    assert!(same(&got, &rows(10 * number as u32, tokens, dtype), tokens));
                }
            }
            let whole = std::fs::metadata(&path).unwrap().len();
            File::options().write(true).open(&path).unwrap().set_len(whole - 1).unwrap();
            let kept = KeptLogits::open(&path, of("a", dtype), true).unwrap();
            assert_eq!(kept.samples(), 2);
            assert!(std::fs::metadata(&path).unwrap().len() < whole - 1);
            // Those of another teacher are not taken.
            assert_eq!(KeptLogits::open(&path, of("b", dtype), true).unwrap().samples(), 0);
            assert_eq!(KeptLogits::open(&path, of("a", dtype), true).unwrap().samples(), 0);
        }
    }

    #[test]
    fn a_damaged_record_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("logits");
        let mut kept = KeptLogits::open(&path, of("a", DType::F32), true).unwrap();
        let keys = [1, 2].map(|id| Key::of_sample(&[id], &[id]));
        for key in &keys {
            kept.append(&kept.record(key, &rows(3, 1, DType::F32)).unwrap()).unwrap();
        }
        let mut bytes = std::fs::read(&path).unwrap();
        let first = bytes.len() - of("a", DType::F32).sample_bytes(1) as usize - 9;
        bytes[first] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let kept = KeptLogits::open(&path, of("a", DType::F32), false).unwrap();
        assert!(kept.read(&keys[1], 1, 1).unwrap().is_some());
        let error = kept.read(&keys[0], 1, 1).unwrap_err().to_string();
        assert!(error.contains("logits"), "{error}");
    }
}
