//! A writer for the part of Thrift's compact protocol that parquet's metadata needs.

/// The types of fields.
const I32: u8 = 5;
const I64: u8 = 6;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;

/// The bytes of one or more structs. Fields of a struct are written in the order of their ids.
#[derive(Debug, Default)]
pub(crate) struct Compact {
    bytes: Vec<u8>,
    /// The id of the last field of each open struct.
    last: Vec<i16>,
}

impl Compact {
    /// Returns the bytes of a struct, written by `fields`.
    pub fn of(fields: impl FnOnce(&mut Self)) -> Vec<u8> {
        let mut compact = Self::default();
        compact.body(fields);
        compact.bytes
    }

    fn body(&mut self, fields: impl FnOnce(&mut Self)) {
        self.last.push(0);
        fields(self);
        self.last.pop();
        self.bytes.push(0);
    }

    fn header(&mut self, id: i16, kind: u8) {
        let last = self.last.last_mut().expect("fields are written within a struct");
        let delta = id - *last;
        assert!((1..16).contains(&delta), "field {id} after field {last}");
        *last = id;
        self.bytes.push((delta as u8) << 4 | kind);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    fn zigzag(&mut self, value: i64) {
        self.varint((value << 1 ^ value >> 63) as u64);
    }

    /// Writes a 32-bit number.
    pub fn i32(&mut self, id: i16, value: i32) {
        self.header(id, I32);
        self.zigzag(value.into());
    }

    /// Writes a 64-bit number.
    pub fn i64(&mut self, id: i16, value: u64) {
        self.header(id, I64);
        self.zigzag(value as i64);
    }

    /// Writes a text.
    pub fn text(&mut self, id: i16, text: &str) {
        self.header(id, BINARY);
        self.varint(text.len() as u64);
        self.bytes.extend_from_slice(text.as_bytes());
    }

    /// Writes a struct within a struct.
    pub fn group(&mut self, id: i16, fields: impl FnOnce(&mut Self)) {
        self.header(id, STRUCT);
        self.body(fields);
    }

    fn list(&mut self, id: i16, kind: u8, count: usize) {
        self.header(id, LIST);
        match count {
            0..15 => self.bytes.push((count as u8) << 4 | kind),
            _ => {
                self.bytes.push(0xf0 | kind);
                self.varint(count as u64);
            }
        }
    }

    /// Writes a list of 32-bit numbers.
    pub fn i32s(&mut self, id: i16, values: &[i32]) {
        self.list(id, I32, values.len());
        values.iter().for_each(|value| self.zigzag((*value).into()));
    }

    /// Writes a list of texts.
    pub fn texts(&mut self, id: i16, texts: &[&str]) {
        self.list(id, BINARY, texts.len());
        for text in texts {
            self.varint(text.len() as u64);
            self.bytes.extend_from_slice(text.as_bytes());
        }
    }

    /// Writes a list of structs.
    pub fn groups<T>(&mut self, id: i16, items: &[T], mut fields: impl FnMut(&mut Self, &T)) {
        self.list(id, STRUCT, items.len());
        items.iter().for_each(|item| self.body(|compact| fields(compact, item)));
    }
}
