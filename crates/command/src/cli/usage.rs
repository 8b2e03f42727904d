//! A command line that clap refuses, in the program's own words.

use std::ffi::OsString;
use std::path::Path;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::config::{aliases, keys};
use crate::failure::Failure;

/// clap's message in the program's own form: one `error:` and a `hint:`.
fn failure(error: &clap::Error, command: &str) -> Failure {
    let text = error.render().to_string();
    let body = text.strip_prefix("error: ").unwrap_or(&text);
    let message: Vec<&str> = body.split("\n\n").next().unwrap_or(body).lines().map(str::trim).collect();
    let failure = Failure::usage(message.join(" "));
    let text_of = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let wrong = text_of(ContextKind::InvalidArg).or(text_of(ContextKind::InvalidSubcommand));
    let takes_keys: &dyn Fn(&str) -> bool = match command.rsplit(' ').next() {
        Some("train_low_mem" | "train" | "plan") => &|_| true,
        Some("eval") => {
            &|key| ["data.", "generation.", "memory.", "train.eval_"].iter().any(|part| key.starts_with(part))
        }
        _ => &|_| false,
    };
    if let Some(words) = wrong.and_then(|wrong| aliases::explained(wrong, takes_keys)) {
        return failure.hint(words);
    }
    if let Some(word) = wrong.filter(|wrong| !wrong.starts_with('-')) {
        if word.contains('=') {
            return failure.hint("every key needs a `--set` of its own: `--set a=1 --set b=2`");
        }
        if word.contains(['.', '/']) {
            let has = |name: &str| Path::new(word).join(name).exists();
            let hint = match ["resolved.toml", "config.json"].into_iter().any(has) {
                true => format!("a run or a model needs a flag: `--model {word}`"),
                false => format!("files with rows need a flag: `--data {word}`"),
            };
            return Failure::usage(format!("unexpected argument `{word}`")).hint(hint);
        }
    }
    let suggested = match error.get(ContextKind::SuggestedArg).or_else(|| error.get(ContextKind::SuggestedSubcommand)) {
        Some(ContextValue::String(nearest)) => Some(nearest.as_str()),
        Some(ContextValue::Strings(nearest)) => nearest.last().map(String::as_str),
        _ => None,
    };
    // A hidden flag is never suggested, and a distant one neither.
    let is_near = |nearest: &&str| {
        *nearest != "--machine" && wrong.is_some_and(|wrong| keys::likeness(nearest, wrong) >= keys::NEAR)
    };
    let own = wrong.filter(|_| takes_keys("train.epochs")).and_then(aliases::nearest);
    match suggested.filter(is_near).map(str::to_owned).or(own) {
        Some(nearest) => failure.hint(format!("did you mean `{nearest}`?")),
        None => failure.hint(format!("see `{command} --help`")),
    }
}

/// Every flag that the command does not have, in one error: a command line for another trainer is mended in one go. `values` finds what is
/// wrong with the values of the other flags.
pub fn failures(
    error: &clap::Error,
    mut program: Command,
    arguments: &[OsString],
    values: &dyn Fn(&[OsString]) -> Option<Failure>,
) -> Failure {
    program.build();
    let (name, command) = command_of(&program, arguments);
    let (unknown, known) = without_unknown(command, arguments);
    if error.kind() != ErrorKind::UnknownArgument || unknown.is_empty() {
        return failure(error, &name);
    }
    let of_values = values(&known);
    let of_flags = match unknown.as_slice() {
        [_] => failure(error, &name),
        several => {
            several.iter().fold(Failure::usage(format!("unexpected arguments: {}", listed(several))), |all, flag| {
                let alone: Vec<OsString> = known.iter().cloned().chain([flag.into()]).collect();
                let of_flag = program.clone().try_get_matches_from(alone).err().map(|error| failure(&error, &name));
                of_flag.into_iter().flat_map(|of| of.hints).fold(all, |all, hint| all.hint(format!("`{flag}`: {hint}")))
            })
        }
    };
    of_values.into_iter().fold(of_flags, Failure::and)
}

fn listed(flags: &[String]) -> String {
    flags.iter().map(|flag| format!("`{flag}`")).collect::<Vec<_>>().join(", ")
}

/// The long flags that a command does not have, and the arguments without them and their values.
fn without_unknown(command: &Command, arguments: &[OsString]) -> (Vec<String>, Vec<OsString>) {
    let is_known = |name: &str| {
        command.get_arguments().any(|argument| {
            argument.get_long() == Some(name) || argument.get_all_aliases().unwrap_or_default().contains(&name)
        })
    };
    let (mut unknown, mut known): (Vec<String>, Vec<OsString>) = (Vec::new(), Vec::new());
    let (mut is_left_out, mut are_values) = (false, false);
    for argument in arguments {
        let text = argument.to_string_lossy();
        are_values |= text == "--";
        if let Some(name) = text.strip_prefix("--").filter(|_| !are_values) {
            let name = name.split('=').next().unwrap_or(name);
            is_left_out = !is_known(name);
            if is_left_out && !unknown.iter().any(|flag| flag[2..] == *name) {
                unknown.push(format!("--{name}"));
            }
        } else {
            is_left_out &= !are_values && !text.starts_with('-');
        }
        if !is_left_out {
            known.push(argument.clone());
        }
    }
    (unknown, known)
}

/// The command that the arguments name, and its name: `train_low_mem generate`.
fn command_of<'a>(mut command: &'a Command, arguments: &[OsString]) -> (String, &'a Command) {
    let mut name = "train_low_mem".to_owned();
    for argument in arguments.iter().skip(1) {
        let Some(found) = command.find_subcommand(argument) else { break };
        name = format!("{name} {}", found.get_name());
        command = found;
    }
    (name, command)
}
