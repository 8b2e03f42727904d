//! Mutations of bytes: flips, cuts, copies, splices, and numbers at the edges of their types.

use dataloader::Stream;

/// Numbers at which sizes and counts often go wrong.
pub(crate) const EDGES: [u64; 16] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xffff,
    0x0100_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 40,
    0x7fff_ffff_ffff_ffff,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

/// The most bytes of a mutated input: the cost of long files is not tested here.
pub(crate) const MAX_BYTES: usize = 256 << 10;

/// A number below `bound`, which is at least 1.
pub(crate) fn below(stream: &mut Stream, bound: usize) -> usize {
    stream.below(bound.max(1) as u64) as usize
}

/// One of `choices`.
pub(crate) fn one<'c, T>(stream: &mut Stream, choices: &'c [T]) -> &'c T {
    &choices[below(stream, choices.len())]
}

/// Changes `bytes` once. `other` is another input to splice in.
pub(crate) fn mutate(bytes: &mut Vec<u8>, other: &[u8], stream: &mut Stream) {
    let length = bytes.len();
    let at = below(stream, length);
    let range = at..(at + 1 + below(stream, 32)).min(length).max(at);
    match below(stream, 16) {
        0 | 1 if length > 0 => bytes[at] ^= 1 << below(stream, 8),
        2 if length > 0 => bytes[at] = stream.bits() as u8,
        3 => bytes.truncate(at),
        4 => drop(bytes.drain(range)),
        5 => {
            let piece = bytes[range].repeat(1 + below(stream, 64));
            insert(bytes, at, &piece);
        }
        6 => {
            let piece: Vec<u8> = (0..1 + below(stream, 16)).map(|_| stream.bits() as u8).collect();
            insert(bytes, at, &piece);
        }
        7 => {
            let from = below(stream, other.len());
            bytes.truncate(at);
            bytes.extend(&other[from.min(other.len())..]);
            bytes.truncate(MAX_BYTES);
        }
        8 => {
            let from = below(stream, other.len());
            let piece = &other[from.min(other.len())..(from + 64).min(other.len())];
            overwrite(bytes, at, piece);
        }
        9 | 10 => {
            let edge = (*one(stream, &EDGES)).wrapping_add(one(stream, &[0, length as u64]).to_owned());
            let width = *one(stream, &[1, 2, 4, 8]);
            overwrite(bytes, at, &edge.to_le_bytes()[..width]);
        }
        11 | 12 => {
            let edge = *one(stream, &EDGES);
            let zigzag = if stream.bits() & 1 == 0 { edge } else { edge.wrapping_shl(1) };
            let written = varint(zigzag);
            // Replaces the varint that is there, or overwrites any bytes.
            let old = bytes[at..].iter().take_while(|&&byte| byte & 0x80 != 0).take(9).count() + 1;
            if stream.bits() & 1 == 0 {
                let end = (at + old).min(bytes.len());
                bytes.splice(at..end.max(at), written);
            } else {
                overwrite(bytes, at, &written);
            }
        }
        13 => range.into_iter().take(12).for_each(|index| bytes[index] |= 0x80),
        14 => {
            let fill = *one(stream, &[0, 0xff, b' ', b'[', b'{', 0x1c]);
            bytes[range].fill(fill);
        }
        _ => {
            // Changes a number written in digits.
            let start = bytes[at..].iter().position(u8::is_ascii_digit).map_or(at, |digit| at + digit);
            let end = start + bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            bytes.splice(start..end, one(stream, &EDGES).to_string().into_bytes());
        }
    }
}

fn insert(bytes: &mut Vec<u8>, at: usize, piece: &[u8]) {
    let room = MAX_BYTES.saturating_sub(bytes.len());
    bytes.splice(at..at, piece[..piece.len().min(room)].iter().copied());
}

fn overwrite(bytes: &mut [u8], at: usize, piece: &[u8]) {
    for (place, byte) in bytes.iter_mut().skip(at).zip(piece) {
        *place = *byte;
    }
}

/// The LEB128 form of a number, as in Thrift's compact protocol and snappy.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}
