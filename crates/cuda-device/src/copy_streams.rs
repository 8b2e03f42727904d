//! Copy streams copy between a card and the host while the card computes. There is one stream for each direction, and both directions run
//! at the same time. The card itself copies page-locked memory. All other copies go through pieces of pinned memory, used round robin.
//!
//! Each thread that copies has copy streams of its own. If two threads shared them, copies of one thread would wait for kernels that the
//! other thread's copies wait for.
//!
//! Invariants: a copy begins once the events that it is given are reached, and never waits for a copy of the other direction. A piece is
//! refilled only after it was copied, and read only after it was filled. After an error no copy is in flight.

use std::ffi::c_void;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use candle_core::CudaDevice;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, result};
use heap::Extent;
use rayon::prelude::*;

use crate::page_locked::is_locked;

/// The bytes of a copy that are worth a thread of their own.
const SHARE: usize = 512 << 10;

/// The copy streams of a card, which run beside the compute stream, and the pinned memory of the copies.
#[derive(Debug)]
pub struct CopyStreams {
    compute_stream: Arc<CudaStream>,
    /// The stream of copies to the card.
    up: Arc<CudaStream>,
    /// The stream of copies to the host.
    down: Arc<CudaStream>,
    /// The pieces that were needed so far, at most `max_pieces`.
    pieces: Vec<Piece>,
    max_pieces: usize,
    piece_bytes: usize,
    /// The piece that the next copy uses.
    next: usize,
}

impl CopyStreams {
    /// The copy streams of `card`, with at most `pieces` pieces of pinned memory of `piece_bytes` bytes each.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(card: &CudaDevice, pieces: usize, piece_bytes: usize) -> candle_core::Result<Self> {
        let compute_stream = card.cuda_stream();
        let [up, down] = [compute_stream.context().new_stream().w()?, compute_stream.context().new_stream().w()?];
        Ok(Self { compute_stream, up, down, pieces: Vec::new(), max_pieces: pieces, piece_bytes, next: 0 })
    }

    /// Records an event that is reached when all work launched so far is done.
    pub fn launched(&self) -> Result<CudaEvent, DriverError> {
        self.compute_stream.record_event(None)
    }

    /// Has all work that is launched from here on wait for an event.
    pub fn compute_wait_on(&self, done: &CudaEvent) -> Result<(), DriverError> {
        self.compute_stream.wait(done)
    }

    /// Copies bytes to an address on the card, once the memory there is free (`is_free`). The returned event is reached when the copy is
    /// done. Page-locked bytes must not change until then; bytes in other memory have been read when this function returns.
    pub fn up(&mut self, to: u64, bytes: &[u8], is_free: &CudaEvent) -> candle_core::Result<CudaEvent> {
        let copied = self.upload_bytes(to, bytes, is_free).and_then(|()| self.up.record_event(None).w());
        self.unless_failed(copied)
    }

    /// Copies bytes of a file like [`CopyStreams::up`], and maps no page of the file meanwhile.
    pub fn upload_from_file(&mut self, to: u64, file: &Extent, is_free: &CudaEvent) -> candle_core::Result<CudaEvent> {
        let copied = self.up.wait(is_free).w().and_then(|()| {
            self.copy_through_staging(to, file.bytes(), |start, piece| heap::counting_wait(|| read(file, start, piece)))
        });
        let copied = copied.and_then(|()| self.up.record_event(None).w());
        self.unless_failed(copied)
    }

    /// Copies bytes from an address on the card, once the values are there (`is_ready`). Returns when the copy is done.
    pub fn down(&mut self, from: u64, bytes: &mut [u8], is_ready: &CudaEvent) -> candle_core::Result<()> {
        let copied = self.download_bytes(from, bytes, is_ready).w();
        self.unless_failed(copied)
    }

    /// Copies page-locked memory to an address on the card, after two events: the address is free, and the memory has its values. The
    /// returned event is reached when the copy is done.
    ///
    /// # Safety
    /// The memory is locked and stays locked. Nothing writes to the memory before the returned event.
    pub unsafe fn upload_pinned(
        &mut self,
        to: u64,
        runs: &[Run],
        after: [&CudaEvent; 2],
    ) -> candle_core::Result<Rc<CudaEvent>> {
        let up = Arc::clone(&self.up);
        // SAFETY: by the caller's promise.
        self.copy_pinned(&up, runs, after, |at, part| unsafe {
            result::memcpy_htod_async(to + at, part, up.cu_stream())
        })
    }

    /// Copies from an address on the card to page-locked memory, after these events: the values are there, and all earlier reads of the
    /// memory are done. The returned event is reached when the copy is done.
    ///
    /// # Safety
    /// The memory is locked and stays locked. Until the returned event nothing else reads or writes the memory, and nothing changes the
    /// values at the address.
    pub unsafe fn download_pinned<'a>(
        &mut self,
        from: u64,
        runs: &[Run],
        after: impl IntoIterator<Item = &'a CudaEvent>,
    ) -> candle_core::Result<Rc<CudaEvent>> {
        let down = Arc::clone(&self.down);
        // SAFETY: by the caller's promise.
        self.copy_pinned(&down, runs, after, |at, part| unsafe {
            result::memcpy_dtoh_async(part, from + at, down.cu_stream())
        })
    }

    fn copy_pinned<'a>(
        &mut self,
        stream: &Arc<CudaStream>,
        runs: &[Run],
        after: impl IntoIterator<Item = &'a CudaEvent>,
        copy: impl Fn(u64, &mut [u8]) -> Result<(), DriverError>,
    ) -> candle_core::Result<Rc<CudaEvent>> {
        let mut copied = after.into_iter().try_for_each(|event| stream.wait(event));
        let mut at = 0;
        for run in runs {
            // SAFETY: by the promise of the caller of `upload_pinned` or `download_pinned`.
            let part =
                unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(run.at), run.bytes) };
            copied = copied.and_then(|()| copy(at, part));
            at += run.bytes as u64;
        }
        self.unless_failed(copied.and_then(|()| stream.record_event(None).map(Rc::new)).w())
    }

    fn unless_failed<T>(&self, copied: candle_core::Result<T>) -> candle_core::Result<T> {
        if copied.is_err() {
            // Copies through some pieces may be in flight.
            self.up.synchronize().w()?;
            self.down.synchronize().w()?;
        }
        copied
    }

    fn turn(&mut self) -> Result<usize, DriverError> {
        let turn = self.next;
        if turn == self.pieces.len() {
            self.pieces.push(Piece::new(&self.compute_stream, self.piece_bytes)?);
        }
        self.next = (turn + 1) % self.max_pieces;
        Ok(turn)
    }

    fn upload_bytes(&mut self, to: u64, bytes: &[u8], is_free: &CudaEvent) -> candle_core::Result<()> {
        self.up.wait(is_free).w()?;
        if is_locked(bytes) {
            // SAFETY: as below; the bytes stay as they are until the event.
            return unsafe { result::memcpy_htod_async(to, bytes, self.up.cu_stream()) }.w();
        }
        self.copy_through_staging(to, bytes.len(), |start, piece| {
            copy(piece, &bytes[start..start + piece.len()]);
            Ok(())
        })
    }

    /// Copies `bytes` bytes through pieces. `fill` gets the offset of a piece's first byte and fills the piece.
    fn copy_through_staging(
        &mut self,
        to: u64,
        bytes: usize,
        fill: impl Fn(usize, &mut [u8]) -> io::Result<()>,
    ) -> candle_core::Result<()> {
        for start in (0..bytes).step_by(self.piece_bytes) {
            let length = self.piece_bytes.min(bytes - start);
            let turn = self.turn().w()?;
            let piece = &mut self.pieces[turn];
            fill(start, &mut piece.wait().w()?[..length])?;
            // SAFETY: the tensor at this address has all of these bytes, and nothing else uses them until its event was waited for. The
            // piece is not written to before its own event.
            unsafe { result::memcpy_htod_async(to + start as u64, piece.prefix(length), self.up.cu_stream()) }.w()?;
            piece.is_done.record(&self.up).w()?;
        }
        Ok(())
    }

    fn download_bytes(&mut self, from: u64, bytes: &mut [u8], is_ready: &CudaEvent) -> Result<(), DriverError> {
        self.down.wait(is_ready)?;
        // The card fills some pieces while the host empties the oldest.
        let pieces = self.max_pieces;
        let lengths: Vec<usize> = bytes.chunks(self.piece_bytes).map(<[u8]>::len).collect();
        let mut filled = Vec::with_capacity(lengths.len());
        let mut parts = bytes.chunks_mut(self.piece_bytes);
        for number in 0..lengths.len() + pieces - 1 {
            if let Some(&length) = lengths.get(number) {
                let turn = self.turn()?;
                let piece = &mut self.pieces[turn];
                piece.wait()?;
                // SAFETY: the tensor at this address has all of these bytes, and keeps them until this function returns. The piece is not
                // read before its event.
                unsafe {
                    let at = from + (number * self.piece_bytes) as u64;
                    result::memcpy_dtoh_async(piece.prefix(length), at, self.down.cu_stream())?;
                }
                piece.is_done.record(&self.down)?;
                filled.push(turn);
            }
            if number + 1 >= pieces
                && let Some(part) = parts.next()
            {
                let oldest = &mut self.pieces[filled[number + 1 - pieces]];
                copy(part, &oldest.wait()?[..part.len()]);
            }
        }
        Ok(())
    }
}

/// A range of page-locked memory. A copy goes through one or several ranges, in order.
#[derive(Debug)]
pub struct Run {
    /// The address.
    pub at: usize,
    /// The number of bytes to copy.
    pub bytes: usize,
    /// The number of bytes that were taken for them.
    pub taken: usize,
}

impl Run {
    /// The range of all of `memory`.
    pub fn whole(memory: &mut [u8]) -> Self {
        let bytes = memory.len();
        Self { at: memory.as_mut_ptr().expose_provenance(), bytes, taken: bytes }
    }
}

/// A piece of pinned memory. If the driver allocates none, the piece is ordinary memory: copies then take longer, and the host waits for
/// copies from the card.
#[derive(Debug)]
struct Piece {
    memory: *mut c_void,
    bytes: usize,
    is_pinned: bool,
    /// Reached when the latest copy through the piece is done. cudarc's own type keeps no such event where events are not tracked.
    is_done: CudaEvent,
}

// SAFETY: a piece owns its memory, which the driver gave to the process and not to a thread.
unsafe impl Send for Piece {}

impl Piece {
    fn new(stream: &Arc<CudaStream>, bytes: usize) -> Result<Self, DriverError> {
        let context = stream.context();
        context.bind_to_thread()?;
        let is_done = context.new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING))?;
        // SAFETY: the context is bound to this thread.
        let pinned = unsafe { result::malloc_host(bytes, 0) };
        let is_pinned = pinned.is_ok();
        let memory = pinned.unwrap_or_else(|_| Box::into_raw(vec![0u8; bytes].into_boxed_slice()).cast());
        // SAFETY: the memory has this many bytes. Nothing reads bytes that were not written.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { memory, bytes, is_pinned, is_done })
    }

    /// Waits until the latest copy through the piece is done, and returns its bytes.
    fn wait(&mut self) -> Result<&mut [u8], DriverError> {
        self.is_done.synchronize()?;
        Ok(self.prefix(self.bytes))
    }

    /// Returns the first `length` bytes, for a copy.
    fn prefix(&mut self, length: usize) -> &mut [u8] {
        assert!(length <= self.bytes);
        // SAFETY: the memory has this many bytes, all of them written, and this piece is their only owner.
        unsafe { std::slice::from_raw_parts_mut(self.memory.cast(), length) }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // A caller that drops the piece has no use for the error.
        let _ = self.is_done.synchronize();
        if self.is_pinned {
            // SAFETY: the driver allocated the memory, and no copy through it is in flight.
            let _ = unsafe { result::free_host(self.memory) };
        } else {
            // SAFETY: `new` made the box with this length, and no copy through it is in flight.
            drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.memory.cast::<u8>(), self.bytes)) });
        }
    }
}

/// Reads bytes of a file from the offset `start` on.
fn read(file: &Extent, start: usize, to: &mut [u8]) -> io::Result<()> {
    to.par_chunks_mut(SHARE).enumerate().try_for_each(|(number, to)| {
        let part = file.part(start + number * SHARE, to.len());
        part.ok_or(io::ErrorKind::UnexpectedEof)?.read_untimed(to)
    })
}

fn copy(to: &mut [u8], from: &[u8]) {
    let parts = to[..from.len()].par_chunks_mut(SHARE).zip(from.par_chunks(SHARE));
    parts.for_each(|(to, from)| to.copy_from_slice(from));
}
