//! The table of parsers. Each entry calls the product, and uses the result as a caller would.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use candle_core::{DType, Device};
use dataloader::{Tokenizer, TokenizerTraining, train_tokenizer};
use memory_policy::{MemorySnapshot, Probe, ScriptedProbe};
use parquet_dataset::{Dataset, DatasetOptions, RowCursor, inspect, string_columns};
use row_files::{BadRows, Chosen, Column, Conversion, Kind, ReadOptions, Row, Rows, Settings};
use serde_json::json;
use sha2::{Digest, Sha256};
use trainer::Checkpoints;
use trainer::checkpoint::{Manifest, STATE_FILE};

use crate::scratch::Scratch;

/// The form of a parser's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Any bytes.
    Bytes,
    /// Lines of text.
    Text,
    /// One JSON value.
    Json,
    /// A parquet file whose footer is mutated.
    ParquetFooter,
    /// A parquet file whose bytes before the footer are mutated.
    ParquetPages,
    /// A header's length, a JSON header, then tensors.
    Safetensors,
    /// Bytes followed by their SHA-256.
    Sealed,
}

/// A parser of foreign bytes.
#[derive(Clone, Copy, Debug)]
pub struct Parser {
    /// The parser's name, which its corpus and its fuzz target share.
    pub name: &'static str,
    /// The form of its inputs, which determines the mutations.
    pub shape: Shape,
    /// Further valid inputs in the repository: a file, or a directory and the ending of its files' names.
    pub also: &'static [(&'static str, &'static str)],
    /// Parses any bytes. `Err` is a refusal with a message.
    pub parse: fn(&[u8], &Scratch) -> Result<(), String>,
    /// The command's arguments to read such a file; the second path is an empty directory. `None` if the command has no
    /// argument for it.
    pub command: Option<fn(&Path, &Path) -> Vec<String>>,
}

const CONFIGS: &str = "crates/t5/tests/goldens/configs";
const MODELS: &str = "crates/t5/tests/goldens/models";
const ADAPTERS: &str = "crates/t5/tests/goldens/adapters";
const FAMILIES: &str = "crates/t5/tests/goldens/families";
const TOKENIZERS: &str = "crates/dataloader/tests/goldens/tokenizers";

const fn inner(name: &'static str, parse: fn(&[u8], &Scratch) -> Result<(), String>) -> Parser {
    Parser { name, shape: Shape::Bytes, also: &[], parse, command: None }
}

/// Every parser of foreign bytes.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "parquet_footer",
        shape: Shape::ParquetFooter,
        also: &[("fuzz/corpus/parquet_pages", ".parquet")],
        parse: parquet,
        command: Some(|file, _| words(&["inspect", text(file)])),
    },
    Parser {
        name: "parquet_pages",
        shape: Shape::ParquetPages,
        also: &[],
        parse: parquet,
        command: Some(train_tokenizer_command),
    },
    inner("page_header", |bytes, _| parquet_dataset::fuzzing::page_header(bytes)),
    inner("offset_index", |bytes, _| parquet_dataset::fuzzing::offset_index(bytes)),
    inner("runs", |bytes, _| parquet_dataset::fuzzing::runs(bytes)),
    inner("delta_lengths", |bytes, _| parquet_dataset::fuzzing::delta_lengths(bytes)),
    inner("snappy", |bytes, _| parquet_dataset::fuzzing::snappy(bytes)),
    Parser { name: "server_request", shape: Shape::Json, also: &[], parse: server_request, command: None },
    Parser { name: "page_map", shape: Shape::Sealed, also: &[], parse: page_map, command: None },
    Parser { name: "safetensors", shape: Shape::Safetensors, also: &[], parse: safetensors, command: None },
    Parser {
        name: "model_weights",
        shape: Shape::Safetensors,
        also: &[("crates/t5/tests/goldens/models/long_positions_gelu/model.safetensors", "")],
        parse: model_weights,
        command: None,
    },
    Parser {
        name: "pytorch_weights",
        shape: Shape::Bytes,
        also: &[("crates/t5/tests/goldens/families/umt5_hub/pytorch_model.bin", "")],
        parse: pytorch_weights,
        command: None,
    },
    Parser {
        name: "adapter_config",
        shape: Shape::Json,
        also: &[(ADAPTERS, "adapter_config.json")],
        parse: adapter_config,
        command: None,
    },
    Parser {
        name: "adapter_weights",
        shape: Shape::Safetensors,
        also: &[("crates/t5/tests/goldens/adapters/q_v/final/adapter_model.safetensors", "")],
        parse: adapter_weights,
        command: None,
    },
    Parser {
        name: "weight_index",
        shape: Shape::Json,
        also: &[("crates/t5/tests/goldens/models/sharded/model.safetensors.index.json", "")],
        parse: weight_index,
        command: None,
    },
    Parser {
        name: "model_config",
        shape: Shape::Json,
        also: &[(CONFIGS, ".json")],
        parse: model_config,
        command: Some(|file, empty| {
            let model = format!("model.config={:?}", text(file));
            words(&["plan", "--set", &model, "--memory-budget", "256MiB", "--output", text(&empty.join("run"))])
        }),
    },
    Parser {
        name: "tokenizer",
        shape: Shape::Json,
        also: &[],
        parse: tokenizer,
        command: Some(|file, empty| {
            let tokenizer = format!("data.tokenizer={:?}", text(file));
            words(&["plan", "--set", &tokenizer, "--memory-budget", "256MiB", "--output", text(&empty.join("run"))])
        }),
    },
    Parser {
        name: "sentence_piece",
        shape: Shape::Bytes,
        also: &[("crates/dataloader/tests/goldens/sentence_piece/none/spiece.model", "")],
        parse: |bytes, _| {
            tries_texts(&Tokenizer::from_sentence_piece(bytes, None, Path::new("spiece.model")).map_err(refused)?)
        },
        command: None,
    },
    Parser {
        name: "byte_pairs",
        shape: Shape::Json,
        also: &[("crates/dataloader/tests/goldens/tokenizers/codet5/vocab.json", "")],
        parse: |bytes, scratch| beside_merges(bytes, "vocab.json", scratch),
        command: None,
    },
    Parser {
        name: "tokenizer_config",
        shape: Shape::Json,
        also: &[
            ("crates/dataloader/tests/goldens/tokenizers/codet5/tokenizer_config.json", ""),
            ("crates/dataloader/tests/goldens/tokenizers/byt5-hub/tokenizer_config.json", ""),
        ],
        parse: |bytes, scratch| beside_merges(bytes, "tokenizer_config.json", scratch),
        command: None,
    },
    Parser {
        name: "config_toml",
        shape: Shape::Text,
        also: &[("configs", ".toml")],
        parse: |bytes, _| command::parsers::config(&String::from_utf8_lossy(bytes)),
        command: Some(|file, empty| {
            let output = empty.join("run");
            words(&["plan", "--config", text(file), "--memory-budget", "256MiB", "--output", text(&output)])
        }),
    },
    Parser {
        name: "assignment",
        shape: Shape::Text,
        also: &[],
        parse: |bytes, _| command::parsers::assignment(&String::from_utf8_lossy(bytes)),
        command: None,
    },
    Parser { name: "manifest", shape: Shape::Json, also: &[], parse: manifest, command: None },
    Parser { name: "trainer_state", shape: Shape::Json, also: &[], parse: trainer_state, command: None },
    Parser { name: "finished", shape: Shape::Json, also: &[], parse: finished, command: None },
    Parser { name: "metrics", shape: Shape::Text, also: &[], parse: metrics, command: None },
    Parser {
        name: "machine",
        shape: Shape::Json,
        also: &[],
        parse: machine,
        command: Some(|file, empty| words(&["plan", "--machine", text(file), "--output", text(&empty.join("run"))])),
    },
    Parser { name: "texts", shape: Shape::Text, also: &[], parse: texts, command: Some(train_tokenizer_command) },
    Parser {
        name: "row_files",
        shape: Shape::Text,
        also: &[],
        parse: row_files,
        command: Some(|file, empty| {
            let output = empty.join("rows.parquet");
            words(&["convert", text(file), "--output", text(&output), "--bad-rows", "skip", "--clean", "--json"])
        }),
    },
];

fn train_tokenizer_command(file: &Path, empty: &Path) -> Vec<String> {
    let output = empty.join("tokenizer.json");
    words(&["train-tokenizer", "--input", text(file), "--vocab-size", "400", "--output", text(&output)])
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

fn refused(error: impl ToString) -> String {
    error.to_string()
}

/// The directory of this workspace. The tools run in the place where they were built.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The most rows read from one file, and at a time.
const MAX_ROWS: u64 = 4096;
const READ_ROWS: u64 = 256;

/// Opens a parquet file, finds its pages, and reads its string columns, with limits like a loader's.
fn parquet(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let path = scratch.write("rows.parquet", bytes);
    let inspection = inspect(&path).map_err(refused)?;
    let columns = inspection.columns.into_iter().filter(|column| column.is_string).map(|column| column.name);
    let mut options = DatasetOptions::new(columns.take(16));
    (options.max_value_bytes, options.max_read_bytes) = (4 << 20, 8 << 20);
    let in_order = in_order(&path);
    let dataset = Dataset::open(&[path], &options).map_err(refused)?;
    let rows = dataset.rows().min(MAX_ROWS);
    let mut outcome = in_order;
    for first in (0..rows).step_by(READ_ROWS as usize) {
        // A later page may be good even if this one is broken.
        if let Err(error) = dataset.read_range(first..rows.min(first + READ_ROWS)) {
            outcome = Err(error.to_string());
        }
    }
    let last = dataset.rows() - 1;
    dataset.read_rows(&[last, last / 2, 0, last]).map_err(refused)?;
    outcome
}

/// Reads all string columns together, in order.
fn in_order(path: &Path) -> Result<(), String> {
    let columns: Vec<String> = string_columns(path).map_err(refused)?.into_iter().take(4).collect();
    let mut cursor = RowCursor::open(path, &columns, None).map_err(refused)?;
    let (mut row, mut left) = (parquet_dataset::Rows::default(), MAX_ROWS);
    while left > 0 && cursor.next(4 << 20, &mut row).map_err(refused)? {
        left -= 1;
    }
    Ok(())
}

/// The file of the page maps in the corpus, with a fixed modification time.
const MAPPED: &str = "fuzz/corpus/parquet_pages/no-index.parquet";

fn page_map(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let path = scratch.path("mapped.parquet");
    scratch.prepare_once(|| {
        scratch.write("mapped.parquet", &fs::read(root().join(MAPPED)).expect("the repository is there"));
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let file = fs::File::options().write(true).open(&path).expect("it was just written");
        file.set_modified(time).expect("the file is ours");
    });
    let mut options = DatasetOptions::new(["prompt", "response"]);
    (options.max_value_bytes, options.max_read_bytes) = (4 << 20, 8 << 20);
    options.page_map = Some(bytes.to_vec());
    let dataset = Dataset::open(&[path], &options).map_err(refused)?;
    dataset.read_range(0..dataset.rows().min(MAX_ROWS)).map_err(refused)?;
    dataset.page_map().map(|_| ()).map_err(refused)
}

/// The default of `serve --max-body`.
const LARGEST_BODY: usize = 128 << 10;

/// Parses the body of a request for both interfaces.
fn server_request(bytes: &[u8], _: &Scratch) -> Result<(), String> {
    use openai_server::{Interface, Request, RequestLimits};
    if bytes.len() > LARGEST_BODY {
        return Err("the server reads no body of this size".to_owned());
    }
    let read = |interface| Request::parse(interface, bytes, &RequestLimits::default()).map(drop);
    let refused = |error: openai_server::ApiError| {
        assert_eq!(error.status, 400, "a request is at fault for its body, and nobody else");
        error.message
    };
    read(Interface::Completions).or_else(|_| read(Interface::Chat)).map_err(refused)
}

fn safetensors(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let path = scratch.write("state.safetensors", bytes);
    let reader = t5::safetensors::Reader::open(&path).map_err(refused)?;
    let _ = reader.metadata("step");
    for name in reader.names() {
        let dtype = if name.starts_with('u') { DType::U32 } else { DType::F32 };
        reader.read(&name, dtype, &Device::Cpu).map_err(refused)?;
    }
    Ok(())
}

/// On the first call, makes `model/` from one of the repository's directories.
fn model_directory(scratch: &Scratch, golden: &str, file_of_input: &str) -> PathBuf {
    let model = scratch.path("model");
    scratch.prepare_once(|| {
        fs::create_dir(&model).expect("the temporary directory can be written");
        let from = root().join(golden);
        for entry in fs::read_dir(from).expect("the repository is there") {
            let entry = entry.expect("the repository can be read");
            fs::copy(entry.path(), model.join(entry.file_name())).expect("the temporary directory can be written");
        }
        let _ = fs::remove_file(model.join(file_of_input));
    });
    model
}

fn model_weights(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let model = model_directory(scratch, &format!("{MODELS}/long_positions_gelu"), "model.safetensors");
    scratch.write("model/model.safetensors", bytes);
    t5::T5::load(&model, DType::F32, &Device::Cpu).map(|_| ()).map_err(refused)
}

fn pytorch_weights(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let model = model_directory(scratch, &format!("{FAMILIES}/umt5_hub"), "pytorch_model.bin");
    scratch.write("model/pytorch_model.bin", bytes);
    t5::T5::load(&model, DType::F32, &Device::Cpu).map(|_| ()).map_err(refused)
}

fn adapter_config(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    adapter(bytes, "adapter_config.json", scratch)
}

fn adapter_weights(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    adapter(bytes, "adapter_model.safetensors", scratch)
}

/// Parses one file of an adapter: its meaning in a model, and its tensors.
fn adapter(bytes: &[u8], name: &str, scratch: &Scratch) -> Result<(), String> {
    let directory = model_directory(scratch, &format!("{ADAPTERS}/q_v/final"), name);
    scratch.write(&format!("model/{name}"), bytes);
    let model = root().join(ADAPTERS).join("bases/gated_tied/config.json");
    let model = t5::Config::from_file(&model).map_err(refused)?;
    let adapter = t5::peft::AdapterDirectory::open(&directory, &model).map_err(refused)?;
    let _ = adapter.lora(&model);
    for linear in &adapter.layout().linears {
        for (tensor, _) in linear.tensors(adapter.layout().dora) {
            adapter.read(&tensor, DType::F32, &Device::Cpu).map_err(refused)?;
        }
    }
    Ok(())
}

/// Parses one file of a byte-level tokenizer.
fn beside_merges(bytes: &[u8], name: &str, scratch: &Scratch) -> Result<(), String> {
    let directory = model_directory(scratch, &format!("{TOKENIZERS}/codet5"), name);
    scratch.write(&format!("model/{name}"), bytes);
    tries_texts(&Tokenizer::load(&directory).map_err(refused)?)
}

fn weight_index(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let model = model_directory(scratch, &format!("{MODELS}/sharded"), "model.safetensors.index.json");
    scratch.write("model/model.safetensors.index.json", bytes);
    t5::T5::load(&model, DType::F32, &Device::Cpu).map(|_| ()).map_err(refused)
}

fn model_config(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let path = scratch.write("config.json", bytes);
    let config = t5::Config::from_file(&path).map_err(refused)?;
    let _ = t5::ParameterSpec::all(&config);
    let (written, _) = (config.to_json().to_string(), config.generation_json());
    let again = t5::Config::from_json(&written, "written").map_err(refused)?;
    assert_eq!(again.to_json().to_string(), written, "what was written reads as another config");
    Ok(())
}

/// Texts that exercise every part of a tokenizer: normalizers, splitting, unknown and special tokens.
const TEXTS: [&str; 8] = [
    "",
    " ",
    "The cat sat on the mat, didn't it? 12,345.67",
    "倒过来：天地人。显存不足",
    "Ünïcode \u{301}e ﬁ Ⅳ 👩‍👩‍👧 \u{0}\u{7f}\u{ad}\u{200b}",
    "</s><pad><unk><extra_id_0>[UNK][CLS]",
    "a\r\n\tb  c\u{a0}d",
    "\u{2581}metaspace\u{2581} Ġbyte ##level</w>",
];

fn tokenizer(bytes: &[u8], _: &Scratch) -> Result<(), String> {
    tries_texts(&Tokenizer::from_bytes(bytes, Path::new("tokenizer.json")).map_err(refused)?)
}

fn tries_texts(tokenizer: &Tokenizer) -> Result<(), String> {
    let _ = (tokenizer.eos_id(), tokenizer.pad_id(), tokenizer.unknown_id());
    let _ = (tokenizer.sentinels(), tokenizer.transformers_config());
    let mut outcome = Ok(());
    for text in TEXTS {
        match tokenizer.encode(text) {
            Ok(ids) => drop(tokenizer.decode(&ids)),
            Err(error) => outcome = Err(error.to_string()),
        }
    }
    let long = TEXTS.concat().repeat(16);
    tokenizer.encode_start(&long, 16).map_err(refused)?;
    let ids: Vec<u32> = (0..tokenizer.vocab_size().min(300) as u32).chain([u32::MAX]).collect();
    drop(tokenizer.decode(&ids));
    outcome
}

fn manifest(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    scratch.prepare_once(|| {
        scratch.write("config.json", b"{}");
    });
    let path = scratch.write("manifest.json", bytes);
    let directory = path.parent().expect("it has a directory");
    let manifest = Manifest::read(directory).map_err(refused)?;
    let _ = manifest.total_bytes();
    manifest.verify(directory, &|| false).map(drop).map_err(refused)
}

/// Reads the trainer state from a checkpoint with a matching manifest, as a resume does.
fn trainer_state(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let checkpoints = scratch.path("checkpoints");
    let mut files = Vec::new();
    for name in ["config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors", STATE_FILE] {
        let content = if name == STATE_FILE { bytes } else { b"" };
        let digest = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        files.push((name, content, json!({ "name": name, "bytes": content.len(), "sha256": digest })));
    }
    scratch.prepare_once(|| {
        fs::create_dir_all(checkpoints.join("step-00000007")).expect("the temporary directory can be written");
    });
    for (name, content, _) in &files {
        scratch.write(&format!("checkpoints/step-00000007/{name}"), content);
    }
    let entries: Vec<_> = files.into_iter().map(|(.., entry)| entry).collect();
    let manifest = json!({ "format": 1, "files": entries }).to_string();
    scratch.write("checkpoints/step-00000007/manifest.json", manifest.as_bytes());
    let _ = Checkpoints::best_valid(&checkpoints, "loss").map_err(refused)?;
    Checkpoints::newest_valid(&checkpoints).map(|_| ()).map_err(refused)
}

fn finished(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    scratch.prepare_once(|| {
        fs::create_dir(scratch.path("model")).expect("the temporary directory can be written");
        scratch.write("model/model.safetensors", b"");
    });
    let path = scratch.write("finished.json", bytes);
    let output = path.parent().expect("it has a directory");
    command::parsers::finished(output).map(|_| ()).ok_or_else(|| "not finished".to_owned())
}

/// Makes a page from the file, opens it to append, and checks that every complete line is still there.
fn metrics(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let path = scratch.write("metrics.jsonl", bytes);
    let run = run_report::read(&path, "a run").map_err(|error| error.to_string())?;
    assert!(run_report::page::of_run(&run).len() <= run_report::page::MAX_BYTES, "a page of more bytes than any has");
    command::parsers::metrics(&path)?;
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let after = fs::read(&path).map_err(refused)?;
    assert!(after.starts_with(&bytes[..whole]), "a whole line was removed");
    assert!(after.len() > whole && after.ends_with(b"\n"), "the new line is not there");
    Ok(())
}

fn machine(bytes: &[u8], _: &Scratch) -> Result<(), String> {
    let snapshots: Vec<MemorySnapshot> = serde_json::from_slice(bytes).map_err(refused)?;
    if snapshots.is_empty() {
        return Err("no snapshot".to_owned());
    }
    let count = snapshots.len().min(100);
    let probe = ScriptedProbe::around_this_process(snapshots);
    (0..count).try_for_each(|_| probe.snapshot().map(|_| ())).map_err(refused)
}

fn texts(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let path = scratch.write("texts", bytes);
    let training = TokenizerTraining { vocab_size: 400, max_counted_bytes: 1 << 20, ..TokenizerTraining::default() };
    train_tokenizer(&[path], &[], &training).map(|_| ()).map_err(refused)
}

/// Reads rows by content alone, and also as CSV and as JSON; all columns, and pairs.
fn row_files(bytes: &[u8], scratch: &Scratch) -> Result<(), String> {
    let settings = Settings { bad_rows: BadRows::Skip, clean: true, ..Settings::default() };
    let options = ReadOptions { max_page_bytes: 64 << 20, ..ReadOptions::default() };
    let mut outcome = Ok(());
    for name in ["rows", "rows.csv", "rows.json"] {
        let path = scratch.write(name, bytes);
        let read = Kind::detect(&path, &options).and_then(|kind| {
            let wanted: Vec<Column> = kind.columns.iter().take(64).map(Column::text).collect();
            let (mut rows, mut row) = (Rows::open(&path, &kind, &wanted, true)?, Row::default());
            while rows.next(&mut row)?.is_some() {}
            rows.finish()?;
            Conversion::new(&[path], &Chosen::default(), &options)?.run(&settings, &mut |_, _, _| Ok(()))
        });
        outcome = outcome.and(read.map(|_| ()).map_err(refused));
    }
    outcome
}
