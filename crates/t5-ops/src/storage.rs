//! Slices of CPU tensors: read views, outputs written in full before they are read, and in-place access.
//!
//! Kernels see `F32` and `BF16` elements through [`Element`] and always contiguous data.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Shape, Storage, StorageRef, Tensor, WithDType, bail};
use half::bf16;
use tensor_storage::{elements, set_unspecified, share_storage};

use crate::parallel::Shared;

/// The elements of an operand of a matrix product.
#[derive(Clone, Copy)]
pub(crate) enum Operand<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl<'a> From<&'a [f32]> for Operand<'a> {
    fn from(data: &'a [f32]) -> Self {
        Operand::F32(data)
    }
}

impl<'a> From<&'a [bf16]> for Operand<'a> {
    fn from(data: &'a [bf16]) -> Self {
        Operand::Bf16(data)
    }
}

/// The elements of the result of a matrix product.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    F32(Shared<f32>),
    Bf16(Shared<bf16>),
}

/// An element that the kernels read and write as f32.
pub(crate) trait Element: WithDType {
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
    /// Rounds down or up at random, by the upper half of `noise`. Over uniform noise the expected value is exact.
    fn from_f32_stochastic(x: f32, noise: u32) -> Self;
    /// The elements of a CPU storage if they are of this type.
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    /// A slice of this type as an operand of a matrix product.
    fn operand(data: &[Self]) -> Operand<'_>;
    /// A buffer of this type as the result of a matrix product.
    fn target(data: Shared<Self>) -> Target;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn from_f32_stochastic(x: f32, _: u32) -> Self {
        x
    }
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::F32(data) = storage { Some(data) } else { None }
    }
    fn operand(data: &[Self]) -> Operand<'_> {
        Operand::F32(data)
    }
    fn target(data: Shared<Self>) -> Target {
        Target::F32(data)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// Rounds to nearest, ties to even; without the branches of `half`, so that loops vectorise.
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if x.is_nan() { quiet_nan } else { rounded } as u16)
    }
    #[inline(always)]
    fn from_f32_stochastic(x: f32, noise: u32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(noise >> 16) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if x.is_nan() { quiet_nan } else { rounded } as u16)
    }
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::BF16(data) = storage { Some(data) } else { None }
    }
    fn operand(data: &[Self]) -> Operand<'_> {
        Operand::Bf16(data)
    }
    fn target(data: Shared<Self>) -> Target {
        Target::Bf16(data)
    }
}

/// Calls `$body` with the type alias `$element` set to the element type of a tensor that
/// [`Path::Cpu`](crate::dispatch::Path::Cpu) takes.
macro_rules! with_element {
    ($dtype:expr, $element:ident, $body:expr) => {
        match $dtype {
            candle_core::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            _ => {
                type $element = f32;
                $body
            }
        }
    };
}
pub(crate) use with_element;

/// The elements of a contiguous CPU tensor, under its read lock.
pub(crate) struct View<'a> {
    storage: StorageRef<'a>,
    range: Range<usize>,
}

impl<'a> View<'a> {
    /// The view of a tensor that must be contiguous and on the CPU.
    pub(crate) fn new(t: &'a Tensor) -> Result<Self> {
        elements(t.shape())?;
        let (storage, layout) = t.storage_and_layout();
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("expected a contiguous tensor, got strides {:?}", layout.stride())
        };
        Ok(Self { storage, range: start..end })
    }

    /// The elements, if they are of type `T`.
    pub(crate) fn slice<T: WithDType>(&self) -> Result<&[T]> {
        match &*self.storage {
            Storage::Cpu(storage) => Ok(&T::cpu_storage_as_slice(storage)?[self.range.clone()]),
            _ => bail!("expected a tensor on the CPU"),
        }
    }

    /// The elements as f32, converted if they are not.
    pub(crate) fn to_f32(&self) -> Result<std::borrow::Cow<'_, [f32]>> {
        match &*self.storage {
            Storage::Cpu(CpuStorage::BF16(_)) => {
                Ok(self.slice::<bf16>()?.iter().map(|x| x.to_f32()).collect::<Vec<_>>().into())
            }
            _ => Ok(self.slice::<f32>()?.into()),
        }
    }

    /// The elements as an operand of a matrix product.
    pub(crate) fn operand(&self) -> Result<Operand<'_>> {
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(_)) => Ok(self.slice::<f32>()?.into()),
            Storage::Cpu(CpuStorage::BF16(_)) => Ok(self.slice::<bf16>()?.into()),
            _ => bail!("expected a matrix of F32 or BF16 on the CPU"),
        }
    }

    /// The ids of a tensor of `U32`.
    pub(crate) fn ids(&self) -> Result<&[u32]> {
        match &*self.storage {
            Storage::Cpu(CpuStorage::U32(data)) => Ok(&data[self.range.clone()]),
            _ => bail!("expected ids of U32 on the CPU"),
        }
    }
}

/// A new CPU tensor. `write` must set every element.
pub(crate) fn filled<T: Element>(
    shape: impl Into<Shape>,
    write: impl FnOnce(&mut [T]) -> Result<()>,
) -> Result<Tensor> {
    let shape = shape.into();
    let mut data = scratch::<T>(elements(&shape)?);
    write(&mut data)?;
    Tensor::from_vec(data, shape, &candle_core::Device::Cpu)
}

/// A buffer whose contents are unspecified until written.
pub(crate) fn scratch<T: Element>(n: usize) -> Vec<T> {
    let mut data = Vec::<T>::with_capacity(n);
    // SAFETY: an element is a float, and every pattern of bytes is a float. The capacity is n, and n elements are set.
    unsafe {
        set_unspecified(&mut data.spare_capacity_mut()[..n]);
        data.set_len(n);
    }
    data
}

/// Calls `f` with the elements of `t` for changes in place, under its write lock.
///
/// Fails if `t` is not contiguous, not on the CPU or not of type `T`, or if it shares storage with one of
/// `operands`, whose locks `f` may hold.
pub(crate) fn update<T: Element, R>(
    op: &'static str,
    t: &Tensor,
    operands: &[&Tensor],
    f: impl FnOnce(&mut [T]) -> Result<R>,
) -> Result<R> {
    struct Update<F, R>(&'static str, std::cell::Cell<Option<F>>, std::cell::Cell<Option<R>>);
    impl<F, R> Update<F, R> {
        fn run<T: Element>(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()>
        where
            F: FnOnce(&mut [T]) -> Result<R>,
        {
            let Some((start, end)) = layout.contiguous_offsets() else {
                bail!("{}: expected a contiguous tensor, got strides {:?}", self.0, layout.stride())
            };
            let dtype = storage.dtype();
            let Some(data) = T::slice_mut(storage) else { bail!("{}: expected {:?}, got {dtype:?}", self.0, T::DTYPE) };
            if let Some(f) = self.1.take() {
                self.2.set(Some(f(&mut data[start..end])?));
            }
            Ok(())
        }
    }
    /// Carries the element type, for which `InplaceOp1` has no place.
    struct Typed<T, F, R>(Update<F, R>, std::marker::PhantomData<T>);
    impl<T: Element, R, F: FnOnce(&mut [T]) -> Result<R>> InplaceOp1 for Typed<T, F, R> {
        fn name(&self) -> &'static str {
            self.0.0
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            self.0.run(storage, layout)
        }
    }

    for operand in operands {
        if share_storage(t, operand) {
            bail!("{op}: the tensor to be changed in place shares its storage with an operand")
        }
    }
    let cell = |f| Update(op, std::cell::Cell::new(Some(f)), std::cell::Cell::new(None));
    let typed = Typed(cell(f), std::marker::PhantomData);
    t.inplace_op1(&typed)?;
    match typed.0.2.take() {
        Some(result) => Ok(result),
        None => bail!("{op}: expected a tensor on the CPU"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn rounding_to_bf16_is_that_of_half() {
        let specials = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45];
        let mut bits = 1u32;
        let patterns = (0..200_000).map(|_| {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(bits)
        });
        for x in specials.into_iter().chain(patterns) {
            let (got, expected) = (<bf16 as Element>::from_f32(x), bf16::from_f32(x));
            assert!(got == expected || (got.is_nan() && expected.is_nan()), "{x}: {got} and {expected}");
        }
    }

    // The host alone: its storage has a lock.
    #[test]
    fn an_accumulator_that_is_also_an_operand_is_an_error_and_not_a_deadlock() {
        let x = Tensor::zeros((4, 4), DType::F32, &Device::Cpu).unwrap();
        let row = x.narrow(0, 1, 1).unwrap();
        assert!(update::<f32, ()>("test", &x, &[&row], |_| Ok(())).is_err());
        update::<f32, ()>("test", &row, &[], |data| {
            data.fill(2.0);
            Ok(())
        })
        .unwrap();
        assert_eq!(x.sum_all().unwrap().to_scalar::<f32>().unwrap(), 8.0);
    }

    #[test]
    fn sizes_whose_product_overflows_are_an_error() {
        for shape in [&[1 << 33, 1 << 33][..], &[1 << 40, 1 << 40, 0], &[usize::MAX, 2], &[1 << 63]] {
            assert!(filled::<f32>(shape, |_| unreachable!("nothing is made")).is_err(), "{shape:?}");
        }
        assert!(filled::<f32>(&[0, 1 << 40][..], |_| Ok(())).is_ok());
    }

    // The host alone: its storage has slices.
    #[test]
    fn the_wrong_dtype_is_an_error() {
        let x = Tensor::zeros(4, DType::F64, &Device::Cpu).unwrap();
        assert!(update::<f32, ()>("test", &x, &[], |_| Ok(())).is_err());
        assert!(View::new(&x).unwrap().slice::<f32>().is_err());
    }
}
