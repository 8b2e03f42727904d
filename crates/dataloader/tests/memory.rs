//! Compares a loader's bill with the memory that it takes over bad texts. One test alone, because the allocator counts for all
//! threads.

#[path = "support/texts.rs"]
mod texts;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use dataloader::{DataLoader, LoaderLimits, LoaderOptions, Objective, Position, Tokenizer};
use parquet_dataset::{Dataset, DatasetOptions, Residency};
use texts::{VALUE_BYTES, hostile};

#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

/// Four rows with the first `bytes` bytes of this text on either side.
fn rows(directory: &Path, text: &str, bytes: usize) -> Dataset {
    let text = &text[..text.floor_char_boundary(bytes)];
    let column = || -> ArrayRef { Arc::new(StringArray::from_iter_values([text; 4])) };
    let batch = RecordBatch::try_from_iter([("prompt", column()), ("response", column())]).unwrap();
    let path = directory.join("rows.parquet");
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).and_then(|()| writer.close()).unwrap();
    let dataset = Dataset::open(&[path], &DatasetOptions::new(Objective::default().columns())).unwrap();
    dataset.find_pages().unwrap();
    dataset
}

/// A unigram vocabulary of a few letters, where unknown characters become their bytes.
fn with_fallback(directory: &Path) -> PathBuf {
    let mut vocab = vec![serde_json::json!(["<unk>", 0.0]), serde_json::json!(["</s>", 0.0])];
    vocab.extend(["\u{2581}", "a", "b", "ab", "1"].map(|token| serde_json::json!([token, -2.0])));
    vocab.extend((0..256).map(|byte| serde_json::json!([format!("<0x{byte:02X}>"), -20.0])));
    let cutter =
        serde_json::json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let model = serde_json::json!({"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": vocab});
    let json = serde_json::json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": cutter,
        "post_processor": null, "decoder": null, "model": model});
    let path = directory.join("tokenizer.json");
    std::fs::write(&path, json.to_string()).unwrap();
    path
}

/// The bytes that a loader states for making a batch, and the bytes that it takes.
fn stated_and_taken(tokenizer: &Arc<Tokenizer>, dataset: Dataset, tokens: usize) -> (u64, u64) {
    let options = LoaderOptions {
        batch_size: 4,
        max_source_tokens: tokens,
        max_target_tokens: tokens,
        eos_id: 0,
        bad_rows: dataloader::BadRows::Skip,
        ..LoaderOptions::default()
    };
    let limits = LoaderLimits { prefetch_batches: 0, decode_threads: 0 };
    let dataset = Arc::new(dataset);
    let loader = DataLoader::new(Arc::clone(&dataset), Arc::clone(tokenizer), options, Position::default(), limits);
    let mut loader = loader.unwrap();
    let of_loader = loader.costs(limits).into_iter().filter(|row| !row.is_held).map(|row| row.bytes).sum::<u64>();
    let of_dataset = dataset.costs(Residency::UltraLowMem, 1).into_iter().filter(|row| !row.is_held);
    heap::count_allocations(true);
    let batch = loader.next_batch();
    heap::count_allocations(false);
    batch.unwrap();
    (of_loader + of_dataset.map(|row| row.bytes).sum::<u64>(), heap::peak_live())
}

#[test]
fn no_text_takes_more_memory_than_the_loader_states() {
    let directory = tempfile::tempdir().unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tokenizers = [
        here.join("../../data/sample-tokenizer.json"),
        here.join("tests/goldens/tokenizers/codet5/vocab.json"),
        here.join("tests/goldens/tokenizers/byt5"),
        here.join("tests/goldens/sentence_piece/T5/spiece.model"),
        with_fallback(directory.path()),
    ];
    for path in tokenizers {
        let tokenizer = Arc::new(Tokenizer::load(&path).unwrap());
        let mut most = 0;
        for (number, text) in hostile().iter().enumerate() {
            for (bytes, tokens) in [(VALUE_BYTES, 128), (VALUE_BYTES, 2048), (2100, 128), (900, 512)] {
                let dataset = rows(directory.path(), text, bytes);
                let (stated, taken) = stated_and_taken(&tokenizer, dataset, tokens);
                let what = || format!("{}: text {number}, {bytes} bytes, {tokens} tokens", path.display());
                assert!(taken <= stated, "{}: {taken} bytes instead of {stated}", what());
                most = most.max(100 * taken / stated);
            }
        }
        // For such short values a window is most of the bill, and some text takes nearly all of it.
        assert!(most >= 40, "{}: no text takes more than {most} % of what is stated", path.display());
    }
}
