//! Copies between the host and a card beside what the card computes: on a stream of their own, through pinned memory.
//!
//! A copy has three moments. It begins where its tensor has memory, or has its values. It is carried out when work was launched that the card
//! does meanwhile, because the host fills pinned memory and waits for it. It arrives where somebody uses the values.
//!
//! Invariants: memory on the card is taken and given back in the order of the stream that computes, and a tensor is not given back while a
//! copy may still look at it; nobody waits for the whole card. On other devices a copy is done when it is carried out.

use candle_core::{Device, Result, Tensor};

use crate::{absent, copy_waits};

/// Pinned memory that copies go through, of a process: a few pieces, in turn.
pub const STAGING_BYTES: u64 = (PIECES * PIECE) as u64;
const PIECES: usize = 4;
const PIECE: usize = 4 << 20;

/// Values on their way from the host to a tensor.
#[derive(Debug)]
pub struct Coming {
    // First, so that the stream that computes waits for the copy before the tensor's memory is given back.
    #[cfg(feature = "cuda")]
    way: Option<cuda::Up>,
    to: Tensor,
    is_copied: bool,
}

impl Coming {
    /// Gives a tensor memory, unless it has any: from here on it is for the values. Until they arrive nobody may use it.
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

    /// Carries the copy out of `home`, a tensor of this shape and dtype on the CPU.
    ///
    /// # Errors
    /// Another shape or dtype; the driver's.
    pub fn copy(&mut self, home: &Tensor) -> Result<()> {
        self.carry_out(home)?;
        self.is_copied = true;
        Ok(())
    }

    fn carry_out(&mut self, home: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(way) = &mut self.way {
            absent::check_alike("copy", &self.to, home)?;
            way.copy(&self.to, home)?;
            copy_waits::note_to_card(home);
            return Ok(());
        }
        absent::bring(&self.to, home)
    }

    /// Whether the copy was carried out.
    pub fn is_copied(&self) -> bool {
        self.is_copied
    }

    /// Has whatever is computed from here on wait for the values.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// Before the copy.
    pub fn arrive(self) -> Result<()> {
        assert!(self.is_copied, "values arrive that nobody has copied");
        #[cfg(feature = "cuda")]
        if let Some(way) = self.way {
            return copy_waits::waiting(self.to.device(), || way.arrive());
        }
        Ok(())
    }
}

/// Values on their way from a tensor to the host. The tensor keeps its memory until they are there, and nobody may change it.
#[derive(Debug)]
pub struct Leaving {
    x: Tensor,
    #[cfg(feature = "cuda")]
    way: Option<cuda::Down>,
}

impl Leaving {
    /// The values that a tensor has when all is done that was launched so far.
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

    /// Carries the copy out: the values on the CPU.
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

#[cfg(feature = "cuda")]
mod cuda {
    use std::cell::RefCell;
    use std::ffi::c_void;
    use std::rc::Rc;
    use std::sync::Arc;

    use candle_core::cuda_backend::DeviceId;
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, result};
    use candle_core::{CudaDevice, Device, Tensor};
    use rayon::prelude::*;

    use super::{PIECE, PIECES};
    use crate::bytes::{from_bytes, with_bytes};

    /// As many bytes are worth a thread.
    const SHARE: usize = 512 << 10;

    /// A copy to the card.
    #[derive(Debug)]
    pub struct Up {
        lane: Rc<RefCell<Lane>>,
        /// When the memory may be written to.
        is_free: CudaEvent,
        /// When the copy is done that nobody waits for yet.
        is_done: Option<CudaEvent>,
    }

    impl Up {
        pub fn to(tensor: &Tensor) -> candle_core::Result<Option<Self>> {
            let Some(lane) = Lane::of(tensor.device())? else { return Ok(None) };
            let is_free = lane.borrow().computing.record_event(None).w()?;
            Ok(Some(Self { lane, is_free, is_done: None }))
        }

        pub fn copy(&mut self, to: &Tensor, home: &Tensor) -> candle_core::Result<()> {
            let address = crate::cuda::address(to)?;
            let mut lane = self.lane.borrow_mut();
            let copied = with_bytes(home, |bytes| lane.up(address, bytes, &self.is_free))?;
            if copied.is_err() {
                // Some pieces may be on their way.
                lane.copying.synchronize().w()?;
            }
            copied.w()?;
            self.is_done = Some(lane.copying.record_event(None).w()?);
            Ok(())
        }

        pub fn arrive(mut self) -> candle_core::Result<()> {
            self.wait().w()
        }

        fn wait(&mut self) -> Result<(), DriverError> {
            self.is_done.take().map_or(Ok(()), |done| self.lane.borrow().computing.wait(&done))
        }
    }

    impl Drop for Up {
        fn drop(&mut self) {
            // Where nobody waits because something else has failed, that is reported.
            let _ = self.wait();
        }
    }

    /// A copy to the host.
    #[derive(Debug)]
    pub struct Down {
        lane: Rc<RefCell<Lane>>,
        /// When the values are there.
        is_ready: CudaEvent,
    }

    impl Down {
        pub fn from(x: &Tensor) -> candle_core::Result<Option<Self>> {
            let Some(lane) = Lane::of(x.device())? else { return Ok(None) };
            let is_ready = lane.borrow().computing.record_event(None).w()?;
            Ok(Some(Self { lane, is_ready }))
        }

        pub fn arrive(self, x: &Tensor) -> candle_core::Result<Tensor> {
            let (address, mut lane) = (crate::cuda::address(x)?, self.lane.borrow_mut());
            let mut copied = Ok(());
            let values = from_bytes(x.shape(), x.dtype(), |bytes| copied = lane.down(address, bytes, &self.is_ready));
            if copied.is_err() {
                lane.copying.synchronize().w()?;
            }
            copied.w()?;
            values
        }
    }

    /// The stream of copies of a card, beside the one that computes, and the memory that they go through.
    #[derive(Debug)]
    struct Lane {
        computing: Arc<CudaStream>,
        copying: Arc<CudaStream>,
        pieces: Vec<Piece>,
        /// The piece whose turn it is.
        next: usize,
    }

    impl Lane {
        /// That of a card; none of other devices. It is made for the first copy, and stays.
        fn of(device: &Device) -> candle_core::Result<Option<Rc<RefCell<Self>>>> {
            thread_local! {
                static LANE: RefCell<Option<(DeviceId, Rc<RefCell<Lane>>)>> = const { RefCell::new(None) };
            }
            let Device::Cuda(card) = device else { return Ok(None) };
            LANE.with_borrow_mut(|known| {
                if known.as_ref().is_none_or(|(id, _)| *id != card.id()) {
                    *known = Some((card.id(), Rc::new(RefCell::new(Self::new(card)?))));
                }
                Ok(known.as_ref().map(|(_, lane)| Rc::clone(lane)))
            })
        }

        fn new(card: &CudaDevice) -> candle_core::Result<Self> {
            let computing = card.cuda_stream();
            let copying = computing.context().new_stream().w()?;
            let pieces = (0..PIECES).map(|_| Piece::new(&computing)).collect::<Result<_, _>>().w()?;
            Ok(Self { computing, copying, pieces, next: 0 })
        }

        fn turn(&mut self) -> usize {
            let turn = self.next;
            self.next = (turn + 1) % PIECES;
            turn
        }

        /// Copies bytes to an address on the card. They are read when it returns, and there later.
        fn up(&mut self, to: u64, bytes: &[u8], is_free: &CudaEvent) -> Result<(), DriverError> {
            self.copying.wait(is_free)?;
            for (number, bytes) in bytes.chunks(PIECE).enumerate() {
                let turn = self.turn();
                let piece = &mut self.pieces[turn];
                copy(piece.wait()?, bytes);
                // SAFETY: the tensor at this address has all of these bytes, and nobody else uses them until its event was waited for; the
                // piece is not written to before its own event.
                unsafe {
                    let at = to + (number * PIECE) as u64;
                    result::memcpy_htod_async(at, piece.of(bytes.len()), self.copying.cu_stream())?;
                }
                piece.is_done.record(&self.copying)?;
            }
            Ok(())
        }

        /// Copies bytes from an address on the card. They are there when it returns.
        fn down(&mut self, from: u64, bytes: &mut [u8], is_ready: &CudaEvent) -> Result<(), DriverError> {
            self.copying.wait(is_ready)?;
            // While the card fills some pieces the host empties the oldest.
            let lengths: Vec<usize> = bytes.chunks(PIECE).map(<[u8]>::len).collect();
            let mut filled = Vec::with_capacity(lengths.len());
            let mut parts = bytes.chunks_mut(PIECE);
            for number in 0..lengths.len() + PIECES - 1 {
                if let Some(&length) = lengths.get(number) {
                    let turn = self.turn();
                    let piece = &mut self.pieces[turn];
                    piece.wait()?;
                    // SAFETY: the tensor at this address has all of these bytes, and keeps them until this function returns; the piece is
                    // not read before its event.
                    unsafe {
                        let at = from + (number * PIECE) as u64;
                        result::memcpy_dtoh_async(piece.of(length), at, self.copying.cu_stream())?;
                    }
                    piece.is_done.record(&self.copying)?;
                    filled.push(turn);
                }
                if number + 1 >= PIECES
                    && let Some(part) = parts.next()
                {
                    let oldest = &mut self.pieces[filled[number + 1 - PIECES]];
                    copy(part, &oldest.wait()?[..part.len()]);
                }
            }
            Ok(())
        }
    }

    /// Pinned memory.
    #[derive(Debug)]
    struct Piece {
        memory: *mut c_void,
        /// When the latest copy through it is done. cudarc's own type keeps no such event where events are not tracked.
        is_done: CudaEvent,
    }

    impl Piece {
        fn new(stream: &Arc<CudaStream>) -> Result<Self, DriverError> {
            let context = stream.context();
            context.bind_to_thread()?;
            let is_done = context.new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING))?;
            // SAFETY: the context of this thread.
            let memory = unsafe { result::malloc_host(PIECE, 0) }?;
            // SAFETY: as many bytes as were asked for. Nobody reads what was not written.
            unsafe { memory.cast::<u8>().write_bytes(0, PIECE) };
            Ok(Self { memory, is_done })
        }

        /// Its bytes, when the latest copy through it is done.
        fn wait(&mut self) -> Result<&mut [u8], DriverError> {
            self.is_done.synchronize()?;
            Ok(self.of(PIECE))
        }

        /// The first of its bytes, for a copy.
        fn of(&mut self, length: usize) -> &mut [u8] {
            assert!(length <= PIECE);
            // SAFETY: as many bytes, which were written, and this is their only owner.
            unsafe { std::slice::from_raw_parts_mut(self.memory.cast(), length) }
        }
    }

    impl Drop for Piece {
        fn drop(&mut self) {
            // Whoever waits for nothing else any more has no use for the error.
            let _ = self.is_done.synchronize();
            // SAFETY: it was made by the driver, and no copy goes through it.
            let _ = unsafe { result::free_host(self.memory) };
        }
    }

    fn copy(to: &mut [u8], from: &[u8]) {
        let parts = to[..from.len()].par_chunks_mut(SHARE).zip(from.par_chunks(SHARE));
        parts.for_each(|(to, from)| to.copy_from_slice(from));
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

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

    #[test]
    #[should_panic(expected = "values arrive that nobody has copied")]
    fn nothing_arrives_before_its_copy() {
        let to = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let _ = Coming::begin(&to).unwrap().arrive();
    }
}
