//! [`Encoding`]: texts that are not UTF-8, decoded as they are read, and the encoding that a file seems to have.

use std::io::{self, Read};

use encoding_rs::{BIG5, DecoderResult, EUC_JP, EUC_KR, GB18030, SHIFT_JIS, WINDOWS_1251, WINDOWS_1252};

/// An encoding of the WHATWG's standard: windows-1252 (which is also latin-1), gb18030, shift_jis, big5, utf-16le and others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding(&'static encoding_rs::Encoding);

/// Bytes that are decoded at a time.
const PIECE_BYTES: usize = 16 << 10;
/// A byte that no UTF-8 has: it stands for bytes that the encoding does not have, so that their row is named.
const BROKEN: u8 = 0xff;

impl Encoding {
    /// Finds an encoding by one of its names, in any case.
    pub fn of_name(name: &str) -> Option<Self> {
        // Python's names of what the standard calls windows-1252 and gbk.
        let name = match name.to_ascii_lowercase().replace('_', "-").as_str() {
            "cp1252" | "latin-1" | "iso-8859-1" | "iso8859-1" => "windows-1252".to_owned(),
            "cp1251" => "windows-1251".to_owned(),
            "cp936" => "gb18030".to_owned(),
            "cp932" | "shift-jis" => "shift_jis".to_owned(),
            "cp949" => "euc-kr".to_owned(),
            other => other.to_owned(),
        };
        encoding_rs::Encoding::for_label_no_replacement(name.as_bytes()).map(Self)
    }

    /// The name in lower case.
    pub fn name(self) -> String {
        self.0.name().to_ascii_lowercase()
    }

    /// The text of `reader`, which is in this encoding, as UTF-8. Bytes that the encoding lacks become bytes that no UTF-8 has.
    pub fn decode(self, reader: impl Read + 'static) -> Box<dyn Read> {
        if self.is_utf8() { Box::new(reader) } else { Box::new(Decoded::new(reader, self)) }
    }

    /// Whether the text is UTF-8, which needs no decoding.
    pub(crate) fn is_utf8(self) -> bool {
        self.0 == encoding_rs::UTF_8
    }

    /// The encoding that bytes seem to have, of which some are not UTF-8. `None` if no encoding gives ordinary text, or if
    /// other lines are UTF-8: then no encoding is right for the whole file.
    pub(crate) fn guess(bytes: &[u8]) -> Option<Self> {
        let is_utf8 = |line: &[u8]| !line.is_ascii() && std::str::from_utf8(line).is_ok();
        if bytes.split(|byte| *byte == b'\n').any(is_utf8) {
            return None;
        }
        let high = |at: usize| bytes.get(at).is_some_and(|byte| *byte >= 0x80);
        let all = (0..bytes.len()).filter(|&at| high(at)).count();
        let is_letter = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphabetic);
        let (mut runs, mut in_words) = (0_usize, 0);
        for start in (0..bytes.len()).filter(|&at| high(at) && (at == 0 || !high(at - 1))) {
            let end = (start..bytes.len()).find(|&at| !high(at)).unwrap_or(bytes.len());
            let is_beside_letter = start > 0 && is_letter(start - 1) || is_letter(end);
            runs += 1;
            in_words += usize::from(end - start <= 2 && is_beside_letter);
        }
        // Letters with accents stand beside plain ones, rarely more than two together. Other scripts come in longer runs.
        let candidates: &[_] = match runs * 8 > all * 5 || in_words * 2 > runs {
            true => &[WINDOWS_1252, SHIFT_JIS, GB18030, BIG5],
            false => &[EUC_JP, SHIFT_JIS, EUC_KR, GB18030, BIG5, WINDOWS_1251, WINDOWS_1252],
        };
        candidates.iter().copied().find(|encoding| gives_text(encoding, bytes)).map(Self)
    }
}

/// Whether nearly all letters beyond ASCII are those that texts in this encoding have.
fn gives_text(encoding: &'static encoding_rs::Encoding, bytes: &[u8]) -> bool {
    let Some(text) = encoding.decode_without_bom_handling_and_without_replacement(bytes) else { return false };
    let is_usual: fn(char) -> bool = match encoding {
        e if e == WINDOWS_1252 => {
            |c| matches!(c, 'À'..='Ö' | 'Ø'..='ö' | 'ø'..='ÿ' | '–'..='„' | '•' | '…' | '€' | '°' | '«' | '»' | '£' | '§' | '\u{a0}' | '·' | 'Œ' | 'œ' | 'Š' | 'š' | '™' | '®' | '©' | '¿' | '¡' | '²' | '³' | '½')
        }
        e if e == WINDOWS_1251 => {
            |c| matches!(c, 'А'..='я' | 'ё' | 'Ё' | 'і' | 'І' | 'ї' | 'є' | '–'..='„' | '«' | '»' | '№' | '\u{a0}' | '…')
        }
        e if e == EUC_KR => |c| matches!(c, '가'..='힣' | '\u{3000}'..='〕' | '·' | '…' | '‘'..='”'),
        e if e == SHIFT_JIS || e == EUC_JP => {
            |c| matches!(c, 'ぁ'..='ヿ' | '\u{3000}'..='〕' | '！'..='～' | '一'..='龠')
        }
        _ => |c| matches!(c, '一'..='龥' | '\u{3000}'..='〕' | '！'..='～' | '‘'..='”' | '—' | '…' | '·'),
    };
    let is_japanese = encoding == SHIFT_JIS || encoding == EUC_JP;
    let (mut all, mut usual, mut kana) = (0_usize, 0, 0);
    for letter in text.chars().filter(|letter| !letter.is_ascii()) {
        all += 1;
        usual += usize::from(is_usual(letter));
        kana += usize::from(matches!(letter, 'ぁ'..='ヿ'));
    }
    // Japanese without its syllables is another encoding's text.
    usual * 10 >= all * 9 && (!is_japanese || kana * 4 >= all)
}

/// Text in an encoding, read as UTF-8.
pub(crate) struct Decoded<R> {
    reader: R,
    decoder: encoding_rs::Decoder,
    raw: Vec<u8>,
    raw_at: usize,
    text: Vec<u8>,
    text_at: usize,
    /// Whether the reader is at its end.
    is_last: bool,
    is_over: bool,
}

impl<R: Read> Decoded<R> {
    pub fn new(reader: R, encoding: Encoding) -> Self {
        let decoder = encoding.0.new_decoder_with_bom_removal();
        Self {
            reader,
            decoder,
            raw: Vec::new(),
            raw_at: 0,
            text: Vec::new(),
            text_at: 0,
            is_last: false,
            is_over: false,
        }
    }

    /// Decodes the next piece.
    fn more(&mut self) -> io::Result<()> {
        if self.raw_at == self.raw.len() && !self.is_last {
            self.raw.resize(PIECE_BYTES, 0);
            let read = self.reader.read(&mut self.raw)?;
            self.raw.truncate(read);
            (self.raw_at, self.is_last) = (0, read == 0);
        }
        self.text.resize(4 * PIECE_BYTES, 0);
        let raw = &self.raw[self.raw_at..];
        let (result, read, written) =
            self.decoder.decode_to_utf8_without_replacement(raw, &mut self.text, self.is_last);
        self.raw_at += read;
        self.text.truncate(written);
        self.text_at = 0;
        match result {
            DecoderResult::Malformed(..) => self.text.push(BROKEN),
            DecoderResult::InputEmpty => self.is_over = self.is_last,
            DecoderResult::OutputFull => {}
        }
        Ok(())
    }
}

impl<R: Read> Read for Decoded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.text_at == self.text.len() && !self.is_over {
            self.more()?;
        }
        let count = (self.text.len() - self.text_at).min(buffer.len());
        buffer[..count].copy_from_slice(&self.text[self.text_at..self.text_at + count]);
        self.text_at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, text: &str) {
        let encoding = Encoding::of_name(name).unwrap();
        let (bytes, _, has_errors) = encoding.0.encode(text);
        assert!(!has_errors, "{name}");
        assert_eq!(Encoding::guess(&bytes).map(Encoding::name), Some(encoding.name()), "{text}");
        let mut decoded = String::new();
        Decoded::new(&bytes[..], encoding).read_to_string(&mut decoded).unwrap();
        assert_eq!(decoded, text, "{name}");
    }

    #[test]
    fn the_encoding_of_ordinary_text_is_found_and_read() {
        check("windows-1252", "prompt,response\nJürgen grüßt,“5 €” für Käse\n");
        check("windows-1252", "text;label\nGrüße; so\nnö;schlecht\n");
        check("windows-1252", "prompt,response\nq0,Größe\nq1,Süße\n");
        check("gb18030", "prompt,response\nA股,大盘\n手机iPhone,今天\n");
        check("latin-1", "question,answer\nOù est la gare ?,à côté du café\n");
        check("gb18030", "prompt,response\n今天天气怎么样？,今天是晴天，气温二十度。\n");
        check("shift_jis", "prompt,response\n今日の天気はどうですか？,晴れです。\n");
        check("euc-kr", "prompt,response\n오늘 날씨는 어때요?,맑습니다.\n");
        check("big5", "prompt,response\n臺灣的天氣怎麼樣？,今天是晴天。\n");
        check("windows-1251", "prompt,response\nКакая сегодня погода?,Сегодня солнечно и тепло.\n");
    }

    #[test]
    fn no_encoding_is_right_for_a_file_of_which_a_part_is_utf8() {
        assert_eq!(Encoding::guess(b"a,\xe9t\xe9\nb,\xc3\xa9t\xc3\xa9\n"), None);
        assert_eq!(Encoding::guess(b"\x80\x81\x82\x90\x8d\x9d"), None);
    }

    #[test]
    fn bytes_that_an_encoding_lacks_stay_no_utf8() {
        let mut decoded = Vec::new();
        Decoded::new(&b"a\x80b\nc"[..], Encoding::of_name("shift_jis").unwrap()).read_to_end(&mut decoded).unwrap();
        assert_eq!(decoded.iter().filter(|byte| **byte == BROKEN || **byte == 0x80).count(), 1);
        let encoding = Encoding::of_name("utf-16le").unwrap();
        let mut text = String::new();
        Decoded::new(&b"\xff\xfea\0\x60\x4f"[..], encoding).read_to_string(&mut text).unwrap();
        assert_eq!(text, "a你");
    }
}
