//! Mutations of JSON. Any value becomes an extreme number, a long or odd string, another type, or a nest of lists; keys
//! are added and removed, and trees of other inputs are grafted in.

use dataloader::Stream;
use serde_json::{Map, Number, Value, json};

use crate::bytes::{EDGES, below, one};

/// Strings that often break regular expressions, paths, names and templates.
const STRINGS: [&str; 22] = [
    "",
    " ",
    "\u{0}",
    "..",
    "/",
    "../model.safetensors",
    "(a+)+$",
    "(.*)*x",
    "(?:)",
    "(?=a)*",
    "((((((((((",
    "a{0,65535}",
    "(a{1000}){1000}",
    "\\p{Han}{500}{500}",
    "[^\\s\\S]*",
    "\\1",
    "▁",
    "##",
    "$A </s> $B:1",
    "<extra_id_0>",
    "Ünï👩‍👩‍👧",
    "gated-gelu",
];

/// Depths of grafted nests; serde_json reads 128 levels.
const NESTS: [usize; 4] = [3, 60, 127, 2000];

/// Text in place of a number, for numbers that a JSON value cannot hold.
const ODD_NUMBERS: [&str; 10] =
    ["1e18", "-1", "1e308", "1e999", "-0.0", "0.5", "NaN", "18446744073709551616", "1e-320", "00"];

/// Changes the JSON in `bytes` once or a few times; `None` if it is not JSON.
pub(crate) fn mutate(bytes: &[u8], other: &[u8], stream: &mut Stream) -> Option<Vec<u8>> {
    let mut value: Value = serde_json::from_slice(bytes).ok()?;
    let graft: Value = serde_json::from_slice(other).unwrap_or_default();
    for _ in 0..1 + below(stream, 3) {
        mutate_value(&mut value, &graft, stream);
    }
    let mut text = value.to_string();
    if below(stream, 4) == 0 {
        odd_number(&mut text, stream);
    }
    if below(stream, 16) == 0 {
        let depth = *one(stream, &NESTS);
        text = format!("{}{text}{}", "[".repeat(depth), "]".repeat(depth));
    }
    Some(text.into_bytes())
}

fn mutate_value(value: &mut Value, graft: &Value, stream: &mut Stream) {
    let chosen = below(stream, size(value));
    let graft = nth(graft, below(stream, size(graft))).clone();
    let target = nth_mut(value, chosen);
    match below(stream, 12) {
        0 | 1 => *target = Value::Number(Number::from(*one(stream, &EDGES))),
        2 => *target = json!(*one(stream, &[-1.0, 0.5, 1e18, -1e300, 1e-310])),
        3 | 4 => *target = Value::String((*one(stream, &STRINGS)).to_owned()),
        5 => *target = Value::String(one(stream, &STRINGS).repeat(1 + below(stream, 2000))),
        6 => *target = one(stream, &[Value::Null, Value::Bool(true), json!([]), json!({}), json!([[]])]).clone(),
        7 => *target = graft,
        8 => remove_part(target, stream),
        9 => repeat_part(target, stream),
        10 => {
            if let Value::Object(object) = target {
                object.insert((*one(stream, &STRINGS)).to_owned(), graft);
            }
        }
        _ => shift_number(target, stream),
    }
}

fn remove_part(target: &mut Value, stream: &mut Stream) {
    match target {
        Value::Array(items) if !items.is_empty() => drop(items.remove(below(stream, items.len()))),
        Value::Object(object) => {
            if let Some(key) = object.keys().nth(below(stream, object.len())).cloned() {
                object.shift_remove(&key);
            }
        }
        Value::String(text) => text.clear(),
        _ => {}
    }
}

fn repeat_part(target: &mut Value, stream: &mut Stream) {
    let times = *one(stream, &[2, 50, 1000]);
    match target {
        Value::Array(items) if items.len() < 200 => {
            let all = items.clone();
            (1..times.min(20_000 / (all.len() + 1))).for_each(|_| items.extend(all.iter().cloned()));
        }
        Value::String(text) if text.len() < 200 => *text = text.repeat(times),
        Value::Object(object) if object.len() < 50 => {
            let renamed: Map<String, Value> =
                object.iter().map(|(key, value)| (format!("{key}{times}"), value.clone())).collect();
            object.extend(renamed);
        }
        _ => {}
    }
}

fn shift_number(target: &mut Value, stream: &mut Stream) {
    if let Some(number) = target.as_i64() {
        *target = json!(number.wrapping_add(*one(stream, &[-1, 1, 2, 64, 1 << 20, -1 << 40])));
    }
}

/// Replaces the digits of one number in the text.
fn odd_number(text: &mut String, stream: &mut Stream) {
    let from = text.floor_char_boundary(below(stream, text.len()));
    let Some(start) = text[from..].find(|letter: char| letter.is_ascii_digit()).map(|at| from + at) else { return };
    let length = text[start..].find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len() - start);
    text.replace_range(start..start + length, one::<&str>(stream, &ODD_NUMBERS));
}

/// The number of values in a tree, including the root.
fn size(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(size).sum(),
        Value::Object(object) => object.values().map(size).sum(),
        _ => 0,
    }
}

fn nth(value: &Value, at: usize) -> &Value {
    let parts: Box<dyn Iterator<Item = &Value>> = match value {
        _ if at == 0 => return value,
        Value::Array(items) => Box::new(items.iter()),
        Value::Object(object) => Box::new(object.values()),
        _ => return value,
    };
    let mut left = at - 1;
    for part in parts {
        match left.checked_sub(size(part)) {
            Some(rest) => left = rest,
            None => return nth(part, left),
        }
    }
    value
}

fn nth_mut(value: &mut Value, at: usize) -> &mut Value {
    if at == 0 || !(value.is_array() || value.is_object()) {
        return value;
    }
    let mut left = at - 1;
    let parts: Vec<&mut Value> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(object) => object.values_mut().collect(),
        _ => unreachable!("it is an array or an object"),
    };
    for part in parts {
        match left.checked_sub(size(part)) {
            Some(rest) => left = rest,
            None => return nth_mut(part, left),
        }
    }
    unreachable!("`at` is below the size of the tree")
}
