//! A command line that clap refuses, in the program's own words.

use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue};

use crate::config::{aliases, keys};
use crate::failure::Failure;

/// clap's message in the program's own form: one `error:` and a `hint:`.
pub fn failure(error: &clap::Error, command: &str) -> Failure {
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
            return Failure::usage(format!("unexpected argument `{word}`"))
                .hint(format!("files with rows need a flag: `--data {word}`"));
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

/// The command that the arguments name: `train_low_mem generate`.
pub fn command_of(mut command: Command, arguments: &[OsString]) -> String {
    let mut name = "train_low_mem".to_owned();
    for argument in arguments.iter().skip(1) {
        let Some(found) = command.find_subcommand(argument).cloned() else { break };
        name = format!("{name} {}", found.get_name());
        command = found;
    }
    name
}
