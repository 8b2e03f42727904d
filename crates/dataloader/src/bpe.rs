//! Learns byte-pair merges from counted words: the inner loop of tokenizer training.
//!
//! Learns the same merges as the trainer of the `tokenizers` crate (a test compares them), in about a tenth of the
//! memory, on one thread and without any dependence on hash order.
//!
//! Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword Units", ACL 2016.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Two neighbouring symbols.
type Pair = (u32, u32);

/// A merge of two symbols into a third.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Merge {
    pub pair: Pair,
    pub into: u32,
}

/// The learned vocabulary: the merges in order, and the bytes of every symbol. The symbols of the alphabet come first.
pub(crate) struct Learned {
    pub merges: Vec<Merge>,
    pub symbols: Vec<Vec<u8>>,
}

/// Learns merges until there are `symbols` symbols, or no pair occurs `min_frequency` times.
///
/// Symbols are numbered from 0, first the 256 bytes in the order `alphabet`. The most frequent pair is merged first.
/// Among equally frequent pairs, the one with the smallest numbers is merged first.
pub(crate) fn learn(
    words: impl IntoIterator<Item = (String, u64)>,
    alphabet: &[u8; 256],
    symbols: usize,
    min_frequency: u64,
) -> Learned {
    let mut learner = Learner::new(words, alphabet);
    let mut learned = Learned { merges: Vec::new(), symbols: alphabet.iter().map(|&byte| vec![byte]).collect() };
    let mut numbers: HashMap<Vec<u8>, u32> =
        (0..).zip(&learned.symbols).map(|(id, bytes)| (bytes.clone(), id)).collect();
    while learned.symbols.len() < symbols {
        let Some(pair) = learner.most_frequent(min_frequency.max(1)) else { break };
        let bytes = [pair.0, pair.1].map(|symbol| learned.symbols[symbol as usize].as_slice()).concat();
        // Different pairs can spell the same symbol.
        let next = learned.symbols.len() as u32;
        let into = *numbers.entry(bytes.clone()).or_insert(next);
        if into == next {
            learned.symbols.push(bytes);
        }
        let merge = Merge { pair, into };
        learner.merge(merge);
        learned.merges.push(merge);
    }
    learned
}

/// The words as symbols, and the words in which each pair occurs.
struct Learner {
    /// All words, back to back. Merging shortens a word in its place.
    symbols: Vec<u32>,
    words: Vec<Word>,
    pairs: HashMap<Pair, Occurrences>,
    /// Pairs by frequency. An entry may be out of date; it is checked when it is taken out.
    queue: BinaryHeap<(u64, Reverse<Pair>)>,
}

struct Word {
    start: usize,
    len: u32,
    count: u64,
}

#[derive(Default)]
struct Occurrences {
    count: u64,
    /// Words that held the pair when it first occurred; later merges may have removed it from some.
    words: Vec<u32>,
}

impl Learner {
    fn new(words: impl IntoIterator<Item = (String, u64)>, alphabet: &[u8; 256]) -> Self {
        let mut number_of = [0; 256];
        (0..).zip(alphabet).for_each(|(number, &byte)| number_of[usize::from(byte)] = number);
        let mut learner =
            Self { symbols: Vec::new(), words: Vec::new(), pairs: HashMap::new(), queue: BinaryHeap::new() };
        for (text, count) in words {
            let word = Word { start: learner.symbols.len(), len: text.len() as u32, count };
            learner.symbols.extend(text.bytes().map(|byte| number_of[usize::from(byte)]));
            learner.words.push(word);
        }
        learner.symbols.shrink_to_fit();
        for (index, word) in (0..).zip(&learner.words) {
            let symbols = &learner.symbols[word.start..word.start + word.len as usize];
            for pair in symbols.windows(2) {
                let found = learner.pairs.entry((pair[0], pair[1])).or_default();
                found.count += word.count;
                if found.words.last() != Some(&index) {
                    found.words.push(index);
                }
            }
        }
        learner.queue = learner.pairs.iter().map(|(&pair, found)| (found.count, Reverse(pair))).collect();
        learner
    }

    fn most_frequent(&mut self, min_frequency: u64) -> Option<Pair> {
        loop {
            let (count, Reverse(pair)) = self.queue.pop()?;
            let current = self.pairs.get(&pair).map_or(0, |found| found.count);
            if current < count {
                // Other merges removed some occurrences. A pair that grew has a newer entry.
                self.queue.push((current, Reverse(pair)));
            } else if count < min_frequency {
                return None;
            } else if current == count {
                return Some(pair);
            }
        }
    }

    fn merge(&mut self, merge: Merge) {
        let Some(mut found) = self.pairs.remove(&merge.pair) else { return };
        found.words.sort_unstable();
        found.words.dedup();
        let mut grown: Vec<Pair> = Vec::new();
        for index in found.words {
            let word = &mut self.words[index as usize];
            let symbols = &mut self.symbols[word.start..word.start + word.len as usize];
            if !symbols.windows(2).any(|pair| (pair[0], pair[1]) == merge.pair) {
                continue;
            }
            for pair in symbols.windows(2) {
                if let Some(found) = self.pairs.get_mut(&(pair[0], pair[1])) {
                    found.count -= word.count;
                }
            }
            word.len = merge_in_place(symbols, merge) as u32;
            for pair in symbols[..word.len as usize].windows(2) {
                let pair = (pair[0], pair[1]);
                let found = self.pairs.entry(pair).or_default();
                found.count += word.count;
                if pair.0 == merge.into || pair.1 == merge.into {
                    if found.words.last() != Some(&index) {
                        found.words.push(index);
                    }
                    grown.push(pair);
                }
            }
        }
        grown.sort_unstable();
        grown.dedup();
        for pair in grown {
            self.queue.push((self.pairs[&pair].count, Reverse(pair)));
        }
    }
}

/// Merges a pair everywhere in a word, from left to right; returns the new length.
fn merge_in_place(symbols: &mut [u32], merge: Merge) -> usize {
    let (mut read, mut written) = (0, 0);
    while read < symbols.len() {
        let is_pair = read + 1 < symbols.len() && (symbols[read], symbols[read + 1]) == merge.pair;
        symbols[written] = if is_pair { merge.into } else { symbols[read] };
        read += if is_pair { 2 } else { 1 };
        written += 1;
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokenizers::Trainer;
    use tokenizers::models::bpe::{BPE, BpeTrainer};

    fn identity() -> [u8; 256] {
        std::array::from_fn(|byte| byte as u8)
    }

    fn merged(words: &[(&str, u64)], merges: usize) -> Vec<String> {
        let words = words.iter().map(|&(word, count)| (word.to_owned(), count));
        let learned = learn(words, &identity(), 256 + merges, 2);
        learned.symbols[256..].iter().map(|bytes| String::from_utf8(bytes.clone()).unwrap()).collect()
    }

    #[test]
    fn the_most_frequent_pair_is_merged_first_and_the_rarest_never() {
        assert_eq!(merged(&[("low", 5), ("lower", 2), ("newest", 6), ("widest", 3)], 4), ["es", "est", "lo", "low"]);
        assert_eq!(merged(&[("ab", 1), ("cd", 1)], 9), Vec::<String>::new(), "no pair occurs twice");
    }

    #[test]
    fn overlapping_pairs_are_merged_from_the_left() {
        let merge = Merge { pair: (7, 7), into: 9 };
        for (symbols, expected) in [(vec![7, 7, 7], vec![9, 7]), (vec![7; 4], vec![9, 9]), (vec![7], vec![7])] {
            let mut merged = symbols;
            let len = merge_in_place(&mut merged, merge);
            assert_eq!(merged[..len], expected);
        }
        assert_eq!(merged(&[("aaaaaaaa", 3)], 9), ["aa", "aaaa", "aaaaaaaa"]);
    }

    /// The vocabulary that the tokenizers crate learns from the same words, by id.
    fn reference(words: &[(String, u64)], symbols: usize) -> Vec<String> {
        let alphabet = (0_u8..128).map(char::from).collect();
        let mut trainer = BpeTrainer::builder()
            .vocab_size(symbols)
            .min_frequency(2)
            .initial_alphabet(alphabet)
            .show_progress(false)
            .build();
        let texts = words.iter().flat_map(|(word, count)| std::iter::repeat_n(word.clone(), *count as usize));
        trainer.feed(texts.collect::<Vec<_>>().into_iter(), |word| Ok(vec![word.to_owned()])).unwrap();
        let mut bpe = BPE::default();
        trainer.train(&mut bpe).unwrap();
        let mut vocabulary: Vec<_> = bpe.get_vocab().into_iter().map(|(token, id)| (id, token)).collect();
        vocabulary.sort_unstable();
        vocabulary.into_iter().map(|(_, token)| token).collect()
    }

    proptest! {
        #[test]
        fn the_merges_are_those_of_the_tokenizers_crate(
            words in prop::collection::hash_map("[abcd]{1,9}", 1_u64..6, 1..40), merges in 1_usize..60,
        ) {
            let words: Vec<(String, u64)> = words.into_iter().collect();
            let ours = learn(words.clone(), &identity(), 256 + merges, 2);
            let ours: Vec<String> = ours.symbols[256..].iter().map(|bytes| String::from_utf8(bytes.clone()).unwrap()).collect();
            // The reference's alphabet is half of ours: there, bytes beyond ASCII are not single characters.
            prop_assert_eq!(&ours[..], &reference(&words, 128 + merges)[128..]);
        }

        #[test]
        fn the_order_of_the_words_does_not_matter(words in prop::collection::hash_map("[ab]{1,12}", 1_u64..9, 1..30)) {
            let forward: Vec<(String, u64)> = words.into_iter().collect();
            let backward: Vec<(String, u64)> = forward.iter().rev().cloned().collect();
            let merges = |words| learn(words, &identity(), 300, 2).merges;
            prop_assert_eq!(merges(forward), merges(backward));
        }
    }
}
