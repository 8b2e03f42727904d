//! [`Labels`]: how often each target occurs, if the targets are a few labels, and labels that differ only by case or blanks.

use std::collections::BTreeMap;

/// The most different labels.
const MAX_LABELS: usize = 256;
/// The most bytes of a label.
const MAX_BYTES: usize = 64;
/// The most labels that are shown.
const SHOWN: usize = 12;

/// Targets, counted as long as they are few and short.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    counts: BTreeMap<String, u64>,
    are_texts: bool,
}

impl Labels {
    /// Counts a target.
    pub fn add(&mut self, target: &str) {
        if self.are_texts {
            return;
        }
        if let Some(count) = self.counts.get_mut(target) {
            *count += 1;
        } else if target.len() > MAX_BYTES || self.counts.len() == MAX_LABELS {
            (self.are_texts, self.counts) = (true, BTreeMap::new());
        } else {
            self.counts.insert(target.to_owned(), 1);
        }
    }

    /// The labels with their counts, the most frequent first; none if the targets are texts, which hardly repeat.
    pub fn counts(&self) -> Vec<(&str, u64)> {
        let rows: u64 = self.counts.values().sum();
        if self.counts.len() as u64 * 2 > rows {
            return Vec::new();
        }
        let mut counts: Vec<(&str, u64)> = self.counts.iter().map(|(label, count)| (label.as_str(), *count)).collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        counts
    }

    /// Labels that differ only by case or blanks, in groups.
    pub fn alike(&self) -> Vec<Vec<(&str, u64)>> {
        let mut groups: BTreeMap<String, Vec<(&str, u64)>> = BTreeMap::new();
        for (label, count) in self.counts() {
            let words: Vec<String> = label.split_whitespace().map(str::to_lowercase).collect();
            groups.entry(words.join(" ")).or_default().push((label, count));
        }
        groups.into_values().filter(|group| group.len() > 1).collect()
    }

    /// A warning that none of these labels is one of training; `None` if one is, or if either has no labels.
    pub fn foreign_in_words(&self, training: &Self) -> Option<String> {
        let (own, known) = (self.in_words()?, training.in_words()?);
        let is_known = |(label, _): &(&str, u64)| training.counts.contains_key(*label);
        (!self.counts().iter().any(is_known))
            .then(|| format!("none of its labels ({own}) is one of the training rows ({known})"))
    }

    /// The labels in a few words; `None` if there are none.
    pub fn in_words(&self) -> Option<String> {
        let counts = self.counts();
        let shown: Vec<String> = counts.iter().take(SHOWN).map(|(label, count)| format!("`{label}` {count}")).collect();
        let more = counts.len().saturating_sub(SHOWN);
        let others = if more > 0 { format!(" and {more} more") } else { String::new() };
        (!counts.is_empty()).then(|| format!("{}: {}{others}", counts.len(), shown.join(", ")))
    }

    /// The labels that differ only by case or blanks, in words; `None` if there are none.
    pub fn alike_in_words(&self) -> Option<String> {
        let groups = self.alike();
        let one = |(label, count): &(&str, u64)| format!("`{label}` ({count})");
        let words = groups.iter().take(SHOWN).map(|group| group.iter().map(one).collect::<Vec<_>>().join(", "));
        let words: Vec<String> = words.collect();
        (!groups.is_empty()).then(|| format!("labels that differ only by case or blanks: {}", words.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_counted_and_those_that_differ_by_case_or_blanks_are_named() {
        let mut labels = Labels::default();
        for (label, rows) in [("bug", 5), ("BUG", 2), (" bug ", 1), ("new feature", 3)] {
            (0..rows).for_each(|_| labels.add(label));
        }
        assert_eq!(labels.in_words().as_deref(), Some("4: `bug` 5, `new feature` 3, `BUG` 2, ` bug ` 1"));
        let alike = "labels that differ only by case or blanks: `bug` (5), `BUG` (2), ` bug ` (1)";
        assert_eq!(labels.alike_in_words().as_deref(), Some(alike));
    }

    #[test]
    fn texts_are_no_labels() {
        let mut labels = Labels::default();
        (0..300).for_each(|row| labels.add(&row.to_string()));
        assert_eq!((labels.counts(), labels.alike_in_words()), (Vec::new(), None));
        let mut few = Labels::default();
        ["a", "b", "B"].iter().for_each(|text| few.add(text));
        assert_eq!(few.alike_in_words(), None);
    }

    #[test]
    fn labels_that_training_does_not_have_are_named() {
        let of = |targets: &[&str]| {
            let mut labels = Labels::default();
            targets.iter().for_each(|target| labels.add(target));
            labels
        };
        let training = of(&["pos", "neg", "pos", "neg"]);
        let words = of(&["1", "0", "1", "0"]).foreign_in_words(&training);
        let expected = "none of its labels (2: `0` 2, `1` 2) is one of the training rows (2: `neg` 2, `pos` 2)";
        assert_eq!(words.as_deref(), Some(expected));
        assert_eq!(of(&["neg", "neg", "1", "1"]).foreign_in_words(&training), None);
        assert_eq!(of(&["a", "b"]).foreign_in_words(&training), None, "texts");
    }
}
