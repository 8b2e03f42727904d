//! Rounds on a card: operations that repeat in phases. Once a kind of round repeats, each phase becomes one launch (a CUDA graph).
//!
//! - A *round* is one pass through these operations, for example one micro-batch of training.
//! - A *phase* is a part of a round whose launches are the same each time, for example forward or backward.
//! - Operations whose sizes differ each time, such as the head, run between two phases and are never recorded ([`GraphRounds::uncaptured`]).
//! - Rounds of one *kind* have the same phases, launches and sizes.
//! - The *lifetime* of a tensor is the span from the launch before which it is taken to the last launch that uses it.
//! - The *arena* is memory on the card that all recordings share. Tensors of recorded phases lie in it, and share memory where their
//!   lifetimes do not overlap.
//!
//! The first round of a kind runs launch by launch. The second is measured: the lifetime of each tensor is noted. When two rounds in a
//! row are of measured kinds, the second one is recorded. Later rounds of its kind are launched.
//!
//! Invariants: recording changes no bit. Values that change from round to round lie on the card, and are written before the launch. Graphs
//! have no memory of their own. If anything cannot be recorded, all rounds run launch by launch, and one warning says why.

use std::fmt::Display;
#[cfg(not(feature = "cuda"))]
use std::marker::PhantomData;

#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::{Error, Result, Tensor, TensorId};

use crate::graphs::{GraphInputs, Turn};

/// Rounds by their kind `K`. The recorded round of a kind stores its host state, a `V`, which later rounds of this kind read back.
pub struct GraphRounds<K, V> {
    #[cfg(feature = "cuda")]
    on_card: crate::launch::rounds::OnCard<K, V>,
    #[cfg(not(feature = "cuda"))]
    of: PhantomData<(K, V)>,
}

impl<K, V> Default for GraphRounds<K, V> {
    fn default() -> Self {
        Self {
            #[cfg(feature = "cuda")]
            on_card: crate::launch::rounds::OnCard::default(),
            #[cfg(not(feature = "cuda"))]
            of: PhantomData,
        }
    }
}

impl<K, V> std::fmt::Debug for GraphRounds<K, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("GraphRounds").finish_non_exhaustive()
    }
}

#[cfg_attr(not(feature = "cuda"), allow(clippy::unused_self))]
impl<K: PartialEq, V> GraphRounds<K, V> {
    /// Begins a round. Returns false where it runs launch by launch and needs no phases. `external` are tensors from outside the round that
    /// its launches use, such as weights. If one of them has been replaced, the kind is recorded again. No other thread may use the card
    /// during a phase.
    ///
    /// # Errors
    /// The device's.
    pub fn begin(&mut self, kind: K, external: Vec<TensorId>, changing: &GraphInputs) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if let Some(Device::Cuda(card)) = changing.tensors.first().map(|first| first.device()) {
            return self.on_card.begin(kind, external, changing, card);
        }
        let _ = (kind, external, changing);
        Ok(false)
    }

    /// Runs the next phase. Returns false where its graph was launched and `work` was not called. Tensors that `work` makes
    /// are valid until the round ends, for later phases.
    ///
    /// # Errors
    /// Those of `work`, and the device's.
    pub fn phase<E: From<Error> + Display>(
        &mut self,
        work: &mut dyn FnMut(Turn) -> std::result::Result<(), E>,
    ) -> std::result::Result<bool, E> {
        #[cfg(feature = "cuda")]
        return self.on_card.phase(work);
        #[cfg(not(feature = "cuda"))]
        work(Turn::Work).map(|()| true)
    }

    /// Calls `work` between two phases. Its launches are never recorded.
    pub fn uncaptured<R>(&mut self, work: impl FnOnce() -> R) -> R {
        #[cfg(feature = "cuda")]
        return self.on_card.uncaptured(work);
        #[cfg(not(feature = "cuda"))]
        work()
    }

    /// Hands a tensor of the last phase to [`GraphRounds::uncaptured`]: the same one, or after a launch the one that was recorded. Other
    /// tensors of a phase may not be read there, because their memory may already serve others.
    ///
    /// # Errors
    /// The device's.
    pub fn leave(&mut self, x: Option<Tensor>) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        return self.on_card.leave(x);
        #[cfg(not(feature = "cuda"))]
        Ok(x)
    }

    /// Hands a tensor to the next phase: the same one, or a copy of it at the address that recorded launches read.
    ///
    /// # Errors
    /// The device's.
    pub fn enter(&mut self, x: Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        return self.on_card.enter(x);
        #[cfg(not(feature = "cuda"))]
        Ok(x)
    }

    /// Whether this round is being recorded. A phase may then have to run twice, because a recording can fail.
    pub fn is_recorded_now(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.on_card.is_recorded_now();
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// The host state of the recorded round of this kind ([`GraphRounds::end`]). `None` unless the current round is launched as graphs.
    pub fn recorded_host_state(&self) -> Option<&V> {
        #[cfg(feature = "cuda")]
        return self.on_card.recorded_host_state();
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// Ends the round, with its host state. `None` says that the round was not completed: nothing of it is kept.
    pub fn end(&mut self, host_state: Option<V>) {
        #[cfg(feature = "cuda")]
        self.on_card.end(host_state);
        #[cfg(not(feature = "cuda"))]
        let _ = host_state;
    }

    /// Gives the memory of all recordings back. Kinds stay measured, and are recorded again.
    pub fn release(&mut self) {
        #[cfg(feature = "cuda")]
        self.on_card.release();
    }

    /// Gives the memory of all recordings back, and forgets every kind: its next round counts as the first.
    pub fn forget(&mut self) {
        #[cfg(feature = "cuda")]
        self.on_card.forget();
    }

    /// Gives the memory of all recordings back, and never records again. Returns false where there was no such memory.
    pub fn stop(&mut self) -> bool {
        let had_any = self.bytes() > 0;
        #[cfg(feature = "cuda")]
        self.on_card.stop();
        had_any
    }

    /// How many rounds were launched as graphs so far. Those in which a recording was made are not counted.
    pub fn launched(&self) -> u64 {
        #[cfg(feature = "cuda")]
        return self.on_card.launched();
        #[cfg(not(feature = "cuda"))]
        0
    }

    /// Whether rounds may yet be recorded: on a card, unless a recording has failed, [`GraphRounds::stop`] was called, or
    /// `LOW_MEM_T5_GRAPHS` forbids it.
    pub fn may_record(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.on_card.may_record();
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> u64 {
        #[cfg(feature = "cuda")]
        return self.on_card.bytes();
        #[cfg(not(feature = "cuda"))]
        0
    }
}
