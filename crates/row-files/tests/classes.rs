//! Parquet as Hugging Face's `datasets` writes it: numbers of classes, and texts that are not UTF-8.

use std::path::Path;
use std::sync::Arc;

use row_files::{BadRows, Chosen, Conversion, ReadOptions, Settings};

/// Parquet with `text`, whose second row is not UTF-8, the class `label` and the classes `labels`, as Hugging Face's `datasets` writes them.
fn classes(path: &Path) {
    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    let schema = "message rows { required binary text (UTF8); optional int64 label;
        optional group labels (LIST) { repeated group list { optional int64 element; } } }";
    let schema = Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
    let names = r#"{"names": ["bad", "good"], "_type": "ClassLabel"}"#;
    let features = format!(
        r#"{{"info": {{"features": {{"text": {{"dtype": "string", "_type": "Value"}}, "label": {names},
            "labels": {{"feature": {names}, "_type": "Sequence"}}}}}}}}"#
    );
    let features = parquet::file::metadata::KeyValue::new("huggingface".to_owned(), features);
    let properties =
        parquet::file::properties::WriterProperties::builder().set_key_value_metadata(Some(vec![features])).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = parquet::file::writer::SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let texts: [&[u8]; 5] = [b"so good", b"\xff\xfe", b"so bad", b"who knows", b"strange"];
    let texts = texts.map(|text| ByteArray::from(text.to_vec()));
    column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&[1, 1, 0, -1, 7], Some(&[1; 5]), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let (levels, repeats) = ([3, 3, 3, 3, 1, 0], [0, 1, 0, 0, 0, 0]);
    column.typed::<Int64Type>().write_batch(&[1, 0, 1, 0], Some(&levels), Some(&repeats)).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn numbers_of_classes_are_read_as_their_names_and_a_text_that_is_not_utf8_costs_its_row_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("classes.parquet");
    classes(&path);
    let of = |response: &str| {
        let chosen =
            Chosen { response: Some(response.to_owned()), prompt: Some("text".to_owned()), ..Chosen::default() };
        let conversion = Conversion::new(std::slice::from_ref(&path), &chosen, &ReadOptions::default()).unwrap();
        let (_, kind, pairing) = &conversion.sources[0];
        assert_eq!(kind.rows, Some(5));
        let mut pairs = Vec::new();
        let settings = Settings { bad_rows: BadRows::Skip, ..Settings::default() };
        let counts = conversion.run(&settings, &mut |_, [prompt, response], _| {
            pairs.push(format!("{prompt}: {response}"));
            Ok(())
        });
        let usual = conversion.run(&Settings::default(), &mut |_, _, _| Ok(())).unwrap_err();
        assert!(usual.to_string().ends_with("classes.parquet: row 1: the row is not UTF-8"), "{usual}");
        assert_eq!(usual.hint(), None);
        (pairing.of_classes(&kind.classes), pairs, counts.unwrap())
    };
    let (words, pairs, counts) = of("label");
    assert!(words.ends_with("response from `label`; the numbers of `label` are read as `bad`, `good`"), "{words}");
    assert_eq!(pairs, ["so good: good", "so bad: bad"]);
    // Not UTF-8, and a number of no class; a negative number is a row without a class.
    assert_eq!((counts.malformed, counts.empty, counts.of_files), (2, 1, vec![5]));
    let (_, pairs, counts) = of("labels");
    assert_eq!(pairs, ["so good: good\nbad", "so bad: bad"]);
    assert_eq!((counts.malformed, counts.empty), (1, 2));
}
