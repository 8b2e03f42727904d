//! Values of a card that another thread copies to and from the host, beside what is computed there.
//!
//! A stream of its own carries the copies. Each waits for what was launched before its values were staged, and is through when its call
//! returns. Until all of them are, nobody else looks at the values: so no kernel has to wait for a copy.

use candle_core::{Device, Result, Tensor};

use streams::{Moment, Streams};

/// The way between a card and the host.
#[derive(Clone, Debug)]
pub struct Staging(Streams);

impl Staging {
    /// That of a device; none where tensors lie in the host's memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn of(device: &Device) -> Result<Option<Self>> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(card) => Ok(Some(Self(Streams::of(card)?))),
            _ => Ok(None),
        }
    }

    /// A contiguous tensor as the work that was launched until now leaves it. None: it lies in the host's memory.
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

/// Values that are copied.
#[derive(Debug)]
pub struct Staged {
    tensor: Tensor,
    streams: Streams,
    launched: Moment,
}

impl Staged {
    /// How many bytes they are.
    pub fn bytes(&self) -> usize {
        self.tensor.elem_count() * self.tensor.dtype().size_in_bytes()
    }

    /// Copies as many bytes to the host, from the `at`-th on.
    ///
    /// # Errors
    /// The driver's; a tensor that is not contiguous.
    pub fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        self.check(at, to.len());
        self.streams.read(&self.tensor, &self.launched, at, to)
    }

    /// Copies bytes from the host to the `at`-th and those after it.
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
    use std::sync::Arc;

    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result};
    use candle_core::{CudaDevice, Result, Tensor};

    use super::Staged;
    use crate::cuda::address;

    pub type Moment = CudaEvent;

    #[derive(Clone, Debug)]
    pub struct Streams {
        computing: Arc<CudaStream>,
        copying: Arc<CudaStream>,
    }

    impl Streams {
        pub fn of(card: &CudaDevice) -> Result<Self> {
            let computing = card.cuda_stream();
            let copying = computing.context().new_stream().w()?;
            Ok(Self { computing, copying })
        }

        pub fn stage(&self, tensor: Tensor) -> Result<Staged> {
            let launched = self.computing.record_event(None).w()?;
            Ok(Staged { tensor, streams: self.clone(), launched })
        }

        pub fn read(&self, tensor: &Tensor, launched: &Moment, at: usize, to: &mut [u8]) -> Result<()> {
            self.copying.wait(launched).w()?;
            let from = address(tensor)? + at as u64;
            // SAFETY: so many bytes of a tensor that is held, and that nobody changes meanwhile. `to` is not used before the stream is through.
            unsafe { result::memcpy_dtoh_async(to, from, self.copying.cu_stream()) }.w()?;
            self.copying.synchronize().w()
        }

        pub fn write(&self, tensor: &Tensor, launched: &Moment, at: usize, from: &[u8]) -> Result<()> {
            self.copying.wait(launched).w()?;
            let to = address(tensor)? + at as u64;
            // SAFETY: so many bytes of a tensor that is held, and that nobody looks at meanwhile. `from` lives until the stream is through.
            unsafe { result::memcpy_htod_async(to, from, self.copying.cu_stream()) }.w()?;
            self.copying.synchronize().w()
        }
    }
}

/// Without a card there are none.
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
