//! Repeated work on a card: its launches are recorded once, and from then on launched together (a CUDA graph).
//!
//! A launch costs the host microseconds. A token of an answer takes hundreds of launches, each of which the card runs in less time. A graph
//! is one launch. Its kernels keep the arguments that they were recorded with, addresses included. So tensors of recorded work lie in an
//! *arena* that belongs to the recording, and kernels read changing numbers from memory that is written before each launch.
//!
//! Invariants: recorded work gives the same bits. A graph consists of kernels and copies on the card, and has no memory of its own. If
//! anything cannot be recorded, the work runs launch by launch, and a warning says why.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//!
//! # fn main() -> candle_core::Result<()> {
//! let x = Tensor::ones(3, DType::F32, &Device::Cpu)?; // on a card it would be recorded
//! let mut replay = cuda_device::Replay::default();
//! for step in 0..5 {
//!     let sum = replay.run(&[&x], &[step], |step| &x + step.to_dtype(DType::F32)?.broadcast_as(3)?)?;
//!     assert_eq!(sum.to_vec1::<f32>()?, [step as f32 + 1.0; 3]);
//! }
//! # Ok(())
//! # }
//! ```

use std::fmt::Display;

use candle_core::{Device, Error, Tensor};

/// Repeated work, and its recording.
#[derive(Default)]
pub struct Replay {
    #[cfg(feature = "cuda")]
    on_card: crate::launch::recording::OnCard,
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Replay").finish_non_exhaustive()
    }
}

impl Replay {
    /// Work whose recording is measured: it is recorded whatever the value of `LOW_MEM_T5_GRAPHS`, and a failure gives no warning.
    pub fn to_be_measured() -> Self {
        Self {
            #[cfg(feature = "cuda")]
            on_card: crate::launch::recording::OnCard::to_be_measured(),
        }
    }

    /// Runs work that depends on tensors and numbers. The work gets the numbers as one tensor, on the device of the first of `tensors`.
    ///
    /// On a card, with the same tensors as the last times, the work is recorded, or its recording launched. The work must do the same for
    /// the same tensors, whatever the values of the numbers that kernels read. It must keep none of the tensors that it makes, except the
    /// one that it returns. It must use no other memory that may move, unless that memory lives longer than this. No other thread may use
    /// the card meanwhile: its launches would be recorded, too. The next run overwrites the tensor that this one returns.
    ///
    /// # Errors
    /// Those of the work.
    pub fn run<E: From<Error> + Display>(
        &mut self,
        tensors: &[&Tensor],
        numbers: &[u32],
        work: impl Fn(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        let device = tensors.first().map_or(&Device::Cpu, |first| first.device());
        #[cfg(feature = "cuda")]
        if let Device::Cuda(card) = device {
            return self.on_card.run(card, tensors, numbers, &work);
        }
        work(&Tensor::new(numbers, device)?)
    }

    /// Whether the last run was one launch.
    pub fn is_recorded(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.on_card.is_recorded();
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Frees the memory of a recording. The next run counts as the first.
    pub fn forget(&mut self) {
        #[cfg(feature = "cuda")]
        self.on_card.forget();
    }
}

/// Prevents the recording of work that takes a number from the host, because later launches of the recording would need another number.
pub fn refuse_recording(operation: &'static str) {
    #[cfg(feature = "cuda")]
    crate::launch::recording::refuse(operation);
    #[cfg(not(feature = "cuda"))]
    let _ = operation;
}
