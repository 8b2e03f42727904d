//! The instructions: what their bytes say, and what they do.

use crate::registers::{Registers, Tile, Vector, with_tiles};

/// First bytes of an instruction: VEX of three bytes, EVEX.
const VEX: u8 = 0xC4;
const EVEX: u8 = 0x62;

/// What stands for the prefixes 66, F3 and F2 in both.
const NO_PREFIX: u8 = 0;
const P66: u8 = 1;
const PF3: u8 = 2;
const PF2: u8 = 3;

/// Does the next instruction and goes on to the one behind it; false, and nothing is done, where it is none that is known here.
pub fn emulate(registers: &mut Registers) -> bool {
    emulate_from(registers.code(), registers)
}

/// Does what follows at once.
pub fn emulate_all(registers: &mut Registers) {
    while emulate(registers) {}
}

/// [`emulate`], where the bytes are no longer in their place.
pub fn emulate_from(bytes: *const u8, registers: &mut Registers) -> bool {
    let mut code = Code { bytes, place: registers.code() as u64, read: 0 };
    let done = match code.byte() {
        VEX => tile_instruction(&mut code, registers),
        EVEX => vector_instruction(&mut code, registers),
        _ => None,
    };
    if done.is_some() {
        registers.move_by(code.read as i64);
    }
    done.is_some()
}

/// The bytes of an instruction.
struct Code {
    bytes: *const u8,
    /// The address that it was met at.
    place: u64,
    read: usize,
}

impl Code {
    fn byte(&mut self) -> u8 {
        // SAFETY: no byte behind the end of an instruction is read. Another thread may write a jump there.
        let byte = unsafe { self.bytes.add(self.read).read_volatile() };
        self.read += 1;
        byte
    }

    fn word(&mut self) -> i64 {
        i32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()]).into()
    }

    /// Whether the bytes that were read belong together: the first is the first that another thread writes.
    fn is_whole(&self) -> bool {
        // SAFETY: it was read before.
        matches!(unsafe { self.bytes.read_volatile() }, VEX | EVEX)
    }
}

/// What the last bytes of an instruction name.
struct Operands {
    register: usize,
    other: Other,
}

enum Other {
    Register(usize),
    /// An address, and what is added to it: an index times its scale, for tiles the bytes from row to row.
    Memory(u64, u64),
}

/// Bit 3 of the numbers of three registers, 0 or 8: of the operand, of an index, and of a base or the other operand.
struct High {
    register: usize,
    index: usize,
    base: usize,
}

/// Reads ModRM, SIB and the displacement, of which one byte counts in `scale` bytes. None where the instruction was changed
/// meanwhile.
fn operands(code: &mut Code, registers: &Registers, high: &High, scale: i64) -> Option<Operands> {
    let modrm = usize::from(code.byte());
    let (mode, register, other) = (modrm >> 6, modrm >> 3 & 7 | high.register, modrm & 7);
    let other = if mode == 3 {
        Other::Register(other | high.base)
    } else {
        memory(code, registers, (mode, other), high, scale)
    };
    code.is_whole().then_some(Operands { register, other })
}

fn memory(code: &mut Code, registers: &Registers, (mode, other): (usize, usize), high: &High, scale: i64) -> Other {
    let (mut base, mut index) = (Some(other | high.base), 0);
    if other == 4 {
        let sib = usize::from(code.byte());
        let number = sib >> 3 & 7 | high.index;
        if number != 4 {
            index = registers.general(number) << (sib >> 6);
        }
        base = if mode == 0 && sib & 7 == 5 { None } else { Some(sib & 7 | high.base) };
    }
    let follows_code = mode == 0 && other == 5;
    let displacement = match mode {
        0 if !follows_code && base.is_some() => 0,
        1 => i64::from(code.byte().cast_signed()) * scale,
        _ => code.word(),
    };
    let base = match base {
        _ if follows_code => code.place + code.read as u64,
        Some(base) => registers.general(base),
        None => 0,
    };
    Other::Memory(base.wrapping_add_signed(displacement), index)
}

/// VEX.128.0F38.W0: `ldtilecfg`, `tilerelease`, `tilezero`, `tileloadd`, `tileloaddt1`, `tilestored`, `tdpbf16ps`.
fn tile_instruction(code: &mut Code, registers: &mut Registers) -> Option<()> {
    let [first, second, opcode] = [code.byte(), code.byte(), code.byte()];
    if first & 0x1F != 2 || second & 0x84 != 0 || !matches!(opcode, 0x49 | 0x4B | 0x5C) {
        return None;
    }
    let bit = |mask| if first & mask == 0 { 8 } else { 0 };
    let third = usize::from(!second >> 3 & 15);
    let Operands { register: tile, other } =
        operands(code, registers, &High { register: bit(0x80), index: bit(0x40), base: bit(0x20) }, 1)?;
    if tile > 7 {
        return None;
    }
    with_tiles(|tiles| {
        match (opcode, second & 3, other) {
            (0x49, NO_PREFIX, Other::Memory(base, index)) => configure(tiles, base.wrapping_add(index) as *const u8),
            (0x49, NO_PREFIX, Other::Register(0)) if tile == 0 => tiles.fill(Tile::UNCONFIGURED),
            (0x49, PF2, Other::Register(0)) => tiles[tile].cells = Tile::UNCONFIGURED.cells,
            (0x4B, PF2 | P66, Other::Memory(base, row)) => load(&mut tiles[tile], base, row),
            (0x4B, PF3, Other::Memory(base, row)) => store(&tiles[tile], base, row),
            (0x5C, PF3, Other::Register(a @ 0..8)) if third < 8 => {
                let (a, b) = (tiles[a], tiles[third]);
                // SAFETY: the processor has AVX-512.
                unsafe { multiply(&mut tiles[tile], &a, &b) }
            }
            _ => return None,
        }
        Some(())
    })
}

/// Palette, first row, 14 bytes of zeros, the bytes of a row of each tile in 16 words of 16 bits, the rows of each in 16 bytes.
fn configure(tiles: &mut [Tile; 8], from: *const u8) {
    // SAFETY: the program promises 64 bytes.
    let bytes: [u8; 64] = unsafe { from.cast::<[u8; 64]>().read_unaligned() };
    assert!(bytes[0] == 1 && bytes[1..16].iter().all(|&byte| byte == 0), "ldtilecfg: palette 1 from its first row");
    for (i, tile) in tiles.iter_mut().enumerate() {
        let row_bytes = usize::from(u16::from_le_bytes([bytes[16 + 2 * i], bytes[17 + 2 * i]]));
        let rows = usize::from(bytes[48 + i]);
        assert!(
            rows <= 16 && row_bytes <= 64 && row_bytes.is_multiple_of(4),
            "ldtilecfg: {rows} rows of {row_bytes} bytes"
        );
        *tile = Tile { rows, row_bytes, ..Tile::UNCONFIGURED };
    }
}

fn load(tile: &mut Tile, base: u64, row: u64) {
    assert!(tile.rows > 0 && tile.row_bytes > 0, "tileloadd: a tile without a shape");
    tile.cells = Tile::UNCONFIGURED.cells;
    for (i, cells) in tile.cells[..tile.rows].iter_mut().enumerate() {
        let from = base.wrapping_add(row.wrapping_mul(i as u64)) as *const u8;
        // SAFETY: the program promises what the instruction reads.
        unsafe { std::ptr::copy_nonoverlapping(from, cells.as_mut_ptr().cast(), tile.row_bytes) };
    }
}

fn store(tile: &Tile, base: u64, row: u64) {
    assert!(tile.rows > 0 && tile.row_bytes > 0, "tilestored: a tile without a shape");
    for (i, cells) in tile.cells[..tile.rows].iter().enumerate() {
        let to = base.wrapping_add(row.wrapping_mul(i as u64)) as *mut u8;
        // SAFETY: the program promises what the instruction writes.
        unsafe { std::ptr::copy_nonoverlapping(cells.as_ptr().cast(), to, tile.row_bytes) };
    }
}

/// C (M, N) in f32, A (M, 2 K) in rows, B (2 K, N) in rows of pairs: products at even and at odd places are summed apart,
/// and both sums added to C.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn multiply(c: &mut Tile, a: &Tile, b: &Tile) {
    let (depth, cols) = (a.row_bytes / 4, c.row_bytes / 4);
    let fits = a.rows == c.rows && b.rows == depth && b.row_bytes == c.row_bytes && c.rows * depth * cols > 0;
    assert!(fits, "tdpbf16ps: tiles that do not fit");
    let (evens, odds) = (b.cells.map(|row| row.map(even)), b.cells.map(|row| row.map(odd)));
    for (c, pairs) in c.cells[..c.rows].iter_mut().zip(&a.cells) {
        let mut sums = [[0f32; 16]; 2];
        for ((&pair, evens), odds) in pairs[..depth].iter().zip(&evens).zip(&odds) {
            for col in 0..16 {
                sums[0][col] += even(pair) * evens[col];
                sums[1][col] += odd(pair) * odds[col];
            }
        }
        for col in 0..cols {
            c[col] = (f32::from_bits(c[col]) + (sums[0][col] + sums[1][col])).to_bits();
        }
    }
}

/// The element of a pair that is first in memory, widened.
#[inline(always)]
fn even(pair: u32) -> f32 {
    flushed(pair << 16)
}

#[inline(always)]
fn odd(pair: u32) -> f32 {
    flushed(pair & 0xFFFF_0000)
}

/// These instructions take denormal numbers for zeros.
#[inline(always)]
fn flushed(bits: u32) -> f32 {
    f32::from_bits(if bits & 0x7F80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

/// EVEX.0F38.W0: `vdpbf16ps`, `vcvtneps2bf16`, `vcvtne2ps2bf16`.
fn vector_instruction(code: &mut Code, registers: &mut Registers) -> Option<()> {
    const DOT: (u8, u8) = (0x52, PF3);
    const NARROW: (u8, u8) = (0x72, PF3);
    const NARROW_TWO: (u8, u8) = (0x72, PF2);
    let [first, second, third, opcode] = [code.byte(), code.byte(), code.byte(), code.byte()];
    let instruction = (opcode, second & 3);
    if first & 0x0F != 2 || second & 0x84 != 0x04 || !matches!(instruction, DOT | NARROW | NARROW_TWO) {
        return None;
    }
    let bit = |byte: u8, mask: u8, value: usize| if byte & mask == 0 { value } else { 0 };
    let lanes = 4 << (third >> 5 & 3).min(2);
    let is_broadcast = third & 0x10 != 0;
    let high = High { register: bit(first, 0x80, 8), index: bit(first, 0x40, 8), base: bit(first, 0x20, 8) };
    let operands = operands(code, registers, &high, if is_broadcast { 4 } else { 4 * lanes as i64 })?;
    let to = operands.register | bit(first, 0x10, 16);
    let a = registers.vector(usize::from(!second >> 3 & 15) | bit(third, 0x08, 16));
    let b = match operands.other {
        Other::Register(register) => registers.vector(register | bit(first, 0x40, 16)),
        Other::Memory(base, index) => {
            let from = base.wrapping_add(index) as *const u32;
            let lane = |lane: usize| if is_broadcast { from } else { from.wrapping_add(lane) };
            // SAFETY: the program promises what the instruction reads.
            std::array::from_fn(|i| if i < lanes { unsafe { lane(i).read_unaligned() } } else { 0 })
        }
    };
    let before = registers.vector(to);
    // Lanes of the result, and whether an element fills one.
    let (mut result, lanes, is_wide) = match instruction {
        // SAFETY: the processor has AVX-512.
        DOT => (unsafe { dot(&before, &a, &b) }, lanes, true),
        NARROW => (narrow(&b), lanes / 2, false),
        // The second operand is the lower half.
        _ => (join(&narrow(&b), &narrow(&a), lanes / 2), lanes, false),
    };
    let mask = match third & 7 {
        0 => u64::MAX,
        register => registers.mask(register.into()),
    };
    let is_zeroed = third & 0x80 != 0;
    for (lane, result) in result[..lanes].iter_mut().enumerate() {
        let part = |element: usize, bits: u32| if mask >> element & 1 != 0 { bits } else { 0 };
        let written =
            if is_wide { part(lane, u32::MAX) } else { part(2 * lane, 0xFFFF) | part(2 * lane + 1, 0xFFFF_0000) };
        let kept = if is_zeroed { 0 } else { before[lane] };
        *result = *result & written | kept & !written;
    }
    result[lanes..].fill(0);
    registers.set_vector(to, &result);
    Some(())
}

/// c + a b for the elements at odd places, then for those at even ones.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dot(c: &Vector, a: &Vector, b: &Vector) -> Vector {
    let odds: [f32; 16] = std::array::from_fn(|lane| f32::from_bits(c[lane]) + odd(a[lane]) * odd(b[lane]));
    std::array::from_fn(|lane| (odds[lane] + even(a[lane]) * even(b[lane])).to_bits())
}

/// The elements of `x`, rounded to bf16, in the lower half.
fn narrow(x: &Vector) -> Vector {
    std::array::from_fn(|pair| match x.get(2 * pair..2 * pair + 2) {
        Some(&[first, second]) => rounded(first) | rounded(second) << 16,
        _ => 0,
    })
}

/// The first `half` lanes of `low`, then those of `high`.
fn join(low: &Vector, high: &Vector, half: usize) -> Vector {
    std::array::from_fn(|lane| if lane < half { low[lane] } else { high[lane - half] })
}

/// To the nearest, ties to even.
fn rounded(bits: u32) -> u32 {
    let x = flushed(bits);
    if x.is_nan() { bits >> 16 | 0x40 } else { (x.to_bits() + 0x7FFF + (x.to_bits() >> 16 & 1)) >> 16 }
}
