//! A `data.pkl`, read as data: the names of its tensors, and the places of their values in PyTorch's archive.
//!
//! A pickle is a program for a stack machine, and Python's machine may call any function. This one calls none. It knows
//! the instructions that build numbers, texts, lists and dictionaries, and keeps a call as a name with
//! arguments. It understands the calls with which PyTorch builds a tensor and a dictionary, and refuses all others.
//!
//! Invariants: nothing is executed; a value exists once however often it is named, so memory is bounded by the pickle's
//! length; no recursion.
//!
//! Source of the instructions: `pickletools.py` of CPython. Of the calls: `torch/_utils.py`, `torch/serialization.py`.

use std::collections::HashMap;

/// More values than the deepest model that is accepted needs: about 20 a tensor.
const MAX_VALUES: usize = 1 << 18;
/// Dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

/// A tensor, as the pickle describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PickledTensor {
    pub name: String,
    /// PyTorch's class of the values, such as `HalfStorage`.
    pub storage: String,
    /// The member of the archive below `data/` that holds the values.
    pub key: String,
    /// The index of the tensor's first value in that member.
    pub first: u64,
    pub shape: Vec<usize>,
    /// Whether the values follow each other, the last dimension fastest.
    pub is_contiguous: bool,
}

/// The tensors of a pickled dictionary from names to tensors, in the dictionary's order.
///
/// # Errors
/// The reason why this is no such dictionary.
pub(crate) fn tensors(bytes: &[u8]) -> Result<Vec<PickledTensor>, String> {
    let mut machine =
        Machine { input: Input { bytes, at: 0 }, values: Vec::new(), stack: Vec::new(), memo: HashMap::new() };
    let result = machine.run()?;
    let Value::Dictionary(entries) = machine.value(result) else {
        return Err(format!("it holds {}, expected a dictionary of tensors", machine.in_words(result)));
    };
    entries.iter().map(|&(name, tensor)| machine.tensor(name, tensor)).collect()
}

/// The index of a value.
type Id = usize;

/// A value, with its parts by their indices.
#[derive(Debug)]
enum Value {
    /// None, a boolean or a float: no tensor's place depends on these.
    Other,
    Number(i64),
    Text(String),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Dictionary(Vec<(Id, Id)>),
    /// A name in Python, `module.name`.
    Name(String),
    /// Data that PyTorch keeps outside the pickle.
    Outside(Id),
    /// A call that was not made: function and arguments.
    Call(Id, Id),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Item {
    Mark,
    Value(Id),
}

struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len()).ok_or("it is cut short")?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn number(&mut self, bytes: usize) -> Result<usize, String> {
        let number = self.take(bytes)?.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        usize::try_from(number).map_err(|error| error.to_string())
    }

    /// A signed number of up to eight bytes.
    fn signed(&mut self, bytes: usize) -> Result<i64, String> {
        if bytes > 8 {
            return Err(format!("a number of {bytes} bytes"));
        }
        let taken = self.take(bytes)?;
        let fill = if taken.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
        let mut all = [fill; 8];
        all[..bytes].copy_from_slice(taken);
        Ok(i64::from_le_bytes(all))
    }

    fn text(&mut self, bytes: usize) -> Result<String, String> {
        Ok(String::from_utf8_lossy(self.take(bytes)?).into_owned())
    }

    fn line(&mut self) -> Result<String, String> {
        let length = self.bytes[self.at..].iter().position(|byte| *byte == b'\n').ok_or("it is cut short")?;
        let line = self.text(length)?;
        self.at += 1;
        Ok(line)
    }
}

struct Machine<'a> {
    input: Input<'a>,
    values: Vec<Value>,
    stack: Vec<Item>,
    memo: HashMap<usize, Id>,
}

impl Machine<'_> {
    /// Carries out the instructions. Returns the remaining value.
    fn run(&mut self) -> Result<Id, String> {
        loop {
            let instruction = self.input.take(1)?[0];
            match instruction {
                b'.' => return self.pop(),
                0x80 => drop(self.input.take(1)?), // protocol
                0x95 => drop(self.input.take(8)?), // length of a frame
                b'(' => self.stack.push(Item::Mark),
                b'0' => drop(self.stack.pop()),
                b'1' => drop(self.pop_to_mark()?),
                b'2' => {
                    let top = self.top()?;
                    self.stack.push(Item::Value(top));
                }
                b'N' | 0x88 | 0x89 => self.push(Value::Other)?,
                b'G' => {
                    self.input.take(8)?;
                    self.push(Value::Other)?;
                }
                b'J' => self.push_number(4)?,
                b'K' => self.push_unsigned(1)?,
                b'M' => self.push_unsigned(2)?,
                0x8a => {
                    let bytes = self.input.number(1)?;
                    self.push_number(bytes)?;
                }
                b'X' | 0x8c | 0x8d => {
                    let bytes = self.input.number(match instruction {
                        b'X' => 4,
                        0x8c => 1,
                        _ => 8,
                    })?;
                    let text = self.input.text(bytes)?;
                    self.push(Value::Text(text))?;
                }
                b'}' => self.push(Value::Dictionary(Vec::new()))?,
                b']' => self.push(Value::List(Vec::new()))?,
                b')' => self.push(Value::Tuple(Vec::new()))?,
                b'l' | b't' | b'd' => self.build(instruction)?,
                0x85..=0x87 => {
                    let first = self.stack.len().checked_sub(usize::from(instruction - 0x84)).ok_or("a short stack")?;
                    let items = self.stack.split_off(first);
                    let tuple = ids(&items)?;
                    self.push(Value::Tuple(tuple))?;
                }
                b'c' => {
                    let name = format!("{}.{}", self.input.line()?, self.input.line()?);
                    self.push(Value::Name(name))?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let name = match (self.value(module), self.value(name)) {
                        (Value::Text(module), Value::Text(name)) => format!("{module}.{name}"),
                        _ => return Err("a name that is no text".into()),
                    };
                    self.push(Value::Name(name))?;
                }
                b'Q' => {
                    let outside = self.pop()?;
                    self.push(Value::Outside(outside))?;
                }
                b'R' | 0x81 => self.call()?,
                // The state of an object. For a dictionary, this is PyTorch's data about modules.
                b'b' => drop(self.pop()?),
                b'q' | b'r' => {
                    let key = self.input.number(if instruction == b'q' { 1 } else { 4 })?;
                    let top = self.top()?;
                    self.memo.insert(key, top);
                }
                0x94 => {
                    let top = self.top()?;
                    self.memo.insert(self.memo.len(), top);
                }
                b'h' | b'j' => {
                    let key = self.input.number(if instruction == b'h' { 1 } else { 4 })?;
                    let known = *self.memo.get(&key).ok_or("a value that was never kept")?;
                    self.stack.push(Item::Value(known));
                }
                b's' | b'u' | b'a' | b'e' => self.extend(instruction)?,
                other => return Err(format!("instruction {other:#04x} at byte {}", self.input.at - 1)),
            }
            if self.stack.len() > MAX_VALUES || self.memo.len() > MAX_VALUES {
                return Err(format!("more than {MAX_VALUES} values"));
            }
        }
    }

    fn value(&self, id: Id) -> &Value {
        &self.values[id]
    }

    fn push(&mut self, value: Value) -> Result<(), String> {
        if self.values.len() >= MAX_VALUES {
            return Err(format!("more than {MAX_VALUES} values"));
        }
        self.values.push(value);
        self.stack.push(Item::Value(self.values.len() - 1));
        Ok(())
    }

    fn push_number(&mut self, bytes: usize) -> Result<(), String> {
        let number = self.input.signed(bytes)?;
        self.push(Value::Number(number))
    }

    fn push_unsigned(&mut self, bytes: usize) -> Result<(), String> {
        let number = self.input.number(bytes)?;
        self.push(Value::Number(number as i64))
    }

    fn top(&self) -> Result<Id, String> {
        match self.stack.last() {
            Some(Item::Value(id)) => Ok(*id),
            _ => Err("a short stack".into()),
        }
    }

    fn pop(&mut self) -> Result<Id, String> {
        let top = self.top();
        self.stack.pop();
        top
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.stack.iter().rposition(|item| *item == Item::Mark).ok_or("a short stack")?;
        let items = ids(&self.stack[mark + 1..])?;
        self.stack.truncate(mark);
        Ok(items)
    }

    fn build(&mut self, instruction: u8) -> Result<(), String> {
        let items = self.pop_to_mark()?;
        self.push(match instruction {
            b'l' => Value::List(items),
            b't' => Value::Tuple(items),
            _ => Value::Dictionary(pairs(&items)?),
        })
    }

    /// Adds to the dictionary or the list below.
    fn extend(&mut self, instruction: u8) -> Result<(), String> {
        let added = match instruction {
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                vec![key, value]
            }
            b'a' => vec![self.pop()?],
            _ => self.pop_to_mark()?,
        };
        let onto = self.top()?;
        match (&mut self.values[onto], instruction) {
            (Value::Dictionary(entries), b's' | b'u') => entries.extend(pairs(&added)?),
            (Value::List(items), b'a' | b'e') => items.extend(added),
            _ => return Err(format!("something is added to {}", self.in_words(onto))),
        }
        Ok(())
    }

    /// Keeps a call as it is. A call of a dictionary's class becomes a dictionary, whose entries follow.
    fn call(&mut self) -> Result<(), String> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let is_dictionary = matches!(self.value(function), Value::Name(name) if name == "collections.OrderedDict");
        let is_empty = matches!(self.value(arguments), Value::Tuple(items) if items.is_empty());
        self.push(match is_dictionary && is_empty {
            true => Value::Dictionary(Vec::new()),
            false => Value::Call(function, arguments),
        })
    }

    /// Describes a value, for a message.
    fn in_words(&self, id: Id) -> String {
        match self.value(id) {
            Value::Call(function, _) => match self.value(*function) {
                Value::Name(name) => format!("an object that `{name}` makes"),
                _ => "an object".into(),
            },
            Value::Name(name) => format!("the name `{name}`"),
            Value::Dictionary(_) => "a dictionary".into(),
            Value::List(_) | Value::Tuple(_) => "a list".into(),
            Value::Text(_) | Value::Number(_) | Value::Other => "a plain value".into(),
            Value::Outside(_) => "values without a shape".into(),
        }
    }

    /// The tensor in an entry of the dictionary.
    fn tensor(&self, name: Id, tensor: Id) -> Result<PickledTensor, String> {
        let Value::Text(name) = self.value(name) else { return Err("an entry without a name".into()) };
        self.tensor_of(name, tensor).ok_or_else(|| {
            format!("its entry `{name}` is {}, expected a tensor whose values are in the file", self.in_words(tensor))
        })
    }

    fn tensor_of(&self, name: &str, tensor: Id) -> Option<PickledTensor> {
        let (function, mut arguments) = self.call_of(tensor)?;
        if function == "torch._utils._rebuild_parameter" {
            arguments = self.call_of(*arguments.first()?).filter(|(function, _)| is_rebuilding(function))?.1;
        } else if !is_rebuilding(function) {
            return None;
        }
        let [outside, first, shape, strides, ..] = arguments else { return None };
        let Value::Outside(outside) = self.value(*outside) else { return None };
        let Value::Tuple(outside) = self.value(*outside) else { return None };
        let [_, storage, key, ..] = outside.as_slice() else { return None };
        let (Value::Name(storage), Value::Text(key)) = (self.value(*storage), self.value(*key)) else { return None };
        let (shape, strides) = (self.sizes(*shape)?, self.sizes(*strides)?);
        Some(PickledTensor {
            name: name.into(),
            storage: storage.rsplit('.').next().unwrap_or(storage).into(),
            key: key.clone(),
            first: self.size(*first)? as u64,
            is_contiguous: is_contiguous(&shape, &strides),
            shape,
        })
    }

    fn call_of(&self, id: Id) -> Option<(&str, &[Id])> {
        let Value::Call(function, arguments) = self.value(id) else { return None };
        match (self.value(*function), self.value(*arguments)) {
            (Value::Name(function), Value::Tuple(arguments)) => Some((function, arguments)),
            _ => None,
        }
    }

    fn size(&self, id: Id) -> Option<usize> {
        if let Value::Number(number) = self.value(id) { usize::try_from(*number).ok() } else { None }
    }

    fn sizes(&self, id: Id) -> Option<Vec<usize>> {
        let Value::Tuple(sizes) = self.value(id) else { return None };
        if sizes.len() > MAX_DIMENSIONS {
            return None;
        }
        sizes.iter().map(|size| self.size(*size)).collect()
    }
}

fn is_rebuilding(function: &str) -> bool {
    function == "torch._utils._rebuild_tensor_v2"
}

fn ids(items: &[Item]) -> Result<Vec<Id>, String> {
    let id = |item: &Item| if let Item::Value(id) = item { Ok(*id) } else { Err("a short stack".to_owned()) };
    items.iter().map(id).collect()
}

fn pairs(items: &[Id]) -> Result<Vec<(Id, Id)>, String> {
    let (pairs, []) = items.as_chunks::<2>() else { return Err("a key without a value".into()) };
    Ok(pairs.iter().map(|&[key, value]| (key, value)).collect())
}

fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1_usize;
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected = expected.saturating_mul(size);
            fits
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `{"a": tensor of shape (2, 3) at value 4 of member 7}`, in protocol 2.
    fn one_tensor() -> Vec<u8> {
        let mut bytes =
            b"\x80\x02}q\x00X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\nq\x01((X\x07\x00\x00\x00storage"
                .to_vec();
        bytes.extend(
            b"ctorch\nHalfStorage\nX\x01\x00\x00\x007X\x03\x00\x00\x00cpuK\x0atQK\x04K\x02K\x03\x86K\x03K\x01\x86\x89",
        );
        bytes.extend(b"ccollections\nOrderedDict\n)RtRs.");
        bytes
    }

    #[test]
    fn a_tensor_is_found_where_the_pickle_says() {
        let expected = PickledTensor {
            name: "a".into(),
            storage: "HalfStorage".into(),
            key: "7".into(),
            first: 4,
            shape: vec![2, 3],
            is_contiguous: true,
        };
        assert_eq!(tensors(&one_tensor()).unwrap(), [expected]);
    }

    #[test]
    fn a_call_of_anything_else_is_refused_by_its_name_and_never_made() {
        let check = |bytes: &[u8], expected: &str| {
            let error = tensors(bytes).unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        check(b"cos\nsystem\n(X\x02\x00\x00\x00lstR.", "`os.system`");
        check(b"}X\x01\x00\x00\x00acos\nsystem\n)Rs.", "its entry `a` is an object that `os.system` makes");
        check(b"}X\x01\x00\x00\x00aK\x01s.", "its entry `a` is a plain value");
        check(b"", "cut short");
        check(b".", "short stack");
        check(b"X\xff\xff\xff\xff", "cut short");
        check(b"i", "instruction 0x69");
    }

    #[test]
    fn a_value_that_is_named_over_and_over_exists_once() {
        // Each tuple contains the one before it twice: a tree of 2^200 leaves.
        let mut bytes = b"K\x01q\x00".to_vec();
        for _ in 0..200 {
            bytes.extend(b"h\x00h\x00\x86q\x00");
        }
        bytes.push(b'.');
        assert!(tensors(&bytes).unwrap_err().contains("a list"));
    }

    #[test]
    fn no_damage_makes_it_panic() {
        let whole = one_tensor();
        for at in 0..whole.len() {
            drop(tensors(&whole[..at]));
            for change in [0x01, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= change;
                drop(tensors(&bytes));
            }
        }
    }
}
