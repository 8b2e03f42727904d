//! [`WordCache`]: a cache of the ids of short words, in a bounded number of bytes.
//!
//! The library's own cache keeps up to 8 KiB for a word. Most words of a text are short and have few ids, so this cache holds
//! as many words in a hundredth of that memory.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Words in the cache. The most common words of a language are worth it; a larger cache is not measurably faster.
const WORDS: usize = 512;
/// The most bytes of a word in the cache.
const MAX_WORD_BYTES: usize = 32;
/// The most ids of a word in the cache.
const MAX_IDS: usize = 8;
/// Memory of the cache: the table with two addresses and two lengths per slot, and each word's text and ids.
pub(crate) const WORD_CACHE_BYTES: u64 =
    (2 * WORDS * (4 * size_of::<usize>() + 1) + WORDS * (MAX_WORD_BYTES + 4 * MAX_IDS)) as u64;

type Words = HashMap<Box<str>, Box<[u32]>>;

/// The cache.
pub(super) struct WordCache {
    words: Mutex<Words>,
}

impl Default for WordCache {
    fn default() -> Self {
        Self { words: Mutex::new(Words::with_capacity(WORDS)) }
    }
}

impl WordCache {
    /// Adds the ids of a word to `ids`, from the cache or from `tokenize`. If another thread holds the lock, the word is
    /// tokenized.
    pub fn add<E>(
        &self,
        word: &str,
        ids: &mut Vec<u32>,
        tokenize: impl FnOnce() -> Result<Vec<u32>, E>,
    ) -> Result<(), E> {
        let is_short = word.len() <= MAX_WORD_BYTES;
        if is_short && let Some(known) = self.words().as_ref().and_then(|words| words.get(word)) {
            ids.extend_from_slice(known);
            return Ok(());
        }
        let found = tokenize()?;
        ids.extend_from_slice(&found);
        if is_short
            && found.len() <= MAX_IDS
            && let Some(mut words) = self.words().filter(|words| words.len() < WORDS)
        {
            words.insert(word.into(), found.into());
        }
        Ok(())
    }

    fn words(&self) -> Option<MutexGuard<'_, Words>> {
        match self.words.try_lock() {
            Ok(words) => Some(words),
            // No change is ever half done.
            Err(TryLockError::Poisoned(words)) => Some(words.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_tokenized_once_and_long_ones_are_not_remembered() {
        let word_cache = WordCache::default();
        let mut times = 0;
        let mut of = |word: &str, found: &[u32]| {
            let mut ids = vec![7];
            let tokenize = || {
                times += 1;
                Ok::<_, ()>(found.to_vec())
            };
            word_cache.add(word, &mut ids, tokenize).unwrap();
            assert_eq!(ids[1..], *found, "{word}");
            times
        };
        assert_eq!([of("a", &[1, 2]), of("a", &[1, 2])], [1, 1]);
        let long = "b".repeat(MAX_WORD_BYTES + 1);
        assert_eq!([of(&long, &[3]), of(&long, &[3])], [2, 3]);
        assert_eq!([of("c", &[4; MAX_IDS + 1]), of("c", &[4; MAX_IDS + 1])], [4, 5]);
        for word in 0..2 * WORDS {
            of(&word.to_string(), &[5]);
        }
        assert_eq!(word_cache.words().unwrap().len(), WORDS);
        assert!(word_cache.words().unwrap().capacity() <= 2 * WORDS);
    }
}
