//! Corpus BLEU-4 (Papineni et al., 2002), equal to sacreBLEU's `BLEU(tokenize=..)` with its defaults: mixed case, one
//! reference, `exp` smoothing, no effective order.
//!
//! Invariants:
//! * Streaming: only ten counters are kept of a sentence, so a corpus of any size takes the memory of one sentence.
//! * Counts are summed over the corpus before anything is divided; batches are never averaged.
//! * The brevity penalty is never above 1.
//!
//! ```
//! use text_metrics::bleu::{Bleu, Tokenization};
//! let mut bleu = Bleu::new(Tokenization::V13a);
//! bleu.add("the cat sat on the mat.", "the cat sat on the mat.");
//! assert!((bleu.score().score - 100.0).abs() < 1e-9);
//! ```

mod language;
mod tokenize;

pub use language::BleuByLanguage;
pub use tokenize::{Tokenization, UnknownTokenization};

use crate::ngrams::overlap;
use crate::python::words;

/// The longest n-gram that is counted.
const MAX_ORDER: usize = 4;

/// The sacreBLEU whose scores these equal; the last item of a signature.
pub const SACREBLEU_VERSION: &str = "2.6.0";

/// The sufficient statistics of a corpus.
#[derive(Clone, Debug)]
pub struct Bleu {
    tokenization: Tokenization,
    matches: [u64; MAX_ORDER],
    totals: [u64; MAX_ORDER],
    hypothesis_tokens: u64,
    reference_tokens: u64,
}

/// A corpus score and its components.
#[derive(Clone, Debug, PartialEq)]
pub struct BleuScore {
    /// BLEU, 0 to 100.
    pub score: f64,
    /// Hypothesis n-grams that also occur in the references, for n from 1 to 4.
    pub matches: [u64; MAX_ORDER],
    /// Hypothesis n-grams.
    pub totals: [u64; MAX_ORDER],
    /// n-gram precisions in percent, after smoothing.
    pub precisions: [f64; MAX_ORDER],
    /// `exp(1 - reference / hypothesis)` if the hypotheses are shorter, else 1.
    pub brevity_penalty: f64,
    /// Tokens of all hypotheses.
    pub hypothesis_tokens: u64,
    /// Tokens of all references.
    pub reference_tokens: u64,
}

impl Bleu {
    /// An empty corpus.
    pub fn new(tokenization: Tokenization) -> Self {
        Bleu { tokenization, matches: [0; 4], totals: [0; 4], hypothesis_tokens: 0, reference_tokens: 0 }
    }

    /// Counts one sentence.
    pub fn add(&mut self, hypothesis: &str, reference: &str) {
        let hypothesis = self.tokenization.tokenize(hypothesis);
        let reference = self.tokenization.tokenize(reference);
        let hypothesis: Vec<&str> = words(&hypothesis).collect();
        let reference: Vec<&str> = words(&reference).collect();
        self.hypothesis_tokens += hypothesis.len() as u64;
        self.reference_tokens += reference.len() as u64;
        for n in 1..=MAX_ORDER {
            let counts = overlap(&hypothesis, &reference, n);
            self.totals[n - 1] += counts.hypothesis;
            self.matches[n - 1] += counts.matches;
        }
    }

    /// The score of everything added so far; 0 for an empty corpus.
    pub fn score(&self) -> BleuScore {
        let (hypothesis, reference) = (self.hypothesis_tokens as f64, self.reference_tokens as f64);
        let brevity_penalty = match self.hypothesis_tokens {
            tokens if tokens >= self.reference_tokens => 1.0,
            0 => 0.0,
            _ => (1.0 - reference / hypothesis).exp(),
        };
        let mut score = BleuScore {
            score: 0.0,
            matches: self.matches,
            totals: self.totals,
            precisions: [0.0; MAX_ORDER],
            brevity_penalty,
            hypothesis_tokens: self.hypothesis_tokens,
            reference_tokens: self.reference_tokens,
        };
        if self.matches == [0; MAX_ORDER] {
            return score;
        }
        // "exp" smoothing (Chen & Cherry, 2014, method 3): the k-th order without a match counts 1 / 2^k matches.
        let mut smoothing = 1.0;
        for n in 0..MAX_ORDER {
            if self.totals[n] == 0 {
                break;
            }
            let total = self.totals[n] as f64;
            score.precisions[n] = if self.matches[n] == 0 {
                smoothing *= 2.0;
                100.0 / (smoothing * total)
            } else {
                100.0 * self.matches[n] as f64 / total
            };
        }
        // A corpus without a single 4-gram has a precision of 0, hence a score of 0.
        if score.precisions.iter().all(|&precision| precision > 0.0) {
            let logarithms: f64 = score.precisions.iter().map(|precision| precision.ln()).sum();
            score.score = brevity_penalty * (logarithms / MAX_ORDER as f64).exp();
        }
        score
    }

    /// The reproducibility signature, as sacreBLEU prints it for the same settings.
    pub fn signature(&self) -> String {
        format!("nrefs:1|case:mixed|eff:no|tok:{}|smooth:exp|version:{SACREBLEU_VERSION}", self.tokenization)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn score(tokenization: Tokenization, pairs: &[(&str, &str)]) -> BleuScore {
        let mut bleu = Bleu::new(tokenization);
        for (hypothesis, reference) in pairs {
            bleu.add(hypothesis, reference);
        }
        bleu.score()
    }

    #[test]
    fn a_corpus_equal_to_its_references_scores_a_hundred() {
        let score = score(Tokenization::V13a, &[("one two three four five", "one two three four five")]);
        assert!((score.score - 100.0).abs() < 1e-9);
        assert_eq!(score.brevity_penalty, 1.0);
    }

    #[test]
    fn an_empty_corpus_or_one_without_a_match_scores_zero() {
        assert_eq!(score(Tokenization::V13a, &[]).score, 0.0);
        assert_eq!(score(Tokenization::V13a, &[("", "a b c d")]).score, 0.0);
        assert_eq!(score(Tokenization::V13a, &[("x y z w", "a b c d")]).score, 0.0);
    }

    #[test]
    fn a_corpus_of_sentences_too_short_for_four_words_scores_zero() {
        assert_eq!(score(Tokenization::None, &[("a b c", "a b c")]).score, 0.0);
    }

    #[test]
    fn a_long_hypothesis_is_not_rewarded_for_its_length() {
        let score = score(Tokenization::None, &[("a b c d e f g h", "a b c d")]);
        assert_eq!(score.brevity_penalty, 1.0);
        assert!(score.score < 100.0);
    }

    #[test]
    fn a_repeated_word_is_matched_as_often_as_the_reference_has_it() {
        let mut bleu = Bleu::new(Tokenization::None);
        bleu.add("the the the the", "the cat");
        assert_eq!((bleu.matches[0], bleu.totals[0]), (1, 4));
    }

    #[test]
    fn the_signature_is_written_as_sacrebleu_writes_it() {
        let signature = Bleu::new(Tokenization::Zh).signature();
        assert_eq!(signature, "nrefs:1|case:mixed|eff:no|tok:zh|smooth:exp|version:2.6.0");
    }

    proptest! {
        #[test]
        fn a_score_is_between_0_and_100_and_does_not_depend_on_the_order(pairs in proptest::collection::vec((".{0,30}", ".{0,30}"), 0..8)) {
            for tokenization in [Tokenization::V13a, Tokenization::Zh, Tokenization::Char, Tokenization::None] {
                let mut forward = Bleu::new(tokenization);
                let mut backward = Bleu::new(tokenization);
                for (hypothesis, reference) in &pairs { forward.add(hypothesis, reference); }
                for (hypothesis, reference) in pairs.iter().rev() { backward.add(hypothesis, reference); }
                let score = forward.score();
                prop_assert!((0.0..=100.0 + 1e-9).contains(&score.score), "{score:?}");
                prop_assert!(score.brevity_penalty <= 1.0);
                prop_assert_eq!(score, backward.score());
            }
        }
    }
}
