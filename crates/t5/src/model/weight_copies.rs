//! Copies of a model's weights in bf16, for products that would cast them: one cast after an update in place of one for each product.
//!
//! Invariants: a copy has the bits of the cast, so only time and memory depend on it; no checkpoint has copies.

use candle_core::{DType, Tensor};

use super::T5;
use crate::error::Result;
use crate::network::Network;
use crate::parameters::{Parameter, ParameterSpec};

impl T5 {
    /// Holds a copy in bf16 of each weight that products of bf16 would cast, or releases the copies. Products give the same bits with them.
    /// After each update, copies must be refreshed: [`T5::refresh_copies`]. Weights that are not always in memory get no copies.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn hold_copies(&mut self, holds: bool) -> Result<()> {
        let holds = holds && !self.has_paged_weights();
        if holds != self.copies.is_empty() {
            return Ok(());
        }
        // Steps with copies have other launches than steps without, so no recording can be used again.
        self.micro_batches.borrow_mut().forget();
        let copy = |(spec, parameter): (ParameterSpec, &Parameter)| {
            let takes_copy = holds && spec.takes_copy(self.dtype, &self.config);
            let zeros = || Tensor::zeros(parameter.tensor.shape(), DType::BF16, parameter.tensor.device());
            takes_copy.then(zeros).transpose()
        };
        let specs = ParameterSpec::all(&self.config).into_iter();
        let copies = specs.zip(&self.parameters).map(copy).collect::<candle_core::Result<Vec<_>>>()?;
        let network = Network::new(&self.config, &self.parameters, &copies, false)?;
        let Network { read_ahead_bytes, pager, file, .. } = std::mem::replace(&mut self.network, network);
        (self.network.read_ahead_bytes, self.network.pager, self.network.file) = (read_ahead_bytes, pager, file);
        self.copies = if holds { copies } else { Vec::new() };
        self.refresh_copies()
    }

    /// Updates the copies, if there are any, from the weights. Call this after an update.
    ///
    /// # Errors
    /// The device reports an error.
    pub fn refresh_copies(&self) -> Result<()> {
        let pairs = self.parameters.iter().zip(&self.copies);
        let pairs: Vec<_> = pairs.filter_map(|(from, to)| Some((&from.tensor, to.as_ref()?))).collect();
        Ok(t5_ops::narrow_each(&pairs)?)
    }
}
