//! Text of an answer while it grows: sends only text that is final, and nothing from a stop text on.

/// The sent part of an answer's text.
///
/// The end of the text so far may still change: it may be part of a character, or the beginning of a stop text. So that end
/// is held back.
#[derive(Clone, Debug, Default)]
pub struct StreamedText {
    sent: usize,
    stops: Vec<String>,
    is_stopped: bool,
}

impl StreamedText {
    /// Begins an answer. Any of `stops` ends the answer and is not part of it.
    pub fn new(stops: &[String]) -> Self {
        StreamedText { stops: stops.to_vec(), ..StreamedText::default() }
    }

    /// Whether a stop text occurred.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Returns the text to send now, given the whole answer so far in `text`. `ends`: nothing follows `text`.
    pub fn more<'a>(&mut self, text: &'a str, ends: bool) -> &'a str {
        if self.is_stopped {
            return "";
        }
        let stop = self.stops.iter().filter_map(|stop| text.find(stop.as_str())).min();
        let end = match stop {
            Some(place) => {
                self.is_stopped = true;
                place
            }
            None if ends => text.len(),
            None => self.final_bytes(text),
        };
        // If a decoder changes earlier text, the sent text is not corrected.
        let more = text.get(self.sent..end).unwrap_or_default();
        self.sent += more.len();
        more
    }

    /// Number of bytes of `text` that are final.
    fn final_bytes(&self, text: &str) -> usize {
        let whole = text.trim_end_matches('\u{fffd}');
        let begun = |stop: &String| {
            let ends = (1..stop.len()).rev().filter(|&length| stop.is_char_boundary(length));
            ends.into_iter().find(|&length| whole.ends_with(&stop[..length])).unwrap_or(0)
        };
        whole.len() - self.stops.iter().map(begun).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts sent for an answer whose text grows like this, and whether it was stopped.
    fn sent(stops: &[&str], texts: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut outgoing = StreamedText::new(&stops);
        let last = texts.len() - 1;
        let parts = texts.iter().enumerate().map(|(i, text)| outgoing.more(text, i == last).to_owned());
        let parts = parts.filter(|part| !part.is_empty()).collect();
        (parts, outgoing.is_stopped())
    }

    #[test]
    fn text_is_sent_once_and_a_character_only_whole() {
        let parts = |texts: &[&str]| sent(&[], texts).0;
        assert_eq!(parts(&["a", "a b", "a b c"]), ["a", " b", " c"]);
        assert_eq!(parts(&["a", "a\u{fffd}", "a\u{e9}"]), ["a", "\u{e9}"]);
        assert_eq!(parts(&["a", "a\u{fffd}"]), ["a", "\u{fffd}"]);
    }

    #[test]
    fn a_stop_text_ends_the_answer_before_it_and_its_beginning_is_held_back() {
        assert_eq!(sent(&["END"], &["a E", "a EN", "a END b"]), (vec!["a ".to_owned()], true));
        assert_eq!(sent(&["END"], &["a E", "a Ex"]), (vec!["a ".to_owned(), "Ex".to_owned()], false));
        assert_eq!(sent(&["END"], &["a EN"]), (vec!["a EN".to_owned()], false));
        assert_eq!(sent(&["\n", "b"], &["a b\n"]), (vec!["a ".to_owned()], true));
        assert_eq!(sent(&["é!"], &["é", "éa"]), (vec!["éa".to_owned()], false));
    }
}
