//! Where a step's tensors wait that do not stay in the memory they are computed in: in files, or in the host's memory beside a device.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::{DType, Device, Shape, Tensor};
use t5_ops::copies::{Coming, Leaving};
use t5_ops::copy_waits;
use t5_ops::waiting::{Departing, Waiting};

use super::Spill;
use super::files::{self, Files, TensorFiles};
use crate::error::Result;

/// A place for the tensors of a device.
#[derive(Debug)]
pub struct TensorSpill {
    device: Device,
    /// `None`: the host's memory.
    files: Option<TensorFiles>,
    /// Whether copies overlap with computation: [`Spill::copy`] then carries them out.
    copies_overlap: bool,
    /// Tensors that were put and are still being copied.
    leaving: Vec<(Stretch, Leaving)>,
    /// Tensors that are being copied without the host.
    departing: Vec<Departing>,
    /// Tensors that will be asked for next.
    coming: Vec<(Stretch, Tensor, Coming)>,
}

/// A tensor's place, which also identifies the tensor.
#[derive(Clone, Debug)]
pub struct Stretch(Rc<RefCell<Place>>);

#[derive(Clone, Debug)]
enum Place {
    /// In files.
    File(files::Stretch),
    /// On the CPU.
    Memory(Tensor),
    /// On the CPU, page-locked.
    Waiting(Rc<Waiting>),
    /// Being copied: its shape and dtype.
    Underway(Shape, DType),
}

impl PartialEq for Stretch {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl Stretch {
    fn at(place: Place) -> Self {
        Stretch(Rc::new(RefCell::new(place)))
    }

    /// The place in files, if the tensor lies there.
    fn in_files(&self) -> Option<files::Stretch> {
        if let Place::File(stretch) = &*self.0.borrow() { Some(stretch.clone()) } else { None }
    }

    fn shape_and_dtype(&self) -> (Shape, DType) {
        match &*self.0.borrow() {
            Place::File(stretch) => (stretch.shape().clone(), stretch.dtype()),
            Place::Memory(x) => (x.shape().clone(), x.dtype()),
            Place::Waiting(values) => (values.shape().clone(), values.dtype()),
            Place::Underway(shape, dtype) => (shape.clone(), *dtype),
        }
    }
}

impl TensorSpill {
    /// A place for tensors of a device, whose copies may overlap with computation.
    ///
    /// # Errors
    /// [`crate::Error::Offload`].
    pub fn create(files: &Files, device: &Device, copies_overlap: bool) -> Result<TensorSpill> {
        let in_memory = files.in_host_memory && !device.is_cpu();
        let files = (!in_memory).then(|| TensorFiles::create(files)).transpose()?;
        let (device, copies_overlap) = (device.clone(), copies_overlap && !device.is_cpu());
        let (leaving, departing, coming) = (Vec::new(), Vec::new(), Vec::new());
        Ok(TensorSpill { device, files, copies_overlap, leaving, departing, coming })
    }

    /// Puts a tensor of the CPU into its place.
    fn place(&mut self, x: Tensor) -> Result<Place> {
        Ok(match &mut self.files {
            Some(files) => Place::File(files.put(x)?),
            None => Place::Memory(x),
        })
    }

    /// Takes a tensor, on the CPU, from its place.
    fn host(&mut self, stretch: &Stretch, after: Option<&Stretch>) -> Result<Tensor> {
        let place = stretch.0.borrow().clone();
        match (place, &mut self.files) {
            (Place::File(stretch), Some(files)) => files.get(stretch, after.and_then(Stretch::in_files).as_ref()),
            (Place::Memory(x), _) => Ok(x),
            _ => unreachable!("a tensor is got from where it was put"),
        }
    }

    /// The values, if they wait in page-locked memory.
    fn waiting(&self, stretch: &Stretch) -> Option<Rc<Waiting>> {
        if let Place::Waiting(values) = &*stretch.0.borrow() { Some(Rc::clone(values)) } else { None }
    }

    /// Begins to copy a tensor to page-locked memory. `None`: there is no such memory for it.
    fn begin_waiting(&mut self, x: &Tensor) -> Result<Option<Stretch>> {
        if self.files.is_some() {
            return Ok(None);
        }
        let Some((values, departing)) = Waiting::begin(x)? else { return Ok(None) };
        match self.copies_overlap {
            true => self.departing.push(departing),
            false => departing.arrive()?,
        }
        Ok(Some(Stretch::at(Place::Waiting(Rc::new(values)))))
    }

    /// Carries out a copy that was begun.
    fn carry_out(&mut self, stretch: &Stretch, after: Option<&Stretch>, coming: &mut Coming) -> Result<()> {
        match self.waiting(stretch) {
            Some(values) => Ok(values.copy_to(coming)?),
            None => Ok(coming.copy(&self.host(stretch, after)?)?),
        }
    }

    /// Carries out the copies of tensors that were put.
    fn settle(&mut self) -> Result<()> {
        std::mem::take(&mut self.departing).into_iter().try_for_each(Departing::arrive)?;
        for (stretch, leaving) in std::mem::take(&mut self.leaving) {
            let place = self.place(leaving.arrive()?)?;
            stretch.0.replace(place);
        }
        Ok(())
    }

    fn begin(&self, stretch: &Stretch) -> Result<(Stretch, Tensor, Coming)> {
        let (shape, dtype) = stretch.shape_and_dtype();
        let x = Tensor::zeros(shape, dtype, &self.device)?;
        let coming = Coming::begin(&x)?;
        Ok((stretch.clone(), x, coming))
    }
}

impl Spill<Tensor> for TensorSpill {
    fn put(&mut self, x: Tensor) -> Result<Stretch> {
        if let Some(stretch) = self.begin_waiting(&x)? {
            return Ok(stretch);
        }
        if !self.copies_overlap {
            return Ok(Stretch::at(self.place(copy_waits::moved(&x, &Device::Cpu)?)?));
        }
        let stretch = Stretch::at(Place::Underway(x.shape().clone(), x.dtype()));
        self.leaving.push((stretch.clone(), Leaving::begin(&x)?));
        Ok(stretch)
    }

    fn get(&mut self, stretch: Stretch, after: Option<&Stretch>) -> Result<Tensor> {
        if !self.copies_overlap && self.waiting(&stretch).is_none() {
            let device = self.device.clone();
            return copy_waits::waiting(&device, || Ok(copy_waits::moved(&self.host(&stretch, after)?, &device)?));
        }
        let fetched = self.coming.iter().position(|(other, ..)| *other == stretch);
        let (_, x, mut coming) = match fetched {
            Some(place) => self.coming.swap_remove(place),
            None => self.begin(&stretch)?,
        };
        copy_waits::waiting(x.device(), || -> Result<()> {
            if !coming.is_copied() {
                self.settle()?;
                self.carry_out(&stretch, after, &mut coming)?;
            }
            Ok(coming.arrive()?)
        })?;
        Ok(x)
    }

    fn fetch(&mut self, stretch: &Stretch) -> Result<()> {
        if self.copies_overlap {
            let begun = self.begin(stretch)?;
            self.coming.push(begun);
        }
        Ok(())
    }

    fn copy(&mut self) -> Result<()> {
        self.settle()?;
        let mut coming = std::mem::take(&mut self.coming);
        let stretches: Vec<Stretch> = coming.iter().map(|(stretch, ..)| stretch.clone()).collect();
        for (place, (stretch, _, coming)) in
            coming.iter_mut().enumerate().filter(|(_, (.., coming))| !coming.is_copied())
        {
            self.carry_out(stretch, stretches.get(place + 1), coming)?;
        }
        self.coming = coming;
        Ok(())
    }

    #[cfg(test)]
    fn written_bytes(&self) -> u64 {
        self.files.as_ref().map_or(0, TensorFiles::written_bytes)
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
        let mut spill = TensorSpill::create(&files, &Device::Cpu, true).unwrap();
        let x = Tensor::arange(0f32, 12.0, &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        let put = spill.put(x.clone()).unwrap();
        assert_eq!(spill.written_bytes(), 48);
        assert_eq!(spill.get(put, None).unwrap().to_vec2::<f32>().unwrap(), x.to_vec2::<f32>().unwrap());
    }
}
