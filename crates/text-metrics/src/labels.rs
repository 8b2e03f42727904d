//! Texts as labels: accuracy and macro-F1, equal to scikit-learn's `accuracy_score` and
//! `f1_score(average="macro", labels=sorted(set(references)), zero_division=0)`.
//!
//! A label is a text without white space at its ends. The references define the labels. An answer that is none of them is
//! wrong, and counts against the reference's label.

use std::collections::BTreeMap;

/// The most different labels; texts with more are not labels.
pub const MAX_LABELS: usize = 10_000;

/// The counts of a corpus.
#[derive(Clone, Debug, Default)]
pub struct Labels {
    by_label: BTreeMap<String, Counts>,
    rows: u64,
    correct: u64,
    /// Bytes of the labels.
    bytes: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
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
        let (hypothesis, reference) = (hypothesis.trim(), reference.trim());
        self.rows += 1;
        self.correct += u64::from(hypothesis == reference);
        if self.overflows() {
            return;
        }
        if !self.by_label.contains_key(reference) {
            self.bytes += reference.len();
        }
        let of_reference = self.by_label.entry(reference.to_owned()).or_default();
        of_reference.references += 1;
        of_reference.correct += u64::from(hypothesis == reference);
        // A later reference may have this answer's label.
        if hypothesis != reference {
            if !self.by_label.contains_key(hypothesis) {
                self.bytes += hypothesis.len();
            }
            self.by_label.entry(hypothesis.to_owned()).or_default().predicted += 1;
        } else if let Some(counts) = self.by_label.get_mut(hypothesis) {
            counts.predicted += 1;
        }
    }

    fn overflows(&self) -> bool {
        self.by_label.len() > 2 * MAX_LABELS || self.bytes > MAX_BYTES
    }

    /// The fraction of answers that equal their reference; 0 without answers.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.rows.max(1) as f64
    }

    /// The mean of the labels' F1, 0 to 1; 0 without answers.
    ///
    /// # Errors
    /// The references are not labels.
    pub fn macro_f1(&self) -> Result<f64, NoLabels> {
        let labels = || self.by_label.values().filter(|counts| counts.references > 0);
        let count = labels().count();
        if self.overflows() || count > MAX_LABELS {
            return Err(NoLabels);
        }
        // Each label has a reference, so the denominator is never 0.
        let f1 = |counts: &Counts| 2.0 * counts.correct as f64 / (counts.predicted + counts.references) as f64;
        Ok(labels().map(f1).sum::<f64>() / count.max(1) as f64)
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
