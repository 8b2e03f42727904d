//! The driver's own functions behind those that the program defines under the same names: `t5-ops` allocates a card's memory itself.
//!
//! The emulated driver is told of each allocated piece of memory, too. So it detects accesses outside of a piece, before its allocation or
//! after it is freed.

// The driver's functions have C's calling convention.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

use crate::libraries::of_driver;

/// `cuMemAllocAsync`: the place of the address, bytes, the stream.
pub type Allocate = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> c_int;
/// `cuMemFreeAsync`: the address, the stream.
pub type Free = unsafe extern "C" fn(u64, *mut c_void) -> c_int;

/// A function of the driver, looked up once: zero if there is none.
struct Function {
    name: &'static str,
    found: OnceLock<usize>,
}

impl Function {
    const fn new(name: &'static str) -> Self {
        Self { name, found: OnceLock::new() }
    }

    fn address(&self) -> *mut c_void {
        let found = *self.found.get_or_init(|| of_driver(self.name).expose_provenance());
        std::ptr::with_exposed_provenance_mut(found)
    }
}

/// The number of addresses for each byte of memory. After each piece on the emulated card are addresses that are never given out, so that
/// writes there are detected.
pub const SPREAD: u64 = if cfg!(emulated_card) { 2 } else { 1 };

/// Returns the driver's function, or `None` if the driver has none.
pub fn allocate() -> Option<Allocate> {
    static FUNCTION: Function = Function::new("cuMemAllocAsync");
    // SAFETY: null, or the driver's function of that name, which has this signature (cuda.h).
    unsafe { transmute::<*mut c_void, Option<Allocate>>(FUNCTION.address()) }
}

/// Returns the driver's function, or `None` if the driver has none.
pub fn free() -> Option<Free> {
    static FUNCTION: Function = Function::new("cuMemFreeAsync");
    // SAFETY: null, or the driver's function of that name, which has this signature (cuda.h).
    unsafe { transmute::<*mut c_void, Option<Free>>(FUNCTION.address()) }
}

/// Tells the emulated driver that a piece was allocated, in the order of a stream. An error refuses the allocation.
///
/// # Safety
/// The piece is memory of the card that nothing else uses.
pub unsafe fn begin_life(at: u64, bytes: usize, stream: *mut c_void) -> c_int {
    static FUNCTION: Function = Function::new("emulated_begin_life");
    type BeginLife = unsafe extern "C" fn(u64, usize, *mut c_void) -> c_int;
    // SAFETY: null, or the emulated driver's function of that name (`emulation/memory.cc`).
    let function = unsafe { transmute::<*mut c_void, Option<BeginLife>>(FUNCTION.address()) };
    // SAFETY: by the caller's promise.
    function.map_or(0, |function| unsafe { function(at, bytes, stream) })
}

/// Tells the emulated driver that a piece was freed, in the order of a stream.
///
/// # Safety
/// The piece was allocated.
pub unsafe fn end_life(at: u64, stream: *mut c_void) {
    static FUNCTION: Function = Function::new("emulated_end_life");
    type EndLife = unsafe extern "C" fn(u64, *mut c_void);
    // SAFETY: null, or the emulated driver's function of that name (`emulation/memory.cc`).
    if let Some(function) = unsafe { transmute::<*mut c_void, Option<EndLife>>(FUNCTION.address()) } {
        // SAFETY: by the caller's promise.
        unsafe { function(at, stream) };
    }
}
