//! The driver's own functions behind those that the program defines under the same names: `t5-ops` allocates a card's memory itself.
//!
//! With a real driver they are the next functions of that name after the program's. The emulated driver is a part of the program, so its
//! functions have other names. It is told of each allocated piece of memory. So it detects accesses outside of a piece, before its
//! allocation or after it is freed.

// The driver's functions have C's calling convention.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

/// `cuMemAllocAsync`: the place of the address, bytes, the stream.
pub type Allocate = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> c_int;
/// `cuMemFreeAsync`: the address, the stream.
pub type Free = unsafe extern "C" fn(u64, *mut c_void) -> c_int;

pub use own::{SPREAD, allocate, begin_life, end_life, free};

#[cfg(not(emulated_card))]
mod own {
    use std::ffi::{CStr, c_char, c_int, c_void};
    use std::mem::transmute;
    use std::ptr::without_provenance_mut;
    use std::sync::OnceLock;

    use super::{Allocate, Free};

    /// The number of addresses for each byte of memory.
    pub const SPREAD: u64 = 1;

    unsafe extern "C" {
        fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    }

    /// Returns the function of that name in the libraries that were loaded after the program.
    fn next(name: &CStr) -> *mut c_void {
        // `RTLD_NEXT` of the C library.
        let behind = without_provenance_mut(usize::MAX);
        // SAFETY: a name that ends with zero.
        unsafe { dlsym(behind, name.as_ptr()) }
    }

    /// Returns the driver's function, or `None` if the driver has none.
    pub fn allocate() -> Option<Allocate> {
        static FOUND: OnceLock<Option<Allocate>> = OnceLock::new();
        // SAFETY: null, or the driver's function of that name, which has this signature (cuda.h).
        *FOUND.get_or_init(|| unsafe { transmute::<*mut c_void, Option<Allocate>>(next(c"cuMemAllocAsync")) })
    }

    /// Returns the driver's function, or `None` if the driver has none.
    pub fn free() -> Option<Free> {
        static FOUND: OnceLock<Option<Free>> = OnceLock::new();
        // SAFETY: null, or the driver's function of that name, which has this signature (cuda.h).
        *FOUND.get_or_init(|| unsafe { transmute::<*mut c_void, Option<Free>>(next(c"cuMemFreeAsync")) })
    }

    /// Tells the driver that a piece was allocated, in the order of a stream. An error refuses the allocation.
    ///
    /// # Safety
    /// The piece is memory of the card that nothing else uses.
    pub unsafe fn begin_life(_at: u64, _bytes: usize, _stream: *mut c_void) -> c_int {
        0
    }

    /// Tells the driver that a piece was freed, in the order of a stream.
    ///
    /// # Safety
    /// The piece was allocated.
    pub unsafe fn end_life(_at: u64, _stream: *mut c_void) {}
}

#[cfg(emulated_card)]
mod own {
    use std::ffi::{c_int, c_void};

    use super::{Allocate, Free};

    /// The number of addresses for each byte of memory: after each piece are addresses that are never given out, so that writes there are
    /// detected.
    pub const SPREAD: u64 = 2;

    unsafe extern "C" {
        fn emulated_cuMemAllocAsync(to: *mut u64, bytes: usize, stream: *mut c_void) -> c_int;
        fn emulated_cuMemFreeAsync(at: u64, stream: *mut c_void) -> c_int;
        fn emulated_begin_life(at: u64, bytes: usize, stream: *mut c_void) -> c_int;
        fn emulated_end_life(at: u64, stream: *mut c_void);
    }

    /// Returns the emulated driver's function.
    pub fn allocate() -> Option<Allocate> {
        Some(emulated_cuMemAllocAsync)
    }

    /// Returns the emulated driver's function.
    pub fn free() -> Option<Free> {
        Some(emulated_cuMemFreeAsync)
    }

    /// Tells the driver that a piece was allocated, in the order of a stream. An error refuses the allocation.
    ///
    /// # Safety
    /// The piece is memory of the card that nothing else uses.
    pub unsafe fn begin_life(at: u64, bytes: usize, stream: *mut c_void) -> c_int {
        // SAFETY: by the caller's promise.
        unsafe { emulated_begin_life(at, bytes, stream) }
    }

    /// Tells the driver that a piece was freed, in the order of a stream.
    ///
    /// # Safety
    /// The piece was allocated.
    pub unsafe fn end_life(at: u64, stream: *mut c_void) {
        // SAFETY: by the caller's promise.
        unsafe { emulated_end_life(at, stream) }
    }
}
