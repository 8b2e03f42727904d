//! A lever: its name, the values of a pin, and how its value is read from and written to [`t5::Levers`].

use std::collections::HashSet;

use memory_policy::MemorySpace;
use t5::{Config, Levers, ParameterSpec, Part};

/// A value of a lever, as a pin gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number.
    Count(usize),
    /// A word.
    Word(&'static str),
}

impl Value {
    /// The number, or `None` for a word.
    pub fn count(self) -> Option<usize> {
        if let Self::Count(count) = self { Some(count) } else { None }
    }

    /// The word, or `None` for a number.
    pub fn word(self) -> Option<&'static str> {
        if let Self::Word(word) = self { Some(word) } else { None }
    }

    pub(crate) fn is(self, word: &str) -> bool {
        matches!(self, Self::Word(other) if other == word)
    }

    /// The value as a config file writes it.
    pub(crate) fn written(self) -> String {
        if let Self::Word(word) = self { format!("\"{word}\"") } else { self.shown() }
    }

    pub(crate) fn shown(self) -> String {
        match self {
            Self::Count(count) => count.to_string(),
            Self::Word(word) => word.to_owned(),
        }
    }
}

/// The values that a pin accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// A whole number from the first to the last, both included.
    Count(usize, usize),
    /// At most this number of blocks. A number above the model's blocks means all blocks.
    Blocks(usize),
    /// One of these words.
    Words(&'static [&'static str]),
}

impl Values {
    /// The last of the words.
    pub fn last(self) -> Option<Value> {
        if let Self::Words(words) = self { words.last().map(|word| Value::Word(word)) } else { None }
    }

    /// The word of the list that equals `text`.
    pub fn word(self, text: &str) -> Option<Value> {
        let Self::Words(words) = self else { return None };
        words.iter().find(|word| **word == text).map(|word| Value::Word(word))
    }
}

/// The flag of `bench` for a lever.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// `--LONG`
    pub long: &'static str,
    /// The argument after it.
    pub takes: Takes,
    /// The line in the help.
    pub help: &'static str,
    /// The default, given these pins and the place of tensors. It applies if no flag gives a value and no budget leaves the choice to the
    /// planner. `None`: the planner chooses.
    pub usual: fn(&Pins, MemorySpace) -> Option<Value>,
}

/// The argument after a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// A value, under this name in the help.
    Value(&'static str),
    /// Nothing: the flag selects the last of the lever's words.
    Nothing,
    /// A directory for the file that the last of the lever's words needs.
    Directory,
}

/// A row of the table of levers.
#[derive(Debug)]
pub struct Lever {
    /// The name: `memory.NAME` pins the lever, and explanations use it.
    pub name: &'static str,
    /// The values that a pin accepts.
    pub values: Values,
    /// The sentence in the list of config keys.
    pub meaning: &'static str,
    /// The flag in `bench`, if any.
    pub flag: Option<Flag>,
    /// Whether a value needs layer-major accumulation. `None`: no value does.
    pub layer_major: Option<fn(Value) -> bool>,
    /// Whether a value exists only on a device. `None`: no value does.
    pub(crate) device_only: Option<fn(Value) -> bool>,
    /// Reads the value; `None` if the lever has no meaning under the other levers.
    pub(crate) get: fn(&Levers) -> Option<Value>,
    /// Sets the value, if the lever has a meaning.
    pub(crate) set: fn(&mut Levers, Value),
    /// The values to offer, given the values of the levers before this one. Empty: the value is left as it is.
    pub(crate) offered: fn(&Space<'_>, &Levers) -> Vec<Value>,
    /// The value in a plan's last line. `None`: it is not mentioned.
    pub(crate) words: fn(&Levers) -> Option<String>,
    /// Whether a change of this lever also changes the levers after it.
    pub(crate) moves_the_next: bool,
}

impl Lever {
    /// The values to offer at the place of tensors, given the values of the levers before this one. Empty: the value is left as it is.
    pub(crate) fn offered(&self, space: &Space<'_>, so_far: &Levers) -> Vec<Value> {
        let mut values = (self.offered)(space, so_far);
        values.retain(|value| self.works_at(space.place, *value));
        values
    }

    /// Whether this value can be carried out at `place`.
    pub fn works_at(&self, place: MemorySpace, value: Value) -> bool {
        place == MemorySpace::Device || !self.device_only.is_some_and(|is_device_only| is_device_only(value))
    }

    /// These levers with another value of this one.
    pub(crate) fn with(&self, levers: &Levers, value: Value) -> Levers {
        let mut levers = *levers;
        (self.set)(&mut levers, value);
        levers
    }

    /// Whether a plan with these levers writes a file because of this one.
    pub(crate) fn writes_a_file(&self, levers: &Levers) -> bool {
        // A lever for cards only names the place of tensors that other levers take off the card.
        self.device_only.is_none() && (self.get)(levers).is_some_and(|value| value.is("disk"))
    }
}

/// The facts that offers depend on, beside other levers.
#[derive(Clone, Copy, Debug)]
pub struct Space<'a> {
    /// Values that are fixed.
    pub pins: &'a Pins,
    /// Where tensors are.
    pub place: MemorySpace,
    /// Blocks that backward enters.
    pub blocks: usize,
    /// Samples of an optimizer batch.
    pub batch_samples: usize,
    /// Tokens of the longest target.
    pub target_tokens: usize,
    /// Whether the optimizer has moments that are worth a file.
    pub has_large_moments: bool,
    /// The blocks whose weights may stay in memory while others are in files. `None` if these weights are trained.
    pub frozen: Option<FrozenBlocks>,
    /// Whether other processes train the same model, so that communication has a price.
    pub has_others: bool,
    /// Whether products cast weights that stay at the place of computation.
    pub casts_weights: bool,
    /// Whether products cast an adapter's weights, which are small.
    pub casts_adapter: bool,
    /// Recordings of micro-batches; `None` if a card cannot record them.
    pub graphs: Option<Graphs>,
}

/// Recordings of micro-batches on a card.
#[derive(Clone, Copy, Debug)]
pub struct Graphs {
    /// Whether the environment asks for recordings, or forbids them, regardless of pins.
    pub are_wanted: Option<bool>,
    /// Whether launches of kernels and of graphs have prices.
    pub have_prices: bool,
}

/// The blocks of a model whose own weights are frozen.
#[derive(Clone, Copy, Debug)]
pub struct FrozenBlocks {
    /// The number of blocks.
    pub blocks: usize,
    /// The most numbers of blocks that are offered.
    pub max_counts: usize,
    /// Whether the vocabulary's table is larger than every block. Then it pays to keep blocks in memory while the table comes by rows.
    pub has_larger_table: bool,
}

impl FrozenBlocks {
    /// The blocks of a model.
    pub fn new(model: &Config, max_counts: usize) -> Self {
        let specs = ParameterSpec::all(model);
        let elements = |part: Part| specs.iter().filter(|spec| spec.part == part).map(ParameterSpec::elements).sum();
        let blocks = specs.iter().map(|spec| spec.part).filter(|part| part.is_block());
        let largest: u64 = blocks.collect::<HashSet<Part>>().into_iter().map(elements).max().unwrap_or(0);
        Self { blocks: model.blocks(), max_counts, has_larger_table: elements(Part::Shared) > largest }
    }
}

/// Fixed values of levers, by the names of the levers. The default pins nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins(Vec<(&'static str, Value)>);

impl Pins {
    /// These pins, and one more.
    #[must_use]
    pub fn with(mut self, lever: &'static str, value: Value) -> Self {
        self.0.retain(|(name, _)| *name != lever);
        self.0.push((lever, value));
        self
    }

    /// The pinned value of the lever of this name.
    pub fn value(&self, lever: &str) -> Option<Value> {
        self.0.iter().find(|(name, _)| *name == lever).map(|(_, value)| *value)
    }

    /// The pinned count of the lever of this name.
    pub fn count(&self, lever: &str) -> Option<usize> {
        self.value(lever).and_then(Value::count)
    }

    /// Whether the lever is pinned to this word; `None` if it is not pinned.
    pub(crate) fn is(&self, lever: &Lever, word: &str) -> Option<bool> {
        self.value(lever.name).map(|value| value.is(word))
    }
}
