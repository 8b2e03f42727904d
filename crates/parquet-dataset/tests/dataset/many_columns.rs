//! Files with very many columns, written by hand: every column chunk is the same page of one text.

use std::path::Path;

/// The part of Thrift's compact protocol that a footer needs.
#[derive(Default)]
struct Struct {
    bytes: Vec<u8>,
    last: u8,
}

fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

impl Struct {
    fn field(mut self, id: u8, kind: u8) -> Self {
        self.bytes.push((id - self.last) << 4 | kind);
        self.last = id;
        self
    }

    fn i32(self, id: u8, value: u64) -> Self {
        let mut with = self.field(id, 5);
        varint(&mut with.bytes, value << 1);
        with
    }

    fn i64(self, id: u8, value: u64) -> Self {
        let mut with = self.field(id, 6);
        varint(&mut with.bytes, value << 1);
        with
    }

    fn text(self, id: u8, text: &str) -> Self {
        let mut with = self.field(id, 8);
        varint(&mut with.bytes, text.len() as u64);
        with.bytes.extend(text.bytes());
        with
    }

    fn inner(self, id: u8, inner: Self) -> Self {
        let mut with = self.field(id, 12);
        with.bytes.extend(inner.end());
        with
    }

    fn list(self, id: u8, kind: u8, length: u64, items: impl Iterator<Item = Vec<u8>>) -> Self {
        let mut with = self.field(id, 9);
        with.bytes.push(0xf0 | kind);
        varint(&mut with.bytes, length);
        items.for_each(|item| with.bytes.extend(item));
        with
    }

    fn end(mut self) -> Vec<u8> {
        self.bytes.push(0);
        self.bytes
    }
}

/// Writes row groups of one row each with the required string columns `column 0`, `column 1`, ...
pub fn write(path: &Path, columns: u64, row_groups: u64) {
    let name = |column: u64| format!("column {column}");
    let text = b"\x04\0\0\0text";
    let page = Struct::default().i32(1, 1).i32(2, 0).i32(3, 3).i32(4, 3);
    let page = Struct::default().i32(1, 0).i32(2, text.len() as u64).i32(3, text.len() as u64).inner(5, page).end();
    let size = (page.len() + text.len()) as u64;
    let chunk = |column: u64| {
        let path = std::iter::once([vec![name(column).len() as u8], name(column).into_bytes()].concat());
        let metadata = Struct::default().i32(1, 6).list(2, 5, 2, [vec![0], vec![6]].into_iter()).list(3, 8, 1, path);
        let metadata = metadata.i32(4, 0).i64(5, 1).i64(6, size).i64(7, size).i64(9, 4);
        // The size of a page's statistics in an ordinary file.
        let metadata = metadata.inner(12, Struct::default().text(5, &"z".repeat(30)).text(6, &"a".repeat(30)));
        Struct::default().i64(2, 4).inner(3, metadata).end()
    };
    let schema =
        (0..columns).map(|column| Struct::default().i32(1, 6).i32(3, 0).text(4, &name(column)).i32(6, 0).end());
    let root = std::iter::once(Struct::default().text(4, "schema").i32(5, columns).end());
    let group = |_| Struct::default().list(1, 12, columns, (0..columns).map(chunk)).i64(2, size).i64(3, 1).end();
    let footer = Struct::default().i32(1, 1).list(2, 12, columns + 1, root.chain(schema)).i64(3, row_groups);
    let footer = footer.list(4, 12, row_groups, (0..row_groups).map(group)).text(6, "by hand").end();
    let length = (footer.len() as u32).to_le_bytes();
    std::fs::write(path, [b"PAR1", &page[..], text, &footer, &length, b"PAR1"].concat()).unwrap();
}
