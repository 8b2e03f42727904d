//! The filter selects the system calls that trap: a few instructions that the kernel runs at every call.

use std::io;

use crate::calls::{self, Shape};
use crate::enter;

/// A handler of `SIGSYS`.
pub type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Offsets in the kernel's `seccomp_data`: the number, the architecture, the address and an argument's lower half.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ADDRESS: u32 = 8;
const fn argument(index: u32) -> u32 {
    16 + 8 * index
}

#[cfg(target_arch = "x86_64")]
const THIS_ARCHITECTURE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const THIS_ARCHITECTURE: u32 = 0xC000_00B7;

/// The last descriptor of standard input, output and error, which do not trap.
const LAST_STANDARD: u32 = 2;

fn load(offset: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: offset }
}

fn jump(test: u32, value: u32, if_so: usize, if_not: usize) -> libc::sock_filter {
    let near = |distance: usize| u8::try_from(distance).expect("a filter of fewer than 256 instructions");
    libc::sock_filter { code: (libc::BPF_JMP | test | libc::BPF_K) as u16, jt: near(if_so), jf: near(if_not), k: value }
}

fn end(verdict: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: verdict }
}

/// The filter's instructions. Calls from [`enter()`], calls on standard streams, and mappings without a file pass.
fn program() -> Vec<libc::sock_filter> {
    let (allow, trap) = (end(libc::SECCOMP_RET_ALLOW), end(libc::SECCOMP_RET_TRAP));
    let address = enter::address();
    let mut program = vec![
        load(ARCHITECTURE),
        jump(libc::BPF_JEQ, THIS_ARCHITECTURE, 1, 0),
        allow,
        load(ADDRESS),
        jump(libc::BPF_JEQ, address as u32, 0, 3),
        load(ADDRESS + 4),
        jump(libc::BPF_JEQ, (address >> 32) as u32, 0, 1),
        allow,
        load(NUMBER),
    ];
    let calls: Vec<&calls::Call> = calls::all().collect();
    for (at, call) in calls.iter().enumerate() {
        // After the comparisons come: allow, the test of a file's descriptor, the test of a mapping's descriptor, and
        // trap.
        let allow_at = calls.len() - at - 1;
        let target = match call.shape {
            Shape::File | Shape::TwoFiles(_) => allow_at + 1,
            Shape::Read | Shape::Write | Shape::ReadVector | Shape::WriteVector => allow_at + 1,
            Shape::Map => allow_at + 3,
            Shape::Path | Shape::At | Shape::TextAt | Shape::TwoPaths | Shape::TwoAt | Shape::Address => allow_at + 5,
        };
        program.push(jump(libc::BPF_JEQ, u32::try_from(call.number).expect("a small number"), target, 0));
    }
    program.extend([
        allow,
        load(argument(0)),
        jump(libc::BPF_JGT, LAST_STANDARD, 2, 3),
        load(argument(4)),
        jump(libc::BPF_JEQ, u32::MAX, 1, 0),
        trap,
        allow,
    ]);
    program
}

/// Makes `handler` answer every call that touches a file, in this thread and all threads that it starts.
pub fn install(handler: Handler) -> io::Result<()> {
    let program = program();
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).expect("a short filter"),
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: zeroes are a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    // Another signal's handler may touch files while this handler runs.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_RESTART;
    // SAFETY: the handler exists as long as the process; the filter is only read during the call.
    let is_done = unsafe {
        libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) == 0
            && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
    };
    if is_done { Ok(()) } else { Err(io::Error::last_os_error()) }
}
