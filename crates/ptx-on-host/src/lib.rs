//! Translates PTX to C++: the text that a card's driver gets, compiled for the host.
//!
//! nvcc turns CUDA C++ into PTX, and the driver turns PTX into a card's instructions. Tests of kernels that are compiled for the host from
//! their C++ cover neither inline assembler, which only nvcc sees, nor nvcc's translation of the rest. [`translate`] takes the PTX itself.
//! Registers become variables, and each instruction becomes a call of a function of its name: `add.s32 %r3, %r1, %r2` is `r3 = add_s32(r1,
//! r2)`. Instructions of a whole warp or block get their line, too. A header that the C++ includes has these functions. So this crate knows
//! the syntax and the header the meaning, and an instruction that the header lacks does not compile.
//!
//! The syntax is the part that nvcc writes for C++ and for inline assembler: functions, parameters, constants, labels, branches,
//! predicates, vectors, and calls (Parallel Thread Execution ISA, 9.0). Any other syntax is an error with its line.
//!
//! Names that the header has:
//!
//! - `check_aligned(address, bytes)` for the memory that an instruction loads or stores, then `load<T, Space::S>(address)` or
//!   `store<T, Space::S>(address, value)` for each of its elements;
//! - `shared_symbol()`, the address of the shared memory that a launch asks for;
//! - `PTX_KERNEL(name, source, threads, sizes)`, which registers the function of this name as a kernel.

mod contraction;
mod instruction;
mod module;
mod pieces;

pub use contraction::Contraction;
pub use module::translate;

/// A text that this crate cannot translate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The line in the PTX, from 1.
    pub line: usize,
    /// The problem.
    pub problem: String,
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {}", self.line, self.problem)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests;
