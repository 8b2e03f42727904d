//! Weights of a model on a device that wait beside it: in the host's memory, or in files.
//!
//! Layers hold tensors of the device, which are empty until a pass asks for their values. The values themselves are at home, on the CPU.
//! What a pass asked for is let go after it, and a change goes home before that.
//!
//! Invariants: a tensor and its home have one shape and dtype; of a tensor that is empty the home has the values, or they are on their way
//! to it, and the device uses them after that.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Device, Tensor, TensorId};
use t5_ops::copies::{Coming, Returning};
use t5_ops::page_locked::PageLocked;
use t5_ops::{absent, copy_waits};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::pager::Pager;
use crate::parameters::Parameter;
use crate::step::weights::WeightFile;

/// The homes of some tensors, by those.
#[derive(Debug)]
pub(crate) struct Homes {
    homes: RefCell<HashMap<TensorId, Home>>,
    file: Arc<WeightFile>,
}

#[derive(Debug)]
struct Home {
    /// Changed values, on their way to it.
    // First, so that they are there before the memory is unlocked.
    returning: Option<Returning>,
    values: Tensor,
    /// For copies that the host takes no part in. None of values in a file.
    lock: Option<PageLocked>,
    /// Whether the tensor has them, too.
    is_here: bool,
    /// They are on their way to it.
    coming: Option<Coming>,
}

impl Homes {
    /// None yet.
    pub fn new(file: Arc<WeightFile>) -> Homes {
        Homes { homes: RefCell::default(), file }
    }

    /// Parameters that were made on the CPU, on a device, but for those that stay at home ([`WeightFile::is_home`]).
    ///
    /// # Errors
    /// Those of the device.
    pub fn leave(&self, parameters: Vec<Parameter>, config: &Config, device: &Device) -> Result<Vec<Parameter>> {
        let parameter = |parameter: Parameter| {
            let tensor = match self.file.is_home(&parameter, config) {
                true => self.insert(parameter.tensor, device)?,
                false => parameter.tensor.to_device(device)?,
            };
            Ok(Parameter { tensor, ..parameter })
        };
        parameters.into_iter().map(parameter).collect()
    }

    /// An empty tensor on a device, whose home has these values.
    ///
    /// # Errors
    /// Those of the device.
    pub fn insert(&self, values: Tensor, device: &Device) -> Result<Tensor> {
        let tensor = absent::absent_like(&values, device)?;
        t5_ops::page_out(&values);
        let lock = PageLocked::of(&values, device);
        self.homes
            .borrow_mut()
            .insert(tensor.id(), Home { returning: None, values, lock, is_here: false, coming: None });
        Ok(tensor)
    }

    /// A parameter's tensor that was somewhere, `from` homes or on the device, where it is to be now: on the device, or empty there, with
    /// its values at home in `to`. Where a base is stored is its home.
    ///
    /// # Errors
    /// Those of the device and of a file.
    pub fn moved(
        from: Option<&Homes>,
        to: Option<&Homes>,
        parameter: &Parameter,
        (stored, tensor): (Option<Tensor>, Tensor),
        config: &Config,
    ) -> Result<Tensor> {
        let here = || from.map_or_else(|| Ok(tensor.clone()), |from| from.with_values(&tensor));
        let Some(to) = to.filter(|to| !to.file.keeps(parameter.part, config)) else { return here() };
        let home = from.map_or(Ok(None), |from| from.of(&tensor))?;
        let values = match (stored, home) {
            (Some(stored), _) if t5_ops::is_in_file(&stored) => stored,
            (_, Some(values)) => to.file.home(values)?,
            (_, None) => to.file.home(tensor.to_device(&Device::Cpu)?)?,
        };
        let of_values = Parameter { tensor: values, name: parameter.name.clone(), ..*parameter };
        match to.file.is_home(&of_values, config) {
            true => to.insert(of_values.tensor, tensor.device()),
            false => here(),
        }
    }

    /// Whether a tensor has a home.
    pub fn has(&self, tensor: &Tensor) -> bool {
        self.homes.borrow().contains_key(&tensor.id())
    }

    /// The values at home of a tensor, when they are there; none if it has no home.
    ///
    /// # Errors
    /// Those of the device.
    pub fn of(&self, tensor: &Tensor) -> Result<Option<Tensor>> {
        let mut homes = self.homes.borrow_mut();
        let Some(home) = homes.get_mut(&tensor.id()) else { return Ok(None) };
        home.returning.take().map_or(Ok(()), Returning::arrive)?;
        Ok(Some(home.values.clone()))
    }

    /// The tensor with its values: a copy on the device where it is empty.
    ///
    /// # Errors
    /// Those of the device and of a file.
    pub fn with_values(&self, tensor: &Tensor) -> Result<Tensor> {
        let Some(values) = self.of(tensor)? else { return Ok(tensor.clone()) };
        let copy = absent::absent_like(&values, tensor.device())?;
        let mut coming = Coming::begin(&copy)?;
        self.carry_out(&mut coming, &values)?;
        coming.arrive()?;
        Ok(copy)
    }

    /// Carries a copy of values out. An error of their file is told apart from those of tensors.
    fn carry_out(&self, coming: &mut Coming, values: &Tensor) -> Result<()> {
        coming.copy(values).map_err(|error| self.file.error(error))
    }

    /// Has `f` change a tensor, and its home follow.
    ///
    /// # Errors
    /// What `f` returns; those of the device and of a file.
    pub fn change<R, E: From<Error>>(&self, tensor: &Tensor, f: impl FnOnce(&Tensor) -> Result<R, E>) -> Result<R, E> {
        let Some(values) = self.of(tensor)? else { return f(tensor) };
        let was_here = self.homes.borrow().get(&tensor.id()).is_some_and(|home| home.is_here);
        self.page_in(0, tensor)?;
        let result = f(tensor)?;
        let returning = self.file.overwrite(&values, tensor)?;
        if let Some(home) = self.homes.borrow_mut().get_mut(&tensor.id()) {
            home.returning = returning;
        }
        if !was_here {
            self.page_out(0, tensor)?;
        }
        Ok(result)
    }

    /// Gives a tensor its values, which are on their way.
    fn arrive(&self, weight: &Tensor) -> Result<()> {
        if let Some(home) = self.homes.borrow_mut().get_mut(&weight.id()) {
            home.coming.take().map_or(Ok(()), Coming::arrive)?;
            home.is_here = true;
        }
        Ok(())
    }
}

impl Pager<Tensor> for Homes {
    fn fetch(&self, _: usize, weight: &Tensor) -> Result<()> {
        match self.homes.borrow_mut().get_mut(&weight.id()) {
            Some(home) if !home.is_here && home.coming.is_none() => {
                home.coming = Some(Coming::begin(weight)?);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn copy(&self, _: usize, weight: &Tensor) -> Result<()> {
        match self.homes.borrow_mut().get_mut(&weight.id()) {
            Some(Home { coming: Some(coming), values, .. }) if !coming.is_copied() => self.carry_out(coming, values),
            _ => Ok(()),
        }
    }

    fn copy_by_itself(&self, index: usize, weight: &Tensor) -> Result<()> {
        let is_locked = self.homes.borrow().get(&weight.id()).is_some_and(|home| home.lock.is_some());
        if is_locked { self.copy(index, weight) } else { Ok(()) }
    }

    fn fetch_to_change(&self, index: usize, weight: &Tensor) -> Result<()> {
        self.fetch(index, weight)?;
        self.copy(index, weight)
    }

    fn page_in(&self, index: usize, weight: &Tensor) -> Result<()> {
        if self.homes.borrow().get(&weight.id()).is_none_or(|home| home.is_here) {
            return Ok(());
        }
        copy_waits::waiting(weight.device(), || {
            self.fetch(index, weight)?;
            self.copy(index, weight)?;
            self.arrive(weight)
        })
    }

    fn read_ahead(&self, _: usize, weight: &Tensor) {
        if let Some(home) = self.homes.borrow().get(&weight.id()).filter(|home| !home.is_here) {
            t5_ops::read_ahead(&home.values);
        }
    }

    fn page_out(&self, _: usize, weight: &Tensor) -> Result<()> {
        match self.homes.borrow_mut().get_mut(&weight.id()) {
            Some(home) if home.is_here => {
                absent::release(weight)?;
                home.is_here = false;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
