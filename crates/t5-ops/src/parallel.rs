//! Cutting work into parts for the threads.
//!
//! Where partial results are added up, the parts depend on the sizes only and are added in order, so no result depends on the number of
//! threads or on timing. Parts that write elements of their own may depend on the number of threads.

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use rayon::prelude::*;

/// Below this many elements a kernel runs on the calling thread: waking others costs more.
const SERIAL_ELEMENTS: usize = 16 * 1024;
/// The most parts that rows are cut into where the parts' sums are added up: enough for this many threads, and few enough that adding them
/// up costs nothing.
const SUMMED_PARTS: usize = 16;

/// The number of threads that operations run on: `RAYON_NUM_THREADS`, or one for each core.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Makes the calling thread one of the threads that operations run on, if no operation was called before. Their number is
/// `RAYON_NUM_THREADS`, or else `usual`, or one for each processor.
///
/// A thread outside of the pool hands every operation over, sleeps until it is done, and is woken: two waits for the scheduler in each of
/// the thousand operations of a step.
///
/// If the system gives fewer threads, operations run on those.
pub fn join_threads(usual: Option<usize>) -> PoolThreads {
    let threads = usual.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let asked = std::env::var("RAYON_NUM_THREADS").ok().and_then(|count| count.parse().ok()).filter(|&count| count > 0);
    let wanted = asked.unwrap_or(threads);
    // If the threads of a pool cannot start, the caller is left in a pool without threads, where every operation waits for ever. So the
    // pool gets threads that run already: each waits for its work in the pool.
    let mut seats: Vec<Sender<rayon::ThreadBuilder>> = (1..wanted).map_while(|_| spawn_pool_thread().ok()).collect();
    let given = 1 + seats.len();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(given).use_current_thread().spawn_handler(|thread| {
        let seat = seats.pop().ok_or(ErrorKind::WouldBlock)?;
        seat.send(thread).map_err(|_| ErrorKind::BrokenPipe.into())
    });
    // An error says that the pool was already built: operations then run as before, and these threads end.
    let _ = pool.build_global();
    PoolThreads { wanted, given }
}

/// The threads of [`join_threads`], including the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolThreads {
    /// The number of threads that was asked for.
    pub wanted: usize,
    /// The number of threads that there are.
    pub given: usize,
}

/// Starts a thread that waits for its work in a pool, and ends if none arrives.
fn spawn_pool_thread() -> std::io::Result<Sender<rayon::ThreadBuilder>> {
    let (seat, work) = channel::<rayon::ThreadBuilder>();
    std::thread::Builder::new().spawn(move || work.recv().map(rayon::ThreadBuilder::run))?;
    Ok(seat)
}

/// Calls `f` on new threads, as many as [`threads`], which have ended when it returns. The buffers that operations leave with their threads
/// are freed with them. If the system gives no more threads, `f` runs on the existing ones.
pub fn with_temporary_threads<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let mut started = Vec::new();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads()).spawn_handler(|thread| {
        started.push(std::thread::Builder::new().spawn(|| thread.run())?);
        Ok(())
    });
    let Ok(pool) = pool.build() else { return f() };
    let result = pool.install(f);
    drop(pool);
    started.into_iter().for_each(|thread| drop(thread.join()));
    result
}

/// Returns how many of `rows` rows of `width` elements make a part, where each part writes elements of its own.
pub(crate) fn rows_per_part(rows: usize, width: usize) -> usize {
    let threads = rayon::current_num_threads();
    if threads == 1 || rows * width <= SERIAL_ELEMENTS {
        return rows.max(1);
    }
    // A few parts for each thread even out other work on the machine.
    rows.div_ceil(4 * threads).max(1)
}

/// Returns how many of `rows` rows of `width` elements make a part, where the parts' sums are added up: the same for every number of
/// threads.
pub(crate) fn rows_per_sum(rows: usize, width: usize) -> usize {
    let parts = if rows * width <= SERIAL_ELEMENTS { 1 } else { SUMMED_PARTS };
    rows.div_ceil(parts).max(1)
}

/// Calls `f` with the number of each part, on any thread of the pool.
pub fn for_each_part(parts: usize, f: impl Fn(usize) + Sync + Send) {
    if parts <= 1 || rayon::current_num_threads() == 1 {
        (0..parts).for_each(f);
    } else {
        // One part a task: parts are few and large.
        (0..parts).into_par_iter().with_max_len(1).for_each(f);
    }
}

/// As [`for_each_part`], with a scratch value that `init` makes for each run of parts.
pub(crate) fn for_each_part_with<S>(
    parts: usize,
    init: impl Fn() -> S + Sync + Send,
    f: impl Fn(&mut S, usize) + Sync + Send,
) {
    if parts <= 1 || rayon::current_num_threads() == 1 {
        let mut scratch = init();
        (0..parts).for_each(|part| f(&mut scratch, part));
    } else {
        (0..parts).into_par_iter().for_each_init(init, f);
    }
}

/// Calls `f` with the number of each part, on at most as many threads as there are workers. Each call has a worker to itself. Which worker
/// depends on timing, so results must not depend on it.
pub(crate) fn for_each_part_by<W: Send>(workers: &mut [W], parts: usize, f: impl Fn(&mut W, usize) + Sync + Send) {
    let next = AtomicUsize::new(0);
    let (count, workers) = (workers.len().min(parts), Shared::new(workers));
    assert!(count > 0 || parts == 0, "parts need a worker");
    for_each_part(count, |number| {
        // SAFETY: each worker belongs to one part of this loop.
        let worker = unsafe { &mut workers.slice(number, 1)[0] };
        loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                break;
            }
            f(worker, part);
        }
    });
}

/// Cuts `rows` rows of `width` elements into parts and calls `f` with the range of rows of each.
pub(crate) fn for_each_rows(rows: usize, width: usize, f: impl Fn(Range<usize>) + Sync + Send) {
    let part = rows_per_part(rows, width);
    for_each_part(rows.div_ceil(part), |p| f(p * part..rows.min((p + 1) * part)));
}

/// A buffer that several threads write, each its own elements.
pub(crate) struct Shared<T> {
    data: *mut T,
    len: usize,
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: the accessors are unsafe, and their callers promise that no two threads reach one element at once.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn new(data: &mut [T]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len() }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The elements `[start, start + len)`.
    ///
    /// # Safety
    ///
    /// The buffer outlives the result, and until the result is gone nothing else reaches these elements.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice<'a>(&self, start: usize, len: usize) -> &'a mut [T] {
        let is_inside = start.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "part {start}+{len} of a buffer of {}", self.len);
        // SAFETY: in bounds by the assertion, alone by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }

    /// A pointer to element `start`, for strided writes.
    pub(crate) fn pointer(&self, start: usize) -> *mut T {
        assert!(start <= self.len, "element {start} of a buffer of {}", self.len);
        self.data.wrapping_add(start)
    }
}
