//! Pinned copies: values of a card that lie in page-locked memory of the host until the card needs them again.
//!
//! Values take whole pages of this memory and give them back. The memory grows when too few pages are free. So it is as large as the most
//! bytes that ever lay in it, and is locked once. The host takes no part in a copy: the card reads and writes the memory itself.
//!
//! Invariants: a copy out of memory waits for the copy into it. A copy into memory waits for all copies out of any memory that were begun
//! before. Memory on the card is not freed until the copies from it have been waited for.

use candle_core::{DType, Result, Shape, Tensor};

use crate::copies::Upload;

/// Values of fewer bytes get no pinned copy: the host copies them in the time that it takes to ask the card.
#[cfg(feature = "cuda")]
const MIN_BYTES: usize = 16 << 10;

/// A tensor that keeps its memory on the card until its values are copied to pinned memory.
#[derive(Debug)]
pub struct PendingDownload {
    // First, so that the stream that computes waits for the copy before the tensor's memory is given back.
    copied: way::Copied,
    x: Tensor,
}

impl PendingDownload {
    /// Has all work that is launched from here on wait until the values are copied.
    ///
    /// # Errors
    /// The driver's.
    pub fn complete(self) -> Result<()> {
        let Self { copied, x } = self;
        crate::copy_waits::waiting(x.device(), || copied.complete())
    }
}

/// Values of a tensor in page-locked memory of the host.
#[derive(Debug)]
pub struct PinnedCopy {
    memory: way::Memory,
    shape: Shape,
    dtype: DType,
}

impl PinnedCopy {
    /// Begins to copy the values that a tensor of a card has when all work launched so far is done. Returns `None` if the tensor is small
    /// or lies on the CPU, or if the driver locks no memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn begin(x: &Tensor) -> Result<Option<(Self, PendingDownload)>> {
        let Some((x, memory, copied)) = way::leave(x)? else { return Ok(None) };
        crate::copy_waits::record_download(&x);
        Ok(Some((Self { memory, shape: x.shape().clone(), dtype: x.dtype() }, PendingDownload { copied, x })))
    }

    /// Carries out a copy of the values to the tensor of `incoming`, which has their shape and dtype.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If the tensor has another shape or dtype.
    pub fn copy_to(&self, incoming: &mut Upload) -> Result<()> {
        assert_eq!((incoming.to().shape(), incoming.to().dtype()), (&self.shape, self.dtype));
        self.memory.copy_to(incoming)
    }

    /// Returns the shape of the values.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the dtype of the values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// Unlocks and frees this thread's page-locked memory that holds no values.
pub fn release_unused() {
    #[cfg(feature = "cuda")]
    way::release_unused();
}

#[cfg(feature = "cuda")]
pub(crate) use way::forget;

#[cfg(feature = "cuda")]
mod way {
    use std::cell::RefCell;
    use std::iter;
    use std::mem::MaybeUninit;
    use std::rc::Rc;
    use std::sync::Arc;

    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
    use candle_core::{Device, Result, Tensor};
    use heap::FreeRanges;

    use super::MIN_BYTES;
    pub(super) use crate::copies::Copied;
    use crate::copies::{Upload, copy_streams_of};
    use crate::copy_streams::Run;
    use crate::page_locked::Lock;

    /// Bytes of a page.
    const PAGE: usize = 4096;

    thread_local! {
        static STORE: RefCell<Option<Rc<RefCell<Store>>>> = const { RefCell::new(None) };
    }

    pub(crate) fn release_unused() {
        STORE.with_borrow(|store| store.iter().for_each(|store| store.borrow_mut().release_unused()));
    }

    /// Drops the memory that this thread keeps.
    pub(crate) fn forget() {
        STORE.take();
    }

    pub fn leave(x: &Tensor) -> Result<Option<(Tensor, Memory, Copied)>> {
        let Device::Cuda(card) = x.device() else { return Ok(None) };
        let bytes = x.elem_count() * x.dtype().size_in_bytes();
        if bytes < MIN_BYTES {
            return Ok(None);
        }
        let (Some(copy_streams), Some(taken)) =
            (copy_streams_of(x.device())?, Taken::allocate(&card.cuda_stream(), bytes))
        else {
            return Ok(None);
        };
        let x = x.contiguous()?;
        let is_filled = {
            let mut copy_streams = copy_streams.borrow_mut();
            let is_ready = copy_streams.launched().w()?;
            let is_read = taken.store.borrow().is_read.clone();
            let after = iter::once(&is_ready).chain(is_read.as_deref());
            // SAFETY: nothing else uses the memory, and the copy waits for all earlier copies out of it.
            unsafe { copy_streams.download_pinned(crate::launch::address(&x)?, &taken.runs, after) }?
        };
        let copied = Copied::at(Rc::clone(&is_filled), &copy_streams);
        Ok(Some((x, Memory { taken, is_filled }, copied)))
    }

    /// Memory that has values, or is about to.
    #[derive(Debug)]
    pub struct Memory {
        taken: Taken,
        is_filled: Rc<CudaEvent>,
    }

    /// Memory of a store.
    #[derive(Debug)]
    struct Taken {
        runs: Vec<Run>,
        store: Rc<RefCell<Store>>,
    }

    impl Taken {
        /// Takes memory for this many bytes. `None` if the driver locks no more.
        fn allocate(stream: &Arc<CudaStream>, bytes: usize) -> Option<Self> {
            STORE.with_borrow_mut(|known| {
                let is_of = |store: &Rc<RefCell<Store>>| Arc::ptr_eq(&store.borrow().stream, stream);
                if !known.as_ref().is_some_and(is_of) {
                    *known = Some(Rc::new(RefCell::new(Store::new(Arc::clone(stream)))));
                }
                let store = known.as_ref()?;
                let runs = store.borrow_mut().take(bytes)?;
                Some(Self { runs, store: Rc::clone(store) })
            })
        }
    }

    impl Memory {
        pub fn copy_to(&self, incoming: &mut Upload) -> Result<()> {
            // SAFETY: the memory is locked while it is taken. The next user waits until it is read.
            let is_read = unsafe { incoming.copy_locked(&self.taken.runs, &self.is_filled) }?;
            self.taken.store.borrow_mut().is_read = is_read;
            Ok(())
        }
    }

    impl Drop for Taken {
        fn drop(&mut self) {
            let mut store = self.store.borrow_mut();
            self.runs.iter().for_each(|run| store.give_back(run));
        }
    }

    /// All page-locked memory for values of a card.
    #[derive(Debug)]
    struct Store {
        stream: Arc<CudaStream>,
        slabs: Vec<Slab>,
        /// Reached when all copies out of the memory that were begun so far are done. Such copies run one after another.
        is_read: Option<Rc<CudaEvent>>,
    }

    /// Memory that was locked in one call. A copy must stay within one range that the driver knows, so each slab has its own free ranges.
    #[derive(Debug)]
    struct Slab {
        // Before the memory, so that it is unlocked before it is freed.
        _lock: Lock,
        // Nobody reads it before the card has written to it.
        memory: Box<[MaybeUninit<Page>]>,
        free: FreeRanges,
    }

    /// A driver locks whole pages, and none twice: no page has anything else.
    #[repr(align(4096))]
    #[derive(Debug)]
    struct Page {
        _bytes: [u8; PAGE],
    }

    impl Store {
        fn new(stream: Arc<CudaStream>) -> Self {
            Self { stream, slabs: Vec::new(), is_read: None }
        }

        fn take(&mut self, bytes: usize) -> Option<Vec<Run>> {
            let pages = bytes.next_multiple_of(PAGE);
            let free: usize = self.slabs.iter().map(|slab| slab.free.bytes()).sum();
            if free < pages {
                self.grow(pages - free)?;
            }
            let mut runs = Vec::new();
            let (mut missing, mut left) = (pages, bytes);
            while missing > 0 {
                let (slab, length) = self.closest(missing)?;
                let taken = length.min(missing);
                let at = slab.free.take(taken)?;
                // The last page may be used in part.
                runs.push(Run { at, bytes: taken.min(left), taken });
                missing -= taken;
                left -= taken.min(left);
            }
            Some(runs)
        }

        /// Returns the slab with the shortest free range of at least `bytes` bytes, or else the slab with the longest free range, and the
        /// length of that range.
        fn closest(&mut self, bytes: usize) -> Option<(&mut Slab, usize)> {
            let found = self.slabs.iter_mut().filter_map(|slab| slab.free.closest(bytes).map(|length| (slab, length)));
            found.min_by_key(|&(_, length)| if length < bytes { (1, usize::MAX - length) } else { (0, length) })
        }

        fn grow(&mut self, bytes: usize) -> Option<()> {
            let memory = Box::new_uninit_slice(bytes / PAGE);
            // SAFETY: the memory is kept beside its lock, and never moves.
            let lock = unsafe { Lock::new(&self.stream, memory.as_ptr().cast(), bytes) }?;
            let mut free = FreeRanges::new();
            free.insert(memory.as_ptr().expose_provenance(), bytes);
            self.slabs.push(Slab { _lock: lock, memory, free });
            Some(())
        }

        fn give_back(&mut self, run: &Run) {
            if let Some(slab) = self.slabs.iter_mut().find(|slab| slab.range().contains(&run.at)) {
                slab.free.insert(run.at, run.taken);
            }
        }

        fn release_unused(&mut self) {
            self.slabs.retain(|slab| slab.free.bytes() < slab.bytes());
        }
    }

    impl Slab {
        fn bytes(&self) -> usize {
            size_of_val(&*self.memory)
        }

        fn range(&self) -> std::ops::Range<usize> {
            let at = self.memory.as_ptr().addr();
            at..at + self.bytes()
        }
    }
}

/// Without a card there are no pinned copies.
#[cfg(not(feature = "cuda"))]
mod way {
    use candle_core::{Result, Tensor};

    use crate::copies::Upload;

    #[derive(Debug)]
    pub enum Copied {}

    impl Copied {
        pub fn complete(self) -> Result<()> {
            match self {}
        }
    }

    #[derive(Debug)]
    pub enum Memory {}

    impl Memory {
        pub fn copy_to(&self, _: &mut Upload) -> Result<()> {
            match *self {}
        }
    }

    pub fn leave(_: &Tensor) -> Result<Option<(Tensor, Memory, Copied)>> {
        Ok(None)
    }
}
