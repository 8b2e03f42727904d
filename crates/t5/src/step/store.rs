//! Where a step's tensors lie between two uses: in memory, or in files.

use crate::error::Result;
use crate::ops::{OffloadStore, Ops};

/// A place for tensors.
#[derive(Debug)]
pub(crate) struct Store<T: Ops> {
    files: Option<T::OffloadStore>,
    written: u64,
}

/// A tensor that was put into a [`Store`].
#[derive(Clone, Debug)]
pub(crate) enum Stored<T: Ops> {
    Memory(T),
    File(T::Extent),
}

impl<T: Ops> Stored<T> {
    /// Bytes of memory that the tensor takes.
    pub fn bytes(&self) -> u64 {
        match self {
            Stored::Memory(x) => x.bytes(),
            Stored::File(_) => 0,
        }
    }
}

impl<T: Ops> Store<T> {
    /// A store in memory.
    pub fn in_memory() -> Self {
        Store { files: None, written: 0 }
    }

    /// A store in files.
    pub fn on_disk(files: T::OffloadStore) -> Self {
        Store { files: Some(files), written: 0 }
    }

    /// Bytes written to files so far.
    pub fn written_bytes(&self) -> u64 {
        self.written
    }

    /// Puts a tensor into the store; in a file, behind those already there.
    ///
    /// # Errors
    /// [`Error::Offload`].
    pub fn put(&mut self, x: T) -> Result<Stored<T>> {
        match &mut self.files {
            Some(files) => {
                self.written += x.bytes();
                Ok(Stored::File(files.put(x)?))
            }
            None => Ok(Stored::Memory(x)),
        }
    }

    /// Where copies overlap with computation, prefetches a tensor that will be asked for next.
    ///
    /// # Errors
    /// The device reports an error.
    pub fn prefetch(&mut self, stored: &Stored<T>) -> Result<()> {
        match (stored, &mut self.files) {
            (Stored::File(extent), Some(files)) => files.prefetch(extent),
            _ => Ok(()),
        }
    }

    /// Carries out the copies that overlap with computation; called while something is computed.
    ///
    /// # Errors
    /// [`Error::Offload`].
    pub fn copy(&mut self) -> Result<()> {
        self.files.as_mut().map_or(Ok(()), OffloadStore::copy)
    }

    /// Takes a stored tensor. Begins to read `after`, which will be asked for next.
    ///
    /// # Errors
    /// [`Error::Offload`].
    pub fn get(&mut self, stored: Stored<T>, after: Option<&Stored<T>>) -> Result<T> {
        let after = after.and_then(|after| if let Stored::File(extent) = after { Some(extent) } else { None });
        match (stored, &mut self.files) {
            (Stored::Memory(x), _) => Ok(x),
            (Stored::File(extent), Some(files)) => files.get(extent, after),
            (Stored::File(_), None) => unreachable!("a tensor is got from where it was put"),
        }
    }
}
