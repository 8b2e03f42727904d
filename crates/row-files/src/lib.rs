//! Reads rows of text from the files that people have, and turns them into parquet.
//!
//! A file is parquet, JSONL, a JSON array, CSV or TSV, plain, gzip or zstd ([`Kind`]). Its columns determine the prompt
//! and the response ([`Pairing`]): two columns, a [`Template`] of several, an instruction with an input, or a chat. [`Rows`] reads one file. A
//! [`Conversion`] reads several files and passes on each pair for training or validation, cleaned and without duplicates
//! if requested. [`ParquetWriter`] writes pairs so that a reader can seek to any row.
//!
//! Invariants:
//! * Files are read once from the beginning to the end. Memory does not depend on their length, except for duplicates:
//!   those take 16 to 32 bytes a row, or some 300 with [`Duplicates::near`], up to a limit.
//! * A row is at most [`MAX_ROW_BYTES`]. A longer row is skipped without being held, and is an error of that row.
//! * A row that cannot be used is never dropped silently. It ends the conversion, or is counted and the first such row is
//!   named.
//! * The result is a function of the files' bytes and the settings alone.
//!
//! Deliberately absent: tokens, order and epochs (in the dataloader), and the choice of output files (in the caller).

mod arrow_cells;
mod arrow_rows;
mod chat;
mod classes;
mod clean;
mod column;
mod columns;
mod convert;
mod delimited;
mod duplicates;
mod encoding;
mod error;
mod fasta;
mod fasta_files;
mod forms;
mod input;
mod json;
mod json_text;
mod kind;
mod labels;
mod lengths;
mod lists;
mod meaning;
mod options;
mod parquet_rows;
mod parquet_writer;
mod python_text;
mod refusal;
mod row;
mod row_texts;
mod rows;
mod split;
mod template;
mod trace;
mod vector_writer;

pub use chat::{Fits, LeftOut, Turn, prompt as chat_prompt};
pub use classes::Classes;
pub use clean::clean;
pub use column::Column;
pub use columns::{Chosen, Instruction, Pairing, score_of_label, truth_of_label};
pub use convert::{BadRows, Conversion, Counts, Part, Settings};
pub use delimited::Notes;
pub use duplicates::Duplicates;
pub use encoding::Encoding;
pub use error::{Error, RowError, RowFault, listed};
pub use forms::is_label_column;
pub use input::{Compression, Digested, digest, is_compressed_parquet, sha256, unpack};
pub use json::Layout;
pub use kind::{FILE_EXTENSIONS, Form, Kind, extension, is_in_place};
pub use labels::Labels;
pub use lengths::Lengths;
pub use lists::{ListCounts, RankedColumns};
pub use meaning::{Meaning, Unpaired};
pub use options::{Quoting, ReadOptions, conversion_bytes};
pub use parquet_writer::{ParquetWriter, Sizes};
pub use row::{Cell, Row};
pub use rows::Rows;
pub use split::{Share, Split};
pub use template::Template;
pub use trace::{Origin, Trace};
pub use vector_writer::{VECTOR_GROUP_BYTES, VectorWriter};

/// The most bytes of a row: of a line, an array's element, all fields of a CSV row, or a parquet value.
pub const MAX_ROW_BYTES: usize = 16 << 20;
