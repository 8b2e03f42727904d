//! Products and sums that a driver may contract into one operation.
//!
//! "mul/add sequences with no rounding modifiers may be optimized to use fused-multiply-add instructions on the target device" (PTX ISA, `add`).
//! The driver's compiler does this after PTX, where it cannot be observed. Results that need certain bits have to hold either way.

use std::collections::HashMap;

use crate::pieces::Piece;

/// The products that are contracted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contraction {
    /// None. Each product whose instruction stands alone in the PTX is rounded before it is added.
    Nowhere,
    /// All except those whose instruction names its rounding (`mul.rn.f32`), as a card may do.
    Everywhere,
}

/// Contracts each sum with a product of the same function, unless one of them names its rounding.
pub(crate) fn contract(pieces: &mut [Piece]) {
    let mut from = 0;
    while from < pieces.len() {
        let mut depth = 0;
        let mut end = from;
        // A function, or the text before the next one.
        while end < pieces.len() {
            match pieces[end] {
                Piece::Open(_) => depth += 1,
                Piece::Close(_) => depth -= 1,
                _ => {}
            }
            end += 1;
            if depth == 0 && matches!(pieces[end - 1], Piece::Close(_)) {
                break;
            }
        }
        contract_function(&mut pieces[from..end]);
        from = end;
    }
}

/// Splits `mul.f32 %f3, %f1, %f2` into its opcode and operands.
fn parts(text: &str) -> Option<(&str, Vec<&str>)> {
    let (opcode, operands) = text.trim().split_once(char::is_whitespace)?;
    Some((opcode, operands.split(',').map(str::trim).collect()))
}

fn contract_function(pieces: &mut [Piece]) {
    let mut definitions: HashMap<String, usize> = HashMap::new();
    let statements = || {
        pieces.iter().filter_map(|piece| match piece {
            Piece::Statement(_, text) => Some(text.as_str()),
            _ => None,
        })
    };
    for text in statements() {
        let text = match text.strip_prefix('@') {
            Some(guarded) => guarded.split_once(char::is_whitespace).map_or("", |(_, rest)| rest),
            None => text,
        };
        // Counts more than the results: an operand that is counted as a result only prevents a contraction.
        if let Some((opcode, operands)) = parts(text) {
            let results = if opcode.starts_with("ld.") || opcode.starts_with("mma.") { operands.len() } else { 1 };
            for operand in &operands[..results.min(operands.len())] {
                *definitions.entry(operand.trim_matches(['{', '}', ' ']).to_owned()).or_default() += 1;
            }
        }
    }
    // An operand that is written once has the same value at the sum as at the product.
    let stays = |operand: &str| !operand.starts_with('%') || definitions.get(operand) == Some(&1);
    // The operands of a product, by its result. A register is an f32's or an f64's.
    let mut products: HashMap<String, [String; 2]> = HashMap::new();
    for (opcode, operands) in statements().filter_map(parts) {
        if matches!(opcode, "mul.f32" | "mul.f64") && operands.iter().all(|operand| stays(operand)) {
            products.insert(operands[0].to_owned(), [operands[1].to_owned(), operands[2].to_owned()]);
        }
    }
    for piece in pieces {
        let Piece::Statement(_, text) = piece else { continue };
        let Some((opcode, operands)) = parts(text) else { continue };
        let (is_sum, kind) = match opcode.split_once('.') {
            Some(("add", kind @ ("f32" | "f64"))) => (true, kind),
            Some(("sub", kind @ ("f32" | "f64"))) => (false, kind),
            _ => continue,
        };
        // These are not instructions of PTX: the header has functions of these names.
        let (name, [a, b], other) = match (products.get(operands[1]), products.get(operands[2])) {
            (Some(product), _) => (if is_sum { "product.plus" } else { "product.minus" }, product, operands[2]),
            (None, Some(product)) => (if is_sum { "product.plus" } else { "minus.product" }, product, operands[1]),
            (None, None) => continue,
        };
        *text = format!("{name}.{kind} {}, {a}, {b}, {other}", operands[0]);
    }
}
