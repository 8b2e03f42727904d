//! Writes the corpora of `fuzz/corpus` that can be generated: `cargo run --release -p foreign-bytes --example
//! make_corpus`.
//!
//! The output is the same each time. Inputs that fuzzing found, and files of a real run, are in the same directories
//! and stay.

use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arrow_array::builder::{ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{ArrayRef, BinaryArray, Int64Array, LargeStringArray, RecordBatch, StringArray, StructArray};
use arrow_schema::{DataType, Field, Fields};
use candle_core::{DType, Device, Tensor};
use dataloader::{TokenizerTraining, train_tokenizer_on};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding, GzipLevel, ZstdLevel};
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder, WriterVersion};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet_dataset::{Dataset, DatasetOptions};
use serde_json::{Value, json};

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    parquet_files(&corpus)?;
    pages(&corpus)?;
    encodings(&corpus)?;
    tensors(&corpus)?;
    tokenizers(&corpus)?;
    row_files(&corpus)?;
    texts(&corpus)
}

fn write(corpus: &Path, parser: &str, name: &str, bytes: impl AsRef<[u8]>) -> Outcome {
    let directory = corpus.join(parser);
    fs::create_dir_all(&directory)?;
    Ok(fs::write(directory.join(name), bytes)?)
}

/// `rows` rows of text with nulls, repeated and empty values, and broken UTF-8 in `raw`.
fn rows(rows: usize) -> Result<RecordBatch, Box<dyn Error>> {
    let text = |row: usize| format!("{} plus {row} 倒过来 {}", row / 3, "ab".repeat(row % 9));
    let prompt: StringArray = (0..rows).map(|row| Some(text(row))).collect();
    let response: StringArray =
        (0..rows).map(|row| (row % 4 != 1).then(|| ["yes", "no", "", "yes and no"][row / 2 % 4])).collect();
    let large: LargeStringArray = (0..rows).map(|row| Some(text(row / 2))).collect();
    let raw: BinaryArray = (0..rows).map(|row| Some(&[0xff, 0xfe, b'a'][..row % 4])).collect();
    let number: Int64Array = (0..rows as i64).collect();
    let columns: [(&str, ArrayRef, bool); 5] = [
        ("prompt", Arc::new(prompt), false),
        ("response", Arc::new(response), true),
        ("large", Arc::new(large), true),
        ("raw", Arc::new(raw), true),
        ("number", Arc::new(number), false),
    ];
    Ok(RecordBatch::try_from_iter_with_nullable(columns)?)
}

/// Lists and structs of strings, which are not text columns, around a text column.
fn nested() -> Result<RecordBatch, Box<dyn Error>> {
    let mut list = ListBuilder::new(StringBuilder::new());
    (0..12).for_each(|row| list.append_value((0..row % 3).map(|item| Some(item.to_string()))));
    let inner: ArrayRef = Arc::new((0..12).map(|row| Some(row.to_string())).collect::<StringArray>());
    let object = StructArray::from(vec![(Arc::new(Field::new("inner", DataType::Utf8, true)), inner.clone())]);
    let columns: [(&str, ArrayRef, bool); 3] =
        [("list", Arc::new(list.finish()), true), ("object", Arc::new(object), true), ("prompt", inner, true)];
    Ok(RecordBatch::try_from_iter_with_nullable(columns)?)
}

/// Messages as a list of structs, including a missing list, an empty list and nulls.
fn chats() -> Result<RecordBatch, Box<dyn Error>> {
    let fields = Fields::from(["role", "content"].map(|name| Field::new(name, DataType::Utf8, true)).to_vec());
    let mut list = ListBuilder::new(StructBuilder::from_fields(fields, 0));
    for row in 0..12 {
        for message in 0..row % 4 {
            let texts = [Some(["user", "assistant"][message % 2]), (row % 5 > 0).then_some("倒过来 and back")];
            for (field, text) in texts.into_iter().enumerate() {
                list.values().field_builder::<StringBuilder>(field).ok_or("a text")?.append_option(text);
            }
            list.values().append(true);
        }
        list.append(row % 7 > 0);
    }
    Ok(RecordBatch::try_from_iter_with_nullable([("messages", Arc::new(list.finish()) as ArrayRef, true)])?)
}

/// Many small columns.
fn wide() -> Result<RecordBatch, Box<dyn Error>> {
    let value: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
    let columns = (0..60).map(|column| (format!("c{column}"), value.clone(), true));
    Ok(RecordBatch::try_from_iter_with_nullable(columns)?)
}

fn parquet_files(corpus: &Path) -> Outcome {
    let base = || WriterProperties::builder().set_data_page_row_count_limit(16).set_write_batch_size(8);
    let plain = || base().set_dictionary_enabled(false).set_statistics_enabled(EnabledStatistics::None);
    let v2 = |properties: WriterPropertiesBuilder| properties.set_writer_version(WriterVersion::PARQUET_2_0);
    let encoded = |encoding| v2(plain()).set_encoding(Encoding::PLAIN).set_column_encoding("prompt".into(), encoding);
    let files = [
        ("plain-v1", rows(40)?, plain()),
        ("dictionary-v1", rows(40)?, base()),
        ("snappy-v1", rows(40)?, plain().set_compression(Compression::SNAPPY)),
        ("gzip-v1", rows(40)?, plain().set_compression(Compression::GZIP(GzipLevel::try_new(6)?))),
        ("zstd-v1", rows(40)?, base().set_compression(Compression::ZSTD(ZstdLevel::try_new(3)?))),
        ("plain-v2", rows(40)?, v2(plain())),
        ("snappy-v2", rows(40)?, v2(base()).set_compression(Compression::SNAPPY)),
        ("zstd-v2", rows(40)?, v2(plain()).set_compression(Compression::ZSTD(ZstdLevel::try_new(3)?))),
        ("delta-length-v2", rows(40)?, encoded(Encoding::DELTA_LENGTH_BYTE_ARRAY)),
        ("delta-bytes-v2", rows(40)?, encoded(Encoding::DELTA_BYTE_ARRAY)),
        ("row-groups", rows(40)?, base().set_max_row_group_row_count(Some(7))),
        ("no-index", rows(40)?, plain().set_offset_index_disabled(true)),
        ("no-rows", rows(0)?, plain()),
        ("nested", nested()?, base()),
        ("chats-v1", chats()?, base()),
        ("chats-v2", chats()?, v2(plain())),
        ("wide", wide()?, plain()),
    ];
    for (name, batch, properties) in files {
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties.build()))?;
        writer.write(&batch)?;
        write(corpus, "parquet_pages", &format!("{name}.parquet"), writer.into_inner()?)?;
    }
    Ok(())
}

/// Page headers and offset indexes cut out of the files, and the page map of one file.
fn pages(corpus: &Path) -> Outcome {
    for name in ["plain-v1", "dictionary-v1", "snappy-v2", "delta-bytes-v2"] {
        let path = corpus.join(format!("parquet_pages/{name}.parquet"));
        let bytes = fs::read(&path)?;
        let reader = SerializedFileReader::new(File::open(&path)?)?;
        let column = reader.metadata().row_group(0).column(1);
        let start = column.dictionary_page_offset().unwrap_or(column.data_page_offset()) as usize;
        write(corpus, "page_header", name, &bytes[start..start + 48])?;
        let at = column.offset_index_offset().ok_or("no offset index")? as usize;
        let length = column.offset_index_length().ok_or("no offset index")? as usize;
        write(corpus, "offset_index", name, &bytes[at..at + length])?;
    }
    // The time and the name must match those in the parser.
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("mapped.parquet");
    fs::copy(corpus.join("parquet_pages/no-index.parquet"), &path)?;
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    File::options().write(true).open(&path)?.set_modified(time)?;
    let options = DatasetOptions::new(["prompt", "response"]);
    write(corpus, "page_map", "whole", Dataset::open(&[path], &options)?.page_map()?)
}

fn encodings(corpus: &Path) -> Outcome {
    write(corpus, "delta_lengths", "ascending", [0x80, 0x01, 0x04, 0x05, 0x02, 0x02, 0, 0, 0, 0])?;
    let packed = [&[0x80, 0x01, 0x04, 0x28, 0x06, 0x00, 3, 5, 0, 0][..], &[0x5a; 32]].concat();
    write(corpus, "delta_lengths", "packed", packed)?;
    write(corpus, "runs", "levels", [&[1, 0xc0, 0x84, 0x3d, 1][..]].concat())?;
    let packed = [&[3, 0x0b][..], &[0x88, 0xc6, 0xfa].repeat(5), &[0x80, 0x02, 0x05]].concat();
    write(corpus, "runs", "packed", packed)?;
    write(corpus, "runs", "wide", [&[32, 0x03][..], &[0xff; 32], &[0xff, 0xff, 0x7f, 1, 2, 3, 4]].concat())?;
    let text: String = (0..200).map(|row| format!("{} and {row}, ", row % 7)).collect();
    for (name, plain) in [("text", text.as_bytes()), ("zeros", &[0; 9000]), ("empty", b""), ("short", b"abcd")] {
        write(corpus, "snappy", name, snap::raw::Encoder::new().compress_vec(plain)?)?;
    }
    Ok(())
}

/// A safetensors file with any header.
fn raw_tensors(header: &Value, data: usize) -> Vec<u8> {
    let header = header.to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, &vec![7; data]].concat()
}

fn tensors(corpus: &Path) -> Outcome {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("state.safetensors");
    let values = Tensor::arange(0f32, 24., &Device::Cpu)?.reshape((2, 3, 4))?;
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16), ("f64", DType::F64)] {
        let (scalar, typed) = (values.sum_all()?, values.to_dtype(dtype)?);
        let tensors = [("shared.weight", &typed), ("scalar", &scalar)];
        t5::safetensors::write(&path, &tensors, &[("format", "pt"), ("step", "7")])?;
        write(corpus, "safetensors", name, fs::read(&path)?)?;
    }
    t5::safetensors::write(&path, &[("u", &values.to_dtype(DType::U32)?)], &[])?;
    write(corpus, "safetensors", "u32", fs::read(&path)?)?;
    let header = json!({
        "a": { "dtype": "I64", "shape": [2], "data_offsets": [0, 16] },
        "b": { "dtype": "BOOL", "shape": [0, 3], "data_offsets": [16, 16] },
        "c": { "dtype": "F8_E4M3", "shape": [], "data_offsets": [16, 17] },
    });
    write(corpus, "safetensors", "other-dtypes", raw_tensors(&header, 17))?;
    let header = json!({ "half": { "dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12] } });
    write(corpus, "safetensors", "f16", raw_tensors(&header, 12))?;
    write(corpus, "safetensors", "empty", raw_tensors(&json!({}), 0))?;
    let many: serde_json::Map<String, Value> = (0..40)
        .map(|at| (format!("t{at}"), json!({"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]})))
        .collect();
    write(corpus, "safetensors", "many", raw_tensors(&Value::Object(many), 160))
}

/// A `tokenizer.json` around a model.
fn tokenizer(model: Value, parts: Value) -> Vec<u8> {
    let special = |id: u32, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true })
    };
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<pad>"), special(1, "</s>"), special(2, "<unk>")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model,
    });
    if let (Value::Object(tokenizer), Value::Object(parts)) = (&mut tokenizer, parts) {
        tokenizer.extend(parts);
    }
    format!("{tokenizer:#}\n").into_bytes()
}

fn vocabulary(words: &[&str]) -> Value {
    let specials = ["<pad>", "</s>", "<unk>"];
    specials.iter().chain(words).enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect()
}

fn tokenizers(corpus: &Path) -> Outcome {
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    let metaspace = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true });
    let template = json!({ "type": "TemplateProcessing",
        "single": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "SpecialToken": { "id": "</s>", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "</s>": { "id": "</s>", "ids": [1], "tokens": ["</s>"] } } });
    let unigram = |byte_fallback: bool| {
        json!({ "type": "Unigram", "unk_id": 2, "byte_fallback": byte_fallback, "vocab": [["<pad>", 0.0], ["</s>", 0.0],
            ["<unk>", 0.0], ["▁", -2.0], ["▁the", -3.5], ["cat", -4.5], ["a", -5.0], ["t", -5.5], ["存", -9.0]] })
    };
    let bpe = json!({ "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": vocabulary(&["c", "a", "t", "Ġ", "ca", "cat", "Ġcat"]), "merges": [["c", "a"], ["ca", "t"], ["Ġ", "cat"]] });
    let suffixed = json!({ "type": "BPE", "dropout": 0.1, "unk_token": "<unk>", "continuing_subword_prefix": "##",
        "end_of_word_suffix": "</w>", "fuse_unk": true, "byte_fallback": true, "ignore_merges": true,
        "vocab": vocabulary(&["c", "##a", "##t</w>", "c##a", "ca", "cat</w>", "<0x41>"]), "merges": ["c ##a", "ca ##t</w>"] });
    let word_piece = json!({ "type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": vocabulary(&["the", "cat", "##s", "s", "##a", "12", "##3"]) });
    let word_level =
        json!({ "type": "WordLevel", "unk_token": "<unk>", "vocab": vocabulary(&["the", "cat", "sat", "12"]) });
    // A trie of 256 empty nodes in base64, without replacements.
    let precompiled = format!("AAQA{}", "AAAA".repeat(342));
    let files = [
        (
            "bpe-byte-level",
            bpe.clone(),
            json!({ "pre_tokenizer": byte_level, "decoder": byte_level,
            "post_processor": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true } }),
        ),
        (
            "bpe-suffix",
            suffixed,
            json!({ "pre_tokenizer": { "type": "BertPreTokenizer" },
            "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                "strip_accents": null, "lowercase": true },
            "decoder": { "type": "BPEDecoder", "suffix": "</w>" },
            "post_processor": { "type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<pad>", 0],
                "trim_offsets": true, "add_prefix_space": true } }),
        ),
        (
            "unigram-metaspace",
            unigram(false),
            json!({ "pre_tokenizer": metaspace, "decoder": metaspace,
            "normalizer": { "type": "Sequence", "normalizers": [{ "type": "Nmt" }, { "type": "NFKC" },
                { "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": " " },
                { "type": "Prepend", "prepend": "▁" }, { "type": "Strip", "strip_left": true, "strip_right": true }] },
            "post_processor": template,
            "truncation": { "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 2 },
            "padding": { "strategy": { "Fixed": 16 }, "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "<pad>" } }),
        ),
        (
            "unigram-bytes",
            unigram(true),
            json!({
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [{ "type": "WhitespaceSplit" },
                { "type": "Digits", "individual_digits": true }, { "type": "UnicodeScripts" },
                { "type": "CharDelimiterSplit", "delimiter": "," }, { "type": "Punctuation", "behavior": "Isolated" }] },
            "decoder": { "type": "Sequence", "decoders": [{ "type": "ByteFallback" }, { "type": "Fuse" },
                { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
                { "type": "Strip", "content": " ", "start": 1, "stop": 0 }] } }),
        ),
        (
            "word-piece",
            word_piece,
            json!({ "pre_tokenizer": { "type": "Whitespace" },
            "normalizer": { "type": "Sequence", "normalizers": [{ "type": "NFD" }, { "type": "StripAccents" },
                { "type": "Lowercase" }] },
            "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
            "post_processor": { "type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<pad>", 0] } }),
        ),
        (
            "word-level",
            word_level,
            json!({ "decoder": { "type": "CTC", "pad_token": "<pad>",
                "word_delimiter_token": "|", "cleanup": true },
            "pre_tokenizer": { "type": "Split", "pattern": { "Regex": "\\p{N}|\\p{L}+|[^\\s]" },
                "behavior": "MergedWithPrevious", "invert": false },
            "normalizer": { "type": "Sequence", "normalizers": [{ "type": "NFC" }, { "type": "NFKD" },
                { "type": "ByteLevel" }] } }),
        ),
        (
            "bpe-precompiled",
            bpe,
            json!({ "normalizer": { "type": "Precompiled",
            "precompiled_charsmap": precompiled } }),
        ),
    ];
    for (name, model, parts) in files {
        write(corpus, "tokenizer", &format!("{name}.json"), tokenizer(model, parts))?;
    }
    let training = TokenizerTraining { vocab_size: 300, sentinels: 10, ..TokenizerTraining::default() };
    let texts = ["the cat sat on the mat", "显存不足时，训练器会减小微批大小"].map(|text| Ok(text.repeat(4)));
    write(corpus, "tokenizer", "trained.json", train_tokenizer_on(texts, &training)?.json)
}

fn row_files(corpus: &Path) -> Outcome {
    let line = "{\"prompt\": \"a \\u4f60\\n\", \"id\": [1, {\"x\": null}], \"response\": 1.5}\n";
    write(corpus, "row_files", "lines.jsonl", line.repeat(3))?;
    write(corpus, "row_files", "array.json", format!("[{line},\n {line}]"))?;
    let chat = "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": [{\"text\": \"a\"}]}]}\n";
    write(corpus, "row_files", "chat.jsonl", chat)?;
    write(corpus, "row_files", "rows.csv", "\u{feff}prompt,response\r\n\"a, \"\"b\"\"\nc\",d\r\ne,\n")?;
    write(corpus, "row_files", "rows.tsv", "question\tid\tanswer\n1\t2\t\"3\"\n")
}

fn texts(corpus: &Path) -> Outcome {
    let lines =
        "the cat sat on the mat, didn't it?\n训练 T5 on mixed 中文\r\n\n  spaces\tand\ttabs \n2024-03-15 12:00\n";
    write(corpus, "texts", "lines.txt", lines)?;
    write(corpus, "texts", "no-line-end.txt", "one word")?;
    write(corpus, "texts", "long-word.txt", "ACGTTGCA".repeat(2000))?;
    let parquet: PathBuf = corpus.join("parquet_pages/snappy-v1.parquet");
    write(corpus, "texts", "rows.parquet", fs::read(parquet)?)?;
    write(corpus, "metrics", "whole.jsonl", "{\"event\":\"step\",\"step\":1}\n{\"event\":\"step\",\"step\":2}\n")?;
    let torn = format!("{{\"event\":\"step\",\"step\":1}}\n{{\"event\":\"step\",\"note\":\"{}", "x".repeat(9000));
    write(corpus, "metrics", "torn.jsonl", torn)?;
    write(corpus, "metrics", "empty.jsonl", "")?;
    write(corpus, "finished", "finished.json", "{\n  \"step\": 12,\n  \"history\": []\n}\n")?;
    let machine = json!([
        { "total": 17_179_869_184_u64, "available": 1_503_238_553_u64 },
        { "total": "16GiB", "available": "2GiB", "rss": 10_000_000, "group": { "path": "/", "limit": "1GiB",
            "used": "300MiB", "reclaimable": 0 }, "pressure": { "some_percent": 1.5, "full_percent": 0.0 },
            "traffic": { "swapped_out": 1, "swapped_in": 2, "group_reclaims": 3 } },
    ]);
    write(corpus, "machine", "two.json", machine.to_string())?;
    for (name, assignment) in [
        ("number", "train.max_steps=10"),
        ("list", "data.train=[\"a.parquet\", 'b*.parquet']"),
        ("table", "model.overrides={num_layers=2, feed_forward_proj=\"gated-gelu\"}"),
        ("size", "memory.budget=1.5GiB"),
        ("bare", "model.config=t5-small"),
    ] {
        write(corpus, "assignment", name, assignment)?;
    }
    Ok(())
}
