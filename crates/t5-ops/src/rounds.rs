//! Work in rounds of some phases, on a card: where rounds repeat each phase becomes one launch (a CUDA graph).
//!
//! A round is, for example, a micro-batch: forward, then the head, which is done *aside* because its sizes are others each time, then
//! backward. The first round of a kind is done as it stands, and the second measured. When some rounds in a row were of measured kinds they
//! are recorded, and from then on launched.
//! Recorded tensors lie in an arena that all recordings share. Memory of tensors that no later launch looks at is used again.
//!
//! Invariants: a round has the same bits recorded and not; what changes from round to round lies on the card, and is written before the
//! launch; graphs have no memory of their own; where anything cannot be recorded all rounds are done launch by launch, and one warning
//! says why.

use std::fmt::Display;
#[cfg(not(feature = "cuda"))]
use std::marker::PhantomData;

#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::{Error, Result, Tensor, TensorId};

use crate::graphs::{Changing, Turn};

/// Rounds of work by their kinds `K`. A round leaves a `V` beside tensors, which its later launches leave, too.
pub struct Rounds<K, V> {
    #[cfg(feature = "cuda")]
    on_card: crate::cuda::rounds::OnCard<K, V>,
    #[cfg(not(feature = "cuda"))]
    of: PhantomData<(K, V)>,
}

impl<K, V> Default for Rounds<K, V> {
    fn default() -> Self {
        Self {
            #[cfg(feature = "cuda")]
            on_card: crate::cuda::rounds::OnCard::default(),
            #[cfg(not(feature = "cuda"))]
            of: PhantomData,
        }
    }
}

impl<K, V> std::fmt::Debug for Rounds<K, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Rounds").finish_non_exhaustive()
    }
}

#[cfg_attr(not(feature = "cuda"), allow(clippy::unused_self))]
impl<K: PartialEq, V> Rounds<K, V> {
    /// A round begins. False: it is done as it stands, and need not be done in phases. Rounds of one kind have the same phases, launches and
    /// sizes. `lies` are tensors that they use beside their own, such as weights: where one is another, they are recorded again. No other
    /// thread may have the card compute during a phase.
    ///
    /// # Errors
    /// The device's.
    pub fn begin(&mut self, kind: K, lies: Vec<TensorId>, changing: &Changing) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if let Some(Device::Cuda(card)) = changing.tensors.first().map(|first| first.device()) {
            return self.on_card.begin(kind, lies, changing, card);
        }
        let _ = (kind, lies, changing);
        Ok(false)
    }

    /// The next phase. False: it was launched, and `work` was not called. Tensors that `work` makes live until the round ends.
    ///
    /// # Errors
    /// Those of the work, and the device's.
    pub fn phase<E: From<Error> + Display>(
        &mut self,
        work: &mut dyn FnMut(Turn) -> std::result::Result<(), E>,
    ) -> std::result::Result<bool, E> {
        #[cfg(feature = "cuda")]
        return self.on_card.phase(work);
        #[cfg(not(feature = "cuda"))]
        work(Turn::Work).map(|()| true)
    }

    /// Does something between two phases that is never recorded.
    pub fn aside<R>(&mut self, work: impl FnOnce() -> R) -> R {
        #[cfg(feature = "cuda")]
        return self.on_card.aside(work);
        #[cfg(not(feature = "cuda"))]
        work()
    }

    /// A tensor that a phase leaves for what is aside: the same one, or after a launch the one that was recorded. No other one of a phase is
    /// looked at there.
    ///
    /// # Errors
    /// The device's.
    pub fn leave(&mut self, x: Option<Tensor>) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        return self.on_card.leave(x);
        #[cfg(not(feature = "cuda"))]
        Ok(x)
    }

    /// A tensor that the next phase is given: the same one, or a copy of it where recorded launches look for it.
    ///
    /// # Errors
    /// The device's.
    pub fn enter(&mut self, x: Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        return self.on_card.enter(x);
        #[cfg(not(feature = "cuda"))]
        Ok(x)
    }

    /// Whether this round is recorded, so that a phase may have to be done once more.
    pub fn is_recorded_now(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.on_card.is_recorded_now();
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// What such a round has left, where this one is launched.
    pub fn left_behind(&self) -> Option<&V> {
        #[cfg(feature = "cuda")]
        return self.on_card.left_behind();
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// The round is over. None: it was not done to its end, and nothing is remembered of it.
    pub fn end(&mut self, leaves: Option<V>) {
        #[cfg(feature = "cuda")]
        self.on_card.end(leaves);
        #[cfg(not(feature = "cuda"))]
        let _ = leaves;
    }

    /// Gives all memory back. Kinds are recorded again, and need not be measured again.
    pub fn release(&mut self) {
        #[cfg(feature = "cuda")]
        self.on_card.release();
    }

    /// Gives all memory back. The next round of each kind is as the first one.
    pub fn forget(&mut self) {
        #[cfg(feature = "cuda")]
        self.on_card.forget();
    }

    /// Gives all memory back, and records nothing any more. False: there was none.
    pub fn stop(&mut self) -> bool {
        let had_any = self.bytes() > 0;
        #[cfg(feature = "cuda")]
        self.on_card.stop();
        had_any
    }

    /// Bytes on the card that recordings share.
    pub fn bytes(&self) -> u64 {
        #[cfg(feature = "cuda")]
        return self.on_card.bytes();
        #[cfg(not(feature = "cuda"))]
        0
    }
}
