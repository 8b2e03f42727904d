//! Samples of an optimizer step, from the keys that set them.

use super::{Values, pin};
use crate::failure::{Failure, Outcome};

/// The number from either form: `batch_size`, or per device x accumulation steps.
pub(super) fn from_values(values: &Values) -> Outcome<usize> {
    const DEFAULT: usize = 32;
    let whole = pin(values, "train.batch_size");
    let per_device = pin(values, "train.batch_size_per_device");
    let accumulation = pin(values, "train.gradient_accumulation_steps");
    let product = match (per_device, accumulation) {
        (None, None) => return Ok(whole.unwrap_or(DEFAULT)),
        (Some(per_device), accumulation) => Some(per_device * accumulation.unwrap_or(1)),
        (None, Some(accumulation)) => match whole {
            Some(whole) if accumulation == 1 => Some(whole),
            // Other trainers take the whole for a part. Either way is silently wrong for somebody.
            Some(whole) => {
                return Err(Failure::usage(format!(
                    "`train.batch_size` ({whole}, {}) is samples of an optimizer step, and `train.gradient_accumulation_steps` ({accumulation}) \
                     says that a step is several batches",
                    values.origin("train.batch_size"),
                ))
                .hint(format!(
                    "{whole} samples a step: leave out `train.gradient_accumulation_steps`, the memory plan cuts a step itself; {} samples: \
                     `--batch-size {}`",
                    whole * accumulation,
                    whole * accumulation,
                )));
            }
            None => {
                return Err(Failure::usage(
                    "`train.gradient_accumulation_steps` is set without `train.batch_size_per_device`",
                )
                .hint("set both, or `train.batch_size` alone"));
            }
        },
    };
    match (whole, product) {
        (Some(whole), Some(product)) if whole == product => Ok(whole),
        (None, Some(product)) => Ok(product),
        (Some(whole), _) => Err(Failure::usage(format!(
            "`train.batch_size` ({whole}, {}) is not `train.batch_size_per_device` x `train.gradient_accumulation_steps` ({} x {})",
            values.origin("train.batch_size"),
            per_device.map_or("auto".to_string(), |value| value.to_string()),
            accumulation.unwrap_or(1),
        ))
        .hint("set `train.batch_size`, or the other two")),
        (None, None) => Ok(DEFAULT),
    }
}
