//! Lists that need nothing but the program itself: config keys and shell completions.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Cli;
use crate::config::keys;

/// Every config key with its default, what it may be and its meaning.
pub fn keys() -> String {
    keys::by_section(|key, name| {
        format!("{:<36} # {} ({})", format!("{name} = {}", key.default), key.meaning, key.expected())
    })
}

/// A completion script.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "train_low_mem", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
