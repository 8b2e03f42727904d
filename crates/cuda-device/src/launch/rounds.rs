//! Rounds on a card: measured, then recorded, and from then on one launch for each phase. [`crate::rounds`] defines the words.
//!
//! All recordings can share one arena: their launches follow each other on one stream, and nothing in it outlives a round.

use std::fmt::Display;
use std::mem::take;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::{CudaDevice, Error, Tensor, TensorId, bail};

use super::lifetimes::{KINDS, Lifetimes, Sizes};
use super::recording::{Lists, Scope, capture, within};
use super::round::{Arena, Inputs, Places, Round};
use super::{address, byte_count, copy_to};
use crate::graphs::{GraphInputs, Turn, records_launches};

type Result<T, E = Error> = std::result::Result<T, E>;

/// The most kinds that are remembered: the most recent ones.
const MAX_KNOWN: usize = 16;
/// The first round of a kind that is measured, counted from 1. The round before it loads kernels and fills the kept lists.
const MEASURED: usize = 2;
/// Rounds in a row that have to be of measured kinds before one is recorded. A recording costs the host about as much as a round, so kinds
/// that soon change are not worth it.
const CALM: usize = 2;

/// A recorded round.
struct Recording {
    graphs: Vec<CudaGraph>,
    inputs: Inputs,
    /// Tensors that phases hand to launches between them, in order.
    left: Vec<Tensor>,
    /// Tensors that launches between phases hand to the next phase, in order.
    entered: Vec<Tensor>,
    _held: Lists,
}

/// A kind of round.
struct Known<K, V> {
    of: K,
    runs: usize,
    measured: Option<Lifetimes>,
    /// The lists that the measured round used. A driver uploads no lists while launches are recorded, and the cache of lists may drop them.
    lists: Lists,
    recorded: Option<Recorded<V>>,
}

/// A recording with the tensors from outside that its launches use, and the host state of its round for later rounds.
struct Recorded<V> {
    recording: Recording,
    external: Vec<TensorId>,
    host_state: V,
}

/// The state of the current round.
#[derive(Default)]
enum RoundState {
    #[default]
    Plain,
    Measured(Scope),
    Recorded(Scope, Recording),
    /// How many graphs were launched so far, how many tensors were left, and how many entered.
    Launched([usize; 3]),
}

/// The rounds that a card has seen, and the current one.
pub(crate) struct OnCard<K, V> {
    /// The most recent kind comes first.
    known: Vec<Known<K, V>>,
    arena: Option<[Tensor; KINDS]>,
    now: RoundState,
    card: Option<CudaDevice>,
    /// How many rounds in a row, the current one included, were of measured kinds.
    calm: usize,
    /// Tensors from outside that the current round uses.
    external: Vec<TensorId>,
    launched: u64,
    is_refused: bool,
}

impl<K, V> Default for OnCard<K, V> {
    fn default() -> Self {
        Self {
            known: Vec::new(),
            arena: None,
            now: RoundState::Plain,
            card: None,
            calm: 0,
            external: Vec::new(),
            launched: 0,
            is_refused: false,
        }
    }
}

impl<K: PartialEq, V> OnCard<K, V> {
    pub(crate) fn begin(
        &mut self,
        of: K,
        external: Vec<TensorId>,
        changing: &GraphInputs,
        card: &CudaDevice,
    ) -> Result<bool> {
        self.now = RoundState::Plain;
        if !self.may_record() {
            return Ok(false);
        }
        self.card = Some(card.clone());
        let known = self.known.iter().position(|known| known.of == of).map(|at| self.known.remove(at));
        let mut known = known.unwrap_or(Known { of, runs: 0, measured: None, lists: Lists::new(), recorded: None });
        known.runs += 1;
        // The launches of a recording hold the addresses of the tensors of that time.
        known.recorded = known.recorded.filter(|recorded| recorded.external == external);
        self.external = external;
        self.known.truncate(MAX_KNOWN - 1);
        self.calm = if known.measured.is_some() { self.calm + 1 } else { 0 };
        if self.calm == 0 {
            // A round that runs launch by launch takes its own memory. With the arena kept, the card would hold both.
            self.release();
        }
        self.now = match &known {
            Known { recorded: Some(Recorded { recording, .. }), .. } => {
                recording.inputs.write(changing, card)?;
                RoundState::Launched([0; 3])
            }
            Known { measured: Some(measured), .. } if self.calm >= CALM => {
                match self.places(measured.clone(), changing, card) {
                    Ok((places, recording)) => {
                        let round = Round::recorded(places);
                        RoundState::Recorded(Scope::of_round(round, known.lists.clone()), recording)
                    }
                    Err(error) => {
                        self.refuse(&error);
                        return Ok(false);
                    }
                }
            }
            Known { runs, measured: None, .. } if *runs >= MEASURED => {
                RoundState::Measured(Scope::of_round(Round::default(), Lists::new()))
            }
            _ => RoundState::Plain,
        };
        self.known.insert(0, known);
        Ok(!matches!(self.now, RoundState::Plain))
    }

    fn places(
        &mut self,
        measured: Lifetimes,
        changing: &GraphInputs,
        card: &CudaDevice,
    ) -> Result<(Places, Recording)> {
        let (of, sizes) = measured.places();
        let arena = match self.arena.take().map(Arena::from_tensors).transpose()? {
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
            let bytes = byte_count(tensor);
            moved.push((from, from + bytes as u64, address(place)?));
        }
        let lists = inputs.lists(changing)?;
        let recording = Recording {
            graphs: Vec::new(),
            inputs: inputs.clone(),
            left: Vec::new(),
            entered: Vec::new(),
            _held: Lists::new(),
        };
        Ok((Places { arena, of, measured, inputs, moved, lists }, recording))
    }

    pub(crate) fn phase<E: From<Error> + Display>(
        &mut self,
        work: &mut dyn FnMut(Turn) -> Result<(), E>,
    ) -> Result<bool, E> {
        match take(&mut self.now) {
            RoundState::Plain => work(Turn::Work)?,
            RoundState::Measured(scope) => {
                let (result, scope) = within(scope, || work(Turn::Work));
                self.now = RoundState::Measured(scope);
                result?;
            }
            RoundState::Recorded(scope, mut recording) => {
                let card = self.card.clone().expect("a round has begun");
                match captured(&card, scope, &mut || work(Turn::Work)) {
                    Ok((graph, scope)) => {
                        graph.launch().w()?;
                        recording.graphs.push(graph);
                        self.now = RoundState::Recorded(scope, recording);
                    }
                    Err(error) => {
                        self.refuse(&error);
                        work(Turn::Undo)?;
                        // Memory of a graph cannot be given back to a pool. That error must not be reported by the next call.
                        let _ = card.cuda_stream().context().check_err();
                        work(Turn::Work)?;
                    }
                }
            }
            RoundState::Launched([phase, left, entered]) => {
                self.recording().graphs[phase].launch().w()?;
                self.now = RoundState::Launched([phase + 1, left, entered]);
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn recording(&self) -> &Recording {
        let recorded = self.known.first().and_then(|known| known.recorded.as_ref());
        &recorded.expect("a round that is launched was recorded").recording
    }

    pub(crate) fn uncaptured<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let (RoundState::Measured(scope) | RoundState::Recorded(scope, _)) = &mut self.now else { return work() };
        let mut uncaptured = take(scope);
        uncaptured.set_uncaptured(true);
        let (result, mut uncaptured) = within(uncaptured, work);
        uncaptured.set_uncaptured(false);
        *scope = uncaptured;
        result
    }

    pub(crate) fn leave(&mut self, x: Option<Tensor>) -> Result<Option<Tensor>> {
        if let (RoundState::Measured(scope) | RoundState::Recorded(scope, _), Some(x)) = (&mut self.now, &x) {
            scope.leave(address(x)?);
        }
        if let (RoundState::Recorded(_, recording), Some(x)) = (&mut self.now, &x) {
            recording.left.push(x.clone());
        }
        if let RoundState::Launched([phase, left, entered]) = self.now {
            self.now = RoundState::Launched([phase, left + 1, entered]);
            return Ok(self.recording().left.get(left).cloned());
        }
        Ok(x)
    }

    pub(crate) fn enter(&mut self, x: Tensor) -> Result<Tensor> {
        let place = match &mut self.now {
            RoundState::Plain => return Ok(x),
            RoundState::Measured(scope) => {
                scope.enter(&x, address(&x)?);
                return Ok(x);
            }
            RoundState::Recorded(scope, recording) => {
                let Some(place) = scope.piece_for(&x)? else { return Ok(x) };
                recording.entered.push(place.clone());
                place
            }
            RoundState::Launched([_, _, number]) => {
                *number += 1;
                let number = *number - 1;
                self.recording().entered[number].clone()
            }
        };
        // SAFETY: `place` has the shape and dtype of `x`.
        unsafe { copy_to(&x, address(&place)?)? };
        Ok(place)
    }

    pub(crate) fn is_recorded_now(&self) -> bool {
        matches!(self.now, RoundState::Recorded(..))
    }

    /// Ends the round, which was completed if `host_state` is something.
    pub(crate) fn end(&mut self, host_state: Option<V>) {
        let now = take(&mut self.now);
        let (Some(known), Some(host_state)) = (self.known.first_mut(), host_state) else { return };
        match now {
            RoundState::Measured(scope) => (known.measured, known.lists) = scope.into_parts(),
            RoundState::Recorded(scope, recording) => {
                let recording = Recording { _held: scope.into_parts().1, ..recording };
                known.recorded = Some(Recorded { recording, external: take(&mut self.external), host_state });
            }
            RoundState::Launched(_) => self.launched += 1,
            RoundState::Plain => {}
        }
    }

    pub(crate) fn recorded_host_state(&self) -> Option<&V> {
        let is_launched = matches!(self.now, RoundState::Launched(_));
        self.known.first().filter(|_| is_launched)?.recorded.as_ref().map(|recorded| &recorded.host_state)
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

    pub(crate) fn launched(&self) -> u64 {
        self.launched
    }

    pub(crate) fn may_record(&self) -> bool {
        !self.is_refused && records_launches()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.arena.iter().flatten().map(|tensor| byte_count(tensor) as u64).sum()
    }
}

/// Records a phase without running it.
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
