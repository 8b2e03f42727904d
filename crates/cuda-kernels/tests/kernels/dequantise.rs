//! Conversion of weights in codes to numbers.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use cuda_kernels::emulation::Argument;
use t5_ops::{Precision, Quantisation, Quantised};

use crate::card::{Buffer, in_every_schedule, launch, numbers, suffix};

/// NF4's tables, in bytes.
pub const TABLES: usize = (16 + 256) * 4;

/// A weight with all kinds of codes, also of scales; scales lie between -1 and 1.
pub fn weight(precision: Precision, (rows, width): (usize, usize)) -> Quantised {
    let quantisation = Quantisation::new(precision, (rows, width)).unwrap();
    let mut bytes = Vec::new();
    for (seed, part) in quantisation.parts().iter().enumerate() {
        match part.dtype {
            // Each of the 256 codes in turn; multiples of an odd number come in another order.
            DType::U8 => bytes.extend((0..part.count).map(|i| ((i + i / 256) * 181) as u8)),
            _ => {
                let scales = numbers(seed as u64, &[part.count], DType::F32).to_vec1::<f32>().unwrap();
                bytes.extend(scales.into_iter().flat_map(f32::to_le_bytes));
            }
        }
    }
    let count = bytes.len();
    Quantised::new(quantisation, Tensor::from_vec(bytes, count, &Device::Cpu).unwrap()).unwrap()
}

fn dequantised(w: &Quantised, rows: &Range<usize>, columns: &Range<usize>, dtype: DType) -> Tensor {
    let (precision, (_, width)) = (w.quantisation().precision(), w.quantisation().shape());
    let what = format!("{precision:?} {:?}: {rows:?} {columns:?} {dtype:?}", w.quantisation().shape());
    let got = in_every_schedule(&what, |schedule| {
        let (mut bytes, mut part) = (Buffer::copy_of(w.bytes()), Buffer::new(&[rows.len(), columns.len()], dtype));
        let (mut arguments, mut at) = (Vec::new(), 0);
        for of_weight in w.quantisation().parts() {
            arguments.push(bytes.pointer_at(at));
            at += of_weight.bytes();
        }
        arguments.push(part.pointer());
        let sizes = [width, rows.start, columns.start, rows.len(), columns.len()];
        arguments.extend(sizes.map(|size| Argument::from_value(size as i32)));
        let shared = if precision == Precision::Nf4 { TABLES } else { 0 };
        // Four units for each thread, each of at least one element.
        let blocks = (rows.len() * columns.len()).div_ceil(4 * 64);
        let name = format!("dequantise_{}_{}", precision.name(), suffix(dtype));
        launch(&name, [blocks, 1, 1], 64, shared, &arguments, schedule);
        vec![part]
    });
    got.into_iter().next().unwrap()
}

#[test]
fn every_part_of_a_weight_has_the_bits_of_the_cpu() {
    for precision in [Precision::Int8, Precision::Nf4] {
        // Widths that are read eight at a time and one by one; scales at odd bytes; blocks that end within a row.
        for (rows, width) in [(150, 120), (3, 8), (37, 101), (1, 1), (9, 36)] {
            let w = weight(precision, (rows, width));
            let whole = w.dequantised().unwrap();
            let parts = [
                (0..rows, 0..width),
                (0..rows, width / 2 / 8 * 8..width),
                (rows / 2..rows, 0..width),
                (0..rows / 2 + 1, 0..width.min(7)),
                // Eight columns that do not begin at a multiple of eight.
                (0..rows, 4.min(width - 1)..12.min(width)),
            ];
            for (rows, columns) in parts {
                let of_part = |t: &Tensor| t.narrow(0, rows.start, rows.len())?.narrow(1, columns.start, columns.len());
                let expected = of_part(&whole).unwrap();
                for dtype in [DType::F32, DType::BF16] {
                    let bits = |t: &Tensor| {
                        let t = t.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
                        let values = t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                        values.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
                    };
                    let got = dequantised(&w, &rows, &columns, dtype);
                    assert_eq!(bits(&got), bits(&expected), "{precision:?} {rows:?} {columns:?} {dtype:?}");
                }
            }
        }
    }
}
