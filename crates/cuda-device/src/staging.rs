//! Values of a card that another thread copies to and from the host while the card computes.
//!
//! The thread has copy streams of its own for these copies. A copy waits for the work that was launched before its values were staged,
//! and is done when its call returns. Until all copies are done nothing else may use the values, so no kernel has to wait for a copy.

use candle_core::{Device, Result, Tensor};

use streams::{Moment, Streams};

/// Bytes of pinned memory that the copies of a process go through: a few pieces, used round robin.
pub const STAGING_BYTES: u64 = (PIECES * PIECE) as u64;
const PIECES: usize = 4;
const PIECE: usize = 1 << 20;

/// The streams between a card and the host.
#[derive(Clone, Debug)]
pub struct Staging(Streams);

impl Staging {
    /// The staging of a device; `None` where tensors lie in the host's memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn for_device(device: &Device) -> Result<Option<Self>> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(card) => Ok(Some(Self(Streams::for_device(card)?))),
            _ => Ok(None),
        }
    }

    /// Stages a contiguous tensor, with the values it has when the work launched so far is done. `None` if it lies in the host's memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn stage(&self, tensor: &Tensor) -> Result<Option<Staged>> {
        if tensor.device().is_cpu() {
            return Ok(None);
        }
        self.0.stage(tensor.clone()).map(Some)
    }
}

/// Values that are being copied.
#[derive(Debug)]
pub struct Staged {
    tensor: Tensor,
    streams: Streams,
    launched: Moment,
}

impl Staged {
    /// The number of bytes of the values.
    pub fn bytes(&self) -> usize {
        self.tensor.elem_count() * self.tensor.dtype().size_in_bytes()
    }

    /// Copies `to.len()` bytes of the values, from byte `at` on, to the host.
    ///
    /// # Errors
    /// The driver's; a tensor that is not contiguous.
    pub fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        self.check(at, to.len());
        self.streams.read(&self.tensor, &self.launched, at, to)
    }

    /// Copies bytes from the host to the values, from byte `at` on.
    ///
    /// # Errors
    /// Those of [`Staged::read`].
    pub fn write(&self, at: usize, from: &[u8]) -> Result<()> {
        self.check(at, from.len());
        self.streams.write(&self.tensor, &self.launched, at, from)
    }

    fn check(&self, at: usize, bytes: usize) {
        let (end, all) = (at + bytes, self.bytes());
        assert!(end <= all, "staging: expected some of {all} bytes, got {at} to {end}");
    }
}

#[cfg(feature = "cuda")]
mod streams {
    use std::sync::{Arc, Mutex, MutexGuard};

    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
    use candle_core::{CudaDevice, Result, Tensor};

    use super::{PIECE, PIECES, Staged};
    use crate::copy_streams::CopyStreams;
    use crate::launch::address;

    pub type Moment = CudaEvent;

    #[derive(Clone, Debug)]
    pub struct Streams {
        /// Outside the lock of the copy streams, so that the thread that computes does not wait for copies.
        compute_stream: Arc<CudaStream>,
        copy_streams: Arc<Mutex<CopyStreams>>,
    }

    impl Streams {
        pub fn for_device(card: &CudaDevice) -> Result<Self> {
            Ok(Self {
                compute_stream: card.cuda_stream(),
                copy_streams: Arc::new(Mutex::new(CopyStreams::new(card, PIECES, PIECE)?)),
            })
        }

        pub fn stage(&self, tensor: Tensor) -> Result<Staged> {
            let launched = self.compute_stream.record_event(None).w()?;
            Ok(Staged { tensor, streams: self.clone(), launched })
        }

        fn copy_streams(&self) -> MutexGuard<'_, CopyStreams> {
            self.copy_streams.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
        }

        pub fn read(&self, tensor: &Tensor, launched: &Moment, at: usize, to: &mut [u8]) -> Result<()> {
            self.copy_streams().down(address(tensor)? + at as u64, to, launched)
        }

        pub fn write(&self, tensor: &Tensor, launched: &Moment, at: usize, from: &[u8]) -> Result<()> {
            let copied = self.copy_streams().up(address(tensor)? + at as u64, from, launched)?;
            copied.synchronize().w()
        }
    }
}

/// Without a card there are no streams.
#[cfg(not(feature = "cuda"))]
mod streams {
    use candle_core::{Result, Tensor};

    use super::Staged;

    #[derive(Debug)]
    pub enum Moment {}

    #[derive(Clone, Debug)]
    pub enum Streams {}

    impl Streams {
        pub fn stage(&self, _: Tensor) -> Result<Staged> {
            match *self {}
        }

        pub fn read(&self, _: &Tensor, _: &Moment, _: usize, _: &mut [u8]) -> Result<()> {
            match *self {}
        }

        pub fn write(&self, _: &Tensor, _: &Moment, _: usize, _: &[u8]) -> Result<()> {
            match *self {}
        }
    }
}
