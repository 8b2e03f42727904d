//! Rounds of work on a card: measured, recorded, and from then on a launch for each phase.
//!
//! All recordings share one arena: their launches follow each other, and nothing in it outlives a round.

use std::fmt::Display;
use std::mem::take;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::{CudaDevice, DType, Device, Error, Tensor, TensorId, bail};

use super::lives::{KINDS, Lives, Sizes};
use super::recording::{DTYPES, Scope, capture, overwrite, within};
use super::{address, copy_to};
use crate::replay::records_launches;
use crate::rounds::{Changing, Turn};

type Result<T, E = Error> = std::result::Result<T, E>;

/// Rounds of one kind that are remembered: those that came last.
const MOST_KNOWN: usize = 16;
/// Which round of a kind is measured.
const MEASURED: usize = 2;
/// One is recorded when so many rounds in a row were of kinds that are measured: a recording costs the host about as much as a round.
const CALM: usize = 2;

/// Where tensors lie while a round is recorded.
pub(super) struct Arena {
    tensors: [Tensor; KINDS],
    addresses: [u64; KINDS],
}

impl Arena {
    fn new(sizes: Sizes, card: &CudaDevice) -> Result<Self> {
        let device = Device::Cuda(card.clone());
        // Memory that is free in pieces may be of use in one.
        crate::device::trim(card)?;
        // SAFETY: on a card no Rust code reads it, and every pattern of bytes is a number.
        let part = |kind: usize| unsafe { Tensor::empty(sizes[kind].max(1), DTYPES[kind], &device) };
        Self::of([part(0)?, part(1)?])
    }

    fn of(tensors: [Tensor; KINDS]) -> Result<Self> {
        let addresses = [address(&tensors[0])?, address(&tensors[1])?];
        Ok(Self { tensors, addresses })
    }

    fn sizes(&self) -> Sizes {
        self.tensors.each_ref().map(Tensor::elem_count)
    }

    fn holds(&self, sizes: Sizes) -> bool {
        self.sizes().iter().zip(sizes).all(|(has, wants)| wants <= *has)
    }
}

/// Places in an arena for the tensors of a round, and what changes from round to round.
pub(super) struct Places {
    arena: Arena,
    of: Vec<usize>,
    measured: Lives,
    inputs: Inputs,
    /// Memory of the tensors that change, and where recorded kernels find their values.
    moved: Vec<(u64, u64, u64)>,
    /// Lists of the host's memory, by where they lie, and their places on the card.
    lists: Vec<(usize, usize, Tensor)>,
}

/// What a scope knows of a round that goes on.
#[derive(Default)]
pub(super) struct Round {
    lives: Lives,
    /// None while it is measured.
    places: Option<Places>,
    /// Something is computed that is not recorded.
    is_aside: bool,
    pub(super) refused_by: Option<&'static str>,
}

impl Round {
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
struct Inputs {
    /// The key of dropout, and the lists.
    numbers: Tensor,
    key: u64,
    tensors: Vec<Tensor>,
}

impl Inputs {
    fn new(changing: &Changing, card: &CudaDevice) -> Result<Self> {
        let device = Device::Cuda(card.clone());
        let numbers = Tensor::new(changing.numbers(), &device)?;
        let tensors = changing.tensors.iter().map(|tensor| Tensor::zeros(tensor.shape(), tensor.dtype(), &device));
        Ok(Self { key: address(&numbers)?, numbers, tensors: tensors.collect::<Result<_>>()? })
    }

    fn write(&self, changing: &Changing, card: &CudaDevice) -> Result<()> {
        overwrite(card, &self.numbers, &changing.numbers())?;
        for (tensor, place) in changing.tensors.iter().zip(&self.tensors) {
            // SAFETY: a tensor of this shape and dtype.
            unsafe { copy_to(tensor, address(place)?)? };
        }
        Ok(())
    }

    /// The places of lists, in their order.
    fn lists(&self, changing: &Changing) -> Result<Vec<(usize, usize, Tensor)>> {
        let mut from = changing.first_list();
        let place = |(at, count): (usize, usize)| {
            let list = self.numbers.narrow(0, from, count)?;
            from += count;
            Ok((at, count, list))
        };
        changing.lists().map(place).collect()
    }
}

/// A recorded round.
struct Recording {
    graphs: Vec<CudaGraph>,
    inputs: Inputs,
    /// Tensors that phases leave for what is beside them, and those that they are given.
    left: Vec<Tensor>,
    entered: Vec<Tensor>,
    _held: Vec<Tensor>,
}

/// A kind of round.
struct Known<K, V> {
    of: K,
    runs: usize,
    measured: Option<Lives>,
    recorded: Option<Recorded<V>>,
}

/// A recorded round, where the memory was that it uses beside its own, and what it leaves.
struct Recorded<V> {
    recording: Recording,
    lies: Vec<TensorId>,
    leaves: V,
}

/// A round that goes on.
#[derive(Default)]
enum Now {
    #[default]
    Plain,
    Measured(Scope),
    Recorded(Scope, Recording),
    /// Launches so far, and tensors left and entered.
    Launched([usize; 3]),
}

/// What a card knows of rounds.
pub(crate) struct OnCard<K, V> {
    /// Those that came last come first.
    known: Vec<Known<K, V>>,
    arena: Option<[Tensor; KINDS]>,
    now: Now,
    card: Option<CudaDevice>,
    /// Rounds in a row, until now, whose kinds are measured.
    calm: usize,
    /// Memory that the round uses beside its own.
    lies: Vec<TensorId>,
    is_refused: bool,
}

impl<K, V> Default for OnCard<K, V> {
    fn default() -> Self {
        Self {
            known: Vec::new(),
            arena: None,
            now: Now::Plain,
            card: None,
            calm: 0,
            lies: Vec::new(),
            is_refused: false,
        }
    }
}

impl<K: PartialEq, V> OnCard<K, V> {
    pub(crate) fn begin(&mut self, of: K, lies: Vec<TensorId>, changing: &Changing, card: &CudaDevice) -> Result<bool> {
        self.now = Now::Plain;
        if self.is_refused || !records_launches() {
            return Ok(false);
        }
        self.card = Some(card.clone());
        let known = self.known.iter().position(|known| known.of == of).map(|at| self.known.remove(at));
        let mut known = known.unwrap_or(Known { of, runs: 0, measured: None, recorded: None });
        known.runs += 1;
        // Its launches have other addresses.
        known.recorded = known.recorded.filter(|recorded| recorded.lies == lies);
        self.lies = lies;
        self.known.truncate(MOST_KNOWN - 1);
        self.calm = if known.measured.is_some() { self.calm + 1 } else { 0 };
        if self.calm == 0 {
            // Tensors of a round launch by launch would lie beside the arena.
            self.release();
        }
        self.now = match &known {
            Known { recorded: Some(Recorded { recording, .. }), .. } => {
                recording.inputs.write(changing, card)?;
                Now::Launched([0; 3])
            }
            Known { measured: Some(measured), .. } if self.calm >= CALM => {
                match self.places(measured.clone(), changing, card) {
                    Ok((places, recording)) => {
                        let round = Round { places: Some(places), ..Round::default() };
                        Now::Recorded(Scope::of_round(round), recording)
                    }
                    Err(error) => {
                        self.refuse(&error);
                        return Ok(false);
                    }
                }
            }
            Known { runs, measured: None, .. } if *runs >= MEASURED => Now::Measured(Scope::of_round(Round::default())),
            _ => Now::Plain,
        };
        self.known.insert(0, known);
        Ok(!matches!(self.now, Now::Plain))
    }

    fn places(&mut self, measured: Lives, changing: &Changing, card: &CudaDevice) -> Result<(Places, Recording)> {
        let (of, sizes) = measured.places();
        let arena = match self.arena.take().map(Arena::of).transpose()? {
            Some(arena) if arena.holds(sizes) => arena,
            smaller => {
                let before = smaller.map_or_else(Sizes::default, |arena| arena.sizes());
                self.release();
                Arena::new(std::array::from_fn(|kind| before[kind].max(sizes[kind])), card)?
            }
        };
        self.arena = Some(arena.tensors.clone());
        let inputs = Inputs::new(changing, card)?;
        inputs.write(changing, card)?;
        let mut moved = Vec::new();
        for (tensor, place) in changing.tensors.iter().zip(&inputs.tensors) {
            let from = address(tensor)?;
            let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
            moved.push((from, from + bytes as u64, address(place)?));
        }
        let lists = inputs.lists(changing)?;
        let recording = Recording {
            graphs: Vec::new(),
            inputs: inputs.clone(),
            left: Vec::new(),
            entered: Vec::new(),
            _held: Vec::new(),
        };
        Ok((Places { arena, of, measured, inputs, moved, lists }, recording))
    }

    pub(crate) fn phase<E: From<Error> + Display>(
        &mut self,
        work: &mut dyn FnMut(Turn) -> Result<(), E>,
    ) -> Result<bool, E> {
        match take(&mut self.now) {
            Now::Plain => work(Turn::Work)?,
            Now::Measured(scope) => {
                let (result, scope) = within(scope, || work(Turn::Work));
                self.now = Now::Measured(scope);
                result?;
            }
            Now::Recorded(scope, mut recording) => {
                let card = self.card.clone().expect("a round has begun");
                match captured(&card, scope, &mut || work(Turn::Work)) {
                    Ok((graph, scope)) => {
                        graph.launch().w()?;
                        recording.graphs.push(graph);
                        self.now = Now::Recorded(scope, recording);
                    }
                    Err(error) => {
                        self.refuse(&error);
                        work(Turn::Undo)?;
                        // It is no error of whoever comes next that memory of a graph cannot be given back to a pool.
                        let _ = card.cuda_stream().context().check_err();
                        work(Turn::Work)?;
                    }
                }
            }
            Now::Launched([phase, left, entered]) => {
                self.recording().graphs[phase].launch().w()?;
                self.now = Now::Launched([phase + 1, left, entered]);
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn recording(&self) -> &Recording {
        let recorded = self.known.first().and_then(|known| known.recorded.as_ref());
        &recorded.expect("a round that is launched was recorded").recording
    }

    pub(crate) fn aside<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let (Now::Measured(scope) | Now::Recorded(scope, _)) = &mut self.now else { return work() };
        let mut beside = take(scope);
        beside.set_aside(true);
        let (result, mut beside) = within(beside, work);
        beside.set_aside(false);
        *scope = beside;
        result
    }

    pub(crate) fn leave(&mut self, x: Option<Tensor>) -> Result<Option<Tensor>> {
        if let (Now::Measured(scope) | Now::Recorded(scope, _), Some(x)) = (&mut self.now, &x) {
            scope.leave(address(x)?);
        }
        if let (Now::Recorded(_, recording), Some(x)) = (&mut self.now, &x) {
            recording.left.push(x.clone());
        }
        if let Now::Launched([phase, left, entered]) = self.now {
            self.now = Now::Launched([phase, left + 1, entered]);
            return Ok(self.recording().left.get(left).cloned());
        }
        Ok(x)
    }

    pub(crate) fn enter(&mut self, x: Tensor) -> Result<Tensor> {
        let place = match &mut self.now {
            Now::Plain => return Ok(x),
            Now::Measured(scope) => {
                scope.enter(&x, address(&x)?);
                return Ok(x);
            }
            Now::Recorded(scope, recording) => {
                let Some(place) = scope.piece_for(&x)? else { return Ok(x) };
                recording.entered.push(place.clone());
                place
            }
            Now::Launched([_, _, number]) => {
                *number += 1;
                let number = *number - 1;
                self.recording().entered[number].clone()
            }
        };
        // SAFETY: a tensor of this shape and dtype.
        unsafe { copy_to(&x, address(&place)?)? };
        Ok(place)
    }

    pub(crate) fn is_recorded_now(&self) -> bool {
        matches!(self.now, Now::Recorded(..))
    }

    /// The round is over, and was done to its end where it leaves something.
    pub(crate) fn end(&mut self, leaves: Option<V>) {
        let now = take(&mut self.now);
        let (Some(known), Some(leaves)) = (self.known.first_mut(), leaves) else { return };
        match now {
            Now::Measured(scope) => known.measured = scope.lives(),
            Now::Recorded(scope, recording) => {
                let recording = Recording { _held: scope.into_held(), ..recording };
                known.recorded = Some(Recorded { recording, lies: take(&mut self.lies), leaves });
            }
            Now::Plain | Now::Launched(_) => {}
        }
    }

    pub(crate) fn left_behind(&self) -> Option<&V> {
        let is_launched = matches!(self.now, Now::Launched(_));
        self.known.first().filter(|_| is_launched)?.recorded.as_ref().map(|recorded| &recorded.leaves)
    }

    /// Gives the memory of all recordings back.
    pub(crate) fn release(&mut self) {
        self.known.iter_mut().for_each(|known| known.recorded = None);
        self.arena = None;
    }

    pub(crate) fn forget(&mut self) {
        (self.known, self.arena) = (Vec::new(), None);
    }

    pub(crate) fn stop(&mut self) {
        self.is_refused = true;
        self.forget();
    }

    fn refuse(&mut self, error: &Error) {
        tracing::warn!("the card's work is launched kernel by kernel, and not as graphs: {error}");
        self.stop();
    }

    pub(crate) fn bytes(&self) -> u64 {
        let of = |tensor: &Tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64;
        self.arena.iter().flatten().map(of).sum()
    }
}

/// Records a phase, without doing it.
fn captured<E: Display>(
    card: &CudaDevice,
    scope: Scope,
    work: &mut dyn FnMut() -> Result<(), E>,
) -> Result<(CudaGraph, Scope)> {
    let ((), graph, scope) = capture(card, scope, || work().map_err(|error| Error::Msg(error.to_string())))?;
    if !scope.follows_measured() {
        bail!("the work is not the one that was measured")
    }
    Ok((graph, scope))
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

/// The kind of element that an arena has for a dtype.
pub(super) fn kind_of(dtype: DType) -> Option<usize> {
    DTYPES.iter().position(|other| *other == dtype)
}
