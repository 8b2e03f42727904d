//! Reads one shuffled epoch of a parquet file, then prints the speed and the memory that the process used.
//!
//! ```text
//! cargo run --release -p dataloader --example epoch -- FILE [KEY=VALUE]...
//!   tokenizer=FILE    tokenize too; without it rows are only read, in the loader's order
//!   cache=48          MiB of decoded blocks; 0: nothing is held between reads
//!   batch=128  depth=2  threads=1  rows=all  prompt=prompt  response=response
//! ```

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use dataloader::{DataLoader, LoaderLimits, LoaderOptions, Objective, Order, OrderOptions, Position, Tokenizer};
use parquet_dataset::{Dataset, DatasetOptions, Residency};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("expected a parquet file")?;
    let settings: HashMap<String, String> = arguments
        .filter_map(|setting| setting.split_once('=').map(|(key, value)| (key.into(), value.into())))
        .collect();
    let text = |key: &str, default: &str| settings.get(key).map_or(default, String::as_str).to_owned();
    let number = |key: &str, default: u64| text(key, &default.to_string()).parse::<u64>();

    let base_kib = status("VmRSS");
    let objective = Objective::TextToText {
        prompt_column: text("prompt", "prompt"),
        response_column: text("response", "response"),
    };
    let mut options = DatasetOptions::new(objective.columns());
    options.residency = match number("cache", 48)? {
        0 => Residency::UltraLowMem,
        mebibytes => Residency::RowGroupCache { bytes: mebibytes << 20 },
    };
    let started = Instant::now();
    let dataset = Arc::new(Dataset::open(&[file.into()], &options)?);
    println!("opened in {:.1} ms", started.elapsed().as_secs_f64() * 1e3);

    let rows = number("rows", dataset.rows())?.min(dataset.rows());
    let batch = number("batch", 128)?;
    let started = Instant::now();
    let what = match settings.get("tokenizer") {
        None => {
            read(&dataset, rows, batch)?;
            "read".to_owned()
        }
        Some(path) => {
            let tokenizer = Arc::new(Tokenizer::load(Path::new(path))?);
            let limits = LoaderLimits {
                prefetch_batches: number("depth", 2)? as usize,
                decode_threads: number("threads", 1)? as usize,
            };
            let eos_id = tokenizer.eos_id()?;
            let options = LoaderOptions { objective, batch_size: batch as usize, eos_id, ..LoaderOptions::default() };
            let mut loader = DataLoader::new(Arc::clone(&dataset), tokenizer, options, Position::default(), limits)?;
            let predicted: u64 = loader.costs(limits).iter().map(|row| row.bytes).sum();
            let (mut samples, mut tokens) = (0, 0);
            while samples < rows {
                let Some(batch) = loader.next_batch()? else { break };
                samples += batch.len() as u64;
                tokens += batch.source_tokens() + batch.target_tokens();
            }
            format!("tokenized ({tokens} tokens; the loader's bill {:.1} MiB)", predicted as f64 / (1 << 20) as f64)
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    println!("{rows} rows {what} in {seconds:.2} s: {:.0} rows/s", rows as f64 / seconds);
    println!("peak {:.1} MiB above the process's base", (status("VmHWM") - base_kib) as f64 / 1024.0);
    Ok(())
}

/// Reads batches of rows in the loader's order, and looks at every byte.
fn read(dataset: &Dataset, rows: u64, batch: u64) -> Result<(), Box<dyn Error>> {
    let order = Order::new(dataset.rows(), OrderOptions::default())?.epoch(0);
    let mut bytes = 0_usize;
    for first in (0..rows).step_by(batch as usize) {
        let read = dataset.read_rows(&order.rows_at(first..rows.min(first + batch)))?;
        for row in 0..read.len() {
            bytes += (0..read.columns()).filter_map(|column| read.bytes(column, row)).map(<[u8]>::len).sum::<usize>();
        }
    }
    println!("{bytes} bytes of text");
    Ok(())
}

/// A size in KiB from this process's status; 0 where the system has none.
fn status(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|size| size.parse().ok()).unwrap_or(0)
}
