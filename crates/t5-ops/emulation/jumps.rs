//! Jumps in the place of instructions that were met once, to where they are done without a signal: a fiftieth of its time.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use crate::instructions;
use crate::registers::{General, Registers};

const JUMP: u8 = 0xE9;
const JUMP_BYTES: usize = 5;
const BREAKPOINT: u8 = 0xCC;

/// Bytes for stubs, and of one.
const ROOM: usize = 4 << 20;
const STUB: usize = 64;

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE` and its registration.
const SYNC_CORE: libc::c_int = 1 << 5;
const REGISTER_SYNC_CORE: libc::c_int = 1 << 6;

const ANY: libc::c_int = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;

// What a stub calls. On the stack, from the top: the stub's return address, which is that of its data (the address of the
// instruction, then its bytes), and the program's red zone of 128 bytes. Registers are saved in the order of `General`, and
// vectors beside them, all in parts that hold what an instruction here may read or write (mask 0xE7); the return leads
// to the instruction behind the last that was done.
std::arch::global_asm!(
    ".pushsection .text.emulate_here, \"ax\", @progbits",
    "emulate_here:",
    "pushfq",
    // Room for rip and rsp.
    "lea rsp, [rsp - 16]",
    "push rcx",
    "push rax",
    "push rdx",
    "push rbx",
    "push rbp",
    "push rsi",
    "push rdi",
    "push r15",
    "push r14",
    "push r13",
    "push r12",
    "push r11",
    "push r10",
    "push r9",
    "push r8",
    "lea rax, [rsp + 280]",
    "mov [rsp + 120], rax",
    "mov r12, [rsp + 144]",
    "mov rax, [r12]",
    "mov [rsp + 128], rax",
    "mov rbx, rsp",
    "sub rsp, 4096",
    "and rsp, -64",
    // The header of a state that was never saved is zeros.
    "cld",
    "lea rdi, [rsp + 512]",
    "mov ecx, 8",
    "xor eax, eax",
    "rep stosq",
    "xor edx, edx",
    "mov eax, 0xE7",
    "xsave64 [rsp]",
    "mov rdi, rbx",
    "mov rsi, rsp",
    "lea rdx, [r12 + 8]",
    "call {emulate_saved}",
    "xor edx, edx",
    "mov eax, 0xE7",
    "xrstor64 [rsp]",
    "mov rsp, rbx",
    "mov rax, [rsp + 128]",
    "mov [rsp + 144], rax",
    "pop r8",
    "pop r9",
    "pop r10",
    "pop r11",
    "pop r12",
    "pop r13",
    "pop r14",
    "pop r15",
    "pop rdi",
    "pop rsi",
    "pop rbp",
    "pop rbx",
    "pop rdx",
    "pop rax",
    "pop rcx",
    "lea rsp, [rsp + 16]",
    "popfq",
    "ret 128",
    ".popsection",
    emulate_saved = sym emulate_saved,
);

unsafe extern "C" {
    fn emulate_here();
}

extern "C" fn emulate_saved(general: &mut General, state: *mut u8, bytes: *const u8) {
    // SAFETY: the state was saved just now.
    let mut registers = unsafe { Registers::saved(general, state) };
    let is_known = instructions::emulate_from(bytes, &mut registers);
    assert!(is_known, "a jump stands for an instruction that was emulated");
    instructions::emulate_all(&mut registers);
}

/// Whether code can be changed here.
pub fn prepare() -> Result<(), String> {
    let failed = |what: &str| Err(format!("{what}: {}", std::io::Error::last_os_error()));
    // SAFETY: registers an intention.
    if unsafe { libc::syscall(libc::SYS_membarrier, REGISTER_SYNC_CORE, 0, 0) } != 0 {
        return failed("membarrier");
    }
    let page = prepare as *const () as usize & !0xFFF;
    // SAFETY: what follows runs on with its page writable.
    if unsafe { libc::mprotect(page as *mut libc::c_void, 0x1000, ANY) } != 0 {
        return failed("mprotect");
    }
    Ok(())
}

/// Whether a jump stands there; waits for one that is being put.
pub fn is_jump(at: *const u8) -> bool {
    loop {
        // SAFETY: code, which is read like any memory.
        match unsafe { byte(at as usize) }.load(Ordering::SeqCst) {
            BREAKPOINT => std::hint::spin_loop(),
            first => return first == JUMP,
        }
    }
}

/// Puts a jump in the place of the `length` bytes at `at`, an instruction that was emulated. It stays as it is where another
/// thread puts one at this moment, or there is no room.
pub fn put(at: *const u8, length: usize) {
    static BUSY: AtomicBool = AtomicBool::new(false);
    if length < JUMP_BYTES || BUSY.swap(true, Ordering::Acquire) {
        return;
    }
    if !is_jump(at)
        && let Some(stub) = stub(at, length)
    {
        let place = at as usize;
        let distance = (stub as i64 - (place + JUMP_BYTES) as i64) as i32;
        // SAFETY: the pages are writable, and nobody else writes there.
        unsafe { replace(place, distance.to_le_bytes()) };
    }
    BUSY.store(false, Ordering::Release);
}

/// # Safety
///
/// `address` is readable, and writable for who writes.
unsafe fn byte<'a>(address: usize) -> &'a AtomicU8 {
    // SAFETY: by the caller's promise; a byte has no alignment.
    unsafe { AtomicU8::from_ptr(address as *mut u8) }
}

/// Writes a jump. No thread ever meets half of it: one that comes by meanwhile finds a breakpoint, and waits there.
///
/// # Safety
///
/// There are five bytes of one instruction at `place`, in pages that can be written, and no other thread writes them.
unsafe fn replace(place: usize, distance: [u8; 4]) {
    let forget = || {
        // SAFETY: every thread forgets what it fetched of the code.
        let result = unsafe { libc::syscall(libc::SYS_membarrier, SYNC_CORE, 0, 0) };
        assert_eq!(result, 0, "membarrier");
    };
    // SAFETY: by the caller's promise.
    unsafe {
        byte(place).store(BREAKPOINT, Ordering::SeqCst);
        forget();
        for (i, value) in distance.into_iter().enumerate() {
            byte(place + 1 + i).store(value, Ordering::SeqCst);
        }
        forget();
        byte(place).store(JUMP, Ordering::SeqCst);
    }
}

/// Writes the stub of an instruction, and makes the instruction's pages writable. One thread at a time is here.
fn stub(at: *const u8, length: usize) -> Option<usize> {
    static START: AtomicUsize = AtomicUsize::new(0);
    static USED: AtomicUsize = AtomicUsize::new(0);
    let place = at as usize;
    if START.load(Ordering::Relaxed) == 0 {
        START.store(map_near(place)?, Ordering::Relaxed);
    }
    let used = USED.load(Ordering::Relaxed);
    let stub = START.load(Ordering::Relaxed) + used;
    i32::try_from(stub as i64 - place as i64).ok()?;
    if used + STUB > ROOM {
        return None;
    }
    let mut bytes = [0u8; STUB];
    // lea rsp, [rsp - 128]; call [rip + 29], which is at 40; data from 11 on.
    bytes[..11].copy_from_slice(&[0x48, 0x8D, 0x64, 0x24, 0x80, 0xFF, 0x15, 29, 0, 0, 0]);
    bytes[11..19].copy_from_slice(&place.to_le_bytes());
    bytes[40..48].copy_from_slice(&(emulate_here as *const () as usize).to_le_bytes());
    let pages = place & !0xFFF;
    // SAFETY: the instruction is `length` bytes long and stays; its pages stay what they were, and become writable; a stub
    // that is not yet used is nobody's.
    unsafe {
        bytes[19..][..length].copy_from_slice(std::slice::from_raw_parts(at, length));
        if libc::mprotect(pages as *mut libc::c_void, place + JUMP_BYTES - pages, ANY) != 0 {
            return None;
        }
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), stub as *mut u8, STUB);
    }
    USED.store(used + STUB, Ordering::Relaxed);
    Some(stub)
}

/// Maps [`ROOM`] bytes that a jump from `place` reaches.
fn map_near(place: usize) -> Option<usize> {
    const APART: usize = 1 << 20;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    (1..1000).map(|i| (place & !0xFFF) - ROOM - i * APART).find(|&start| {
        // SAFETY: takes nothing that is taken.
        let mapped = unsafe { libc::mmap(start as *mut libc::c_void, ROOM, ANY, flags, -1, 0) };
        mapped as usize == start
    })
}
