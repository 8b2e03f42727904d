//! Translation of functions, their parameters, and named memory.

use std::fmt::Write as _;

use crate::Error;
use crate::contraction::{self, Contraction};
use crate::instruction;
use crate::pieces::{Piece, error, pieces};

/// Named memory: `.param .align 8 .b8 NAME[32]` has 32 bytes.
struct Memory {
    name: String,
    bytes: usize,
    values: Option<String>,
}

/// Returns C++ with the functions of `ptx`. `source` is the name of its source file without the ending; the C++ includes `header`.
///
/// # Errors
/// Syntax that nvcc does not write, with its line.
pub fn translate(ptx: &str, source: &str, header: &str, contraction: Contraction) -> Result<String, Error> {
    let mut out = format!("// From {source}.ptx. Do not edit.\n#include \"{header}\"\n\n");
    let mut pieces = pieces(ptx)?;
    if contraction == Contraction::Everywhere {
        contraction::contract(&mut pieces);
    }
    let mut rest = pieces.into_iter().peekable();
    let mut kernels = Vec::new();
    while let Some(piece) = rest.next() {
        let (line, text) = match piece {
            Piece::Statement(line, text) => (line, text),
            Piece::Open(line) | Piece::Close(line) => return Err(error(line, "a brace outside of a function")),
            Piece::Label(name) => return Err(error(0, format!("the label {name} outside of a function"))),
        };
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[0] {
            ".version" | ".target" | ".address_size" => {}
            ".extern" if words.contains(&".shared") => {
                let name = memory(line, &text)?.name;
                writeln!(out, "static const uint32_t {name} = shared_symbol();").expect("a string");
            }
            ".const" | ".global" => {
                let Memory { name, bytes, values } = memory(line, &text)?;
                let values = values.ok_or_else(|| error(line, format!("{name} has no values")))?;
                writeln!(out, "alignas(16) static const uint8_t {name}[{bytes}] = {{{values}}};\nstatic const Constant constant_{name}({name}, {bytes});")
                    .expect("a string");
            }
            ".func" | ".visible" | ".entry" => {
                let is_kernel = words.contains(&".entry");
                let head = Head::parse(line, &text)?;
                if is_kernel {
                    writeln!(out, "\nstatic void {}(void** arguments)", head.name)
                } else {
                    writeln!(out, "\nstatic void {}({})", head.name, head.parameters_of_function())
                }
                .expect("a string");
                if matches!(rest.peek(), Some(Piece::Open(_))) {
                    let parameters = if is_kernel { head.parameters_of_kernel() } else { String::new() };
                    body(&mut rest, &mut out, &parameters)?;
                    if is_kernel {
                        kernels.push(head);
                    }
                } else {
                    // Only declared.
                    out.truncate(out.trim_end().len());
                    out.push_str(";\n");
                }
            }
            other => return Err(error(line, format!("expected a function or memory, got {other}"))),
        }
    }
    out.push('\n');
    for head in kernels {
        let sizes: Vec<String> = head.parameters.iter().map(|memory| memory.bytes.to_string()).collect();
        let threads = head.threads.ok_or_else(|| error(head.line, format!("{} has no .maxntid", head.name)))?;
        let name = head.name;
        writeln!(out, "PTX_KERNEL({name}, \"{source}\", {threads}, {{{}}})", sizes.join(", ")).expect("a string");
    }
    Ok(out)
}

/// The text before the braces of a function.
struct Head {
    line: usize,
    name: String,
    result: Option<Memory>,
    parameters: Vec<Memory>,
    threads: Option<usize>,
}

impl Head {
    fn parse(line: usize, text: &str) -> Result<Self, Error> {
        let malformed = || error(line, "a function whose parameters are not in brackets");
        let (is_entry, after) = match text.split_once(".entry") {
            Some((_, after)) => (true, after),
            None => (false, text.split_once(".func").ok_or_else(malformed)?.1),
        };
        let mut after = after.trim_start();
        let mut result = None;
        if !is_entry && after.starts_with('(') {
            let (inside, rest) = after[1..].split_once(')').ok_or_else(malformed)?;
            result = Some(memory(line, inside)?);
            after = rest.trim_start();
        }
        let end = after.find(|c: char| c == '(' || c.is_whitespace()).unwrap_or(after.len());
        let name = after[..end].to_owned();
        let mut parameters = Vec::new();
        let mut behind = &after[end..];
        if let Some((_, inside)) = behind.split_once('(') {
            let (inside, rest) = inside.split_once(')').ok_or_else(malformed)?;
            for parameter in inside.split(',').map(str::trim).filter(|parameter| !parameter.is_empty()) {
                parameters.push(memory(line, parameter)?);
            }
            behind = rest;
        }
        let threads = behind.split_once(".maxntid").and_then(|(_, counts)| {
            counts.trim_start().split(|c: char| !c.is_ascii_digit()).next().and_then(|count| count.parse().ok())
        });
        Ok(Self { line, name, result, parameters, threads })
    }

    fn parameters_of_function(&self) -> String {
        let result = self.result.iter().map(|memory| format!("uint8_t* {}", memory.name));
        let parameters = self.parameters.iter().map(|memory| format!("const uint8_t* {}", memory.name));
        result.chain(parameters).collect::<Vec<_>>().join(", ")
    }

    fn parameters_of_kernel(&self) -> String {
        let line = |(at, memory): (usize, &Memory)| {
            format!("const uint8_t* const {} = static_cast<const uint8_t*>(arguments[{at}]);\n", memory.name)
        };
        self.parameters.iter().enumerate().map(line).collect()
    }
}

/// The name, the bytes and the values of `.param .align 8 .b8 NAME[32] = {..}`.
fn memory(line: usize, text: &str) -> Result<Memory, Error> {
    let (declaration, values) = match text.split_once('=') {
        Some((declaration, values)) => {
            let values = values.trim().trim_start_matches('{').trim_end_matches('}');
            (declaration, Some(values.to_owned()))
        }
        None => (text, None),
    };
    let words: Vec<&str> = declaration.split_whitespace().collect();
    let unknown = || error(line, format!("expected a type and a name, got `{declaration}`"));
    let (&last, types) = words.split_last().ok_or_else(unknown)?;
    let element =
        types.iter().rev().find_map(|word| instruction::bytes_of(word.trim_start_matches('.'))).ok_or_else(unknown)?;
    let (name, count) = match last.split_once('[') {
        Some((name, count)) => {
            let count = count.trim_end_matches(']');
            (name, if count.is_empty() { 0 } else { count.parse().map_err(|_| unknown())? })
        }
        None => (last, 1),
    };
    Ok(Memory { name: name.to_owned(), bytes: element * count, values })
}

/// A function from its `{` to its `}`. Scopes within it are scopes of C++.
fn body(
    rest: &mut std::iter::Peekable<impl Iterator<Item = Piece>>,
    out: &mut String,
    parameters: &str,
) -> Result<(), Error> {
    let mut depth = 0;
    let mut last = 0;
    for piece in rest {
        match piece {
            Piece::Open(line) => {
                last = line;
                depth += 1;
                out.push_str("{\n");
                if depth == 1 {
                    out.push_str(parameters);
                    out.push_str("uint32_t CC = 0;\n(void)CC;\n");
                }
            }
            Piece::Close(line) => {
                last = line;
                depth -= 1;
                out.push_str("}\n");
                if depth == 0 {
                    return Ok(());
                }
            }
            Piece::Label(name) => writeln!(out, "{name}:;").expect("a string"),
            Piece::Statement(line, text) => {
                last = line;
                statement(line, &text, out)?;
            }
        }
    }
    Err(error(last, "a function that does not end"))
}

fn statement(line: usize, text: &str, out: &mut String) -> Result<(), Error> {
    if !text.starts_with('.') {
        out.push_str(&instruction::translate(line, text)?);
        out.push('\n');
        return Ok(());
    }
    let (kind, names) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    match kind {
        ".pragma" => Ok(()),
        ".reg" => registers(line, names, out),
        ".local" | ".param" => {
            let Memory { name, bytes, .. } = memory(line, text)?;
            writeln!(out, "alignas(16) uint8_t {name}[{bytes}];").expect("a string");
            Ok(())
        }
        other => Err(error(line, format!("expected .reg, .local or .param within a function, got {other}"))),
    }
}

/// Translates `.reg .b32 %r<12>` or `.reg .u32 %a, %b` to variables without a value, as a jump may pass them.
fn registers(line: usize, text: &str, out: &mut String) -> Result<(), Error> {
    let (kind, names) =
        text.trim().split_once(char::is_whitespace).ok_or_else(|| error(line, "registers without names"))?;
    let kind = match kind {
        ".pred" => "bool",
        other => match instruction::bytes_of(other.trim_start_matches('.')) {
            Some(2) => "uint16_t",
            Some(4) => "uint32_t",
            Some(8) => "uint64_t",
            _ => return Err(error(line, format!("no registers are {other}"))),
        },
    };
    for name in names.split(',').map(|name| name.trim().trim_start_matches('%')) {
        let Some((name, count)) = name.split_once('<') else {
            writeln!(out, "{kind} {name};").expect("a string");
            continue;
        };
        let count: usize =
            count.trim_end_matches('>').parse().map_err(|_| error(line, format!("no number of registers: {count}")))?;
        for i in 0..count {
            write!(out, "{}{name}{i}", if i == 0 { format!("{kind} ") } else { ", ".to_owned() }).expect("a string");
        }
        out.push_str(";\n");
    }
    Ok(())
}
