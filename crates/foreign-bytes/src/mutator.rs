//! Makes inputs from a corpus: the n-th input of a seed is always the same bytes.
//!
//! The first inputs are the corpus itself, so that every file that ever broke a parser is tried each time. Then come
//! inputs that are large or deep on purpose. Every later input is a file of the corpus with one to four mutations that
//! suit its [`Shape`]. For example, a mutated header usually keeps a matching length, so that mutations reach the
//! parser behind the length check.

use dataloader::{Key, Stream};
use sha2::{Digest, Sha256};

use crate::bombs::bombs;
use crate::bytes::{self, below, one};
use crate::json;
use crate::parsers::{Parser, Shape};

/// Makes inputs from a corpus.
#[derive(Debug)]
pub struct Mutator<'c> {
    corpus: &'c [Vec<u8>],
    shape: Shape,
    bombs: &'static [fn() -> Vec<u8>],
    key: Key,
}

impl<'c> Mutator<'c> {
    /// Makes inputs for a parser from its corpus, which must not be empty.
    pub fn new(corpus: &'c [Vec<u8>], parser: &Parser, seed: u64) -> Self {
        assert!(!corpus.is_empty(), "there is something to mutate");
        Self { corpus, shape: parser.shape, bombs: bombs(parser.name), key: Key::new(seed) }
    }

    /// Returns the input with this number.
    pub fn input(&self, number: u64) -> Vec<u8> {
        if let Some(file) = self.corpus.get(number as usize) {
            return file.clone();
        }
        if let Some(make) = self.bombs.get(number as usize - self.corpus.len()) {
            return make();
        }
        let stream = &mut self.key.derive(number).stream();
        let (base, other) = (one(stream, self.corpus), one(stream, self.corpus));
        // Sometimes mutate as if the shape were unknown.
        let shape = if below(stream, 8) == 0 { Shape::Bytes } else { self.shape };
        mutated(shape, base, other, stream)
    }
}

fn mutated(shape: Shape, base: &[u8], other: &[u8], stream: &mut Stream) -> Vec<u8> {
    match shape {
        Shape::Bytes => a_few(base, stream, |bytes, stream| bytes::mutate(bytes, other, stream)),
        Shape::Text => a_few(base, stream, |bytes, stream| match below(stream, 2) {
            0 => mutate_lines(bytes, other, stream),
            _ => bytes::mutate(bytes, other, stream),
        }),
        Shape::Json => match json::mutate(base, other, stream) {
            Some(bytes) => bytes,
            None => mutated(Shape::Bytes, base, other, stream),
        },
        Shape::ParquetFooter => match parquet_parts(base) {
            Some((body, footer)) => {
                let other = parquet_parts(other).map_or(other, |(_, footer)| footer);
                let footer = a_few(footer, stream, |bytes, stream| bytes::mutate(bytes, other, stream));
                [body, &footer, &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat()
            }
            None => mutated(Shape::Bytes, base, other, stream),
        },
        Shape::ParquetPages => match parquet_parts(base) {
            Some((body, footer)) => {
                let body = a_few(body, stream, |bytes, stream| {
                    let length = bytes.len();
                    bytes::mutate(bytes, other, stream);
                    // Pages have to stay at the offsets in the footer.
                    bytes.resize(length, 0);
                });
                [&body, footer, &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat()
            }
            None => mutated(Shape::Bytes, base, other, stream),
        },
        Shape::Safetensors => match (safetensors_parts(base), safetensors_parts(other)) {
            (Some((header, data)), Some((other, _))) => {
                let header = match json::mutate(header, other, stream) {
                    Some(header) if below(stream, 4) > 0 => header,
                    _ => a_few(header, stream, |bytes, stream| bytes::mutate(bytes, other, stream)),
                };
                [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()
            }
            _ => mutated(Shape::Bytes, base, other, stream),
        },
        Shape::Sealed => {
            let body = &base[..base.len().saturating_sub(32)];
            let mut body = a_few(body, stream, |bytes, stream| bytes::mutate(bytes, other, stream));
            let seal = Sha256::digest(&body);
            body.extend(seal);
            body
        }
    }
}

fn a_few(base: &[u8], stream: &mut Stream, mut mutate: impl FnMut(&mut Vec<u8>, &mut Stream)) -> Vec<u8> {
    let mut bytes = base.to_vec();
    for _ in 0..1 + below(stream, 4) {
        mutate(&mut bytes, stream);
    }
    bytes
}

/// Splits a file into the bytes before the footer, and the footer.
fn parquet_parts(file: &[u8]) -> Option<(&[u8], &[u8])> {
    let (rest, ending) = file.split_last_chunk::<8>()?;
    let length = u32::from_le_bytes(*ending.first_chunk()?) as usize;
    (&ending[4..] == b"PAR1").then(|| rest.split_at_checked(rest.len().checked_sub(length)?))?
}

/// Splits a file into header and tensors.
fn safetensors_parts(file: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = file.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)
}

/// Replacements for a value in a text.
const VALUES: [&str; 26] = [
    "-1",
    "0",
    "1e18",
    "9223372036854775807",
    "9223372036854775808",
    "nan",
    "-inf",
    "1e-320",
    "\"\"",
    "\"auto\"",
    "\"16EiB\"",
    "\"99999999999999999999GiB\"",
    "\"-1GiB\"",
    "true",
    "[]",
    "{}",
    "[[[[[[[[]]]]]]]]",
    "{a={b={c={d=1}}}}",
    "\"\\u0000\"",
    "\"(a+)+$\"",
    "\"/dev/null\"",
    "\"**/**/**/**\"",
    "1979-05-27T07:32:00Z",
    "0x7fffffffffffffff",
    "'''",
    "\"\"\"",
];

/// Changes lines, or the value after the `=` of a line.
fn mutate_lines(bytes: &mut Vec<u8>, other: &[u8], stream: &mut Stream) {
    let mut lines: Vec<Vec<u8>> = bytes.split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
    let others: Vec<&[u8]> = other.split(|&byte| byte == b'\n').collect();
    let at = below(stream, lines.len());
    match below(stream, 6) {
        0 => drop(lines.remove(at)),
        1 => lines.insert(at, lines[at].clone()),
        2 => lines.insert(at, one(stream, &others).to_vec()),
        3 => {
            let with = below(stream, lines.len());
            lines.swap(at, with);
        }
        4 => {
            let (opened, depth) = (*one(stream, &["[", "{a=", "("]), *one(stream, &[10, 200, 5000]));
            let end = lines[at].iter().position(|&byte| byte == b'=').map_or(lines[at].len(), |sign| sign + 1);
            lines[at].truncate(end);
            lines[at].extend(opened.repeat(depth).into_bytes());
        }
        _ => {
            let end = lines[at].iter().position(|&byte| byte == b'=').map_or(0, |sign| sign + 1);
            lines[at].truncate(end);
            lines[at].extend(one(stream, &VALUES).as_bytes());
        }
    }
    *bytes = lines.join(&b'\n');
    bytes.truncate(bytes::MAX_BYTES);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shaped(shape: Shape) -> Parser {
        Parser { name: "none", shape, also: &[], parse: |_, _| Ok(()), command: None }
    }

    #[test]
    fn the_input_of_a_number_is_always_the_same_and_begins_with_the_corpus() {
        let corpus = [b"{\"a\": [1, 2]}".to_vec(), b"{}".to_vec()];
        let mutator = |seed| Mutator::new(&corpus, &shaped(Shape::Json), seed);
        assert_eq!([mutator(1).input(0), mutator(2).input(1)], corpus);
        assert!((0..200).all(|number| mutator(1).input(number) == mutator(1).input(number)));
        assert!((2..200).any(|number| mutator(1).input(number) != mutator(2).input(number)));
    }

    #[test]
    fn lengths_and_seals_agree_with_mutated_bytes_most_of_the_time() {
        let file = [b"PAR1pages", &b"footer"[..], &6_u32.to_le_bytes(), b"PAR1"].concat();
        let tensors = [&2_u64.to_le_bytes()[..], b"{}", b"data"].concat();
        let sealed = [&b"body"[..], &Sha256::digest(b"body")].concat();
        let agrees = |shape, bytes: &[u8]| match shape {
            Shape::ParquetFooter => parquet_parts(bytes).is_some_and(|(body, _)| body == b"PAR1pages"),
            Shape::ParquetPages => parquet_parts(bytes).is_some_and(|(_, footer)| footer == b"footer"),
            Shape::Safetensors => safetensors_parts(bytes).is_some_and(|(_, data)| data == b"data"),
            _ => bytes.split_last_chunk::<32>().is_some_and(|(body, seal)| Sha256::digest(body)[..] == *seal),
        };
        for (shape, file) in [
            (Shape::ParquetFooter, &file),
            (Shape::ParquetPages, &file),
            (Shape::Safetensors, &tensors),
            (Shape::Sealed, &sealed),
        ] {
            let corpus = [file.clone()];
            let mutator = Mutator::new(&corpus, &shaped(shape), 5);
            let count = (1..=400).filter(|&number| agrees(shape, &mutator.input(number))).count();
            assert!((300..400).contains(&count), "{shape:?}: {count} of 400");
        }
    }
}
