//! Views of tensors in files, and borrows of them: safe code reads and writes only the view's own elements, and nothing changes during a
//! borrow.
//!
//! The host alone: a card maps no file.

#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use candle_core::{DType, Device, Result, Tensor};
use heap::{Allocator, FileMemory};
use tensor_storage::{
    WritePolicy, copy_from_file, copy_into_file, is_in_file, overwrite_in_file, page_in, page_out, read_ahead,
};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn values(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// Numbers from `first` on, in a file.
fn in_file(memory: &FileMemory, first: f32, n: usize) -> Tensor {
    let x = Tensor::arange(first, first + n as f32, &Device::Cpu).unwrap();
    let placed = copy_into_file(&x, memory, WritePolicy::Later).unwrap();
    assert!(is_in_file(&placed));
    placed
}

#[test]
fn a_view_stands_for_its_own_elements_and_no_others() -> Result<()> {
    const N: usize = 8192;
    let memory = FileMemory::create(&std::env::temp_dir(), [4 * N; 4].into_iter())?;
    let (x, victim) = (in_file(&memory, 0.0, N), in_file(&memory, 7.0, N));
    let before = [&x, &victim].map(values);

    // A broadcast view has more elements than its storage; the missing ones would lie in the next block.
    let row = x.narrow(0, 0, 1)?.broadcast_as((3, N))?;
    let wide = x.reshape((1, N))?.broadcast_as((3, N))?;
    let minus = Tensor::full(-1f32, (3, N), &Device::Cpu)?;
    for view in [&row, &wide] {
        assert!(is_in_file(view));
        assert!(overwrite_in_file(view, &minus, WritePolicy::Later).is_err());
        assert_eq!(values(&copy_from_file(view)?.unwrap()), values(&view.contiguous()?));
    }
    // So has a transposed one, in another order.
    let (square, transposed) = (x.reshape((N / 64, 64))?, x.reshape((N / 64, 64))?.t()?);
    assert!(overwrite_in_file(&transposed, &minus.narrow(0, 0, 1)?.reshape((64, N / 64))?, WritePolicy::Now).is_err());
    assert_eq!(values(&copy_from_file(&transposed)?.unwrap()), values(&square.t()?.contiguous()?));
    assert_eq!([&x, &victim].map(values), before);

    // A part is read and written in place.
    let part = x.narrow(0, 100, 2)?;
    assert_eq!(values(&copy_from_file(&part)?.unwrap()), [100.0, 101.0]);
    for writes in [WritePolicy::Later, WritePolicy::Now] {
        overwrite_in_file(&part, &Tensor::new(&[-5f32, -6.0], &Device::Cpu)?, writes)?;
    }
    let mut expected = before[0].clone();
    expected[100..102].copy_from_slice(&[-5.0, -6.0]);
    assert_eq!(values(&x), expected);
    let last = x.narrow(0, N - 1, 1)?;
    overwrite_in_file(&last, &Tensor::new(&[1f32], &Device::Cpu)?, WritePolicy::Now)?;
    expected[N - 1] = 1.0;
    assert_eq!([values(&x), values(&victim)], [expected.clone(), before[1].clone()]);

    // Advice about views and about empty tensors changes no values.
    let nothing = x.narrow(0, N, 0)?;
    for view in [&part, &last, &row, &transposed, &nothing] {
        [read_ahead, page_in, page_out].into_iter().for_each(|advise| advise(view));
    }
    assert!(copy_from_file(&nothing)?.is_none_or(|copy| copy.elem_count() == 0));
    assert!(overwrite_in_file(&x, &x, WritePolicy::Later).is_err(), "values that are the tensor itself");
    assert_eq!([values(&x), values(&victim)], [expected, before[1].clone()]);
    Ok(())
}

#[test]
fn what_is_borrowed_does_not_change_until_it_is_given_back() -> Result<()> {
    use std::sync::mpsc::channel;

    use candle_core::{CpuStorage, Storage};

    let memory = FileMemory::create(&std::env::temp_dir(), [4 << 13].into_iter())?;
    let x = in_file(&memory, 0.0, 1 << 13);
    let values = Tensor::full(-1f32, 1 << 13, &Device::Cpu)?;
    let (other, (begun, begins)) = (x.clone(), channel());
    let (storage, _) = x.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(borrowed)) = &*storage else { unreachable!("f32 on the CPU") };
    let writer = std::thread::spawn(move || {
        // The thread's directory in /proc.
        begun.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
        overwrite_in_file(&other, &values, WritePolicy::Later).unwrap();
    });
    // The writer must get as far as it can: to its end, or to the point where it waits.
    let stat = std::path::Path::new("/proc").join(begins.recv().unwrap()).join("stat");
    let is_waiting = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S "));
    let mut waits = 0;
    while !writer.is_finished() && waits < 200 {
        std::thread::yield_now();
        waits = if is_waiting() { waits + 1 } else { 0 };
    }
    assert!(!writer.is_finished(), "the writer waits for the borrow");
    assert_eq!(borrowed[..3], [0.0, 1.0, 2.0]);
    drop(storage);
    writer.join().unwrap();
    assert_eq!(x.narrow(0, 0, 3)?.to_vec1::<f32>()?, [-1.0; 3]);
    Ok(())
}

#[test]
fn every_dtype_comes_back_from_its_file() -> Result<()> {
    let x = Tensor::randn(0f32, 1.0, (64, 300), &Device::Cpu)?;
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let x = x.to_dtype(dtype)?;
        let memory = FileMemory::create(&std::env::temp_dir(), [x.elem_count() * dtype.size_in_bytes()].into_iter())?;
        let (placed, changed) = (copy_into_file(&x, &memory, WritePolicy::Now)?, (&x * 2.0)?);
        assert!(is_in_file(&placed));
        let values = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
        assert_eq!(values(&placed)?, values(&x)?);
        overwrite_in_file(&placed, &changed, WritePolicy::Later)?;
        assert_eq!(values(&copy_from_file(&placed)?.unwrap())?, values(&changed)?);
    }
    Ok(())
}
