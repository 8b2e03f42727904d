//! Reads any rows of a set of parquet files, in bounded memory.
//!
//! A [`Dataset`] gives the requested string columns of all rows of all files, numbered from 0. Opening a dataset reads
//! footers. Reading rows, in any order, decodes only the pages that hold them. A *page map* has the place of each page,
//! from the file's offset index or from one walk over its page headers. So any row of a row group with a million rows
//! is cheap to reach. A [`RowCursor`] reads the rows of one file in order. The [`Residency`] determines which data stays in memory between reads, and never changes the
//! rows.
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
//! - No size that a file declares is trusted before it is compared with the bytes that exist or with a limit. That is
//!   why this crate parses footers and pages itself: the parquet crate turns a footer into fifteen times its size, and
//!   its page readers allocate the size that a page declares.
//! - For any bytes, the result is rows or a typed [`Error`] that names the file and the place.
//! - A file that changes while it is open is an error; rows of two versions are never mixed.
//!
//! Deliberately absent: order, epochs, tokens, and directories (page maps are bytes for the caller to keep).

mod cache;
mod chunk_rows;
mod costs;
mod cursor;
mod dataset;
mod declared;
mod error;
mod footer;
mod footer_walk;
#[doc(hidden)]
pub mod fuzzing;
mod inspect;
mod io;
mod layout;
mod limits;
mod page_maps;
mod pages;
mod rows;
mod schema;
mod thrift;

pub use costs::CostRow;
pub use cursor::RowCursor;
pub use dataset::{Dataset, DatasetOptions, Residency};
pub use declared::{Declared, declared};
pub use error::{Error, Location};
pub use inspect::{
    ColumnInspection, Described, Inspection, LeafColumn, described, inspect, leaf_columns, string_columns,
};
pub use io::{IoLog, IoRead};
pub use layout::{FileLayout, Layout};
pub use limits::PartOf;
pub use rows::{Rows, Value};
