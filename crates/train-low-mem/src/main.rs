//! The program `train_low_mem`: the command and its allocator.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

fn main() -> ExitCode {
    command::main()
}
