//! Where tensors lie, and what is carried out there.
//!
//! On a device every operation is a composition of candle's. What maps files into the process's memory, multiplies codes, or
//! hands bytes to other processes exists on the CPU alone. The table of levers says which of their values do
//! ([`crate::Lever::works_at`]); the search leaves them out, and here a job that asks for one is refused.

use memory_policy::Place;
use t5::ParameterSpec;

use crate::error::{Error, Result};
use crate::job::{Job, Work};

/// Refuses a job that asks for something that the place of its tensors cannot carry out.
///
/// # Errors
/// [`Error::NotOnADevice`], which names it.
pub fn check(job: &Job<'_>) -> Result<()> {
    if job.place == Place::Host {
        return Ok(());
    }
    let refused = |what: String| Err(Error::NotOnADevice { what });
    if let Some((lever, value)) = job.pins.that_fails_at(job.place) {
        let flag = lever.flag.map(|flag| format!(" (`bench --{}`)", flag.long)).unwrap_or_default();
        return refused(format!("`memory.{} = {}`{flag}", lever.name, value.written()));
    }
    if ParameterSpec::all(job.model).iter().any(|spec| spec.quantisation.is_some()) {
        return refused("a base in codes (`model.base_precision`)".to_owned());
    }
    match &job.work {
        Work::Training(training) if training.processes.buffers > 0 => {
            refused("training by several processes".to_owned())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
