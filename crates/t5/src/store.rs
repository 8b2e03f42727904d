//! Where tensors lie between two of their uses in a step: in memory, or in a file that nobody else can see.
//!
//! Invariants: what is got is what was put, bit by bit; the file has no name once it is open, so nothing is left of
//! it however the process ends; while one tensor is worked on the next is read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use candle_core::{DType, Shape, Tensor};

use crate::error::{Error, Result};
use crate::layers::bytes;

/// A place for tensors.
#[derive(Debug, Default)]
pub(crate) struct Store {
    file: Option<Spill>,
}

/// A tensor that was put somewhere.
#[derive(Clone, Debug)]
pub(crate) enum Stored {
    Memory(Tensor),
    File(Stretch),
}

/// A tensor's place in the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stretch {
    start: u64,
    shape: Shape,
    dtype: DType,
}

#[derive(Debug)]
struct Spill {
    file: Arc<File>,
    path: PathBuf,
    end: u64,
    ahead: Option<(Stretch, JoinHandle<std::io::Result<candle_core::Result<Tensor>>>)>,
}

impl Stored {
    /// What it holds in memory.
    pub fn bytes(&self) -> u64 {
        match self {
            Stored::Memory(x) => bytes(&[x]),
            Stored::File(_) => 0,
        }
    }
}

impl Store {
    /// In memory.
    pub fn in_memory() -> Store {
        Store::default()
    }

    /// In a file in `directory`, which is removed as soon as it is open.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn on_disk(directory: &Path) -> Result<Store> {
        let path = directory.join(format!(".offloaded-{}", std::process::id()));
        let options = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = options.map_err(Error::io(&path))?;
        std::fs::remove_file(&path).map_err(Error::io(&path))?;
        Ok(Store { file: Some(Spill { file: Arc::new(file), path, end: 0, ahead: None }) })
    }

    /// Puts a tensor there; in a file, behind what was put before.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn put(&mut self, x: Tensor) -> Result<Stored> {
        let Some(spill) = &mut self.file else { return Ok(Stored::Memory(x)) };
        let stretch = Stretch { start: spill.end, shape: x.shape().clone(), dtype: x.dtype() };
        let written = t5_ops::with_bytes(&x, |bytes| spill.file.write_all_at(bytes, spill.end))?;
        written.map_err(Error::io(&spill.path))?;
        spill.end += bytes(&[&x]);
        Ok(Stored::File(stretch))
    }

    /// The tensor that was put; begins to read the one that will be asked for after it.
    pub fn get(&mut self, stored: Stored, after: Option<&Stored>) -> Result<Tensor> {
        let (stretch, spill) = match (stored, &mut self.file) {
            (Stored::Memory(x), _) => return Ok(x),
            (Stored::File(stretch), Some(spill)) => (stretch, spill),
            (Stored::File(_), None) => unreachable!("a tensor is got from where it was put"),
        };
        let tensor = match spill.ahead.take() {
            Some((ahead, reader)) if ahead == stretch => reader.join().expect("a reader does not panic"),
            _ => read(&spill.file, &stretch),
        };
        if let Some(Stored::File(after)) = after {
            let (file, after) = (Arc::clone(&spill.file), after.clone());
            let stretch = after.clone();
            spill.ahead = Some((after, std::thread::spawn(move || read(&file, &stretch))));
        }
        Ok(tensor.map_err(Error::io(&spill.path))??)
    }
}

fn read(file: &File, stretch: &Stretch) -> std::io::Result<candle_core::Result<Tensor>> {
    let mut problem = None;
    let tensor = t5_ops::from_bytes(&stretch.shape, stretch.dtype, |bytes| {
        problem = file.read_exact_at(bytes, stretch.start).err();
    });
    problem.map_or(Ok(tensor), Err)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn what_was_put_on_disk_comes_back_bit_by_bit_in_any_order_and_the_file_has_no_name() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = Store::on_disk(directory.path()).unwrap();
        let tensors: Vec<Tensor> = [(DType::F32, 5), (DType::BF16, 3), (DType::F64, 2), (DType::F32, 700)]
            .iter()
            .map(|&(dtype, n)| Tensor::randn(0f32, 1.0, (2, n, 3), &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
            .collect();
        let put: Vec<Stored> = tensors.iter().map(|x| store.put(x.clone()).unwrap()).collect();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        for order in [[0, 1, 2, 3], [3, 1, 0, 2]] {
            for (place, &i) in order.iter().enumerate() {
                // One announced rightly, one wrongly, one not at all.
                let after = [order.get(place + 1), Some(&0), None][place % 3].map(|&next| &put[next]);
                let back = store.get(put[i].clone(), after).unwrap();
                assert_eq!((back.dtype(), back.dims()), (tensors[i].dtype(), tensors[i].dims()));
                let values =
                    |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
                assert_eq!(values(&back), values(&tensors[i]));
            }
        }
        assert!(put.iter().all(|stored| stored.bytes() == 0));
    }
}
