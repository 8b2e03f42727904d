//! The transport of tensors' values from process to process: straight from memory, from card to card, or from a card through the host.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use candle_core::{DType, Device, Tensor};
use collective::sums::{self, Element, To};
use collective::{Group, Pending, Shards, Values, Wire, Zeros, network};
use cuda_device::nccl::{HAS_NCCL, PendingCollective};
use cuda_device::{Staged, Staging};

use crate::between_cards::BetweenCards;
use crate::error::Result;

/// Sends the tensors of a device to the other processes. Every process makes the same calls in the same order.
#[derive(Clone, Debug)]
pub(crate) struct Transport {
    group: Group,
    /// Copies values of tensors on a card. `None` before [`Transport::reach`], and on the CPU.
    staging: Option<Staging>,
    /// The transport between cards, if cards reach each other.
    cards: Option<BetweenCards>,
    turns: Turns,
}

/// The number of calls that were made in this step. All processes make them in the same order.
#[derive(Clone, Debug, Default)]
struct Turns {
    taken: Rc<Cell<usize>>,
    /// The call for which a test has no memory, and the number of calls before the last decision.
    #[cfg(test)]
    without_memory: Rc<Cell<Option<usize>>>,
    #[cfg(test)]
    before_decision: Rc<Cell<usize>>,
}

/// Values that processes send each other while this process does something else.
#[derive(Debug)]
pub(crate) enum PendingTransfer {
    /// Through the host.
    Host(Pending<Result<()>>),
    /// From card to card.
    Cards(PendingCollective),
    /// Already here for everything that is launched from now on.
    Here,
}

impl PendingTransfer {
    /// Waits until the values are here.
    pub fn complete(self) -> Result<()> {
        match self {
            PendingTransfer::Host(pending) => pending.wait()?,
            PendingTransfer::Cards(pending) => Ok(pending.complete()?),
            PendingTransfer::Here => Ok(()),
        }
    }
}

impl Transport {
    /// A transport from memory.
    pub fn new(group: Group) -> Self {
        Self { group, staging: None, cards: None, turns: Turns::default() }
    }

    /// Sends straight from card to card from now on, if this build can and all processes have cards of their own.
    ///
    /// # Errors
    /// NCCL reports an error, or another process has ended.
    pub fn connect(&mut self, device: &Device) -> Result<()> {
        if HAS_NCCL && !device.is_cpu() && self.group.size() > 1 {
            self.cards = Some(BetweenCards::join(&self.group, device)?);
        }
        Ok(())
    }

    /// Bits per second that a process sends to the others. All processes return the slowest one's figure.
    ///
    /// # Errors
    /// Another process has ended, or NCCL reports an error.
    pub fn bits_per_second(&self, device: &Device) -> Result<f64> {
        match &self.cards {
            Some(cards) => cards.bits_per_second(device),
            None => Ok(network::bits_per_second(&self.group)?),
        }
    }

    /// Sends from a device, too, from now on.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn reach(&mut self, device: &Device) -> Result<()> {
        self.staging = Staging::for_device(device)?;
        Ok(())
    }

    /// The processes.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Access to the values of a tensor on a card. `None` for a tensor in memory.
    fn staged(&self, tensor: &Tensor) -> Result<Option<OnCard>> {
        let staged = self.staging.as_ref().map(|staging| staging.stage(tensor)).transpose()?;
        Ok(staged.flatten().map(|staged| OnCard { staged, bytes: Vec::new() }))
    }

    /// Begins a step, in which no call was made yet.
    pub fn begin_step(&self) {
        self.turns.taken.set(0);
    }

    /// The number of calls of this step that were made.
    pub fn turns(&self) -> usize {
        self.turns.taken.get()
    }

    /// Has call number `turn` of a step find no memory, once.
    #[cfg(test)]
    pub fn without_memory_at(&self, turn: usize) {
        self.turns.without_memory.set(Some(turn));
    }

    /// Notes that all calls of this step before its decision were made.
    #[cfg(test)]
    pub fn decide(&self) {
        self.turns.before_decision.set(self.turns());
    }

    /// The number of these calls.
    #[cfg(test)]
    pub fn turns_before_decision(&self) -> usize {
        self.turns.before_decision.get()
    }

    /// Makes a call. It counts if it has begun.
    fn take_turn(&self, begin: impl FnOnce() -> Result<PendingTransfer>) -> Result<PendingTransfer> {
        let taken = self.turns();
        #[cfg(test)]
        if self.turns.without_memory.get() == Some(taken) {
            self.turns.without_memory.set(None);
            return Err(candle_core::Error::Msg("CUDA_ERROR_OUT_OF_MEMORY, in a test".into()).into());
        }
        let begun = begin()?;
        self.turns.taken.set(taken + 1);
        Ok(begun)
    }

    /// Begins to add up a gradient over all processes. `parts` are this process's sums, the first of which takes the result. None of them
    /// may be read or written until the sum is complete. `is_in_order`: the bits depend on the number of shards alone, and not on the
    /// processes.
    pub fn begin_sum(
        &self,
        (shards, is_in_order): (Shards, bool),
        parts: &[Tensor],
        to: To,
    ) -> Result<PendingTransfer> {
        self.take_turn(|| {
            if let (Some(cards), [whole, rest @ ..]) = (&self.cards, parts) {
                if rest.is_empty() && !is_in_order {
                    return Ok(PendingTransfer::Cards(cards.begin_sum(whole, to)?));
                }
                cards.sum_in_order(shards, parts, to)?;
                return Ok(PendingTransfer::Here);
            }
            let on_card = parts.iter().filter_map(|part| self.staged(part).transpose()).collect::<Result<Vec<_>>>()?;
            let element = parts.first().map_or(Element::F32, |whole| element(whole.dtype()));
            if !on_card.is_empty() {
                return Ok(self.begin_sum_of_values((shards, element), on_card, to));
            }
            let parts = parts.to_vec();
            Ok(PendingTransfer::Host(self.group.submit(move |wire| sum_in_memory(wire, (shards, element), &parts, to))))
        })
    }

    fn begin_sum_of_values<V: Values + Send + 'static>(
        &self,
        (shards, element): (Shards, Element),
        mut values: Vec<V>,
        to: To,
    ) -> PendingTransfer {
        PendingTransfer::Host(self.group.submit(move |wire| {
            let Some((whole, rest)) = values.split_first_mut() else { return Ok(()) };
            let rest: Vec<&V> = rest.iter().collect();
            Ok(sums::sum(wire, shards, element, (whole, &rest), to)?)
        }))
    }

    /// [`Transport::begin_sum`] of a process that adds nothing to a gradient of this shape and dtype, and does not use the sum.
    pub fn begin_sum_of_nothing(
        &self,
        (shards, is_in_order): (Shards, bool),
        (like, dtype): (&Tensor, DType),
        to: To,
    ) -> Result<PendingTransfer> {
        let parts = shards.extents(self.group.rank()).len();
        if self.cards.is_some() {
            // The values are not read, so one tensor serves for all.
            let zeros = Tensor::zeros(like.elem_count(), dtype, like.device())?;
            return self.begin_sum((shards, is_in_order), &vec![zeros; parts], to);
        }
        let zeros = Zeros::new(like.elem_count() * dtype.size_in_bytes());
        self.take_turn(|| Ok(self.begin_sum_of_values((shards, element(dtype)), vec![zeros; parts], to)))
    }

    /// Begins to copy a tensor's values from process `root` to all others. The tensor is on a card in all processes, or in memory in all.
    /// It may not be read until the broadcast is complete.
    pub fn begin_broadcast(&self, root: usize, tensor: &Tensor) -> Result<PendingTransfer> {
        match &self.cards {
            Some(cards) if !tensor.device().is_cpu() => {
                self.take_turn(|| Ok(PendingTransfer::Cards(cards.begin_broadcast(root, tensor)?)))
            }
            _ => self.begin_broadcast_from_anywhere(root, tensor),
        }
    }

    /// [`Transport::begin_broadcast`] of a tensor that may be on a card in one process, and in memory in another.
    pub fn begin_broadcast_from_anywhere(&self, root: usize, tensor: &Tensor) -> Result<PendingTransfer> {
        self.take_turn(|| {
            let (on_card, tensor) = (self.staged(tensor)?, tensor.clone());
            Ok(PendingTransfer::Host(self.group.submit(move |wire| {
                if let Some(mut values) = on_card {
                    return Ok(wire.broadcast_values(root, &mut values)?);
                }
                let sent = tensor_storage::change_bytes(&tensor, |bytes| wire.broadcast(root, bytes))
                    .map_err(t5::Error::from)?;
                Ok(sent?)
            })))
        })
    }

    /// [`Transport::begin_broadcast`] of a tensor like this one to a process that does not use it.
    pub fn begin_broadcast_to_nobody(&self, root: usize, like: &Tensor) -> Result<PendingTransfer> {
        if self.cards.is_some() && !like.device().is_cpu() {
            let unused = Tensor::zeros(like.shape(), like.dtype(), like.device())?;
            return self.begin_broadcast(root, &unused);
        }
        let mut unused = Zeros::new(like.elem_count() * like.dtype().size_in_bytes());
        self.take_turn(|| {
            Ok(PendingTransfer::Host(self.group.submit(move |wire| Ok(wire.broadcast_values(root, &mut unused)?))))
        })
    }
}

fn element(dtype: DType) -> Element {
    match dtype {
        DType::BF16 => Element::Bf16,
        DType::F64 => Element::F64,
        _ => Element::F32,
    }
}

fn sum_in_memory(wire: &Wire, (shards, element): (Shards, Element), parts: &[Tensor], to: To) -> Result<()> {
    let [whole, rest @ ..] = parts else { return Ok(()) };
    let mut summed = Ok(());
    let changed = with_bytes_of_all(rest, &[], &mut |rest| {
        tensor_storage::change_bytes(whole, |whole| {
            summed = sums::sum(wire, shards, element, (whole, rest), to);
        })
    });
    changed.map_err(t5::Error::from)?;
    Ok(summed?)
}

/// Calls `f` with the bytes of all these tensors.
fn with_bytes_of_all(
    tensors: &[Tensor],
    before: &[&[u8]],
    f: &mut dyn FnMut(&[&[u8]]) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let [first, rest @ ..] = tensors else { return f(before) };
    tensor_storage::with_bytes(first, |bytes| {
        let with_first: Vec<&[u8]> = before.iter().copied().chain([bytes]).collect();
        with_bytes_of_all(rest, &with_first, f)
    })?
}

/// Values on a card. Some are copied at a time.
struct OnCard {
    staged: Staged,
    /// The bytes that are being copied to the card.
    bytes: Vec<u8>,
}

fn failed(error: candle_core::Error) -> collective::Error {
    collective::Error::Values(error.to_string())
}

impl Values for OnCard {
    fn bytes(&self) -> usize {
        self.staged.bytes()
    }

    fn read(&self, range: Range<usize>, to: &mut Vec<u8>) -> collective::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let before = to.len();
        to.resize(before + range.len(), 0);
        self.staged.read(range.start, &mut to[before..]).map_err(failed)
    }

    fn write(
        &mut self,
        range: Range<usize>,
        write: &mut dyn FnMut(&mut [u8]) -> collective::Result<()>,
    ) -> collective::Result<()> {
        self.bytes.resize(range.len(), 0);
        write(&mut self.bytes)?;
        self.staged.write(range.start, &self.bytes).map_err(failed)
    }
}
