//! Porter's stemmer (Porter, 1980) with NLTK's extensions, equal to `nltk.stem.PorterStemmer().stem` on words of ASCII letters
//! and digits.

/// Words for which the rules give a wrong stem.
const IRREGULAR: [(&str, &str); 16] = [
    ("sky", "sky"),
    ("skies", "sky"),
    ("dying", "die"),
    ("lying", "lie"),
    ("tying", "tie"),
    ("news", "news"),
    ("innings", "inning"),
    ("inning", "inning"),
    ("outings", "outing"),
    ("outing", "outing"),
    ("cannings", "canning"),
    ("canning", "canning"),
    ("howe", "howe"),
    ("proceed", "proceed"),
    ("exceed", "exceed"),
    ("succeed", "succeed"),
];

/// A suffix and its replacement.
type Rule = (&'static str, &'static str);

const STEP_1A: [Rule; 4] = [("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", "")];

/// `bli` in place of `abli`, `fulli` and `logi` are NLTK's.
const STEP_2: [Rule; 22] = [
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("bli", "ble"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
    ("fulli", "ful"),
    ("logi", "log"),
];

const STEP_3: [Rule; 7] =
    [("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", "")];

const STEP_4: [&str; 19] = [
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti",
    "ous", "ive", "ize",
];

/// The stem of a lowercase ASCII word, as used by [`crate::rouge`].
pub fn stem(word: &str) -> String {
    if let Some((_, stem)) = IRREGULAR.iter().find(|(irregular, _)| *irregular == word) {
        return (*stem).to_owned();
    }
    if word.len() <= 2 {
        return word.to_owned();
    }
    let steps: [fn(String) -> String; 8] =
        [plural, past, final_y, double_suffix, suffix, last_suffix, final_e, double_l];
    steps.iter().fold(word.to_owned(), |word, step| step(word))
}

/// For each letter, whether it is a consonant. A `y` is one at the beginning and after a vowel.
fn consonants(word: &str) -> Vec<bool> {
    let mut flags: Vec<bool> = Vec::with_capacity(word.len());
    for letter in word.bytes() {
        flags.push(match letter {
            b'a' | b'e' | b'i' | b'o' | b'u' => false,
            b'y' => flags.last().is_none_or(|before| !before),
            _ => true,
        });
    }
    flags
}

/// Porter's measure: how often a vowel is followed by a consonant.
fn measure(stem: &str) -> usize {
    consonants(stem).windows(2).filter(|pair| !pair[0] && pair[1]).count()
}

fn has_vowel(stem: &str) -> bool {
    consonants(stem).contains(&false)
}

fn ends_in_double_consonant(word: &str) -> bool {
    let letters = word.as_bytes();
    let [.., a, b] = letters else { return false };
    a == b && consonants(word).last() == Some(&true)
}

/// Consonant, vowel, consonant other than w, x or y; or, in NLTK, just a vowel and a consonant.
fn ends_in_short_syllable(word: &str) -> bool {
    match consonants(word)[..] {
        [false, true] => true,
        [.., true, false, true] => !word.ends_with(['w', 'x', 'y']),
        _ => false,
    }
}

/// Applies the first rule whose suffix the word has. The suffix is replaced if `holds` for the rest; otherwise the word
/// is unchanged.
fn replaced(word: String, rules: &[Rule], holds: impl Fn(&str, &str) -> bool) -> String {
    for (suffix, replacement) in rules {
        if let Some(rest) = word.strip_suffix(suffix) {
            return if holds(rest, suffix) { format!("{rest}{replacement}") } else { word };
        }
    }
    word
}

fn plural(word: String) -> String {
    if word.len() == 4
        && let Some(rest) = word.strip_suffix("ies")
    {
        return format!("{rest}ie");
    }
    replaced(word, &STEP_1A, |_, _| true)
}

fn past(word: String) -> String {
    if let Some(rest) = word.strip_suffix("ied") {
        return if word.len() == 4 { format!("{rest}ie") } else { format!("{rest}i") };
    }
    if let Some(rest) = word.strip_suffix("eed") {
        return if measure(rest) > 0 { format!("{rest}ee") } else { word };
    }
    let stems = ["ed", "ing"].into_iter().filter_map(|suffix| word.strip_suffix(suffix));
    let Some(stem) = stems.into_iter().find(|stem| has_vowel(stem)) else { return word };
    if let Some((_, longer)) = [("at", "ate"), ("bl", "ble"), ("iz", "ize")].iter().find(|(end, _)| stem.ends_with(end))
    {
        return format!("{}{longer}", &stem[..stem.len() - 2]);
    }
    if ends_in_double_consonant(stem) {
        let keeps_both = stem.ends_with(['l', 's', 'z']);
        return if keeps_both { stem.to_owned() } else { stem[..stem.len() - 1].to_owned() };
    }
    if measure(stem) == 1 && ends_in_short_syllable(stem) { format!("{stem}e") } else { stem.to_owned() }
}

fn final_y(word: String) -> String {
    replaced(word, &[("y", "i")], |rest, _| rest.len() > 1 && consonants(rest).last() == Some(&true))
}

fn double_suffix(word: String) -> String {
    if let Some(rest) = word.strip_suffix("alli")
        && measure(rest) > 0
    {
        return double_suffix(format!("{rest}al"));
    }
    let of_log = |rest: &str| format!("{rest}l");
    replaced(
        word,
        &STEP_2,
        |rest, suffix| {
            if suffix == "logi" { measure(&of_log(rest)) > 0 } else { measure(rest) > 0 }
        },
    )
}

fn suffix(word: String) -> String {
    replaced(word, &STEP_3, |rest, _| measure(rest) > 0)
}

fn last_suffix(word: String) -> String {
    let rules = STEP_4.map(|suffix| (suffix, ""));
    replaced(word, &rules, |rest, suffix| measure(rest) > 1 && (suffix != "ion" || rest.ends_with(['s', 't'])))
}

fn final_e(word: String) -> String {
    match word.strip_suffix('e') {
        Some(rest) if measure(rest) > 1 || measure(rest) == 1 && !ends_in_short_syllable(rest) => rest.to_owned(),
        _ => word,
    }
}

fn double_l(word: String) -> String {
    replaced(word, &[("ll", "l")], |rest, _| measure(&format!("{rest}l")) > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paper_s_examples_and_nltk_s_own_are_stemmed_as_nltk_does() {
        for (word, expected) in [
            ("caresses", "caress"),
            ("ponies", "poni"),
            ("ties", "tie"),
            ("died", "die"),
            ("agreed", "agre"),
            ("hopping", "hop"),
            ("falling", "fall"),
            ("filing", "file"),
            ("happy", "happi"),
            ("enjoy", "enjoy"),
            ("relational", "relat"),
            ("electrical", "electr"),
            ("adoption", "adopt"),
            ("controlling", "control"),
            ("geology", "geolog"),
            ("skies", "sky"),
            ("yyyy", "yyyi"),
        ] {
            assert_eq!(stem(word), expected, "{word}");
        }
    }
}
