//! Elements of tensors on the CPU: how many there are, memory that nothing has written, memory that two tensors share, and values that are
//! overwritten.

use candle_core::{Result, Shape, Storage, Tensor, WithDType, bail};

/// Counts the elements of a shape. Fails if the product of any of its sizes overflows, even where another size is zero: kernels count rows
/// before they look at the width.
pub fn elements(shape: &Shape) -> Result<usize> {
    let count = shape.dims().iter().try_fold(1usize, |count, &size| count.checked_mul(size));
    match count.filter(|&count| count <= isize::MAX as usize) {
        Some(count) => Ok(count),
        None => bail!("expected a tensor that memory could hold, got shape {shape:?}"),
    }
}

/// Overwrites `target` with the values of `source`, converted to the dtype of `target`.
pub fn overwrite(target: &Tensor, source: &Tensor) -> Result<()> {
    let source = source.to_dtype(target.dtype())?.contiguous()?;
    if target.rank() == 0 {
        bail!("cannot write into a tensor of rank 0 in place")
    }
    target.slice_set(&source, 0, 0)
}

/// Takes all elements of a vector's capacity as its contents, because the system has already filled them. `None` where the compiler cannot
/// be told so.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
pub fn assume_filled<T: WithDType>(mut data: Vec<T>) -> Option<Vec<T>> {
    let count = data.capacity();
    // SAFETY: every pattern of bytes is a number, and the capacity has this many; nothing is written.
    unsafe {
        set_unspecified(&mut data.spare_capacity_mut()[..count]);
        data.set_len(count);
    }
    Some(data)
}

/// Here the compiler cannot be told so.
#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
pub fn assume_filled<T: WithDType>(_: Vec<T>) -> Option<Vec<T>> {
    None
}

/// Makes unwritten memory count as initialised, without touching it: kernels write large buffers whole, and a fill
/// before that would be another pass over memory.
///
/// # Safety
///
/// Every pattern of bytes is a value of the type.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
pub unsafe fn set_unspecified<T>(data: &mut [std::mem::MaybeUninit<T>]) {
    // SAFETY: no instruction. To the compiler the assembly is code that may have written any bytes to the memory
    // at the pointer.
    unsafe { std::arch::asm!("/* {0} */", in(reg) data.as_mut_ptr(), options(nostack, preserves_flags)) };
}

/// Sets memory to zeros, where the compiler cannot be told that it counts as initialised.
///
/// # Safety
///
/// Every pattern of bytes is a value of the type.
#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
pub unsafe fn set_unspecified<T>(data: &mut [std::mem::MaybeUninit<T>]) {
    // SAFETY: zero bytes are a value of the type, too.
    unsafe { data.as_mut_ptr().write_bytes(0, data.len()) };
}

/// True when two tensors live in one allocation. candle's locks are not re-entrant, so an in-place operation
/// on one while reading the other would wait for itself.
pub fn share_storage(a: &Tensor, b: &Tensor) -> bool {
    address(a) == address(b)
}

/// The address of the storage object that a tensor refers to.
fn address(t: &Tensor) -> *const Storage {
    let (storage, _) = t.storage_and_layout();
    &*storage
}
