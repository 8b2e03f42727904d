//! Copies between the host and a card while the card computes: on streams of their own, one for each direction.
//!
//! A copy has three moments. It begins once its tensor has memory (to the card) or has its values (to the host). It is carried out after
//! the caller launched work for the card to do meanwhile, because the host fills pinned memory and waits for it, unless the host's own
//! memory is page-locked. It arrives when the values are needed.
//!
//! Invariants: memory on the card is allocated and freed in the order of the stream that computes. No tensor is freed while a copy may
//! still use it. No thread waits for the whole card. On other devices a copy is done when it is carried out.

#[cfg(feature = "cuda")]
use std::rc::Rc;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::{Device, Result, Tensor};

use crate::dispatch::overwrite;
#[cfg(feature = "cuda")]
use crate::lane::Run;
use crate::paging::{Writes, overwrite_where_it_lies};
use crate::{absent, copy_waits};

/// Bytes of pinned memory that the copies of a process go through: a few pieces, used round robin.
pub const STAGING_BYTES: u64 = (PIECES * PIECE) as u64;
const PIECES: usize = 4;
const PIECE: usize = 4 << 20;

/// Values on their way from the host to a tensor.
#[derive(Debug)]
pub struct Coming {
    // First, so that the stream that computes waits for the copy before the tensor's memory is freed.
    #[cfg(feature = "cuda")]
    way: Option<cuda::Up>,
    to: Tensor,
    is_copied: bool,
}

impl Coming {
    /// Gives a tensor memory unless it has memory already. From here on the memory is reserved for the values; nothing may use it until
    /// they arrive.
    ///
    /// # Errors
    /// Those of [`absent::provide`].
    pub fn begin(to: &Tensor) -> Result<Self> {
        absent::provide(to)?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            way: cuda::Up::to(to)?,
            to: to.clone(),
            is_copied: false,
        })
    }

    /// Carries out the copy from `home`, a tensor of this shape and dtype on the CPU.
    ///
    /// # Errors
    /// Another shape or dtype; the driver's.
    pub fn copy(&mut self, home: &Tensor) -> Result<()> {
        self.carry_out(home)?;
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
        copy_waits::note_to_card(&self.to);
        // SAFETY: by the caller's promise.
        unsafe { way.copy_locked(&self.to, runs, is_filled) }.map(Some)
    }

    /// Returns the tensor that the values are for.
    pub(crate) fn to(&self) -> &Tensor {
        &self.to
    }

    fn carry_out(&mut self, home: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(way) = &mut self.way {
            absent::check_alike("copy", &self.to, home)?;
            way.copy(&self.to, home)?;
            copy_waits::note_to_card(home);
            return Ok(());
        }
        absent::check_alike("copy", &self.to, home)?;
        overwrite(&self.to, home)
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
    pub fn arrive(self) -> Result<()> {
        assert!(self.is_copied, "values arrive that nobody has copied");
        #[cfg(feature = "cuda")]
        if let Some(way) = self.way {
            return copy_waits::waiting(self.to.device(), || way.arrive());
        }
        Ok(())
    }
}

/// Values on their way from a tensor to the host. The tensor keeps its memory until they have arrived, and nothing may change it until
/// then.
#[derive(Debug)]
pub struct Leaving {
    x: Tensor,
    #[cfg(feature = "cuda")]
    way: Option<cuda::Down>,
}

impl Leaving {
    /// Begins to copy the values that a tensor has when all work launched so far is done.
    ///
    /// # Errors
    /// The driver's.
    pub fn begin(x: &Tensor) -> Result<Self> {
        let x = x.contiguous()?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            way: cuda::Down::from(&x)?,
            x,
        })
    }

    /// Carries the copy out, and returns the values on the CPU.
    ///
    /// # Errors
    /// The driver's.
    pub fn arrive(self) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(way) = self.way {
            copy_waits::note_from_card(&self.x);
            return copy_waits::waiting(self.x.device(), || way.arrive(&self.x));
        }
        copy_waits::moved(&self.x, &Device::Cpu)
    }
}

/// Values of a tensor on a card on their way to its home, which is page-locked. Work on the card that is launched later waits for the copy.
/// Nothing may read the home on the host before [`Returning::arrive`]. Dropping this waits for the copy.
#[derive(Debug)]
pub struct Returning {
    #[cfg(feature = "cuda")]
    is_home: Rc<CudaEvent>,
    /// The copy writes to this tensor's memory until it is done.
    _home: Tensor,
}

impl Returning {
    /// Begins to copy the values that a tensor has when all work launched so far is done. Returns `None` if the home is not page-locked;
    /// the home then keeps its old values.
    ///
    /// # Errors
    /// Another shape or dtype; the driver's.
    pub fn begin(x: &Tensor, home: &Tensor) -> Result<Option<Self>> {
        absent::check_alike("copy", x, home)?;
        #[cfg(feature = "cuda")]
        if !x.device().is_cpu() && crate::change_bytes(home, |bytes| crate::page_locked::is_locked(bytes))? {
            let x = x.contiguous()?;
            let copy = || crate::change_bytes(home, |bytes| cuda::copy_home(&x, bytes))?;
            let is_home = copy_waits::waiting(x.device(), copy)?;
            copy_waits::note_from_card(&x);
            return Ok(is_home.map(|is_home| Self { is_home, _home: home.clone() }));
        }
        Ok(None)
    }

    /// Waits until the values are there.
    ///
    /// # Errors
    /// The driver's.
    pub fn arrive(self) -> Result<()> {
        self.wait()
    }

    fn wait(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        cuda::wait(&self.is_home)?;
        Ok(())
    }
}

impl Drop for Returning {
    fn drop(&mut self) {
        // A caller that drops this reads no values, and so has no use for the error.
        let _ = self.wait();
    }
}

/// Copies the values of a tensor to its home on the CPU: a tensor of the same shape and dtype, in memory or in a file. Returns `None` if
/// the values have arrived. Otherwise they are still on their way to page-locked memory.
///
/// # Errors
/// Those of [`Returning::begin`], of reading the tensor on the card, and of writing the home.
pub fn return_home(x: &Tensor, home: &Tensor, writes: Writes) -> Result<Option<Returning>> {
    let returning = Returning::begin(x, home)?;
    if returning.is_none() {
        overwrite_where_it_lies(home, &copy_waits::moved(x, &Device::Cpu)?, writes)?;
    }
    Ok(returning)
}

#[cfg(feature = "cuda")]
pub(crate) use cuda::{Copied, forget_lane, lane_of};

#[cfg(feature = "cuda")]
mod cuda {
    use std::cell::RefCell;
    use std::rc::Rc;

    use candle_core::cuda_backend::DeviceId;
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, DriverError};
    use candle_core::{Device, Tensor};

    use super::{PIECE, PIECES};
    use crate::bytes::{from_bytes, with_bytes};
    use crate::lane::{Lane, Run};
    use crate::paging::with_stretch;

    /// A copy to the card.
    #[derive(Debug)]
    pub struct Up {
        lane: Rc<RefCell<Lane>>,
        /// Reached when the memory may be written to.
        is_free: CudaEvent,
        copied: Option<Copied>,
    }

    impl Up {
        pub fn to(tensor: &Tensor) -> candle_core::Result<Option<Self>> {
            let Some(lane) = lane_of(tensor.device())? else { return Ok(None) };
            let is_free = lane.borrow().launched().w()?;
            Ok(Some(Self { lane, is_free, copied: None }))
        }

        pub fn copy(&mut self, to: &Tensor, home: &Tensor) -> candle_core::Result<()> {
            let address = crate::cuda::address(to)?;
            let mut lane = self.lane.borrow_mut();
            let home = home.contiguous()?;
            let read = with_stretch(&home, |file| lane.up_from_file(address, file, &self.is_free));
            let is_done = match read {
                Some(copied) => copied?,
                None => with_bytes(&home, |bytes| lane.up(address, bytes, &self.is_free))??,
            };
            self.copied = Some(Copied::at(Rc::new(is_done), &self.lane));
            Ok(())
        }

        /// # Safety
        /// As [`Lane::up_beside`].
        pub unsafe fn copy_locked(
            &mut self,
            to: &Tensor,
            runs: &[Run],
            is_filled: &CudaEvent,
        ) -> candle_core::Result<Rc<CudaEvent>> {
            let address = crate::cuda::address(to)?;
            // SAFETY: by the caller's promise.
            let is_done = unsafe { self.lane.borrow_mut().up_beside(address, runs, [&self.is_free, is_filled]) }?;
            self.copied = Some(Copied::at(Rc::clone(&is_done), &self.lane));
            Ok(is_done)
        }

        pub fn arrive(self) -> candle_core::Result<()> {
            self.copied.map_or(Ok(()), Copied::arrive)
        }
    }

    /// A copy that was carried out. The stream that computes waits for it, at the latest when this is dropped.
    #[derive(Debug)]
    pub(crate) struct Copied {
        lane: Rc<RefCell<Lane>>,
        /// `None` once it was waited for.
        is_done: Option<Rc<CudaEvent>>,
    }

    impl Copied {
        /// A copy that is done at an event.
        pub fn at(is_done: Rc<CudaEvent>, lane: &Rc<RefCell<Lane>>) -> Self {
            Self { lane: Rc::clone(lane), is_done: Some(is_done) }
        }

        /// Has all work that is launched from here on wait for the copy.
        pub fn arrive(mut self) -> candle_core::Result<()> {
            self.wait().w()
        }

        fn wait(&mut self) -> Result<(), DriverError> {
            self.is_done.take().map_or(Ok(()), |done| self.lane.borrow().have_computing_wait(&done))
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
    pub struct Down {
        lane: Rc<RefCell<Lane>>,
        /// Reached when the values are there.
        is_ready: CudaEvent,
    }

    impl Down {
        pub fn from(x: &Tensor) -> candle_core::Result<Option<Self>> {
            let Some(lane) = lane_of(x.device())? else { return Ok(None) };
            let is_ready = lane.borrow().launched().w()?;
            Ok(Some(Self { lane, is_ready }))
        }

        pub fn arrive(self, x: &Tensor) -> candle_core::Result<Tensor> {
            let address = crate::cuda::address(x)?;
            let mut copied = Ok(());
            let copy = |bytes: &mut [u8]| copied = self.lane.borrow_mut().down(address, bytes, &self.is_ready);
            let values = from_bytes(x.shape(), x.dtype(), copy);
            copied?;
            values
        }
    }

    /// Begins to copy a tensor to page-locked memory that stays locked. All work that is launched from here on waits for the copy. The
    /// returned event is reached when the values are there; `None` for a tensor on the CPU.
    pub fn copy_home(x: &Tensor, home: &mut [u8]) -> candle_core::Result<Option<Rc<CudaEvent>>> {
        let Some(lane) = lane_of(x.device())? else { return Ok(None) };
        let address = crate::cuda::address(x)?;
        let is_home = {
            let mut lane = lane.borrow_mut();
            let is_ready = lane.launched().w()?;
            // SAFETY: by the caller's promise. Work that changes the tensor is launched later, and waits for the copy.
            unsafe { lane.down_beside(address, &[Run::of(home)], [&is_ready]) }?
        };
        Copied::at(Rc::clone(&is_home), &lane).arrive()?;
        Ok(Some(is_home))
    }

    /// Blocks this thread until an event is reached.
    pub fn wait(event: &CudaEvent) -> candle_core::Result<()> {
        event.synchronize().w()
    }

    thread_local! {
        static LANE: RefCell<Option<(DeviceId, Rc<RefCell<Lane>>)>> = const { RefCell::new(None) };
    }

    /// Drops the lane that this thread keeps.
    pub(crate) fn forget_lane() {
        LANE.take();
    }

    /// Returns the lane of a card for the thread that computes, or `None` for other devices. The first copy creates the lane, and the
    /// thread keeps it.
    pub(crate) fn lane_of(device: &Device) -> candle_core::Result<Option<Rc<RefCell<Lane>>>> {
        let Device::Cuda(card) = device else { return Ok(None) };
        LANE.with_borrow_mut(|known| {
            if known.as_ref().is_none_or(|(id, _)| *id != card.id()) {
                *known = Some((card.id(), Rc::new(RefCell::new(Lane::new(card, PIECES, PIECE)?))));
            }
            Ok(known.as_ref().map(|(_, lane)| Rc::clone(lane)))
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
        let home = Tensor::arange(0f32, 24.0, &Device::Cpu).unwrap().reshape((4, 6)).unwrap();
        let to = absent::absent_like(&home, &Device::Cpu).unwrap();
        let mut coming = Coming::begin(&to).unwrap();
        assert!(!coming.is_copied());
        assert!(coming.copy(&home.to_dtype(DType::BF16).unwrap()).is_err() && !coming.is_copied());
        coming.copy(&home).unwrap();
        coming.arrive().unwrap();
        assert_eq!(to.to_vec2::<f32>().unwrap(), home.to_vec2::<f32>().unwrap());
        let view = to.t().unwrap();
        let left = Leaving::begin(&view).unwrap().arrive().unwrap();
        assert_eq!(left.to_vec2::<f32>().unwrap(), home.t().unwrap().to_vec2::<f32>().unwrap());
    }

    // The host alone: the check is the same on any device.
    #[test]
    #[should_panic(expected = "values arrive that nobody has copied")]
    fn nothing_arrives_before_its_copy() {
        let to = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let _ = Coming::begin(&to).unwrap().arrive();
    }
}
