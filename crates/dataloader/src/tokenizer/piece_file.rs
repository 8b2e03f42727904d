//! A SentencePiece file (`spiece.model`) with fewer pieces: its fields are copied byte for byte, also those that this program does not know.
//!
//! Source of the field numbers: `sentencepiece_model.proto` of github.com/google/sentencepiece.

use prost::encoding::{decode_varint, encode_varint};

/// Fields of the file: a piece, the trainer's settings, and texts with their pieces, which other pieces would not give.
const PIECE: u64 = 1;
const TRAINER: u64 = 2;
const SELF_TEST: u64 = 4;
/// Fields of the trainer's settings: the number of pieces, and the ids of four pieces.
const PIECES: u64 = 4;
const IDS: std::ops::RangeInclusive<u64> = 40..=43;

/// The file with those pieces that have a new id, in the order of these ids.
///
/// # Errors
/// The bytes are not a protocol buffer.
pub(super) fn trimmed(file: &[u8], new_id: impl Fn(u32) -> Option<u32>) -> Result<Vec<u8>, String> {
    let (mut trimmed, mut piece, mut kept) = (Vec::with_capacity(file.len()), 0, 0);
    let mut trainer = None;
    each_field(file, |number, field, payload| {
        match number {
            PIECE => {
                if new_id(piece).is_some() {
                    trimmed.extend_from_slice(field);
                    kept += 1;
                }
                piece += 1;
            }
            // It holds the number of pieces, which is known at the end.
            TRAINER => trainer = Some(payload.to_vec()),
            SELF_TEST => {}
            _ => trimmed.extend_from_slice(field),
        }
    })?;
    if let Some(settings) = trainer {
        let settings = of_pieces(&settings, kept, new_id)?;
        encode_varint(TRAINER << 3 | 2, &mut trimmed);
        encode_varint(settings.len() as u64, &mut trimmed);
        trimmed.extend_from_slice(&settings);
    }
    Ok(trimmed)
}

/// The trainer's settings for the kept pieces.
fn of_pieces(settings: &[u8], kept: u64, new_id: impl Fn(u32) -> Option<u32>) -> Result<Vec<u8>, String> {
    let mut changed = Vec::with_capacity(settings.len());
    each_field(settings, |number, field, payload| {
        let old = if number == PIECES || IDS.contains(&number) { decode_varint(&mut { payload }).ok() } else { None };
        let Some(old) = old else { return changed.extend_from_slice(field) };
        let new = match u32::try_from(old) {
            _ if number == PIECES => kept,
            Ok(id) => new_id(id).map_or(NO_PIECE, u64::from),
            // -1: there is no such piece.
            Err(_) => old,
        };
        encode_varint(number << 3, &mut changed);
        encode_varint(new, &mut changed);
    })?;
    Ok(changed)
}

/// The id -1.
const NO_PIECE: u64 = u64::MAX;

/// Hands each field to `each`: its number, the whole field, and its value.
fn each_field(message: &[u8], mut each: impl FnMut(u64, &[u8], &[u8])) -> Result<(), String> {
    let damaged = || "expected a SentencePiece model, got a damaged protocol buffer".to_owned();
    let mut rest = message;
    while !rest.is_empty() {
        let whole = rest;
        let key = decode_varint(&mut rest).map_err(|_| damaged())?;
        let bytes = match key & 7 {
            0 => {
                let mut after = rest;
                decode_varint(&mut after).map_err(|_| damaged())?;
                rest.len() - after.len()
            }
            1 => 8,
            2 => usize::try_from(decode_varint(&mut rest).map_err(|_| damaged())?).map_err(|_| damaged())?,
            5 => 4,
            _ => return Err(damaged()),
        };
        let (value, after) = rest.split_at_checked(bytes).ok_or_else(damaged)?;
        each(key >> 3, &whole[..whole.len() - after.len()], value);
        rest = after;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field of bytes.
    fn field(number: u64, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_varint(number << 3 | 2, &mut bytes);
        encode_varint(value.len() as u64, &mut bytes);
        bytes.extend_from_slice(value);
        bytes
    }

    fn number(field: u64, value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_varint(field << 3, &mut bytes);
        encode_varint(value, &mut bytes);
        bytes
    }

    #[test]
    fn pieces_go_and_every_other_field_stays() {
        let settings = [number(3, 1), number(4, 3), number(40, 2), number(41, u64::MAX)].concat();
        let file = [
            field(1, b"a"),
            field(1, b"b"),
            field(1, b"c"),
            field(2, &settings),
            field(3, b"normalizer"),
            field(4, b"tests"),
            field(77, b"unknown"),
        ]
        .concat();
        let new_id = |id: u32| [Some(0), None, Some(1)].get(id as usize).copied().flatten();
        let settings = [number(3, 1), number(4, 2), number(40, 1), number(41, u64::MAX)].concat();
        let expected =
            [field(1, b"a"), field(1, b"c"), field(3, b"normalizer"), field(77, b"unknown"), field(2, &settings)];
        assert_eq!(trimmed(&file, new_id).unwrap(), expected.concat());
        assert!(trimmed(b"\x0a\xff", new_id).is_err());
        assert!(trimmed(b"\x0f", new_id).is_err());
    }
}
