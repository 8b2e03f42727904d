//! Tile registers and bf16 instructions on processors that have neither: what the tests of those paths run on elsewhere.
//!
//! A library to load before a program (`LD_PRELOAD`; `cargo xtask emulate` does it for the tests). It makes `cpuid` claim
//! AMX-TILE, AMX-BF16 and AVX512-BF16 ([`processor`]). Such an instruction then raises SIGILL, and is done in software on the
//! registers that the signal interrupted ([`instructions`], [`registers`]); afterwards a jump stands in its place, and it needs
//! no signal ([`jumps`]). Every thread has tile registers of its own.
//!
//! Sums are added in the order that the manual gives. Denormal operands count as zeros, as they do there; denormal sums stay, as they
//! do not. A wrong shape or configuration, which the processor would refuse, ends the program. Time says nothing.
//!
//! It needs x86-64 Linux, AVX-512 and a processor that can be told to refuse `cpuid`; elsewhere the program ends at once, and
//! says so.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1 chapters 13 and 18 (states, tiles), volume 2
//! (encodings, the instructions' operation); `arch_prctl(2)`, `seccomp(2)`, `membarrier(2)`.

#![allow(unsafe_code)]

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod instructions;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod jumps;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod processor;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod registers;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod signals;
