//! Costs: the memory of the parts of a run. Each part states its own as rows of name and bytes.
//!
//! A choice is one setting of a part's levers, with its rows and its relative time.
//! A lever is pinned by offering only the choices that have the pinned value.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, MemorySpace, Name};

/// One line of the bill: a holder of memory, its bytes, and the reason for their number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostRow {
    /// The holder of the bytes.
    pub name: Name,
    /// Bytes at the peak.
    pub bytes: Bytes,
    /// The source of the number, for people: `188 M x f32`. May be empty.
    pub note: String,
    /// The memory that the bytes are in.
    #[serde(default, skip_serializing_if = "MemorySpace::is_host")]
    pub place: MemorySpace,
}

impl CostRow {
    /// A row of `bytes` bytes.
    pub fn new(name: Name, bytes: u64, note: impl Into<String>) -> Self {
        Self { name, bytes: Bytes(bytes), note: note.into(), place: MemorySpace::Host }
    }

    /// The same row in the memory at `place`.
    #[must_use]
    pub fn at(self, place: MemorySpace) -> Self {
        Self { place, ..self }
    }
}

/// A part of a run other than the step, and its memory beside the fixed rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Its name.
    pub name: Name,
    /// Rows at its peak.
    pub rows: Vec<CostRow>,
}

/// The values of levers that are chosen together, as a plan carries and names them.
pub trait Setting: Clone + PartialEq + fmt::Debug {
    /// The values, for people: `micro-batches of 16`.
    fn in_words(&self) -> String;

    /// The levers with a value in this setting: the names of their pins, and the values.
    fn levers(&self) -> Vec<(&'static str, String)>;

    /// Whether this setting and `other` differ only in `lever`, and in levers that always change with it.
    fn differs_only_in(&self, lever: &str, other: &Self) -> bool;

    /// Whether a run may change from this setting to `other` without changing any result.
    fn does_the_same_as(&self, other: &Self) -> bool {
        self == other
    }

    /// Whether this setting uses a disk in place of memory. If two choices are about equally fast and both fit, the one without files is
    /// taken.
    fn uses_files(&self) -> bool {
        false
    }
}

/// One setting, with its memory and its time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Choice<S> {
    /// The choice.
    pub what: S,
    /// Memory of this choice at its peak, without the fixed rows.
    pub rows: Vec<CostRow>,
    /// Memory of this choice in the other phases of a run. If a step and its loader both have a phase of the same name, it is one phase.
    pub other_phases: Vec<Phase>,
    /// Time of a step relative to the fastest choice: 1.0 is the fastest, 1.3 takes 30 % longer.
    pub relative_time: f64,
}

/// The name of the step's phase.
pub const TRAINING: Name = Name::new("training");

/// The name of the phase in which the samples of a step are made, before the step computes anything. For this phase, a step states the
/// memory that it leaves behind, and a loader the memory that it holds only then.
pub const FEEDING: Name = Name::new("feeding");

/// The name of the phase in which a model is loaded. The loader holds nothing before the model is loaded.
pub const LOADING: Name = Name::new("loading");

/// The name of the phase before a plan is made: files are opened and read, and the machine is measured. Its rows are [`Costs::past`].
pub const READING: Name = Name::new("reading");

/// The sizes of the allocator's small blocks are multiples of this.
const BLOCK_BYTES: usize = 16;

/// [`TRAINING`], as a static that can be borrowed.
static STEP: Name = TRAINING;

impl<S> Choice<S> {
    /// A choice that holds these rows and nothing in other phases.
    pub fn new(what: S, rows: Vec<CostRow>, relative_time: f64) -> Self {
        Self { what, rows, other_phases: Vec::new(), relative_time }
    }

    /// Bytes of this choice itself. A run keeps many choices so that it can plan again.
    pub fn own_bytes(&self) -> u64 {
        let block = |bytes: usize| bytes.next_multiple_of(BLOCK_BYTES) as u64;
        let of_rows = |rows: &[CostRow]| -> u64 {
            block(size_of_val(rows)) + rows.iter().map(|row| block(row.note.len())).sum::<u64>()
        };
        let of_phases: u64 = self.other_phases.iter().map(|phase| of_rows(&phase.rows)).sum();
        block(size_of::<Self>()) + of_rows(&self.rows) + block(size_of_val(self.other_phases.as_slice())) + of_phases
    }

    /// Every phase with its rows, the step first.
    pub fn phases(&self) -> impl Iterator<Item = (&Name, &[CostRow])> {
        let others = self.other_phases.iter().map(|phase| (&phase.name, phase.rows.as_slice()));
        std::iter::once((&STEP, self.rows.as_slice())).chain(others)
    }

    /// Bytes of the process's own memory.
    pub(crate) fn held(&self) -> Held {
        let of_phase = |name: Name| -> Bytes {
            self.other_phases.iter().filter(|phase| phase.name == name).map(|phase| sum(&phase.rows)).sum()
        };
        let fed = self.phases().filter(|(name, _)| **name != LOADING).map(|(_, rows)| sum(rows));
        Held { loading: of_phase(LOADING), fed: fed.max().unwrap_or_default(), feeding: of_phase(FEEDING) }
    }

    /// The phase that holds most at `place`; the first of equal ones.
    pub(crate) fn largest_phase_at(&self, place: MemorySpace) -> (&Name, &[CostRow]) {
        let first = (&STEP, self.rows.as_slice());
        self.phases()
            .fold(first, |most, phase| if sum_at(place, phase.1) > sum_at(place, most.1) { phase } else { most })
    }
}

/// The bytes that a choice holds of the process's own memory, beside the fixed rows.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    /// Bytes in the phase [`LOADING`].
    loading: Bytes,
    /// Bytes in the largest of all other phases.
    fed: Bytes,
    /// Bytes in the phase [`FEEDING`].
    pub feeding: Bytes,
}

impl Held {
    /// The most bytes that a step and its loader hold together. `rows` are the loader's bytes in every phase but loading.
    pub fn with_loader(self, rows: Bytes, loader: Self) -> Bytes {
        self.loading.max(rows + self.fed.max(self.feeding + loader.feeding))
    }
}

/// All choices that the parts offer, with their costs: ways to carry out a step (`S`), and ways to feed it (`L`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs<S, L> {
    /// The fixed part of a step, for the bill's last line: `128 samples a step`.
    pub task: String,
    /// Memory that does not depend on the choice.
    pub fixed: Vec<CostRow>,
    /// Memory at the peak of the process so far. It is over, but it counts: no plan requires a smaller budget.
    #[serde(default)]
    pub past: Vec<CostRow>,
    /// The ways to carry out a step. At least one.
    pub steps: Vec<Choice<S>>,
    /// The ways to feed it. At least one.
    pub loaders: Vec<Choice<L>>,
}

/// Returns the choices that some budget would take. A choice is left out if another one holds no more memory, takes no longer, and needs
/// files only if this one does. Choices for which `is_kept` returns true always stay. Omitted choices are freed at once: of tens of
/// thousands of choices (100 MiB), only hundreds exist at a time.
pub fn undominated<S: Setting>(
    choices: impl IntoIterator<Item = Choice<S>>,
    is_kept: impl Fn(&Choice<S>) -> bool,
) -> Vec<Choice<S>> {
    let mut left: Vec<(Choice<S>, [Bytes; 4])> = Vec::new();
    for choice in choices {
        let Held { loading, fed, feeding } = choice.held();
        let held = [loading, fed, sum_at(MemorySpace::Device, choice.largest_phase_at(MemorySpace::Device).1), feeding];
        let dominates = |(a, a_holds): (&Choice<S>, [Bytes; 4]), (b, b_holds): (&Choice<S>, [Bytes; 4])| {
            a_holds.iter().zip(b_holds).all(|(a_holds, b_holds)| *a_holds <= b_holds)
                && a.relative_time <= b.relative_time
                && a.what.uses_files() <= b.what.uses_files()
        };
        if is_kept(&choice) || !left.iter().any(|(other, holds)| dominates((other, *holds), (&choice, held))) {
            left.retain(|(other, holds)| is_kept(other) || !dominates((&choice, held), (other, *holds)));
            left.push((choice, held));
        }
    }
    // Clones have vectors without spare capacity, and are together in the memory that omitted choices have freed.
    left.into_iter().map(|(choice, _)| choice.clone()).collect()
}

/// The most that a step and its loader hold together at `place`, beside the fixed rows.
pub(crate) fn peak_at<S, L>(place: MemorySpace, step: &Choice<S>, loader: &Choice<L>) -> Bytes {
    let of_loader = sum_at(place, &loader.rows);
    match place {
        MemorySpace::Host => step.held().with_loader(of_loader, loader.held()),
        MemorySpace::Device => of_loader + sum_at(place, step.largest_phase_at(place).1),
    }
}

/// The sum of some rows that are in the process's own memory.
pub(crate) fn sum(rows: &[CostRow]) -> Bytes {
    sum_at(MemorySpace::Host, rows)
}

/// The sum of some rows that are at `place`.
pub(crate) fn sum_at(place: MemorySpace, rows: &[CostRow]) -> Bytes {
    rows.iter().filter(|row| row.place == place).map(|row| row.bytes).sum()
}
