//! Work that repeats on a card: its launches are recorded once, and from then on launched as one (a CUDA graph).
//!
//! A launch costs the host microseconds, and a token of an answer is hundreds of them, each of which the card does in less. A graph is
//! one. Its kernels have the arguments that they were recorded with, addresses included. So tensors of recorded work lie in an *arena*
//! that belongs to the recording, and numbers that change are read by the kernels from memory that is written before each launch.
//!
//! Invariants: work has the same bits recorded and not; a graph consists of kernels and copies on the card, and no memory is its own;
//! where anything cannot be recorded the work is done launch by launch, and a warning says why.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//!
//! # fn main() -> candle_core::Result<()> {
//! let x = Tensor::ones(3, DType::F32, &Device::Cpu)?; // on a card it would be recorded
//! let mut replay = t5_ops::Replay::default();
//! for step in 0..5 {
//!     let sum = replay.run(&[&x], &[step], |step| &x + step.to_dtype(DType::F32)?.broadcast_as(3)?)?;
//!     assert_eq!(sum.to_vec1::<f32>()?, [step as f32 + 1.0; 3]);
//! }
//! # Ok(())
//! # }
//! ```

use std::fmt::Display;

use candle_core::{Device, Error, Tensor};

/// Work that repeats, and its recording.
#[derive(Default)]
pub struct Replay {
    #[cfg(feature = "cuda")]
    on_card: crate::cuda::recording::OnCard,
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Replay").finish_non_exhaustive()
    }
}

impl Replay {
    /// Work whose recording is measured: it is recorded whatever `LOW_MEM_T5_GRAPHS` says, and nobody is warned where that fails.
    pub fn to_be_measured() -> Self {
        Self {
            #[cfg(feature = "cuda")]
            on_card: crate::cuda::recording::OnCard::to_be_measured(),
        }
    }

    /// Does work that depends on tensors and numbers. It is given the numbers where the first of the tensors lies, one after the other.
    ///
    /// On a card, with the same tensors as the last times, it is recorded, or its recording launched. Work has to do the same for the same
    /// tensors, whatever the numbers are that kernels read; to keep none of the tensors that it makes, but for the one that it returns;
    /// and to use no other memory that may move, but for what lives longer than this. No other thread may have the card compute meanwhile:
    /// its launches would be recorded, too. The next run writes over the tensor that this one returns.
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

    /// Gives back the memory of a recording: the next run is as the first one.
    pub fn forget(&mut self) {
        #[cfg(feature = "cuda")]
        self.on_card.forget();
    }
}

/// Work that takes a number of the host, which other launches of a recording would have another one of, is not recorded.
pub(crate) fn uses_number(operation: &'static str) {
    #[cfg(feature = "cuda")]
    crate::cuda::recording::refuse(operation);
    #[cfg(not(feature = "cuda"))]
    let _ = operation;
}
