//! Where it starts: the program's signals, before the program.

use libc::{SA_NODEFER, SA_SIGINFO, c_int, c_void, siginfo_t, ucontext_t};

use crate::registers::Registers;
use crate::{instructions, jumps, processor};

/// The loader calls it before `main`.
// SAFETY: the section holds addresses of functions that take nothing.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    on(libc::SIGILL, unknown_instruction);
    on(libc::SIGTRAP, breakpoint);
    on(libc::SIGSEGV, refused_instruction);
    on(libc::SIGSYS, system_call);
    if let Err(what) = jumps::prepare().and_then(|()| processor::pretend()) {
        eprintln!("nothing is emulated here: {what}");
        std::process::exit(1);
    }
}

type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// On the stack that was interrupted: what the runtime sets apart for signals is too small for these registers.
fn on(signal: c_int, handler: Handler) {
    // SAFETY: zeros are an empty action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    // SAFETY: the handlers touch nothing but the registers, the program's code and lock-free state.
    let result = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    assert_eq!(result, 0, "sigaction");
}

/// A signal that is not about anything here happens again, and ends the program as it would have.
fn give_up(signal: c_int) {
    // SAFETY: restores the default action.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// # Safety
///
/// `context` is what a signal's handler was given.
unsafe fn interrupted<'a>(context: *mut c_void) -> Registers<'a> {
    // SAFETY: by the caller's promise; the handler alone has it.
    unsafe { Registers::of(&mut *context.cast::<ucontext_t>()) }
}

extern "C" fn unknown_instruction(signal: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: it is a signal's.
    let mut registers = unsafe { interrupted(context) };
    let at = registers.code();
    // Another thread may have put a jump there.
    if jumps::is_jump(at) {
        return;
    }
    if !instructions::emulate(&mut registers) {
        if !jumps::is_jump(at) {
            give_up(signal);
        }
        return;
    }
    let length = registers.code() as usize - at as usize;
    instructions::emulate_all(&mut registers);
    jumps::put(at, length);
}

/// A jump is being put there.
extern "C" fn breakpoint(signal: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: it is a signal's.
    let mut registers = unsafe { interrupted(context) };
    // It was done, and is one byte long.
    registers.move_by(-1);
    if !jumps::is_jump(registers.code()) {
        give_up(signal);
    }
}

extern "C" fn refused_instruction(signal: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: it is a signal's.
    let mut registers = unsafe { interrupted(context) };
    if !processor::answer(&mut registers) {
        give_up(signal);
    }
}

/// The request for tile registers, the only one that comes here: granted.
extern "C" fn system_call(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: it is a signal's.
    let mut registers = unsafe { interrupted(context) };
    registers.set_general(0, 0);
}
