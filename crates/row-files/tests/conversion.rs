//! Converts files of every form to parquet. The parquet crate and this project's own reader then read the same rows.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, StringBuilder, StructBuilder};
use arrow_array::cast::AsArray;
use arrow_schema::{DataType, Field, Fields};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use row_files::{
    BadRows, Chosen, Conversion, Counts, Duplicates, Encoding, Error, ParquetWriter, Part, Quoting, ReadOptions,
    Settings, Share, Sizes,
};
use tempfile::TempDir;

type Pairs = Vec<(String, String)>;

/// Files of one test.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// A parquet file with a column of messages that are not structs.
    fn nested_texts(self, name: &str) -> (Self, PathBuf) {
        let mut messages = ListBuilder::new(StringBuilder::new());
        messages.values().append_value("hi");
        messages.append(true);
        let path = self.parquet(name, Arc::new(messages.finish()));
        (self, path)
    }

    /// A parquet file with a column of messages, each a role and a text.
    fn chats(&self, name: &str, names: [&str; 2], chats: &[Option<&[[Option<&str>; 2]]>]) -> PathBuf {
        let fields = Fields::from(names.map(|name| Field::new(name, DataType::Utf8, true)).to_vec());
        let mut list = ListBuilder::new(StructBuilder::from_fields(fields, 0));
        for chat in chats {
            for message in chat.iter().flat_map(|messages| messages.iter()) {
                for (field, text) in message.iter().enumerate() {
                    list.values().field_builder::<StringBuilder>(field).unwrap().append_option(*text);
                }
                list.values().append(true);
            }
            list.append(chat.is_some());
        }
        self.parquet(name, Arc::new(list.finish()))
    }

    fn parquet(&self, name: &str, messages: arrow_array::ArrayRef) -> PathBuf {
        self.column(name, "messages", messages)
    }

    /// A parquet file with the column `id` and this one.
    fn column(&self, name: &str, column: &str, values: arrow_array::ArrayRef) -> PathBuf {
        self.column_in(name, column, values, parquet::basic::Compression::SNAPPY)
    }

    fn column_in(
        &self,
        name: &str,
        column: &str,
        messages: arrow_array::ArrayRef,
        codec: parquet::basic::Compression,
    ) -> PathBuf {
        let ids: arrow_array::ArrayRef =
            Arc::new((0..messages.len()).map(|id| Some(id.to_string())).collect::<arrow_array::StringArray>());
        let batch = arrow_array::RecordBatch::try_from_iter([("id", ids), (column, messages)]).unwrap();
        let path = self.0.path().join(name);
        let file = std::fs::File::create(&path).unwrap();
        let properties = parquet::file::properties::WriterProperties::builder().set_compression(codec).build();
        let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        path
    }

    fn with(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

fn read_with(paths: &[PathBuf], settings: &Settings<'_>) -> Result<(Counts, Pairs), Error> {
    read_as(paths, settings, &Chosen::default(), &ReadOptions::default())
}

fn read_as(
    paths: &[PathBuf],
    settings: &Settings<'_>,
    chosen: &Chosen,
    options: &ReadOptions,
) -> Result<(Counts, Pairs), Error> {
    let mut pairs = Vec::new();
    let conversion = Conversion::new(paths, chosen, options)?;
    let counts = conversion.run(settings, &mut |_, [prompt, response], _| {
        pairs.push((prompt, response));
        Ok(())
    })?;
    Ok((counts, pairs))
}

fn read(path: &Path) -> Result<Pairs, Error> {
    read_with(&[path.to_owned()], &Settings::default()).map(|(_, pairs)| pairs)
}

#[track_caller]
fn check(name: &str, bytes: impl AsRef<[u8]>, expected: &[(&str, &str)]) {
    let pairs = read(&Files::new().with(name, bytes)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let expected: Pairs = expected.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
    assert_eq!(pairs, expected, "{name}");
}

#[track_caller]
fn refused(name: &str, bytes: impl AsRef<[u8]>, expected: &str) {
    let error = read(&Files::new().with(name, bytes)).expect_err(name);
    let text = format!("{error}\n{}", error.hint().unwrap_or_default());
    assert!(text.contains(expected), "{name}: expected {expected:?}, got {text}");
}

const TWO: [(&str, &str); 2] = [("a", "1"), ("b \"q\"\n,", "2 \u{4f60}\u{597d}")];
const LINES: &str = "{\"prompt\": \"a\", \"id\": [1, {\"x\": null}], \"response\": \"1\"}\n\n{\"response\":\"2 \u{4f60}\\u597d\",\"prompt\":\"b \\\"q\\\"\\n,\"}\n";
const CSV: &str = "prompt,id,response\na,7,1\n\"b \"\"q\"\"\n,\",,2 \u{4f60}\u{597d}\n";

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn every_form_gives_the_same_rows_plain_and_compressed_whatever_its_name() {
    check("a.jsonl", LINES, &TWO);
    check("a.json", LINES, &TWO);
    check("rows", LINES, &TWO);
    check("a.jsonl", format!("\u{feff}{}", LINES.replace('\n', "\r\n")), &TWO);
    check("a.json", format!("[{}]", LINES.trim().replace("\n\n", ",\n")), &TWO);
    check("a.json", LINES.replace(", \"id\"", ",\n  \"id\"").replace("{\"response\"", "{\n\"response\""), &TWO);
    let list = LINES.trim().replace("\n\n", ",");
    check("a.json", format!("{{\"version\": \"1\", \"data\": [{list}], \"more\": {{}}}}"), &TWO);
    check("a.json", format!("{{\n  \"data\": [\n{list}\n]\n}}\n"), &TWO);
    check("a.csv", CSV, &TWO);
    check("a.csv", format!("\u{feff}{}", CSV.replace("\nb", "\r\nb")), &TWO);
    check("a.csv", format!("\n{CSV}\n   \n\t\n"), &TWO);
    check("a.csv", CSV.replace("a,7,1", "a;7;1").replace("prompt,id,", "prompt;id;").replace(",,2", ";;2"), &TWO);
    check("a.csv", CSV.replace("a,7,1", "a|7|1").replace("prompt,id,", "prompt|id|").replace(",,2", "||2"), &TWO);
    let tsv = CSV.replace("a,7,1", "a\t7\t1").replace("prompt,id,", "prompt\tid\t").replace(",,2", "\t\t2");
    let quoted = ReadOptions { quoting: Quoting::Quoted, ..ReadOptions::default() };
    let files = Files::new();
    let (counts, pairs) =
        read_as(&[files.with("a.tsv", tsv)], &Settings::default(), &Chosen::default(), &quoted).unwrap();
    assert_eq!(pairs, TWO.map(|(prompt, response)| (prompt.to_owned(), response.to_owned())));
    // Its prompt spans lines 3 and 4.
    assert_eq!(counts.notes.unwrap().1.spanning, (1, 3));
    for (name, text) in [("a.jsonl", LINES), ("a.csv", CSV)] {
        let packed = [gzip(&text.as_bytes()[..20]), gzip(&text.as_bytes()[20..])].concat();
        check(&format!("{name}.gz"), &packed, &TWO);
        check(name, &packed, &TWO);
        check(&format!("{name}.zst"), zstd::encode_all(text.as_bytes(), 3).unwrap(), &TWO);
    }
}

#[test]
fn chats_and_instructions_become_pairs() {
    check(
        "chat.jsonl",
        r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"}]}"#,
        &[("Hi", "Hello")],
    );
    check(
        "chat.csv",
        "messages\n\"[{\"\"from\"\":\"\"human\"\",\"\"value\"\":\"\"q\"\"},{\"\"from\"\":\"\"gpt\"\",\"\"value\"\":\"\"a\"\"}]\"\n",
        &[("q", "a")],
    );
    check(
        "alpaca.json",
        r#"[{"instruction":"Add","input":"1 2","output":3},{"instruction":"Say","input":"","output":"yes"}]"#,
        &[("Add\n1 2", "3"), ("Say", "yes")],
    );
    check("text.jsonl", "{\"text\": \"once\"}\n", &[("", "once")]);
}

#[test]
fn a_column_that_first_occurs_late_is_never_left_out_without_a_word() {
    let files = Files::new();
    let early = "{\"instruction\": \"i\", \"output\": \"o\"}\n".repeat(3_000);
    let late = |row: &str| files.with("later rows.jsonl", format!("{early}{row}\n"));
    let error = read(&late("{\"instruction\": \"i\", \"input\": \"late\", \"output\": \"o\"}")).unwrap_err();
    let words = "later rows.jsonl:3001: the first row with a column `input`; without it rows are read as: prompt from `instruction`";
    assert!(error.to_string().contains(words), "{error}");
    assert!(
        error.hint().is_some_and(|hint| hint.contains("sed -n 3001p '/") && hint.contains("later rows.jsonl';")),
        "{error}"
    );
    // Columns that the user named, and a column that says nothing, change no meaning.
    let named =
        Chosen { prompt: Some("instruction".to_owned()), response: Some("output".to_owned()), ..Chosen::default() };
    let input = late("{\"instruction\": \"i\", \"input\": \"late\", \"output\": \"o\"}");
    let (counts, _) = read_as(&[input], &Settings::default(), &named, &ReadOptions::default()).unwrap();
    assert_eq!(counts.read, 3_001);
    assert_eq!(read(&late("{\"instruction\": \"i\", \"note\": 1, \"output\": \"o\"}")).unwrap().len(), 3_001);
}

#[test]
fn a_key_that_is_there_twice_counts_last_and_numbers_are_their_json() {
    check("a.jsonl", "{\"prompt\":\"x\",\"prompt\":1.0,\"response\":true}\n", &[("1.0", "true")]);
    check("a.jsonl", "{\"prompt\":12345678901234567890,\"response\":-3}\n", &[("12345678901234567890", "-3")]);
}

#[test]
fn numbers_keep_their_digits_and_those_that_are_not_finite_are_null() {
    let digits = ["2.50", "1.0", "1e5", "123456789012345678901234567890", "3.14159265358979323846", "-0", "1e999"];
    let rows: String = digits.iter().map(|n| format!("{{\"prompt\":{n},\"response\":\"{n}\",\"x\":NaN}}\n")).collect();
    check("a.jsonl", rows, &digits.map(|n| (n, n)));
    let rows = "{\"prompt\":\"a\",\"response\":NaN}\n{\"prompt\":\"a\",\"response\":-Infinity}\n{\"prompt\":\"a\",\"response\":1}\n";
    let files = Files::new();
    let (counts, pairs) = read_with(&[files.with("a.jsonl", rows)], &Settings::default()).unwrap();
    assert_eq!((counts.empty, pairs), (2, vec![("a".to_owned(), "1".to_owned())]));
}

#[test]
fn a_tsv_has_no_quotes_unless_it_is_said_to() {
    let text = "prompt\tresponse\n\"Quoted start\tA\nplain one\tB\nends with quote\"\tC\n\"both\"\tD\n";
    let files = Files::new();
    let (counts, pairs) = read_with(&[files.with("a.tsv", text)], &Settings::default()).unwrap();
    let pairs: Vec<_> = pairs.iter().map(|(prompt, response)| (prompt.as_str(), response.as_str())).collect();
    assert_eq!(pairs, [("\"Quoted start", "A"), ("plain one", "B"), ("ends with quote\"", "C"), ("\"both\"", "D")]);
    assert_eq!(counts.notes.unwrap().1.quoted, (1, 5));
    let plain = ReadOptions { quoting: Quoting::Plain, ..ReadOptions::default() };
    let path = files.with("a.csv", "prompt,response\n\"a,b\n");
    let (_, pairs) = read_as(&[path], &Settings::default(), &Chosen::default(), &plain).unwrap();
    assert_eq!(pairs, [("\"a".to_owned(), "b".to_owned())]);
}

#[test]
fn members_of_objects_have_dotted_names_in_every_form() {
    let chosen = Chosen {
        prompt: Some("translation.en".to_owned()),
        response: Some("translation.de".to_owned()),
        ..Chosen::default()
    };
    let files = Files::new();
    let fields = Fields::from(["en", "de"].map(|name| Field::new(name, DataType::Utf8, true)).to_vec());
    let texts = |text: &str| Arc::new(arrow_array::StringArray::from(vec![text])) as arrow_array::ArrayRef;
    let object = arrow_array::StructArray::new(fields, vec![texts("hello"), texts("hallo")], None);
    let paths = [
        files.with("a.jsonl", "{\"translation\": {\"en\": \"hello\", \"x\": {}, \"de\": \"hallo\"}}\n"),
        files.with("b.jsonl", "{\"translation.en\": \"hello\", \"translation.de\": \"hallo\"}\n"),
        files.with("a.csv", "translation.en,translation.de\nhello,hallo\n"),
        files.column("a.parquet", "translation", Arc::new(object)),
    ];
    // The JSONL file has a third language.
    for (path, ways) in paths.into_iter().zip([6, 2, 2, 2]) {
        let (_, pairs) =
            read_as(std::slice::from_ref(&path), &Settings::default(), &chosen, &ReadOptions::default()).unwrap();
        assert_eq!(pairs, [("hello".to_owned(), "hallo".to_owned())], "{path:?}");
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("in {ways} ways")), "{path:?}: {error}");
    }
}

#[test]
fn texts_in_another_encoding_are_read_by_its_name_which_the_error_knows() {
    let files = Files::new();
    let path = files.with("a.csv", b"prompt,response\nJ\xfcrgen,5 \x80\nb,c\n");
    let error = read(&path).unwrap_err();
    assert!(error.to_string().ends_with("a.csv:2: the row is not UTF-8"), "{error}");
    assert_eq!(
        error.hint().as_deref(),
        Some("the file seems to be in windows-1252: read it with `--encoding windows-1252`")
    );
    let options = ReadOptions { encoding: Encoding::of_name("windows-1252"), ..ReadOptions::default() };
    let (_, pairs) = read_as(&[path], &Settings::default(), &Chosen::default(), &options).unwrap();
    assert_eq!(pairs[0], ("Jürgen".to_owned(), "5 €".to_owned()));
    let utf16: Vec<u8> = "\u{feff}prompt,response\na,你\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let options = ReadOptions { encoding: Encoding::of_name("utf-16le"), ..ReadOptions::default() };
    let (_, pairs) =
        read_as(&[files.with("b.csv", utf16)], &Settings::default(), &Chosen::default(), &options).unwrap();
    assert_eq!(pairs, [("a".to_owned(), "你".to_owned())]);
}

#[test]
fn a_row_that_is_too_long_for_the_limits_is_named_and_never_held() {
    let long = "x".repeat(2 << 20);
    let files = Files::new();
    let options = ReadOptions::default().within(row_files::conversion_bytes(0, 1, 1 << 20), 0, 1);
    assert!(options.max_row_bytes.abs_diff(1 << 20) < 10);
    for (name, text) in [
        ("a.jsonl", format!("{{\"prompt\":\"a\",\"response\":\"b\"}}\n{{\"prompt\":\"a\",\"response\":\"{long}\"}}\n")),
        ("a.csv", format!("prompt,response\na,{long}\n")),
        ("a.json", format!("[{{\"prompt\":\"a\",\"response\":\"b\"}},\n{{\"prompt\":\"a\",\"response\":\"{long}\"}}]")),
    ] {
        let path = files.with(name, text);
        let error = read_as(&[path], &Settings::default(), &Chosen::default(), &options).unwrap_err();
        let text = format!("{error}\n{}", error.hint().unwrap());
        assert!(text.contains(":2: the row is longer than") && text.contains("`--memory-budget`"), "{name}: {text}");
    }
}

#[test]
fn numbers_booleans_lists_and_categories_of_parquet_are_texts() {
    let files = Files::new();
    let mut lists = ListBuilder::new(StringBuilder::new());
    lists.append_value([Some("a"), Some("b")]);
    lists.append_value([Some("c")]);
    lists.append_null();
    let mut categories = arrow_array::builder::StringDictionaryBuilder::<arrow_array::types::Int8Type>::new();
    ["yes", "no", "yes"].iter().for_each(|text| categories.append_value(text));
    let columns: [(arrow_array::ArrayRef, [&str; 3]); 8] = [
        (Arc::new(arrow_array::Int64Array::from(vec![2, -4, 6])), ["2", "-4", "6"]),
        (Arc::new(arrow_array::UInt8Array::from(vec![2, 255, 6])), ["2", "255", "6"]),
        (Arc::new(arrow_array::Float64Array::from(vec![2.5, 4.0, f64::NAN])), ["2.5", "4.0", ""]),
        (Arc::new(arrow_array::Float32Array::from(vec![0.1, 4.0, 1e20])), ["0.1", "4.0", "1e20"]),
        (Arc::new(arrow_array::BooleanArray::from(vec![Some(true), None, Some(false)])), ["true", "", "false"]),
        (Arc::new(arrow_array::Date32Array::from(vec![0, 1, 20_000])), ["1970-01-01", "1970-01-02", "2024-10-04"]),
        (Arc::new(lists.finish()), ["a\nb", "c", ""]),
        (Arc::new(categories.finish()), ["yes", "no", "yes"]),
    ];
    for (number, (column, expected)) in columns.into_iter().enumerate() {
        let path = files.column(&format!("{number}.parquet"), "response", column);
        let chosen = Chosen { prompt: Some("id".into()), response: Some("response".into()), ..Chosen::default() };
        let (counts, pairs) = read_as(&[path], &Settings::default(), &chosen, &ReadOptions::default()).unwrap();
        let expected: Vec<_> = expected.iter().enumerate().filter(|(_, text)| !text.is_empty()).collect();
        let expected: Pairs = expected.into_iter().map(|(id, text)| (id.to_string(), (*text).to_owned())).collect();
        assert_eq!(pairs, expected, "column {number}");
        assert_eq!(counts.read, 3);
    }
}

#[test]
fn codecs_that_the_own_reader_lacks_are_read_by_the_parquet_crate() {
    use parquet::basic::{BrotliLevel, Compression};
    let files = Files::new();
    for codec in [Compression::LZ4_RAW, Compression::BROTLI(BrotliLevel::default()), Compression::LZ4] {
        let texts = || Arc::new((0..5000).map(|n| Some(format!("text {n}"))).collect::<arrow_array::StringArray>());
        let path = files.column_in("a.parquet", "response", texts(), codec);
        let chosen = Chosen { prompt: Some("id".into()), response: Some("response".into()), ..Chosen::default() };
        let (_, pairs) =
            read_as(std::slice::from_ref(&path), &Settings::default(), &chosen, &ReadOptions::default()).unwrap();
        assert_eq!((pairs.len(), &pairs[4999]), (5000, &("4999".to_owned(), "text 4999".to_owned())), "{codec}");
        assert!(!row_files::is_in_place(&path, &["id".to_owned(), "response".to_owned()]));
        // A page that does not fit is refused before it is decoded.
        let small = ReadOptions { max_page_bytes: 40_000, ..ReadOptions::default() };
        let error = read_as(&[path], &Settings::default(), &chosen, &small).unwrap_err().to_string();
        assert!(error.contains("a page of column `") && error.ends_with("expected at most 40000"), "{error}");
    }
}

#[test]
fn a_declared_page_that_does_not_fit_is_refused_before_it_is_decoded() {
    use parquet::basic::{Compression, ZstdLevel};
    let files = Files::new();
    let text: String = (0..500_000).map(|number| format!("{number} ")).collect();
    let texts = Arc::new(arrow_array::LargeStringArray::from(vec![text.as_str(), "y"]));
    let lists = Arc::new({
        let mut lists = ListBuilder::new(StringBuilder::new());
        [text.as_str(), "y"].into_iter().for_each(|text| lists.append_value([Some(text)]));
        lists.finish()
    });
    let columns: [(&str, arrow_array::ArrayRef, Compression); 2] = [
        ("texts.parquet", texts, Compression::BROTLI(parquet::basic::BrotliLevel::default())),
        ("lists.parquet", lists, Compression::ZSTD(ZstdLevel::default())),
    ];
    for (name, column, codec) in columns {
        let path = files.column_in(name, "response", column, codec);
        let stored = std::fs::read(&path).unwrap();
        let chosen = Chosen { prompt: Some("id".into()), response: Some("response".into()), ..Chosen::default() };
        let read = |options: &ReadOptions| {
            read_as(std::slice::from_ref(&path), &Settings::default(), &chosen, options).map(|(_, pairs)| pairs)
        };
        let whole = read(&ReadOptions::default()).unwrap();
        assert_eq!((whole.len(), whole[0].1 == text), (2, true), "{name}");
        let small = ReadOptions { max_page_bytes: 1 << 20, ..ReadOptions::default() };
        let refused = read(&small).unwrap_err();
        assert!(matches!(refused, Error::PartTooLarge { bytes, .. } if bytes >= 3 << 20), "{refused}");
        // The refusal does not read what is in the page. A larger limit gets as far as the decoder.
        let mut damaged = stored.clone();
        let (start, bytes) = {
            use parquet::file::reader::{FileReader, SerializedFileReader};
            let file = SerializedFileReader::new(std::fs::File::open(&path).unwrap()).unwrap();
            file.metadata().row_group(0).column(1).byte_range()
        };
        assert!(bytes > 20_000, "{bytes}");
        damaged[start as usize + 2000..][..2000].fill(0xa5);
        std::fs::write(&path, damaged).unwrap();
        let again = read(&small).unwrap_err();
        assert!(matches!(again, Error::PartTooLarge { .. }), "{name}: {again}");
        // A decoder takes these bytes for another text, or for none.
        let decoded = read(&ReadOptions::default());
        assert!(!decoded.is_ok_and(|pairs| pairs == whole), "{name}");
    }
}

#[test]
fn text_behind_a_closing_quote_is_counted() {
    let files = Files::new();
    let path = files.with("a.csv", "prompt,response\n\"say \\\"hi\\\" now\",b\n\"c\" ,d\ne,\"f \"\"g\"\"\"\n");
    let (counts, pairs) = read_with(&[path], &Settings::default()).unwrap();
    assert_eq!(pairs[0].0, "say \\hi\\\" now\"", "as Python reads it");
    assert_eq!((&*pairs[1].0, &*pairs[2].1), ("c ", "f \"g\""));
    assert_eq!(counts.notes.unwrap().1.unescaped, (1, 2));
}

#[test]
fn numbers_in_lists_are_labels_for_sets_of_labels_alone() {
    let files = Files::new();
    let mut lists = ListBuilder::new(arrow_array::builder::Int64Builder::new());
    lists.append_value([Some(3), Some(7)]);
    lists.append_value([]);
    let json = "{\"text\":\"0\",\"labels\":[3, 7]}\n{\"text\":\"1\",\"labels\":[]}\n";
    for path in [files.column("a.parquet", "labels", Arc::new(lists.finish())), files.with("a.jsonl", json)] {
        let is_json = path.extension().is_some_and(|extension| extension == "jsonl");
        let prompt = Some(if is_json { "text" } else { "id" }.to_owned());
        let chosen = Chosen { prompt, response: Some("labels".into()), ..Chosen::default() };
        let read = |chosen: &Chosen| {
            read_as(std::slice::from_ref(&path), &Settings::default(), chosen, &ReadOptions::default())
        };
        let refused = read(&chosen).unwrap_err();
        let text = format!("{refused}\n{}", refused.hint().unwrap());
        assert!(text.contains("got a list of numbers") && text.contains("multi-label-classification"), "{text}");
        let command = "jq -c '.[\"labels\"] |= map(tostring)'";
        assert_eq!(text.contains(command), is_json, "{text}");
        let (_, pairs) = read(&Chosen { is_of_sets: true, ..chosen.clone() }).unwrap();
        assert_eq!(pairs[0], ("0".to_owned(), "3\n7".to_owned()));
    }
}

#[test]
fn a_malformed_row_is_named_by_file_and_line() {
    let good = "{\"prompt\":\"a\",\"response\":\"b\"}\n";
    refused(
        "a.jsonl",
        format!("{good}\n{{\"prompt\": \"a\", \"response\": }}\n"),
        "a.jsonl:3: not valid JSON: expected value",
    );
    refused("a.jsonl", format!("{good}[1]\n"), "a.jsonl:2: expected a JSON object, got a list");
    refused(
        "a.jsonl",
        format!("{good}{{\"prompt\": [1], \"response\": \"b\"}}\n"),
        ":2: column `prompt`: expected text, got a list",
    );
    // Also where no row can be read at all.
    refused(
        "a.jsonl",
        "{'prompt': 'a'}\n",
        "a.jsonl:1: not valid JSON: expected a string in double quotes, got a single",
    );
    refused("a.jsonl", "{'prompt': 'a'}\n", "json.dumps");
    refused("a.jsonl", format!("{good}{}", "[".repeat(100_000)), ":2: not valid JSON");
    refused(
        "a.jsonl",
        [good.as_bytes(), b"{\"prompt\":\"\xff\",\"response\":\"b\"}"].concat(),
        ":2: the row is not UTF-8",
    );
    refused("a.jsonl", format!("{good}\0\0\0\n"), ":2: not valid JSON");
    refused("a.csv", "prompt,response\na,b\na,b,c\n", "a.csv:3: expected 2 fields as in the header, got 3");
    refused(
        "a.csv",
        "prompt,response\n\"a\nx\",b\n\"c,d\ne,f\n",
        "a.csv:4: a quote that opens in this row is never closed",
    );
    refused("a.json", format!("[{},\n{{\"prompt\": 1,}}]", good.trim()), "a.json:2: not valid JSON");
    refused(
        "a.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}",
        "a.jsonl:1: column `messages`: expected a message of the assistant",
    );
}

#[test]
fn text_around_the_rows_that_is_broken_ends_the_reading() {
    refused("a.json", "[{\"prompt\":\"a\",\"response\":\"b\"}\n", "a.json:2: the file ends before its JSON array does");
    refused("a.json", "[{\"prompt\":\"a\",\"response\":\"b\"} {}]", "expected `,` or `]`");
    refused("a.json", "[{\"prompt\":\"a\",\"response\":\"b\"},]", "expected a JSON object");
    refused("a.json", "[{\"prompt\":\"a\",\"response\":\"b\"}] x", "expected nothing after the JSON array");
    let packed = gzip(LINES.as_bytes());
    refused("a.jsonl.gz", &packed[..packed.len() - 9], "the compressed data ends early");
    refused(
        "a.jsonl.zst",
        &zstd::encode_all(LINES.repeat(100).as_bytes(), 3).unwrap()[..60],
        "the compressed data ends early",
    );
}

#[test]
fn an_object_with_two_lists_of_rows_is_not_read_in_part() {
    let list = format!("[{}]", LINES.trim().replace("\n\n", ","));
    check("a.json", format!("{{\"validation\": {list}}}"), &TWO);
    check("a.json", format!("{{\"data\": {list}, \"tags\": [\"a\", {{}}], \"info\": {{\"test\": [1]}}}}"), &TWO);
    for (first, second) in [("train", "test"), ("test", "train"), ("data", "validation")] {
        let text = format!("{{\"{first}\": {list},\n\"note\": \"[\", \"{second}\": {list}}}");
        refused("a.json", &text, &format!("a.json:2: a second list of rows, `{second}`"));
        refused("a.json", text, &format!("`jq -c '.{second}[]' "));
    }
    let squad = r#"{"version": "1.1", "data": [{"title": "x", "paragraphs": [{"context": "c", "qas": []}]}]}"#;
    refused("a.json", squad, "SQuAD's own layout");
}

#[test]
fn a_letter_that_a_delimiter_cuts_in_two_is_no_text() {
    let header = [&b"prompt,\xe5\x80"[..], b",\x92,response\na,b,c,d\n"].concat();
    refused("a.csv", &header, "the header: the row is not UTF-8");
    let row = [&b"prompt,response\nx\xe5\x80"[..], b",\x92y\n"].concat();
    refused("a.csv", &row, "a.csv:2: the row is not UTF-8");
}

#[test]
fn a_window_of_zstd_that_is_large_is_refused_with_the_way_out() {
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 3).unwrap();
    encoder.window_log(27).unwrap();
    encoder.write_all(LINES.as_bytes()).unwrap();
    let error = read(&Files::new().with("a.jsonl.zst", encoder.finish().unwrap())).unwrap_err();
    assert!(error.to_string().ends_with("its zstd frame needs a window of more than 32 MiB of memory"), "{error}");
    assert!(error.hint().unwrap().contains("zstd -d --long=31"));
}

#[test]
fn other_formats_are_named_with_the_way_out() {
    refused("a.xlsx", b"PK\x03\x04rest", "a zip archive or a spreadsheet");
    refused("a.csv", b"\xff\xfep\0r\0", "UTF-16");
    refused("a.csv", b"p\0r\0o\0,\0", "UTF-16LE without a byte order mark");
    refused("a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a spreadsheet of an old Excel");
    refused("a.npy", b"\x93NUMPY\x01\0", "an array of NumPy");
    let tar = [&[b'a'; 1][..], &[0; 256], b"ustar\x0000", &[0; 300]].concat();
    refused("a.tar", &tar, "this is a tar archive");
    refused("a.tar.gz", gzip(&tar), "this is a tar archive");
    refused("a.jsonl", b"\0{\0\"\0p", "UTF-16BE without a byte order mark");
    refused("a.parquet", "{\"prompt\":1}", "not a parquet file");
    refused("a", "", "the file is empty");
    let nested = Files::new().nested_texts("chat.parquet");
    let error = read(&nested.1).unwrap_err();
    assert!(error.to_string().contains("row 0: column `messages`: expected a list of messages"), "{error}");
    for name in ["a.jsonl", "a.csv", "a.parquet", "a"] {
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
        refused(name, pointer, "this is a pointer of Git LFS");
        refused(name, "\n<!DOCTYPE html>\n<html>\n", "this is a page of HTML");
    }
    for name in ["a.jsonl", "a.csv", "a.json", "a.tsv", "a.parquet"] {
        refused(name, "\n", "the file is empty");
    }
    refused("a.jsonl", "{\"p\": 1, \"answer\": 2}", "p, answer");
}

#[test]
fn chats_in_lists_of_parquet_are_those_of_json() {
    let files = Files::new();
    let [user, assistant, system] = ["user", "assistant", "system"].map(Some);
    let chats: [Option<&[[Option<&str>; 2]]>; 5] = [
        Some(&[[user, Some("Hi")], [assistant, Some("Hello")]]),
        Some(&[[system, Some("Be brief.")], [user, Some("1+1")], [assistant, Some("2")], [user, Some("thanks")]]),
        None,
        Some(&[]),
        Some(&[[user, Some("q")], [assistant, None], [assistant, Some("a")]]),
    ];
    let expected = [("Hi", "Hello"), ("Be brief.\n1+1", "2"), ("q", "a")];
    for (name, names) in [("a.parquet", ["role", "content"]), ("b.parquet", ["from", "value"])] {
        let path = files.chats(name, names, &chats);
        let skip = Settings { bad_rows: BadRows::Skip, ..Settings::default() };
        let (counts, pairs) = read_with(std::slice::from_ref(&path), &skip).unwrap();
        assert_eq!((counts.read, counts.malformed, counts.empty, counts.train), (5, 1, 1, 3));
        let pairs: Vec<_> = pairs.iter().map(|(prompt, response)| (prompt.as_str(), response.as_str())).collect();
        assert_eq!(pairs, expected);
        let error = read(&path).unwrap_err().to_string();
        assert!(
            error.ends_with(".parquet: row 3: column `messages`: expected a message of the assistant, got none"),
            "{error}"
        );
    }
    // A whole chat is no response.
    let chosen = Chosen { prompt: Some("id".into()), response: Some("messages".into()), ..Chosen::default() };
    let conversion = Conversion::new(&[files.0.path().join("a.parquet")], &chosen, &ReadOptions::default()).unwrap();
    let error = conversion.run(&Settings::default(), &mut |_, _, _| Ok(())).unwrap_err().to_string();
    assert!(
        error.contains("row 0: column `messages`: expected one message of the assistant in a response, got 2 messages"),
        "{error}"
    );
}

#[test]
fn bad_rows_are_counted_by_the_rule_and_the_first_is_named() {
    let text =
        "{\"prompt\":\"a\",\"response\":\"b\"}\n{\"prompt\":\"a\"}\nnot json\n{\"prompt\":\" \",\"response\":\"b\"}\n";
    let scene = Files::new();
    let files = [scene.with("a.jsonl", text)];
    let with = |bad_rows| read_with(&files, &Settings { bad_rows, ..Settings::default() });
    let (counts, pairs) = with(BadRows::Skip).unwrap();
    assert_eq!((counts.read, counts.malformed, counts.empty, counts.train, pairs.len()), (4, 1, 2, 1, 1));
    let first = counts.first_bad.unwrap().to_string();
    assert!(first.ends_with("a.jsonl:2: column `response` is null"), "{first}");
    assert!(with(BadRows::Usual).unwrap_err().to_string().contains(":3: not valid JSON"));
    assert!(with(BadRows::Error).unwrap_err().to_string().contains(":2: column `response` is null"));
}

#[test]
fn cleaning_duplicates_and_a_split_are_counted_step_by_step() {
    let files = Files::new();
    let rows: String = (0..100).map(|n| format!("{{\"prompt\":\"p{}\",\"response\":\"r!!\"}}\n", n % 80)).collect();
    let path = files.with("a.jsonl", rows);
    let table = || Duplicates::exact(1 << 20);
    let settings = Settings {
        clean: true,
        duplicates: Some(&table),
        validation: Some((Share::Of(0.25), 7)),
        ..Settings::default()
    };
    let mut parts: [Vec<String>; 2] = Default::default();
    let conversion = Conversion::new(&[path], &Chosen::default(), &ReadOptions::default()).unwrap();
    let counts = conversion
        .run(&settings, &mut |part, [prompt, response], _| {
            assert_eq!(response, "r!");
            parts[usize::from(part == Part::Validation)].push(prompt);
            Ok(())
        })
        .unwrap();
    assert_eq!(
        (counts.read, counts.cleaned, counts.duplicates, counts.train, counts.validation),
        (100, 100, 20, 60, 20)
    );
    assert_eq!([parts[0].len(), parts[1].len()], [60, 20]);
    assert!(parts[1].iter().all(|prompt| !parts[0].contains(prompt)), "no row is in both parts");
}

fn arrow(path: &Path) -> Pairs {
    let reader = ParquetRecordBatchReaderBuilder::try_new(std::fs::File::open(path).unwrap()).unwrap().build().unwrap();
    let mut pairs = Vec::new();
    for batch in reader {
        let batch = batch.unwrap();
        let (a, b) = (batch.column(0).as_string::<i32>(), batch.column(1).as_string::<i32>());
        pairs.extend((0..batch.num_rows()).map(|row| (a.value(row).to_owned(), b.value(row).to_owned())));
    }
    pairs
}

#[test]
fn written_rows_are_read_back_by_the_parquet_crate_and_by_our_own_reader() {
    let files = Files::new();
    let rows: Pairs = (0..3000)
        .map(|n: usize| (format!("prompt {n} \u{1f600}"), "x\n\"\u{0}".repeat(n * 7919 % 50)))
        .chain([(String::new(), "y".repeat(300_000)), ("last".to_owned(), String::new())])
        .collect();
    let path = files.0.path().join("rows.parquet");
    let sizes = Sizes { page_bytes: 4096, row_group_bytes: 20_000 };
    let mut writer = ParquetWriter::new(Vec::new(), &["prompt", "response"], sizes).unwrap();
    rows.iter().for_each(|(prompt, response)| writer.write([prompt.clone(), response.clone()]).unwrap());
    let (bytes, length) = writer.finish().unwrap();
    assert_eq!(bytes.len() as u64, length);
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(arrow(&path), rows);
    let inspection = parquet_dataset::inspect(&path).unwrap();
    assert!(inspection.row_groups.len() > 3 && inspection.has_page_index, "{inspection:?}");
    let dataset =
        parquet_dataset::Dataset::open(&[path], &parquet_dataset::DatasetOptions::new(["response", "prompt"])).unwrap();
    dataset.find_pages().unwrap();
    let order: Vec<u64> = (0..rows.len() as u64).map(|row| row * 1009 % rows.len() as u64).collect();
    let read = dataset.read_rows(&order).unwrap();
    for (index, row) in order.iter().enumerate() {
        let (prompt, response) = &rows[*row as usize];
        assert_eq!(read.value(1, index).text(), Some(&**prompt));
        assert_eq!(read.value(0, index).text(), Some(&**response));
    }
}

#[test]
fn parquet_is_read_like_any_other_form() {
    let files = Files::new();
    let path = files.0.path().join("rows.parquet");
    let mut writer = ParquetWriter::new(Vec::new(), &["question", "id", "answer"], Sizes::for_bytes(0)).unwrap();
    (0..2500).for_each(|n| writer.write([format!("q{n}"), String::new(), format!("a{n}")]).unwrap());
    std::fs::write(&path, writer.finish().unwrap().0).unwrap();
    let packed = files.with("rows.parquet.gz", gzip(&std::fs::read(&path).unwrap()));
    assert!(row_files::is_compressed_parquet(&packed).unwrap() && !row_files::is_compressed_parquet(&path).unwrap());
    assert!(read(&packed).unwrap_err().to_string().contains("no column"));
    let mut unpacked = Vec::new();
    row_files::unpack(&packed, &mut unpacked).unwrap();
    assert_eq!(unpacked, std::fs::read(&path).unwrap());
    let pairs = read(&path).unwrap();
    assert_eq!(pairs.len(), 2500);
    assert_eq!(pairs[2499], ("q2499".to_owned(), "a2499".to_owned()));
}
