//! What a thread keeps of its cards for later calls: lists, numbers, pinned memory, streams and events. All of it is dropped from here.

use candle_core::{Device, Result};

/// Limits the memory that is held for tensors of a device to `most` bytes. An allocation beyond the limit fails with the driver's error, as
/// on a card of that size. This thread drops its lists on the card and uploads them again later, so that the memory is given back if there
/// are no tensors. No recording may exist yet. Does nothing on the CPU.
///
/// # Errors
/// The driver's, and an error where the driver itself allocates for tensors.
pub fn limit_device(device: &Device, most: u64) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            forget_tensors();
            crate::memory::limit(device, most)
        }
        _ => {
            let _ = most;
            Ok(())
        }
    }
}

/// Drops everything that this thread keeps of the cards that it has used: lists, pinned memory, streams and events. A card is closed when
/// the last of these and of its tensors is gone. The memory of the process that the card's context takes is then free.
pub fn release_thread_caches() {
    #[cfg(feature = "cuda")]
    {
        forget_tensors();
        crate::pinned_copies::forget();
        crate::copies::drop_copy_streams();
        crate::copy_waits::forget_pending();
        crate::allocator::release_unused();
    }
}

/// Drops the tensors that this thread keeps on cards for later calls.
#[cfg(feature = "cuda")]
fn forget_tensors() {
    crate::launch::forget_lists();
    crate::launch::forget_numbers();
}
