//! FASTA: sequences of residues, each after a line that names it, as texts that encoders of proteins read: letters apart, and X for the
//! rare residues U, Z, O and B (Elnaggar et al., 2021, arXiv 2007.06225).

use std::path::Path;

use crate::failure::{Failure, Outcome};

/// The most residues of a sequence.
const MAX_RESIDUES: usize = 1 << 19;

/// Whether a file has sequences, by its name.
pub fn is_fasta(input: &Path) -> bool {
    let extension = input.extension().and_then(|extension| extension.to_str()).map(str::to_lowercase);
    extension.is_some_and(|extension| ["fasta", "fa", "faa"].contains(&extension.as_str()))
}

/// The texts of the sequences in these lines of a file with this name.
pub fn texts(mut lines: impl Iterator<Item = Outcome<String>>, name: String) -> impl Iterator<Item = Outcome<String>> {
    let (mut text, mut number): (Option<String>, u64) = (None, 0);
    let fault = move |number: u64, problem: &str| Failure::unusable(format!("{name}:{number}: {problem}"));
    std::iter::from_fn(move || {
        loop {
            number += 1;
            let line = match lines.next() {
                None => match text.take() {
                    Some(text) if text.is_empty() => return Some(Err(fault(number, "a name without a sequence"))),
                    text => return text.map(Ok),
                },
                Some(Err(failure)) => return Some(Err(failure)),
                Some(Ok(line)) => line,
            };
            if line.starts_with('>') {
                match text.replace(String::new()) {
                    None => continue,
                    Some(text) if text.is_empty() => return Some(Err(fault(number, "a name without a sequence"))),
                    Some(text) => return Some(Ok(text)),
                }
            }
            if line.trim().is_empty() {
                continue;
            }
            let Some(text) = &mut text else {
                let problem = fault(number, "a sequence without a name");
                return Some(Err(problem.hint("expected a line such as `>P12345` before each sequence")));
            };
            // An asterisk ends a translation.
            for letter in line.trim().trim_end_matches('*').chars() {
                if !letter.is_ascii_alphabetic() {
                    let problem = fault(number, &format!("`{}` is no residue", letter.escape_debug()));
                    return Some(Err(problem.hint("expected letters, such as MKTAYIAK")));
                }
                let residue = letter.to_ascii_uppercase();
                text.extend((!text.is_empty()).then_some(' '));
                text.push(if "UZOB".contains(residue) { 'X' } else { residue });
            }
            if text.len() > 2 * MAX_RESIDUES {
                return Some(Err(
                    fault(number, "the sequence is too long").hint(format!("at most {MAX_RESIDUES} residues are read"))
                ));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Outcome<Vec<String>> {
        texts(text.lines().map(|line| Ok(line.to_owned())), "a.fasta".to_owned()).collect()
    }

    #[test]
    fn sequences_have_their_letters_apart_and_x_for_rare_ones() {
        assert_eq!(read(">a\nMKu\nZv*\n\n>b text\nOB\n").unwrap(), ["M K X X V", "X X"]);
        assert!(read("").unwrap().is_empty());
    }

    #[test]
    fn lines_that_are_no_sequences_are_named() {
        for (text, words) in [
            ("MKV\n", "a.fasta:1: a sequence without a name"),
            (">a\n>b\nMK\n", "a.fasta:2: a name without a sequence"),
            (">a\n", "a name without a sequence"),
            (">a\nMK-V\n", "a.fasta:2: `-` is no residue"),
        ] {
            assert!(read(text).unwrap_err().message.contains(words), "{text}");
        }
    }
}
