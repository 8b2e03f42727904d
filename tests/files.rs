//! Files that tests pass to the command, and tensors that they read from its output.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use serde_json::Value;

/// Writes a parquet file of string columns; `None` is null.
pub fn write_rows(path: &Path, columns: &[(&str, Vec<Option<&str>>)]) {
    let arrays = columns.iter().map(|(name, values)| {
        let array: ArrayRef = Arc::new(StringArray::from(values.clone()));
        (*name, array, true)
    });
    write(path, &RecordBatch::try_from_iter_with_nullable(arrays).expect("columns of one length"));
}

/// Writes a parquet file whose `response` column holds numbers.
pub fn write_numbers(path: &Path) {
    let prompts: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1, 2]));
    write(
        path,
        &RecordBatch::try_from_iter([("prompt", prompts), ("response", numbers)]).expect("columns of one length"),
    );
}

fn write(path: &Path, batch: &RecordBatch) {
    let file = File::create(path).expect("a parquet file");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("a writer");
    writer.write(batch).expect("rows");
    writer.close().expect("a footer");
}

/// The bytes of every tensor of a safetensors file, by name.
pub fn tensors(bytes: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let length = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))).expect("a header");
    let (header, data) = bytes[8..].split_at(length);
    let header: Value = serde_json::from_slice(header).expect("a JSON header");
    let entries = header.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__");
    entries
        .map(|(name, entry)| {
            let offset = |index: usize| {
                usize::try_from(entry["data_offsets"][index].as_u64().expect("an offset")).expect("an offset")
            };
            (name.clone(), data[offset(0)..offset(1)].to_vec())
        })
        .collect()
}
