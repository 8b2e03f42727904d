//! Writes TensorBoard's event file: TFRecord records, each a protobuf `Event` with the scalars of one step.
//!
//! A record is its length (u64), the masked CRC-32C of the length, the bytes, and their masked CRC-32C, all little-endian
//! (`tensorflow/core/lib/io/record_writer.h`). Fields used of `tensorflow/core/util/event.proto`: `wall_time` = 1, `step` =
//! 2, `file_version` = 3 and `summary` = 5; of a `Summary.Value`: `tag` = 1 and `simple_value` = 2.
//!
//! When a run resumes, its file is made anew from the steps that count, so the file has no step twice.

use std::fs::File;
use std::io::{self, Write};

use crate::line::{Line, number_of};

/// An event file, written record by record.
#[derive(Debug)]
pub struct EventFile<W = File> {
    out: W,
    record: Vec<u8>,
}

impl<W: Write> EventFile<W> {
    /// Begins a file: the first record gives the version.
    ///
    /// # Errors
    /// Writing fails.
    pub fn begin(out: W, time_ms: u64) -> io::Result<Self> {
        let mut file = Self { out, record: Vec::with_capacity(1 << 10) };
        file.record.clear();
        wall_time(&mut file.record, time_ms);
        bytes(&mut file.record, 3, b"brain.Event:2");
        file.write_record()?;
        Ok(file)
    }

    /// Continues a file whose records are complete so far.
    pub fn append(out: W) -> Self {
        Self { out, record: Vec::with_capacity(1 << 10) }
    }

    /// Adds the scalars of an event, if it has any: one record, one write.
    ///
    /// # Errors
    /// Writing fails.
    pub fn note(&mut self, line: &Line) -> io::Result<()> {
        let (step, time_ms) = match line {
            Line::Step(step) => (step.step, step.time_ms),
            Line::Other { time_ms, .. } => (line.step().unwrap_or(0), *time_ms),
        };
        let mut summary = Vec::new();
        scalars(line, &mut |tag, value| {
            let mut scalar = Vec::new();
            bytes(&mut scalar, 1, tag.as_bytes());
            scalar.push(2 << 3 | 5);
            #[expect(clippy::cast_possible_truncation, reason = "TensorBoard's scalars are f32")]
            scalar.extend((value as f32).to_le_bytes());
            bytes(&mut summary, 1, &scalar);
        });
        if summary.is_empty() {
            return Ok(());
        }
        self.record.clear();
        wall_time(&mut self.record, time_ms.unwrap_or(0));
        self.record.push(2 << 3);
        varint(&mut self.record, step);
        bytes(&mut self.record, 5, &summary);
        self.write_record()
    }

    fn write_record(&mut self) -> io::Result<()> {
        let length = (self.record.len() as u64).to_le_bytes();
        let mut whole = Vec::with_capacity(self.record.len() + 16);
        whole.extend(length);
        whole.extend(masked_crc32c(&length).to_le_bytes());
        whole.extend(&self.record);
        whole.extend(masked_crc32c(&self.record).to_le_bytes());
        self.out.write_all(&whole)
    }

    /// Returns the writer.
    pub fn into_inner(self) -> W {
        self.out
    }
}

/// Passes the scalars of an event to `note`, under TensorBoard's tags. Numbers that are not finite are included.
fn scalars(line: &Line, note: &mut dyn FnMut(&str, f64)) {
    #[expect(clippy::cast_precision_loss, reason = "scalars are f32")]
    let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
    match line {
        Line::Step(step) => {
            for (tag, value) in [
                ("train/loss", step.loss),
                ("train/learning_rate", step.lr),
                ("train/grad_norm", step.grad_norm),
                ("speed/tokens_per_second", step.tokens_per_second),
                ("speed/step_ms", step.step_ms),
                ("speed/data_wait_ms", step.data_wait_ms),
                ("memory/rss_bytes", bytes(step.rss_bytes)),
                ("memory/peak_rss_bytes", bytes(step.peak_rss_bytes)),
                ("memory/predicted_peak_bytes", bytes(step.predicted_peak_bytes)),
                ("memory/device_bytes", bytes(step.device_bytes)),
            ] {
                value.into_iter().for_each(|value| note(tag, value));
            }
        }
        Line::Other { event, fields, .. } if event == "eval" => {
            let fields = fields.as_object().into_iter().flatten();
            let is_scalar = |name: &str| {
                !["step", "samples", "generated_samples", "target_tokens", "bad_rows", "event", "time"].contains(&name)
            };
            for (name, value) in fields.filter(|(name, _)| is_scalar(name)) {
                let value = if value.is_string() && !["loss", "perplexity"].contains(&name.as_str()) {
                    None
                } else {
                    number_of(value)
                };
                value.into_iter().for_each(|value| note(&format!("eval/{name}"), value));
            }
        }
        Line::Other { .. } => {}
    }
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds since 1970 are far below 2^53")]
fn wall_time(out: &mut Vec<u8>, time_ms: u64) {
    out.push(1 << 3 | 1);
    out.extend((time_ms as f64 / 1e3).to_le_bytes());
}

/// Writes a field of bytes: its key, its length, the bytes.
fn bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// `((crc >> 15) | (crc << 17)) + 0xa282ead8`: a CRC stored beside the bytes that it covers (`crc32c.h`).
fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32 with Castagnoli's polynomial (RFC 3720, appendix B.4).
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut crc, mut bit) = (byte as u32, 0);
            while bit < 8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
                bit += 1;
            }
            table[byte] = crc;
            byte += 1;
        }
        table
    };
    !bytes.iter().fold(!0, |crc, byte| crc >> 8 ^ TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tests' own decoder: checks the records' sums, and returns each record's step and scalars.
    fn decoded(mut file: &[u8]) -> Vec<(u64, Vec<(String, f32)>)> {
        let mut events = Vec::new();
        while !file.is_empty() {
            let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            let sum = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
            let record = &file[12..12 + length];
            let unmasked = |sum: u32| sum.wrapping_sub(0xa282_ead8).rotate_left(15);
            assert_eq!((unmasked(sum(8)), unmasked(sum(12 + length))), (crc32c(&file[..8]), crc32c(record)));
            events.push(event(record));
            file = &file[16 + length..];
        }
        events
    }

    fn event(record: &[u8]) -> (u64, Vec<(String, f32)>) {
        let (mut step, mut found) = (0, Vec::new());
        for (field, wire, number, content) in fields(record) {
            match (field, wire) {
                (2, 0) => step = number,
                (5, 2) => {
                    for (.., value) in fields(&content) {
                        let scalar = fields(&value);
                        let tag = String::from_utf8(scalar[0].3.clone()).unwrap();
                        found.push((tag, f32::from_le_bytes(scalar[1].3.as_slice().try_into().unwrap())));
                    }
                }
                (1, 1) | (3, 2) => {}
                other => panic!("field {other:?}"),
            }
        }
        (step, found)
    }

    fn fields(mut bytes: &[u8]) -> Vec<(u8, u8, u64, Vec<u8>)> {
        fn varint(bytes: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..).step_by(7) {
                let byte = bytes[0];
                *bytes = &bytes[1..];
                value |= u64::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    break;
                }
            }
            value
        }
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes) as u8;
            let (number, length) = match key & 7 {
                0 => (varint(&mut bytes), 0),
                1 => (0, 8),
                2 => (0, varint(&mut bytes) as usize),
                5 => (0, 4),
                wire => panic!("wire type {wire}"),
            };
            found.push((key >> 3, key & 7, number, bytes[..length].to_vec()));
            bytes = &bytes[length..];
        }
        found
    }

    #[test]
    fn the_sum_is_castagnolis() {
        // RFC 3720, B.4: 32 bytes of zeros, of ones, and ascending.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
    }

    #[test]
    fn an_event_file_reads_back_as_it_was_written() {
        let mut file = EventFile::begin(Vec::new(), 1500).unwrap();
        for line in [
            r#"{"event":"start","step":0}"#,
            r#"{"event":"eval","step":0,"loss":7.5,"perplexity":"inf","bleu":1.25,"bleu_signature":"x","samples":3,"examples":[]}"#,
            r#"{"event":"step","step":300,"time":"2026-11-23T18:25:48.729Z","loss":"NaN","lr":0.5,"rss_bytes":4096}"#,
        ] {
            file.note(&Line::parse(line).expect("an event")).unwrap();
        }
        let events = decoded(&file.into_inner());
        assert_eq!(events.len(), 3);
        assert_eq!(events[0], (0, vec![]));
        let named =
            |pairs: &[(&str, f32)]| pairs.iter().map(|(tag, value)| ((*tag).to_owned(), *value)).collect::<Vec<_>>();
        assert_eq!(
            events[1],
            (0, named(&[("eval/loss", 7.5), ("eval/perplexity", f32::INFINITY), ("eval/bleu", 1.25)]))
        );
        assert_eq!((events[2].0, events[2].1.len()), (300, 3));
        assert!(events[2].1[0].1.is_nan());
        assert_eq!(events[2].1[1..], named(&[("train/learning_rate", 0.5), ("memory/rss_bytes", 4096.0)]));
    }
}
