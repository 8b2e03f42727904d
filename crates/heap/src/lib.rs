//! The memory that a process holds: an allocator whose peak can be predicted to the page, blocks that lie in files, and files
//! without a name.
//!
//! Small blocks come from mimalloc. A block of [`LARGE_BYTES`] or more, such as a tensor, is whole pages of its own. Freed pages stay
//! mapped and are handed out again, so that a training step faults in nothing. But live and freed pages together never exceed the most that
//! was ever live at one time. The resident set of large blocks is therefore the peak of their sizes and nothing else: no size classes, no
//! arenas, no delay before memory is returned to the system.
//!
//! Blocks that are seldom used may lie in a file instead ([`FileMemory`]).
//!
//! Why not an allocator off the shelf: with the same tensors, glibc's and mimalloc's peaks lie 6 to 26 %
//! above the live bytes or their page faults cost up to a third of a step. `docs/LOG.md` has the numbers.
//!
//! ```no_run
//! #[global_allocator]
//! static ALLOCATOR: heap::Allocator = heap::Allocator;
//! ```

// The second home of unsafe code: an allocator, mappings, and a handler of a signal.
#![allow(unsafe_code)]

mod ahead;
mod allocator;
mod anonymous_file;
mod count;
mod file_pages;
mod in_files;
mod large;
mod page;
mod pages;
mod ranges;
mod sigbus;
mod temporary_name;
mod waiting;

pub use allocator::{
    Allocator, disable_huge_pages, held, on_allocation_failure, release_small, release_unused, return_small_pages_soon,
};
pub use anonymous_file::{anonymous_file, shown_path};
pub use count::{Allocations, allocations, count_allocations, peak_live};
pub use file_pages::{disable_readahead, forget};
pub use in_files::{Extent, ExtentMut, FileMemory};
pub use page::LARGE_BYTES;
pub use pages::Held;
pub use ranges::FreeRanges;
pub use sigbus::exit_on_sigbus;
pub use temporary_name::{TEMPORARY_PREFIX, create_new, with_temporary_name};
pub use waiting::{count_waits, counting_wait, waited};
