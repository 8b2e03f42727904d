//! Lists that need nothing but the program itself: config keys and shell completions.

use std::fmt::Write;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Cli;
use crate::config::keys::KEYS;

/// Every config key with its default, what it may be and its meaning.
pub fn keys() -> String {
    let mut text = String::new();
    let mut section = "";
    for key in KEYS {
        let (key_section, name) = key.name.split_once('.').expect("a test holds names to one section");
        if key_section != section {
            section = key_section;
            let _ = writeln!(text, "{}[{section}]", if text.is_empty() { "" } else { "\n" });
        }
        let _ = writeln!(text, "{:<36} # {} ({})", format!("{name} = {}", key.default), key.meaning, key.expected());
    }
    text
}

/// A completion script.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "train_low_mem", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
