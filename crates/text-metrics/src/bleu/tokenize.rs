//! sacreBLEU's tokenizers `13a`, `zh`, `char` and `none`, character for character.
//!
//! Invariant: for every string, splitting the result on white space gives the tokens that sacreBLEU 2.6 counts, including
//! its quirks: `zh` takes U+2001 to U+2A6D for Chinese (a `\u` escape with five digits in its source). So dashes and
//! curly quotes are split off, and ideographs beyond the basic plane are not.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::python::is_space as is_python_space;

/// A name that no tokenizer has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("BLEU tokenizer: expected one of 13a, zh, char, none, got `{0}`")]
pub struct UnknownTokenization(String);

/// How BLEU cuts a sentence into tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tokenization {
    /// mteval-v13a, WMT's and sacreBLEU's default.
    #[default]
    #[serde(rename = "13a")]
    V13a,
    /// Every Chinese character is a token; other text is cut as by `13a`.
    Zh,
    /// Every character is a token.
    Char,
    /// Tokens are separated by white space only.
    None,
}

impl fmt::Display for Tokenization {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Tokenization::V13a => "13a",
            Tokenization::Zh => "zh",
            Tokenization::Char => "char",
            Tokenization::None => "none",
        })
    }
}

impl FromStr for Tokenization {
    type Err = UnknownTokenization;

    fn from_str(name: &str) -> Result<Self, UnknownTokenization> {
        match name {
            "13a" => Ok(Tokenization::V13a),
            "zh" => Ok(Tokenization::Zh),
            "char" => Ok(Tokenization::Char),
            "none" => Ok(Tokenization::None),
            _ => Err(UnknownTokenization(name.to_owned())),
        }
    }
}

impl Tokenization {
    /// Returns the sentence with white space between its tokens.
    pub fn tokenize(self, sentence: &str) -> String {
        let sentence = sentence.trim_end_matches(is_python_space);
        match self {
            Tokenization::V13a => {
                let line = sentence.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
                // In this order: `&amp;quot;` stays `&quot;`.
                let line = line.replace("&quot;", "\"").replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">");
                split_punctuation(&format!(" {line} "))
            }
            Tokenization::Zh => {
                let mut spaced = String::with_capacity(sentence.len() * 2);
                for c in sentence.trim_matches(is_python_space).chars() {
                    if is_chinese(c) {
                        spaced.extend([' ', c, ' ']);
                    } else {
                        spaced.push(c);
                    }
                }
                split_punctuation(&spaced)
            }
            Tokenization::Char => sentence.chars().flat_map(|c| [c, ' ']).collect(),
            Tokenization::None => sentence.to_owned(),
        }
    }
}

/// The four substitutions of sacreBLEU's `TokenizerRegexp`, each over the result of the one before.
fn split_punctuation(line: &str) -> String {
    let mut spaced = String::with_capacity(line.len() * 2);
    for c in line.chars() {
        // `[\{-\~\[-\` -\&\(-\+\:-\@\/]`: all ASCII punctuation but ' , - .
        if matches!(c, '{'..='~' | '['..='`' | ' '..='&' | '('..='+' | ':'..='@' | '/') {
            spaced.extend([' ', c, ' ']);
        } else {
            spaced.push(c);
        }
    }
    let is_point = |c: char| c == '.' || c == ',';
    let is_digit = |c: char| c.is_ascii_digit();
    let spaced = substitute_pairs(&spaced, |a, b| !is_digit(a) && is_point(b), |a, b| [a, ' ', b, ' ']);
    let spaced = substitute_pairs(&spaced, |a, b| is_point(a) && !is_digit(b), |a, b| [' ', a, ' ', b]);
    substitute_pairs(&spaced, |a, b| is_digit(a) && b == '-', |a, b| [a, ' ', b, ' '])
}

/// `re.sub` for a pattern of two characters: replaces leftmost matches that do not overlap.
fn substitute_pairs(
    line: &str,
    matches: impl Fn(char, char) -> bool,
    replace: impl Fn(char, char) -> [char; 4],
) -> String {
    let mut out = String::with_capacity(line.len() + line.len() / 4);
    let mut chars = line.chars().peekable();
    while let Some(a) = chars.next() {
        match chars.next_if(|&b| matches(a, b)) {
            Some(b) => out.extend(replace(a, b)),
            None => out.push(a),
        }
    }
    out
}

/// The ranges of sacreBLEU's `TokenizerZh`. `'\u20000' <= c <= '\u2a6d6'` compares one character with strings of two
/// (U+2000 followed by `0`, U+2A6D followed by `6`), which is U+2001 to U+2A6D; `'\u2f800'` likewise.
fn is_chinese(c: char) -> bool {
    matches!(c,
        '\u{3400}'..='\u{4db5}' | '\u{4e00}'..='\u{9fa5}' | '\u{9fa6}'..='\u{9fbb}' | '\u{f900}'..='\u{fa2d}'
        | '\u{fa30}'..='\u{fa6a}' | '\u{fa70}'..='\u{fad9}' | '\u{2001}'..='\u{2a6d}' | '\u{2f81}'..='\u{2fa1}'
        | '\u{ff00}'..='\u{ffef}' | '\u{2e80}'..='\u{2eff}' | '\u{3000}'..='\u{303f}' | '\u{31c0}'..='\u{31ef}'
        | '\u{2f00}'..='\u{2fdf}' | '\u{2ff0}'..='\u{2fff}' | '\u{3100}'..='\u{312f}' | '\u{31a0}'..='\u{31bf}'
        | '\u{fe10}'..='\u{fe1f}' | '\u{fe30}'..='\u{fe4f}' | '\u{3200}'..='\u{32ff}' | '\u{3300}'..='\u{33ff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokenization: Tokenization, sentence: &str, expected: &str) {
        let line = tokenization.tokenize(sentence);
        let tokens: Vec<_> = line.split(is_python_space).filter(|token| !token.is_empty()).collect();
        assert_eq!(tokens.join(" "), expected, "{tokenization}: {sentence:?}");
    }

    #[test]
    fn the_13a_tokenizer_splits_as_mteval_does() {
        check(Tokenization::V13a, "Hello, world.", "Hello , world .");
        check(Tokenization::V13a, "1,000.5 and .5,x 3-4 a-b", "1,000.5 and . 5 , x 3 - 4 a-b");
        check(Tokenization::V13a, "don't (stop) &quot;it&quot; a&amp;b", "don't ( stop ) \" it \" a & b");
        check(Tokenization::V13a, "<skipped>end-\nless\nline", "endless line");
        check(Tokenization::V13a, "a..b,,c", "a . . b , , c");
        check(Tokenization::V13a, "", "");
    }

    #[test]
    fn the_zh_tokenizer_splits_every_chinese_character_and_what_sacrebleu_takes_for_one() {
        check(Tokenization::Zh, "你好，world 1.5", "你 好 ， world 1.5");
        check(Tokenization::Zh, "a—b “c” …", "a — b “ c ” …");
        // Extension B proper is not split: the quirk of the five-digit escapes.
        check(Tokenization::Zh, "\u{20000}\u{20001}", "\u{20000}\u{20001}");
    }

    #[test]
    fn the_char_tokenizer_drops_white_space_and_none_keeps_words() {
        check(Tokenization::Char, "ab 你", "a b 你");
        check(Tokenization::None, "a,b  c\u{1f}d ", "a,b c d");
    }

    #[test]
    fn an_unknown_tokenizer_is_refused_by_name() {
        let error = "intl".parse::<Tokenization>().unwrap_err();
        assert!(error.to_string().contains("intl"), "{error}");
        assert_eq!("13a".parse::<Tokenization>().unwrap(), Tokenization::V13a);
    }
}
