//! The current round: the places of its tensors, and of the values that change and that recorded kernels read. [`crate::rounds`] defines
//! the words.

use candle_core::{CudaDevice, Device, Error, Tensor};

use super::lifetimes::{DTYPES, KINDS, Lifetimes, Sizes};
use super::{address, copy_to, overwrite, unwritten};
use crate::graphs::GraphInputs;

type Result<T, E = Error> = std::result::Result<T, E>;

/// The memory that all recordings share: a tensor for each kind of element, and its address.
pub(super) struct Arena {
    pub(super) tensors: [Tensor; KINDS],
    addresses: [u64; KINDS],
}

/// Memory for the elements of each kind.
pub(super) fn parts_of_arena(sizes: Sizes, device: &Device) -> Result<[Tensor; KINDS]> {
    let part = |kind: usize| unwritten(sizes[kind].max(1), DTYPES[kind], device);
    Ok([part(0)?, part(1)?])
}

impl Arena {
    pub(super) fn new(sizes: Sizes, card: &CudaDevice) -> Result<Self> {
        let device = Device::Cuda(card.clone());
        // The pool may hold this much in pieces that are too small. After a trim the driver can allocate it in one piece.
        crate::memory::trim(card)?;
        Self::from_tensors(parts_of_arena(sizes, &device)?)
    }

    pub(super) fn from_tensors(tensors: [Tensor; KINDS]) -> Result<Self> {
        let addresses = [address(&tensors[0])?, address(&tensors[1])?];
        Ok(Self { tensors, addresses })
    }

    pub(super) fn sizes(&self) -> Sizes {
        self.tensors.each_ref().map(Tensor::elem_count)
    }

    pub(super) fn holds(&self, sizes: Sizes) -> bool {
        self.sizes().iter().zip(sizes).all(|(has, wants)| wants <= *has)
    }
}

/// The places in the arena of a round's tensors, and the places of values that change from round to round.
pub(super) struct Places {
    pub(super) arena: Arena,
    /// The first element of each tensor, in the order in which they are taken.
    pub(super) of: Vec<usize>,
    pub(super) measured: Lifetimes,
    pub(super) inputs: Inputs,
    /// For each tensor that changes: the address of its first byte, its end, and the address that recorded kernels read instead.
    pub(super) moved: Vec<(u64, u64, u64)>,
    /// For each list: its address in the host's memory, the number of its elements, and its place on the card.
    pub(super) lists: Vec<(usize, usize, Tensor)>,
}

/// The lifetimes of the current round's tensors, and their places where it is recorded.
#[derive(Default)]
pub(super) struct Round {
    lifetimes: Lifetimes,
    /// `None` while the round is measured.
    pub(super) places: Option<Places>,
    /// Whether launches between two phases run now, which are not recorded.
    is_uncaptured: bool,
    pub(super) refused_by: Option<&'static str>,
}

impl Round {
    /// A round that is recorded.
    pub(super) fn recorded(places: Places) -> Self {
        Self { places: Some(places), ..Self::default() }
    }

    /// Memory of the arena for a tensor of `elements` elements. `None` while the round is measured.
    pub(super) fn piece(&mut self, kind: usize, elements: usize) -> Result<Option<Tensor>> {
        let Some(places) = self.places.as_ref().filter(|_| !self.is_uncaptured) else { return Ok(None) };
        let (number, bytes) = (self.lifetimes.all().len(), DTYPES[kind].size_in_bytes());
        let planned = places.measured.all().get(number);
        if planned.is_none_or(|life| (life.kind, life.elements) != (kind, elements)) {
            // The round is not the one that was measured. The tensor becomes memory of the graph, and the recording is refused for that.
            return Ok(None);
        }
        let from = places.of[number];
        let at = places.arena.addresses[kind] + (from * bytes) as u64;
        self.lifetimes.take(kind, elements, at, (elements * bytes) as u64);
        places.arena.tensors[kind].narrow(0, from, elements).map(Some)
    }

    /// Notes, while the round is measured, that a tensor was taken.
    pub(super) fn taken(&mut self, kind: usize, elements: usize, address: u64) {
        if self.places.is_none() && !self.is_uncaptured {
            self.lifetimes.take(kind, elements, address, (elements * DTYPES[kind].size_in_bytes()) as u64);
        }
    }

    /// Returns the address that a kernel is given in place of `address`. The next launch uses the tensor there.
    pub(super) fn seen(&mut self, address: u64) -> u64 {
        if self.is_uncaptured {
            // Between phases this address may lie in memory that an earlier tensor of the round had. That does not count as a use of the
            // earlier tensor.
            return address;
        }
        let places = self.places.as_ref();
        let moved =
            places.and_then(|places| places.moved.iter().find(|(from, end, _)| (*from..*end).contains(&address)));
        let address = moved.map_or(address, |(from, _, to)| to + (address - from));
        self.lifetimes.use_at(address);
        address
    }

    /// Notes a launch with these arguments as numbers, some of which are addresses.
    pub(super) fn launched(&mut self, numbers: impl IntoIterator<Item = u64>) {
        if !self.is_uncaptured {
            numbers.into_iter().for_each(|number| self.lifetimes.use_at(number));
            self.lifetimes.launch();
        }
    }

    /// The address of dropout's key while launches are recorded.
    pub(super) fn key(&self) -> Option<u64> {
        let places = self.places.as_ref().filter(|_| !self.is_uncaptured)?;
        Some(places.inputs.key)
    }

    /// Whether launches are recorded now, so that lists of the host may have other values at the next launch.
    pub(super) fn is_recorded(&self) -> bool {
        self.places.is_some() && !self.is_uncaptured
    }

    /// The place of a list on the card while launches are recorded, by its address and number of elements on the host.
    pub(super) fn list(&mut self, at: usize, count: usize) -> Option<Tensor> {
        let places = self.places.as_ref().filter(|_| !self.is_uncaptured)?;
        let found = places.lists.iter().find(|(from, length, _)| (*from, *length) == (at, count));
        if found.is_none() {
            self.refused_by = Some("a list that is no part of what changes");
        }
        found.map(|(_, _, list)| list.clone())
    }
}

/// Memory on the card for the values that change from round to round.
#[derive(Clone)]
pub(super) struct Inputs {
    /// The key of dropout, and the lists ([`GraphInputs::numbers`]).
    numbers: Tensor,
    key: u64,
    pub(super) tensors: Vec<Tensor>,
}

impl Inputs {
    pub(super) fn new(changing: &GraphInputs, card: &CudaDevice) -> Result<Self> {
        let device = Device::Cuda(card.clone());
        let numbers = Tensor::new(changing.numbers(), &device)?;
        let tensors = changing.tensors.iter().map(|tensor| Tensor::zeros(tensor.shape(), tensor.dtype(), &device));
        Ok(Self { key: address(&numbers)?, numbers, tensors: tensors.collect::<Result<_>>()? })
    }

    pub(super) fn write(&self, changing: &GraphInputs, card: &CudaDevice) -> Result<()> {
        overwrite(card, &self.numbers, &changing.numbers())?;
        for (tensor, place) in changing.tensors.iter().zip(&self.tensors) {
            // SAFETY: `place` has the shape and dtype of `tensor`.
            unsafe { copy_to(tensor, address(place)?)? };
        }
        Ok(())
    }

    /// The places of the lists, in the order of [`GraphInputs::lists`].
    pub(super) fn lists(&self, changing: &GraphInputs) -> Result<Vec<(usize, usize, Tensor)>> {
        let mut from = changing.first_list();
        let place = |(at, count): (usize, usize)| {
            let list = self.numbers.narrow(0, from, count)?;
            from += count;
            Ok((at, count, list))
        };
        changing.lists().map(place).collect()
    }
}

impl Round {
    /// Whether the round has so far taken and used the same tensors as the one that was measured.
    pub(super) fn follows_measured(&self) -> bool {
        self.places.as_ref().is_none_or(|places| self.lifetimes.follows(&places.measured))
    }

    pub(super) fn set_uncaptured(&mut self, is_uncaptured: bool) {
        if self.is_uncaptured && !is_uncaptured {
            // All launches between two phases count as one: their number may differ from round to round.
            self.lifetimes.launch();
        }
        self.is_uncaptured = is_uncaptured;
    }

    pub(super) fn into_lifetimes(self) -> Lifetimes {
        self.lifetimes
    }
}
