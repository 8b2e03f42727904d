//! ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum (Lin, 2004), equal to google's `rouge_score.RougeScorer`, row by row.
//!
//! The score of a row is the F-measure, 0 to 1; the score of a corpus is the mean of its rows. Words are runs of `a-z` and
//! `0-9` in the lowercased text, as in google's tokenizer, which ignores other scripts. With a stemmer, words of more than three
//! letters are stemmed (Porter, with NLTK's extensions). ROUGE-Lsum takes each line as a sentence.
//!
//! With [`Rouge::any_script`] the letters of the reference decide how its row is cut: if a tenth of them is not Latin, words are runs of letters, digits
//! and their marks, and each letter of Chinese and of scripts without spaces is a word. This equals google's scorer with such a tokenizer.
//!
//! ```
//! use text_metrics::rouge::Rouge;
//! let score = Rouge { stems: true, any_script: false }.score("the cats sat", "the cat sat");
//! assert_eq!(score.rouge1, 1.0);
//! ```

use std::collections::HashMap;

use crate::ngrams::overlap;
use crate::porter;
use crate::script::{is_han, is_latin, is_of_a_script_without_spaces, is_of_a_word};

/// The settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rouge {
    /// Whether words are stemmed; google's default is not to stem.
    pub stems: bool,
    /// Whether references in other scripts than Latin are cut into words of their script.
    pub any_script: bool,
}

/// The percentage of a reference's letters from which other scripts than Latin decide.
const LARGE_SHARE_PERCENT: usize = 10;

/// The F-measures of a row, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RougeScore {
    /// Words.
    pub rouge1: f64,
    /// Pairs of words.
    pub rouge2: f64,
    /// The longest common subsequence.
    pub rouge_l: f64,
    /// The union of the longest common subsequences of each line of the reference with the lines of the hypothesis.
    pub rouge_l_sum: f64,
}

impl Rouge {
    /// Scores a hypothesis.
    pub fn score(self, hypothesis: &str, reference: &str) -> RougeScore {
        let mut numbers = HashMap::new();
        let words = if self.cuts_by_script(reference) { words_of_any_script } else { words_of_google };
        let mut sentences = |text: &str| -> Vec<Vec<u32>> {
            text.split('\n')
                .filter(|line| !line.is_empty())
                .map(|line| self.numbered(line, words, &mut numbers))
                .collect()
        };
        // A line ends a word, so the words of a text are those of its lines.
        let (of_reference, of_hypothesis) = (sentences(reference), sentences(hypothesis));
        let (words_r, words_h) = (of_reference.concat(), of_hypothesis.concat());
        let of_ngrams = |n| {
            let counts = overlap(&words_h, &words_r, n);
            f_measure(counts.matches, counts.hypothesis, counts.reference)
        };
        let (hypothesis_words, reference_words) = (words_h.len() as u64, words_r.len() as u64);
        let common = common_length(&words_r, &words_h);
        let hits = union_hits(&of_reference, &of_hypothesis, numbers.len());
        RougeScore {
            rouge1: of_ngrams(1),
            rouge2: of_ngrams(2),
            rouge_l: f_measure(common, hypothesis_words, reference_words),
            rouge_l_sum: f_measure(hits, hypothesis_words, reference_words),
        }
    }

    /// Whether the row of this reference is cut into words of any script.
    pub fn cuts_by_script(self, reference: &str) -> bool {
        if !self.any_script {
            return false;
        }
        let letters = || reference.chars().filter(|c| c.is_alphabetic());
        let others = letters().filter(|c| !is_latin(*c)).count();
        others > 0 && others * 100 >= letters().count() * LARGE_SHARE_PERCENT
    }

    /// The words of a line, each as a number.
    fn numbered(self, line: &str, words: fn(&str) -> Vec<&str>, numbers: &mut HashMap<String, u32>) -> Vec<u32> {
        let mut number = |word: String| {
            let next = numbers.len() as u32;
            *numbers.entry(word).or_insert(next)
        };
        let lower = line.chars().flat_map(char::to_lowercase).collect::<String>();
        let is_stemmed = |word: &str| self.stems && word.len() > 3 && word.is_ascii();
        words(&lower)
            .into_iter()
            .map(|word| number(if is_stemmed(word) { porter::stem(word) } else { word.to_owned() }))
            .collect()
    }
}

/// The words of google's tokenizer.
fn words_of_google(line: &str) -> Vec<&str> {
    line.split(|c: char| !matches!(c, 'a'..='z' | '0'..='9')).filter(|word| !word.is_empty()).collect()
}

/// The words of a text in any script.
fn words_of_any_script(line: &str) -> Vec<&str> {
    let is_alone = |c: char| is_han(c) || is_of_a_script_without_spaces(c);
    let (mut words, mut from) = (Vec::new(), 0);
    let mut end = |from: usize, to: usize| words.extend((from < to).then(|| &line[from..to]));
    for (at, c) in line.char_indices() {
        if !is_of_a_word(c) {
            end(from, at);
            from = at + c.len_utf8();
        } else if is_alone(c) {
            end(from, at);
            from = at + c.len_utf8();
            end(at, from);
        }
    }
    end(from, line.len());
    words
}

/// The F-measure from the number of hits and of words.
fn f_measure(hits: u64, hypothesis: u64, reference: u64) -> f64 {
    let (precision, recall) = (hits as f64 / hypothesis.max(1) as f64, hits as f64 / reference.max(1) as f64);
    if precision + recall > 0.0 { 2.0 * precision * recall / (precision + recall) } else { 0.0 }
}

/// The length of the longest common subsequence.
fn common_length(reference: &[u32], hypothesis: &[u32]) -> u64 {
    let mut lengths = vec![0; hypothesis.len() + 1];
    for word in reference {
        common_row(*word, hypothesis, &mut lengths, |_| {});
    }
    u64::from(lengths[hypothesis.len()])
}

/// Computes one row of the table of common subsequences: `lengths` are those with every prefix of the hypothesis, and are
/// updated for a reference that is one word longer. Calls `goes_left` for each column where a backtrack goes left.
fn common_row(word: u32, hypothesis: &[u32], lengths: &mut [u32], mut goes_left: impl FnMut(usize)) {
    let mut diagonal = 0;
    for (j, &other) in hypothesis.iter().enumerate() {
        let above = lengths[j + 1];
        let left = lengths[j];
        lengths[j + 1] = if word == other { diagonal + 1 } else { above.max(left) };
        if left > above {
            goes_left(j);
        }
        diagonal = above;
    }
}

/// Counts words of the reference's sentences in the union of their common subsequences with the hypothesis's sentences. No
/// word counts more often than it occurs on either side.
fn union_hits(reference: &[Vec<u32>], hypothesis: &[Vec<u32>], words: usize) -> u64 {
    let counts = |sentences: &[Vec<u32>]| {
        let mut counts = vec![0_u32; words];
        sentences.iter().flatten().for_each(|&word| counts[word as usize] += 1);
        counts
    };
    let mut left = [counts(reference), counts(hypothesis)];
    let mut hits = 0;
    for sentence in reference {
        let mut is_common = vec![false; sentence.len()];
        for other in hypothesis {
            mark_common(sentence, other, &mut is_common);
        }
        for (&word, _) in sentence.iter().zip(&is_common).filter(|(_, is_common)| **is_common) {
            if left.iter().all(|left| left[word as usize] > 0) {
                left.iter_mut().for_each(|left| left[word as usize] -= 1);
                hits += 1;
            }
        }
    }
    hits
}

/// Marks the words of a longest common subsequence. If there are several, it is the one that google's backtrack finds.
fn mark_common(reference: &[u32], hypothesis: &[u32], is_common: &mut [bool]) {
    // A bit for each pair of words: whether the backtrack goes left there.
    let columns = hypothesis.len();
    let mut left = vec![0_u64; (reference.len() * columns).div_ceil(64)];
    let mut lengths = vec![0; columns + 1];
    for (i, word) in reference.iter().enumerate() {
        common_row(*word, hypothesis, &mut lengths, |j| {
            let bit = i * columns + j;
            left[bit / 64] |= 1 << (bit % 64);
        });
    }
    let (mut i, mut j) = (reference.len(), columns);
    while i > 0 && j > 0 {
        let bit = (i - 1) * columns + j - 1;
        if reference[i - 1] == hypothesis[j - 1] {
            is_common[i - 1] = true;
            (i, j) = (i - 1, j - 1);
        } else if left[bit / 64] >> (bit % 64) & 1 == 1 {
            j -= 1;
        } else {
            i -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_text_without_words_scores_zero() {
        for (hypothesis, reference) in [("", "a b"), ("a b", ""), ("", ""), ("你好", "你好"), ("...", "...")] {
            assert_eq!(Rouge::default().score(hypothesis, reference), RougeScore::default());
        }
    }

    #[test]
    fn words_of_any_script_are_found() {
        for (text, words) in [
            ("你好，world 12 猫", "你|好|world|12|猫"),
            ("हिन्दी में लिखा। दूसरा", "हिन्दी|में|लिखा|दूसरा"),
            ("привет, мир!", "привет|мир"),
            ("مَرْحَبًا بالعالم؟", "مَرْحَبًا|بالعالم"),
            ("고양이가 앉아 있다.", "고양이가|앉아|있다"),
            ("ねこ cat", "ね|こ|cat"),
            ("...", ""),
        ] {
            assert_eq!(words_of_any_script(text).join("|"), words);
        }
    }

    #[test]
    fn an_answer_in_another_script_has_a_score_and_latin_ones_keep_theirs() {
        let any = Rouge { any_script: true, ..Rouge::default() };
        for text in ["你好世界", "हिन्दी में", "привет мир", "สวัสดี", "שלום עולם"]
        {
            let score = any.score(text, text);
            assert_eq!((score.rouge1, score.rouge_l, score.rouge_l_sum), (1.0, 1.0, 1.0), "{text}");
            assert_eq!(any.score("no", text), RougeScore::default());
        }
        assert_eq!(any.score("привет друг", "привет мир").rouge1, 0.5);
        for (hypothesis, reference) in
            [("the été", "l'été the"), ("the word 猫 means a cat", "the word 猫 means cat here")]
        {
            assert_eq!(any.score(hypothesis, reference), Rouge::default().score(hypothesis, reference));
        }
    }

    #[test]
    fn lines_are_sentences_to_rouge_l_sum_alone() {
        let score = Rouge::default().score("d e f\na b c", "a b c\nd e f");
        assert_eq!((score.rouge_l, score.rouge_l_sum), (0.5, 1.0));
    }

    proptest! {
        #[test]
        fn scores_are_shares_and_a_text_is_like_itself(a in "[ab \n]{0,20}", b in "[abc \n]{0,20}") {
            let score = Rouge { stems: true, any_script: false }.score(&a, &b);
            for share in [score.rouge1, score.rouge2, score.rouge_l, score.rouge_l_sum] {
                prop_assert!((0.0..=1.0).contains(&share), "{:?}", score);
            }
            prop_assert!(score.rouge_l <= score.rouge1 + 1e-12);
            let same = Rouge::default().score(&a, &a);
            prop_assert!(same.rouge_l == same.rouge1 && same.rouge_l_sum == same.rouge1);
        }
    }
}
