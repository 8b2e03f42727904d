//! The computation of one token after the other: the logits that choose the next tokens.
//!
//! On a card the launches of a token are recorded and launched as one, as long as the same caches continue. Tokens and positions are the
//! numbers that change. Weights that lie elsewhere between two uses have no address to record. A model with operations that have
//! no kernel on the card is not recorded either.

use candle_core::Tensor;
use cuda_device::Replay;

use super::cache::{Cache, Decoding};
use crate::config::Config;
use crate::error::Result;
use crate::ops::Ops;

/// Computes the tokens of some caches.
#[derive(Debug)]
pub(super) struct Tokens {
    replay: Replay,
    is_recordable: bool,
}

impl Tokens {
    /// For this model's configuration.
    pub fn from_config(config: &Config) -> Self {
        Self { replay: Replay::default(), is_recordable: config.has_kernels_on_card() }
    }

    /// The logits (R, V) after one more token of each row of these caches, in the order of the caches. The next call overwrites
    /// them.
    ///
    /// # Errors
    /// An operation fails.
    pub fn logits(
        &mut self,
        decoding: &Decoding<Tensor>,
        tokens: &[u32],
        caches: &mut [&mut Cache<Tensor>],
    ) -> Result<Tensor> {
        if caches.iter().any(|cache| cache.is_full()) {
            // While caches grow, they exist twice.
            self.replay.forget();
        }
        decoding.make_space(caches)?;
        let of_token: Vec<&Cache<Tensor>> = caches.iter().map(|cache| &**cache).collect();
        let logits = if self.is_recordable && !decoding.has_weights_elsewhere() {
            self.replayed(decoding, tokens, &of_token)
        } else {
            let ids = Tensor::from_slice(tokens, (tokens.len(), 1), decoding.network.shared.tensor.device())?;
            decoding.logits(&ids, None, &of_token)
        }?;
        caches.iter_mut().for_each(|cache| cache.advance());
        Ok(logits)
    }

    /// Gives back the memory of a recording.
    pub fn forget(&mut self) {
        self.replay.forget();
    }

    fn replayed(&mut self, decoding: &Decoding<Tensor>, tokens: &[u32], caches: &[&Cache<Tensor>]) -> Result<Tensor> {
        let landmarks: Vec<&Tensor> = caches.iter().flat_map(|cache| cache.landmarks()).collect();
        let positions = caches.iter().map(|cache| cache.position() as u32);
        let numbers: Vec<u32> = tokens.iter().copied().chain(positions).collect();
        let work = |numbers: &Tensor| {
            let ids = numbers.part(0, tokens.len())?.shaped(&[tokens.len(), 1])?;
            let positions = numbers.part(tokens.len(), caches.len())?;
            decoding.logits(&ids, Some(&positions).filter(|on_card| !on_card.device().is_cpu()), caches)
        };
        self.replay.run(&landmarks, &numbers, work)
    }
}
