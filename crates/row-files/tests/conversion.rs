//! Converts files of every form to parquet. The parquet crate and this project's own reader then read the same rows.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, StringBuilder, StructBuilder};
use arrow_array::cast::AsArray;
use arrow_schema::{DataType, Field, Fields};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use row_files::{BadRows, Chosen, Conversion, Counts, Duplicates, Error, ParquetWriter, Part, Settings, Share, Sizes};
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
        let ids: arrow_array::ArrayRef =
            Arc::new((0..messages.len()).map(|id| Some(id.to_string())).collect::<arrow_array::StringArray>());
        let batch = arrow_array::RecordBatch::try_from_iter([("id", ids), ("messages", messages)]).unwrap();
        let path = self.0.path().join(name);
        let file = std::fs::File::create(&path).unwrap();
        let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None).unwrap();
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
    let mut pairs = Vec::new();
    let conversion = Conversion::of(paths, &Chosen::default())?;
    let counts = conversion.run(settings, &mut |_, prompt, response| {
        pairs.push((prompt.to_owned(), response.to_owned()));
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
    check("a.tsv", CSV.replace("a,7,1", "a\t7\t1").replace("prompt,id,", "prompt\tid\t").replace(",,2", "\t\t2"), &TWO);
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
fn a_key_that_is_there_twice_counts_last_and_numbers_are_their_json() {
    check("a.jsonl", "{\"prompt\":\"x\",\"prompt\":1.0,\"response\":true}\n", &[("1.0", "true")]);
    check("a.jsonl", "{\"prompt\":12345678901234567890,\"response\":-3}\n", &[("12345678901234567890", "-3")]);
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
        format!("{good}{{\"prompt\": [\"a\"], \"response\": \"b\"}}\n"),
        ":2: column `prompt`: expected text, got a list",
    );
    refused(
        "a.jsonl",
        format!("{good}{{\"prompt\": 1e999, \"response\": \"b\"}}\n"),
        ":2: not valid JSON: number out of range",
    );
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
    refused("a.jsonl", b"\0{\0\"\0p", "UTF-16BE without a byte order mark");
    refused("a.parquet", "{\"prompt\":1}", "not a parquet file");
    refused("a", "", "the file is empty");
    let nested = Files::new().nested_texts("chat.parquet");
    let error = read(&nested.1).unwrap_err();
    assert!(error.to_string().contains("`messages`: expected a list of structs"), "{error}");
    assert!(error.hint().unwrap().contains("pyarrow"));
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
    // A list is refused as text, with its row.
    let chosen = Chosen { prompt: Some("id".into()), response: Some("messages".into()), ..Chosen::default() };
    let conversion = Conversion::of(&[files.0.path().join("a.parquet")], &chosen).unwrap();
    let error = conversion.run(&Settings::default(), &mut |_, _, _| Ok(())).unwrap_err().to_string();
    assert!(error.contains("row 0: column `messages`: expected text, got a list"), "{error}");
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
    let conversion = Conversion::of(&[path], &Chosen::default()).unwrap();
    let counts = conversion
        .run(&settings, &mut |part, prompt, response| {
            assert_eq!(response, "r!");
            parts[usize::from(part == Part::Validation)].push(prompt.to_owned());
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
    rows.iter().for_each(|(prompt, response)| writer.write(&[prompt, response]).unwrap());
    let (bytes, length) = writer.finish().unwrap();
    assert_eq!(bytes.len() as u64, length);
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(arrow(&path), rows);
    let inspection = parquet_dataset::inspect(&path).unwrap();
    assert!(
        inspection.row_groups.len() == 3 && inspection.has_page_index && inspection.has_checksums,
        "{inspection:?}"
    );
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
    (0..2500).for_each(|n| writer.write(&[&format!("q{n}"), "", &format!("a{n}")]).unwrap());
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
