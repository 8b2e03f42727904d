//! AdamW whose moments are held in a byte a value (Dettmers et al., 2022, arXiv 2110.02861), as `bitsandbytes.optim.AdamW8bit` holds them.
//!
//! The update is [`crate::adamw`]'s, in f32. Between updates each moment is the codes of its values in a dynamic map, and the largest
//! magnitude of each block of 256 values in memory order, by which the values were divided. A parameter moves by the new moments before
//! they are rounded to the map.
//!
//! Shapes: parameter, gradient and codes (U8) are the same. With N elements, `largest` (F32) is (ceil(N / 256)).
//!
//! A value gets the nearest number of its map. So it is in bitsandbytes' torch code and for its GPUs; its library for the CPU
//! (0.50) looks values up on a grid of 1/65535, which loses those below 1.5e-5 of a block's largest.

mod cpu;
mod map;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Result, Tensor, bail};
use tensor_storage::overwrite;

use crate::dispatch::{Path, check_accumulator, check_shape};
use crate::needs::{Needs, copies};
use crate::ops::adamw::AdamwHyper;

/// A moment as codes.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedMoment<'a> {
    /// The code of each value.
    pub codes: &'a Tensor,
    /// The largest magnitude of each block.
    pub largest: &'a Tensor,
}

/// The update of one of several parameters.
#[derive(Clone, Copy, Debug)]
pub struct AdamwInt8Update<'a> {
    /// The parameter.
    pub param: &'a Tensor,
    /// Its gradient, which is not changed.
    pub grad: &'a Tensor,
    /// The first and the second moment.
    pub moments: [QuantisedMoment<'a>; 2],
    /// The numbers of this parameter's update.
    pub hyper: AdamwHyper,
}

/// The number of blocks of a moment of this many values.
pub fn moment_blocks(elements: usize) -> usize {
    elements.div_ceil(map::BLOCK)
}

/// Returns the needs of [`adamw_int8_of_each`] for parameters of these numbers of elements and dtypes.
pub fn adamw_int8_needs(path: Path, parameters: &[(u64, DType)]) -> Needs {
    Needs::most(parameters.iter().map(|&(elements, dtype)| match path {
        Path::Cpu => Needs::default(),
        // Parameter, gradient and codes, on the host.
        Path::Device => Needs::default().with_bytes_on_host(copies(2, elements, dtype) + 2 * elements),
        // The update's own, the moments, and a moment in blocks with what its search holds.
        Path::Reference => Needs::bytes(copies(14, elements, dtype)),
    }))
}

/// Updates each parameter and its moments in place. On the CPU parameter and gradient may each be in bf16. A card has no kernel: the
/// host computes on copies.
///
/// # Errors
/// Shapes or dtypes that do not fit each other; tensors that share memory. Some parameters may have changed by then.
pub fn adamw_int8_of_each(updates: &[AdamwInt8Update]) -> Result<()> {
    let _span = tracing::debug_span!("adamw_int8").entered();
    updates.iter().try_for_each(AdamwInt8Update::check)?;
    updates.iter().try_for_each(AdamwInt8Update::make)
}

impl AdamwInt8Update<'_> {
    fn check(&self) -> Result<()> {
        let (shape, blocks) = (self.param.dims(), moment_blocks(self.param.elem_count()));
        check_accumulator("adamw_int8", "param", self.param, shape)?;
        check_shape("adamw_int8", "grad", self.grad, shape)?;
        // Copies of a card's tensors would share nothing.
        if std::ptr::eq(&*self.param.storage_and_layout().0, &*self.grad.storage_and_layout().0) {
            bail!("adamw_int8: the parameter and its gradient share memory")
        }
        for moment in self.moments {
            check_accumulator("adamw_int8", "codes", moment.codes, shape)?;
            check_accumulator("adamw_int8", "largest", moment.largest, &[blocks])?;
            if (moment.codes.dtype(), moment.largest.dtype()) != (DType::U8, DType::F32) {
                bail!("adamw_int8: expected codes of U8 and magnitudes of F32")
            }
        }
        Ok(())
    }

    fn make(&self) -> Result<()> {
        match Path::choose(&[self.param, self.grad]) {
            _ if self.param.elem_count() == 0 => Ok(()),
            Path::Cpu => cpu::adamw_int8(self),
            Path::Reference => reference::adamw_int8(self),
            Path::Device => self.make_on_host(),
        }
    }

    /// [`AdamwInt8Update::make`] on copies in the host's memory.
    fn make_on_host(&self) -> Result<()> {
        let [first, second] = self.moments;
        let on_device = [self.param, first.codes, first.largest, second.codes, second.largest];
        let on_host: Vec<Tensor> = on_device.iter().map(|x| x.to_device(&Device::Cpu)).collect::<Result<_>>()?;
        let moment = |i: usize| QuantisedMoment { codes: &on_host[i], largest: &on_host[i + 1] };
        let grad = self.grad.to_device(&Device::Cpu)?;
        AdamwInt8Update { param: &on_host[0], grad: &grad, moments: [moment(1), moment(3)], hyper: self.hyper }
            .make()?;
        on_device.iter().zip(&on_host).try_for_each(|(x, changed)| overwrite(x, &changed.to_device(x.device())?))
    }
}
