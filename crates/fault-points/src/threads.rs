//! Threads that cannot start. A thread's start is not a file operation, and cannot trap: the new thread would begin inside
//! the handler. So this library has its own `pthread_create`, which the loader finds before the C library's.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of threads requested so far.
static ASKED: AtomicU64 = AtomicU64::new(0);

type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;

/// Starts a thread with the C library's function. Fails with EAGAIN for every thread beyond the settings' limit.
///
/// # Safety
///
/// The same as for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    let most = crate::PROGRAM.get().map_or(u64::MAX, |program| program.settings.threads);
    if ASKED.fetch_add(1, Ordering::Relaxed) >= most {
        return libc::EAGAIN;
    }
    let Some(create) = of_the_c_library() else { return libc::ENOSYS };
    // SAFETY: the arguments are those of a caller that keeps the C library's contract.
    unsafe { create(thread, attributes, start, argument) }
}

/// The next `pthread_create` in loading order.
fn of_the_c_library() -> Option<Create> {
    static FOUND: OnceLock<Option<Create>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: the name ends in a zero byte, and a function of this name has this type (POSIX).
        unsafe {
            let found = libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr());
            std::mem::transmute::<*mut c_void, Option<Create>>(found)
        }
    })
}
