//! Whole-crate tests: files of every kind are written with the parquet crate's writer, read here, and compared with the
//! results of its own reader.

mod any_rows;
mod cursor;
mod damage;
mod digests;
mod files;
mod hostile;
mod io_log;
mod many_columns;
mod page_map;
mod parts;
mod residency;
