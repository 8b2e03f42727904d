//! Reads any rows of a set of parquet files and holds no more than it was allowed to.
//!
//! A [`Dataset`] is the string columns asked for of all rows of all files, numbered from 0. Opening one reads
//! footers. Reading rows, in any order, decodes the pages that hold them and no others: a *page map* says where
//! each page lies, from the file's offset index or from one walk over its page headers, so that one row group
//! of a million rows is as cheap to enter as any other. What stays in memory between reads is the
//! [`Residency`]'s to say, and never changes what is read.
//!
//! ```no_run
//! use parquet_dataset::{Dataset, DatasetOptions, Residency, Value};
//!
//! let mut options = DatasetOptions::new(["prompt", "response"]);
//! options.residency = Residency::RowGroupCache { bytes: 48 << 20 };
//! let dataset = Dataset::open(&["train.parquet".into()], &options)?;
//! let rows = dataset.read_rows(&[900_000, 17, 4])?;
//! match rows.value(1, 0) {
//!     Value::Text(response) => println!("{response}"),
//!     Value::Null => println!("row 900000 has no response"),
//!     Value::Invalid(bytes) => println!("row 900000 holds {} bytes that are not UTF-8", bytes.len()),
//! }
//! # Ok::<(), parquet_dataset::Error>(())
//! ```
//!
//! Invariants:
//! - Reads are positional; any number of threads may read one dataset.
//! - No size that a file declares is believed before it is compared with the bytes that are there or a limit.
//!   That is why footers and pages are taken apart here: the parquet crate turns a footer into fifteen times its size,
//!   and its page readers allocate what a page declares.
//! - Whatever the bytes, the outcome is rows or a typed [`Error`] that names the file and the place.
//! - A file that changes while it is open is an error, never a mixture.
//!
//! Deliberately absent: order, epochs, tokens. Directories: page maps are bytes for the caller to keep.

mod cache;
mod chunk_rows;
mod costs;
mod dataset;
mod error;
mod footer;
mod footer_walk;
#[doc(hidden)]
pub mod fuzzing;
mod inspect;
mod io;
mod layout;
mod limits;
mod lists;
mod page_maps;
mod pages;
mod rows;
mod schema;
mod thrift;

pub use costs::CostRow;
pub use dataset::{Dataset, DatasetOptions, Residency};
pub use error::{Error, Place};
pub use inspect::{ColumnInspection, Inspection, column_names, inspect, list_columns, string_columns};
pub use io::{IoLog, IoRead};
pub use layout::{FileLayout, Layout};
pub use limits::PartOf;
pub use lists::{ListRow, Lists};
pub use rows::{Rows, Value};
