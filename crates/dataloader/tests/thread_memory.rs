//! Compares the bill of a thread that prefetches batches with the system's count. One test alone, because the count is the
//! process's.
#![cfg(target_os = "linux")]

#[path = "support/texts.rs"]
mod texts;

use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use dataloader::{BadRows, DataLoader, LoaderLimits, LoaderOptions, Objective, Position, Tokenizer};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use parquet_dataset::{Dataset, DatasetOptions};

#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

const NONE: LoaderLimits = LoaderLimits { prefetch_batches: 0, decode_threads: 0 };
const AHEAD: LoaderLimits = LoaderLimits { prefetch_batches: 1, decode_threads: 1 };

fn dataset(directory: &Path, name: &str, texts: &[String]) -> Arc<Dataset> {
    let column = || -> ArrayRef { Arc::new(StringArray::from_iter_values(texts)) };
    let batch = RecordBatch::try_from_iter([("prompt", column()), ("response", column())]).unwrap();
    let path = directory.join(name);
    // Small pages, so that decoding them is not the peak.
    let pages = WriterProperties::builder().set_dictionary_enabled(false).set_write_batch_size(1);
    let pages = pages.set_data_page_size_limit(1 << 10).build();
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(pages)).unwrap();
    writer.write(&batch).and_then(|()| writer.close()).unwrap();
    let dataset = Dataset::open(&[path], &DatasetOptions::new(Objective::default().columns())).unwrap();
    dataset.find_pages().unwrap();
    Arc::new(dataset)
}

fn loader(dataset: &Arc<Dataset>, tokenizer: &Arc<Tokenizer>) -> DataLoader {
    let options = LoaderOptions {
        batch_size: 2,
        max_source_tokens: 128,
        max_target_tokens: 128,
        eos_id: 0,
        bad_rows: BadRows::Skip,
        ..LoaderOptions::default()
    };
    DataLoader::new(Arc::clone(dataset), Arc::clone(tokenizer), options, Position::default(), NONE).unwrap()
}

fn read_all(loader: &mut DataLoader) {
    while loader.next_batch().unwrap().is_some() {}
}

/// The bytes that a loader states for tokenizing.
fn stated(loader: &DataLoader, limits: LoaderLimits) -> u64 {
    loader.costs(limits).iter().find(|row| row.name == "tokenizing").unwrap().bytes
}

fn bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn a_thread_takes_what_is_stated_beside_the_blocks_that_it_is_given_and_some_text_takes_at_least_half() {
    if !Path::new("/proc/self/clear_refs").exists() {
        return;
    }
    heap::disable_huge_pages();
    heap::return_small_pages_soon();
    let (directory, here) = (tempfile::tempdir().unwrap(), Path::new(env!("CARGO_MANIFEST_DIR")));
    let usual = dataset(directory.path(), "usual.parquet", &["seven twelve 12 apple".to_owned()]);
    let hostile = dataset(directory.path(), "hostile.parquet", &texts::hostile());
    let mut most = (0, 0);
    for tokenizer in [
        "../../data/sample-tokenizer.json",
        "tests/goldens/tokenizers/codet5/vocab.json",
        "tests/goldens/sentence_piece/T5/spiece.model",
    ] {
        let tokenizer = Arc::new(Tokenizer::load(&here.join(tokenizer)).unwrap());
        // In a real run, this thread has tokenized before the process's memory is measured.
        read_all(&mut loader(&usual, &tokenizer));
        let mut loader = loader(&hostile, &tokenizer);
        let of_thread = stated(&loader, AHEAD) - stated(&loader, NONE);
        heap::release_unused();
        // Resets the peak.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = bytes("VmRSS:");
        heap::count_allocations(true);
        loader.set_limits(AHEAD);
        read_all(&mut loader);
        heap::count_allocations(false);
        let (held, given) = (bytes("VmHWM:") - before, heap::peak_live());
        let beside = held.saturating_sub(given);
        assert!(beside <= of_thread, "{tokenizer:?}: {beside} bytes beside {given} in blocks, {of_thread} stated");
        most = most.max((beside, of_thread));
    }
    let (beside, of_thread) = most;
    assert!(beside >= of_thread / 2, "at most {beside} bytes beside the blocks, {of_thread} stated");
}
