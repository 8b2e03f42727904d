//! Host copies of a device model's weights: tensors in the host's memory, or in files, that hold the values between two uses.
//!
//! Layers hold tensors of the device, which are empty until a pass asks for their values. The values themselves are in the host copy, on
//! the CPU. Tensors that a pass asked for are emptied after it. Changed values are written back first.
//!
//! Invariants: a tensor and its host copy have the same shape and dtype. If the tensor is empty, its host copy has the values, or they are
//! being written back to it, and the device uses them only after that is complete.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Device, Tensor, TensorId};
use cuda_device::copies::{Upload, WriteBack};
use cuda_device::copy_waits;
use cuda_device::page_locked::PageLocked;
use tensor_storage::unallocated;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::pager::Pager;
use crate::parameters::Parameter;
use crate::weight_file::WeightFile;

/// The host copies of some tensors, by tensor id.
#[derive(Debug)]
pub(crate) struct HostCopies {
    host_copies: RefCell<HashMap<TensorId, HostCopy>>,
    file: Arc<WeightFile>,
}

#[derive(Debug)]
struct HostCopy {
    /// Changed values that are being written back.
    // This field is first, so that the copy ends before the memory is unlocked.
    write_back: Option<WriteBack>,
    values: Tensor,
    /// Page-locks the values, for copies that the host takes no part in. `None` for values in a file.
    lock: Option<PageLocked>,
    /// Whether the tensor has the values, too.
    is_resident: bool,
    /// The copy of the values to the tensor, while it is in progress.
    incoming: Option<Upload>,
}

impl HostCopies {
    /// No host copies yet.
    pub fn new(file: Arc<WeightFile>) -> HostCopies {
        HostCopies { host_copies: RefCell::default(), file }
    }

    /// Moves parameters that were made on the CPU to a device, except those that stay on the host
    /// ([`WeightFile::stays_on_host`]).
    ///
    /// # Errors
    /// The device reports an error.
    pub fn leave(&self, parameters: Vec<Parameter>, config: &Config, device: &Device) -> Result<Vec<Parameter>> {
        let parameter = |parameter: Parameter| {
            let tensor = match self.file.stays_on_host(&parameter, config) {
                true => self.insert(parameter.tensor, device)?,
                false => parameter.tensor.to_device(device)?,
            };
            Ok(Parameter { tensor, ..parameter })
        };
        parameters.into_iter().map(parameter).collect()
    }

    /// An empty tensor on a device, whose host copy has these values.
    ///
    /// # Errors
    /// The device reports an error.
    pub fn insert(&self, values: Tensor, device: &Device) -> Result<Tensor> {
        let tensor = unallocated::unallocated_like(&values, device)?;
        tensor_storage::page_out(&values);
        let lock = PageLocked::lock(&values, device);
        self.host_copies
            .borrow_mut()
            .insert(tensor.id(), HostCopy { write_back: None, values, lock, is_resident: false, incoming: None });
        Ok(tensor)
    }

    /// Moves a parameter's tensor from its old place, a host copy in `from` or the device, to its new one: the device, or a host copy in
    /// `to` with an empty tensor on the device. The host copy of a base's weight is in the file where the base is stored.
    ///
    /// # Errors
    /// The device or a file reports an error.
    pub fn moved(
        from: Option<&HostCopies>,
        to: Option<&HostCopies>,
        parameter: &Parameter,
        (stored, tensor): (Option<Tensor>, Tensor),
        config: &Config,
    ) -> Result<Tensor> {
        let here = || from.map_or_else(|| Ok(tensor.clone()), |from| from.with_values(&tensor));
        let Some(to) = to.filter(|to| !to.file.keeps(parameter.part, config)) else { return here() };
        let host_copy = from.map_or(Ok(None), |from| from.read(&tensor))?;
        let values = match (stored, host_copy) {
            (Some(stored), _) if tensor_storage::is_in_file(&stored) => stored,
            (_, Some(values)) => to.file.to_host_copy(values)?,
            (_, None) => to.file.to_host_copy(tensor.to_device(&Device::Cpu)?)?,
        };
        let of_values = Parameter { tensor: values, name: parameter.name.clone(), ..*parameter };
        match to.file.stays_on_host(&of_values, config) {
            true => to.insert(of_values.tensor, tensor.device()),
            false => here(),
        }
    }

    /// Whether a tensor has a host copy.
    pub fn has(&self, tensor: &Tensor) -> bool {
        self.host_copies.borrow().contains_key(&tensor.id())
    }

    /// The values in a tensor's host copy, after any write-back to it has ended. `None` if the tensor has no host copy.
    ///
    /// # Errors
    /// The device reports an error.
    pub fn read(&self, tensor: &Tensor) -> Result<Option<Tensor>> {
        let mut host_copies = self.host_copies.borrow_mut();
        let Some(host_copy) = host_copies.get_mut(&tensor.id()) else { return Ok(None) };
        host_copy.write_back.take().map_or(Ok(()), WriteBack::complete)?;
        Ok(Some(host_copy.values.clone()))
    }

    /// The tensor with its values. If the tensor is empty, this is a copy on the device.
    ///
    /// # Errors
    /// The device or a file reports an error.
    pub fn with_values(&self, tensor: &Tensor) -> Result<Tensor> {
        let Some(values) = self.read(tensor)? else { return Ok(tensor.clone()) };
        let copy = unallocated::unallocated_like(&values, tensor.device())?;
        let mut incoming = Upload::begin(&copy)?;
        self.execute(&mut incoming, &values)?;
        incoming.complete()?;
        Ok(copy)
    }

    /// Carries out a copy of values. An I/O error becomes an error of their file.
    fn execute(&self, incoming: &mut Upload, values: &Tensor) -> Result<()> {
        incoming.copy(values).map_err(|error| self.file.error(error))
    }

    /// Has `f` change a tensor, and then writes the changed values back.
    ///
    /// # Errors
    /// `f` returns an error, or the device or a file reports one.
    pub fn change<R, E: From<Error>>(&self, tensor: &Tensor, f: impl FnOnce(&Tensor) -> Result<R, E>) -> Result<R, E> {
        let Some(values) = self.read(tensor)? else { return f(tensor) };
        let was_resident = self.host_copies.borrow().get(&tensor.id()).is_some_and(|host_copy| host_copy.is_resident);
        self.page_in(0, tensor)?;
        let result = f(tensor)?;
        let write_back = self.file.overwrite(&values, tensor)?;
        if let Some(host_copy) = self.host_copies.borrow_mut().get_mut(&tensor.id()) {
            host_copy.write_back = write_back;
        }
        if !was_resident {
            self.page_out(0, tensor)?;
        }
        Ok(result)
    }

    /// Gives a tensor the values that are being copied to it.
    fn complete(&self, weight: &Tensor) -> Result<()> {
        if let Some(host_copy) = self.host_copies.borrow_mut().get_mut(&weight.id()) {
            host_copy.incoming.take().map_or(Ok(()), Upload::complete)?;
            host_copy.is_resident = true;
        }
        Ok(())
    }
}

impl Pager<Tensor> for HostCopies {
    fn prefetch(&self, _: usize, weight: &Tensor) -> Result<()> {
        match self.host_copies.borrow_mut().get_mut(&weight.id()) {
            Some(host_copy) if !host_copy.is_resident && host_copy.incoming.is_none() => {
                host_copy.incoming = Some(Upload::begin(weight)?);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn copy(&self, _: usize, weight: &Tensor) -> Result<()> {
        match self.host_copies.borrow_mut().get_mut(&weight.id()) {
            Some(HostCopy { incoming: Some(incoming), values, .. }) if !incoming.is_copied() => {
                self.execute(incoming, values)
            }
            _ => Ok(()),
        }
    }

    fn copy_nonblocking(&self, index: usize, weight: &Tensor) -> Result<()> {
        let is_locked = self.host_copies.borrow().get(&weight.id()).is_some_and(|host_copy| host_copy.lock.is_some());
        if is_locked { self.copy(index, weight) } else { Ok(()) }
    }

    fn prefetch_for_update(&self, index: usize, weight: &Tensor) -> Result<()> {
        self.prefetch(index, weight)?;
        self.copy(index, weight)
    }

    fn page_in(&self, index: usize, weight: &Tensor) -> Result<()> {
        if self.host_copies.borrow().get(&weight.id()).is_none_or(|host_copy| host_copy.is_resident) {
            return Ok(());
        }
        copy_waits::waiting(weight.device(), || {
            self.prefetch(index, weight)?;
            self.copy(index, weight)?;
            self.complete(weight)
        })
    }

    fn read_ahead(&self, _: usize, weight: &Tensor) {
        if let Some(host_copy) = self.host_copies.borrow().get(&weight.id()).filter(|host_copy| !host_copy.is_resident)
        {
            tensor_storage::read_ahead(&host_copy.values);
        }
    }

    fn page_out(&self, _: usize, weight: &Tensor) -> Result<()> {
        match self.host_copies.borrow_mut().get_mut(&weight.id()) {
            Some(host_copy) if host_copy.is_resident => {
                unallocated::release(weight)?;
                host_copy.is_resident = false;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn release(&self, index: usize, weight: &Tensor) -> Result<()> {
        if let Some(host_copy) = self.host_copies.borrow_mut().get_mut(&weight.id()) {
            // A weight that is being copied has its memory already.
            host_copy.is_resident |= host_copy.incoming.take().is_some();
        }
        self.page_out(index, weight)
    }
}
