//! Lists that need only the program itself: config keys and shell completions.

use clap::builder::PossibleValue;
use clap::{Command, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::config::keys::{self, KEYS, Key};

/// Every config key with its default, its accepted values and its meaning.
pub fn keys() -> String {
    keys::by_section(|key, name| {
        format!("{:<36} # {} ({})", format!("{name} = {}", key.default), key.meaning, key.expected())
    })
}

/// A completion script.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut shown(&Cli::command()), "train_low_mem", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    match shell {
        // A key ends with `=`, and its value follows without a space.
        Shell::Bash => script.replace(" --set)\n", " --set)\n                    compopt -o nospace\n"),
        _ => script,
    }
}

/// A command without hidden flags, and with the config's keys as values of `--set`.
fn shown(command: &Command) -> Command {
    let arguments =
        command.get_arguments().filter(|argument| !argument.is_hide_set()).map(|argument| match argument.get_long() {
            Some("set") => argument.clone().value_parser(KEYS.iter().map(assignment).collect::<Vec<_>>()),
            _ => argument.clone(),
        });
    let mut shown = Command::new(leaked(command.get_name())).args(arguments);
    if let Some(about) = command.get_about() {
        shown = shown.about(about.clone());
    }
    if let Some(version) = command.get_version() {
        shown = shown.version(leaked(version));
    }
    shown.subcommands(command.get_subcommands().filter(|command| !command.is_hide_set()).map(self::shown))
}

/// The beginning of an assignment to a key.
fn assignment(key: &Key) -> PossibleValue {
    PossibleValue::new(leaked(&format!("{}=", key.name))).help(key.meaning)
}

/// clap stores text for the life of the process, which ends after it has printed the script.
fn leaked(text: &str) -> &'static str {
    text.to_owned().leak()
}
