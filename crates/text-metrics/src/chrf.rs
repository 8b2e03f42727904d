//! Corpus chrF (Popović, 2015) and chrF++ (Popović, 2017), equal to sacreBLEU's `CHRF(word_order=..)` with its other
//! defaults: characters in runs of up to 6, white space left out, recall weighing twice as much as precision.
//!
//! Invariants: counts are summed over the corpus before anything is divided; 0 to 100.
//!
//! ```
//! let mut chrf = text_metrics::chrf::Chrf::new(0);
//! chrf.add("the cat sat", "the cat sat");
//! assert!((chrf.score() - 100.0).abs() < 1e-9);
//! ```

use crate::bleu::SACREBLEU_VERSION;
use crate::ngrams::{Overlap, overlap};
use crate::python::{is_space, words};

/// The longest run of characters.
const CHARACTER_ORDER: usize = 6;
/// The weight of recall relative to precision.
const BETA: f64 = 2.0;
/// The longest word n-gram of chrF++: single words and pairs.
pub const CHRF_PLUS_PLUS: usize = 2;

/// The sufficient statistics of a corpus.
#[derive(Clone, Debug)]
pub struct Chrf {
    word_order: usize,
    /// Counts by length of the run: character runs first, then word runs.
    counts: Vec<Overlap>,
}

impl Chrf {
    /// An empty corpus. `word_order` 0 is chrF, [`CHRF_PLUS_PLUS`] is chrF++.
    pub fn new(word_order: usize) -> Self {
        Chrf { word_order, counts: vec![Overlap::default(); CHARACTER_ORDER + word_order] }
    }

    /// Counts one sentence and returns its own score.
    pub fn add(&mut self, hypothesis: &str, reference: &str) -> f64 {
        let counts = self.counts_of(hypothesis, reference);
        for (sum, count) in self.counts.iter_mut().zip(&counts) {
            sum.hypothesis += count.hypothesis;
            sum.reference += count.reference;
            sum.matches += count.matches;
        }
        score_of(&counts)
    }

    fn counts_of(&self, hypothesis: &str, reference: &str) -> Vec<Overlap> {
        let characters = |text: &str| text.chars().filter(|&c| !is_space(c)).collect::<Vec<char>>();
        let [of_hypothesis, of_reference] = [hypothesis, reference].map(characters);
        let runs = (1..=CHARACTER_ORDER).map(|n| overlap(&of_hypothesis, &of_reference, n));
        let [hypothesis, reference] = [hypothesis, reference].map(parted_words);
        let of_words = (1..=self.word_order).map(|n| overlap(&hypothesis, &reference, n));
        // A length that the reference is too short for is not counted for the hypothesis, either.
        let seen = |counts: Overlap| if counts.reference == 0 { Overlap::default() } else { counts };
        runs.chain(of_words).map(seen).collect()
    }

    /// The score of everything added so far, 0 to 100; 0 for an empty corpus.
    pub fn score(&self) -> f64 {
        score_of(&self.counts)
    }

    /// The reproducibility signature, as sacreBLEU prints it for the same settings.
    pub fn signature(&self) -> String {
        let words = self.word_order;
        format!("nrefs:1|case:mixed|eff:yes|nc:{CHARACTER_ORDER}|nw:{words}|space:no|version:{SACREBLEU_VERSION}")
    }
}

/// The F-score of the mean precision and the mean recall over the lengths that both sides have.
fn score_of(counts: &[Overlap]) -> f64 {
    let (mut precision, mut recall, mut lengths) = (0.0, 0.0, 0.0);
    for count in counts.iter().filter(|count| count.hypothesis > 0 && count.reference > 0) {
        precision += count.matches as f64 / count.hypothesis as f64;
        recall += count.matches as f64 / count.reference as f64;
        lengths += 1.0;
    }
    if precision + recall == 0.0 {
        return 0.0;
    }
    let (precision, recall, factor) = (precision / lengths, recall / lengths, BETA * BETA);
    100.0 * ((1.0 + factor) * precision * recall / (factor * precision + recall))
}

/// The words of a sentence. One punctuation mark at the end or else at the beginning of a word becomes its own word.
fn parted_words(text: &str) -> Vec<&str> {
    let mut parted = Vec::new();
    for word in words(text) {
        let (mut from_front, mut from_back) = (word.char_indices(), word.char_indices());
        let (first, last) = (from_front.next().map(|(_, c)| c), from_back.next_back());
        let is_mark = |c: char| c.is_ascii_punctuation();
        match (first, last) {
            (_, Some((0, _))) | (None, _) | (_, None) => parted.push(word),
            (_, Some((at, last))) if is_mark(last) => parted.extend([&word[..at], &word[at..]]),
            (Some(first), _) if is_mark(first) => parted.extend([&word[..1], &word[1..]]),
            _ => parted.push(word),
        }
    }
    parted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_corpus_and_one_without_a_match_score_zero() {
        assert_eq!(Chrf::new(0).score(), 0.0);
        assert_eq!(Chrf::new(2).add("", "a b"), 0.0);
        assert_eq!(Chrf::new(0).add("xyz", "abc"), 0.0);
    }

    #[test]
    fn white_space_does_not_count() {
        assert_eq!(Chrf::new(0).add("the cat", "thecat"), 100.0);
        assert!(Chrf::new(2).add("the cat", "thecat") < 100.0);
    }

    #[test]
    fn one_mark_of_a_word_is_parted_from_it_and_the_last_one_first() {
        assert_eq!(parted_words("(hi) \"so . ok, é! !"), ["(hi", ")", "\"", "so", ".", "ok", ",", "é", "!", "!"]);
    }
}
