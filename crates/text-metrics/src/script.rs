//! Scripts of letters, as far as they decide how a text is cut into words.

/// The unified ideographs and their first extensions.
pub(crate) fn is_han(c: char) -> bool {
    matches!(c, '\u{3400}'..='\u{4DBF}' | '\u{4E00}'..='\u{9FFF}' | '\u{20000}'..='\u{2EBEF}')
}

/// Kana, Thai, Lao, Khmer, Burmese.
pub(crate) fn is_of_a_script_without_spaces(c: char) -> bool {
    matches!(c, '\u{3041}'..='\u{30FF}' | '\u{0E00}'..='\u{0EFF}' | '\u{1000}'..='\u{109F}' | '\u{1780}'..='\u{17FF}')
}

/// A Latin letter, with or without a mark.
pub(crate) fn is_latin(c: char) -> bool {
    c.is_ascii_alphabetic()
        || matches!(c, '\u{aa}' | '\u{ba}' | '\u{c0}'..='\u{24f}' | '\u{1e00}'..='\u{1eff}' | '\u{2c60}'..='\u{2c7f}' | '\u{a720}'..='\u{a7ff}'
            | '\u{fb00}'..='\u{fb06}' | '\u{ff21}'..='\u{ff3a}' | '\u{ff41}'..='\u{ff5a}')
}

/// A letter, a digit, or a mark that belongs to the letter before it.
pub(crate) fn is_of_a_word(c: char) -> bool {
    // Of the marks, `is_alphanumeric` has vowel signs only. Blocks of India's scripts have no punctuation but these four.
    c.is_alphanumeric()
        || matches!(c, '\u{300}'..='\u{36f}' | '\u{483}'..='\u{489}' | '\u{591}'..='\u{5bd}' | '\u{5bf}' | '\u{5c1}' | '\u{5c2}' | '\u{5c4}' | '\u{5c5}' | '\u{5c7}'
            | '\u{610}'..='\u{61a}' | '\u{640}' | '\u{64b}'..='\u{65f}' | '\u{670}' | '\u{6d6}'..='\u{6dc}' | '\u{6df}'..='\u{6e8}' | '\u{6ea}'..='\u{6ed}'
            | '\u{200c}' | '\u{200d}')
        || (('\u{900}'..='\u{dff}').contains(&c) && !matches!(c, '\u{964}' | '\u{965}' | '\u{970}' | '\u{df4}'))
}
