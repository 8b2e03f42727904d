//! Translation of one instruction.

use crate::Error;
use crate::pieces::error;

/// The bytes of a type, such as 4 for `f32`.
pub(crate) fn bytes_of(kind: &str) -> Option<usize> {
    match kind {
        "b8" | "u8" | "s8" => Some(1),
        "b16" | "u16" | "s16" => Some(2),
        "b32" | "u32" | "s32" | "f32" => Some(4),
        "b64" | "u64" | "s64" | "f64" => Some(8),
        _ => None,
    }
}

/// Translates `@%p1 add.s32 %r3, %r1, 4` to a statement of C++.
pub(crate) fn translate(line: usize, text: &str) -> Result<String, Error> {
    let text = text.trim();
    if let Some(guarded) = text.strip_prefix('@') {
        let (predicate, rest) =
            guarded.split_once(char::is_whitespace).ok_or_else(|| error(line, "a predicate without an instruction"))?;
        let (not, predicate) = match predicate.strip_prefix('!') {
            Some(predicate) => ("!", predicate),
            None => ("", predicate),
        };
        return Ok(format!("if ({not}{}) {{ {} }}", operand(line, predicate)?, translate(line, rest)?));
    }
    let (opcode, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let operands = operands_of(line, operands)?;
    let parts: Vec<&str> = opcode.split('.').collect();
    match parts[0] {
        "ret" | "exit" => Ok("return;".to_owned()),
        "bra" => Ok(format!("goto {};", only(line, &operands)?)),
        "call" => call(line, &operands),
        "ld" | "st" => load_or_store(line, &parts, &operands),
        "mov" if operands.iter().any(|operand| operand.starts_with('{')) => move_parts(line, &operands),
        _ => function(line, opcode, &operands),
    }
}

/// Splits operands at commas; a vector is one operand.
fn operands_of(line: usize, text: &str) -> Result<Vec<String>, Error> {
    let mut operands = vec![String::new()];
    let mut depth = 0;
    for c in text.chars() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                operands.push(String::new());
                continue;
            }
            _ => {}
        }
        operands.last_mut().expect("one at least").push(c);
    }
    let operands: Vec<String> = operands.into_iter().map(|operand| operand.trim().to_owned()).collect();
    if operands == [""] {
        return Ok(Vec::new());
    }
    if operands.iter().any(String::is_empty) {
        return Err(error(line, format!("an operand is missing: {text}")));
    }
    Ok(operands)
}

fn only(line: usize, operands: &[String]) -> Result<&str, Error> {
    match operands {
        [one] => Ok(one),
        _ => Err(error(line, format!("expected one operand, got {}", operands.len()))),
    }
}

/// A register, a number, a symbol, or a register that differs by thread.
fn operand(line: usize, text: &str) -> Result<String, Error> {
    let unknown = || error(line, format!("no operand of PTX: {text}"));
    if let Some(register) = text.strip_prefix('%') {
        return Ok(match register.split_once('.') {
            Some((kind @ ("tid" | "ntid" | "ctaid" | "nctaid"), side @ ("x" | "y" | "z"))) => {
                format!("{kind}_{side}()")
            }
            Some(_) => return Err(unknown()),
            None => register.to_owned(),
        });
    }
    // The bits of a number.
    for (prefix, digits, suffix) in [("0f", 8, "u"), ("0F", 8, "u"), ("0d", 16, "ull"), ("0D", 16, "ull")] {
        if let Some(bits) = text.strip_prefix(prefix).filter(|bits| bits.len() == digits) {
            return Ok(format!("0x{bits}{suffix}"));
        }
    }
    if text.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
        let number: i128 = text.parse().map_err(|_| unknown())?;
        // The least number of 64 bits is not a literal.
        return Ok(if number < i128::from(i32::MIN) || number > i128::from(i32::MAX) {
            format!("0x{:x}ull", number as u64)
        } else {
            number.to_string()
        });
    }
    if text == "_" || !text.starts_with(|c: char| c.is_alphabetic() || c == '_' || c == '$') {
        return Err(unknown());
    }
    Ok(format!("symbol({text})"))
}

/// The target of a result: a register, a variable that a scope declares without `%`, or nothing.
fn target(line: usize, text: &str) -> Result<String, Error> {
    let name = text.strip_prefix('%').unwrap_or(text);
    if name == "_" {
        return Ok("Nowhere()".to_owned());
    }
    if !name.starts_with(|c: char| c.is_alphabetic()) || name.contains(|c: char| !c.is_alphanumeric() && c != '_') {
        return Err(error(line, format!("expected a register for a result, got {text}")));
    }
    Ok(name.to_owned())
}

/// The parts of `{%r1, %r2}`.
fn vector(line: usize, text: &str) -> Result<Vec<&str>, Error> {
    let inside = text.strip_prefix('{').and_then(|text| text.strip_suffix('}'));
    Ok(inside.ok_or_else(|| error(line, format!("expected a vector, got {text}")))?.split(',').map(str::trim).collect())
}

/// The number that `[%rd1+8]` stands for.
fn address(line: usize, text: &str) -> Result<String, Error> {
    let inside = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let inside = inside.ok_or_else(|| error(line, format!("expected an address in brackets, got {text}")))?;
    Ok(match inside.split_once('+') {
        Some((base, offset)) => format!("{} + ({})", operand(line, base.trim())?, offset.trim()),
        None => operand(line, inside.trim())?,
    })
}

/// The space, the number of elements and their C++ type in an opcode such as `ld.global.v4.f32`.
fn memory_of(line: usize, parts: &[&str]) -> Result<(&'static str, usize, String), Error> {
    let (mut space, mut count) = ("Space::Generic", 1);
    let (&kind, between) = parts.split_last().expect("an opcode");
    for &part in &between[1..] {
        match part {
            "global" => space = "Space::Global",
            "shared" => space = "Space::Shared",
            "local" => space = "Space::Local",
            "param" => space = "Space::Param",
            "const" => space = "Space::Const",
            // Where a card caches the value; it says that nothing writes to it meanwhile.
            "nc" => {}
            "v2" => count = 2,
            "v4" => count = 4,
            other => return Err(error(line, format!("no way to load or store is known as .{other}"))),
        }
    }
    let bytes = bytes_of(kind).ok_or_else(|| error(line, format!("no type is known as .{kind}")))?;
    Ok((space, count, format!("{}int{}_t", if kind.starts_with('s') { "" } else { "u" }, bytes * 8)))
}

/// `ld` reads registers from an address, `st` writes them there: one element, or those of a vector.
fn load_or_store(line: usize, parts: &[&str], operands: &[String]) -> Result<String, Error> {
    let (space, count, kind) = memory_of(line, parts)?;
    let [to, from] = operands else { return Err(error(line, "a load or a store has two operands")) };
    let is_load = parts[0] == "ld";
    let (registers, place) = if is_load { (to, from) } else { (from, to) };
    let place = address(line, place)?;
    let element = |register: &str, at: &str| {
        Ok(if is_load {
            format!("{} = load<{kind}, {space}>({at});", target(line, register)?)
        } else {
            format!("store<{kind}, {space}>({at}, {});", operand(line, register)?)
        })
    };
    let check = format!("check_aligned({place}, sizeof({kind}) * {count});");
    if count == 1 {
        return Ok(format!("{check} {}", element(registers, &place)?));
    }
    // The address register may also be an element.
    let mut out = format!("{{ uint64_t at = {place}; {check}");
    for (i, register) in vector(line, registers)?.into_iter().enumerate() {
        out += &format!(" {}", element(register, &format!("at + sizeof({kind}) * {i}"))?);
    }
    Ok(out + " }")
}

/// `mov.b64 {%r1, %r2}, %rd1` and the reverse: the first part is the lower one.
fn move_parts(line: usize, operands: &[String]) -> Result<String, Error> {
    let [to, from] = operands else { return Err(error(line, "a move has two operands")) };
    if to.starts_with('{') {
        let from = operand(line, from)?;
        let mut out = format!("{{ auto whole = {from};");
        let parts = vector(line, to)?;
        for (i, part) in parts.iter().enumerate() {
            out += &format!(" {} = part<{i}, {}>(whole);", target(line, part)?, parts.len());
        }
        return Ok(out + " }");
    }
    let parts: Result<Vec<String>, Error> = vector(line, from)?.into_iter().map(|part| operand(line, part)).collect();
    Ok(format!("{} = whole({});", target(line, to)?, parts?.join(", ")))
}

/// Translates the operands `(retval0), function, (param0, param1)` of a call.
fn call(line: usize, operands: &[String]) -> Result<String, Error> {
    let name = operands
        .iter()
        .find(|operand| !operand.starts_with('('))
        .ok_or_else(|| error(line, "a call without a function"))?;
    let inside = |operand: &String| operand.trim_start_matches('(').trim_end_matches(')').trim().to_owned();
    let arguments: Vec<String> = operands.iter().filter(|operand| operand.starts_with('(')).map(inside).collect();
    Ok(format!("{name}({});", arguments.join(", ")))
}

/// Any other instruction: a function of its name. Results come first, as the first operand and the parts of a pair.
fn function(line: usize, opcode: &str, operands: &[String]) -> Result<String, Error> {
    let name = opcode.replace('.', "_");
    let mut arguments = Vec::new();
    // Instructions without a result, and those that many threads execute together.
    let (mut result, mut given) = (String::new(), operands);
    let gives_nothing = ["bar.", "cp.async"].iter().any(|prefix| opcode.starts_with(prefix));
    let is_together =
        ["bar.", "shfl.", "mma.", "ldmatrix.", "cp.async."].iter().any(|prefix| opcode.starts_with(prefix));
    if is_together {
        arguments.push(format!("{line}"));
    }
    let has_carry =
        opcode.contains(".cc.") || ["addc.", "subc.", "madc."].iter().any(|prefix| opcode.starts_with(prefix));
    if has_carry {
        arguments.push("CC".to_owned());
    }
    if !gives_nothing {
        let (to, from) = operands.split_first().ok_or_else(|| error(line, format!("{opcode} without operands")))?;
        given = from;
        if to.starts_with('{') {
            for part in vector(line, to)? {
                arguments.push(target(line, part)?);
            }
        } else if let Some((to, predicate)) = to.split_once('|') {
            result = format!("{} = ", target(line, to)?);
            arguments.push(target(line, predicate)?);
        } else {
            result = format!("{} = ", target(line, to)?);
        }
    }
    for operand_text in given {
        if operand_text.starts_with('{') {
            for part in vector(line, operand_text)? {
                arguments.push(operand(line, part)?);
            }
        } else if operand_text.starts_with('[') {
            arguments.push(address(line, operand_text)?);
        } else {
            arguments.push(operand(line, operand_text)?);
        }
    }
    Ok(format!("{result}{name}({});", arguments.join(", ")))
}
