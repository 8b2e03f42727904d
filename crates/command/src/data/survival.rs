//! [`Survival`]: which texts a tokenizer changes on the way to tokens and back, and which characters are lost.
//!
//! A model can neither read nor write what its tokenizer does not hold, such as line breaks and braces in that of T5. A run counts this on
//! a sample of its rows, and `inspect --tokenizer` on every row that it reads.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use memory_policy::{counted, plural};
use serde_json::{Value, json};

use crate::screen::shell_words::quoted;

/// The most different characters that are counted.
const MAX_CHARACTERS: usize = 4096;
/// The most characters that are shown.
const SHOWN: usize = 8;

/// Texts and what became of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survival {
    /// Texts that were compared: sources, and targets.
    pub texts: [u64; 2],
    /// Those that changed.
    pub changed: [u64; 2],
    /// Characters that were lost, and how often.
    lost: BTreeMap<char, u64>,
}

impl Survival {
    /// Compares a text with what comes back. Blanks at both ends do not count.
    pub fn add(&mut self, is_target: bool, text: &str, back: &str) {
        let (text, back) = (text.trim(), back.trim());
        self.texts[usize::from(is_target)] += 1;
        if text == back {
            return;
        }
        self.changed[usize::from(is_target)] += 1;
        let mut count: BTreeMap<char, i64> = BTreeMap::new();
        text.chars().for_each(|c| *count.entry(c).or_default() += 1);
        back.chars().for_each(|c| *count.entry(c).or_default() -= 1);
        for (c, lost) in count.into_iter().filter(|(_, lost)| *lost > 0) {
            if self.lost.len() < MAX_CHARACTERS || self.lost.contains_key(&c) {
                *self.lost.entry(c).or_default() += lost.unsigned_abs();
            }
        }
    }

    /// Whether a text changed.
    pub fn is_changed(&self) -> bool {
        self.changed != [0, 0]
    }

    /// The characters that were lost, the most frequent first.
    pub fn lost_characters(&self) -> Vec<char> {
        let mut lost: Vec<(char, u64)> = self.lost.iter().map(|(c, count)| (*c, *count)).collect();
        lost.sort_by_key(|(c, count)| (std::cmp::Reverse(*count), *c));
        lost.into_iter().map(|(c, _)| c).collect()
    }

    /// One line for people, if a text changed. `of` says which rows were compared.
    pub fn in_words(&self, of: &str) -> Option<String> {
        if !self.is_changed() {
            return None;
        }
        let [sources, targets] =
            [0, 1].map(|side| format!("{} of {}", counted(self.changed[side]), counted(self.texts[side])));
        let characters = self.lost_characters();
        let shown = shown(&characters[..characters.len().min(SHOWN)]);
        let mut words = format!("{sources} sources and {targets} targets change on the way to tokens and back ({of})");
        match characters.len().saturating_sub(SHOWN) {
            _ if shown.is_empty() => {}
            0 => {
                let _ = write!(words, "; lost: {shown}");
            }
            more => {
                let _ = write!(words, "; lost: {shown} and {}", plural(more as u64, "more character"));
            }
        }
        Some(words)
    }

    /// The counts, for the `start` event and `inspect --json`.
    pub fn to_json(&self, of: &str) -> Value {
        let lost: serde_json::Map<String, Value> =
            self.lost.iter().take(256).map(|(c, count)| (c.to_string(), json!(count))).collect();
        json!({"rows": of, "sources": self.texts[0], "changed_sources": self.changed[0],
            "targets": self.texts[1], "changed_targets": self.changed[1], "lost": lost})
    }
}

/// Characters for people.
pub fn shown(characters: &[char]) -> String {
    let one = |c: &char| if *c == ' ' { "blank".to_owned() } else { format!("`{}`", c.escape_debug()) };
    characters.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// What helps if targets change: the command for a pretrained model and these files, or another tokenizer for a new model.
pub fn hint(model: Option<&Path>, files: &[PathBuf]) -> String {
    const MOST: usize = 4;
    let Some(model) = model else {
        return "train a tokenizer on these rows for the new model: `train_low_mem train-tokenizer`".to_owned();
    };
    let files: Vec<String> = files.iter().take(MOST).map(|file| quoted(file)).collect();
    format!(
        "add the lost characters to its vocabulary, and train the result: `train_low_mem add-tokens --model {} --missing-in {} \
         --output with-tokens`; a byte-level model such as ByT5 holds every text",
        quoted(model),
        files.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_change_are_counted_with_the_characters_that_are_lost() {
        let mut survival = Survival::default();
        survival.add(false, " print it ", "print it");
        assert_eq!(survival.in_words("2 rows"), None);
        survival.add(true, "a\nb {c}", "a b c");
        survival.add(true, "same", "same");
        let words = survival.in_words("2 rows").expect("a change");
        assert_eq!(
            words,
            "0 of 1 sources and 1 of 2 targets change on the way to tokens and back (2 rows); lost: `\\n`, `{`, `}`"
        );
        assert_eq!(survival.to_json("2 rows")["lost"]["{"], 1);
    }
}
