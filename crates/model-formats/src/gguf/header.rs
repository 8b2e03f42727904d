//! The header's bytes.

use crate::gguf::ALIGNMENT;
use crate::values::{Dtype, Tensor};

const VERSION: u32 = 3;

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Bytes(Vec<u8>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Texts(Vec<String>),
}

/// A key with its value.
pub(super) struct Key<'a> {
    pub(super) name: &'a str,
    pub(super) value: &'a Value,
}

/// Types of values, as GGUF numbers them.
mod kind {
    pub(super) const U8: u32 = 0;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const TEXT: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
}

/// The header, without the padding after it.
pub(super) fn bytes(keys: &[Key], tensors: &[Tensor]) -> Vec<u8> {
    let mut to = Vec::new();
    to.extend(b"GGUF");
    to.extend(VERSION.to_le_bytes());
    to.extend((tensors.len() as u64).to_le_bytes());
    to.extend((keys.len() as u64).to_le_bytes());
    for Key { name, value } in keys {
        text(&mut to, name);
        write(&mut to, value);
    }
    let mut offset = 0_u64;
    for tensor in tensors {
        text(&mut to, &tensor.name);
        to.extend((tensor.shape.len() as u32).to_le_bytes());
        for &size in tensor.shape.iter().rev() {
            to.extend((size as u64).to_le_bytes());
        }
        to.extend(number_of(tensor.dtype).to_le_bytes());
        to.extend(offset.to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    to
}

fn text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

fn write(to: &mut Vec<u8>, value: &Value) {
    let mut begin = |kinds: &[u32], length: Option<usize>| {
        kinds.iter().for_each(|kind| to.extend(kind.to_le_bytes()));
        if let Some(length) = length {
            to.extend((length as u64).to_le_bytes());
        }
    };
    match value {
        Value::U32(number) => {
            begin(&[kind::U32], None);
            to.extend(number.to_le_bytes());
        }
        Value::F32(number) => {
            begin(&[kind::F32], None);
            to.extend(number.to_le_bytes());
        }
        Value::Bool(flag) => {
            begin(&[kind::BOOL], None);
            to.push(u8::from(*flag));
        }
        Value::Text(value) => {
            begin(&[kind::TEXT], None);
            text(to, value);
        }
        Value::Bytes(bytes) => {
            begin(&[kind::ARRAY, kind::U8], Some(bytes.len()));
            to.extend(bytes);
        }
        Value::I32s(numbers) => {
            begin(&[kind::ARRAY, kind::I32], Some(numbers.len()));
            to.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
        Value::F32s(numbers) => {
            begin(&[kind::ARRAY, kind::F32], Some(numbers.len()));
            to.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
        Value::Texts(texts) => {
            begin(&[kind::ARRAY, kind::TEXT], Some(texts.len()));
            texts.iter().for_each(|value| text(to, value));
        }
    }
}

/// `GGML_TYPE_*`.
fn number_of(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Q8_0 => 8,
        Dtype::BF16 => 30,
        Dtype::Int8 => unreachable!("refused before"),
    }
}
