//! A tensor in a file has the values that it would have in memory, and its pages are resident only while they are used.
//!
//! The host alone: a card has no pages of files.

use candle_core::{DType, Device, Result, Tensor};
use heap::{Allocator, FileMemory, LARGE_BYTES};
use t5_ops::zero;
use tensor_storage::{
    WritePolicy, copy_from_file, copy_into_file, is_in_file, overwrite_in_file, page_in, page_out, read_ahead,
};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn numbers(n: usize) -> Result<Tensor> {
    Tensor::arange(0u32, n as u32, &Device::Cpu)?.to_dtype(DType::F32)
}

fn values(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Bytes of resident pages of files, of this process.
fn resident_of_files() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

// One test: resident pages are counted for the whole process.
#[test]
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn a_tensor_in_a_file_is_like_any_other_and_resident_only_while_it_is_used() -> Result<()> {
    let directory = std::env::temp_dir().join(format!("t5-ops-paging-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let (large, small) = (numbers(4 << 20)?, numbers(LARGE_BYTES / 4 - 1)?);
    let half = large.to_dtype(DType::BF16)?;
    let memory = FileMemory::create(&directory, [16 << 20, 8 << 20, LARGE_BYTES - 4].into_iter())?;
    std::fs::remove_dir(&directory).expect("the file has no name there");

    let [in_file, half_in_file] = [&large, &half].map(|x| copy_into_file(x, &memory, WritePolicy::Later).unwrap());
    assert!(is_in_file(&in_file) && is_in_file(&half_in_file));
    assert!(!is_in_file(&large));
    // Tensors that are too small for pages, or find no room any more, lie in memory.
    assert!(!is_in_file(&copy_into_file(&small, &memory, WritePolicy::Now)?));
    assert!(!is_in_file(&copy_into_file(&large, &memory, WritePolicy::Now)?));
    // Outside of the call blocks lie in memory.
    assert!(!is_in_file(&large.copy()?));

    let all = (16 << 20) + (8 << 20);
    let made = resident_of_files();
    [&in_file, &half_in_file].into_iter().for_each(page_in);
    let resident = resident_of_files();
    assert!(made + all * 9 / 10 <= resident, "a tensor is made without its pages: {made}, then {resident}");
    [&in_file, &half_in_file].into_iter().for_each(page_out);
    let out = resident_of_files();
    assert!(out + all * 9 / 10 <= resident, "{out} of {resident}");
    read_ahead(&in_file);
    page_in(&in_file);
    let some = resident_of_files();
    assert!(some >= out + (15 << 20), "{some} after {out}");
    assert_eq!(values(&in_file), values(&large));
    assert_eq!(values(&half_in_file), values(&half));

    // Changed in its pages, and by a copy: neither change is lost when the pages leave.
    zero(&in_file)?;
    page_out(&in_file);
    assert!(values(&in_file).iter().all(|&x| x == 0.0));
    page_out(&in_file);
    let resident = resident_of_files();
    let copy = copy_from_file(&in_file)?.unwrap();
    assert!(resident_of_files() < resident + (1 << 20), "a copy needs no pages of the file");
    let changed = (copy + 0.5)?;
    overwrite_in_file(&in_file, &changed, WritePolicy::Now)?;
    assert_eq!(values(&in_file), values(&changed));
    assert!(copy_from_file(&large)?.is_none());
    assert!(overwrite_in_file(&large, &changed, WritePolicy::Later).is_err());
    assert!(overwrite_in_file(&in_file, &small, WritePolicy::Later).is_err());

    // The tensor keeps its pages when the file's handle is gone, and frees them at the end.
    drop(memory);
    page_out(&in_file);
    assert_eq!(values(&in_file), values(&changed));
    drop((in_file, half_in_file));
    assert!(resident_of_files() <= out + (1 << 20));
    Ok(())
}

#[test]
fn a_file_that_cannot_be_made_is_an_error() {
    let nowhere = std::env::temp_dir().join("no-such-directory-of-weights");
    assert!(FileMemory::create(&nowhere, [LARGE_BYTES].into_iter()).is_err());
}
