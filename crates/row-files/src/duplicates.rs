//! [`Duplicates`]: finds repeated rows, exact or near, in a bounded amount of memory.
//!
//! Exact: a table of 64-bit hashes of prompt and response, 16 to 32 bytes a row. Two different rows have the same hash in
//! one of 2^64 cases. Among ten million rows, the chance that any row is mistaken for another is 1 in 370,000.
//!
//! Near: MinHash with 128 hash functions over the sets of three neighbouring letters or digits of prompt and response, in
//! lower case. A row is a duplicate if the estimated Jaccard similarity of its sets with those of an earlier, kept row is
//! at least 0.85. Candidates come from 16 bands of 8 values each. The bands find 99 % of pairs at 0.85, and all but one in
//! 10,000 pairs at 0.9. The estimate has a standard deviation of 0.03. Each kept row takes some 300 bytes.
//!
//! Sources: Broder, "On the resemblance and containment of documents" (1997); Leskovec, Rajaraman, Ullman, "Mining of Massive
//! Datasets", section 3.4; Li and König, "b-Bit Minwise Hashing" (2010).

use std::hash::{DefaultHasher, Hasher};

/// The least similarity of a duplicate.
pub const SIMILARITY: f64 = 0.85;
const BANDS: usize = 16;
const BAND: usize = 8;
const SIGNATURE: usize = BANDS * BAND;
/// Characters of a shingle.
const SHINGLE: usize = 3;
/// The most rows with the same band that are compared.
const MAX_CANDIDATES: usize = 256;

/// The table of kept rows.
pub struct Duplicates {
    table: Table,
    max_bytes: u64,
}

enum Table {
    Exact(Hashes),
    Near(Box<Signatures>),
}

/// The table of duplicates needs more memory than its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Rows that were kept so far.
    pub rows: u64,
    /// The bytes that the table would need now.
    pub bytes: u64,
}

impl Duplicates {
    /// Finds rows that are equal byte for byte.
    pub fn exact(max_bytes: u64) -> Self {
        Self { table: Table::Exact(Hashes { slots: vec![0; 1 << 10], rows: 0 }), max_bytes }
    }

    /// Finds rows that are nearly equal.
    pub fn near(max_bytes: u64) -> Self {
        let bands = [(); BANDS].map(|()| vec![0; 1 << 10]);
        let signatures = Signatures { bands, signatures: Vec::new(), rows: 0, letters: Vec::new() };
        Self { table: Table::Near(Box::new(signatures)), max_bytes }
    }

    /// Whether an earlier row was the same; if not, adds this row.
    ///
    /// # Errors
    /// The table would have to grow beyond its limit.
    pub fn is_duplicate(&mut self, prompt: &str, response: &str) -> Result<bool, Full> {
        let (rows, needed) = match &self.table {
            Table::Exact(hashes) => (hashes.rows, hashes.bytes_to_add()),
            Table::Near(signatures) => (signatures.rows, signatures.bytes_to_add()),
        };
        if needed > self.max_bytes {
            return Err(Full { rows, bytes: needed });
        }
        Ok(match &mut self.table {
            Table::Exact(hashes) => {
                let mut hash = DefaultHasher::new();
                hash.write(prompt.as_bytes());
                hash.write_u64(prompt.len() as u64);
                hash.write(response.as_bytes());
                !hashes.insert(hash.finish())
            }
            Table::Near(signatures) => signatures.is_known(prompt, response),
        })
    }
}

/// A set of hashes: open addressing, at most half full.
struct Hashes {
    /// The value 0 marks a free slot.
    slots: Vec<u64>,
    rows: u64,
}

impl Hashes {
    /// Bytes while another hash is added. If the table grows, the old and the new table count.
    fn bytes_to_add(&self) -> u64 {
        let bytes = 8 * self.slots.len() as u64;
        if self.is_full() { 3 * bytes } else { bytes }
    }

    fn is_full(&self) -> bool {
        2 * self.rows >= self.slots.len() as u64
    }

    fn insert(&mut self, hash: u64) -> bool {
        if self.is_full() {
            let twice = vec![0; 2 * self.slots.len()];
            let old = std::mem::replace(&mut self.slots, twice);
            for hash in old.into_iter().filter(|hash| *hash != 0) {
                self.place(hash);
            }
        }
        let is_new = self.place(hash.max(1));
        self.rows += u64::from(is_new);
        is_new
    }

    fn place(&mut self, hash: u64) -> bool {
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        loop {
            match self.slots[slot] {
                0 => {
                    self.slots[slot] = hash;
                    return true;
                }
                found if found == hash => return false,
                _ => slot = (slot + 1) & mask,
            }
        }
    }
}

/// Signatures of rows, indexed by their bands.
struct Signatures {
    /// For each band a hash table of rows, counted from 1, at most half full; 0 marks a free slot.
    bands: [Vec<u32>; BANDS],
    signatures: Vec<[u8; SIGNATURE]>,
    rows: u64,
    letters: Vec<char>,
}

impl Signatures {
    fn bytes_to_add(&self) -> u64 {
        let bands = (4 * BANDS * self.bands[0].len()) as u64;
        let signatures = (SIGNATURE * self.signatures.capacity()) as u64;
        let bands = if self.is_full() { 2 * bands + bands / BANDS as u64 } else { bands };
        bands + if self.signatures.len() == self.signatures.capacity() { 3 * signatures } else { signatures }
    }

    fn is_full(&self) -> bool {
        2 * self.rows >= self.bands[0].len() as u64
    }

    fn is_known(&mut self, prompt: &str, response: &str) -> bool {
        let signature = self.signature(prompt, response);
        for band in 0..BANDS {
            if self.has_similar(band, &signature) {
                return true;
            }
        }
        if self.is_full() {
            for band in 0..BANDS {
                let twice = vec![0; 2 * self.bands[band].len()];
                let old = std::mem::replace(&mut self.bands[band], twice);
                old.into_iter().filter(|row| *row != 0).for_each(|row| self.place(band, row));
            }
        }
        self.signatures.push(signature);
        self.rows += 1;
        let row = u32::try_from(self.rows).unwrap_or(u32::MAX);
        (0..BANDS).for_each(|band| self.place(band, row));
        false
    }

    fn place(&mut self, band: usize, row: u32) {
        let key = key(&self.signatures[row as usize - 1], band);
        let table = &mut self.bands[band];
        let mask = table.len() - 1;
        let mut slot = spread(key) as usize & mask;
        while table[slot] != 0 {
            slot = (slot + 1) & mask;
        }
        table[slot] = row;
    }

    /// Whether a row with the same band is similar.
    fn has_similar(&self, band: usize, signature: &[u8; SIGNATURE]) -> bool {
        let wanted = key(signature, band);
        let table = &self.bands[band];
        let mask = table.len() - 1;
        let mut slot = spread(wanted) as usize & mask;
        let mut compared = 0;
        while table[slot] != 0 && compared < MAX_CANDIDATES {
            let other = &self.signatures[table[slot] as usize - 1];
            if key(other, band) == wanted {
                compared += 1;
                if similarity(signature, other) >= SIMILARITY {
                    return true;
                }
            }
            slot = (slot + 1) & mask;
        }
        false
    }

    fn signature(&mut self, prompt: &str, response: &str) -> [u8; SIGNATURE] {
        let letters = &mut self.letters;
        letters.clear();
        for text in [prompt, response] {
            letters.extend(text.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase));
        }
        if letters.is_empty() {
            letters.extend(prompt.chars().chain(response.chars()));
        }
        let mut least = [u32::MAX; SIGNATURE];
        let mut add = |shingle: &[char]| {
            let hash =
                shingle.iter().fold(0x9e37_79b9_7f4a_7c15_u64, |hash, c| spread(hash ^ u64::from(u32::from(*c))));
            let (low, high) = (hash as u32, (hash >> 32) as u32 | 1);
            for (function, least) in least.iter_mut().enumerate() {
                let value = low.wrapping_add(high.wrapping_mul(function as u32 + 1));
                *least = (*least).min((value ^ (value >> 15)).wrapping_mul(0x2c1b_3c6d));
            }
        };
        match letters.len() {
            0..SHINGLE => add(letters),
            _ => letters.windows(SHINGLE).for_each(add),
        }
        // Keep eight bits of each value: two different minima share them in one of 256 cases.
        least.map(|value| (value.wrapping_mul(0x9e37_79b1) >> 24) as u8)
    }
}

fn key(signature: &[u8; SIGNATURE], band: usize) -> u64 {
    signature[band * BAND..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn spread(mut z: u64) -> u64 {
    z = (z ^ (z >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    z = (z ^ (z >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    z ^ (z >> 33)
}

/// The Jaccard similarity estimated from two signatures.
#[expect(clippy::cast_precision_loss, reason = "at most 128")]
fn similarity(a: &[u8; SIGNATURE], b: &[u8; SIGNATURE]) -> f64 {
    let same = a.iter().zip(b).filter(|(a, b)| a == b).count() as f64 / SIGNATURE as f64;
    (same - 1. / 256.) / (1. - 1. / 256.)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 64 << 20;

    #[test]
    fn the_same_row_is_a_duplicate_and_a_shifted_border_is_none() {
        let mut rows = Duplicates::exact(LIMIT);
        let mut check =
            |prompt: &str, response: &str, expected| assert_eq!(rows.is_duplicate(prompt, response), Ok(expected));
        check("ab", "c", false);
        check("a", "bc", false);
        check("ab", "c", true);
        for row in 0..5000 {
            check(&row.to_string(), "x", false);
        }
        check("4711", "x", true);
    }

    #[test]
    fn a_table_that_would_outgrow_its_limit_says_so() {
        let mut rows = Duplicates::exact(20_000);
        let full = (0..10_000).find_map(|row: u32| rows.is_duplicate(&row.to_string(), "").err()).expect("a limit");
        assert_eq!(full.rows, 512);
        assert!(full.bytes > 20_000);
    }

    /// Two texts of distinct shingles with a known similarity: they share `same` words out of `all`.
    fn texts(all: usize, same: usize, seed: usize) -> (String, String) {
        let word =
            |kind: usize, number: usize| format!("{:x}", spread((seed * 1_000_003 + kind * 10_007 + number) as u64));
        let of = |kind: usize| (0..all).map(|n| word(if n < same { 0 } else { kind }, n)).collect::<Vec<_>>().concat();
        (of(1), of(2))
    }

    fn jaccard(a: &str, b: &str) -> f64 {
        let set = |text: &str| -> std::collections::HashSet<Vec<char>> {
            text.chars().collect::<Vec<_>>().windows(SHINGLE).map(<[char]>::to_vec).collect()
        };
        let (a, b) = (set(a), set(b));
        a.intersection(&b).count() as f64 / a.union(&b).count() as f64
    }

    #[test]
    fn rows_above_the_similarity_are_found_and_rows_below_it_are_not() {
        let (mut found, mut missed, mut wrong, mut right) = (0, 0, 0, 0);
        for seed in 0..300 {
            let (a, b) = texts(60, 48 + seed % 12, seed);
            let mut rows = Duplicates::near(LIMIT);
            assert_eq!(rows.is_duplicate("", &a), Ok(false));
            let is_found = rows.is_duplicate("", &b).unwrap();
            match jaccard(&a, &b) {
                similar if similar >= 0.93 => *(if is_found { &mut found } else { &mut missed }) += 1,
                similar if similar <= 0.77 => *(if is_found { &mut wrong } else { &mut right }) += 1,
                _ => {}
            }
        }
        assert!(found >= 20 && right >= 50, "the pairs cover both sides: {found} {right}");
        assert!(missed <= 1 && wrong <= 1, "{missed} missed of {found}, {wrong} wrong of {right}");
    }

    #[test]
    fn punctuation_and_case_make_no_difference_and_short_rows_count_whole() {
        let mut rows = Duplicates::near(LIMIT);
        let mut check =
            |prompt: &str, response: &str, expected| assert_eq!(rows.is_duplicate(prompt, response), Ok(expected));
        check("今天天气怎么样？", "很好。", false);
        check("今天天气怎么样", "很好！", true);
        check("Hi", "", false);
        check("hi", "", true);
        check("Ha", "", false);
    }
}
