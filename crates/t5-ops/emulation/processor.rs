//! What a program asks about its processor, and is told.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;

use crate::registers::Registers;

/// Leaf 7, edx.
const AMX_BF16: u32 = 1 << 22;
const AMX_TILE: u32 = 1 << 24;
/// Leaf 7, subleaf 1, eax.
const AVX512_BF16: u32 = 1 << 5;

const CPUID: [u8; 2] = [0x0F, 0xA2];
const ARCH_PRCTL: u32 = 158;
const ARCH_SET_CPUID: u32 = 0x1012;
const ARCH_REQ_XCOMP_PERM: u32 = 0x1023;

/// From now on `cpuid` and the request for tile registers raise signals.
pub fn pretend() -> Result<(), String> {
    if !is_x86_feature_detected!("avx512bw") {
        return Err("this processor has no AVX-512".to_string());
    }
    if !allow_cpuid(false) {
        return Err("this processor cannot be told to refuse cpuid".to_string());
    }
    let load = |offset| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, offset);
    let unless_skip = |value, steps| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, steps, value);
    let give = |what| step(libc::BPF_RET | libc::BPF_K, 0, what);
    // Offsets in `struct seccomp_data`: the number of the call, the lower half of its first argument.
    let mut filter = [
        load(0),
        unless_skip(ARCH_PRCTL, 3),
        load(16),
        unless_skip(ARCH_REQ_XCOMP_PERM, 1),
        give(libc::SECCOMP_RET_TRAP),
        give(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: a whole program, which the kernel checks and copies.
    let is_set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if is_set { Ok(()) } else { Err(format!("seccomp: {}", std::io::Error::last_os_error())) }
}

/// A step of a filter; where it compares, `skipped` follow if it finds another value.
fn step(code: u32, skipped: u8, value: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: skipped, k: value }
}

/// Whether this thread, and those it starts, may use `cpuid`; false where that cannot be said.
fn allow_cpuid(allowed: bool) -> bool {
    let result: i64;
    // SAFETY: the call reads no memory. The C library's `syscall` would write errno, which a handler must not.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") i64::from(ARCH_PRCTL) => result,
            in("rdi") u64::from(ARCH_SET_CPUID),
            in("rsi") u64::from(allowed),
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Does a `cpuid` that was refused; false where it was something else.
pub fn answer(registers: &mut Registers) -> bool {
    // SAFETY: an instruction that was begun, and a second byte only where the first is one of two.
    let is_cpuid = unsafe { *registers.code() == CPUID[0] && *registers.code().add(1) == CPUID[1] };
    if !is_cpuid {
        return false;
    }
    // rax, rcx.
    let [leaf, subleaf] = [0, 1].map(|register| registers.general(register) as u32);
    allow_cpuid(true);
    let mut told = __cpuid_count(leaf, subleaf);
    allow_cpuid(false);
    match (leaf, subleaf) {
        (7, 0) => {
            told.eax = told.eax.max(1);
            told.edx |= AMX_BF16 | AMX_TILE;
        }
        (7, 1) => told.eax |= AVX512_BF16,
        _ => {}
    }
    // rax, rcx, rdx, rbx.
    for (register, value) in [told.eax, told.ecx, told.edx, told.ebx].into_iter().enumerate() {
        registers.set_general(register, value.into());
    }
    registers.move_by(CPUID.len() as i64);
    true
}
