//! A lever: a name, the values that a pin may have, and how it is read from and written to [`t5::Levers`].

use std::collections::HashSet;

use memory_policy::Place;
use t5::{Config, Levers, ParameterSpec, Part};

/// A value of a lever, as a pin names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// How many.
    Count(usize),
    /// Which.
    Word(&'static str),
}

impl Value {
    /// The count; none where it is a word.
    pub fn count(self) -> Option<usize> {
        if let Self::Count(count) = self { Some(count) } else { None }
    }

    /// The word; none where it is a count.
    pub fn word(self) -> Option<&'static str> {
        if let Self::Word(word) = self { Some(word) } else { None }
    }

    pub(crate) fn is(self, word: &str) -> bool {
        matches!(self, Self::Word(other) if other == word)
    }

    /// As a config file has it.
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

/// The values that a pin may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// A whole number from the first to the last.
    Count(usize, usize),
    /// A number of blocks, at most; more than there are means all.
    Blocks(usize),
    /// One of these.
    Words(&'static [&'static str]),
}

impl Values {
    /// The last of the words.
    pub fn last(self) -> Option<Value> {
        if let Self::Words(words) = self { words.last().map(|word| Value::Word(word)) } else { None }
    }

    /// The word of the list that is `text`.
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
    /// Its line in the help.
    pub help: &'static str,
    /// Beside these pins and where tensors lie, the value where no flag names one and no budget leaves it to the planner; `None`: the
    /// planner's choice.
    pub usual: fn(&Pins, Place) -> Option<Value>,
}

/// The argument after a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// The value, which the help calls so.
    Value(&'static str),
    /// Nothing: the flag is the last of the lever's words.
    Nothing,
    /// A directory for the file that the last of the lever's words asks for.
    Directory,
}

/// A row of the table.
#[derive(Debug)]
pub struct Lever {
    /// `memory.NAME` pins it, and explanations call it so.
    pub name: &'static str,
    /// The values that a pin may have.
    pub values: Values,
    /// Its sentence in the list of config keys.
    pub meaning: &'static str,
    /// Its flag in `bench`, where it has one.
    pub flag: Option<Flag>,
    /// Whether it is a part of layer-major accumulation: values that say so, where others would not.
    pub layer_major: Option<fn(Value) -> bool>,
    /// Values that have a meaning on a device alone.
    pub(crate) device_only: Option<fn(Value) -> bool>,
    /// Its value; none where it has no meaning under the others.
    pub(crate) get: fn(&Levers) -> Option<Value>,
    /// Sets it, where it has a meaning.
    pub(crate) set: fn(&mut Levers, Value),
    /// Values that are offered after those that the levers before it have; none: leave it.
    pub(crate) offered: fn(&Space<'_>, &Levers) -> Vec<Value>,
    /// Its value in a plan's last line; none: not worth a word.
    pub(crate) words: fn(&Levers) -> Option<String>,
    /// Whether the levers after it move with it.
    pub(crate) moves_the_next: bool,
}

impl Lever {
    /// Values that are offered after those that the levers before it have, where tensors lie; none: leave it.
    pub(crate) fn offered(&self, space: &Space<'_>, so_far: &Levers) -> Vec<Value> {
        let mut values = (self.offered)(space, so_far);
        values.retain(|value| self.works_at(space.place, *value));
        values
    }

    /// Whether this value can be carried out where tensors lie.
    pub fn works_at(&self, place: Place, value: Value) -> bool {
        place == Place::Device || !self.device_only.is_some_and(|is_device_only| is_device_only(value))
    }

    /// These levers with another value of this one.
    pub(crate) fn with(&self, levers: &Levers, value: Value) -> Levers {
        let mut levers = *levers;
        (self.set)(&mut levers, value);
        levers
    }

    /// Whether a plan with these levers writes a file because of this one.
    pub(crate) fn writes_a_file(&self, levers: &Levers) -> bool {
        // A lever of cards says where what others take off the card lies.
        self.device_only.is_none() && (self.get)(levers).is_some_and(|value| value.is("disk"))
    }
}

/// The facts that offers depend on, beside other levers.
#[derive(Clone, Copy, Debug)]
pub struct Space<'a> {
    /// Values that are not to be chosen.
    pub pins: &'a Pins,
    /// Where tensors lie.
    pub place: Place,
    /// Blocks that backward enters.
    pub blocks: usize,
    /// Samples of an optimizer batch.
    pub batch_samples: usize,
    /// Tokens of the longest target.
    pub target_tokens: usize,
    /// Whether the optimizer has moments that are worth a file.
    pub has_large_moments: bool,
    /// The blocks whose weights may stay in memory while others lie in files. None where these weights are trained.
    pub frozen: Option<FrozenBlocks>,
    /// Whether other processes train the same model, and what they are sent has a price.
    pub has_others: bool,
    /// Whether products cast weights that stay where they are computed with.
    pub casts_weights: bool,
    /// Whether they cast those of an adapter, which are small.
    pub casts_adapter: bool,
    /// Recordings of micro-batches; none where a card cannot record them.
    pub graphs: Option<Graphs>,
}

/// Recordings of micro-batches on a card.
#[derive(Clone, Copy, Debug)]
pub struct Graphs {
    /// Whether the environment asks for them, or forbids them, whatever pins say.
    pub are_wanted: Option<bool>,
    /// Whether launches of kernels and of graphs have prices.
    pub have_prices: bool,
}

/// The blocks of a model that is not trained itself.
#[derive(Clone, Copy, Debug)]
pub struct FrozenBlocks {
    /// All of them.
    pub blocks: usize,
    /// The most counts of them that are offered.
    pub most_counts: usize,
    /// Whether the vocabulary's table is larger than every block. Then it pays to keep blocks in memory while the table comes by rows.
    pub has_larger_table: bool,
}

impl FrozenBlocks {
    /// The blocks of a model.
    pub fn of(model: &Config, most_counts: usize) -> Self {
        let specs = ParameterSpec::all(model);
        let elements = |part: Part| specs.iter().filter(|spec| spec.part == part).map(ParameterSpec::elements).sum();
        let blocks = specs.iter().map(|spec| spec.part).filter(|part| part.is_block());
        let largest: u64 = blocks.collect::<HashSet<Part>>().into_iter().map(elements).max().unwrap_or(0);
        Self { blocks: model.blocks(), most_counts, has_larger_table: elements(Part::Shared) > largest }
    }
}

/// Values that are not the planner's to choose, by the names of their levers. The default pins nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins(Vec<(&'static str, Value)>);

impl Pins {
    /// These, and one more.
    #[must_use]
    pub fn with(mut self, lever: &'static str, value: Value) -> Self {
        self.0.retain(|(name, _)| *name != lever);
        self.0.push((lever, value));
        self
    }

    /// The pinned value of the lever of this name.
    pub fn of(&self, lever: &str) -> Option<Value> {
        self.0.iter().find(|(name, _)| *name == lever).map(|(_, value)| *value)
    }

    /// The pinned count of the lever of this name.
    pub fn count(&self, lever: &str) -> Option<usize> {
        self.of(lever).and_then(Value::count)
    }

    /// Whether the lever of this name is pinned to this word; none where it is not pinned.
    pub(crate) fn is(&self, lever: &Lever, word: &str) -> Option<bool> {
        self.of(lever.name).map(|value| value.is(word))
    }
}
