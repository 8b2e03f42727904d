//! Spans of labels of words, such as names: the micro F1 of seqeval's `f1_score`, in its default mode.
//!
//! A label is `O`, or a letter and a type: `B-PER` begins a span, `I-PER` continues one, `E-` ends one, `S-` is one of a single word. As in
//! conlleval, a span also begins where an inside label follows another type or `O`.

/// The counts of a corpus.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spans {
    correct: u64,
    answered: u64,
    references: u64,
}

impl Spans {
    /// Counts the labels of one row, parted by blanks.
    pub fn add(&mut self, hypothesis: &str, reference: &str) {
        let [answered, right] = [hypothesis, reference].map(|labels| find(labels.split_whitespace()));
        self.correct += answered.iter().filter(|span| right.contains(span)).count() as u64;
        self.answered += answered.len() as u64;
        self.references += right.len() as u64;
    }

    /// The harmonic mean of precision and recall of the spans, 0 to 1; 0 without spans.
    pub fn f1(&self) -> f64 {
        let all = self.answered + self.references;
        if all == 0 { 0.0 } else { 2.0 * self.correct as f64 / all as f64 }
    }
}

/// A span: its type, its first word and its last.
type Span<'a> = (&'a str, usize, usize);

/// The spans of a row's labels.
fn find<'a>(labels: impl Iterator<Item = &'a str>) -> Vec<Span<'a>> {
    let (mut spans, mut before, mut first) = (Vec::new(), ('O', ""), 0);
    for (at, label) in labels.chain(["O"]).enumerate() {
        let letter = label.chars().next().unwrap_or('O');
        let rest = &label[letter.len_utf8().min(label.len())..];
        let kind = rest.split_once('-').map_or(rest, |(_, kind)| kind);
        let now = (letter, if kind.is_empty() { "_" } else { kind });
        if ends(before, now) {
            spans.push((before.1, first, at - 1));
        }
        if begins(before, now) {
            first = at;
        }
        before = now;
    }
    spans
}

fn ends(before: (char, &str), now: (char, &str)) -> bool {
    let is_over = matches!((before.0, now.0), ('E' | 'S', _) | ('B' | 'I', 'B' | 'S' | 'O'));
    is_over || !matches!(before.0, 'O' | '.') && before.1 != now.1
}

fn begins(before: (char, &str), now: (char, &str)) -> bool {
    let is_new = matches!((before.0, now.0), (_, 'B' | 'S') | ('E' | 'S' | 'O', 'E' | 'I'));
    is_new || !matches!(now.0, 'O' | '.') && before.1 != now.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_those_of_conlleval() {
        let spans = |labels: &'static str| find(labels.split(' '));
        assert_eq!(spans("B-PER I-PER O B-LOC"), [("PER", 0, 1), ("LOC", 3, 3)]);
        assert_eq!(spans("I-PER I-LOC B-LOC O"), [("PER", 0, 0), ("LOC", 1, 1), ("LOC", 2, 2)]);
        assert_eq!(spans("S-A B-A E-A E-A"), [("A", 0, 0), ("A", 1, 2), ("A", 3, 3)]);
        assert_eq!(spans("O O"), []);
    }

    #[test]
    fn a_span_is_right_if_its_type_and_both_ends_are() {
        let mut all = Spans::default();
        all.add("B-PER I-PER O B-LOC", "B-PER I-PER O B-PER");
        all.add("O", "B-LOC");
        assert!((all.f1() - 2.0 / 5.0).abs() < 1e-12);
        assert_eq!(Spans::default().f1(), 0.0);
    }
}
