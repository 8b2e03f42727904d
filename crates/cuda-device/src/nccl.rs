//! The cards of several processes, which exchange tensors by NCCL.
//!
//! A stream of its own carries the transfers. A transfer begins when all work that was launched before is done. Kernels that are launched
//! after [`PendingCollective::complete`] wait for it; the host waits for neither. Every process makes the same calls in the same order.

use std::rc::Rc;

use candle_core::{Device, Result, Tensor};

use communicator::{Communicator, Moment};

/// The card of this process, joined with the cards of other processes.
#[derive(Clone, Debug)]
pub struct Cards(Rc<Communicator>);

/// A transfer that was begun, with its tensors.
#[derive(Debug)]
pub struct PendingCollective {
    cards: Rc<Communicator>,
    sent: Moment,
    is_complete: bool,
    /// Memory is freed in the order of the stream that computes, so not before that stream has waited for the transfer.
    _tensors: Vec<Tensor>,
}

/// The cards that receive a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumTo {
    /// Every card.
    All,
    /// The card of this process alone.
    One(usize),
}

/// Whether this build has NCCL.
pub const HAS_NCCL: bool = cfg!(feature = "nccl");

impl Cards {
    /// Makes the identifier by which all processes find each other. One process makes it, and tells the others.
    ///
    /// # Errors
    /// NCCL's.
    pub fn id() -> Result<Vec<u8>> {
        Communicator::id()
    }

    /// Joins the cards of `size` processes. This one is the `rank`-th, and all of them call this with the same `id`.
    ///
    /// # Errors
    /// NCCL's, as for two processes on one card; a device that is no card, and a build without NCCL.
    pub fn join(device: &Device, id: &[u8], rank: usize, size: usize) -> Result<Self> {
        Communicator::join(device, id, rank, size).map(|joined| Self(Rc::new(joined)))
    }

    /// Begins to add up a contiguous tensor over all cards, in an order that NCCL chooses.
    ///
    /// # Errors
    /// NCCL's.
    pub fn begin_sum(&self, x: &Tensor, to: SumTo) -> Result<PendingCollective> {
        self.begin(vec![x.clone()], || self.0.sum(x, to))
    }

    /// Begins to overwrite a contiguous tensor on every card with its values on the card of process `root`.
    ///
    /// # Errors
    /// NCCL's.
    pub fn begin_broadcast(&self, root: usize, x: &Tensor) -> Result<PendingCollective> {
        self.begin(vec![x.clone()], || self.0.broadcast(root, x))
    }

    /// Begins to send contiguous tensors to processes, and to receive others from them. Between two processes the order is that of the
    /// lists.
    ///
    /// # Errors
    /// NCCL's.
    pub fn begin_exchange(&self, sent: &[(usize, Tensor)], received: &[(usize, Tensor)]) -> Result<PendingCollective> {
        let tensors = sent.iter().chain(received).map(|(_, tensor)| tensor.clone()).collect();
        self.begin(tensors, || self.0.exchange(sent, received))
    }

    fn begin(&self, tensors: Vec<Tensor>, send: impl FnOnce() -> Result<()>) -> Result<PendingCollective> {
        self.0.begin()?;
        send()?;
        let sent = self.0.now()?;
        Ok(PendingCollective { cards: Rc::clone(&self.0), sent, is_complete: false, _tensors: tensors })
    }
}

impl PendingCollective {
    /// Has all work that is launched from here on wait for the transfer.
    ///
    /// # Errors
    /// The driver's.
    pub fn complete(mut self) -> Result<()> {
        self.is_complete = true;
        self.cards.wait(&self.sent)
    }
}

impl Drop for PendingCollective {
    fn drop(&mut self) {
        if !self.is_complete {
            // An earlier error has been reported, and this one would be its consequence.
            let _ = self.cards.wait(&self.sent);
        }
    }
}

#[cfg(feature = "nccl")]
mod communicator {
    use std::mem::MaybeUninit;
    use std::sync::Arc;

    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
    use candle_core::cuda_backend::cudarc::nccl::{result, sys};
    use candle_core::{DType, Device, Error, Result, Tensor, bail};
    use cuda_kernels::libraries::{self, Library};

    use super::SumTo;
    use crate::launch::address;

    pub type Moment = CudaEvent;

    #[derive(Debug)]
    pub struct Communicator {
        cards: sys::ncclComm_t,
        compute_stream: Arc<CudaStream>,
        sending: Arc<CudaStream>,
    }

    fn checked<T>(result: std::result::Result<T, result::NcclError>) -> Result<()> {
        result.map(drop).map_err(|error| Error::Msg(format!("NCCL: {:?}", error.0)))
    }

    fn open() -> Result<()> {
        libraries::open(Library::Nccl).map(drop).map_err(Error::msg)
    }

    /// The number of elements of a tensor, and their NCCL type.
    fn elements(x: &Tensor) -> Result<(usize, sys::ncclDataType_t)> {
        let of = match x.dtype() {
            DType::F32 => sys::ncclDataType_t::ncclFloat32,
            DType::F64 => sys::ncclDataType_t::ncclFloat64,
            DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
            other => bail!("NCCL: expected F32, F64 or BF16, got {other:?}"),
        };
        Ok((x.elem_count(), of))
    }

    /// The number of a process in NCCL's type.
    fn number(process: usize) -> Result<i32> {
        i32::try_from(process).map_err(|_| Error::Msg(format!("NCCL: there is no process {process}")))
    }

    impl Communicator {
        pub fn id() -> Result<Vec<u8>> {
            open()?;
            let id = result::get_uniqueid().map_err(|error| Error::Msg(format!("NCCL: {:?}", error.0)))?;
            Ok(id.internal.iter().map(|&byte| byte.to_ne_bytes()[0]).collect())
        }

        pub fn join(device: &Device, id: &[u8], rank: usize, size: usize) -> Result<Self> {
            let compute_stream = device.as_cuda_device()?.cuda_stream();
            let sending = compute_stream.context().new_stream().w()?;
            let mut internal = [0; 128];
            if id.len() != internal.len() {
                bail!("NCCL: expected an id of {} bytes, got {}", internal.len(), id.len())
            }
            internal.iter_mut().zip(id).for_each(|(to, &byte)| *to = std::ffi::c_char::from_ne_bytes([byte]));
            open()?;
            let mut cards = MaybeUninit::uninit();
            // SAFETY: the card's context is bound to this thread. NCCL writes the communicator if it succeeds.
            let cards = unsafe {
                let id = sys::ncclUniqueId { internal };
                checked(result::comm_init_rank(cards.as_mut_ptr(), number(size)?, id, number(rank)?))?;
                cards.assume_init()
            };
            Ok(Self { cards, compute_stream, sending })
        }

        /// Has transfers from here on wait for the work that was launched.
        pub fn begin(&self) -> Result<()> {
            self.sending.join(&self.compute_stream).w()
        }

        pub fn now(&self) -> Result<Moment> {
            self.sending.record_event(None).w()
        }

        pub fn wait(&self, sent: &Moment) -> Result<()> {
            self.compute_stream.wait(sent).w()
        }

        fn stream(&self) -> sys::cudaStream_t {
            self.sending.cu_stream().cast()
        }

        pub fn sum(&self, x: &Tensor, to: SumTo) -> Result<()> {
            let ((count, of), at, sum) = (elements(x)?, address(x)?, sys::ncclRedOp_t::ncclSum);
            let (from, into) = (at as *const _, at as *mut _);
            // SAFETY: the tensor's elements, which nothing reads before the transfer is complete, and which are held until then.
            checked(unsafe {
                match to {
                    SumTo::All => result::all_reduce(from, into, count, of, sum, self.cards, self.stream()),
                    SumTo::One(one) => {
                        result::reduce(from, into, count, of, sum, number(one)?, self.cards, self.stream())
                    }
                }
            })
        }

        pub fn broadcast(&self, root: usize, x: &Tensor) -> Result<()> {
            let ((count, of), at) = (elements(x)?, address(x)?);
            // SAFETY: as above.
            checked(unsafe { result::broadcast(at as _, at as _, count, of, number(root)?, self.cards, self.stream()) })
        }

        pub fn exchange(&self, sent: &[(usize, Tensor)], received: &[(usize, Tensor)]) -> Result<()> {
            checked(result::group_start())?;
            for (process, x) in sent {
                let ((count, of), at) = (elements(x)?, address(x)?);
                // SAFETY: as above.
                checked(unsafe { result::send(at as _, count, of, number(*process)?, self.cards, self.stream()) })?;
            }
            for (process, x) in received {
                let ((count, of), at) = (elements(x)?, address(x)?);
                // SAFETY: as above.
                checked(unsafe { result::recv(at as _, count, of, number(*process)?, self.cards, self.stream()) })?;
            }
            checked(result::group_end())
        }
    }

    impl Drop for Communicator {
        fn drop(&mut self) {
            // SAFETY: nothing uses it any more. The other processes may be gone: an abort does not wait for them.
            let _ = unsafe { result::comm_abort(self.cards) };
        }
    }
}

/// Without NCCL no process can join.
#[cfg(not(feature = "nccl"))]
mod communicator {
    use candle_core::{Device, Result, Tensor, bail};

    use super::SumTo;

    #[derive(Debug)]
    pub enum Moment {}

    #[derive(Debug)]
    pub enum Communicator {}

    impl Communicator {
        pub fn id() -> Result<Vec<u8>> {
            bail!("this build has no NCCL")
        }

        pub fn join(_: &Device, _: &[u8], _: usize, _: usize) -> Result<Self> {
            bail!("this build has no NCCL")
        }

        pub fn begin(&self) -> Result<()> {
            match *self {}
        }

        pub fn now(&self) -> Result<Moment> {
            match *self {}
        }

        pub fn wait(&self, _: &Moment) -> Result<()> {
            match *self {}
        }

        pub fn sum(&self, _: &Tensor, _: SumTo) -> Result<()> {
            match *self {}
        }

        pub fn broadcast(&self, _: usize, _: &Tensor) -> Result<()> {
            match *self {}
        }

        pub fn exchange(&self, _: &[(usize, Tensor)], _: &[(usize, Tensor)]) -> Result<()> {
            match *self {}
        }
    }
}
