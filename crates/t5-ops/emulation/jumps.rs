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
/// The longest instruction there is.
const LONGEST: usize = 15;

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
    "lea rsp, [rsp - 136]",
    "mov [rsp], r8",
    "mov [rsp + 8], r9",
    "mov [rsp + 16], r10",
    "mov [rsp + 24], r11",
    "mov [rsp + 32], r12",
    "mov [rsp + 40], r13",
    "mov [rsp + 48], r14",
    "mov [rsp + 56], r15",
    "mov [rsp + 64], rdi",
    "mov [rsp + 72], rsi",
    "mov [rsp + 80], rbp",
    "mov [rsp + 88], rbx",
    "mov [rsp + 96], rdx",
    "mov [rsp + 104], rax",
    "mov [rsp + 112], rcx",
    "lea rax, [rsp + 280]",
    "mov [rsp + 120], rax",
    "mov rdx, [rsp + 144]",
    "mov rax, [rdx]",
    "mov [rsp + 128], rax",
    "add rdx, 8",
    "cld",
    "mov rdi, rsp",
    "mov rbx, rsp",
    "sub rsp, 4096",
    "and rsp, -64",
    "mov rsi, rsp",
    // The header of a state that was never saved is zeros.
    "xor eax, eax",
    "mov [rsp + 512], rax",
    "mov [rsp + 520], rax",
    "mov [rsp + 528], rax",
    "mov [rsp + 536], rax",
    "mov [rsp + 544], rax",
    "mov [rsp + 552], rax",
    "mov [rsp + 560], rax",
    "mov [rsp + 568], rax",
    "mov r12, rdx",
    "xor edx, edx",
    "mov eax, 0xE7",
    "xsave64 [rsp]",
    "mov rdx, r12",
    "call {emulate_saved}",
    "xor edx, edx",
    "mov eax, 0xE7",
    "xrstor64 [rsp]",
    "mov rsp, rbx",
    "mov rax, [rsp + 128]",
    "mov [rsp + 144], rax",
    "mov r8, [rsp]",
    "mov r9, [rsp + 8]",
    "mov r10, [rsp + 16]",
    "mov r11, [rsp + 24]",
    "mov r12, [rsp + 32]",
    "mov r13, [rsp + 40]",
    "mov r14, [rsp + 48]",
    "mov r15, [rsp + 56]",
    "mov rdi, [rsp + 64]",
    "mov rsi, [rsp + 72]",
    "mov rbp, [rsp + 80]",
    "mov rbx, [rsp + 88]",
    "mov rdx, [rsp + 96]",
    "mov rax, [rsp + 104]",
    "mov rcx, [rsp + 112]",
    "lea rsp, [rsp + 136]",
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
        std::ptr::copy_nonoverlapping(at, bytes[19..].as_mut_ptr(), length.min(LONGEST));
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
