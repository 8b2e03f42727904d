//! Costs: what the parts of a run would hold, stated by the parts as rows of name and bytes.
//!
//! A choice is one setting of a part's levers with the rows that it would cost and its relative time.
//! A lever is pinned by offering only the choices that have the pinned value.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, Name, Place};

/// One line of the bill: what something costs, and why that much.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostRow {
    /// The holder of the bytes.
    pub name: Name,
    /// How many bytes it holds at the peak.
    pub bytes: Bytes,
    /// Where the number comes from, for people: `188 M x f32`. May be empty.
    pub note: String,
    /// Where the bytes lie.
    #[serde(default, skip_serializing_if = "Place::is_host")]
    pub place: Place,
}

impl CostRow {
    /// A row of `bytes` bytes.
    pub fn new(name: Name, bytes: u64, note: impl Into<String>) -> Self {
        Self { name, bytes: Bytes(bytes), note: note.into(), place: Place::Host }
    }

    /// The same row, elsewhere.
    #[must_use]
    pub fn at(self, place: Place) -> Self {
        Self { place, ..self }
    }
}

/// A part of a run that is not the step, and what it holds beside the fixed rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Its name.
    pub name: Name,
    /// Its memory at the peak.
    pub rows: Vec<CostRow>,
}

/// The values of levers that are chosen together, as a plan carries and names them.
pub trait Setting: Clone + PartialEq + fmt::Debug {
    /// The values, for people: `micro-batches of 16`.
    fn in_words(&self) -> String;

    /// The levers that have a value here, by the names of their pins, with their values.
    fn levers(&self) -> Vec<(&'static str, String)>;

    /// Whether this setting's other levers all have the values that they have in `other`, those aside that always move
    /// with `lever`.
    fn differs_only_in(&self, lever: &str, other: &Self) -> bool;

    /// Whether a run may change from the one to the other, and nothing that it does would be another.
    fn does_the_same_as(&self, other: &Self) -> bool {
        self == other
    }

    /// Whether it takes a disk for memory. Of two that are about as fast, the one without is taken where it fits.
    fn uses_files(&self) -> bool {
        false
    }
}

/// One setting, what it would hold, and how long it would take.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Choice<S> {
    /// The choice.
    pub what: S,
    /// Memory of this choice at its peak, without the fixed rows.
    pub rows: Vec<CostRow>,
    /// Its memory in the other phases of a run. Phases of one name, of a step and of its loader, are one phase.
    pub other_phases: Vec<Phase>,
    /// Time of a step over the time of the fastest choice: 1.0 is the fastest, 1.3 takes 30 % longer.
    pub relative_time: f64,
}

/// The name of the phase that a step is.
pub const TRAINING: Name = Name::new("training");

/// The name of the phase in which the samples of a step are made before anything of it is computed. A step states for it what it
/// leaves behind, and a loader what it holds only then.
pub const FEEDING: Name = Name::new("feeding");

/// The name of the phase in which a model is loaded. Nothing is fed before it is there: of a loader nothing is held.
pub const LOADING: Name = Name::new("loading");

/// The sizes of the allocator's small blocks are multiples of this.
const BLOCK_BYTES: usize = 16;

/// [`TRAINING`], to be borrowed from.
static STEP: Name = TRAINING;

impl<S> Choice<S> {
    /// A choice that holds these rows and nothing in other phases.
    pub fn new(what: S, rows: Vec<CostRow>, relative_time: f64) -> Self {
        Self { what, rows, other_phases: Vec::new(), relative_time }
    }

    /// Bytes of this choice itself, of which a run keeps many to plan again.
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

    /// The phase that holds most at `place`; of equal ones the first.
    pub(crate) fn largest_phase_at(&self, place: Place) -> (&Name, &[CostRow]) {
        let first = (&STEP, self.rows.as_slice());
        self.phases()
            .fold(first, |most, phase| if sum_at(place, phase.1) > sum_at(place, most.1) { phase } else { most })
    }
}

/// What a choice holds of the process's own memory, beside the fixed rows.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    /// In the phase [`LOADING`].
    loading: Bytes,
    /// In the largest of all other phases.
    fed: Bytes,
    /// In the phase [`FEEDING`].
    pub feeding: Bytes,
}

impl Held {
    /// The most that a step and its loader, of which `rows` are always held, hold together.
    pub fn with_loader(self, rows: Bytes, loader: Self) -> Bytes {
        self.loading.max(rows + self.fed.max(self.feeding + loader.feeding))
    }
}

/// Everything that the parts offer, and what it would cost: ways to carry out a step (`S`), and ways to feed it (`L`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs<S, L> {
    /// The fixed part of a step, for the bill's last line: `128 samples a step`.
    pub task: String,
    /// Memory that does not depend on the choice.
    pub fixed: Vec<CostRow>,
    /// The ways to carry out a step. At least one.
    pub steps: Vec<Choice<S>>,
    /// The ways to feed it. At least one.
    pub loaders: Vec<Choice<L>>,
}

/// Of some choices those that some budget would take: none of the others holds no more, takes no longer and needs no files
/// where it needs none. Those that
/// `is_kept` says stay, too. What is left out is let go at once, so of tens of thousands of choices, 100 MiB, only the
/// hundreds that matter exist at a time.
pub fn undominated<S: Setting>(
    choices: impl IntoIterator<Item = Choice<S>>,
    is_kept: impl Fn(&Choice<S>) -> bool,
) -> Vec<Choice<S>> {
    let mut left: Vec<(Choice<S>, [Bytes; 4])> = Vec::new();
    for choice in choices {
        let Held { loading, fed, feeding } = choice.held();
        let held = [loading, fed, sum_at(Place::Device, choice.largest_phase_at(Place::Device).1), feeding];
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
    // Copies have no room to spare in their vectors, and lie together where the choices that were left out had lain between them.
    left.into_iter().map(|(choice, _)| choice.clone()).collect()
}

/// The most that a step and its loader hold together at `place`, beside the fixed rows.
pub(crate) fn peak_at<S, L>(place: Place, step: &Choice<S>, loader: &Choice<L>) -> Bytes {
    let of_loader = sum_at(place, &loader.rows);
    match place {
        Place::Host => step.held().with_loader(of_loader, loader.held()),
        Place::Device => of_loader + sum_at(place, step.largest_phase_at(place).1),
    }
}

/// The sum of some rows that lie in the process's own memory.
pub(crate) fn sum(rows: &[CostRow]) -> Bytes {
    sum_at(Place::Host, rows)
}

/// The sum of some rows that lie at `place`.
pub(crate) fn sum_at(place: Place, rows: &[CostRow]) -> Bytes {
    rows.iter().filter(|row| row.place == place).map(|row| row.bytes).sum()
}
