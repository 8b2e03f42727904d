//! Files without names, in which tensors lie between two uses.
//!
//! Invariants: a tensor is read back bit by bit as it was written; a file has no name, so nothing of it is left, however the process
//! ends; while one tensor is in use the next is read.
//!
//! There is a file for each thread, and each thread writes its part of a tensor. The kernel lets one thread at a time write to a
//! file: copying 176 MB of gradients took 42 ms on one thread, 28 ms on two. The files are new in every step:
//! pages that the system had no reason to write to the disk before the end of the step are never written, and freeing them
//! costs a sixth of writing them.
//!
//! The system may have no room for pages that are not on the disk yet, as in a control group whose limit is the budget. It then kills
//! the process rather than waits. So beyond [`Files::unwritten_bytes`] a thread waits for the disk itself, a piece at a time. It drops the
//! piece from the page cache, and again after reading it back: kept pages would take the place of weights that are needed sooner.

use std::fs::File;
use std::io::ErrorKind;
#[cfg(unix)]
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Shape, Tensor};

use super::Ops;
use crate::error::{Error, Result};

/// The directory of files, and how much of their contents may be in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The directory. Files have no names there.
    pub directory: PathBuf,
    /// Bytes of one kind of tensor that may be in the page cache and not on the disk.
    pub unwritten_bytes: u64,
    /// [`crate::LayerMajor::weight_blocks_in_memory`].
    pub weight_blocks_in_memory: usize,
    /// [`crate::LayerMajor::weights_by_matrix`].
    pub weights_by_matrix: bool,
    /// Bytes of weights that the system has room for before they are used. Weights read ahead beyond them are dropped, and read again.
    pub read_ahead_bytes: u64,
    /// [`crate::LayerMajor::in_host_memory`].
    pub in_host_memory: bool,
}

impl Files {
    /// Files in `directory`, on a machine whose memory has room for them.
    pub fn in_directory(directory: &Path) -> Files {
        Files {
            directory: directory.to_owned(),
            unwritten_bytes: u64::MAX,
            weight_blocks_in_memory: 0,
            weights_by_matrix: false,
            read_ahead_bytes: u64::MAX,
            in_host_memory: false,
        }
    }

    /// Writes a tensor to files and reads it back, as a step does. For measurements of the time that this takes.
    ///
    /// # Errors
    /// [`Error::Offload`].
    pub fn write_and_read(&self, x: Tensor) -> Result<Tensor> {
        let mut files = TensorFiles::create(self)?;
        let extent = files.put(x)?;
        files.get(extent, None)
    }
}

/// A tensor's place in the files.
#[derive(Clone, Debug, PartialEq)]
pub struct Extent {
    /// The same offset in each file.
    start: u64,
    /// Bytes in each file, except the last file that has any.
    share: usize,
    shape: Shape,
    dtype: DType,
}

impl Extent {
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    fn bytes(&self) -> usize {
        self.shape.elem_count() * self.dtype.size_in_bytes()
    }
}

/// The least number of bytes for which a thread is worthwhile.
const MIN_SHARE: usize = 256 << 10;

/// The least number of bytes that is worth reading ahead: fewer are read in the time that the request takes.
const MIN_AHEAD: usize = 256 << 10;

/// Bytes, over all threads, after which a thread waits for the disk if there is no room for more.
const PIECES: usize = 4 << 20;

/// Files of tensors, one for each thread.
#[derive(Debug)]
pub struct TensorFiles {
    files: Arc<Vec<File>>,
    /// Bytes of each file that may not be on the disk yet.
    unwritten: Vec<AtomicUsize>,
    /// Length of each file, as it was written.
    lengths: Vec<AtomicU64>,
    unwritten_bytes: u64,
    /// Named in messages.
    path: PathBuf,
    end: u64,
    written: u64,
    /// The thread that reads ahead, once there was something to read.
    reader: Option<Reader>,
    /// The extent that the thread was asked for and has not handed over.
    ahead: Option<Extent>,
}

type Read = std::io::Result<candle_core::Result<Tensor>>;

/// A thread that reads one extent after another. It ends with its owner.
#[derive(Debug)]
struct Reader {
    asked: SyncSender<Extent>,
    /// Never contended: writing threads share the files with this struct, so it must be `Sync`.
    read: Mutex<Receiver<Read>>,
}

impl Reader {
    /// `None` if no thread can be started: everything is then read when it is asked for.
    fn start(files: &Arc<Vec<File>>, forgets: bool) -> Option<Self> {
        let (asked, extents) = sync_channel::<Extent>(1);
        let (results, read) = sync_channel(1);
        let read = Mutex::new(read);
        let files = Arc::clone(files);
        let work = move || {
            // The owner ends the thread by closing the channel.
            while let Ok(extent) = extents.recv() {
                if results.send(self::read(&files, &extent, forgets)).is_err() {
                    break;
                }
            }
        };
        std::thread::Builder::new().name("read-ahead".to_owned()).spawn(work).ok()?;
        Some(Self { asked, read })
    }
}

impl TensorFiles {
    /// Creates files without names.
    ///
    /// # Errors
    /// [`Error::Offload`].
    pub fn create(files: &Files) -> Result<TensorFiles> {
        let unwritten_bytes = files.unwritten_bytes;
        let path = heap::shown_path(&files.directory);
        let open = |_| heap::anonymous_file(&files.directory);
        let files =
            (0..t5_ops::threads()).map(open).collect::<std::io::Result<Vec<_>>>().map_err(Error::offload(&path))?;
        // Backward reads from the end, and the bytes behind were read before.
        files.iter().for_each(heap::disable_readahead);
        let unwritten = files.iter().map(|_| AtomicUsize::new(0)).collect();
        let lengths = files.iter().map(|_| AtomicU64::new(0)).collect();
        let files = Arc::new(files);
        Ok(TensorFiles {
            files,
            unwritten,
            lengths,
            unwritten_bytes,
            path,
            end: 0,
            written: 0,
            reader: None,
            ahead: None,
        })
    }
}

impl TensorFiles {
    /// Writes a tensor of the CPU behind those already there.
    ///
    /// # Errors
    /// [`Error::Offload`].
    pub fn put(&mut self, x: Tensor) -> Result<Extent> {
        let len = Ops::bytes(&x) as usize;
        let share = len.div_ceil(self.files.len()).max(MIN_SHARE);
        let extent = Extent { start: self.end, share, shape: x.shape().clone(), dtype: x.dtype() };
        let problem = Mutex::new(None);
        tensor_storage::with_bytes(&x, |bytes| {
            let write = |part| {
                let bytes = &bytes[part * share..len.min((part + 1) * share)];
                if let Err(error) = self.write(part, bytes, extent.start) {
                    problem.lock().expect("no other thread has panicked").get_or_insert(error);
                }
            };
            heap::counting_wait(|| t5_ops::for_each_part(len.div_ceil(share), write));
        })?;
        if let Some(error) = problem.into_inner().expect("no other thread has panicked") {
            return Err(Error::offload(&self.path)(error));
        }
        self.end += share.min(len) as u64;
        self.written += len as u64;
        Ok(extent)
    }

    /// Reads a tensor. Begins to read `after`, which will be asked for next.
    ///
    /// # Errors
    /// [`Error::Offload`].
    pub fn get(&mut self, extent: Extent, after: Option<&Extent>) -> Result<Tensor> {
        let forgets = self.has_no_room();
        // An extent that was read ahead in vain is taken as well, to make room for the next.
        let was_ahead = self.ahead.take();
        let reader = was_ahead.as_ref().and(self.reader.as_mut());
        let tensor = heap::counting_wait(|| {
            let read_ahead = reader.and_then(|reader| reader.read.get_mut().ok()?.recv().ok());
            match (was_ahead, read_ahead) {
                (Some(ahead), Some(tensor)) if ahead == extent => tensor,
                _ => read(&self.files, &extent, forgets),
            }
        });
        if let Some(after) = after.filter(|after| after.bytes() >= MIN_AHEAD) {
            if self.reader.is_none() {
                self.reader = Reader::start(&self.files, forgets);
            }
            let asked = self.reader.as_ref().map(|reader| reader.asked.send(after.clone()));
            self.ahead = asked.and_then(Result::ok).map(|()| after.clone());
        }
        Ok(tensor.map_err(Error::offload(&self.path))??)
    }

    /// Bytes written so far.
    #[cfg(test)]
    pub fn written_bytes(&self) -> u64 {
        self.written
    }
}

impl TensorFiles {
    /// Whether more bytes were written than the system has room for.
    fn has_no_room(&self) -> bool {
        self.written > self.unwritten_bytes
    }

    /// Writes to one of the files. Only one thread at a time writes to a file.
    fn write(&self, file: usize, bytes: &[u8], start: u64) -> std::io::Result<()> {
        let (file, unwritten, length) = (&self.files[file], &self.unwritten[file], &self.lengths[file]);
        let piece = (PIECES / self.files.len()).max(MIN_SHARE);
        // If the file was shortened, writing behind its end would turn the lost bytes into zeros.
        if file.metadata()?.len() < length.load(Ordering::Relaxed) {
            return Err(shortened());
        }
        length.store(start + bytes.len() as u64, Ordering::Relaxed);
        for (place, bytes) in bytes.chunks(piece).enumerate() {
            file.write_all_at(bytes, start + (place * piece) as u64)?;
            let so_far = unwritten.load(Ordering::Relaxed) + bytes.len();
            // Bytes written while there was still room are waited for with the first piece.
            let waits = so_far >= piece && (self.written + so_far as u64) > self.unwritten_bytes;
            if waits {
                file.sync_data()?;
                let end = start + (place * piece + bytes.len()) as u64;
                heap::forget(file, end.saturating_sub(so_far as u64), so_far as u64);
            }
            unwritten.store(if waits { 0 } else { so_far }, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Where files cannot be read and written at an offset, as in a browser, steps are only counted.
#[cfg(not(unix))]
trait FileExt {
    fn write_all_at(&self, _: &[u8], _: u64) -> std::io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }

    fn read_exact_at(&self, _: &mut [u8], _: u64) -> std::io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
}

#[cfg(not(unix))]
impl FileExt for File {}

fn read(files: &[File], extent: &Extent, forgets: bool) -> std::io::Result<candle_core::Result<Tensor>> {
    let mut read = Ok(());
    let tensor = tensor_storage::from_bytes(&extent.shape, extent.dtype, |bytes| {
        let mut parts = bytes.chunks_mut(extent.share).zip(files);
        read = parts.try_for_each(|(part, file)| read_part(file, part, extent.start, forgets));
    });
    read.map(|()| tensor)
}

fn shortened() -> std::io::Error {
    std::io::Error::new(ErrorKind::UnexpectedEof, "the file was shortened")
}

fn read_part(file: &File, part: &mut [u8], start: u64, forgets: bool) -> std::io::Result<()> {
    let mut start = start;
    for piece in part.chunks_mut(PIECES) {
        file.read_exact_at(piece, start).map_err(|error| match error.kind() {
            // The bytes to read were written before.
            ErrorKind::UnexpectedEof => shortened(),
            _ => error,
        })?;
        if forgets {
            heap::forget(file, start, piece.len() as u64);
        }
        start += piece.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    // The host alone: files are written from its memory.
    #[test]
    fn a_file_that_was_shortened_is_an_error_and_never_zeros() {
        let directory = tempfile::tempdir().unwrap();
        let x = Tensor::ones((300, 1000), DType::F32, &Device::Cpu).unwrap();
        let store = || {
            let files = Files::in_directory(directory.path());
            let mut store = TensorFiles::create(&files).unwrap();
            let put = store.put(x.clone()).unwrap();
            store.files[0].set_len(1000).unwrap();
            (store, put)
        };
        let (mut read, put) = store();
        let (mut written, _) = store();
        for error in [read.get(put, None).unwrap_err(), written.put(x.clone()).unwrap_err()] {
            assert!(error.to_string().contains("<offload file>: the file was shortened"), "{error}");
            assert!(matches!(error, Error::Offload { .. }));
        }
    }

    #[test]
    fn what_was_put_on_disk_comes_back_bit_by_bit_in_any_order_and_the_files_have_no_names() {
        for unwritten_bytes in [u64::MAX, 1 << 20, 0] {
            check(unwritten_bytes);
        }
    }

    // The host alone: as above.
    fn check(unwritten_bytes: u64) {
        let directory = tempfile::tempdir().unwrap();
        let files = Files { unwritten_bytes, ..Files::in_directory(directory.path()) };
        let mut store = TensorFiles::create(&files).unwrap();
        let tensors: Vec<Tensor> = [(DType::F32, 5), (DType::BF16, 3), (DType::F64, 2), (DType::F32, 700_001)]
            .iter()
            .map(|&(dtype, n)| Tensor::randn(0f32, 1.0, (2, n, 3), &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
            .collect();
        let put: Vec<Extent> = tensors.iter().map(|x| store.put(x.clone()).unwrap()).collect();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        for order in [[0, 1, 2, 3], [3, 1, 0, 2]] {
            for (place, &i) in order.iter().enumerate() {
                // The extent to read ahead is announced rightly, wrongly, or not at all.
                let after = [order.get(place + 1), Some(&0), None][place % 3].map(|&next| &put[next]);
                let back = store.get(put[i].clone(), after).unwrap();
                assert_eq!((back.dtype(), back.dims()), (tensors[i].dtype(), tensors[i].dims()));
                let values =
                    |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
                assert_eq!(values(&back), values(&tensors[i]));
            }
        }
        let waiting: u64 = store.unwritten.iter().map(|file| file.load(Ordering::Relaxed) as u64).sum();
        assert!(waiting <= unwritten_bytes.saturating_add(PIECES as u64), "{waiting}");
        assert_eq!(unwritten_bytes == u64::MAX, waiting == store.written_bytes());
    }
}
