//! `train_low_mem`: trains T5 inside a byte budget.
//!
//! This crate is the command: it reads the command line ([`cli`]) and the config ([`config`]), asks the
//! policy for a plan, hands plain numbers to the parts, runs the loop and reports. It contains no
//! algorithm.

mod cli;
mod config;
mod failure;
mod listing;

use std::process::ExitCode;

use cli::{Cli, Command, Typed};
use failure::{Failure, Outcome};

fn main() -> ExitCode {
    match cli::parse(std::env::args_os()).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            failure.exit.into()
        }
    }
}

fn run(typed: Typed) -> Outcome<()> {
    let cli = match typed {
        Typed::Command(cli) => cli,
        Typed::Help(help) => {
            // Coloured on a terminal only; a reader that went away is no error.
            let _ = help.print();
            return Ok(());
        }
    };
    let Cli { command, .. } = *cli;
    match command {
        Some(Command::Keys) => print!("{}", listing::keys()),
        Some(Command::Completions { shell }) => print!("{}", listing::completions(shell)),
        _ => {
            return Err(Failure::internal("this command is not wired yet")
                .hint("`keys` and `completions` are"));
        }
    }
    Ok(())
}
