//! How launches are recorded on a card: the arena that their tensors come from, and the graph that they become.
//!
//! *Work* is the operations of one recording: a token of an answer ([`crate::Replay`]), or a phase of a round ([`crate::GraphRounds`]).
//! The work first runs launch by launch, so that kernels are loaded, lists are on the card, and the size of the arena is known.

use std::cell::RefCell;
use std::fmt::Display;
use std::mem::MaybeUninit;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, DriverError, sys};
use candle_core::{CudaDevice, DType, Device, Error, Shape, Tensor, TensorId, bail};

use super::lifetimes::{ALIGNMENT, KINDS, Lifetimes, Sizes, kind_of};
use super::round::{Round, parts_of_arena};
use super::{overwrite, own_address};
use crate::graphs::records_launches;
use crate::memory::is_out_of_device_memory;

type Result<T, E = Error> = std::result::Result<T, E>;

/// The number of times that the same work runs before it is recorded. A recording costs the host about as much as these runs, so work that
/// soon changes is not worth it.
const RUNS_BEFORE: usize = 2;
/// The factor by which that number grows after each attempt that found no memory. Memory may become free later.
const LONGER_WITHOUT_MEMORY: usize = 4;
/// The number of attempts after which it stops growing.
const MAX_TIMES_LONGER: u32 = 5;

/// Lists of the host that do not change, and their places on the card. The cache of lists may drop them.
pub(super) type Lists = Vec<(Vec<u32>, Tensor)>;

/// The source of memory for the tensors of work while it is measured or recorded.
#[derive(Default)]
pub(super) struct Scope {
    /// The arena, while the work is recorded.
    arena: Option<[Tensor; KINDS]>,
    taken: Sizes,
    most: Sizes,
    held: Lists,
    refused_by: Option<&'static str>,
    /// The current round, if there is one. The round then places its tensors, and `arena` is not used.
    round: Option<Round>,
}

impl Scope {
    /// The scope of a round, with the lists that the measured round used.
    pub(super) fn of_round(round: Round, held: Lists) -> Self {
        Self { round: Some(round), held, ..Self::default() }
    }

    pub(super) fn set_uncaptured(&mut self, is_uncaptured: bool) {
        self.round.iter_mut().for_each(|round| round.set_uncaptured(is_uncaptured));
    }

    pub(super) fn follows_measured(&self) -> bool {
        self.round.as_ref().is_none_or(Round::follows_measured)
    }

    /// Notes that launches between two phases read this tensor.
    pub(super) fn leave(&mut self, address: u64) {
        self.round.iter_mut().for_each(|round| {
            round.seen(address);
        });
    }

    /// Makes a tensor that was made between two phases one of the round's tensors.
    pub(super) fn enter(&mut self, x: &Tensor, address: u64) {
        if let (Some(round), Some(kind)) = (&mut self.round, kind_of(x.dtype())) {
            round.taken(kind, x.elem_count(), address);
        }
    }

    /// The place in the arena of a tensor that was made between two phases.
    pub(super) fn piece_for(&mut self, x: &Tensor) -> Result<Option<Tensor>> {
        let (Some(round), Some(kind)) = (&mut self.round, kind_of(x.dtype())) else { return Ok(None) };
        round.piece(kind, x.elem_count())?.map(|piece| piece.reshape(x.shape())).transpose()
    }

    pub(super) fn into_parts(self) -> (Option<Lifetimes>, Lists) {
        (self.round.map(Round::into_lifetimes), self.held)
    }
}

thread_local! {
    static SCOPE: RefCell<Option<Scope>> = const { RefCell::new(None) };
}

fn in_scope<R>(f: impl FnOnce(&mut Scope) -> R) -> Option<R> {
    SCOPE.with_borrow_mut(|scope| scope.as_mut().map(f))
}

/// Whether this thread's work is measured or recorded.
pub(super) fn is_active() -> bool {
    SCOPE.with_borrow(Option::is_some)
}

/// Whether work is being recorded, so that launches do not run now.
pub(super) fn is_capturing() -> bool {
    in_scope(|scope| scope.arena.is_some() || scope.round.as_ref().is_some_and(Round::is_recorded)).unwrap_or(false)
}

/// Memory of the arena for a tensor, if work is recorded and the arena has room.
pub(super) fn piece(shape: &Shape, dtype: DType) -> Result<Option<Tensor>> {
    let Some(kind) = kind_of(dtype) else { return Ok(None) };
    let piece = in_scope(|scope| {
        let (from, count) = (scope.taken[kind], shape.elem_count());
        if let Some(round) = &mut scope.round {
            return round.piece(kind, count)?.map(|piece| piece.reshape(shape)).transpose();
        }
        scope.taken[kind] += count.next_multiple_of(ALIGNMENT);
        scope.most[kind] = scope.most[kind].max(scope.taken[kind]);
        let arena = scope.arena.as_ref().map(|arena| &arena[kind]);
        // If the arena has no room, the tensor becomes memory of the graph, and the recording is refused for that.
        let arena = arena.filter(|arena| from + count <= arena.elem_count());
        arena.map(|arena| arena.narrow(0, from, count)?.reshape(shape)).transpose()
    });
    piece.transpose().map(Option::flatten)
}

/// Notes a tensor that was allocated from the pool and not from the arena.
pub(super) fn taken(t: &Tensor) -> Result<()> {
    if in_round(|_| ()).is_some()
        && let Some(kind) = kind_of(t.dtype())
    {
        // Not as a use: another tensor had this memory before, and a use would extend its lifetime to this launch.
        let at = own_address(t)?;
        in_round(|round| round.taken(kind, t.elem_count(), at));
    }
    Ok(())
}

fn in_round<R>(f: impl FnOnce(&mut Round) -> R) -> Option<R> {
    in_scope(|scope| scope.round.as_mut().map(f)).flatten()
}

/// The address that a kernel is given in place of a tensor's own ([`Round::seen`]).
pub(super) fn seen(address: u64) -> u64 {
    in_round(|round| round.seen(address)).unwrap_or(address)
}

/// Notes a launch with these arguments as numbers, some of which are addresses.
pub(super) fn launched(numbers: impl IntoIterator<Item = u64>) {
    in_round(|round| round.launched(numbers));
}

/// The address from which recorded kernels read the key of dropout.
pub fn key() -> Option<u64> {
    in_round(|round| round.key()).flatten()
}

/// Whether launches are recorded now, so that lists of the host may have other values at the next launch.
pub fn changes_lists() -> bool {
    in_round(|round| round.is_recorded()).unwrap_or(false)
}

/// The place on the card of a list of the host that changes between launches. `None` unless launches are recorded.
pub fn place_of<T>(list: &[T]) -> Option<Tensor> {
    in_round(|round| round.list(list.as_ptr().addr(), list.len())).flatten()
}

/// A scope for temporary tensors: all tensors taken while it exists are dropped before it, and their memory in the arena is reused.
pub struct Temporaries(Option<Sizes>);

impl Temporaries {
    /// Begins the scope.
    pub fn begin() -> Self {
        Self(in_scope(|scope| scope.taken))
    }
}

impl Drop for Temporaries {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            in_scope(|scope| scope.taken = before);
        }
    }
}

/// The place on the card of a list that the work has used before.
pub(super) fn held(list: &[u32]) -> Option<Tensor> {
    in_scope(|scope| Some(scope.held.iter().find(|(values, _)| values == list)?.1.clone())).flatten()
}

/// Makes a recording keep a list that its kernels read.
pub(super) fn hold(list: &[u32], there: &Tensor) {
    in_scope(|scope| scope.held.push((list.to_vec(), there.clone())));
}

/// Prevents the recording of this work, because of this operation.
pub fn refuse(operation: &'static str) {
    in_scope(|scope| scope.refused_by = Some(operation));
}

/// The state of repeated work on a card.
#[derive(Default)]
pub(crate) struct OnCard {
    of: Vec<TensorId>,
    numbers: Option<Tensor>,
    state: State,
    /// No more recordings are made.
    is_refused: bool,
    /// The number of attempts that found no memory.
    without_memory: u32,
    /// Whether the work is recorded only to measure the time of a recording.
    is_measured: bool,
}

enum State {
    /// The number of runs so far, and the elements that the arena has to hold.
    Measured(usize, Sizes),
    Recorded(Recording),
}

impl Default for State {
    fn default() -> Self {
        State::Measured(0, Sizes::default())
    }
}

impl OnCard {
    pub(crate) fn to_be_measured() -> Self {
        Self { is_measured: true, ..Self::default() }
    }

    pub(crate) fn run<E: From<Error> + Display>(
        &mut self,
        card: &CudaDevice,
        tensors: &[&Tensor],
        numbers: &[u32],
        work: &dyn Fn(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        let of: Vec<TensorId> = tensors.iter().map(|tensor| tensor.id()).collect();
        if of != self.of {
            self.forget();
            self.of = of;
        }
        let numbers = self.upload(card, numbers)?;
        if self.is_refused || !(self.is_measured || records_launches()) {
            return work(&numbers);
        }
        match &mut self.state {
            State::Recorded(recording) => Ok(recording.launch()?),
            State::Measured(runs, sizes) if *runs >= runs_before(self.without_memory) => {
                let recorded = Recording::record(card, *sizes, &numbers, work);
                match recorded.and_then(|recording| Ok((recording.launch()?, recording))) {
                    Ok((result, recording)) => {
                        self.state = State::Recorded(recording);
                        Ok(result)
                    }
                    Err(error) => {
                        let passes = is_out_of_device_memory(&error.to_string());
                        let how_long = if passes { ", until there is more memory" } else { "" };
                        if !self.is_measured {
                            tracing::warn!(
                                "the card's work is launched kernel by kernel, and not as a graph{how_long}: {error}"
                            );
                        }
                        self.without_memory += u32::from(passes);
                        self.is_refused = !passes;
                        self.state = State::default();
                        work(&numbers)
                    }
                }
            }
            State::Measured(runs, sizes) => {
                let (result, scope) = within(Scope::default(), || work(&numbers));
                (*runs, *sizes) = (*runs + 1, scope.most);
                result
            }
        }
    }

    pub(crate) fn is_recorded(&self) -> bool {
        matches!(self.state, State::Recorded(_))
    }

    pub(crate) fn forget(&mut self) {
        let Self { is_refused, without_memory, is_measured, .. } = *self;
        *self = Self { is_refused, without_memory, is_measured, ..Self::default() };
    }

    /// Uploads the numbers to their place on the card, which is the same each time.
    fn upload(&mut self, card: &CudaDevice, numbers: &[u32]) -> Result<Tensor> {
        let there = self.numbers.as_ref().filter(|there| there.elem_count() == numbers.len());
        if let Some(there) = there {
            overwrite(card, there, numbers)?;
            return Ok(there.clone());
        }
        self.state = State::default();
        Ok(self.numbers.insert(Tensor::new(numbers, &Device::Cuda(card.clone()))?).clone())
    }
}

/// How often work runs before it is recorded, after `without_memory` attempts that found no memory.
fn runs_before(without_memory: u32) -> usize {
    RUNS_BEFORE * LONGER_WITHOUT_MEMORY.pow(without_memory.min(MAX_TIMES_LONGER))
}

/// Runs work whose tensors come from a scope.
pub(super) fn within<R>(scope: Scope, work: impl FnOnce() -> R) -> (R, Scope) {
    let outer = SCOPE.with_borrow_mut(|now| now.replace(scope));
    let result = work();
    let scope = SCOPE.with_borrow_mut(|now| std::mem::replace(now, outer));
    (result, scope.expect("it was there"))
}

/// A graph, and the memory that its kernels were recorded with.
struct Recording {
    graph: CudaGraph,
    result: Tensor,
    _arena: Option<[Tensor; KINDS]>,
    _held: Lists,
}

impl Recording {
    /// Records work without running it.
    fn record<E: Display>(
        card: &CudaDevice,
        sizes: Sizes,
        numbers: &Tensor,
        work: &dyn Fn(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self> {
        let arena = parts_of_arena(sizes, &Device::Cuda(card.clone()))?;
        let scope = Scope { arena: Some(arena), ..Scope::default() };
        let of_card = || work(numbers).map_err(|error| Error::Msg(error.to_string()));
        let (result, graph, scope) = capture(card, scope, of_card)?;
        Ok(Self { graph, result, _arena: scope.arena, _held: scope.held })
    }

    fn launch(&self) -> Result<Tensor> {
        self.graph.launch().w()?;
        Ok(self.result.clone())
    }
}

/// Records work whose tensors come from a scope, without running it.
pub(super) fn capture<R>(
    card: &CudaDevice,
    scope: Scope,
    work: impl FnOnce() -> Result<R>,
) -> Result<(R, CudaGraph, Scope)> {
    let stream = card.cuda_stream();
    // Other threads may allocate meanwhile.
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
    let (result, scope) = within(scope, work);
    // An error of dropped tensors. cudarc would report it in the next call, which would then not end the recording.
    let dropped = stream.context().check_err();
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    let recorded = checked(result, dropped.and(graph).w(), scope);
    if recorded.is_err() {
        // Memory of a graph cannot be given back to a pool. The next call must not report that error either.
        let _ = stream.context().check_err();
    }
    recorded
}

fn checked<R>(result: Result<R>, graph: Result<Option<CudaGraph>>, scope: Scope) -> Result<(R, CudaGraph, Scope)> {
    let (result, graph) = (result?, graph?);
    let Some(graph) = graph else { bail!("the driver has recorded nothing") };
    let refused_by = scope.refused_by.or(scope.round.as_ref().and_then(|round| round.refused_by));
    if let Some(operation) = refused_by {
        bail!("there is no kernel for {operation} of these sizes")
    }
    if let Some(reason) = refused_node(&graph).w()? {
        bail!("{reason}")
    }
    Ok((result, graph, scope))
}

/// The reason to refuse a graph, if some node gives other results than its operation.
fn refused_node(graph: &CudaGraph) -> Result<Option<&'static str>, DriverError> {
    use sys::CUgraphNodeType_enum::{
        CU_GRAPH_NODE_TYPE_HOST, CU_GRAPH_NODE_TYPE_MEM_ALLOC, CU_GRAPH_NODE_TYPE_MEM_FREE, CU_GRAPH_NODE_TYPE_MEMCPY,
    };
    let mut count = 0;
    // SAFETY: a graph that exists. Without a place for nodes, the call only counts them.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count) }.result()?;
    let mut nodes: Vec<sys::CUgraphNode> = vec![std::ptr::null_mut(); count];
    // SAFETY: a place for this many nodes.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &raw mut count) }.result()?;
    for node in nodes {
        let mut kind = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
        // SAFETY: a node of that graph, and a place for its kind.
        unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }.result()?;
        match kind {
            // Neither the pool nor the bill would count this memory.
            CU_GRAPH_NODE_TYPE_MEM_ALLOC | CU_GRAPH_NODE_TYPE_MEM_FREE => {
                return Ok(Some("some operation takes memory that is not the arena's"));
            }
            CU_GRAPH_NODE_TYPE_MEMCPY if !stays_on_card(node)? => {
                return Ok(Some("some operation copies from or to the host, whose memory has other values by then"));
            }
            CU_GRAPH_NODE_TYPE_HOST => return Ok(Some("some operation calls the host")),
            _ => {}
        }
    }
    Ok(None)
}

/// Whether both ends of a copy are memory of the card. While launches are recorded, a driver accepts copies from and to the host without an
/// error and moves nothing. The host would then read memory that was never written.
fn stays_on_card(node: sys::CUgraphNode) -> Result<bool, DriverError> {
    let mut copy = MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
    // SAFETY: a copy node, and a place for its parameters. The driver has written them if it returns no error.
    let copy = unsafe {
        sys::cuGraphMemcpyNodeGetParams(node, copy.as_mut_ptr()).result()?;
        copy.assume_init()
    };
    Ok([copy.srcMemoryType, copy.dstMemoryType] == [sys::CUmemorytype::CU_MEMORYTYPE_DEVICE; 2])
}
