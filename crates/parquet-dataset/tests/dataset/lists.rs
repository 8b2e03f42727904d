//! Lists of structs, from any kind of file that writers make, equal the written rows.

use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{Int64Builder, ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Fields, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::Encoding;
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet_dataset::{ListRow, Lists, list_columns};
use proptest::prelude::*;

use crate::files::{FileKind, Numbers, any_kind, compressions};

const ROLE: &str = "messages.list.element.role";
const CONTENT: &str = "messages.list.element.content";

/// The role and the text of a message; `None` is null.
type Message = (Option<String>, Option<String>);
/// The messages of a row; `None` if it has no list.
type Messages = Option<Vec<Message>>;

fn messages(kind: &FileKind, most: u64) -> Vec<Messages> {
    let mut numbers = Numbers(kind.seed);
    let mut text = |is_role: bool| {
        if kind.nullable && numbers.below(6) == 0 {
            return None;
        }
        let words = ["user", "assistant", "", "倒过来 and back, "];
        let word = words[numbers.below(4) as usize];
        Some(if is_role { word.to_owned() } else { word.repeat(numbers.below(9) as usize) })
    };
    let mut lengths = Numbers(kind.seed + 1);
    (0..kind.rows)
        .map(|_| {
            let length = lengths.below(most + 2);
            let is_there = !kind.nullable || length <= most;
            is_there.then(|| (0..length.min(most)).map(|_| (text(true), text(false))).collect())
        })
        .collect()
}

/// Writes a file with `id`, and `messages` with the fields `role`, `count` and `content`.
fn write(path: &Path, kind: &FileKind, rows: &[Messages]) {
    let text = |name| Field::new(name, DataType::Utf8, kind.nullable);
    let fields = Fields::from(vec![text("role"), Field::new("count", DataType::Int64, false), text("content")]);
    let element = Field::new("element", DataType::Struct(fields.clone()), kind.nullable);
    let mut list = ListBuilder::new(StructBuilder::from_fields(fields, 0)).with_field(element.clone());
    for row in rows {
        for (number, (role, content)) in row.iter().flatten().enumerate() {
            let values = list.values();
            values.field_builder::<StringBuilder>(0).unwrap().append_option(role.as_ref());
            values.field_builder::<Int64Builder>(1).unwrap().append_value(number as i64);
            values.field_builder::<StringBuilder>(2).unwrap().append_option(content.as_ref());
            // A null message has a null in each field.
            values.append(!(kind.nullable && role.is_none() && content.is_none()));
        }
        list.append(row.is_some());
    }
    let ids: ArrayRef =
        Arc::new((0..rows.len()).map(|row| Some(row.to_string())).collect::<arrow_array::StringArray>());
    let schema = Schema::new(vec![
        Field::new("id", DataType::Utf8, true),
        Field::new("messages", DataType::List(Arc::new(element)), kind.nullable),
    ]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![ids, Arc::new(list.finish())]).unwrap();
    let properties = WriterProperties::builder()
        .set_writer_version(kind.version)
        .set_max_row_group_row_count(Some(kind.row_group_rows))
        .set_data_page_row_count_limit(kind.page_rows)
        .set_write_batch_size(kind.page_rows)
        .set_dictionary_enabled(kind.dictionary)
        .set_dictionary_page_size_limit(kind.dictionary_bytes)
        .set_column_encoding(ROLE.into(), kind.encoding)
        .set_column_encoding(CONTENT.into(), kind.encoding)
        .set_compression(kind.compression)
        .set_offset_index_disabled(!kind.offset_index)
        .build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn open(path: &Path, elements: usize, bytes: u64) -> Lists {
    Lists::open(path, &[ROLE.to_owned(), CONTENT.to_owned()], elements, bytes).unwrap()
}

fn read(path: &Path) -> Vec<Messages> {
    let (mut lists, mut row, mut rows) = (open(path, usize::MAX, u64::MAX), ListRow::default(), Vec::new());
    while lists.next(&mut row).unwrap() {
        assert!(!row.is_cut());
        let value =
            |column, element| row.bytes(column, element).map(|bytes| String::from_utf8(bytes.to_vec()).unwrap());
        let all = || (0..row.elements() as usize).map(|element| (value(0, element), value(1, element))).collect();
        rows.push((!row.is_null()).then(all));
    }
    assert_eq!(lists.rows(), rows.len() as u64);
    rows
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn the_lists_of_any_file_are_those_that_were_written(kind in any_kind(200), most in prop_oneof![Just(1u64), Just(4), Just(40)]) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("chats.parquet");
        let rows = messages(&kind, most);
        write(&path, &kind, &rows);
        prop_assert_eq!(read(&path), rows);
    }
}

#[test]
fn every_encoding_compression_and_version_of_lists_reads() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("chats.parquet");
    let encodings = [Encoding::PLAIN, Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY];
    for (compression, encoding) in
        compressions().into_iter().flat_map(|codec| encodings.map(|encoding| (codec, encoding)))
    {
        for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
            for dictionary in [false, true] {
                let kind = FileKind { rows: 300, compression, encoding, version, dictionary, ..FileKind::default() };
                let rows = messages(&kind, 5);
                write(&path, &kind, &rows);
                assert_eq!(read(&path), rows, "{kind:?}");
            }
        }
    }
    assert_eq!(list_columns(&path).unwrap(), [ROLE, CONTENT]);
    // Without columns there are still rows, and an end.
    let (mut lists, mut row) = (Lists::open(&path, &[], 1, 1).unwrap(), ListRow::default());
    assert_eq!((0..1000).take_while(|_| lists.next(&mut row).unwrap()).count(), 300);
}

#[test]
fn of_a_long_list_and_of_a_long_row_no_more_is_kept_than_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("chats.parquet");
    let message = |text: &str| (Some("user".to_owned()), Some(text.to_owned()));
    let rows = vec![
        Some(vec![message("a"); 5000]),
        Some(vec![message("b")]),
        Some(vec![message(&"long ".repeat(100_000)), message("c")]),
        None,
        Some(vec![message("d"), message("e")]),
    ];
    write(&path, &FileKind { page_rows: 700, ..FileKind::default() }, &rows);
    let (mut lists, mut row) = (open(&path, 3, 1000), ListRow::default());
    let mut seen = Vec::new();
    while lists.next(&mut row).unwrap() {
        seen.push((row.elements(), row.is_null(), row.is_cut()));
        if row.elements() > 3 {
            assert_eq!(row.bytes(1, 2), Some(&b"a"[..]));
        }
    }
    assert_eq!(seen, [(5000, false, false), (1, false, false), (2, false, true), (0, true, false), (2, false, false)]);
    assert_eq!(row.bytes(1, 1), Some(&b"e"[..]));
}

#[test]
fn lists_of_a_file_with_any_byte_changed_are_rows_or_a_typed_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("chats.parquet");
    let small = FileKind { rows: 60, page_rows: 20, row_group_rows: 40, ..FileKind::default() };
    let v2 = FileKind { version: WriterVersion::PARQUET_2_0, dictionary: true, ..small.clone() };
    for (number, kind) in [small, v2].into_iter().enumerate() {
        write(&path, &kind, &messages(&kind, 4));
        let sound = std::fs::read(&path).unwrap();
        let mut numbers = Numbers(number as u64);
        let (mut errors, mut reads) = (0, 0);
        for at in 4..sound.len() - 4 {
            let mut damaged = sound.clone();
            damaged[at] =
                [0, 0xff, damaged[at] ^ 1 << numbers.below(8), numbers.next() as u8][numbers.below(4) as usize];
            std::fs::write(&path, &damaged).unwrap();
            let outcome =
                Lists::open(&path, &[ROLE.to_owned(), CONTENT.to_owned()], 4096, 1 << 20).and_then(|mut lists| {
                    let mut row = ListRow::default();
                    while lists.next(&mut row)? {}
                    Ok(())
                });
            match outcome {
                Ok(()) => reads += 1,
                Err(error) => {
                    errors += 1;
                    let text = error.to_string();
                    assert!(text.starts_with(&path.display().to_string()) && !text.contains("panic"), "{at}: {text}");
                }
            }
        }
        assert!(errors > 0 && reads > 0, "kind {number}: {errors} errors, {reads} reads");
    }
}
