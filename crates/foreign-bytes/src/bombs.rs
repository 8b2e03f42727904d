//! Inputs that are large or deep on purpose: too large for the repository, so they are generated each time.
//!
//! They are tried after the corpus and are not mutated. Each once took minutes, gigabytes or the whole stack in some
//! parser.

use serde_json::json;

/// Makes one input.
type Bomb = fn() -> Vec<u8>;

/// The bombs for a parser.
pub(crate) fn bombs(parser: &str) -> &'static [Bomb] {
    match parser {
        "parquet_footer" => &[
            || footer(20_000, 1, 1),
            || footer(2, 1, 20_000),
            || footer(200, 4096, 1),
            || footer(4, 200_000, 1),
            || parquet(&nested_schema(100_000)),
            || parquet(&vec![0x1c; 1 << 20]),
        ],
        "safetensors" => &[
            || tensors(many_tensors(300_000)),
            || tensors(many_tensors(30_000)),
            || tensors(format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{}0]}}}}", "0,".repeat(900_000))),
            || tensors("[".repeat(1 << 20)),
            || tensors(format!("{{\"__metadata__\":{{\"{}\":\"\"}}}}", "k".repeat(15 << 20))),
        ],
        "model_config" => &[
            || format!("{{\"x\":[{}0]}}", "0,".repeat(30 << 20)).into_bytes(),
            || format!("{{\"x\":[{}0]}}", "0,".repeat(127 << 10)).into_bytes(),
            || json!({ "feed_forward_proj": "x".repeat(200 << 10) }).to_string().into_bytes(),
            || br#"{"num_layers": 4096, "num_decoder_layers": 4096}"#.to_vec(),
            || br#"{"relative_attention_num_buckets": 16777214, "relative_attention_max_distance": 16777215}"#.to_vec(),
            || json!({ "eos_token_id": vec![1; 100_000] }).to_string().into_bytes(),
        ],
        "adapter_config" => &[
            || adapter(json!({ "target_modules": vec!["q"; 200_000] })),
            || adapter(json!({ "target_modules": "(a+)+$|".repeat(100_000) })),
            || adapter(json!({ "target_modules": "(.*)*\\1q" })),
            || adapter(json!({ "target_modules": "(\\w{1000}){1000}" })),
            || adapter(json!({ "target_modules": "(".repeat(4000) })),
            || {
                let patterns = (0..40_000).map(|n| (format!(".*q{n}"), json!(2)));
                adapter(json!({ "target_modules": ["q"], "rank_pattern": patterns.collect::<serde_json::Map<_, _>>() }))
            },
        ],
        "weight_index" => &[
            || format!("{{\"weight_map\":{{{}}}}}", index_entries(400_000)).into_bytes(),
            || format!("{{\"weight_map\":[{}0]}}", "0,".repeat(520_000)).into_bytes(),
        ],
        "tokenizer" => &[
            || expanding_tokenizer(4),
            || expanding_tokenizer(40),
            || tokenizer(json!({ "type": "Replace", "pattern": { "Regex": "(a+)+$" }, "content": "" })),
            || tokenizer(json!({ "type": "Replace", "pattern": { "Regex": "(.*)*\\1x" }, "content": "" })),
            || tokenizer(json!({ "type": "Replace", "pattern": { "Regex": "(\\w{1000}){1000}" }, "content": "" })),
            || tokenizer(json!({ "type": "Replace", "pattern": { "Regex": "" }, "content": "x" })),
            || tokenizer(nested_normalizer(40)),
            || tokenizer(nested_normalizer(120)),
            || {
                let pieces = json!([["<unk>", 0.0], ["a".repeat(1 << 20), -1.0]]);
                json!({ "version": "1.0", "added_tokens": [], "model": { "type": "Unigram", "unk_id": 0, "vocab": pieces } })
                    .to_string()
                    .into_bytes()
            },
        ],
        "config_toml" => &[
            || "[".repeat(60 << 10).into_bytes(),
            || format!("a={}", "[".repeat(60 << 10)).into_bytes(),
            || format!("{}a=1", "a.".repeat(30 << 10)).into_bytes(),
            || format!("[{}a]", "a.".repeat(30 << 10)).into_bytes(),
            || format!("a={}", "{a=".repeat(20 << 10)).into_bytes(),
        ],
        "manifest" => &[|| format!("{{\"format\":1,\"files\":[{}0]}}", "{},".repeat(300_000)).into_bytes()],
        "metrics" => &[|| vec![b'x'; 32 << 20]],
        "texts" => &[|| vec![0; 8 << 20], || vec![b'A'; 8 << 20], || "ACGT".repeat(2 << 20).into_bytes()],
        "snappy" => &[|| [&[0xff, 0xff, 0xff, 0xff, 0x0f, 0][..], b"a", &[0xfe, 1, 0].repeat(40_000)].concat()],
        _ => &[],
    }
}

fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// The head of a list of structs, in Thrift's compact protocol.
fn structs(bytes: &mut Vec<u8>, field: u8, count: usize) {
    bytes.extend([field << 4 | 9, 0xfc]);
    varint(bytes, count as u64);
}

fn name(bytes: &mut Vec<u8>, field: u8, name: &[u8]) {
    bytes.push(field << 4 | 8);
    varint(bytes, name.len() as u64);
    bytes.extend(name);
}

/// A file of `columns` string columns with names of `name_bytes`, and of `groups` row groups without rows.
fn footer(columns: usize, name_bytes: usize, groups: usize) -> Vec<u8> {
    let mut bytes = vec![0x15, 2]; // FileMetaData.version: 1
    structs(&mut bytes, 1, columns + 1);
    name(&mut bytes, 4, b"schema");
    bytes.push(0x15); // num_children
    varint(&mut bytes, 2 * columns as u64);
    bytes.push(0);
    let named = |column: usize| format!("{}{column}", "c".repeat(name_bytes)).into_bytes();
    for column in 0..columns {
        bytes.extend([0x15, 12, 0x25, 2]); // BYTE_ARRAY, optional
        name(&mut bytes, 1, &named(column));
        bytes.extend([0x25, 0, 0]); // UTF8
    }
    bytes.extend([0x16, 0]); // num_rows: 0
    structs(&mut bytes, 1, groups);
    for _ in 0..groups {
        structs(&mut bytes, 1, columns);
        for column in 0..columns {
            bytes.extend([0x26, 0, 0x1c, 0x15, 12, 0x19, 0x15, 0, 0x19, 0x18]); // type, encodings, path
            let column = named(column);
            varint(&mut bytes, column.len() as u64);
            bytes.extend(column);
            // Uncompressed, no values, no bytes, pages from offset 4 on.
            bytes.extend([0x15, 0, 0x16, 0, 0x16, 0, 0x16, 0, 0x26, 8, 0, 0]);
        }
        bytes.extend([0x16, 0, 0x16, 0, 0]);
    }
    bytes.push(0);
    parquet(&bytes)
}

/// A footer whose schema nests `depth` groups.
fn nested_schema(depth: usize) -> Vec<u8> {
    let mut bytes = vec![0x15, 2];
    structs(&mut bytes, 1, depth + 1);
    for _ in 0..depth {
        name(&mut bytes, 4, b"g");
        bytes.extend([0x15, 2, 0]); // one child
    }
    bytes.extend([0x15, 12, 0x25, 2]);
    name(&mut bytes, 1, b"leaf");
    bytes.extend([0, 0x16, 0, 0x19, 0x0c, 0]);
    bytes
}

fn parquet(footer: &[u8]) -> Vec<u8> {
    [b"PAR1", footer, &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat()
}

fn tensors(header: String) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

fn many_tensors(count: usize) -> String {
    let tensor = |at: usize| format!("\"{at}\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    format!("{{{}}}", (0..count).map(tensor).collect::<Vec<_>>().join(","))
}

fn index_entries(count: usize) -> String {
    let entry = |at: usize| format!("\"{at}\":\"model-00001-of-00006.safetensors\"");
    (0..count).map(entry).collect::<Vec<_>>().join(",")
}

fn tokenizer(normalizer: serde_json::Value) -> Vec<u8> {
    let vocabulary = json!({ "<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3 });
    let model = json!({ "type": "WordLevel", "unk_token": "<unk>", "vocab": vocabulary });
    let tokenizer = json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": normalizer, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model });
    tokenizer.to_string().into_bytes()
}

/// A tokenizer in which each of `times` normalizers turns every `1` into a thousand.
fn expanding_tokenizer(times: usize) -> Vec<u8> {
    let replace = json!({ "type": "Replace", "pattern": { "String": "1" }, "content": "1".repeat(1000) });
    tokenizer(json!({ "type": "Sequence", "normalizers": vec![replace; times] }))
}

fn nested_normalizer(depth: usize) -> serde_json::Value {
    (0..depth).fold(json!({ "type": "NFC" }), |inner, _| json!({ "type": "Sequence", "normalizers": [inner] }))
}

/// An `adapter_config.json` with these settings.
fn adapter(settings: serde_json::Value) -> Vec<u8> {
    let mut all = json!({ "peft_type": "LORA", "r": 8 });
    for (key, value) in settings.as_object().into_iter().flatten() {
        all[key] = value.clone();
    }
    all.to_string().into_bytes()
}
