//! BLEU for texts of any language: the script of the references decides the tokenizer.
//!
//! Chinese has no spaces, so `13a` would take a sentence for one word. sacreBLEU asks its user for a tokenizer; here the
//! references decide. For scripts that none of sacreBLEU's own tokenizers cuts into words (kana, Thai, Lao, Khmer,
//! Burmese), text is cut into characters. The score is exactly sacreBLEU's with the tokenizer that the signature names.

use super::{Bleu, BleuScore, Tokenization};
use crate::script::{is_han, is_of_a_script_without_spaces};

/// The percentage of the references' letters from which a script decides.
const LARGE_SHARE_PERCENT: u64 = 10;

/// A corpus whose tokenizer is not known yet, so it is counted with each tokenizer.
#[derive(Clone, Debug)]
pub struct BleuByLanguage {
    of: [Bleu; 3],
    letters: u64,
    chinese: u64,
    without_spaces: u64,
}

impl Default for BleuByLanguage {
    fn default() -> Self {
        let of = [Tokenization::V13a, Tokenization::Zh, Tokenization::Char].map(Bleu::new);
        Self { of, letters: 0, chinese: 0, without_spaces: 0 }
    }
}

impl BleuByLanguage {
    /// Counts one sentence.
    pub fn add(&mut self, hypothesis: &str, reference: &str) {
        self.of.iter_mut().for_each(|bleu| bleu.add(hypothesis, reference));
        for letter in reference.chars().filter(|c| c.is_alphabetic()) {
            self.letters += 1;
            self.chinese += u64::from(is_han(letter));
            self.without_spaces += u64::from(is_of_a_script_without_spaces(letter));
        }
    }

    /// The corpus with the tokenizer of its language.
    fn chosen(&self) -> &Bleu {
        let is_large = |count: u64| count > 0 && count * 100 >= self.letters * LARGE_SHARE_PERCENT;
        match (is_large(self.without_spaces), is_large(self.chinese)) {
            (true, _) => &self.of[2],
            (false, true) => &self.of[1],
            (false, false) => &self.of[0],
        }
    }

    /// See [`Bleu::score`].
    pub fn score(&self) -> BleuScore {
        self.chosen().score()
    }

    /// See [`Bleu::signature`].
    pub fn signature(&self) -> String {
        self.chosen().signature()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_references_decide_how_sentences_are_cut() {
        for (reference, tokenizer) in [
            ("the cat sat on the mat", "13a"),
            ("1 + 2 = 3", "13a"),
            ("", "13a"),
            ("猫坐在垫子上", "zh"),
            ("the word 猫 means cat here", "13a"),
            ("cat 猫", "zh"),
            ("ねこはマットの上にいる", "char"),
            ("แมวนั่งบนเสื่อ", "char"),
            ("고양이가 앉아 있다", "13a"),
        ] {
            let mut bleu = BleuByLanguage::default();
            bleu.add("the cat sat 猫坐在", reference);
            let expected = tokenizer.parse().map(Bleu::new).unwrap();
            assert_eq!(bleu.signature(), expected.signature(), "{reference}");
            let mut alone = expected;
            alone.add("the cat sat 猫坐在", reference);
            assert_eq!(bleu.score(), alone.score(), "{reference}");
        }
    }
}
