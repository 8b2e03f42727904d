//! The offload store of a step: tensors that do not stay in the memory they are computed in lie in files, or in the host's memory beside
//! a device.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::{DType, Device, Shape, Tensor};
use cuda_device::copies::{Download, Upload};
use cuda_device::copy_waits;
use cuda_device::pinned_copies::{PendingDownload, PinnedCopy};

use super::OffloadStore;
use super::files::{self, Files, TensorFiles};
use crate::error::Result;

/// The offload store of tensors. On a device their copies may overlap with computation.
#[derive(Debug)]
pub struct TensorOffloadStore {
    device: Device,
    /// `None`: the host's memory.
    files: Option<TensorFiles>,
    /// Whether copies overlap with computation: [`OffloadStore::copy`] then carries them out.
    copies_overlap: bool,
    /// Tensors that were put and are still being copied.
    outgoing: Vec<(Extent, Download)>,
    /// Tensors that are being copied without the host.
    outgoing_pinned: Vec<PendingDownload>,
    /// Tensors that will be asked for next.
    incoming: Vec<(Extent, Tensor, Upload)>,
}

/// A tensor's place, which also identifies the tensor.
#[derive(Clone, Debug)]
pub struct Extent(Rc<RefCell<OffloadedTensor>>);

#[derive(Clone, Debug)]
enum OffloadedTensor {
    /// In files.
    File(files::Extent),
    /// On the CPU.
    Memory(Tensor),
    /// On the CPU, page-locked.
    PinnedCopy(Rc<PinnedCopy>),
    /// Being copied: its shape and dtype.
    InFlight(Shape, DType),
}

impl PartialEq for Extent {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl Extent {
    fn at(place: OffloadedTensor) -> Self {
        Extent(Rc::new(RefCell::new(place)))
    }

    /// The place in files, if the tensor lies there.
    fn in_files(&self) -> Option<files::Extent> {
        if let OffloadedTensor::File(extent) = &*self.0.borrow() { Some(extent.clone()) } else { None }
    }

    fn shape_and_dtype(&self) -> (Shape, DType) {
        match &*self.0.borrow() {
            OffloadedTensor::File(extent) => (extent.shape().clone(), extent.dtype()),
            OffloadedTensor::Memory(x) => (x.shape().clone(), x.dtype()),
            OffloadedTensor::PinnedCopy(values) => (values.shape().clone(), values.dtype()),
            OffloadedTensor::InFlight(shape, dtype) => (shape.clone(), *dtype),
        }
    }
}

impl TensorOffloadStore {
    /// A place for tensors of a device, whose copies may overlap with computation.
    ///
    /// # Errors
    /// [`crate::Error::Offload`].
    pub fn create(files: &Files, device: &Device, copies_overlap: bool) -> Result<TensorOffloadStore> {
        let in_memory = files.in_host_memory && !device.is_cpu();
        let files = (!in_memory).then(|| TensorFiles::create(files)).transpose()?;
        let (device, copies_overlap) = (device.clone(), copies_overlap && !device.is_cpu());
        let (outgoing, outgoing_pinned, incoming) = (Vec::new(), Vec::new(), Vec::new());
        Ok(TensorOffloadStore { device, files, copies_overlap, outgoing, outgoing_pinned, incoming })
    }

    /// Puts a tensor of the CPU into its place.
    fn place(&mut self, x: Tensor) -> Result<OffloadedTensor> {
        Ok(match &mut self.files {
            Some(files) => OffloadedTensor::File(files.put(x)?),
            None => OffloadedTensor::Memory(x),
        })
    }

    /// Takes a tensor, on the CPU, from its place.
    fn host(&mut self, extent: &Extent, after: Option<&Extent>) -> Result<Tensor> {
        let place = extent.0.borrow().clone();
        match (place, &mut self.files) {
            (OffloadedTensor::File(extent), Some(files)) => {
                files.get(extent, after.and_then(Extent::in_files).as_ref())
            }
            (OffloadedTensor::Memory(x), _) => Ok(x),
            _ => unreachable!("a tensor is got from where it was put"),
        }
    }

    /// The values, if they lie in page-locked memory.
    fn waiting(&self, extent: &Extent) -> Option<Rc<PinnedCopy>> {
        if let OffloadedTensor::PinnedCopy(values) = &*extent.0.borrow() { Some(Rc::clone(values)) } else { None }
    }

    /// Begins to copy a tensor to page-locked memory. `None`: there is no such memory for it.
    fn begin_pinned_download(&mut self, x: &Tensor) -> Result<Option<Extent>> {
        if self.files.is_some() {
            return Ok(None);
        }
        let Some((values, outgoing_pinned)) = PinnedCopy::begin(x)? else { return Ok(None) };
        match self.copies_overlap {
            true => self.outgoing_pinned.push(outgoing_pinned),
            false => outgoing_pinned.complete()?,
        }
        Ok(Some(Extent::at(OffloadedTensor::PinnedCopy(Rc::new(values)))))
    }

    /// Carries out a copy that was begun.
    fn execute(&mut self, extent: &Extent, after: Option<&Extent>, incoming: &mut Upload) -> Result<()> {
        match self.waiting(extent) {
            Some(values) => Ok(values.copy_to(incoming)?),
            None => Ok(incoming.copy(&self.host(extent, after)?)?),
        }
    }

    /// Carries out the copies of tensors that were put.
    fn settle(&mut self) -> Result<()> {
        std::mem::take(&mut self.outgoing_pinned).into_iter().try_for_each(PendingDownload::complete)?;
        for (extent, outgoing) in std::mem::take(&mut self.outgoing) {
            let place = self.place(outgoing.complete()?)?;
            extent.0.replace(place);
        }
        Ok(())
    }

    fn begin(&self, extent: &Extent) -> Result<(Extent, Tensor, Upload)> {
        let (shape, dtype) = extent.shape_and_dtype();
        let x = Tensor::zeros(shape, dtype, &self.device)?;
        let incoming = Upload::begin(&x)?;
        Ok((extent.clone(), x, incoming))
    }
}

impl OffloadStore<Tensor> for TensorOffloadStore {
    fn put(&mut self, x: Tensor) -> Result<Extent> {
        if let Some(extent) = self.begin_pinned_download(&x)? {
            return Ok(extent);
        }
        if !self.copies_overlap {
            return Ok(Extent::at(self.place(copy_waits::moved(&x, &Device::Cpu)?)?));
        }
        let extent = Extent::at(OffloadedTensor::InFlight(x.shape().clone(), x.dtype()));
        self.outgoing.push((extent.clone(), Download::begin(&x)?));
        Ok(extent)
    }

    fn get(&mut self, extent: Extent, after: Option<&Extent>) -> Result<Tensor> {
        if !self.copies_overlap && self.waiting(&extent).is_none() {
            let device = self.device.clone();
            return copy_waits::waiting(&device, || Ok(copy_waits::moved(&self.host(&extent, after)?, &device)?));
        }
        let fetched = self.incoming.iter().position(|(other, ..)| *other == extent);
        let (_, x, mut incoming) = match fetched {
            Some(place) => self.incoming.swap_remove(place),
            None => self.begin(&extent)?,
        };
        copy_waits::waiting(x.device(), || -> Result<()> {
            if !incoming.is_copied() {
                self.settle()?;
                self.execute(&extent, after, &mut incoming)?;
            }
            Ok(incoming.complete()?)
        })?;
        Ok(x)
    }

    fn prefetch(&mut self, extent: &Extent) -> Result<()> {
        if self.copies_overlap {
            let begun = self.begin(extent)?;
            self.incoming.push(begun);
        }
        Ok(())
    }

    fn copy(&mut self) -> Result<()> {
        self.settle()?;
        let mut incoming = std::mem::take(&mut self.incoming);
        let extents: Vec<Extent> = incoming.iter().map(|(extent, ..)| extent.clone()).collect();
        for (place, (extent, _, incoming)) in
            incoming.iter_mut().enumerate().filter(|(_, (.., incoming))| !incoming.is_copied())
        {
            self.execute(extent, extents.get(place + 1), incoming)?;
        }
        self.incoming = incoming;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The host alone: this test is about tensors of the CPU.
    #[test]
    fn tensors_of_the_cpu_wait_in_files_whatever_is_said_of_a_device() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files { in_host_memory: true, ..Files::in_directory(directory.path()) };
        let mut offload_store = TensorOffloadStore::create(&files, &Device::Cpu, true).unwrap();
        let x = Tensor::arange(0f32, 12.0, &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        let put = offload_store.put(x.clone()).unwrap();
        assert_eq!(offload_store.files.as_ref().map(TensorFiles::written_bytes), Some(48));
        assert_eq!(offload_store.get(put, None).unwrap().to_vec2::<f32>().unwrap(), x.to_vec2::<f32>().unwrap());
    }
}
