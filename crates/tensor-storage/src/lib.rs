//! Where the values of tensors lie: as bytes in memory, in files, or nowhere for a while.
//!
//! Nothing here computes.

// Unsafe code is allowed here: elements are seen as bytes, and memory that nothing has written as elements.
#![allow(unsafe_code)]

mod bytes;
mod elements;
mod files;
pub mod unallocated;

pub use bytes::{bytes, bytes_mut, change_bytes, from_bytes, with_bytes};
pub use elements::{assume_filled, elements, overwrite, set_unspecified, share_storage};
pub use files::{
    WritePolicy, can_read_in_place, copy_from_file, copy_into_file, is_in_file, overwrite_in_file, overwrite_in_place,
    page_in, page_out, read_ahead, tensor_in_file, with_extent,
};
