//! The registers of the program where it was interrupted, and the tile registers of each thread.

use std::arch::x86_64::__cpuid_count;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::ucontext_t;

/// General registers and the instruction's address, in the order of `ucontext_t`.
pub type General = [i64; 17];

/// Where that has rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15.
const PLACES: [usize; 16] = [13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7];
const RIP: usize = 16;

/// Parts of what `xsave` writes, by their numbers there: of registers 0 to 15 the lowest 128 bits, the next, the upper
/// 256; registers 16 to 31.
const LOWEST: usize = 1;
const SECOND: usize = 2;
const MASKS: usize = 5;
const UPPER: usize = 6;
const OTHER_SIXTEEN: usize = 7;

/// Bytes before the word whose bits name the parts that are not in their initial state, zeros.
const PRESENT: usize = 512;

/// A vector register of 512 bits.
pub type Vector = [u32; 16];

pub struct Registers<'a> {
    general: &'a mut General,
    state: *mut u8,
}

impl<'a> Registers<'a> {
    /// Those that a signal interrupted, on a processor with AVX-512.
    pub fn of(context: &'a mut ucontext_t) -> Self {
        let state = context.uc_mcontext.fpregs.cast();
        Self { general: context.uc_mcontext.gregs.first_chunk_mut().expect("more than 17 registers"), state }
    }

    /// Those that were saved.
    ///
    /// # Safety
    ///
    /// `state` points to what `xsave` wrote, all parts that are named above.
    pub unsafe fn saved(general: &'a mut General, state: *mut u8) -> Self {
        Self { general, state }
    }

    /// By the number that instructions use.
    pub fn general(&self, register: usize) -> u64 {
        self.general[PLACES[register]].cast_unsigned()
    }

    pub fn set_general(&mut self, register: usize, value: u64) {
        self.general[PLACES[register]] = value.cast_signed();
    }

    /// The instruction that comes next.
    pub fn code(&self) -> *const u8 {
        self.general[RIP] as *const u8
    }

    pub fn move_by(&mut self, bytes: i64) {
        self.general[RIP] += bytes;
    }

    pub fn mask(&self, register: usize) -> u64 {
        let mut mask = [0u64];
        self.read(MASKS, 8 * register, &mut mask);
        mask[0]
    }

    pub fn vector(&self, register: usize) -> Vector {
        let mut vector = [0; 16];
        if register < 16 {
            self.read(LOWEST, 16 * register, &mut vector[..4]);
            self.read(SECOND, 16 * register, &mut vector[4..8]);
            self.read(UPPER, 32 * register, &mut vector[8..]);
        } else {
            self.read(OTHER_SIXTEEN, 64 * (register - 16), &mut vector);
        }
        vector
    }

    pub fn set_vector(&mut self, register: usize, vector: &Vector) {
        if register < 16 {
            self.write(LOWEST, 16 * register, &vector[..4]);
            self.write(SECOND, 16 * register, &vector[4..8]);
            self.write(UPPER, 32 * register, &vector[8..]);
        } else {
            self.write(OTHER_SIXTEEN, 64 * (register - 16), vector);
        }
    }

    fn present(&self) -> *mut u64 {
        self.state.wrapping_add(PRESENT).cast()
    }

    fn read<T: Default>(&self, part: usize, offset: usize, to: &mut [T]) {
        let (_, place) = layout(part);
        // SAFETY: the state has every part at its place.
        unsafe {
            if *self.present() & (1 << part) == 0 {
                to.fill_with(T::default);
            } else {
                let from = self.state.add(place + offset);
                std::ptr::copy_nonoverlapping(from, to.as_mut_ptr().cast(), size_of_val(to));
            }
        }
    }

    fn write<T>(&mut self, part: usize, offset: usize, from: &[T]) {
        let (bytes, place) = layout(part);
        // SAFETY: as above. A part that was in its initial state is so no longer.
        unsafe {
            let to = self.state.add(place);
            if *self.present() & (1 << part) == 0 {
                *self.present() |= 1 << part;
                to.write_bytes(0, bytes);
            }
            std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to.add(offset), size_of_val(from));
        }
    }
}

/// Bytes of a part, and before it.
fn layout(part: usize) -> (usize, usize) {
    static KNOWN: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
    // Its place is older than the leaf that names the others'.
    if part == LOWEST {
        return (256, 160);
    }
    let mut known = KNOWN[part].load(Ordering::Relaxed);
    if known == 0 {
        let leaf = __cpuid_count(0xD, part as u32);
        known = u64::from(leaf.eax) << 32 | u64::from(leaf.ebx);
        KNOWN[part].store(known, Ordering::Relaxed);
    }
    ((known >> 32) as usize, known as u32 as usize)
}

/// A tile register.
#[derive(Clone, Copy)]
pub struct Tile {
    pub rows: usize,
    pub row_bytes: usize,
    pub cells: [[u32; 16]; 16],
}

impl Tile {
    pub const UNCONFIGURED: Self = Self { rows: 0, row_bytes: 0, cells: [[0; 16]; 16] };
}

thread_local! {
    static TILES: UnsafeCell<[Tile; 8]> = const { UnsafeCell::new([Tile::UNCONFIGURED; 8]) };
}

/// The current thread's.
pub fn with_tiles<T>(f: impl FnOnce(&mut [Tile; 8]) -> T) -> T {
    // SAFETY: no instruction is emulated within another.
    TILES.with(|tiles| f(unsafe { &mut *tiles.get() }))
}
