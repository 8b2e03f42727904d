//! Tensors that are read in place, in a file that other processes know.
//!
//! The host alone: a card reads no file.

#![cfg(all(target_os = "linux", target_pointer_width = "64", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result, Tensor};
use heap::{Allocator, FileMemory, LARGE_BYTES};
use t5_ops::{Precision, Quantised, linear};
use tensor_storage::{WritePolicy, is_in_file, overwrite_in_file, page_in, page_out, tensor_in_file, with_bytes};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const ROWS: usize = 96;
const WIDTH: usize = 128;
/// As in a file with a header.
const OFFSET: usize = 4 + 2 * LARGE_BYTES;

/// A file of numbers after `OFFSET` bytes, removed at the end.
struct Numbers(PathBuf);

impl Numbers {
    fn new(name: &str) -> Numbers {
        let numbers = (0..ROWS * WIDTH).flat_map(|i| (i as f32).sin().to_le_bytes());
        Numbers::of_bytes(name, &numbers.collect::<Vec<u8>>())
    }

    fn of_bytes(name: &str, bytes: &[u8]) -> Numbers {
        let path = std::env::temp_dir().join(format!("t5-ops-{name}-{}", std::process::id()));
        std::fs::write(&path, [&[0; OFFSET], bytes].concat()).unwrap();
        Numbers(path)
    }

    fn mapped(&self) -> FileMemory {
        FileMemory::of_file(File::open(&self.0).unwrap(), &self.0).unwrap()
    }

    fn tensor(&self, memory: &FileMemory) -> Tensor {
        tensor_in_file(memory, OFFSET, &[ROWS, WIDTH], DType::F32).unwrap().expect("it lies in the file")
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn values(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn a_tensor_that_is_read_where_it_lies_has_the_values_of_the_file_and_gives_the_same_products() -> Result<()> {
    let numbers = Numbers::new("in-place");
    let expected: Vec<f32> = (0..ROWS * WIDTH).map(|i| (i as f32).sin()).collect();
    let memory = numbers.mapped();
    let x = numbers.tensor(&memory);
    assert!(is_in_file(&x));
    assert_eq!(values(&x), expected);
    page_out(&x);
    page_in(&x);
    let copy = x.copy()?;
    assert!(!is_in_file(&copy));
    let rows = Tensor::from_vec(expected[..5 * WIDTH].to_vec(), (5, WIDTH), &Device::Cpu)?;
    assert_eq!(values(&linear(&rows, &x)?), values(&linear(&rows, &copy)?));
    // The mapping lives as long as a tensor in it.
    drop(memory);
    assert_eq!(values(&x), expected);
    Ok(())
}

#[test]
fn a_place_that_cannot_be_a_tensor_or_is_one_already_is_refused() -> Result<()> {
    let numbers = Numbers::new("refused");
    let memory = numbers.mapped();
    let at = |offset: usize, rows: usize, dtype| tensor_in_file(&memory, offset, &[rows, WIDTH], dtype);
    assert!(at(OFFSET + 1, ROWS - 1, DType::F32)?.is_none(), "not aligned");
    assert!(at(OFFSET + 4, ROWS, DType::F32)?.is_none(), "behind the end");
    assert!(at(usize::MAX - 3, ROWS, DType::F32)?.is_none(), "beyond all files");
    assert!(at(OFFSET, 1, DType::F32)?.is_none(), "few elements have no pages");
    assert!(at(0, ROWS / 2, DType::F64)?.is_none(), "kernels do not take it");
    assert!(tensor_in_file(&memory, 0, &[usize::MAX, 2], DType::F32).is_err());
    let x = numbers.tensor(&memory);
    assert!(at(OFFSET, ROWS, DType::F32)?.is_none() && at(0, ROWS, DType::F32)?.is_none(), "it is in use");
    // Another mapping of the file is another place.
    assert_eq!(values(&numbers.tensor(&numbers.mapped())), values(&x));
    drop(x);
    assert!(at(OFFSET, ROWS, DType::F32)?.is_some(), "it is free again");
    // A file of this process's own cannot be read in this way.
    let own = FileMemory::create(&std::env::temp_dir(), [1 << 20].into_iter())?;
    assert!(tensor_in_file(&own, 0, &[ROWS, WIDTH], DType::F32)?.is_none());
    Ok(())
}

#[test]
fn narrow_weights_are_multiplied_where_they_lie() -> Result<()> {
    let (rows, width) = (260, 320);
    let x = Tensor::randn(0f32, 1.0, (7, width), &Device::Cpu)?;
    let w = Tensor::randn(0f32, 1.0, (rows, width), &Device::Cpu)?;
    let f16 = w.to_dtype(DType::F16)?;
    let file = Numbers::of_bytes("f16", &with_bytes(&f16, <[u8]>::to_vec)?);
    let in_file = tensor_in_file(&file.mapped(), OFFSET, &[rows, width], DType::F16)?.expect("it lies in the file");
    assert!(is_in_file(&in_file));
    assert_eq!(values(&linear(&x, &in_file)?), values(&linear(&x, &f16)?));
    for precision in [Precision::Int8, Precision::Nf4] {
        let w = Quantised::quantise(&w, precision)?;
        let file = Numbers::of_bytes("codes", &with_bytes(w.bytes(), <[u8]>::to_vec)?);
        // Codes need no alignment.
        let bytes = tensor_in_file(&file.mapped(), OFFSET, &[w.quantisation().bytes()], DType::U8)?;
        let in_file = Quantised::new(w.quantisation(), bytes.expect("it lies in the file"))?;
        assert!(is_in_file(in_file.bytes()));
        page_out(in_file.bytes());
        page_in(in_file.bytes());
        assert_eq!(values(&linear(&x, &in_file)?), values(&linear(&x, &w)?));
    }
    Ok(())
}

#[test]
fn the_file_is_never_written_to() -> Result<()> {
    let numbers = Numbers::new("read-only");
    let before = std::fs::read(&numbers.0)?;
    let memory = numbers.mapped();
    let x = numbers.tensor(&memory);
    let other = Tensor::zeros((ROWS, WIDTH), DType::F32, &Device::Cpu)?;
    for writes in [WritePolicy::Later, WritePolicy::Now] {
        assert!(overwrite_in_file(&x, &other, writes).is_err());
    }
    drop((x, memory));
    assert_eq!(std::fs::read(&numbers.0)?, before);
    assert!(FileMemory::of_file(File::open(Path::new("/dev/null"))?, Path::new("/dev/null")).is_ok());
    Ok(())
}
