//! `train_low_mem inspect`: the shape of parquet files, and what one row of them costs to read.

use std::fmt::Write;

use memory_policy::Bytes;
use parquet_dataset::Inspection;
use serde_json::{Value, json};

use crate::cli::InspectArgs;
use crate::failure::Outcome;
use crate::{open, report};

/// Looks at files.
pub fn inspect(flags: &InspectArgs) -> Outcome<()> {
    for path in open::files("FILE", &flags.files)? {
        let inspection = parquet_dataset::inspect(&path)?;
        let text = if flags.json { format!("{}\n", as_json(&inspection)) } else { as_text(&inspection) };
        report::result(&text)?;
    }
    Ok(())
}

fn as_json(file: &Inspection) -> Value {
    let columns: Vec<Value> = file
        .columns
        .iter()
        .map(|column| {
            json!({
                "name": column.name, "type": column.type_name, "is_string": column.is_string,
                "is_nullable": column.is_nullable, "encodings": column.encodings,
                "compressions": column.compressions, "compressed_bytes": column.compressed_bytes,
                "uncompressed_bytes": column.uncompressed_bytes, "pages": column.pages,
                "largest_page_bytes": column.largest_page_bytes,
            })
        })
        .collect();
    json!({
        "file": file.path.display().to_string(), "bytes": file.bytes, "rows": file.rows(),
        "row_groups": file.row_groups, "page_index": file.has_page_index, "checksums": file.has_checksums,
        "created_by": file.created_by, "bytes_to_read_one_row": file.bytes_to_read_one_row, "columns": columns,
    })
}

fn as_text(file: &Inspection) -> String {
    let mut text = format!("{}: {} rows, {}\n", file.path.display(), file.rows(), Bytes(file.bytes));
    let largest = file.row_groups.iter().max().copied().unwrap_or(0);
    let yes_no = |yes: bool| if yes { "yes" } else { "no" };
    let _ = writeln!(text, "  row groups        {}, the largest of {largest} rows", file.row_groups.len());
    let _ = writeln!(text, "  page index        {}", yes_no(file.has_page_index));
    let _ = writeln!(text, "  checksums         {}", yes_no(file.has_checksums));
    let _ = writeln!(text, "  written by        {}", file.created_by.as_deref().unwrap_or("not said"));
    if let Some(bytes) = file.bytes_to_read_one_row {
        let _ = writeln!(text, "  to read one row   {} of all string columns", Bytes(bytes));
    }
    for column in &file.columns {
        let pages = match (column.pages, column.largest_page_bytes) {
            (Some(pages), Some(largest)) => format!(", {pages} pages of at most {}", Bytes(largest)),
            _ => String::new(),
        };
        let nullable = if column.is_nullable { ", may be null" } else { "" };
        let _ = writeln!(
            text,
            "  column {:<20} {}{nullable}, {}, {} in the file, {} decompressed{pages}",
            column.name,
            column.type_name,
            column.compressions.join("+"),
            Bytes(column.compressed_bytes),
            Bytes(column.uncompressed_bytes),
        );
    }
    text
}
