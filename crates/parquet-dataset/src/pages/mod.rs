//! The pages of a column chunk: their places, their bytes and their values.
//!
//! | module | |
//! | --- | --- |
//! | `header` | page headers and offset indexes, as the file declares them |
//! | `entry` | where a page lies |
//! | `digests` | the bytes of pages at their first read |
//! | `map` | all pages of a chunk |
//! | `find` | how a map is made |
//! | `file_range`, `snappy`, `bytes` | a page's bytes: from the file, decompressed, as a bounded cursor |
//! | `runs`, `delta` | encodings of levels, indexes and lengths |
//! | `dictionary`, `rows` | the values |
//! | `list_cursor` | the values of lists |

pub(crate) mod bytes;
pub(crate) mod delta;
pub(crate) mod dictionary;
pub(crate) mod digests;
pub(crate) mod entry;
mod file_range;
mod find;
pub(crate) mod header;
pub(crate) mod list_cursor;
pub(crate) mod map;
pub(crate) mod rows;
pub(crate) mod runs;
pub(crate) mod snappy;
