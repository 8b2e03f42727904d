//! Several processes that train one model, each on its share of every optimizer batch.
//!
//! Invariants:
//! * The gradient is the sum over the shards of a batch, in an order that is a function of their number alone ([`collective::sums`]).
//!   So every process makes the same update to the bit, and the same number of shards gives the same bits on any number of processes.
//! * All processes make each decision of a step (interrupted, not finite, empty) alike, from the messages of all.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use candle_core::{DType, Device, Tensor};
use collective::sums::To;
use collective::{Group, Shards};
use serde::{Deserialize, Serialize};
use t5::{CollectiveRequest, Pager, Parameter};
use t5_ops::LossSums;

use crate::error::{Error, Result};
use crate::transport::{PendingTransfer, Transport};

/// How much each process holds of the tensors that all of them need: the stages of ZeRO (<https://arxiv.org/abs/1910.02054>), by
/// whole parameters, because Adafactor needs whole matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharding {
    /// Everything.
    #[default]
    None,
    /// The optimizer's state of its own parameters alone. It updates these, and sends them to the others.
    Optimizer,
    /// Moreover, complete gradients of its own parameters alone. Layer by layer, those of one block at a time exist beside them.
    Gradients,
    /// Moreover, its own matrices alone. Matrices of others are fetched while a block is in use.
    Weights,
}

impl Sharding {
    /// The word in a configuration.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Optimizer => "optimizer",
            Self::Gradients => "gradients",
            Self::Weights => "weights",
        }
    }
}

/// The group of processes that train together, and this process's part in it.
#[derive(Clone, Debug)]
pub struct Parallel {
    transport: Transport,
    shards: Shards,
    /// Whether the caller set the number of shards. Otherwise it is the number of processes.
    has_virtual_shards: bool,
    /// The process that holds the optimizer's state of each parameter. Empty: every process holds all.
    owners: Vec<usize>,
    sharding: Sharding,
    /// Whether a parameter is with its owner alone. Empty: none is.
    is_shared: Vec<bool>,
    /// Fetches those parameters.
    weight_pager: Option<Rc<ShardedWeightPager>>,
}

/// A message of one process on which all of them act.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepVote {
    /// The process is to stop.
    pub stop: bool,
    /// A device had no memory for the step.
    pub lacks_memory: bool,
}

impl StepVote {
    fn byte(self) -> u8 {
        u8::from(self.stop) | u8::from(self.lacks_memory) << 1
    }

    fn from_byte(byte: u8) -> Self {
        Self { stop: byte & 1 != 0, lacks_memory: byte & 2 != 0 }
    }
}

/// A process's share of an optimizer batch, and totals of the whole batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// The index of the share's first sample in the whole batch.
    pub first_sample: usize,
    /// Samples of the whole batch.
    pub samples: u64,
    pub source_tokens: u64,
    pub target_tokens: u64,
    pub padded_tokens: u64,
    pub micro_batches: u64,
    /// The number of micro-batches of the process that has most.
    pub max_micro_batches: usize,
    /// Whether some process wants to stop.
    pub is_interrupted: bool,
}

impl Parallel {
    /// This process in its group. A batch has as many shards as there are processes, or more.
    ///
    /// # Errors
    /// There are fewer shards than processes.
    pub fn new(group: Group, virtual_shards: Option<usize>) -> Result<Self> {
        let shards = shards(virtual_shards, group.size())?;
        let has_virtual_shards = virtual_shards.is_some();
        Ok(Self {
            has_virtual_shards,
            transport: Transport::new(group),
            shards,
            owners: Vec::new(),
            sharding: Sharding::None,
            is_shared: Vec::new(),
            weight_pager: None,
        })
    }

    /// The transport to the other processes.
    #[cfg(test)]
    pub(crate) fn transport(&self) -> &Transport {
        &self.transport
    }

    /// The processes.
    pub fn group(&self) -> &Group {
        self.transport.group()
    }

    /// Has tensors go straight from card to card from now on, if `device` is a card and this build has NCCL. Every process calls this, each
    /// with a card of its own.
    ///
    /// # Errors
    /// NCCL reports an error; [`Error::Processes`].
    pub fn connect_cards(&mut self, device: &Device) -> Result<()> {
        self.transport.connect(device)
    }

    /// Bits per second that a process sends to the others, for tensors of `device`. All processes return the slowest one's figure.
    ///
    /// # Errors
    /// NCCL reports an error; [`Error::Processes`].
    pub fn bits_per_second(&self, device: &Device) -> Result<f64> {
        self.transport.bits_per_second(device)
    }

    /// Prepares to send tensors of this device.
    ///
    /// # Errors
    /// The driver reports an error.
    pub(crate) fn reach(&mut self, device: &Device) -> Result<()> {
        self.transport.reach(device)
    }

    /// How a batch is divided.
    pub fn shards(&self) -> Shards {
        self.shards
    }

    /// Whether each shard is summed separately, even if each process has one.
    pub(crate) fn closes_shards(&self) -> bool {
        self.has_virtual_shards
    }

    /// The shards of this process.
    pub fn own_shards(&self) -> Range<usize> {
        self.shards.owned_by(self.group().rank())
    }

    /// Assigns each trained parameter to an owner, if `sharding` needs owners.
    pub(crate) fn assign_owners(
        &mut self,
        sharding: Sharding,
        parameters: &[Parameter],
        trainable: impl Fn(usize) -> bool,
    ) {
        self.sharding = sharding;
        if sharding == Sharding::None {
            return;
        }
        let elements = |(index, parameter): (usize, &Parameter)| {
            if trainable(index) { parameter.tensor.elem_count() as u64 } else { 0 }
        };
        self.owners = owners(&parameters.iter().enumerate().map(elements).collect::<Vec<_>>(), self.group().size());
    }

    /// The process that alone updates a parameter. `None`: every process updates it.
    pub(crate) fn owner(&self, index: usize) -> Option<usize> {
        self.owners.get(index).copied()
    }

    /// Whether this process has the optimizer's state of a parameter.
    pub(crate) fn updates(&self, index: usize) -> bool {
        self.owner(index).is_none_or(|owner| owner == self.group().rank())
    }

    /// Has each process hold only its own of the matrices that train. Returns the pager that fetches the others.
    pub(crate) fn share_weights(
        &mut self,
        parameters: &[Parameter],
        trains: impl Fn(usize) -> bool,
    ) -> Result<Rc<ShardedWeightPager>> {
        let is_shared = |(index, parameter): (usize, &Parameter)| {
            trains(index) && t5::is_matrix(&parameter.name, parameter.tensor.rank())
        };
        self.is_shared = parameters.iter().enumerate().map(is_shared).collect();
        for (index, parameter) in parameters.iter().enumerate() {
            if self.is_shared[index] && !self.updates(index) {
                tensor_storage::unallocated::release(&parameter.tensor).map_err(t5::Error::from)?;
            }
        }
        let weight_pager = Rc::new(ShardedWeightPager {
            transport: self.transport.clone(),
            owners: self.owners.clone(),
            is_shared: self.is_shared.clone(),
            is_resident: RefCell::new(vec![false; parameters.len()]),
            incoming: RefCell::default(),
        });
        self.weight_pager = Some(Rc::clone(&weight_pager));
        Ok(weight_pager)
    }

    /// Whether only its owner holds a parameter.
    fn is_shared(&self, index: usize) -> bool {
        self.is_shared.get(index).is_some_and(|is_shared| *is_shared)
    }

    /// Whether the owner of a parameter sends it to the others after it changed, rather than when they need it.
    pub(crate) fn sends(&self, index: usize) -> bool {
        !self.is_shared(index)
    }

    /// Whether this process keeps the gradient of a parameter.
    pub(crate) fn holds(&self, index: usize) -> bool {
        self.sharding < Sharding::Gradients || self.updates(index)
    }

    /// This process's share of a batch. All processes exchange the sizes of their shares.
    pub(crate) fn share(&self, mine: &Share) -> Result<Share> {
        let Share { samples, source_tokens, target_tokens, padded_tokens, micro_batches, is_interrupted, .. } = *mine;
        let stop = u64::from(is_interrupted);
        let all = [samples, source_tokens, target_tokens, padded_tokens, micro_batches, stop];
        let said = self.group().gather_numbers(&all)?;
        let sum = |number: usize| said.iter().map(|numbers| numbers[number]).sum::<u64>();
        Ok(Share {
            first_sample: said[..self.group().rank()].iter().map(|numbers| numbers[0] as usize).sum(),
            samples: sum(0),
            source_tokens: sum(1),
            target_tokens: sum(2),
            padded_tokens: sum(3),
            micro_batches: sum(4),
            max_micro_batches: said.iter().map(|numbers| numbers[4] as usize).max().unwrap_or(0),
            is_interrupted: sum(5) > 0,
        })
    }

    /// Begins to add up the gradient of a parameter over all processes, into the first of `parts`. None of them may be read or written
    /// until the sum is complete.
    pub(crate) fn begin_sum(&self, index: usize, parts: &[Tensor]) -> Result<PendingTransfer> {
        let to = self.owner(index).map_or(To::All, To::One);
        self.transport.begin_sum((self.shards, self.has_virtual_shards), parts, to)
    }

    /// Begins to copy a tensor's values from process `root` to all others. The tensor may not be read until the broadcast is complete.
    pub(crate) fn begin_broadcast(&self, root: usize, tensor: &Tensor) -> Result<PendingTransfer> {
        self.transport.begin_broadcast(root, tensor)
    }

    /// Copies a tensor's values from process `root` to all others, wherever each process has the tensor.
    pub(crate) fn broadcast(&self, root: usize, tensor: &Tensor) -> Result<()> {
        self.transport.begin_broadcast_from_anywhere(root, tensor)?.complete()
    }

    /// Begins a step. It has asked nothing of the others yet.
    pub(crate) fn begin_step(&self) {
        self.transport.begin_step();
    }

    /// After running out of memory: answers the other processes' collectives until the step is decided. `asked` has all requests of the
    /// step. The results do not count.
    pub(crate) fn take_part(
        &self,
        asked: &[CollectiveRequest],
        parameters: &[Parameter],
        gradient: impl Fn(usize) -> DType,
    ) -> Result<()> {
        if let Some(weight_pager) = &self.weight_pager {
            weight_pager.release(parameters)?;
        }
        let is_a_call = |asked: &&CollectiveRequest| !matches!(asked, CollectiveRequest::Weight { index } if !self.is_shared(*index));
        let calls = asked.iter().filter(is_a_call);
        for asked in calls.skip(self.transport.turns()) {
            let on_its_way = match *asked {
                CollectiveRequest::Sum { index } => {
                    let (like, to) = (&parameters[index].tensor, self.owner(index).map_or(To::All, To::One));
                    let order = (self.shards, self.has_virtual_shards);
                    self.transport.begin_sum_of_nothing(order, (like, gradient(index)), to)?
                }
                CollectiveRequest::Weight { index } if self.updates(index) => {
                    self.transport.begin_broadcast(self.owners[index], &parameters[index].tensor)?
                }
                CollectiveRequest::Weight { index } => {
                    self.transport.begin_broadcast_to_nobody(self.owners[index], &parameters[index].tensor)?
                }
            };
            on_its_way.complete()?;
        }
        Ok(())
    }

    /// The loss sums of all shards in order, the votes of all processes together, and the square sums of the parameters, each from the
    /// parameter's owner.
    pub(crate) fn agree(&self, losses: &[LossSums], vote: StepVote, sums: &mut [f64]) -> Result<(LossSums, StepVote)> {
        #[cfg(test)]
        self.transport.decide();
        let mut mine = vec![vote.byte()];
        let losses = losses.iter().flat_map(|of_shard| [of_shard.cross_entropy, of_shard.objective]);
        mine.extend(losses.chain(sums.iter().copied()).flat_map(f64::to_le_bytes));
        let said = self.group().gather(&mine)?;
        let numbers: Vec<Vec<f64>> = said
            .iter()
            .map(|said| said[1..].as_chunks().0.iter().map(|number| f64::from_le_bytes(*number)).collect())
            .collect();
        let losses = |rank: usize| &numbers[rank][..numbers[rank].len() - sums.len()];
        let of_shards = (0..numbers.len()).flat_map(|rank| losses(rank).as_chunks().0);
        let losses = of_shards.map(|&[cross_entropy, objective]| LossSums { cross_entropy, objective }).sum();
        for (index, sum) in sums.iter_mut().enumerate() {
            if let Some(owner) = self.owner(index) {
                let of_owner = &numbers[owner];
                *sum = of_owner[of_owner.len() - self.owners.len() + index];
            }
        }
        Ok((losses, StepVote::from_byte(said.iter().fold(0, |all, said| all | said[0]))))
    }
}

fn elsewhere(error: Error) -> t5::Error {
    t5::Error::Elsewhere(error.to_string())
}

/// Fetches matrices that each process holds a share of. Every process asks for the same matrices in the same order.
#[derive(Debug)]
pub(crate) struct ShardedWeightPager {
    transport: Transport,
    owners: Vec<usize>,
    is_shared: Vec<bool>,
    /// Matrices that were fetched and not released. The same in all processes.
    is_resident: RefCell<Vec<bool>>,
    /// Matrices that are being fetched and were not asked for yet.
    incoming: RefCell<HashMap<usize, PendingTransfer>>,
}

impl ShardedWeightPager {
    fn is_own(&self, index: usize) -> bool {
        self.owners[index] == self.transport.group().rank()
    }

    /// Ends a step that is aborted: waits for matrices that are being fetched, and releases all.
    fn release(&self, parameters: &[Parameter]) -> Result<()> {
        for (index, incoming) in self.incoming.borrow_mut().drain() {
            incoming.complete()?;
            self.is_resident.borrow_mut()[index] = true;
        }
        for (index, parameter) in parameters.iter().enumerate() {
            self.page_out(index, &parameter.tensor)?;
        }
        Ok(())
    }

    fn begin(&self, index: usize, weight: &Tensor) -> t5::Result<PendingTransfer> {
        tensor_storage::unallocated::materialize(weight)?;
        self.transport.begin_broadcast(self.owners[index], weight).map_err(elsewhere)
    }
}

impl Pager<Tensor> for ShardedWeightPager {
    fn prefetch(&self, index: usize, weight: &Tensor) -> t5::Result<()> {
        if self.is_shared[index] && !self.is_resident.borrow()[index] && !self.incoming.borrow().contains_key(&index) {
            let incoming = self.begin(index, weight)?;
            self.incoming.borrow_mut().insert(index, incoming);
        }
        Ok(())
    }

    fn page_in(&self, index: usize, weight: &Tensor) -> t5::Result<()> {
        if !self.is_shared[index] || std::mem::replace(&mut self.is_resident.borrow_mut()[index], true) {
            return Ok(());
        }
        let fetched = self.incoming.borrow_mut().remove(&index);
        let incoming = fetched.map_or_else(|| self.begin(index, weight), Ok)?;
        incoming.complete().map_err(elsewhere)
    }

    fn page_out(&self, index: usize, weight: &Tensor) -> t5::Result<()> {
        let was_resident = self.is_shared[index] && std::mem::replace(&mut self.is_resident.borrow_mut()[index], false);
        if was_resident && !self.is_own(index) {
            tensor_storage::unallocated::release(weight)?;
        }
        Ok(())
    }
}

/// Distributes the shards of a batch over processes: one for each, or `virtual_shards`.
///
/// # Errors
/// There are fewer shards than processes.
pub fn shards(virtual_shards: Option<usize>, processes: usize) -> Result<Shards> {
    let count = virtual_shards.unwrap_or(processes);
    if count < processes {
        let expected = format!("at least the number of processes, {processes}");
        return Err(Error::invalid_option("parallel.virtual_shards", &expected, count));
    }
    Ok(Shards { count, processes })
}

/// The owner of each parameter, by its number of elements to train. From the largest on, each goes to the process that has
/// fewest elements.
pub(crate) fn owners(elements: &[u64], processes: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..elements.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(elements[index]));
    let (mut held, mut owners) = (vec![0; processes], vec![0; elements.len()]);
    for index in order {
        let least = (0..held.len()).min_by_key(|&rank| held[rank]).unwrap_or(0);
        owners[index] = least;
        held[least] += elements[index];
    }
    owners
}
