//! The command `train_low_mem`, which trains T5 inside a byte budget.
//!
//! The program calls [`main`]. It reads the command line (`cli`: flags as typed) and the config (`config`: their meaning), opens the named
//! files (`run::open`), and builds the job (`job`). Then it asks the planner for a plan, passes plain numbers to the other crates, and runs
//! the loop. Start reading at `run::train`: the loop is one screen.
//!
//! A folder is a subject, and imports only those above it: `screen`, `files`, `machine`, `model`, `data`, `cli`, `scores`, `run`, `answers`,
//! `commands`.
//!
//! Architecture invariant: this crate contains no algorithm. It is the only crate that knows the policy, the command line and the config,
//! and the only one that prints.

mod answers;
mod cli;
mod commands;
mod data;
mod files;
mod machine;
mod model;
pub mod parsers;
mod run;
mod scores;
mod screen;

use std::io::Write;
use std::panic::{PanicHookInfo, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use cli::{Cli, Command, Typed};
use failure::{Failure, Outcome};
use machine::processes;
use run_plan::{config, failure, job, remedies};
use screen::{output, report, stop, warnings};

/// Required stack of the main thread. A lower limit (`ulimit -s`) does not affect other threads.
const STACK_BYTES: u64 = 2 << 20;

/// The whole program: reads the arguments, runs the command, and returns the exit code. The caller's allocator is [`heap::Allocator`].
pub fn main() -> ExitCode {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack).current;
    if limit.is_none_or(|bytes| bytes >= STACK_BYTES) {
        return run_and_say();
    }
    let thread = std::thread::Builder::new().name("main".into()).stack_size(8 << 20);
    match thread.spawn(run_and_say).map(std::thread::JoinHandle::join) {
        Ok(ended) => ended.unwrap_or(ExitCode::FAILURE),
        Err(error) => {
            let kib = limit.unwrap_or(0) >> 10;
            let said = format!(
                "the stack is limited to {kib} KiB, and a thread with a larger stack cannot be started: {error}"
            );
            report::error(&Failure::internal(said).hint("`ulimit -s 2048` is enough"));
            Failure::internal("").exit.into()
        }
    }
}

/// Runs the command from its arguments to its exit code.
fn run_and_say() -> ExitCode {
    warnings::listen();
    heap::disable_huge_pages();
    heap::return_small_pages_soon();
    heap::on_allocation_failure(out_of_memory);
    stop::ignore_sigxfsz();
    heap::exit_on_sigbus(
        failure::Exit::Internal as u8,
        "checkpoints are intact: resume a run from the newest with `--keep-training`, or run another command again",
    );
    std::panic::set_hook(Box::new(remember_panic));
    let outcome = catch_unwind(|| match cli::parse(std::env::args_os())? {
        Typed::Command(cli) => {
            start_threads(cli.threads.map(usize::from))?;
            run(*cli)
        }
        Typed::Help(help) => {
            // Coloured on a terminal only. If the reader has gone, that is no error.
            let _ = help.print();
            Ok(())
        }
    });
    let outcome = outcome.unwrap_or_else(|_| Err(our_bug()));
    stop::claim_process_exit();
    let code = match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            report::error(&failure);
            failure.exit.into()
        }
    };
    output::drain();
    code
}

/// Starts the threads that compute.
fn start_threads(asked: Option<usize>) -> Outcome<()> {
    let threads = t5_ops::join_threads(processes::threads(asked)?);
    if threads.given < threads.wanted {
        report::warn(&format!(
            "the system allows {} of {} threads; check limits such as `ulimit -u` and pids.max",
            threads.given, threads.wanted
        ));
    }
    Ok(())
}

/// Ends the process if the system refuses memory, because the caller cannot continue without it. Allocates nothing.
fn out_of_memory(bytes: usize) {
    const HINTS: &str = "hint: the machine or a limit (`ulimit -v`, `ulimit -d`) leaves less memory than planned; try a \
        smaller `--memory-budget`\nhint: checkpoints are intact: resume from the newest with `--keep-training`";
    let mut text = [0; 512];
    let mut rest = &mut text[..];
    let _ = writeln!(rest, "error: out of memory: the system refused {bytes} bytes\n{HINTS}");
    let left = rest.len();
    output::write_stderr_now(&text[..text.len() - left]);
    signal_hook::low_level::exit(failure::Exit::DoesNotFit as i32);
}

/// Message and place of the last panic. A panic that is caught and converted to an error is not shown.
static LAST_PANIC: Mutex<Option<String>> = Mutex::new(None);

fn remember_panic(panic: &PanicHookInfo<'_>) {
    let place =
        panic.location().map_or_else(String::new, |location| format!("{}:{}: ", location.file(), location.line()));
    let said = panic.payload_as_str().unwrap_or("no message");
    *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{place}{said}"));
}

fn our_bug() -> Failure {
    let said = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner).take();
    Failure::internal(format!("internal error: {}", said.unwrap_or_default()))
        .hint("this is a bug in train_low_mem; please report it with the command and its resolved.toml")
        .hint("checkpoints are intact: resume from the newest with `--keep-training`")
}

fn run(cli: Cli) -> Outcome<()> {
    let Cli { train: flags, command, threads } = cli;
    match command {
        None => run::train::train(&flags),
        Some(Command::Train(flags)) => run::train::train(&flags),
        Some(Command::Plan(flags)) => commands::plan::plan(&flags),
        Some(Command::Eval(flags)) => commands::eval::eval(&flags),
        Some(Command::Generate(flags)) => commands::generate::generate(&flags.with_model()?),
        Some(Command::Embed(flags)) => commands::embed::embed(&flags),
        Some(Command::Score(flags)) => commands::score::score(&flags),
        Some(Command::Chat(flags)) => commands::chat::chat(&flags),
        Some(Command::Serve(flags)) => commands::serve::serve(&flags),
        Some(Command::Inspect(flags)) => commands::inspect::inspect(&flags),
        Some(Command::Convert(flags)) => commands::convert::convert(&flags),
        Some(Command::ConvertBase(flags)) => commands::convert_base::convert_base(&flags),
        Some(Command::Doctor(flags)) => commands::doctor::doctor(&flags),
        Some(Command::Export(flags)) => commands::export::export(&flags),
        Some(Command::Merge(flags)) => commands::merge::merge(&flags),
        Some(Command::Average(flags)) => commands::average::average(&flags),
        Some(Command::TrainTokenizer(flags)) => commands::train_tokenizer::train_tokenizer(&flags),
        Some(Command::TrimVocab(flags)) => commands::trim_vocab::trim_vocab(&flags),
        Some(Command::AddTokens(flags)) => commands::add_tokens::add_tokens(&flags),
        Some(Command::Bench(flags)) => commands::bench::bench(&flags),
        Some(Command::Report(flags)) => commands::report::report(&flags),
        Some(Command::Proof(flags)) => commands::proof::proof(&flags),
        Some(Command::Watch(flags)) => commands::watch::watch(&flags),
        Some(Command::Jobs(flags)) => commands::jobs::jobs(&flags, threads),
        Some(Command::Keys) => report::result(&commands::listing::keys()),
        Some(Command::Completions { shell }) => report::result(&commands::listing::completions(shell)),
    }
}
