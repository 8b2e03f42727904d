//! The schema of a footer, walked leaf by leaf: paths, types and levels.

use crate::error::Fault;
use crate::thrift::{Compact, Source, kind};

/// The deepest nesting of groups.
const MAX_DEPTH: usize = 64;
/// Longer paths are refused.
const MAX_PATH_BYTES: usize = 16 << 10;

const BYTE_ARRAY: i32 = 6;
const FIXED_LEN_BYTE_ARRAY: i32 = 7;
const CONVERTED_DECIMAL: i32 = 5;
const LOGICAL_DECIMAL: i16 = 5;

const REQUIRED: i32 = 0;
const REPEATED: i32 = 2;

const PHYSICAL_NAMES: [&str; 8] =
    ["BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"];
const CONVERTED_NAMES: [&str; 22] = [
    "UTF8",
    "MAP",
    "MAP_KEY_VALUE",
    "LIST",
    "ENUM",
    "DECIMAL",
    "DATE",
    "TIME_MILLIS",
    "TIME_MICROS",
    "TIMESTAMP_MILLIS",
    "TIMESTAMP_MICROS",
    "UINT_8",
    "UINT_16",
    "UINT_32",
    "UINT_64",
    "INT_8",
    "INT_16",
    "INT_32",
    "INT_64",
    "JSON",
    "BSON",
    "INTERVAL",
];
/// Indexed by the number of the union's member; 0 and 9 are not used.
const LOGICAL_NAMES: [&str; 19] = [
    "",
    "String",
    "Map",
    "List",
    "Enum",
    "Decimal",
    "Date",
    "Time",
    "Timestamp",
    "",
    "Integer",
    "Unknown",
    "Json",
    "Bson",
    "Uuid",
    "Float16",
    "Variant",
    "Geometry",
    "Geography",
];

/// A leaf of the schema.
pub(crate) struct Leaf<'a> {
    /// The dotted path.
    pub(crate) path: &'a str,
    /// Values of the format's `Type` and `ConvertedType`, and the number of the member of its `LogicalType`.
    pub(crate) physical: i32,
    pub(crate) converted: Option<i32>,
    pub(crate) logical: Option<i16>,
    pub(crate) max_definition_level: u32,
    pub(crate) max_repetition_level: u32,
}

impl Leaf<'_> {
    /// Whether the leaf holds one string or byte string per row.
    pub(crate) fn is_string(&self) -> bool {
        self.max_repetition_level == 0
            && self.physical == BYTE_ARRAY
            && self.converted != Some(CONVERTED_DECIMAL)
            && self.logical != Some(LOGICAL_DECIMAL)
    }

    /// Whether the leaf's values are byte strings of one length.
    pub(crate) fn has_fixed_length(&self) -> bool {
        self.physical == FIXED_LEN_BYTE_ARRAY
    }

    /// The leaf's type in parquet's words: `INT64`, `BYTE_ARRAY (String)`, `BYTE_ARRAY, repeated`.
    pub(crate) fn type_name(&self) -> String {
        let named = |names: &[&str], number: usize| {
            names.get(number).filter(|name| !name.is_empty()).copied().map(str::to_owned)
        };
        let physical = usize::try_from(self.physical).unwrap_or(usize::MAX);
        let mut name = named(&PHYSICAL_NAMES, physical).unwrap_or_else(|| format!("type {}", self.physical));
        let logical = self.logical.map(|number| {
            let known = named(&LOGICAL_NAMES, usize::try_from(number).unwrap_or(usize::MAX));
            known.unwrap_or_else(|| format!("logical type {number}"))
        });
        let converted = self.converted.map(|number| {
            let known = named(&CONVERTED_NAMES, usize::try_from(number).unwrap_or(usize::MAX));
            known.unwrap_or_else(|| format!("converted type {number}"))
        });
        if let Some(meaning) = logical.or(converted) {
            name += &format!(" ({meaning})");
        }
        if self.max_repetition_level > 0 {
            name += ", repeated";
        }
        name
    }
}

/// The walk's state: the groups that enclose the next element.
#[derive(Default)]
pub(crate) struct SchemaWalk {
    groups: Vec<Group>,
    /// The path of the groups, followed by a leaf's name.
    path: String,
    leaves: usize,
    has_root: bool,
}

struct Group {
    children_left: u32,
    path_bytes: usize,
    definition_level: u32,
    repetition_level: u32,
}

/// A schema element as it is stored.
#[derive(Default)]
struct Element {
    physical: Option<i32>,
    repetition: i32,
    children: u32,
    converted: Option<i32>,
    logical: Option<i16>,
}

impl SchemaWalk {
    /// Reads the next element. If it is a leaf, returns it with its number.
    pub(crate) fn element<S: Source>(&mut self, input: &mut Compact<S>) -> Result<Option<(usize, Leaf<'_>)>, Fault> {
        while self.groups.last().is_some_and(|group| group.children_left == 0) {
            self.groups.pop();
        }
        let enclosing = self.groups.last_mut();
        if self.has_root && enclosing.is_none() {
            return Fault::corrupt("its schema has elements that belong to no group");
        }
        let (mut path_bytes, mut definition_level, mut repetition_level) = (0, 0, 0);
        if let Some(group) = enclosing {
            group.children_left -= 1;
            (path_bytes, definition_level, repetition_level) =
                (group.path_bytes, group.definition_level, group.repetition_level);
        }
        self.path.truncate(path_bytes);
        let element = self.read(input)?;
        if !self.has_root {
            // The root has a name, which no path includes, and no levels.
            self.has_root = true;
            self.path.clear();
            self.groups.push(Group {
                children_left: element.children,
                path_bytes: 0,
                definition_level,
                repetition_level,
            });
            return Ok(None);
        }
        definition_level += u32::from(element.repetition != REQUIRED);
        if element.repetition == REPEATED {
            repetition_level += 1;
        }
        if element.children > 0 {
            if self.groups.len() == MAX_DEPTH {
                return Fault::corrupt(format!("its schema nests more than {MAX_DEPTH} groups"));
            }
            let (children_left, path_bytes) = (element.children, self.path.len());
            self.groups.push(Group { children_left, path_bytes, definition_level, repetition_level });
            return Ok(None);
        }
        let Some(physical) = element.physical else {
            // A group without members.
            return Ok(None);
        };
        let index = self.leaves;
        self.leaves += 1;
        let leaf = Leaf {
            path: &self.path,
            physical,
            converted: element.converted,
            logical: element.logical,
            max_definition_level: definition_level,
            max_repetition_level: repetition_level,
        };
        Ok(Some((index, leaf)))
    }

    /// The number of leaves, once every element was read.
    pub(crate) fn finish(self) -> Result<usize, Fault> {
        match self.groups.iter().all(|group| group.children_left == 0) {
            true => Ok(self.leaves),
            false => Fault::corrupt("its schema ends before its last element"),
        }
    }

    /// Reads an element and appends its name to the path.
    fn read<S: Source>(&mut self, input: &mut Compact<S>) -> Result<Element, Fault> {
        let mut element = Element::default();
        let mut last = 0;
        while let Some(field) = input.field(&mut last)? {
            match (field.id, field.kind) {
                (1, kind::I32) => element.physical = Some(input.i32()?),
                (3, kind::I32) => element.repetition = input.i32()?,
                (4, kind::BINARY) => {
                    let name = input.binary(MAX_PATH_BYTES)?;
                    let Ok(name) = std::str::from_utf8(&name) else {
                        return Fault::corrupt("its schema has a column whose name is not UTF-8");
                    };
                    if !self.path.is_empty() {
                        self.path.push('.');
                    }
                    self.path.push_str(name);
                    if self.path.len() > MAX_PATH_BYTES {
                        return Fault::corrupt(format!("its schema has a path of more than {MAX_PATH_BYTES} bytes"));
                    }
                }
                (5, kind::I32) => element.children = input.count("the number of a group's children")?,
                (6, kind::I32) => element.converted = Some(input.i32()?),
                (10, kind::STRUCT) => {
                    let mut last = 0;
                    while let Some(member) = input.field(&mut last)? {
                        element.logical = Some(member.id);
                        input.skip(member.kind)?;
                    }
                }
                (_, other) => input.skip(other)?,
            }
        }
        Ok(element)
    }
}
