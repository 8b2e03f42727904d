//! Runs a kernel on the host, emulating a card.

// The kernels are C++: they take pointers.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

/// The order of threads and blocks that may run in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The first warp and the first lane.
    FirstFirst,
    /// The last warp and the last lane.
    LastFirst,
    /// A random order, the same each time.
    Random,
}

/// Behaviour that a card leaves open: the order, and when asynchronous copies arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The order of warps, lanes and blocks.
    pub order: Order,
    /// Whether copies into shared memory arrive when they are issued. Otherwise they arrive only when they are waited for.
    pub copies_arrive_at_once: bool,
}

impl Schedule {
    /// Returns every schedule: results that differ between two of them are a race.
    pub fn all() -> impl Iterator<Item = Schedule> {
        let orders = [Order::FirstFirst, Order::LastFirst, Order::Random];
        orders
            .into_iter()
            .flat_map(|order| [false, true].map(|copies_arrive_at_once| Schedule { order, copies_arrive_at_once }))
    }
}

/// The configuration of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of shared memory.
    pub shared_bytes: usize,
}

/// An argument of a kernel: a pointer, a number, or a struct with C's layout.
#[derive(Clone, Debug)]
pub struct Argument(Vec<u8>);

impl Argument {
    /// The bytes of a value.
    pub fn from_value<T: Copy>(value: T) -> Self {
        let mut bytes = vec![0u8; size_of::<T>()];
        // SAFETY: both sides have the bytes of the value.
        unsafe { std::ptr::copy_nonoverlapping((&raw const value).cast(), bytes.as_mut_ptr(), bytes.len()) };
        Argument(bytes)
    }
}

unsafe extern "C" {
    fn cuda_emulation_launch(
        name: *const c_char,
        grid: *const u32,
        threads: u32,
        shared_bytes: usize,
        arguments: *mut *mut c_void,
        sizes: *const usize,
        count: usize,
        order: c_int,
        copies_arrive_at_once: c_int,
        problem: *mut c_char,
        room: usize,
    ) -> c_int;
}

/// Runs the kernel of this name to its end.
///
/// # Errors
/// A name or arguments that no kernel has. Behaviour that a card leaves undefined: barriers and collective operations that some threads
/// miss, and misaligned addresses.
///
/// # Safety
/// Pointers among the arguments point to the memory that the kernel reads and writes with these sizes.
pub unsafe fn launch(name: &str, launch: Launch, arguments: &[Argument], schedule: Schedule) -> Result<(), String> {
    // Fibres and shared memory belong to the process.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let sizes: Vec<usize> = arguments.iter().map(|argument| argument.0.len()).collect();
    // Structs are read in place, so they must be aligned.
    let mut aligned: Vec<Vec<u128>> = sizes.iter().map(|size| vec![0; size.div_ceil(size_of::<u128>())]).collect();
    for (argument, to) in arguments.iter().zip(&mut aligned) {
        // SAFETY: there is room for these bytes.
        unsafe { std::ptr::copy_nonoverlapping(argument.0.as_ptr(), to.as_mut_ptr().cast(), argument.0.len()) };
    }
    let mut pointers: Vec<*mut c_void> = aligned.iter_mut().map(|bytes| bytes.as_mut_ptr().cast()).collect();
    let text = CString::new(name).map_err(|error| error.to_string())?;
    let mut problem = [0 as c_char; 256];
    let order = match schedule.order {
        Order::FirstFirst => 0,
        Order::LastFirst => 1,
        Order::Random => 2,
    };
    // SAFETY: as many arguments as sizes, each in memory of its own; pointers are valid by the caller's promise.
    let result = unsafe {
        cuda_emulation_launch(
            text.as_ptr(),
            launch.grid.as_ptr(),
            launch.threads,
            launch.shared_bytes,
            pointers.as_mut_ptr(),
            sizes.as_ptr(),
            sizes.len(),
            order,
            c_int::from(schedule.copies_arrive_at_once),
            problem.as_mut_ptr(),
            problem.len(),
        )
    };
    if result == 0 {
        return Ok(());
    }
    // SAFETY: it ends with a zero within the array.
    let problem = unsafe { CStr::from_ptr(problem.as_ptr()) }.to_string_lossy();
    Err(format!("{name}: {problem}"))
}
