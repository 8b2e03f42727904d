//! Texts as labels: accuracy, macro-F1, and the scores of each label. They equal scikit-learn's `accuracy_score`,
//! `precision_recall_fscore_support(labels=sorted(set(references)), zero_division=0)`, `matthews_corrcoef` and `confusion_matrix`. Of rows with any
//! number of labels, they equal the same functions of the binary matrix of rows and labels.
//!
//! A label is a text without white space at its ends. The references define the labels. An answer that is none of them is
//! wrong, and counts against the reference's label.

use std::collections::{BTreeMap, BTreeSet};

/// The most different labels; texts with more are not labels.
pub const MAX_LABELS: usize = 10_000;

/// The most labels of a confusion matrix.
pub const MAX_CONFUSED: usize = 64;

/// The most pairs of a label and a wrong answer.
const MAX_PAIRS: usize = 20_000;

/// The counts of a corpus.
#[derive(Clone, Debug, Default)]
pub struct Labels {
    by_label: BTreeMap<String, Counts>,
    /// Wrong answers by the numbers of the reference's and the answer's label.
    confused: BTreeMap<(usize, usize), u64>,
    spellings: Spellings,
    rows: u64,
    correct: u64,
    /// Whether a row has any number of labels.
    are_sets: bool,
    /// Bytes of the labels.
    bytes: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// The number of the label, by its first use.
    number: usize,
    correct: u64,
    predicted: u64,
    references: u64,
}

/// There are more than [`MAX_LABELS`] different references, or they are too long: these texts are not labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the references are not labels: expected at most {MAX_LABELS} distinct ones, 1 MiB in all")]
pub struct NoLabels;

/// The most bytes of all labels.
const MAX_BYTES: usize = 1 << 20;

impl Labels {
    /// Counts one answer.
    pub fn add(&mut self, hypothesis: &str, reference: &str) {
        let reference_text = reference;
        let (hypothesis, reference) = (hypothesis.trim(), reference.trim());
        self.rows += 1;
        self.correct += u64::from(hypothesis == reference);
        if self.overflows() {
            return;
        }
        self.spellings.add(reference_text);
        let of_reference = self.counts_of(reference);
        of_reference.references += 1;
        of_reference.correct += u64::from(hypothesis == reference);
        let of = of_reference.number;
        // A later reference may have this answer's label.
        let of_answer = self.counts_of(hypothesis);
        of_answer.predicted += 1;
        let answer = of_answer.number;
        if answer != of && self.confused.len() <= MAX_PAIRS {
            *self.confused.entry((of, answer)).or_default() += 1;
        }
    }

    /// Counts one answer that is any number of labels, parted by commas. It is correct as a whole if no label is missing or wrong.
    pub fn add_sets(&mut self, hypothesis: &str, reference: &str) {
        let [hypothesis, reference] = [hypothesis, reference].map(|text| label_set(text).collect::<BTreeSet<_>>());
        (self.rows, self.are_sets) = (self.rows + 1, true);
        self.correct += u64::from(hypothesis == reference);
        if self.overflows() {
            return;
        }
        for label in &reference {
            self.spellings.add(label);
            let counts = self.counts_of(label);
            counts.references += 1;
            counts.correct += u64::from(hypothesis.contains(label));
        }
        hypothesis.iter().for_each(|label| self.counts_of(label).predicted += 1);
    }

    fn counts_of(&mut self, label: &str) -> &mut Counts {
        if !self.by_label.contains_key(label) {
            self.bytes += label.len();
            let counts = Counts { number: self.by_label.len(), ..Counts::default() };
            self.by_label.insert(label.to_owned(), counts);
        }
        self.by_label.get_mut(label).expect("it was inserted")
    }

    fn overflows(&self) -> bool {
        self.by_label.len() > 2 * MAX_LABELS || self.bytes > MAX_BYTES
    }

    /// The fraction of answers that equal their reference; 0 without answers.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.rows.max(1) as f64
    }

    /// F1 over the answers with each of the labels together, 0 to 1; 0 without answers.
    ///
    /// # Errors
    /// The references are not labels.
    pub fn micro_f1(&self) -> Result<f64, NoLabels> {
        self.classes()?;
        let labels = self.by_label.values().filter(|counts| counts.references > 0);
        let (correct, all) = labels.fold((0, 0), |(correct, all), counts| {
            (correct + counts.correct, all + counts.predicted + counts.references)
        });
        Ok(2.0 * correct as f64 / all.max(1) as f64)
    }

    /// The mean of the labels' F1, 0 to 1; 0 without answers.
    ///
    /// # Errors
    /// The references are not labels.
    pub fn macro_f1(&self) -> Result<f64, NoLabels> {
        Ok(mean(&self.classes()?, |class| class.f1))
    }

    /// Matthews' correlation over all labels, as scikit-learn's `matthews_corrcoef`: -1 to 1; 0 where it is not defined, such as where a row
    /// has any number of labels.
    ///
    /// # Errors
    /// The references are not labels.
    pub fn matthews(&self) -> Result<f64, NoLabels> {
        self.classes()?;
        let sum = |of: &dyn Fn(&Counts) -> f64| self.by_label.values().map(of).sum::<f64>();
        let rows = self.rows as f64;
        let answered = rows * rows - sum(&|counts| (counts.predicted as f64).powi(2));
        let right = rows * rows - sum(&|counts| (counts.references as f64).powi(2));
        let both = sum(&|counts| counts.predicted as f64 * counts.references as f64);
        let spread = (answered * right).sqrt();
        Ok(if spread == 0.0 || self.are_sets { 0.0 } else { (self.correct as f64 * rows - both) / spread })
    }

    /// The scores of each label of the references, in the order of the labels.
    ///
    /// # Errors
    /// The references are not labels.
    pub fn classes(&self) -> Result<Vec<Class>, NoLabels> {
        let labels = || self.by_label.iter().filter(|(_, counts)| counts.references > 0);
        if self.overflows() || labels().count() > MAX_LABELS {
            return Err(NoLabels);
        }
        let share = |part: u64, of: u64| if of == 0 { 0.0 } else { part as f64 / of as f64 };
        let class = |(label, counts): (&String, &Counts)| Class {
            label: label.clone(),
            precision: share(counts.correct, counts.predicted),
            recall: share(counts.correct, counts.references),
            f1: share(2 * counts.correct, counts.predicted + counts.references),
            support: counts.references,
            predicted: counts.predicted,
        };
        Ok(labels().map(class).collect())
    }

    /// For each label of the references, in their order, the number of answers with each of these labels, and last the number of other
    /// answers. `None` if there are more than [`MAX_CONFUSED`] labels, texts that are no labels, or rows of any number of labels.
    pub fn confusion(&self) -> Option<Vec<Vec<u64>>> {
        let labels: Vec<&Counts> = self.by_label.values().filter(|counts| counts.references > 0).collect();
        if self.are_sets
            || self.overflows()
            || labels.len() > MAX_CONFUSED
            || self.confused.len() > MAX_PAIRS
            || labels.is_empty()
        {
            return None;
        }
        let row = |of: &&Counts| {
            let between = |answer: &&Counts| match of.number == answer.number {
                true => of.correct,
                false => self.confused.get(&(of.number, answer.number)).copied().unwrap_or(0),
            };
            let mut row: Vec<u64> = labels.iter().map(between).collect();
            row.push(of.references - row.iter().sum::<u64>());
            row
        };
        Some(labels.iter().map(row).collect())
    }

    /// How the references' labels are spelt.
    pub fn spellings(&self) -> &Spellings {
        &self.spellings
    }
}

/// The labels in a text, which commas or line ends part.
pub fn label_set(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', '\n']).map(str::trim).filter(|label| !label.is_empty())
}

/// The scores of a label.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// The label.
    pub label: String,
    /// The share of the answers with this label that are right; 0 without such answers.
    pub precision: f64,
    /// The share of the references with this label that were answered right.
    pub recall: f64,
    /// The harmonic mean of both.
    pub f1: f64,
    /// References with this label.
    pub support: u64,
    /// Answers with this label.
    pub predicted: u64,
}

/// The mean of a score over labels; 0 without labels.
pub fn mean(classes: &[Class], score: impl Fn(&Class) -> f64) -> f64 {
    classes.iter().map(score).sum::<f64>() / classes.len().max(1) as f64
}

/// The mean of a score over labels, each as often as it is in the references; 0 without labels.
pub fn weighted_mean(classes: &[Class], score: impl Fn(&Class) -> f64) -> f64 {
    let support: u64 = classes.iter().map(|class| class.support).sum();
    classes.iter().map(|class| class.support as f64 * score(class)).sum::<f64>() / support.max(1) as f64
}

/// Texts that may be labels, and how often each occurs.
#[derive(Clone, Debug, Default)]
pub struct Spellings {
    /// By the text in small letters, with one blank for each white space.
    by_label: BTreeMap<String, BTreeMap<String, u64>>,
    distinct: usize,
    bytes: usize,
}

impl Spellings {
    /// Counts a text.
    pub fn add(&mut self, text: &str) {
        if self.overflows() {
            return;
        }
        let label = text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
        let spellings = self.by_label.entry(label).or_default();
        if let Some(count) = spellings.get_mut(text) {
            *count += 1;
        } else {
            spellings.insert(text.to_owned(), 1);
            (self.distinct, self.bytes) = (self.distinct + 1, self.bytes + text.len());
        }
    }

    fn overflows(&self) -> bool {
        self.distinct > MAX_LABELS || self.bytes > MAX_BYTES
    }

    /// Each text and its count, the most frequent first; `None` if there are too many texts for labels.
    pub fn counts(&self) -> Option<Vec<(&str, u64)>> {
        if self.overflows() {
            return None;
        }
        let all = self.by_label.values().flatten();
        let mut counts: Vec<(&str, u64)> = all.map(|(text, count)| (text.as_str(), *count)).collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        Some(counts)
    }

    /// Labels that have several spellings, which differ only by capital letters or white space.
    pub fn variants(&self) -> Vec<Vec<(&str, u64)>> {
        if self.overflows() {
            return Vec::new();
        }
        let several = self.by_label.values().filter(|spellings| spellings.len() > 1);
        several.map(|spellings| spellings.iter().map(|(text, count)| (text.as_str(), *count)).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_is_no_label_counts_against_the_right_one_only() {
        let mut labels = Labels::default();
        for (hypothesis, reference) in [(" yes ", "yes"), ("maybe", "yes"), ("no", "no"), ("yes", "no")] {
            labels.add(hypothesis, reference);
        }
        assert_eq!(labels.accuracy(), 0.5);
        assert_eq!(labels.macro_f1(), Ok((0.5 + 2.0 / 3.0) / 2.0));
    }

    #[test]
    fn each_label_has_its_scores_and_its_answers() {
        let mut labels = Labels::default();
        for (hypothesis, reference) in [("a", "a"), ("b", "a"), ("c", "a"), ("b", "b"), ("a", "b"), ("b", "b ")] {
            labels.add(hypothesis, reference);
        }
        let classes = labels.classes().unwrap();
        let scores = |class: &Class| (class.precision, class.recall, class.support, class.predicted);
        assert_eq!(
            classes.iter().map(scores).collect::<Vec<_>>(),
            [(0.5, 1.0 / 3.0, 3, 2), (2.0 / 3.0, 2.0 / 3.0, 3, 3)]
        );
        assert_eq!(labels.confusion(), Some(vec![vec![1, 1, 1], vec![1, 2, 0]]));
        assert_eq!(labels.macro_f1().unwrap(), mean(&classes, |class| class.f1));
        assert_eq!(weighted_mean(&classes, |class| class.recall), labels.accuracy());
    }

    #[test]
    fn sets_of_labels_are_right_as_a_whole_and_counted_label_by_label() {
        let mut labels = Labels::default();
        for (hypothesis, reference) in [("a, b", "b\na"), ("a", "a,c"), ("", ""), ("c", "")] {
            labels.add_sets(hypothesis, reference);
        }
        assert_eq!((labels.accuracy(), labels.micro_f1(), labels.matthews()), (0.5, Ok(0.75), Ok(0.0)));
        assert_eq!(labels.macro_f1(), Ok(2.0 / 3.0));
        assert_eq!(labels.confusion(), None);
    }

    #[test]
    fn labels_that_differ_by_case_or_blanks_are_counted_together() {
        let mut spellings = Spellings::default();
        ["BUG", " bug ", "bug", "bug", "new  one", "new one", "other"].iter().for_each(|text| spellings.add(text));
        assert_eq!(spellings.counts().unwrap()[0], ("bug", 2));
        assert_eq!(
            spellings.variants(),
            [vec![(" bug ", 1), ("BUG", 1), ("bug", 2)], vec![("new  one", 1), ("new one", 1)]]
        );
    }

    #[test]
    fn texts_that_are_no_labels_are_refused_in_bounded_memory() {
        let mut labels = Labels::default();
        (0..3 * MAX_LABELS).for_each(|row| labels.add("x", &row.to_string()));
        assert_eq!(labels.macro_f1(), Err(NoLabels));
        assert!(labels.by_label.len() < 2 * MAX_LABELS + 3);
        let mut long = Labels::default();
        (0..100).for_each(|row| long.add(&"y".repeat(20_000), &format!("{row}{}", "x".repeat(20_000))));
        assert_eq!(long.macro_f1(), Err(NoLabels));
        assert!(long.bytes < 2 * MAX_BYTES);
        assert_eq!(long.accuracy(), 0.0);
    }
}
