//! The driver's own functions behind those that the program defines under the same names: `t5-ops` gives memory of a card out itself.
//!
//! With a real driver they are the next ones of that name behind the program's. The emulated one is in the program, so its own have
//! other names. It is told of each piece of memory that is given out, so that it sees accesses beyond one, and before its time or after it.

// The driver's functions are C's.
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

    /// How many addresses a byte of memory has.
    pub const SPREAD: u64 = 1;

    unsafe extern "C" {
        fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    }

    /// The function of that name in what was loaded behind the program.
    fn next(name: &CStr) -> *mut c_void {
        // `RTLD_NEXT` of the C library.
        let behind = without_provenance_mut(usize::MAX);
        // SAFETY: a name that ends with zero.
        unsafe { dlsym(behind, name.as_ptr()) }
    }

    /// `None`: the driver has no such function.
    pub fn allocate() -> Option<Allocate> {
        static FOUND: OnceLock<Option<Allocate>> = OnceLock::new();
        // SAFETY: nothing, or the driver's function of that name, whose signature this is (cuda.h).
        *FOUND.get_or_init(|| unsafe { transmute::<*mut c_void, Option<Allocate>>(next(c"cuMemAllocAsync")) })
    }

    /// `None`: the driver has no such function.
    pub fn free() -> Option<Free> {
        static FOUND: OnceLock<Option<Free>> = OnceLock::new();
        // SAFETY: nothing, or the driver's function of that name, whose signature this is (cuda.h).
        *FOUND.get_or_init(|| unsafe { transmute::<*mut c_void, Option<Free>>(next(c"cuMemFreeAsync")) })
    }

    /// Says that a piece was given out, in the order of a stream. An error refuses it.
    ///
    /// # Safety
    /// The piece is memory of the card that nobody else has.
    pub unsafe fn begin_life(_at: u64, _bytes: usize, _stream: *mut c_void) -> c_int {
        0
    }

    /// Says that a piece was given back, in the order of a stream.
    ///
    /// # Safety
    /// The piece was given out.
    pub unsafe fn end_life(_at: u64, _stream: *mut c_void) {}
}

#[cfg(emulated_card)]
mod own {
    use std::ffi::{c_int, c_void};

    use super::{Allocate, Free};

    /// How many addresses a byte of memory has: behind each piece are some that nobody is given, so that who writes there is seen.
    pub const SPREAD: u64 = 2;

    unsafe extern "C" {
        fn emulated_cuMemAllocAsync(to: *mut u64, bytes: usize, stream: *mut c_void) -> c_int;
        fn emulated_cuMemFreeAsync(at: u64, stream: *mut c_void) -> c_int;
        fn emulated_begin_life(at: u64, bytes: usize, stream: *mut c_void) -> c_int;
        fn emulated_end_life(at: u64, stream: *mut c_void);
    }

    /// The emulated driver's.
    pub fn allocate() -> Option<Allocate> {
        Some(emulated_cuMemAllocAsync)
    }

    /// The emulated driver's.
    pub fn free() -> Option<Free> {
        Some(emulated_cuMemFreeAsync)
    }

    /// Says that a piece was given out, in the order of a stream. An error refuses it.
    ///
    /// # Safety
    /// The piece is memory of the card that nobody else has.
    pub unsafe fn begin_life(at: u64, bytes: usize, stream: *mut c_void) -> c_int {
        // SAFETY: as here.
        unsafe { emulated_begin_life(at, bytes, stream) }
    }

    /// Says that a piece was given back, in the order of a stream.
    ///
    /// # Safety
    /// The piece was given out.
    pub unsafe fn end_life(at: u64, stream: *mut c_void) {
        // SAFETY: as here.
        unsafe { emulated_end_life(at, stream) }
    }
}
