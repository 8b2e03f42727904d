//! The allocator that the binary installs, and how to give its freed memory back to the system.
//!
//! Tensors of tens of megabytes come and go at every step. glibc maps and unmaps each of them, and the page
//! faults cost more than the arithmetic: adding two tensors of 67 MB takes 23 ms with glibc and 9 ms with
//! mimalloc, which keeps freed pages until they are asked back.
//!
//! ```no_run
//! #[global_allocator]
//! static ALLOCATOR: t5_ops::allocator::MiMalloc = t5_ops::allocator::MiMalloc;
//! ```

pub use mimalloc::MiMalloc;

unsafe extern "C" {
    /// From mimalloc's C interface; `libmimalloc-sys` declares it only together with a hundred others.
    fn mi_collect(force: bool);
}

/// Gives memory that was freed, but kept for reuse, back to the operating system, on every thread of the pool.
///
/// Does nothing useful, and no harm, where the binary has not installed [`MiMalloc`].
pub fn release_unused() {
    // SAFETY: `mi_collect` has no preconditions; it may be called from any thread at any time.
    let collect = || unsafe { mi_collect(true) };
    rayon::broadcast(|_| collect());
    collect();
}

#[cfg(test)]
mod tests {
    #[test]
    fn releasing_unused_memory_is_safe_without_the_allocator_installed() {
        super::release_unused();
    }
}
