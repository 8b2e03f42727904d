//! Copies between the host and a card while the card computes: on streams of their own, one for each direction.
//!
//! A copy has three moments. It begins once its tensor has memory (to the card) or has its values (to the host). It is carried out after
//! the caller launched work for the card to do meanwhile, because the host fills pinned memory and waits for it, unless the host's own
//! memory is page-locked. It is completed when the values are needed.
//!
//! Invariants: memory on the card is allocated and freed in the order of the stream that computes. No tensor is freed while a copy may
//! still use it. No thread waits for the whole card. On other devices a copy is done when it is carried out.

#[cfg(feature = "cuda")]
use std::rc::Rc;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::{Device, Result, Tensor};
use tensor_storage::{WritePolicy, overwrite, overwrite_in_place, unallocated};

#[cfg(feature = "cuda")]
use crate::copy_streams::Run;
use crate::copy_waits;

/// Bytes of pinned memory that the copies of a process go through: a few pieces, used round robin.
pub const STAGING_BYTES: u64 = (PIECES * PIECE) as u64;
const PIECES: usize = 4;
const PIECE: usize = 4 << 20;

/// A copy of values from the host to a tensor.
#[derive(Debug)]
pub struct Upload {
    // First, so that the stream that computes waits for the copy before the tensor's memory is freed.
    #[cfg(feature = "cuda")]
    way: Option<cuda::DeviceUpload>,
    to: Tensor,
    is_copied: bool,
}

impl Upload {
    /// Gives a tensor memory unless it has memory already. From here on the memory is reserved for the values; nothing may use it until
    /// [`Upload::complete`].
    ///
    /// # Errors
    /// Those of [`unallocated::materialize`].
    pub fn begin(to: &Tensor) -> Result<Self> {
        unallocated::materialize(to)?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            way: cuda::DeviceUpload::to(to)?,
            to: to.clone(),
            is_copied: false,
        })
    }

    /// Carries out the copy from `host_copy`, a tensor of this shape and dtype on the CPU.
    ///
    /// # Errors
    /// Another shape or dtype; the driver's.
    pub fn copy(&mut self, host_copy: &Tensor) -> Result<()> {
        self.execute(host_copy)?;
        self.is_copied = true;
        Ok(())
    }

    /// Carries out the copy from page-locked memory to a tensor of the same number of bytes on a card. The memory has its values from the
    /// event `is_filled` on. The returned event is reached when the memory has been read; `None` on the CPU.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The memory stays locked, and nothing writes to it before the returned event.
    #[cfg(feature = "cuda")]
    pub(crate) unsafe fn copy_locked(&mut self, runs: &[Run], is_filled: &CudaEvent) -> Result<Option<Rc<CudaEvent>>> {
        self.is_copied = true;
        let Some(way) = &mut self.way else { return Ok(None) };
        copy_waits::record_upload(&self.to);
        // SAFETY: by the caller's promise.
        unsafe { way.copy_locked(&self.to, runs, is_filled) }.map(Some)
    }

    /// Returns the tensor that the values are for.
    pub(crate) fn to(&self) -> &Tensor {
        &self.to
    }

    fn execute(&mut self, host_copy: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(way) = &mut self.way {
            unallocated::check_alike("copy", &self.to, host_copy)?;
            way.copy(&self.to, host_copy)?;
            copy_waits::record_upload(host_copy);
            return Ok(());
        }
        unallocated::check_alike("copy", &self.to, host_copy)?;
        overwrite(&self.to, host_copy)
    }

    /// Whether the copy was carried out.
    pub fn is_copied(&self) -> bool {
        self.is_copied
    }

    /// Has all work that is launched from here on wait for the values.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If the copy was not carried out.
    pub fn complete(self) -> Result<()> {
        assert!(self.is_copied, "values arrive that nobody has copied");
        #[cfg(feature = "cuda")]
        if let Some(way) = self.way {
            return copy_waits::waiting(self.to.device(), || way.complete());
        }
        Ok(())
    }
}

/// A copy of values from a tensor to the host. The tensor keeps its memory until the copy is complete, and nothing may change it until
/// then.
#[derive(Debug)]
pub struct Download {
    x: Tensor,
    #[cfg(feature = "cuda")]
    way: Option<cuda::DeviceDownload>,
}

impl Download {
    /// Begins to copy the values that a tensor has when all work launched so far is done.
    ///
    /// # Errors
    /// The driver's.
    pub fn begin(x: &Tensor) -> Result<Self> {
        let x = x.contiguous()?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            way: cuda::DeviceDownload::from(&x)?,
            x,
        })
    }

    /// Carries the copy out, and returns the values on the CPU.
    ///
    /// # Errors
    /// The driver's.
    pub fn complete(self) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(way) = self.way {
            copy_waits::record_download(&self.x);
            return copy_waits::waiting(self.x.device(), || way.complete(&self.x));
        }
        copy_waits::moved(&self.x, &Device::Cpu)
    }
}

/// A copy of a tensor's values from a card to its page-locked host copy. Work on the card that is launched later waits for the copy. The
/// host may not read the host copy before [`WriteBack::complete`]. Dropping this waits for the copy.
#[derive(Debug)]
pub struct WriteBack {
    #[cfg(feature = "cuda")]
    is_written_back: Rc<CudaEvent>,
    /// The copy writes to this tensor's memory until it is done.
    _host_copy: Tensor,
}

impl WriteBack {
    /// Begins to copy the values that a tensor has when all work launched so far is done. Returns `None` if the host copy is
    /// not page-locked; it then keeps its old values.
    ///
    /// # Errors
    /// Another shape or dtype; the driver's.
    pub fn begin(x: &Tensor, host_copy: &Tensor) -> Result<Option<Self>> {
        unallocated::check_alike("copy", x, host_copy)?;
        #[cfg(feature = "cuda")]
        if !x.device().is_cpu()
            && tensor_storage::change_bytes(host_copy, |bytes| crate::page_locked::is_locked(bytes))?
        {
            let x = x.contiguous()?;
            let copy = || tensor_storage::change_bytes(host_copy, |bytes| cuda::write_back(&x, bytes))?;
            let is_written_back = copy_waits::waiting(x.device(), copy)?;
            copy_waits::record_download(&x);
            return Ok(is_written_back.map(|is_written_back| Self { is_written_back, _host_copy: host_copy.clone() }));
        }
        Ok(None)
    }

    /// Waits until the host copy has the values.
    ///
    /// # Errors
    /// The driver's.
    pub fn complete(self) -> Result<()> {
        self.wait()
    }

    fn wait(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        cuda::wait(&self.is_written_back)?;
        Ok(())
    }
}

impl Drop for WriteBack {
    fn drop(&mut self) {
        // A caller that drops this reads no values, and so has no use for the error.
        let _ = self.wait();
    }
}

/// Copies the values of a tensor to its host copy: a tensor on the CPU of the same shape and dtype, in memory or in a file. Returns `None`
/// if the copy is done. Otherwise the copy to page-locked memory is still in flight.
///
/// # Errors
/// Those of [`WriteBack::begin`], of reading the tensor on the card, and of writing the host copy.
pub fn write_back(x: &Tensor, host_copy: &Tensor, writes: WritePolicy) -> Result<Option<WriteBack>> {
    let write_back = WriteBack::begin(x, host_copy)?;
    if write_back.is_none() {
        overwrite_in_place(host_copy, &copy_waits::moved(x, &Device::Cpu)?, writes)?;
    }
    Ok(write_back)
}

#[cfg(feature = "cuda")]
pub(crate) use cuda::{Copied, copy_streams_of, drop_copy_streams};

#[cfg(feature = "cuda")]
mod cuda {
    use std::cell::RefCell;
    use std::rc::Rc;

    use candle_core::cuda_backend::DeviceId;
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, DriverError};
    use candle_core::{Device, Tensor};
    use tensor_storage::{from_bytes, with_bytes, with_extent};

    use super::{PIECE, PIECES};
    use crate::copy_streams::{CopyStreams, Run};

    /// A copy to the card.
    #[derive(Debug)]
    pub struct DeviceUpload {
        copy_streams: Rc<RefCell<CopyStreams>>,
        /// Reached when the memory may be written to.
        is_free: CudaEvent,
        copied: Option<Copied>,
    }

    impl DeviceUpload {
        pub fn to(tensor: &Tensor) -> candle_core::Result<Option<Self>> {
            let Some(copy_streams) = copy_streams_of(tensor.device())? else { return Ok(None) };
            let is_free = copy_streams.borrow().launched().w()?;
            Ok(Some(Self { copy_streams, is_free, copied: None }))
        }

        pub fn copy(&mut self, to: &Tensor, host_copy: &Tensor) -> candle_core::Result<()> {
            let address = crate::launch::address(to)?;
            let mut copy_streams = self.copy_streams.borrow_mut();
            let host_copy = host_copy.contiguous()?;
            let read = with_extent(&host_copy, |file| copy_streams.upload_from_file(address, file, &self.is_free));
            let is_done = match read {
                Some(copied) => copied?,
                None => with_bytes(&host_copy, |bytes| copy_streams.up(address, bytes, &self.is_free))??,
            };
            self.copied = Some(Copied::at(Rc::new(is_done), &self.copy_streams));
            Ok(())
        }

        /// # Safety
        /// As [`CopyStreams::upload_pinned`].
        pub unsafe fn copy_locked(
            &mut self,
            to: &Tensor,
            runs: &[Run],
            is_filled: &CudaEvent,
        ) -> candle_core::Result<Rc<CudaEvent>> {
            let address = crate::launch::address(to)?;
            // SAFETY: by the caller's promise.
            let is_done =
                unsafe { self.copy_streams.borrow_mut().upload_pinned(address, runs, [&self.is_free, is_filled]) }?;
            self.copied = Some(Copied::at(Rc::clone(&is_done), &self.copy_streams));
            Ok(is_done)
        }

        pub fn complete(self) -> candle_core::Result<()> {
            self.copied.map_or(Ok(()), Copied::complete)
        }
    }

    /// A copy that was carried out. The stream that computes waits for it, at the latest when this is dropped.
    #[derive(Debug)]
    pub(crate) struct Copied {
        copy_streams: Rc<RefCell<CopyStreams>>,
        /// `None` once it was waited for.
        is_done: Option<Rc<CudaEvent>>,
    }

    impl Copied {
        /// A copy that is done at an event.
        pub fn at(is_done: Rc<CudaEvent>, copy_streams: &Rc<RefCell<CopyStreams>>) -> Self {
            Self { copy_streams: Rc::clone(copy_streams), is_done: Some(is_done) }
        }

        /// Has all work that is launched from here on wait for the copy.
        pub fn complete(mut self) -> candle_core::Result<()> {
            self.wait().w()
        }

        fn wait(&mut self) -> Result<(), DriverError> {
            self.is_done.take().map_or(Ok(()), |done| self.copy_streams.borrow().compute_wait_on(&done))
        }
    }

    impl Drop for Copied {
        fn drop(&mut self) {
            // If nothing waited for the copy because something else has failed, that is reported.
            let _ = self.wait();
        }
    }

    /// A copy to the host.
    #[derive(Debug)]
    pub struct DeviceDownload {
        copy_streams: Rc<RefCell<CopyStreams>>,
        /// Reached when the values are there.
        is_ready: CudaEvent,
    }

    impl DeviceDownload {
        pub fn from(x: &Tensor) -> candle_core::Result<Option<Self>> {
            let Some(copy_streams) = copy_streams_of(x.device())? else { return Ok(None) };
            let is_ready = copy_streams.borrow().launched().w()?;
            Ok(Some(Self { copy_streams, is_ready }))
        }

        pub fn complete(self, x: &Tensor) -> candle_core::Result<Tensor> {
            let address = crate::launch::address(x)?;
            let mut copied = Ok(());
            let copy = |bytes: &mut [u8]| copied = self.copy_streams.borrow_mut().down(address, bytes, &self.is_ready);
            let values = from_bytes(x.shape(), x.dtype(), copy);
            copied?;
            values
        }
    }

    /// Begins to copy a tensor to page-locked memory that stays locked. All work that is launched from here on waits for the copy. The
    /// returned event is reached when the values are there; `None` for a tensor on the CPU.
    pub fn write_back(x: &Tensor, host_copy: &mut [u8]) -> candle_core::Result<Option<Rc<CudaEvent>>> {
        let Some(copy_streams) = copy_streams_of(x.device())? else { return Ok(None) };
        let address = crate::launch::address(x)?;
        let is_written_back = {
            let mut copy_streams = copy_streams.borrow_mut();
            let is_ready = copy_streams.launched().w()?;
            // SAFETY: by the caller's promise. Work that changes the tensor is launched later, and waits for the copy.
            unsafe { copy_streams.download_pinned(address, &[Run::whole(host_copy)], [&is_ready]) }?
        };
        Copied::at(Rc::clone(&is_written_back), &copy_streams).complete()?;
        Ok(Some(is_written_back))
    }

    /// Blocks this thread until an event is reached.
    pub fn wait(event: &CudaEvent) -> candle_core::Result<()> {
        event.synchronize().w()
    }

    thread_local! {
        static COPY_STREAMS: RefCell<Option<(DeviceId, Rc<RefCell<CopyStreams>>)>> = const { RefCell::new(None) };
    }

    /// Drops the copy streams that this thread keeps.
    pub(crate) fn drop_copy_streams() {
        COPY_STREAMS.take();
    }

    /// Returns the copy streams of a card for the thread that computes, or `None` for other devices. The first copy creates them, and the
    /// thread keeps them.
    pub(crate) fn copy_streams_of(device: &Device) -> candle_core::Result<Option<Rc<RefCell<CopyStreams>>>> {
        let Device::Cuda(card) = device else { return Ok(None) };
        COPY_STREAMS.with_borrow_mut(|known| {
            if known.as_ref().is_none_or(|(id, _)| *id != card.id()) {
                *known = Some((card.id(), Rc::new(RefCell::new(CopyStreams::new(card, PIECES, PIECE)?))));
            }
            Ok(known.as_ref().map(|(_, copy_streams)| Rc::clone(copy_streams)))
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    // The host alone: `tests/copies` checks the same on a card.
    #[test]
    fn on_the_processor_values_are_there_when_a_copy_was_carried_out() {
        let host_copy = Tensor::arange(0f32, 24.0, &Device::Cpu).unwrap().reshape((4, 6)).unwrap();
        let to = unallocated::unallocated_like(&host_copy, &Device::Cpu).unwrap();
        let mut incoming = Upload::begin(&to).unwrap();
        assert!(!incoming.is_copied());
        assert!(incoming.copy(&host_copy.to_dtype(DType::BF16).unwrap()).is_err() && !incoming.is_copied());
        incoming.copy(&host_copy).unwrap();
        incoming.complete().unwrap();
        assert_eq!(to.to_vec2::<f32>().unwrap(), host_copy.to_vec2::<f32>().unwrap());
        let view = to.t().unwrap();
        let downloaded = Download::begin(&view).unwrap().complete().unwrap();
        assert_eq!(downloaded.to_vec2::<f32>().unwrap(), host_copy.t().unwrap().to_vec2::<f32>().unwrap());
    }

    // The host alone: the check is the same on any device.
    #[test]
    #[should_panic(expected = "values arrive that nobody has copied")]
    fn nothing_arrives_before_its_copy() {
        let to = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let _ = Upload::begin(&to).unwrap().complete();
    }
}
