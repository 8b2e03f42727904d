//! Sources that are cut on either side.

use super::windows::{Source, TextFault};
use super::{Kind, Prefixed, Tokenizer};
use crate::Error;
use crate::side::Side;

impl Tokenizer {
    /// Returns the ids of a prefix and the last ids of the text after it, together at most `room` with the start ids, and whether ids
    /// were left out. If all fit, they are those of the prefix and the text as one text.
    pub(crate) fn encode_end(
        &self,
        prefix: &str,
        text: &mut impl Source,
        room: usize,
    ) -> Result<(Vec<u32>, bool), TextFault> {
        let room = room.saturating_sub(self.start_ids.len());
        let (mut ids, is_cut) = self.encode_last(&mut Prefixed::new(prefix, text), room)?;
        if is_cut && !prefix.is_empty() {
            let mut of_prefix = self.encode(prefix)?;
            of_prefix.truncate(room / 2);
            ids.drain(..of_prefix.len().min(ids.len()));
            of_prefix.append(&mut ids);
            ids = of_prefix;
        }
        Ok((ids, is_cut))
    }

    /// Returns the last `most` ids of a text, and whether there are more before them. The text is read whole.
    fn encode_last(&self, source: &mut impl Source, most: usize) -> Result<(Vec<u32>, bool), TextFault> {
        let mut ids = match &self.kind {
            Kind::Bytes(tokenizer) => tokenizer.encode(source, usize::MAX)?,
            _ => self.tokenize(self.windows(most), source, usize::MAX, |tokenizing| tokenizing.keep_last(most + 1))?,
        };
        let is_cut = ids.len() > most;
        ids.drain(..ids.len().saturating_sub(most));
        Ok((ids, is_cut))
    }

    /// The ids of a prompt after a prefix, without the end-of-sequence id, cut to `room` ids on that side; and whether it was cut.
    ///
    /// # Errors
    /// The same as for [`encode`](Self::encode).
    pub fn encode_prompt(&self, prefix: &str, text: &str, room: usize, side: Side) -> Result<(Vec<u32>, bool), Error> {
        let mut ids = self.start_ids.clone();
        if side == Side::Left {
            let (of_text, is_cut) = self.encode_end(prefix, &mut &*text, room).map_err(TextFault::of_memory)?;
            ids.extend(of_text);
            return Ok((ids, is_cut));
        }
        ids.extend(self.encode_start(&format!("{prefix}{text}"), room)?);
        let is_cut = ids.len() > room;
        ids.truncate(room);
        Ok((ids, is_cut))
    }

    /// Sets the side on which texts are cut: a model that is saved with this tokenizer keeps it.
    pub fn set_truncation_side(&mut self, side: Side) {
        if self.truncation_side().unwrap_or_default() != side {
            self.transformers_config.cut_on(side);
        }
    }

    /// The side on which the model's publisher cuts texts: `truncation_side` of `tokenizer_config.json`.
    pub fn truncation_side(&self) -> Option<Side> {
        self.transformers_config.truncation_side
    }
}

#[cfg(test)]
mod tests {
    use crate::side::Side;
    use crate::testing::sample_tokenizer;

    #[test]
    fn a_source_that_is_cut_on_the_left_keeps_its_prefix_and_its_end() {
        let tokenizer = sample_tokenizer();
        let (prefix, text) = ("reverse: ", "three red cats, 倒过来 12 km ".repeat(900));
        let whole = tokenizer.encode(&format!("{prefix}{text}")).unwrap();
        let of_prefix = tokenizer.encode(prefix).unwrap();
        for room in [20, 500, 5000] {
            let (ids, is_cut) = tokenizer.encode_prompt(prefix, &text, room, Side::Left).unwrap();
            assert_eq!((ids.len(), is_cut), (room, true));
            assert_eq!(ids[..of_prefix.len()], of_prefix);
            assert_eq!(ids[of_prefix.len()..], whole[whole.len() - room + of_prefix.len()..], "{room}");
            let (ids, is_cut) = tokenizer.encode_prompt(prefix, &text, room, Side::Right).unwrap();
            assert_eq!((ids.as_slice(), is_cut), (&whole[..room], true));
        }
        for side in [Side::Left, Side::Right] {
            assert_eq!(tokenizer.encode_prompt(prefix, &text, whole.len(), side).unwrap(), (whole.clone(), false));
        }
    }
}
