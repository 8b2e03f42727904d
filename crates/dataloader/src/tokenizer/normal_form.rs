//! Decomposed text (NFD, as macOS writes names) in tokenizers with a SentencePiece table.
//!
//! Such a table has the composed forms of letters: SentencePiece looks for the longest entry, and so composes a syllable of Korean or
//! an accented letter. The tokenizers crate looks up short clusters and single characters only, and finds the unknown token (its issue
//! 2116). So text that can be composed is composed (NFC) before the table sees it. Other text does not pay for it.

use tokenizers::normalizers::{NFC, Precompiled, Sequence};
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

/// Whether this table replaces a text by another.
pub(super) fn replaces(table: &[u8], text: &str, by: &str) -> bool {
    Precompiled::from(table).is_ok_and(|table| table.normalize_string(text) == by)
}

/// The normalizer with the composition before its table, if the table composes and nothing else does.
pub(super) fn with_composition(normalizer: Option<&NormalizerWrapper>) -> Option<NormalizerWrapper> {
    let steps: &[NormalizerWrapper] = match normalizer? {
        NormalizerWrapper::Sequence(sequence) => sequence.as_ref(),
        one => std::slice::from_ref(one),
    };
    let Some(table @ NormalizerWrapper::Precompiled(_)) = steps.first() else { return None };
    let mut letter = NormalizedString::from("e\u{301}");
    let composes = table.normalize(&mut letter).is_ok() && letter.get() == "\u{e9}";
    composes.then(|| {
        let composition = NormalizerWrapper::NFC(NFC);
        NormalizerWrapper::Sequence(Sequence::new(std::iter::once(composition).chain(steps.iter().cloned()).collect()))
    })
}

/// Normalizes a text as `normalizer` does. A composition at its beginning is left out where it would change nothing.
pub(super) struct Normalization<'a> {
    pub normalizer: &'a NormalizerWrapper,
    pub is_composed: bool,
}

impl Normalizer for Normalization<'_> {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        match self.normalizer {
            NormalizerWrapper::Sequence(steps) if self.is_composed => match steps.as_ref() {
                [NormalizerWrapper::NFC(_), table @ NormalizerWrapper::Precompiled(_), rest @ ..] => {
                    table.normalize(text)?;
                    rest.iter().try_for_each(|step| step.normalize(text))
                }
                _ => self.normalizer.normalize(text),
            },
            normalizer => normalizer.normalize(text),
        }
    }
}

/// Whether a text has a character that composes with the one before it.
pub(super) fn is_decomposed(text: &str) -> bool {
    text.chars().any(is_second)
}

/// Whether a character may be the second of a canonical composition. Source: Unicode 16, the decompositions of UnicodeData.txt without
/// the composition exclusions.
pub(super) fn is_second(character: char) -> bool {
    // Most text has none of them, and few bytes tell.
    character >= '\u{300}'
        && matches!(
            u32::from(character),
            0x300..=0x36f
                | 0x653..=0x655
                | 0x93c
                | 0x9be
                | 0x9d7
                | 0xb3e
                | 0xb56..=0xb57
                | 0xbbe
                | 0xbd7
                | 0xc56
                | 0xcc2
                | 0xcd5..=0xcd6
                | 0xd3e
                | 0xd57
                | 0xdca
                | 0xdcf
                | 0xddf
                | 0x102e
                | 0x1161..=0x1175
                | 0x11a8..=0x11c2
                | 0x1b35
                | 0x3099..=0x309a
                | 0x110ba
                | 0x11127
                | 0x1133e
                | 0x11357
                | 0x114b0
                | 0x114ba
                | 0x114bd
                | 0x115af
                | 0x11930
        )
}
