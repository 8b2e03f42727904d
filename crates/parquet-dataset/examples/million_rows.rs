//! Measures rows per second and peak memory on one large file, in the ways a trainer reads it.
//!
//! ```text
//! cargo run --release -p parquet-dataset --example million_rows -- FILE.parquet MODE
//! ```
//!
//! Modes, one per process because the peak is the process's: `open`, `sequential`, `shuffled` (a whole epoch: blocks in
//! random order, rows shuffled within windows of blocks, batches of 64 through a cache), `shuffled-2` (the same with
//! two readers), `ultra` (single random rows, without a cache), `batches` (batches of 64 random rows, without a cache),
//! `in-memory` (single random rows after the first pass). Peaks are VmHWM minus the resident memory before the dataset
//! was opened.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use parquet_dataset::{Dataset, DatasetOptions, Residency};

const BLOCK_ROWS: u64 = 4096;
const WINDOW_BLOCKS: usize = 8;
const BATCH_ROWS: usize = 64;
const CACHE_BYTES: u64 = 32 << 20;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (Some(path), Some(mode)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: million_rows FILE.parquet open|sequential|shuffled|shuffled-2|ultra|batches|in-memory");
        std::process::exit(2);
    };
    let path = PathBuf::from(path);
    let base_kib = status_kib("VmHWM:");
    let mut options = DatasetOptions::new(["prompt", "response"]);
    options.residency = match mode.as_str() {
        "shuffled" | "shuffled-2" => Residency::RowGroupCache { bytes: CACHE_BYTES },
        "in-memory" => Residency::InMemory,
        _ => Residency::UltraLowMem,
    };
    let started = Instant::now();
    let dataset = Dataset::open(&[path], &options).unwrap_or_else(|error| panic!("{error}"));
    let opened = started.elapsed();
    let started = Instant::now();
    let (rows, bytes) = match mode.as_str() {
        "open" => (0, dataset.page_map().unwrap().len() as u64),
        "sequential" => sequential(&dataset),
        "shuffled" => shuffled(&dataset, 1),
        "shuffled-2" => shuffled(&dataset, 2),
        "batches" => random(&dataset, BATCH_ROWS as u64),
        "in-memory" => {
            sequential(&dataset);
            let started = Instant::now();
            let (rows, bytes) = random(&dataset, 1);
            println!("  after the first pass: {:.0} rows/s", rows as f64 / started.elapsed().as_secs_f64());
            (rows + dataset.rows(), bytes)
        }
        _ => random(&dataset, 1),
    };
    let elapsed = started.elapsed();
    println!(
        "{mode}: opened in {:.1} ms; {rows} rows, {bytes} bytes in {:.2} s: {:.0} rows/s; peak {:.1} MiB above {:.1} MiB",
        opened.as_secs_f64() * 1e3,
        elapsed.as_secs_f64(),
        rows as f64 / elapsed.as_secs_f64(),
        (status_kib("VmHWM:") - base_kib) as f64 / 1024.0,
        base_kib as f64 / 1024.0,
    );
    for row in dataset.costs(dataset.residency(), 1) {
        println!("  stated: {:<18} {:>8.2} MiB", row.name, row.bytes as f64 / 1048576.0);
    }
}

fn status_kib(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}

/// splitmix64, and a shuffle that uses it.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// Checks every value as text, as a tokenizer would.
fn text_bytes(rows: &parquet_dataset::Rows) -> u64 {
    let value = |row, column| rows.value(column, row).text().map_or(0, str::len) as u64;
    (0..rows.len()).map(|row| value(row, 0) + value(row, 1)).sum()
}

fn sequential(dataset: &Dataset) -> (u64, u64) {
    let mut bytes = 0;
    for start in (0..dataset.rows()).step_by(1024) {
        let rows = dataset.read_range(start..(start + 1024).min(dataset.rows())).unwrap();
        bytes += text_bytes(&rows);
    }
    (dataset.rows(), bytes)
}

/// Reads a whole epoch. If there are several readers, each takes every n-th batch of a window.
fn shuffled(dataset: &Dataset, readers: usize) -> (u64, u64) {
    let mut numbers = Numbers(1);
    let mut blocks: Vec<u64> = (0..dataset.rows().div_ceil(BLOCK_ROWS)).collect();
    numbers.shuffle(&mut blocks);
    let (mut seen, mut bytes) = (0, 0);
    for window in blocks.chunks(WINDOW_BLOCKS) {
        let mut rows: Vec<u64> = window
            .iter()
            .flat_map(|block| block * BLOCK_ROWS..((block + 1) * BLOCK_ROWS).min(dataset.rows()))
            .collect();
        numbers.shuffle(&mut rows);
        let batches: Vec<&[u64]> = rows.chunks(BATCH_ROWS).collect();
        bytes += std::thread::scope(|scope| {
            let threads: Vec<_> = (0..readers)
                .map(|reader| {
                    let batches = batches.iter().skip(reader).step_by(readers);
                    let read = move |batch: &&[u64]| text_bytes(&dataset.read_rows(batch).unwrap());
                    scope.spawn(move || batches.map(read).sum::<u64>())
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
        });
        seen += rows.len() as u64;
    }
    (seen, bytes)
}

fn random(dataset: &Dataset, at_once: u64) -> (u64, u64) {
    let mut numbers = Numbers(2);
    let started = Instant::now();
    let (mut seen, mut bytes) = (0, 0);
    while started.elapsed() < Duration::from_secs(4) {
        let rows: Vec<u64> = (0..at_once).map(|_| numbers.below(dataset.rows())).collect();
        bytes += text_bytes(&dataset.read_rows(&rows).unwrap());
        seen += at_once;
    }
    (seen, bytes)
}
