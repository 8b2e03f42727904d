//! Labels of a row: one label or number of its text, or a label of each of its words.

use super::{Sample, SampleLimits};
use crate::error::BadValue;

/// The label of a token that has none: `t5_ops::IGNORED_LABEL`.
const IGNORED: u32 = u32::MAX;

/// No word in capital letters is as long.
const SURELY_RESIDUES: usize = 20;

/// The words of a text: its lines, as lists are written, or else what white space parts.
pub fn words(text: &str) -> Vec<&str> {
    if text.contains('\n') { text.split('\n').collect() } else { text.split_whitespace().collect() }
}

/// The words of a row and their labels. A sequence of capital letters, as residues of proteins, with a label for each letter is a word for each
/// letter. Encoders of proteins read the rare residues U, Z, O and B as X (Elnaggar et al., 2021, arXiv 2007.06225).
///
/// # Errors
/// There are more words than labels, or fewer.
pub fn words_and_labels<'a>(text: &'a str, labels: &'a str) -> Result<Vec<(&'a str, &'a str)>, BadValue> {
    let (of_text, of_labels) = (words(text), words(labels));
    let pairs: Vec<(&str, &str)> = match (of_text.as_slice(), of_labels.as_slice()) {
        (&[sequence], &[letters])
            if are_residues(sequence) && sequence.len() == letters.len() && letters.is_ascii() =>
        {
            let letter = |at: usize| (residue(sequence, at), &letters[at..=at]);
            (0..sequence.len()).map(letter).collect()
        }
        (&[sequence], labels) if are_residues(sequence) && sequence.len() == labels.len() => {
            labels.iter().enumerate().map(|(at, label)| (residue(sequence, at), *label)).collect()
        }
        (&[sequence], _) if are_residues(sequence) && sequence.len() >= SURELY_RESIDUES => {
            return Err(BadValue::UnequalLists);
        }
        (one, other) if one.len() != other.len() => return Err(BadValue::UnequalLists),
        (one, other) => one.iter().copied().zip(other.iter().copied()).collect(),
    };
    Ok(pairs)
}

fn are_residues(text: &str) -> bool {
    text.len() > 1 && text.bytes().all(|byte| byte.is_ascii_uppercase())
}

fn residue(sequence: &str, at: usize) -> &str {
    match &sequence[at..=at] {
        "U" | "Z" | "O" | "B" => "X",
        letter => letter,
    }
}

/// The label of a text: its index among `labels`, or the bits of a number if there are none.
pub(super) fn label(text: &str, labels: &[String]) -> Result<u32, BadValue> {
    let text = text.trim();
    if !labels.is_empty() {
        return index(text, labels);
    }
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() => Ok(number.to_bits()),
        _ => Err(BadValue::NotANumber),
    }
}

/// For each of `labels` whether it is in a text, as 1 or 0. Commas or line ends part a text's labels.
pub(super) fn label_set(text: &str, labels: &[String]) -> Result<Vec<u32>, BadValue> {
    let mut set = vec![0; labels.len()];
    for label in labels_of_set(text) {
        set[index(label, labels)? as usize] = 1;
    }
    Ok(set)
}

/// The labels in a text that has any number of them, parted by commas or line ends.
pub fn labels_of_set(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', '\n']).map(str::trim).filter(|label| !label.is_empty())
}

fn index(text: &str, labels: &[String]) -> Result<u32, BadValue> {
    let index = labels.iter().position(|label| label == text);
    index.map(|index| index as u32).ok_or(BadValue::UnknownLabel)
}

/// The sample of words and their labels. The label is on the first token of its word; the others have none. `encode` makes tokens of a word.
///
/// # Errors
/// [`BadValue`], or an error of `encode`.
pub(super) fn sample_of_words<E: From<BadValue>>(
    pairs: &[(&str, &str)],
    start: &[u32],
    (labels, limits): (&[String], &SampleLimits),
    encode: &dyn Fn(&str) -> Result<Vec<u32>, E>,
) -> Result<Sample, E> {
    let (mut source, mut target) = (start.to_vec(), vec![IGNORED; start.len()]);
    for (word, label) in pairs {
        let label = index(label.trim(), labels)?;
        // Words behind the limit are checked, and not used.
        if source.len() >= limits.max_source_tokens {
            continue;
        }
        let ids = encode(word)?;
        if ids.is_empty() {
            return Err(BadValue::WordWithoutToken.into());
        }
        target.push(label);
        target.resize(source.len() + ids.len(), IGNORED);
        source.extend(ids);
    }
    let source_was_cut = source.len() >= limits.max_source_tokens;
    source.truncate(limits.max_source_tokens - 1);
    target.truncate(source.len());
    source.push(limits.eos_id);
    target.push(IGNORED);
    source.shrink_to_fit(); // The bill counts the bytes of ids that wait in the queue.
    target.shrink_to_fit();
    Ok(Sample { source, target, rejected: None, source_was_cut, target_was_cut: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LABELS: [&str; 3] = ["O", "B-PER", "I-PER"];

    fn sample(text: &str, tags: &str, max_source_tokens: usize) -> Result<Sample, BadValue> {
        let labels = LABELS.map(String::from);
        let limits = SampleLimits { max_source_tokens, max_target_tokens: 2, eos_id: 1, decoder_start_id: None };
        // A token for each letter.
        let encode = |word: &str| Ok(word.trim().bytes().map(u32::from).collect());
        sample_of_words(&words_and_labels(text, tags)?, &[], (&labels, &limits), &encode)
    }

    #[test]
    fn a_label_is_on_the_first_token_of_its_word_and_cut_with_it() {
        let (x, whole) = (IGNORED, sample("ab\nc\nde", "B-PER\nI-PER\nO", 9).unwrap());
        assert_eq!((whole.source, whole.target), (vec![97, 98, 99, 100, 101, 1], vec![1, x, 2, 0, x, x]));
        assert!(!whole.source_was_cut);
        let cut = sample("ab c de", "B-PER I-PER O", 4).unwrap();
        assert_eq!((cut.source, cut.target, cut.source_was_cut), (vec![97, 98, 99, 1], vec![1, x, 2, x], true));
    }

    #[test]
    fn letters_of_a_sequence_have_a_label_each() {
        assert_eq!(words_and_labels("MKV", "HHE"), Ok(vec![("M", "H"), ("K", "H"), ("V", "E")]));
        assert_eq!(words_and_labels("MUB", "H-E"), Ok(vec![("M", "H"), ("X", "-"), ("X", "E")]));
        assert_eq!(words_and_labels("MKV", "helix\nhelix\nsheet").unwrap()[2], ("V", "sheet"));
        assert_eq!(words_and_labels("MKV", "0 0 1").unwrap()[2], ("V", "1"));
        assert_eq!(words_and_labels(&"M".repeat(20), "H"), Err(BadValue::UnequalLists));
        assert_eq!(words_and_labels("Paris", "B-LOC"), Ok(vec![("Paris", "B-LOC")]));
        assert_eq!(words_and_labels("MKV", "HH"), Ok(vec![("MKV", "HH")]));
    }

    #[test]
    fn what_has_no_meaning_is_refused() {
        assert_eq!(sample("a b", "O", 9), Err(BadValue::UnequalLists));
        assert_eq!(sample("a b", "O B-LOC", 9), Err(BadValue::UnknownLabel));
        assert_eq!(sample("a\n \nb", "O\nO\nO", 9), Err(BadValue::WordWithoutToken));
        assert_eq!(label("x", &[]), Err(BadValue::NotANumber));
        assert_eq!(label(" 1.5\n", &[]), Ok(1.5f32.to_bits()));
        assert_eq!(label("I-PER ", &LABELS.map(String::from)), Ok(2));
        assert_eq!(label_set("O, X", &LABELS.map(String::from)), Err(BadValue::UnknownLabel));
    }

    #[test]
    fn a_set_has_any_number_of_labels() {
        for (text, expected) in [("I-PER, O", [1, 0, 1]), ("B-PER\nB-PER\n", [0, 1, 0]), (" ", [0; 3])] {
            assert_eq!(label_set(text, &LABELS.map(String::from)), Ok(expected.to_vec()), "{text}");
        }
    }
}
