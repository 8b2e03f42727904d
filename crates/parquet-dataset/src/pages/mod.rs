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
//! | `dictionary`, `dictionary_source`, `streamed_dictionary`, `rows` | the values |
//! | `chunk_cursor` | the rows of a chunk in order |

pub(crate) mod bytes;
pub(crate) mod chunk_cursor;
pub(crate) mod delta;
pub(crate) mod dictionary;
pub(crate) mod dictionary_source;
pub(crate) mod digests;
pub(crate) mod entry;
mod file_range;
mod find;
pub(crate) mod header;
pub(crate) mod map;
pub(crate) mod rows;
pub(crate) mod runs;
pub(crate) mod snappy;
mod streamed_dictionary;
