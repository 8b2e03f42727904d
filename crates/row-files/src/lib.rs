//! Reads rows of text from the files that people have, and turns them into parquet.
//!
//! A file is parquet, JSONL, a JSON array, CSV or TSV, plain, gzip or zstd ([`Kind`]). Its columns say which texts are the
//! prompt and the response ([`Pairing`]): two columns, an instruction with an input, or a chat. [`Rows`] reads one file, a
//! [`Conversion`] reads several, and hands each pair on, cleaned, without duplicates, for training or for validation, as
//! it was asked to. [`ParquetWriter`] writes them so that any row can be found again.
//!
//! Invariants:
//! * Files are read once from the beginning to the end. What is held does not depend on their length, duplicates excepted:
//!   those take 16 to 32 bytes a row, or some 300 with [`Duplicates::near`], up to a limit.
//! * A row is at most [`MOST_ROW_BYTES`]. A longer one is passed over without being held, and is an error of that row.
//! * A row that cannot be used is never dropped silently: it ends the conversion, or is counted, with the first one named.
//! * The result is a function of the files' bytes and the settings alone.
//!
//! Deliberately absent: tokens, order and epochs (the dataloader's), and where files are written (the caller's).

mod chat;
mod chat_lists;
mod clean;
mod columns;
mod convert;
mod delimited;
mod duplicates;
mod error;
mod input;
mod json;
mod kind;
mod lengths;
mod parquet_rows;
mod parquet_writer;
mod row;
mod rows;
mod split;
mod thrift;

pub use chat::{Turn, prompt as chat_prompt};
pub use chat_lists::ChatLists;
pub use clean::clean;
pub use columns::{Chosen, Column, Pairing};
pub use convert::{BadRows, Conversion, Counts, Part, Settings};
pub use duplicates::Duplicates;
pub use error::{Error, RowError, RowFault};
pub use input::{Compression, Digested, digest, is_compressed_parquet, sha256, unpack};
pub use json::Layout;
pub use kind::{ENDINGS, Form, Kind, ending};
pub use lengths::Lengths;
pub use parquet_writer::{ParquetWriter, Sizes};
pub use row::{Cell, Row};
pub use rows::Rows;
pub use split::{Share, Split};

/// Bytes of a row at most: of a line, of an element of an array, of all fields of a CSV's row, of a parquet value.
pub const MOST_ROW_BYTES: usize = 16 << 20;
