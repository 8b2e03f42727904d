//! Page-locked memory of the host: a card copies to it and from it by itself, at the rate of the bus, while the host continues. Copies of
//! other memory go through page-locked pieces, which the host fills and empties.
//!
//! Memory is locked in place. If the driver refuses, copies are slower, and nothing else changes.
//!
//! Invariants: locked memory is not freed; memory is unlocked when no copy of it is under way.

use candle_core::{Device, Tensor};

use tensor_storage::is_in_file;

/// A tensor on the CPU whose memory is locked for as long as this exists.
#[derive(Debug)]
pub struct PageLocked {
    // Before the tensor, so that memory is unlocked before it is freed.
    #[cfg(feature = "cuda")]
    _lock: Lock,
    _tensor: Tensor,
}

impl PageLocked {
    /// Locks the memory of a contiguous tensor for copies to and from a device. `None` if there is no card, its driver refuses, or the
    /// tensor lies in a file.
    pub fn lock(tensor: &Tensor, device: &Device) -> Option<Self> {
        match device {
            _ if is_in_file(tensor) => None,
            #[cfg(feature = "cuda")]
            Device::Cuda(card) => {
                let (at, bytes) = tensor_storage::with_bytes(tensor, |bytes| (bytes.as_ptr(), bytes.len())).ok()?;
                // SAFETY: the tensor is kept, and its memory with it.
                let lock = unsafe { Lock::new(&card.cuda_stream(), at, bytes) }?;
                Some(Self { _lock: lock, _tensor: tensor.clone() })
            }
            _ => None,
        }
    }
}

#[cfg(feature = "cuda")]
pub(crate) use cuda::{Lock, is_locked};

#[cfg(feature = "cuda")]
mod cuda {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream, sys};

    /// A range that is locked.
    struct Range {
        bytes: usize,
        /// The number of locks on the range: a plan that replaces another plan locks the same weights.
        locks: usize,
    }

    /// The ranges, by their addresses.
    static LOCKED: Mutex<BTreeMap<usize, Range>> = Mutex::new(BTreeMap::new());

    fn locked() -> MutexGuard<'static, BTreeMap<usize, Range>> {
        LOCKED.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all of these bytes are locked.
    pub(crate) fn is_locked(bytes: &[u8]) -> bool {
        let at = bytes.as_ptr().addr();
        let before = locked().range(..=at).next_back().map(|(&start, range)| start + range.bytes);
        before.is_some_and(|end| at + bytes.len() <= end)
    }

    /// Memory that is locked until this is dropped.
    #[derive(Debug)]
    pub(crate) struct Lock {
        context: Arc<CudaContext>,
        at: usize,
    }

    impl Lock {
        /// Locks memory for the card of a stream. `None` if the driver refuses.
        ///
        /// # Safety
        /// The memory is allocated for as long as the lock exists.
        pub(crate) unsafe fn new(stream: &Arc<CudaStream>, at: *const u8, bytes: usize) -> Option<Self> {
            let context = Arc::clone(stream.context());
            context.bind_to_thread().ok()?;
            let mut locked = locked();
            match locked.get_mut(&at.addr()) {
                Some(range) if range.bytes == bytes => range.locks += 1,
                _ => {
                    // SAFETY: by the caller's promise; the driver reads no byte of it.
                    unsafe { sys::cuMemHostRegister_v2(at.cast_mut().cast(), bytes, 0) }.result().ok()?;
                    locked.insert(at.addr(), Range { bytes, locks: 1 });
                }
            }
            Some(Self { context, at: at.expose_provenance() })
        }
    }

    impl Drop for Lock {
        fn drop(&mut self) {
            let mut locked = locked();
            if let Some(range) = locked.get_mut(&self.at).filter(|range| range.locks > 1) {
                range.locks -= 1;
                return;
            }
            locked.remove(&self.at);
            // Unlocking at the end of a process has no use for an error.
            let _ = self.context.bind_to_thread().and_then(|()| self.context.synchronize());
            let at = std::ptr::with_exposed_provenance_mut(self.at);
            // SAFETY: it was locked here, and no copy of it is under way.
            let _ = unsafe { sys::cuMemHostUnregister(at) }.result();
        }
    }
}
