//! The trainer's own memory, as rows of the bill. The model states its own rows.

use candle_core::DType;
use t5::{Config, CostRow, ParameterSpec};

use crate::error::Result;
use crate::freeze;
use crate::optimizer::state_dtype;
use crate::options::TrainerOptions;

/// Memory for saving a checkpoint: a piece of a tensor as values and as bytes, and the buffer of a file.
const SAVE_BYTES: u64 = 4 * t5::safetensors::PIECE_BYTES as u64;

/// The bytes of the optimizer's state, held from [`crate::Trainer::new`] on: a pure function of configuration and options.
///
/// `parameters` is the dtype of the model's parameters.
///
/// # Errors
/// An unknown item in `freeze`, or everything frozen.
pub fn optimizer_state(config: &Config, options: &TrainerOptions, parameters: DType) -> Result<CostRow> {
    let specs = ParameterSpec::all(config);
    let trainable =
        freeze::trainable(specs.iter().map(|spec| spec.name.as_str()), &options.freeze, config.lora.as_ref())?;
    let elements: u64 = specs
        .iter()
        .zip(trainable)
        .filter(|(_, trains)| *trains)
        .map(|(spec, _)| options.optimizer.state_elements(&spec.shape))
        .sum();
    let width = state_dtype(parameters).size_in_bytes() as u64;
    Ok(CostRow { name: "optimizer state", bytes: elements * width })
}

/// The parameters that train.
///
/// # Errors
/// An unknown item in `freeze`, or everything frozen.
pub fn trained_elements(config: &Config, options: &TrainerOptions) -> Result<u64> {
    let specs = ParameterSpec::all(config);
    let trainable =
        freeze::trainable(specs.iter().map(|spec| spec.name.as_str()), &options.freeze, config.lora.as_ref())?;
    Ok(specs.iter().zip(trainable).filter(|(_, trains)| *trains).map(|(spec, _)| spec.elements()).sum())
}

/// Memory for saving, beside that of training. It does not depend on the model's size.
pub fn saving() -> CostRow {
    CostRow { name: "save buffers", bytes: SAVE_BYTES }
}
