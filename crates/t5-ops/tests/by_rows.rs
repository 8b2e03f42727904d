//! A table that comes from its file by rows gives the bits of a table in memory, and is never in memory as a whole.
//!
//! The host alone: a card gets a table whole.

#![cfg(all(target_os = "linux", target_pointer_width = "64", any(target_arch = "x86_64", target_arch = "aarch64")))]

#[path = "support/peak.rs"]
mod peak;
#[path = "support/tensors.rs"]
mod tensors;

use std::fs::File;

use candle_core::{DType, Device, Result, Tensor};
use heap::{Allocator, FileMemory};
use t5_ops::{
    CrossEntropy, IGNORED_LABEL, Path, TokenLoss, Weight, embedding, embedding_by_rows, linear, linear_cross_entropy,
    linear_cross_entropy_backward, linear_cross_entropy_backward_needs, window_bytes,
};
use tensor_storage::{is_in_file, tensor_in_file, with_bytes};

use self::peak::held_at_the_peak;
use self::tensors::bits;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// A table in a file, after 1000 other bytes, and its copy in memory.
fn table(name: &str, (rows, width): (usize, usize), dtype: DType) -> Result<(Tensor, Tensor)> {
    let values = Tensor::randn(0f32, 1.0, (rows, width), &Device::Cpu)?.to_dtype(dtype)?;
    let path = std::env::temp_dir().join(format!("t5-ops-by-rows-{name}-{}", std::process::id()));
    let offset = 1000;
    with_bytes(&values, |bytes| std::fs::write(&path, [&vec![0; offset], bytes].concat()))??;
    let memory = FileMemory::of_file(File::open(&path)?, &path)?;
    std::fs::remove_file(&path)?;
    let in_file = tensor_in_file(&memory, offset, &[rows, width], dtype)?.expect("it lies in the file");
    Ok((in_file, values))
}

/// Bytes of the pages of files that this process has resident.
fn resident_of_files() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

fn same_bits(vocabulary: usize, dtypes: [DType; 2]) -> Result<()> {
    let (width, case) = (64, format!("{vocabulary} {dtypes:?}"));
    let (in_file, values) = table(&case, (vocabulary, width), dtypes[1])?;
    for rows in [1, 20, 150] {
        let x = Tensor::randn(0f32, 1.0, (rows, width), &Device::Cpu)?.to_dtype(dtypes[0])?;
        let expected = bits(&linear(&x, &values)?);
        assert_eq!(bits(&linear(&x, Weight::ByRows(&in_file))?), expected, "{case}: {rows} rows");
        let label = |row: usize| if row % 7 == 3 { IGNORED_LABEL } else { (row * 2_654_435 % vocabulary) as u32 };
        let labels: Vec<u32> = (0..rows).map(label).collect();
        let token_loss = TokenLoss { z_loss: 0.1, label_smoothing: 0.2, is_logit: false };
        for (chunk_rows, token_loss) in [(1, token_loss), (64, TokenLoss::default())] {
            let c = CrossEntropy { logit_scale: 0.3, soft_cap: None, gradient_scale: 0.1, chunk_rows, token_loss };
            let loss = |w: Weight| linear_cross_entropy(&x, w, &labels, &c).map(f64::to_bits);
            assert_eq!(loss(Weight::ByRows(&in_file))?, loss((&values).into())?, "{case}: {rows} rows");
            let gradients = |w: Weight| -> Result<_> {
                let dw = Tensor::zeros((vocabulary, width), DType::F32, &Device::Cpu)?;
                let (loss, dx) = linear_cross_entropy_backward(&x, w, &labels, &c, Some((&dw, true)))?;
                let (_, alone) = linear_cross_entropy_backward(&x, w, &labels, &c, None)?;
                Ok((loss.cross_entropy.to_bits(), loss.objective.to_bits(), bits(&dx), bits(&alone), bits(&dw)))
            };
            let case = format!("{case}: {rows} rows by {chunk_rows}");
            assert!(gradients(Weight::ByRows(&in_file))? == gradients((&values).into())?, "{case}");
        }
        let ids =
            Tensor::from_vec((0..rows).map(|row| (row * 977 % vocabulary) as u32).collect(), (1, rows), x.device())?;
        let expected = bits(&embedding(&ids, &values, dtypes[0])?);
        assert_eq!(bits(&embedding_by_rows(&ids, &in_file, dtypes[0])?), expected, "{case}: {rows} rows");
    }
    Ok(())
}

// One test, because resident bytes are counted for the whole process.
#[test]
fn a_table_by_rows_gives_the_bits_of_one_in_memory_and_never_lies_there_whole() -> Result<()> {
    gives_the_bits_of_one_in_memory()?;
    never_lies_there_whole()
}

fn gives_the_bits_of_one_in_memory() -> Result<()> {
    let f32s = [DType::F32; 2];
    // Several windows with 1, 160 or 253 rows left for the last one, and a single window.
    for vocabulary in [96 * 20 * 2 + 1, 4000, 6013, 1500] {
        same_bits(vocabulary, f32s)?;
    }
    for dtypes in [[DType::F32, DType::BF16], [DType::BF16; 2], [DType::F32, DType::F16], [DType::BF16, DType::F32]] {
        same_bits(4353, dtypes)?;
    }
    Ok(())
}

fn never_lies_there_whole() -> Result<()> {
    let (vocabulary, width, rows) = (24_000, 256, 48);
    let (in_file, values) = table("window", (vocabulary, width), DType::F32)?;
    drop(values);
    assert!(is_in_file(&in_file));
    let x = Tensor::randn(0f32, 1.0, (rows, width), &Device::Cpu)?;
    let labels: Vec<u32> = (0..rows as u32).map(|row| row * 499).collect();
    let c = CrossEntropy { logit_scale: 0.3, gradient_scale: 0.1, chunk_rows: 16, ..CrossEntropy::default() };
    let run = |w: Weight| linear_cross_entropy_backward(&x, w, &labels, &c, None);
    let (window, all) = (window_bytes((vocabulary, width), DType::F32), vocabulary * width * 4);
    let needs = linear_cross_entropy_backward_needs(Path::Cpu, rows, (vocabulary, width), [DType::F32; 2], &c, false);
    let beside = |w: Weight| held_at_the_peak(|| drop(run(w).unwrap()));
    // Buffers that threads keep are allocated before pages are counted.
    beside(Weight::ByRows(&in_file));
    let pages = resident_of_files();
    let by_rows = beside(Weight::ByRows(&in_file));
    let results = (rows * width * 4) as u64;
    assert!(by_rows <= window + needs.transient + results + (64 << 10), "{by_rows}, {window} and {needs:?}");
    assert!(by_rows > window / 2 && by_rows < all as u64 / 3, "{by_rows} of {all}");
    let after = resident_of_files();
    assert!(after <= pages + (1 << 20), "{pages}, then {after}");
    Ok(())
}
