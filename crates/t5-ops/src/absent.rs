//! Tensors whose values are somewhere else for a while, as in the memory of another process: their storage is empty meanwhile.
//!
//! Invariants: a tensor keeps its shape and dtype; whoever reads values that are absent panics, and reads no other memory.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};

/// Frees the memory of a tensor, of all its views and of all that share its storage. Until [`provide`] nobody may use its values.
///
/// # Errors
/// A tensor that is not on the CPU, in F32, F64 or BF16.
pub fn release(x: &Tensor) -> Result<()> {
    x.inplace_op1(&Resize { name: "release", elements: 0 })
}

/// Gives a tensor that was released its memory back: zeros. One that has its values keeps them.
///
/// # Errors
/// Those of [`release`]; a view.
pub fn provide(x: &Tensor) -> Result<()> {
    if !x.is_contiguous() || x.layout().start_offset() != 0 {
        bail!("provide: expected a tensor with storage of its own, got a view with strides {:?}", x.stride());
    }
    x.inplace_op1(&Resize { name: "provide", elements: x.elem_count() })
}

struct Resize {
    name: &'static str,
    elements: usize,
}

impl InplaceOp1 for Resize {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        fn resize<T: Clone + Default>(data: &mut Vec<T>, elements: usize) {
            if data.len() != elements {
                // A new vector of zeros has pages that nobody has touched.
                *data = vec![T::default(); elements];
            }
        }
        match storage {
            CpuStorage::F32(data) => resize(data, self.elements),
            CpuStorage::F64(data) => resize(data, self.elements),
            CpuStorage::BF16(data) => resize(data, self.elements),
            other => bail!("{}: expected F32, F64 or BF16 on the CPU, got {:?}", self.name, other),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;

    use candle_core::{DType, Device};

    use super::*;
    use crate::{change_bytes, with_bytes};

    #[test]
    fn what_was_released_comes_back_as_zeros_for_all_who_hold_it() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let x = Tensor::ones((300, 70), dtype, &Device::Cpu).unwrap();
            let other = x.clone();
            release(&x).unwrap();
            let read = AssertUnwindSafe(|| with_bytes(&other, <[u8]>::len));
            assert!(std::panic::catch_unwind(read).is_err(), "no other memory is read");
            provide(&other).unwrap();
            let sum = |x: &Tensor| x.to_dtype(DType::F64).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
            assert_eq!(sum(&x), 0.0);
            change_bytes(&x, |bytes| bytes.fill(1)).unwrap();
            provide(&x).unwrap();
            assert_ne!(sum(&other), 0.0, "values that are there stay");
        }
        assert!(provide(&Tensor::ones((3, 2), DType::F32, &Device::Cpu).unwrap().t().unwrap()).is_err());
    }
}
