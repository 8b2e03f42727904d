//! Homes of a device model's weights: places in the host's memory, or in files, where the values wait.
//!
//! Layers hold tensors of the device, which are empty until a pass asks for their values. The values themselves are at home, on the CPU.
//! Tensors that a pass asked for are emptied after it. Changed values are copied home first.
//!
//! Invariants: a tensor and its home have the same shape and dtype. If the tensor is empty, its home has the values, or they are on
//! their way to it, and the device uses them only after they arrived.

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

/// The homes of some tensors, by tensor id.
#[derive(Debug)]
pub(crate) struct Homes {
    homes: RefCell<HashMap<TensorId, Home>>,
    file: Arc<WeightFile>,
}

#[derive(Debug)]
struct Home {
    /// Changed values that are being copied to the home.
    // This field is first, so that the copy ends before the memory is unlocked.
    returning: Option<Returning>,
    values: Tensor,
    /// Page-locks the values, for copies that the host takes no part in. `None` for values in a file.
    lock: Option<PageLocked>,
    /// Whether the tensor has the values, too.
    is_here: bool,
    /// The copy of the values to the tensor, while it is in progress.
    coming: Option<Coming>,
}

impl Homes {
    /// No homes yet.
    pub fn new(file: Arc<WeightFile>) -> Homes {
        Homes { homes: RefCell::default(), file }
    }

    /// Moves parameters that were made on the CPU to a device, except those that stay at home ([`WeightFile::is_home`]).
    ///
    /// # Errors
    /// The device reports an error.
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
    /// The device reports an error.
    pub fn insert(&self, values: Tensor, device: &Device) -> Result<Tensor> {
        let tensor = absent::absent_like(&values, device)?;
        t5_ops::page_out(&values);
        let lock = PageLocked::of(&values, device);
        self.homes
            .borrow_mut()
            .insert(tensor.id(), Home { returning: None, values, lock, is_here: false, coming: None });
        Ok(tensor)
    }

    /// Moves a parameter's tensor from its old place, `from` homes or the device, to its new one: the device, or its home in `to`, with an
    /// empty tensor on the device. The home of a base's weight is the file where the base is stored.
    ///
    /// # Errors
    /// The device or a file reports an error.
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

    /// The values in a tensor's home, after any copy to it has ended. `None` if the tensor has no home.
    ///
    /// # Errors
    /// The device reports an error.
    pub fn of(&self, tensor: &Tensor) -> Result<Option<Tensor>> {
        let mut homes = self.homes.borrow_mut();
        let Some(home) = homes.get_mut(&tensor.id()) else { return Ok(None) };
        home.returning.take().map_or(Ok(()), Returning::arrive)?;
        Ok(Some(home.values.clone()))
    }

    /// The tensor with its values. If the tensor is empty, this is a copy on the device.
    ///
    /// # Errors
    /// The device or a file reports an error.
    pub fn with_values(&self, tensor: &Tensor) -> Result<Tensor> {
        let Some(values) = self.of(tensor)? else { return Ok(tensor.clone()) };
        let copy = absent::absent_like(&values, tensor.device())?;
        let mut coming = Coming::begin(&copy)?;
        self.carry_out(&mut coming, &values)?;
        coming.arrive()?;
        Ok(copy)
    }

    /// Carries out a copy of values. An I/O error becomes an error of their file.
    fn carry_out(&self, coming: &mut Coming, values: &Tensor) -> Result<()> {
        coming.copy(values).map_err(|error| self.file.error(error))
    }

    /// Has `f` change a tensor, and then copies the changed values home.
    ///
    /// # Errors
    /// `f` returns an error, or the device or a file reports one.
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

    /// Gives a tensor the values that are being copied to it.
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
