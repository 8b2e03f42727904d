//! Files that tests pass to the command, and tensors that they read from its output.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
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

/// Writes a parquet file with these prompts and with numbers, packed so that a page is small until it is decoded.
pub fn write_packed_numbers(path: &Path, prompts: &[&str]) {
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..prompts.len() as i64));
    let prompts: ArrayRef = Arc::new(StringArray::from(prompts.to_vec()));
    let batch =
        RecordBatch::try_from_iter([("prompt", prompts), ("response", numbers)]).expect("columns of one length");
    let codec = parquet::basic::Compression::ZSTD(parquet::basic::ZstdLevel::default());
    write_with(path, &batch, WriterProperties::builder().set_compression(codec).set_dictionary_enabled(false).build());
}

/// Writes a parquet file as Hugging Face's `datasets` does: `text`, and `label` with numbers of these classes.
pub fn write_classes(path: &Path, labels: &[i64], names: &[&str]) {
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..labels.len()).map(|row| row.to_string())));
    let labels: ArrayRef = Arc::new(Int64Array::from(labels.to_vec()));
    let batch = RecordBatch::try_from_iter([("text", texts), ("label", labels)]).expect("columns of one length");
    let class = serde_json::json!({"_type": "ClassLabel", "names": names});
    let features = serde_json::json!({"info": {"features": {"label": class}}}).to_string();
    let features = KeyValue::new("huggingface".to_owned(), features);
    write_with(path, &batch, WriterProperties::builder().set_key_value_metadata(Some(vec![features])).build());
}

fn write(path: &Path, batch: &RecordBatch) {
    write_with(path, batch, WriterProperties::default());
}

fn write_with(path: &Path, batch: &RecordBatch, properties: WriterProperties) {
    let file = File::create(path).expect("a parquet file");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).expect("a writer");
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
