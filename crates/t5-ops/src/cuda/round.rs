//! A round of work that goes on: where its tensors lie, and what recorded kernels find in the place of what changes.

use candle_core::{CudaDevice, Device, Error, Tensor};

use super::lives::{DTYPES, KINDS, Lives, Sizes};
use super::{address, copy_to, overwrite};
use crate::graphs::Changing;

type Result<T, E = Error> = std::result::Result<T, E>;

/// Where tensors lie while a round is recorded.
pub(super) struct Arena {
    pub(super) tensors: [Tensor; KINDS],
    addresses: [u64; KINDS],
}

impl Arena {
    pub(super) fn new(sizes: Sizes, card: &CudaDevice) -> Result<Self> {
        let device = Device::Cuda(card.clone());
        // Memory that is free in pieces may be of use in one.
        crate::device::trim(card)?;
        // SAFETY: on a card no Rust code reads it, and every pattern of bytes is a number.
        let part = |kind: usize| unsafe { Tensor::empty(sizes[kind].max(1), DTYPES[kind], &device) };
        Self::of([part(0)?, part(1)?])
    }

    pub(super) fn of(tensors: [Tensor; KINDS]) -> Result<Self> {
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

/// Places in an arena for the tensors of a round, and what changes from round to round.
pub(super) struct Places {
    pub(super) arena: Arena,
    pub(super) of: Vec<usize>,
    pub(super) measured: Lives,
    pub(super) inputs: Inputs,
    /// Memory of the tensors that change, and where recorded kernels find their values.
    pub(super) moved: Vec<(u64, u64, u64)>,
    /// Lists of the host's memory, by where they lie, and their places on the card.
    pub(super) lists: Vec<(usize, usize, Tensor)>,
}

/// What a scope knows of a round that goes on.
#[derive(Default)]
pub(super) struct Round {
    lives: Lives,
    /// None while it is measured.
    pub(super) places: Option<Places>,
    /// Something is computed that is not recorded.
    is_aside: bool,
    pub(super) refused_by: Option<&'static str>,
}

impl Round {
    /// One that is recorded.
    pub(super) fn recorded(places: Places) -> Self {
        Self { places: Some(places), ..Self::default() }
    }

    /// Memory of the arena for a tensor of so many elements. None while it is measured.
    pub(super) fn piece(&mut self, kind: usize, elements: usize) -> Result<Option<Tensor>> {
        let Some(places) = self.places.as_ref().filter(|_| !self.is_aside) else { return Ok(None) };
        let (number, bytes) = (self.lives.all().len(), DTYPES[kind].size_in_bytes());
        let planned = places.measured.all().get(number);
        if planned.is_none_or(|life| (life.kind, life.elements) != (kind, elements)) {
            // It becomes memory of the graph, which is refused.
            return Ok(None);
        }
        let from = places.of[number];
        let at = places.arena.addresses[kind] + (from * bytes) as u64;
        self.lives.take(kind, elements, at, (elements * bytes) as u64);
        places.arena.tensors[kind].narrow(0, from, elements).map(Some)
    }

    /// While it is measured: such a tensor was taken.
    pub(super) fn taken(&mut self, kind: usize, elements: usize, address: u64) {
        if self.places.is_none() && !self.is_aside {
            self.lives.take(kind, elements, address, (elements * DTYPES[kind].size_in_bytes()) as u64);
        }
    }

    /// The address that a kernel is given for this one.
    pub(super) fn seen(&mut self, address: u64) -> u64 {
        if self.is_aside {
            // Memory of tensors that are gone may be that of others now.
            return address;
        }
        let places = self.places.as_ref();
        let moved =
            places.and_then(|places| places.moved.iter().find(|(from, end, _)| (*from..*end).contains(&address)));
        let address = moved.map_or(address, |(from, _, to)| to + (address - from));
        self.lives.use_at(address);
        address
    }

    /// Something is launched that was given these numbers, addresses among them.
    pub(super) fn launched(&mut self, numbers: impl IntoIterator<Item = u64>) {
        if !self.is_aside {
            numbers.into_iter().for_each(|number| self.lives.use_at(number));
            self.lives.launch();
        }
    }

    /// Where the key of dropout lies while work is recorded.
    pub(super) fn key(&self) -> Option<u64> {
        let places = self.places.as_ref().filter(|_| !self.is_aside)?;
        Some(places.inputs.key)
    }

    /// Whether lists of the host have other values in other rounds.
    pub(super) fn is_recorded(&self) -> bool {
        self.places.is_some() && !self.is_aside
    }

    /// The place of a list while work is recorded.
    pub(super) fn list(&mut self, at: usize, count: usize) -> Option<Tensor> {
        let places = self.places.as_ref().filter(|_| !self.is_aside)?;
        let found = places.lists.iter().find(|(from, length, _)| (*from, *length) == (at, count));
        if found.is_none() {
            self.refused_by = Some("a list that is no part of what changes");
        }
        found.map(|(_, _, list)| list.clone())
    }
}

/// Memory on the card for what changes from round to round.
#[derive(Clone)]
pub(super) struct Inputs {
    /// The key of dropout, and the lists.
    numbers: Tensor,
    key: u64,
    pub(super) tensors: Vec<Tensor>,
}

impl Inputs {
    pub(super) fn new(changing: &Changing, card: &CudaDevice) -> Result<Self> {
        let device = Device::Cuda(card.clone());
        let numbers = Tensor::new(changing.numbers(), &device)?;
        let tensors = changing.tensors.iter().map(|tensor| Tensor::zeros(tensor.shape(), tensor.dtype(), &device));
        Ok(Self { key: address(&numbers)?, numbers, tensors: tensors.collect::<Result<_>>()? })
    }

    pub(super) fn write(&self, changing: &Changing, card: &CudaDevice) -> Result<()> {
        overwrite(card, &self.numbers, &changing.numbers())?;
        for (tensor, place) in changing.tensors.iter().zip(&self.tensors) {
            // SAFETY: a tensor of this shape and dtype.
            unsafe { copy_to(tensor, address(place)?)? };
        }
        Ok(())
    }

    /// The places of lists, in their order.
    pub(super) fn lists(&self, changing: &Changing) -> Result<Vec<(usize, usize, Tensor)>> {
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
    /// Whether it is the work that was measured, as far as it has come.
    pub(super) fn follows_measured(&self) -> bool {
        self.places.as_ref().is_none_or(|places| self.lives.follows(&places.measured))
    }

    pub(super) fn set_aside(&mut self, is_aside: bool) {
        if self.is_aside && !is_aside {
            // However many launches that took.
            self.lives.launch();
        }
        self.is_aside = is_aside;
    }

    pub(super) fn into_lives(self) -> Lives {
        self.lives
    }
}
