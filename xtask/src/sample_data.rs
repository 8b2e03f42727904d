//! `cargo xtask sample-data`: writes the sample data of the default run.
//!
//! `data/sample-train.parquet` and `data/sample-validation.parquet` have the columns `prompt` and `response`.
//! `data/sample-tokenizer.json` is trained on the training rows by the code behind `train_low_mem train-tokenizer`. All
//! three are committed, and a test checks that they equal this module's output.
//!
//! Invariants: the rows are a function of this source alone (no clock, no environment); no prompt of the validation
//! file occurs in the training file; both files together stay under 2 MB.

pub(crate) mod random;
mod tasks;

use std::collections::HashSet;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use dataloader::{TokenizerTraining, train_tokenizer_on};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use random::Random;

/// One row of the sample files.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    prompt: String,
    response: String,
}

/// The rows of both files, in file order.
struct SampleRows {
    train: Vec<Row>,
    validation: Vec<Row>,
}

/// One row in this many is held out for validation.
const HELD_OUT_ONE_IN: usize = 40;
/// Small enough that the sample files show several row groups.
const ROW_GROUP_ROWS: usize = 16_384;
/// Enough for every word of the tasks to become a token or two.
const VOCAB_SIZE: usize = 1024;

/// Writes the three files into `directory`.
pub fn run(directory: &Path) -> Result<(), String> {
    let rows = generate();
    let tokenizer = train_sample_tokenizer(&rows.train)?;
    for (name, rows) in [("sample-train.parquet", &rows.train), ("sample-validation.parquet", &rows.validation)] {
        let path = directory.join(name);
        write_rows(&path, rows).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("{}: {} rows", path.display(), rows.len());
    }
    let path = directory.join("sample-tokenizer.json");
    std::fs::write(&path, &tokenizer).map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{}: {VOCAB_SIZE} tokens", path.display());
    Ok(())
}

/// Draws every task's rows, holds some out, and shuffles each file.
fn generate() -> SampleRows {
    let mut rows = SampleRows { train: Vec::new(), validation: Vec::new() };
    let mut prompts = HashSet::new();
    for task in tasks::TASKS {
        let mut random = Random::named(task.name);
        let mut drawn = 0;
        let mut repeats = 0;
        while drawn < task.rows && repeats < 10_000 {
            let (prompt, response) = (task.draw)(&mut random);
            if !prompts.insert(prompt.clone()) {
                repeats += 1;
                continue;
            }
            let held_out = drawn % HELD_OUT_ONE_IN == 0;
            if held_out { &mut rows.validation } else { &mut rows.train }.push(Row { prompt, response });
            (drawn, repeats) = (drawn + 1, 0);
        }
    }
    Random::named("train order").shuffle(&mut rows.train);
    Random::named("validation order").shuffle(&mut rows.validation);
    rows
}

fn train_sample_tokenizer(rows: &[Row]) -> Result<Vec<u8>, String> {
    let texts = rows.iter().flat_map(|row| [row.prompt.as_str(), row.response.as_str()]);
    let training = TokenizerTraining { vocab_size: VOCAB_SIZE, ..TokenizerTraining::default() };
    let trained = train_tokenizer_on(texts.map(|text| Ok(text.to_owned())), &training);
    trained.map(|trained| trained.json).map_err(|error| error.to_string())
}

fn write_rows(path: &Path, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    let column =
        |value: fn(&Row) -> &str| -> ArrayRef { Arc::new(StringArray::from_iter_values(rows.iter().map(value))) };
    let batch =
        RecordBatch::try_from_iter([("prompt", column(|row| &row.prompt)), ("response", column(|row| &row.response))])?;
    let properties = WriterProperties::builder()
        .set_created_by("low-mem-t5 sample data".to_owned())
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(12)?))
        .set_dictionary_enabled(false)
        .set_max_row_group_row_count(Some(ROW_GROUP_ROWS))
        .build();
    let mut writer = ArrowWriter::try_new(File::create(path)?, batch.schema(), Some(properties))?;
    writer.write(&batch)?;
    writer.close()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
    use std::path::PathBuf;

    fn data(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../data").join(name)
    }

    fn read_rows(path: &Path) -> Vec<Row> {
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap().build().unwrap();
        let mut rows = Vec::new();
        for batch in reader {
            let batch = batch.unwrap();
            let column =
                |name: &str| -> &StringArray { batch.column_by_name(name).unwrap().as_any().downcast_ref().unwrap() };
            for (prompt, response) in column("prompt").iter().zip(column("response")) {
                rows.push(Row { prompt: prompt.unwrap().to_owned(), response: response.unwrap().to_owned() });
            }
        }
        rows
    }

    #[test]
    fn the_committed_sample_rows_are_what_the_generator_writes() {
        let rows = generate();
        let hint = "run `cargo xtask sample-data`";
        assert!(read_rows(&data("sample-train.parquet")) == rows.train, "{hint}");
        assert!(read_rows(&data("sample-validation.parquet")) == rows.validation, "{hint}");
    }

    #[test]
    fn the_committed_sample_tokenizer_is_what_training_gives() {
        let committed = std::fs::read(data("sample-tokenizer.json")).unwrap();
        assert!(train_sample_tokenizer(&generate().train).unwrap() == committed, "run `cargo xtask sample-data`");
    }

    #[test]
    fn the_sample_files_together_stay_under_two_megabytes() {
        let size = |name| std::fs::metadata(data(name)).unwrap().len();
        let bytes = size("sample-train.parquet") + size("sample-validation.parquet");
        assert!(bytes <= 2_000_000, "{bytes} bytes");
    }

    #[test]
    fn held_out_prompts_never_occur_in_training_and_every_task_has_some() {
        let rows = generate();
        let train: HashSet<&str> = rows.train.iter().map(|row| row.prompt.as_str()).collect();
        assert!(rows.validation.iter().all(|row| !train.contains(row.prompt.as_str())));
        assert!(rows.validation.len() >= 20 * tasks::TASKS.len().min(40), "{} rows held out", rows.validation.len());
    }

    #[test]
    fn numbers_read_as_people_read_them() {
        for (number, english, chinese) in [
            (1, "one", "一"),
            (10, "ten", "十"),
            (17, "seventeen", "十七"),
            (40, "forty", "四十"),
            (110, "one hundred ten", "一百一十"),
            (205, "two hundred five", "二百零五"),
            (1000, "one thousand", "一千"),
            (3005, "three thousand five", "三千零五"),
            (4027, "four thousand twenty seven", "四千零二十七"),
            (9900, "nine thousand nine hundred", "九千九百"),
        ] {
            assert_eq!(tasks::english_number(number), english);
            assert_eq!(tasks::chinese_number(number), chinese);
        }
    }
}
