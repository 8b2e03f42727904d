//! A parameter's value as it is read from JSON, in memory that does not depend on the form of the text.
//!
//! serde_json's own `Value` takes up to 160 times the bytes of its text. A tree has at most so many nodes, and what is too deep or too
//! long is skipped: it is checked as JSON, and takes no memory.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The most nodes of all trees of a request.
pub(super) const MOST_NODES: usize = 4096;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Tree {
    Null,
    Truth(bool),
    Whole(u64),
    Negative(i64),
    Fraction(f64),
    Text(String),
    List(Vec<Tree>),
    /// A list of at least one token id.
    Ids(Vec<u32>),
    Object(Vec<(String, Tree)>),
    /// A list of more token ids than a prompt can have, with their number.
    TooManyIds(usize),
    /// A list or an object that is too deep or too long to keep, with the number of its parts.
    Skipped(usize),
}

impl Tree {
    /// The value as a number.
    #[expect(clippy::cast_precision_loss, reason = "settings, not counts")]
    pub fn number(&self) -> Option<f64> {
        match *self {
            Tree::Whole(number) => Some(number as f64),
            Tree::Negative(number) => Some(number as f64),
            Tree::Fraction(number) => Some(number),
            _ => None,
        }
    }

    /// The number of parts of a list.
    pub fn parts(&self) -> Option<usize> {
        match self {
            Tree::List(parts) => Some(parts.len()),
            Tree::Ids(ids) => Some(ids.len()),
            Tree::TooManyIds(parts) | Tree::Skipped(parts) => Some(*parts),
            _ => None,
        }
    }
}

/// The value, shortened for an error.
impl fmt::Display for Tree {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Tree::Truth(truth) => truth.fmt(f),
            Tree::Whole(number) => number.fmt(f),
            Tree::Negative(number) => number.fmt(f),
            Tree::Fraction(number) => number.fmt(f),
            Tree::Null => f.write_str("null"),
            Tree::Text(_) => f.write_str("a string"),
            Tree::List(_) | Tree::Ids(_) | Tree::TooManyIds(_) => f.write_str("a list"),
            Tree::Object(_) => f.write_str("an object"),
            Tree::Skipped(_) => f.write_str("a long or deep value"),
        }
    }
}

/// The limits of the trees of one request.
#[derive(Clone, Copy)]
pub(super) struct TreeLimits<'a> {
    /// The nodes that are left.
    pub nodes: &'a Cell<usize>,
    /// The most token ids of a list.
    pub ids: usize,
    /// The most lists and objects in each other.
    pub depth: usize,
}

impl TreeLimits<'_> {
    /// Takes a node. False if none is left.
    fn has_node(self) -> bool {
        let left = self.nodes.get();
        self.nodes.set(left.saturating_sub(1));
        left > 0
    }

    fn inner(self) -> Self {
        TreeLimits { depth: self.depth - 1, ..self }
    }
}

impl<'de> DeserializeSeed<'de> for TreeLimits<'_> {
    type Value = Tree;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Tree, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TreeLimits<'_> {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Null)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Tree, E> {
        Ok(Tree::Truth(truth))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Tree, E> {
        Ok(Tree::Whole(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Tree, E> {
        Ok(Tree::Negative(number))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Tree, E> {
        Ok(Tree::Fraction(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Tree, E> {
        Ok(Tree::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Tree, A::Error> {
        let (mut ids, mut parts) = (Vec::new(), Vec::new());
        while self.depth > 0 && parts.is_empty() && ids.len() < self.ids {
            match all.next_element_seed(self.inner())? {
                None => return Ok(if ids.is_empty() { Tree::List(parts) } else { Tree::Ids(ids) }),
                Some(Tree::Whole(id)) if u32::try_from(id).is_ok() => ids.push(id as u32),
                Some(part) => parts.push(part),
            }
        }
        // A list of ids and others is no parameter's value.
        while self.depth > 0 && ids.is_empty() && self.has_node() {
            match all.next_element_seed(self.inner())? {
                None => return Ok(Tree::List(parts)),
                Some(part) => parts.push(part),
            }
        }
        let mut count = ids.len() + parts.len();
        while all.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(match count {
            0 => Tree::List(Vec::new()),
            _ if parts.is_empty() && ids.len() == self.ids => Tree::TooManyIds(count),
            _ => Tree::Skipped(count),
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Tree, A::Error> {
        let mut parts = Vec::new();
        while self.depth > 0 && self.has_node() {
            match all.next_key::<String>()? {
                None => return Ok(Tree::Object(parts)),
                Some(name) => parts.push((name, all.next_value_seed(self.inner())?)),
            }
        }
        let mut count = parts.len();
        while all.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(if count == 0 { Tree::Object(Vec::new()) } else { Tree::Skipped(count) })
    }
}
