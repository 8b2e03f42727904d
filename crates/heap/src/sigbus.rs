//! Lost pages of a mapped file: the file was shortened, or its disk failed or is full. The system then sends SIGBUS, which by default ends
//! the process without a message.
//!
//! [`exit_on_sigbus`] installs a handler that names the file and exits. Invariants: it does only what a signal handler may do (atomics,
//! `poll`, `write`, `_exit`), allocates nothing and takes no lock. A fault at any other address goes to the previous handler.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Files that are watched at the same time without more memory. A run has one, or two while weights move; a model may have any number of
/// shards.
const FILES: usize = 16;

/// The most bytes of a file's name that are shown: the last ones of a longer name.
const NAME_BYTES: usize = 1024;

/// A mapping, and the name of its file.
struct Slot {
    is_taken: AtomicBool,
    /// The first address of the mapping, or 0 while the slot is unused or not ready.
    start: AtomicUsize,
    end: AtomicUsize,
    name_bytes: AtomicUsize,
    name: UnsafeCell<[u8; NAME_BYTES]>,
    /// The next slot of those beyond the first ones. It does not change once others see the slot.
    next: AtomicPtr<Slot>,
}

// SAFETY: the thread that has taken the slot writes the name, while `start` is 0. The name is read for an address in a live mapping, so the
// slot is neither given back nor taken again.
unsafe impl Sync for Slot {}

static SLOTS: [Slot; FILES] = [const { Slot::new() }; FILES];

/// The newest slot beyond the first ones. Such a slot is never freed, because a handler may be reading it.
static MORE: AtomicPtr<Slot> = AtomicPtr::new(null_mut());

/// All slots, taken or not.
fn slots() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: a slot in the list lives as long as the process, and others only share it.
    let slot = |place: &AtomicPtr<Slot>| unsafe { place.load(Ordering::Acquire).as_ref::<'static>() };
    SLOTS.iter().chain(std::iter::successors(slot(&MORE), move |here: &&'static Slot| slot(&here.next)))
}

/// Makes one more slot, which is taken.
fn add_slot() -> &'static Slot {
    let added: &'static mut Slot = Box::leak(Box::new(Slot::new()));
    *added.is_taken.get_mut() = true;
    let mut newest = MORE.load(Ordering::Acquire);
    loop {
        *added.next.get_mut() = newest;
        match MORE.compare_exchange(newest, added, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return added,
            Err(other) => newest = other,
        }
    }
}

/// Message and exit code at the end of the program.
#[cfg_attr(not(unix), expect(dead_code, reason = "no signal says that a page is lost"))]
struct ExitMessage {
    exit: u8,
    hint: &'static str,
    #[cfg(unix)]
    before: libc::sigaction,
}

static EXIT_MESSAGE: OnceLock<ExitMessage> = OnceLock::new();

/// A mapping whose loss is reported for as long as this lives.
#[derive(Debug)]
pub(crate) struct Watch(&'static Slot);

/// Watches a mapping of the file that messages call `name`.
///
/// The mapping must outlive the result.
pub(crate) fn watch(mapping: Range<usize>, name: &Path) -> Watch {
    let is_free =
        |slot: &&'static Slot| slot.is_taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let slot = slots().find(is_free).unwrap_or_else(add_slot);
    let name = name.as_os_str().as_encoded_bytes();
    let name = &name[name.len().saturating_sub(NAME_BYTES)..];
    // SAFETY: this thread has taken the slot, and no handler reads the slot's name before `start` is set.
    unsafe { (&mut *slot.name.get())[..name.len()].copy_from_slice(name) };
    slot.name_bytes.store(name.len(), Ordering::Relaxed);
    slot.end.store(mapping.end, Ordering::Relaxed);
    slot.start.store(mapping.start, Ordering::Release);
    Watch(slot)
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
        self.0.is_taken.store(false, Ordering::Release);
    }
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            is_taken: AtomicBool::new(false),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            name_bytes: AtomicUsize::new(0),
            name: UnsafeCell::new([0; NAME_BYTES]),
            next: AtomicPtr::new(null_mut()),
        }
    }

    #[cfg_attr(not(unix), allow(dead_code, reason = "no signal asks"))]
    fn holds(&self, address: usize) -> bool {
        let start = self.start.load(Ordering::Acquire);
        start != 0 && (start..self.end.load(Ordering::Relaxed)).contains(&address)
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed))
    }
}

/// Has a lost page of a [`FileMemory`](crate::FileMemory) end the process with this exit code from here on, with a message on standard
/// error that names the file, and the hint. Call this once, first in `main`. Does nothing on systems without such signals.
pub fn exit_on_sigbus(exit: u8, hint: &'static str) {
    #[cfg(unix)]
    system::install(exit, hint);
    #[cfg(not(unix))]
    let _ = EXIT_MESSAGE.set(ExitMessage { exit, hint });
}

#[cfg(unix)]
mod system {
    use std::ffi::{c_int, c_void};
    use std::mem::zeroed;
    use std::ptr::{null, null_mut};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{EXIT_MESSAGE, ExitMessage, NAME_BYTES, Slot, slots};

    pub(crate) fn install(exit: u8, hint: &'static str) {
        // SAFETY: zeros are a valid `sigaction`; without a new action the call only returns the current one.
        let before = unsafe {
            let mut before: libc::sigaction = zeroed();
            libc::sigaction(libc::SIGBUS, null(), &raw mut before);
            before
        };
        if EXIT_MESSAGE.set(ExitMessage { exit, hint, before }).is_err() {
            return;
        }
        // On Linux the handler runs on the interrupted stack. Threads of the standard library have a stack for signals, but with tile
        // registers a signal's frame alone fills it. There a stack overflow is another signal; on other systems it may be this one.
        let stack = if cfg!(target_os = "linux") { 0 } else { libc::SA_ONSTACK };
        // SAFETY: zeros are a valid `sigaction`. The handler has the signature that SA_SIGINFO asks for, and does only what
        // a handler may do.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | stack;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const action, null_mut());
        }
    }

    extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the system passes a pointer to the signal's data.
        let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
        // A signal from another process has a code of at most zero and no address.
        let lost = if code > 0 { slots().find(|slot| slot.holds(address)) } else { None };
        match (lost, EXIT_MESSAGE.get()) {
            (Some(slot), Some(words)) => end(slot, words),
            (None, Some(words)) => call_previous_handler(&words.before, signal, info, context),
            (_, None) => {}
        }
    }

    /// Writes the message that names the file, and ends the process.
    fn end(slot: &Slot, words: &ExitMessage) -> ! {
        static IS_ENDING: AtomicBool = AtomicBool::new(false);
        // Several threads may meet lost pages at the same moment; only one writes.
        if !IS_ENDING.swap(true, Ordering::AcqRel) {
            let mut text = Text { bytes: [0; 2 * NAME_BYTES], end: 0 };
            // SAFETY: the lost page belongs to a mapping that still exists, and the slot of such a mapping does not change.
            let name = unsafe { &(&*slot.name.get())[..slot.name_bytes.load(Ordering::Relaxed)] };
            text.add(b"\nerror: ");
            text.add(name);
            text.add(b": this file lost what was in it: it was shortened, or its disk failed or is full\nhint: ");
            text.add(words.hint.as_bytes());
            text.add(b"\n");
            text.write();
            // SAFETY: ends the process at once, and calls nothing that a handler may not call.
            unsafe { libc::_exit(c_int::from(words.exit)) }
        }
        loop {
            // SAFETY: waits for a signal, or until the other thread ends the process.
            unsafe { libc::pause() };
        }
    }

    /// Handles the signal as if this handler did not exist.
    fn call_previous_handler(
        before: &libc::sigaction,
        signal: c_int,
        info: *mut libc::siginfo_t,
        context: *mut c_void,
    ) {
        type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
        match before.sa_sigaction {
            libc::SIG_IGN | libc::SIG_DFL => {
                // SAFETY: the default action takes this handler's place. The fault, or the signal sent again, then meets it.
                unsafe {
                    let mut default: libc::sigaction = zeroed();
                    default.sa_sigaction = libc::SIG_DFL;
                    libc::sigaction(signal, &raw const default, null_mut());
                    libc::raise(signal);
                }
            }
            // SAFETY: it was set as a handler, and gets a handler's arguments. A handler without SA_SIGINFO ignores the additional
            // arguments: they are in registers or on the stack above its frame.
            handler => unsafe { std::mem::transmute::<usize, Handler>(handler)(signal, info, context) },
        }
    }

    /// A message on the stack. Text that does not fit is dropped.
    struct Text {
        bytes: [u8; 2 * NAME_BYTES],
        end: usize,
    }

    impl Text {
        fn add(&mut self, more: &[u8]) {
            for (to, from) in self.bytes[self.end..].iter_mut().zip(more) {
                *to = *from;
                self.end += 1;
            }
        }

        /// Writes the message to standard error, unless it accepts nothing within a second.
        fn write(&self) {
            let mut standard_error = libc::pollfd { fd: 2, events: libc::POLLOUT, revents: 0 };
            // SAFETY: one descriptor, which lives during the call.
            if unsafe { libc::poll(&raw mut standard_error, 1, 1000) } == 1 {
                // SAFETY: the first `end` bytes are set. An error could not be reported any more.
                let _ = unsafe { libc::write(2, self.bytes.as_ptr().cast(), self.end) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_known_while_its_mapping_is_watched() {
        let holds = |address| slots().filter(|slot| slot.holds(address)).count();
        // No process has these addresses.
        let (start, end) = (usize::MAX - 4096, usize::MAX - 8);
        let watch = watch(start..end, Path::new("file"));
        assert_eq!([start - 1, start, end - 1, end].map(holds), [0, 1, 1, 0]);
        assert_eq!(holds(0), 0);
        drop(watch);
        assert_eq!(holds(start), 0);
    }

    #[test]
    fn any_number_of_files_is_watched_and_slots_are_used_again() {
        let long = "long/".repeat(1000);
        let holds = |address: usize| slots().filter(|slot| slot.holds(address)).count();
        let place = usize::MAX - 65_536;
        for _ in 0..3 {
            let watches: Vec<_> =
                (0..10 * FILES).map(|file| watch(place + file * 8..place + file * 8 + 8, Path::new(&long))).collect();
            assert!((0..10 * FILES).all(|file| holds(place + file * 8 + 7) == 1));
            drop(watches);
            assert_eq!(holds(place), 0);
        }
        // Other tests of this process watch files, too.
        assert!(slots().count() < 12 * FILES, "{}", slots().count());
    }
}
