//! Hard memory groups: the limit is the budget, so a single byte above it kills the run.

use std::fs;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::Lab;
use super::lab::Outcome;
use super::table::Table;
use crate::bench::child::{self, Group};
use crate::sample_data::random::Random;

const MIB: u64 = 1 << 20;
/// Budgets of the preset `tiny` on its own rows, in MiB.
const TINY_MIB: [u64; 12] = [24, 28, 32, 36, 40, 48, 64, 80, 100, 128, 160, 200];
/// Budgets for rows that are meant to exceed them, in MiB.
const HOSTILE_MIB: [u64; 3] = [70, 100, 200];
const TINY: &str = "train.batch_size=16 train.eval_samples=8 train.eval_generate_samples=2 train.eval_max_new_tokens=4 \
                    checkpoint.every_steps=4 checkpoint.keep_last=1";
const HOSTILE: &str = "model.config=tiny train.batch_size=64 data.max_source_tokens=64 data.max_target_tokens=8 data.validation=[] \
                       checkpoint.keep_last=1";
/// Exit codes: done, or refused because the run does not fit.
const DONE: i32 = 0;
const DOES_NOT_FIT: i32 = 3;

/// Runs in groups, if groups are available.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    if let Err(why) = Group::new(64 * MIB) {
        table.skip("hard memory groups", &why);
        return Ok(());
    }
    let tiny = TINY_MIB.map(|mib| (format!("{mib} MiB"), mib));
    lab.try_all(table, "tiny, the limit is the budget", &tiny, Vec::new(), |&mib, directory| {
        in_a_group(lab, directory, mib, &[TINY], 8)
    })?;
    let rows = lab.directory("hostile")?;
    for (name, write) in FILES {
        let fault = format!("rows: {name}, the limit is the budget");
        if !lab.is_asked_for(&fault) {
            continue;
        }
        let path = rows.join("rows.parquet");
        write(&path)?;
        let data = format!("data.train=['{}'] data.tokenizer='{}'", path.display(), lab.tokenizer().display());
        let tries = HOSTILE_MIB.map(|mib| (format!("{mib} MiB"), mib));
        lab.try_all(table, &fault, &tries, Vec::new(), |&mib, directory| {
            in_a_group(lab, directory, mib, &[HOSTILE, &data], 10)
        })?;
    }
    Ok(())
}

/// Makes one run in a group.
fn in_a_group(lab: &Lab, directory: &Path, mib: u64, settings: &[&str], steps: u64) -> Outcome {
    let group = Group::new(mib * MIB)?;
    let mut arguments: Vec<String> = ["--output", "run", "--max-steps"].map(str::to_string).to_vec();
    arguments.extend([steps.to_string(), "--memory-budget".to_string(), format!("{mib}MiB")]);
    for setting in settings.iter().flat_map(|settings| settings.split_whitespace()) {
        arguments.extend(["--set".to_string(), setting.to_string()]);
    }
    arguments[1] = directory.join("run").display().to_string();
    let measured = child::run(&lab.program, &arguments, Some(&group), directory, &|| false)?;
    let mut broken = Vec::new();
    let first_error_line = measured.stderr.lines().find(|line| line.starts_with("error")).unwrap_or_default();
    if ![DONE, DOES_NOT_FIT].contains(&measured.exit_code) {
        broken.push(format!("exit {}: {first_error_line}", measured.exit_code));
    }
    let kills = measured.group.unwrap_or_default().kills;
    if kills > 0 {
        broken.push(format!("{kills} killed by the kernel"));
    }
    if measured.peak_bytes > mib * MIB {
        broken.push(format!("VmHWM {} of {mib} MiB", measured.peak_bytes / MIB));
    }
    Ok(broken)
}

/// A function that writes a file of rows.
type Write = fn(&Path) -> Result<(), String>;

const FILES: [(&str, Write); 6] = [
    ("20 words of 1 MiB of DNA among 2,000", |path| long_words(path, b"ACGT")),
    ("20 words of 1 MiB of hexadecimal among 2,000", |path| long_words(path, b"0123456789abcdef")),
    ("20 words of 1 MiB of base64 among 2,000", |path| {
        long_words(path, b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
    }),
    ("one document of 30 MB among 3,000", |path| one_document(path, 3000, 30_000_000)),
    ("one value of 60 MB in a file of some KB", |path| write(path, [vec!["a".repeat(60_000_000), "a b".to_string()]])),
    ("512 times one dictionary entry of 1 MiB", |path| {
        write(path, (0..64).map(|_| vec!["word ".repeat(1 << 18).split_off(1 << 18); 8]))
    }),
];

fn sentence(random: &mut Random) -> String {
    let words = ["one", "two", "three", "water", "wood", "gold", "heart", "tea"];
    (0..8).map(|_| *random.pick(&words)).collect::<Vec<_>>().join(" ")
}

fn long_words(path: &Path, letters: &[u8]) -> Result<(), String> {
    let mut random = Random::named("long words");
    let batches = (0..20).map(|_| {
        let word: String = (0..MIB).map(|_| char::from(*random.pick(letters))).collect();
        let mut prompts: Vec<String> = (0..100).map(|_| sentence(&mut random)).collect();
        prompts[37] = word;
        prompts
    });
    write(path, batches)
}

fn one_document(path: &Path, rows: usize, bytes: usize) -> Result<(), String> {
    let mut random = Random::named("one document");
    let mut prompts: Vec<String> = (0..rows).map(|_| sentence(&mut random)).collect();
    let document = &mut prompts[rows / 2];
    while document.len() < bytes {
        document.push(' ');
        document.push_str(&sentence(&mut random));
    }
    write(path, [prompts])
}

/// Writes prompts in batches, each with the same short response.
fn write(path: &Path, batches: impl IntoIterator<Item = Vec<String>>) -> Result<(), String> {
    let named = |error: String| format!("{}: {error}", path.display());
    let file = File::create(path).map_err(|error| named(error.to_string()))?;
    let level = ZstdLevel::try_new(3).map_err(|error| named(error.to_string()))?;
    let properties = WriterProperties::builder().set_compression(Compression::ZSTD(level)).build();
    let mut writer: Option<ArrowWriter<File>> = None;
    let mut file = Some(file);
    for prompts in batches {
        let responses: ArrayRef = Arc::new(StringArray::from(vec!["yes"; prompts.len()]));
        let prompts: ArrayRef = Arc::new(StringArray::from(prompts));
        let batch = RecordBatch::try_from_iter([("prompt", prompts), ("response", responses)])
            .map_err(|error| named(error.to_string()))?;
        if let Some(file) = file.take() {
            let opened = ArrowWriter::try_new(file, batch.schema(), Some(properties.clone()));
            writer = Some(opened.map_err(|error| named(error.to_string()))?);
        }
        let writer = writer.as_mut().expect("opened with the first batch");
        writer.write(&batch).map_err(|error| named(error.to_string()))?;
    }
    writer.map_or(Ok(()), |writer| writer.close().map(drop).map_err(|error| named(error.to_string())))?;
    let written = fs::metadata(path).map_err(|error| named(error.to_string()))?;
    if written.len() == 0 { Err(named("nothing was written".to_string())) } else { Ok(()) }
}
