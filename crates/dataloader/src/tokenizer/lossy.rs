//! [`Lossy`]: the characters that a tokenizer does not give back, found as texts are read.
//!
//! Each character is tried once, beside letters and between blanks: whether it is in the text that its tokens decode to. The table has a fixed size.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::Tokenizer;

/// Code points of the first plane, which have a bit each.
const FIRST_PLANE: usize = 1 << 16;
/// The most characters of other planes that are tried. Later ones count as kept.
const MOST_OTHERS: usize = 1024;
/// Memory of a table: two bits for each code point of the first plane, and an entry for each other character.
pub(crate) const LOSSY_BYTES: u64 = FIRST_PLANE as u64 / 4 + MOST_OTHERS as u64 * 16;
/// The most characters of a text that are named.
const MOST_NAMED: usize = 8;

/// Texts of a batch that have characters which the tokenizer does not give back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LossyTexts {
    /// Sources.
    pub sources: u64,
    /// Targets.
    pub targets: u64,
    /// The first source, and the first target.
    pub first: [Option<LossyText>; 2],
}

/// A text that the tokenizer does not give back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LossyText {
    /// The row of the dataset.
    pub row: u64,
    /// Some of the characters.
    pub characters: Vec<char>,
}

impl LossyTexts {
    pub(crate) fn add(&mut self, is_target: bool, row: u64, characters: Vec<char>) {
        *if is_target { &mut self.targets } else { &mut self.sources } += 1;
        self.first[usize::from(is_target)].get_or_insert(LossyText { row, characters });
    }
}

/// What is known of characters. Threads share it.
pub(crate) struct Lossy(Mutex<Known>);

struct Known {
    tried: Vec<u64>,
    lost: Vec<u64>,
    others: BTreeMap<char, bool>,
}

impl Lossy {
    pub fn new() -> Self {
        let bits = || vec![0; FIRST_PLANE / 64];
        Self(Mutex::new(Known { tried: bits(), lost: bits(), others: BTreeMap::new() }))
    }

    /// Some of the characters of a text that the tokenizer does not give back. Blanks at both ends do not count.
    pub fn characters(&self, tokenizer: &Tokenizer, text: &str) -> Vec<char> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = Vec::new();
        for c in text.trim().chars() {
            if known.is_lost(tokenizer, c) && !found.contains(&c) {
                found.push(c);
                if found.len() == MOST_NAMED {
                    break;
                }
            }
        }
        found
    }
}

impl Known {
    fn is_lost(&mut self, tokenizer: &Tokenizer, c: char) -> bool {
        let (word, bit) = (c as usize / 64, 1 << (c as usize % 64));
        if let Some(tried) = self.tried.get_mut(word) {
            if *tried & bit == 0 {
                *tried |= bit;
                self.lost[word] |= if tokenizer.loses(c) { bit } else { 0 };
            }
            return self.lost[word] & bit != 0;
        }
        match self.others.get(&c) {
            Some(is_lost) => *is_lost,
            None if self.others.len() == MOST_OTHERS => false,
            None => *self.others.entry(c).or_insert(tokenizer.loses(c)),
        }
    }
}

impl Tokenizer {
    /// Whether a character inside a text is not in the text that its tokens decode to. An error means that it cannot be said.
    fn loses(&self, c: char) -> bool {
        let is_lost_in = |text: String| {
            let back = self.encode(&text).and_then(|ids| self.decode(&ids));
            back.is_ok_and(|back| !back.contains(c))
        };
        // A vocabulary of words has it alone only.
        is_lost_in(format!("a{c}a")) && is_lost_in(format!("a {c} a"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_do_not_come_back_are_named_once() {
        let tokenizer = crate::testing::letters();
        let lossy = Lossy::new();
        for _ in 0..2 {
            assert_eq!(lossy.characters(&tokenizer, " a {b}\u{1f600} {c}"), ['{', '}', '\u{1f600}']);
            assert!(lossy.characters(&tokenizer, " a b\n").is_empty());
        }
    }
}
