//! The cost of copies between the host and a card to a thread: their bytes, and the time in which the card was idle because of them.
//!
//! Two events on the stream that computes enclose everything that waits for a copy. The first is reached when all work launched before is
//! done, the second when the card may continue. Between them lies the copy itself if it goes through this stream. If it goes through
//! another stream, the wait for it lies between them, including files that the host reads or writes meanwhile.
//!
//! Invariants: measuring adds no wait, except in [`so_far`]; on other devices nothing is counted.

use candle_core::{Device, Result, Tensor};

use crate::transfer::copied_to;

/// Copies of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CopyWaits {
    /// Seconds in which the card waited for copies.
    pub seconds: f64,
    /// Bytes from the host to the card.
    pub to_card: u64,
    /// Bytes from the card to the host.
    pub from_card: u64,
}

impl CopyWaits {
    /// The copies since an earlier count.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            seconds: self.seconds - earlier.seconds,
            to_card: self.to_card - earlier.to_card,
            from_card: self.from_card - earlier.from_card,
        }
    }
}

/// Returns the copies of this thread so far. Waits for copies that were begun.
///
/// # Errors
/// The driver's.
pub fn so_far() -> Result<CopyWaits> {
    #[cfg(feature = "cuda")]
    return cuda::so_far();
    #[cfg(not(feature = "cuda"))]
    Ok(CopyWaits::default())
}

/// Runs `work`, which waits for copies to or from a device. Nested calls are not counted twice.
///
/// # Errors
/// Those of `work`; the driver's.
pub fn waiting<R, E: From<candle_core::Error>>(
    device: &Device,
    work: impl FnOnce() -> std::result::Result<R, E>,
) -> std::result::Result<R, E> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(card) => cuda::waiting(&card.cuda_stream(), work),
        _ => work(),
    }
}

/// Copies a tensor to another device and waits for the copy; returns the tensor itself if it is there already.
///
/// # Errors
/// Those of the devices.
pub fn moved(x: &Tensor, to: &Device) -> Result<Tensor> {
    if x.device().same_device(to) {
        return Ok(x.clone());
    }
    let card = if to.is_cpu() { x.device() } else { to };
    let moved = waiting(card, || copied_to(x, to))?;
    if to.is_cpu() {
        record_download(x)
    } else {
        record_upload(x)
    }
    Ok(moved)
}

/// Counts the bytes of a tensor that is copied to a card.
pub(crate) fn record_upload(x: &Tensor) {
    #[cfg(feature = "cuda")]
    cuda::note(|waits| &mut waits.to_card, x);
    #[cfg(not(feature = "cuda"))]
    let _ = x;
}

/// Counts the bytes of a tensor that is copied from a card.
pub(crate) fn record_download(x: &Tensor) {
    #[cfg(feature = "cuda")]
    cuda::note(|waits| &mut waits.from_card, x);
    #[cfg(not(feature = "cuda"))]
    let _ = x;
}

#[cfg(feature = "cuda")]
pub(crate) use cuda::forget_pending;

#[cfg(feature = "cuda")]
mod cuda {
    use std::cell::RefCell;

    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
    use candle_core::{Result, Tensor};

    use super::CopyWaits;

    /// The most pairs of events that were not read yet. They are read together, because reading waits for the last pair.
    const MAX_PENDING: usize = 1024;

    #[derive(Default)]
    struct Spans {
        is_open: bool,
        pending: Vec<[CudaEvent; 2]>,
        waits: CopyWaits,
    }

    thread_local! {
        static SPANS: RefCell<Spans> = RefCell::default();
    }

    pub fn waiting<R, E: From<candle_core::Error>>(
        stream: &CudaStream,
        work: impl FnOnce() -> std::result::Result<R, E>,
    ) -> std::result::Result<R, E> {
        if SPANS.with_borrow_mut(|spans| std::mem::replace(&mut spans.is_open, true)) {
            return work();
        }
        let result = between_events(stream, work);
        SPANS.with_borrow_mut(|spans| spans.is_open = false);
        let (result, events) = result?;
        SPANS.with_borrow_mut(|spans| spans.pending.push(events));
        if SPANS.with_borrow(|spans| spans.pending.len() >= MAX_PENDING) {
            so_far()?;
        }
        Ok(result)
    }

    fn between_events<R, E: From<candle_core::Error>>(
        stream: &CudaStream,
        work: impl FnOnce() -> std::result::Result<R, E>,
    ) -> std::result::Result<(R, [CudaEvent; 2]), E> {
        let now = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w();
        let began = now()?;
        let result = work()?;
        Ok((result, [began, now()?]))
    }

    pub fn so_far() -> Result<CopyWaits> {
        SPANS.with_borrow_mut(|spans| {
            for [began, ended] in spans.pending.drain(..) {
                spans.waits.seconds += f64::from(began.elapsed_ms(&ended).w()?) * 1e-3;
            }
            Ok(spans.waits)
        })
    }

    /// Drops the events that this thread keeps. Waits that were not read yet are not counted.
    pub(crate) fn forget_pending() {
        SPANS.with_borrow_mut(|spans| spans.pending = Vec::new());
    }

    pub fn note(to: impl FnOnce(&mut CopyWaits) -> &mut u64, x: &Tensor) {
        let bytes = (x.elem_count() * x.dtype().size_in_bytes()) as u64;
        SPANS.with_borrow_mut(|spans| *to(&mut spans.waits) += bytes);
    }
}
