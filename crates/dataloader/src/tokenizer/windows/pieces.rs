//! [`Pieces`] of a window, and [`Found`]: the words and tokens of the window that count.

use std::ops::Range;

use tokenizers::normalizer::Range as Referential;
use tokenizers::{NormalizedString, OffsetReferential, OffsetType, PreTokenizedString};

/// The steps by which a window adds to the ids, in order. The window itself is no longer needed.
#[derive(Default)]
pub(super) struct Found {
    /// The normalized text of its words.
    text: String,
    pub steps: Vec<Step>,
}

/// A step of [`Found`]. Ranges are places in its text.
pub(super) enum Step {
    /// An added token, found by its name.
    Name(u32),
    /// A word that lies in the window.
    Word(Range<u32>),
    /// A part of a word that goes on beyond the window.
    Part(Range<u32>),
    /// The end of that word.
    End,
}

impl Found {
    /// Adds piece `index` of a window, as far as it lies in `certain`.
    pub fn add(&mut self, index: usize, piece: &NormalizedString, pieces: &Pieces, certain: Range<usize>) {
        let begins_within = pieces.begins_within && index == pieces.whole.start;
        let is_whole = pieces.whole.contains(&index);
        if is_whole && !begins_within {
            let place = self.push(piece.get());
            return self.steps.push(Step::Word(place));
        }
        if is_whole || pieces.goes_on == Some(index) {
            let start = if begins_within { position(piece, certain.start) } else { 0 };
            let end = if is_whole { piece.get().len() } else { position(piece, certain.end) };
            let place = self.push(piece.get().get(start..end).unwrap_or_default());
            self.steps.push(Step::Part(place));
        }
        if is_whole {
            self.steps.push(Step::End);
        }
    }

    fn push(&mut self, text: &str) -> Range<u32> {
        let start = self.text.len() as u32;
        self.text.push_str(text);
        start..self.text.len() as u32
    }

    pub fn text(&self, place: &Range<u32>) -> &str {
        &self.text[place.start as usize..place.end as usize]
    }
}

/// The pieces that a window was cut into, by their ranges in its text.
pub(super) struct Pieces {
    ranges: Vec<Range<usize>>,
    /// Pieces that are added tokens, and their ids.
    pub named: Vec<(usize, u32)>,
    /// Counted pieces that end in the certain part. The first may begin before it.
    pub whole: Range<usize>,
    pub begins_within: bool,
    /// The piece that begins in the certain part and ends after it.
    goes_on: Option<usize>,
}

impl Pieces {
    /// The pieces of a window. Its text counts from `at` (or from the start) and is certain up to `limit`.
    pub fn new(cut: &PreTokenizedString, at: Option<usize>, limit: usize, is_last: bool) -> Self {
        let splits = cut.get_splits(OffsetReferential::Original, OffsetType::None);
        let ranges: Vec<Range<usize>> = splits.iter().map(|(_, place, _)| place.0..place.1).collect();
        let named = splits.iter().enumerate().filter_map(|(index, (_, _, tokens))| {
            let token = tokens.as_ref()?.first()?;
            Some((index, token.id))
        });
        let named: Vec<(usize, u32)> = named.collect();
        // The last piece of a window may continue after removed text; an added token is complete.
        let ends_in_name = named.last().is_some_and(|(index, _)| index + 1 == ranges.len());
        let certain = ranges.len().saturating_sub(usize::from(!is_last && !ends_in_name));
        // Tokens that were put before the first character have no range in the text.
        let is_before = |range: &&Range<usize>, at| range.end <= at && range.start < at;
        let first = at.map_or(0, |at| ranges[..certain].iter().take_while(|range| is_before(range, at)).count());
        let begins_within = at.is_some_and(|at| ranges.get(first).is_some_and(|range| range.start < at));
        let ends_in_time = |range: &&Range<usize>| is_last || range.end <= limit;
        let whole = first..first + ranges[first..certain].iter().take_while(ends_in_time).count();
        let goes_on = ranges.get(whole.end).is_some_and(|range| range.start < limit).then_some(whole.end);
        Self { ranges, named, whole, begins_within, goes_on }
    }

    /// The last counted piece that begins at or before `latest`.
    pub fn last_before(&self, latest: usize) -> Option<usize> {
        let counted = &self.ranges[..self.whole.end + usize::from(self.goes_on.is_some())];
        counted.iter().rposition(|range| range.start <= latest)
    }

    /// The start of the next window. It is the start of a piece, because cutting a text from there gives the same pieces.
    /// That is certain only if the piece shares no character with the piece before it.
    pub fn restart(&self, latest: usize) -> usize {
        let starts_apart = |&index: &usize| {
            index == 0 || {
                let (before, here) = (&self.ranges[index - 1], &self.ranges[index]);
                before.end <= here.start && before.start < here.start
            }
        };
        let last = self.last_before(latest).and_then(|last| (0..=last).rev().find(starts_apart));
        last.map_or(0, |index| self.ranges[index].start)
    }
}

/// The origin of a normalized piece's last character that comes from `place` in the window's text or before it.
pub(super) fn origin_before(piece: &NormalizedString, place: usize) -> usize {
    let after = position(piece, place + 1);
    let start = piece.get().floor_char_boundary(after.saturating_sub(1));
    let origin = piece.convert_offsets(Referential::Normalized(start..after));
    piece.offsets_original().0 + origin.map_or(0, |origin| origin.start)
}

/// The first byte of a normalized piece whose character comes from `place` in the window's text or after it.
fn position(piece: &NormalizedString, place: usize) -> usize {
    let text = piece.get();
    let shift = piece.offsets_original().0;
    let is_before = |index: usize| {
        let next = text.ceil_char_boundary(index + 1);
        let origin = piece.convert_offsets(Referential::Normalized(index..next));
        origin.is_some_and(|origin| shift + origin.start < place)
    };
    let (mut low, mut high) = (0, text.len());
    while low < high {
        let middle = text.floor_char_boundary(low.midpoint(high));
        if is_before(middle) { low = text.ceil_char_boundary(middle + 1) } else { high = middle }
    }
    low
}
